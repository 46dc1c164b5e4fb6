"""Weights of which each rank has a share, as people's code sees them outside of their layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from strategies.errors import ModelError
from strategies.runtime.lightning.checkpoints.rank_folder import load_state_dict
from tests.ranks.comparison import CLASSES, WIDTH, equal_to_stock, examples, train
from tests.ranks.expert_training import HIDDEN, ExpertCase, ExpertModel
from tests.ranks.fit import SaveAt, fit
from tests.ranks.pool import Ranks
from tests.ranks.training import Sentences

pytestmark = pytest.mark.distributed


def _seldom(*row: Any) -> Any:
    """Of the full matrix alone."""
    return pytest.param(*row, marks=pytest.mark.full)


class Mixed(ExpertModel):
    """Experts in each block; its hooks look at them."""

    def __init__(self) -> None:
        super().__init__(ExpertCase())

    def loaders(self, *, replicas: int) -> DataLoader[Any]:
        return DataLoader(Sentences(16), batch_size=4 * replicas)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch["tokens"]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(loss, batch["targets"].flatten())

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        return torch.nn.functional.cross_entropy(
            tensors[0].flatten(0, 1), batch["targets"].flatten()
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ClippedExperts(Mixed):
    """A constraint on each stack, own clipping, norms, and a forward of the whole."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        stack = self.blocks[1][1].stacks["up"]
        stack.grad.div_(stack.grad.norm())

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            up = self.blocks[0][1].stacks["up"]
            up.div_(up.norm())
            self.blocks[2][1].stacks["down"][-1].zero_()
            self.log(
                "of_blocks", self.blocks[1](torch.ones(1, 2, HIDDEN, dtype=torch.float64)).sum()
            )
        self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())


def ema() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.8)]


EXPERTS: dict[str, dict[str, Any]] = {
    "dp2-ep2": {"dp": 2, "ep": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "dp2-tp2-ep2-sliced": {"dp": 2, "tp": 2, "ep": 2, "expert_tp": True},
    "tp2-sliced": {"tp": 2, "expert_tp": True},
}


@pytest.mark.parametrize(
    "layout",
    [n if n == "dp2-ep2" else pytest.param(n, marks=pytest.mark.full) for n in EXPERTS],
)
def test_a_hook_sees_all_experts(layout: str, ranks: Callable[[int], Ranks]) -> None:
    given = {"num_microbatches": 2, "seed": 0, "tp": 1, **EXPERTS[layout]}
    equal_to_stock(ranks, ClippedExperts, "tp2", strategy=given, callbacks=ema)


@pytest.mark.full
def test_a_hook_that_lists_units_of_other_stages_is_refused_with_the_name_of_a_weight(
    ranks: Callable[[int], Ranks],
) -> None:
    strategy = {"num_microbatches": 2, "pp": 2, "dp": 2, "ep": 2}
    with pytest.raises(ModelError, match=r"lists the parameters of .*, and \S+ is elsewhere\."):
        ranks(4).run(train, case=f"{__name__}:{ClippedExperts.__name__}", strategy=strategy)


class ByHand(Mixed):
    """A plan of its own; hooks use all of what it cuts."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"embedding": "embedding_rowwise", "blocks.*.0": "colwise_rep"}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def on_train_batch_end(self, *_: Any) -> None:
        tokens = torch.arange(6).view(2, 3)
        with torch.no_grad():
            self.blocks[0][0].weight.div_(self.blocks[0][0].weight.norm())
            self.log("of_all", self(tokens).square().mean())
            self.log("of_copy", copy.deepcopy(self.blocks[1])(self.embedding(tokens)).sum())


@pytest.mark.full
def test_a_hook_sees_whole_weights_of_a_plan_by_hand(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, ByHand, "tp2", strategy={"num_microbatches": 2}, callbacks=ema)


class PenaltyOfExperts(Mixed):
    """Its units are the pipeline's; what follows them is written for whole weights."""

    def weight(self) -> Tensor:
        return self.blocks[1][1].stacks["up"]

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        loss = super().pipeline_result(tensors, batch, batch_idx, mode)
        return loss + self.weight().norm() if self.global_step >= 1 else loss


class PenaltyByHand(PenaltyOfExperts, ByHand):
    def weight(self) -> Tensor:
        return self.blocks[1][0].weight


@pytest.mark.parametrize(
    ("case", "strategy", "name"),
    [
        (PenaltyOfExperts, {"pp": 1, "dp": 2, "ep": 2}, r"blocks\.1\.1\.stacks\.up .* or use ep=1"),
        (PenaltyByHand, {"pp": 1, "tp": 2}, r"blocks\.1\.0\.weight .* or use tp=1"),
    ],
)
def test_a_unit_module_that_takes_a_share_for_the_whole_is_refused_with_its_name(
    case: type[Any], strategy: dict[str, Any], name: str, ranks: Callable[[int], Ranks]
) -> None:
    with pytest.raises(ModelError, match=f"norm takes {name}"):
        ranks(2).run(
            train,
            case=f"{__name__}:{case.__name__}",
            strategy={"num_microbatches": 2, **strategy},
        )


class Sizes(pl.LightningModule):
    """Layers of many kinds; ``late`` uses their weights outside of their own forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)
        self.odd, self.head = nn.Linear(WIDTH, 21), nn.Linear(21, CLASSES)
        self.kept = [self.a.weight, self.fused.bias]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x + self.b(F.gelu(self.a(x)))).split(WIDTH, dim=-1)
        return self.head(F.gelu(self.odd(q * k.sigmoid() + v)))  # type: ignore[no-any-return]

    def late(self, x: Tensor) -> Tensor | float:
        return 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if self.global_step >= 1:
            loss = loss + self.late(batch[0])
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PenaltyLater(Sizes):
    def late(self, x: Tensor) -> Tensor:
        return 0.1 * self.a.weight.norm() + self.odd.bias.square().sum() / self.odd.weight.numel()


class AllLater(Sizes):
    def late(self, x: Tensor) -> Tensor:
        total = sum(p.square().sum() / p.shape[0] for p in self.parameters())
        return 0.01 * total + torch.cat([p.flatten() for p in self.kept]).norm()


class OtherLayerLater(Sizes):
    """Weights of a layer in the place of another one's: a tied decoder, say."""

    def late(self, x: Tensor) -> Tensor:
        back = F.linear(F.linear(x, self.a.weight, self.a.bias), self.a.weight.t())
        with torch.no_grad():
            wanted = x @ self.fused.weight.data.t()[:, :WIDTH]
        return 0.1 * (back - wanted).square().mean()


class ValidatedAlone(Sizes):
    """Trains without; the validation step reads them."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = F.linear(batch[0], self.a.weight, self.a.bias)
        self.log("val", F.linear(F.gelu(x), self.a.weight.t()).square().mean())
        self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())
        self.log("number", float(sum(p.numel() for p in self.parameters())))
        self.log("odd", self.odd.weight.detach()[-1].sum() + self.fused.bias[WIDTH])


LATER = [PenaltyLater, ValidatedAlone, AllLater, OtherLayerLater]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(
            case, layout, marks=() if layout == "tp2" and case in LATER[:2] else pytest.mark.full
        )
        for case in LATER
        for layout in ("tp2", "dp2-tp2")
    ],
)
def test_a_step_that_reads_a_weight_later_has_all_of_it(
    case: Callable[[], Sizes], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


class Units(Sizes):
    """Units without a plan: what is cut is found, and compared unit by unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.second = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, CLASSES))
        del self.a, self.b, self.fused, self.odd, self.head, self.kept

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]

    def late(self, x: Tensor) -> Tensor:
        return self.first[0].weight.norm() + self.second[0].bias.square().sum()

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("second", self.second)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Any:
        loss = F.cross_entropy(tensors[0], batch[1])
        return loss + self.late(batch[0]) if self.global_step >= 1 else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.pipeline_result((self(batch[0]),), batch, batch_idx, "train")

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.log("ones", self(torch.ones(2, WIDTH, dtype=torch.float64)).sum())
            self.first[0].weight.div_(self.first[0].weight.norm())


def test_units_without_a_plan_have_whole_weights_outside_of_their_layers(
    ranks: Callable[[int], Ranks],
) -> None:
    equal_to_stock(ranks, Units, "tp2", callbacks=ema)


def _unit(gradient: Tensor) -> Tensor:
    return gradient / (1 + gradient.norm())


class HookedBefore(Sizes):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(_unit)


class HookedLater(Sizes):
    def on_train_start(self) -> None:
        self.a.weight.register_hook(_unit)


class HookedByOptimizers(Sizes):
    def configure_optimizers(self) -> Any:
        self.b.weight.register_hook(_unit)
        return super().configure_optimizers()


class HookedExperts(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][1].stacks["up"].register_hook(_unit)


class HookedBehindAccumulation(Sizes):
    def on_fit_start(self) -> None:
        self.a.weight.register_post_accumulate_grad_hook(print)


@pytest.mark.full
def test_a_layer_stays_whole_where_a_hook_looks_at_its_gradient(
    ranks: Callable[[int], Ranks],
) -> None:
    equal_to_stock(ranks, HookedBefore, "tp2", strategy={"num_microbatches": 1})


class Began(pl.Callback):
    reads_weights = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        raise AssertionError("a refusal comes before the first step")


def began() -> list[pl.Callback]:
    return [Began()]


@pytest.mark.parametrize(
    ("case", "strategy", "message"),
    [
        (HookedLater, {"pp": 1, "tp": 2}, r"a\.weight has a hook .* share .* or use tp=1\."),
        _seldom(HookedByOptimizers, {"pp": 1, "tp": 2}, r"b\.weight has a hook .* or use tp=1\."),
        _seldom(
            HookedExperts, {"pp": 1, "dp": 2, "ep": 2}, r"stacks\.up has a hook .* or use ep=1\."
        ),
        (HookedBehindAccumulation, {"pp": 2}, r"a\.weight has a hook of register_post_accumulate"),
    ],
)
def test_a_hook_that_would_see_a_share_of_a_gradient_is_refused_with_its_name(
    case: type[Any], strategy: dict[str, Any], message: str, ranks: Callable[[int], Ranks]
) -> None:
    with pytest.raises(ModelError, match=message):
        ranks(2).run(
            train,
            case=f"{__name__}:{case.__name__}",
            strategy=strategy,
            callbacks=f"{__name__}:began",
        )


class DrawnByOptimizers(Sizes):
    def configure_optimizers(self) -> Any:
        nn.init.orthogonal_(self.a.weight)
        return super().configure_optimizers()


def test_who_computes_with_a_share_where_optimizers_are_made_is_refused(
    ranks: Callable[[int], Ranks],
) -> None:
    message = r"configure_optimizers\(\) computes with \(\w+\) a\.weight, .* or use tp=1"
    with pytest.raises(ModelError, match=message):
        ranks(2).run(
            train, case=f"{__name__}:{DrawnByOptimizers.__name__}", strategy={"pp": 1, "tp": 2}
        )


class GroupedBySize(Sizes):
    """An optimizer that makes its state at once, of groups by size."""

    def configure_optimizers(self) -> Any:
        small = [p for p in self.parameters() if p.numel() <= 100 or p.shape[0] < CLASSES + 1]
        known = {id(p) for p in small}
        rest = [p for p in self.parameters() if p.ndim and id(p) not in known]
        return torch.optim.Adagrad([{"params": small, "lr": 0.1}, {"params": rest}], lr=0.01)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "pp2-tp2"])
def test_groups_by_size_are_those_of_one_process(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, GroupedBySize, layout)


class MomentOfShare(Sizes):
    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.log("moment", optimizer.state[self.a.weight]["momentum_buffer"].norm())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.full
def test_moments_of_a_share_are_refused_in_hooks(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(ModelError, match="a hook looks at the state of an optimizer"):
        ranks(2).run(
            train, case=f"{__name__}:{MomentOfShare.__name__}", strategy={"pp": 1, "tp": 2}
        )


class ChangesState(Sizes):
    """Writes other weights than it has."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["a.weight"] = state["a.weight"] / state["a.weight"].norm()


def save(path: str, kind: str) -> tuple[Tensor, Tensor]:
    """A weight of the module, and of its checkpoint."""
    strategy = {"pp": 1, "tp": 2, "num_microbatches": 2, "checkpoints": kind}
    callbacks = [SaveAt(2, path)]
    with fit(
        ChangesState(), examples(), strategy=strategy, max_steps=2, callbacks=callbacks
    ) as run:
        whole = run.strategy.full_state_dict(everywhere=True)["a.weight"]
        run.strategy.barrier()
    return whole, load_state_dict(Path(path))["a.weight"]


@pytest.mark.parametrize("kind", ["folder", pytest.param("file", marks=pytest.mark.full)])
def test_a_checkpoint_has_what_a_hook_makes_of_the_whole_state(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for whole, saved in ranks(2).run(save, path=str(tmp_path / "saved.ckpt"), kind=kind):
        assert torch.allclose(saved, whole / whole.norm(), rtol=0, atol=1e-12)


class Validated(Sizes):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))


def averaged(
    path: str, strategy: dict[str, Any] | None, resume: str | None = None
) -> list[dict[str, Tensor]]:
    """The averages at the end, and those of a checkpoint of step 6."""
    callbacks = [*ema(), *([SaveAt(6, path)] if resume is None else [])]
    with fit(
        Validated(),
        examples(),
        examples(seed=2),
        strategy=strategy,
        max_epochs=2,
        callbacks=callbacks,
        resume=resume,
    ) as run:
        if strategy is None:
            return [dict(run.module.state_dict()), load_state_dict(Path(path))]
        whole = run.strategy.full_state_dict(everywhere=True)
        run.strategy.barrier()
        return [whole, load_state_dict(Path(path))]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_averages_are_saved_and_go_on(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    (stock,) = ranks(1).run(averaged, path=str(tmp_path / "stock.ckpt"), strategy=None)
    strategy = {"tp": 2, "num_microbatches": 2, "checkpoints": kind}
    path = str(tmp_path / "saved.ckpt")
    found = ranks(2).run(averaged, path=path, strategy=strategy)
    if kind == "file":
        found += ranks(2).run(averaged, path=path, strategy=strategy, resume=path)
    for each in found:
        for own, expected in zip(each, stock, strict=True):
            assert own.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(own[name], value, rtol=0, atol=1e-10), name
