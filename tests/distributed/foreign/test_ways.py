"""Steps that call other layers from some epoch on, or for some batches: each way has its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import ModelError, PlanError
from tests.ranks.comparison import (
    BATCH,
    LAYOUTS,
    TOLERANCE,
    Net,
    equal_to_stock,
    examples,
    spread,
    train,
)
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Adam(Net):
    """Whose state tells a gradient of zeros from none."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LossLater(Adam):
    """A second loss, over another head, from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        loss = cross_entropy(self.head(hidden), batch[1])
        if self.current_epoch > 0:
            loss = loss + mse_loss(self.other(hidden), batch[0])
            self.log("second", loss)
        return loss


class MiddleLeftOut(Adam):
    """Some layers are left out for every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        for index, layer in enumerate(self.net):
            if batch_idx % 2 and index in (2, 3):
                continue
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden), batch[1])


class OtherOperations(Adam):
    """The same layers, with other operations between them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        hidden = hidden * 2 if self.global_step >= 2 else torch.sin(hidden) + hidden
        return cross_entropy(self.head(self.net[4:](hidden)), batch[1])


class LogsNowAndThen(Adam):
    """A number that is no mean, and not logged for the first batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        if batch_idx == 2:
            self.log("spread", logits.std())
        return cross_entropy(logits, batch[1])


class Body(torch.nn.Module):
    """A switch inside of a submodule that holds layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.short = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.short and index == 1:
                continue
            x = layer(x).tanh()
        return x


class Switched(Adam):
    def __init__(self) -> None:
        super().__init__()
        self.net = Body()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.short = batch_idx % 3 == 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net.short = batch_idx == 1
        logits = self(batch[0])
        self.log("validated", cross_entropy(logits, batch[1]))
        self.net.short = False


class ByContents(Adam):
    """What the batch has decides, and all of its rows have it alike."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        if batch[0].shape[1] == 8 and int(batch[1].numel()) and batch_idx in (1, 2):
            hidden = self.net[4](hidden)
        return cross_entropy(self.head(self.net[5:](hidden)), batch[1])


class Frozen(Adam):
    """Layers without gradients for a while, and another way at the same time."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        if self.current_epoch > 0:
            hidden = self.net[4](hidden)
        return cross_entropy(self.head(self.net[6:](hidden)), batch[1])


class HeadBetween(Adam):
    """A loss before the last layers, for every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.between = torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        loss = cross_entropy(self.head(self.net[4:](hidden)), batch[1])
        if batch_idx % 2 == 0:
            loss = loss + 0.3 * cross_entropy(self.between(hidden), batch[1])
        return loss


class Counted(Adam):
    """What decides is counted up by the step itself, or set by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.on = 0, False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.on = batch_idx == 3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        hidden = self.net[:4](batch[0])
        if self.count > 5 or self.on:
            hidden = hidden + self.net[4](hidden)
        return cross_entropy(self.head(self.net[5:](hidden)), batch[1])


class InForward(Adam):
    """The branch is in the module's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[:4](x)
        if self.current_epoch > 0:
            hidden = self.net[4](hidden)
        return self.head(self.net[5:](hidden))  # type: ignore[no-any-return]


class ByIndex(Adam):
    """No branch in the code: a layer is picked, and others are run so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:2](batch[0])
        for layer in self.net[2 : 4 + 2 * self.current_epoch]:
            hidden = layer(hidden)
        return cross_entropy(self.heads[batch_idx % 2](hidden), batch[1])


class NoisyLater(Adam):
    """Rows are dropped out and made noisy before the network, but not at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.current_epoch == 1:
            share = torch.rand(())
            x = share * x + (1 - share) * torch.nn.functional.dropout(x, 0.3)
        if self.current_epoch == 2:
            x = x + 0.1 * torch.randn_like(x)
        return cross_entropy(self(x), y)


class NoisyLaterByHand(NoisyLater):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]


class PenaltyLater(Adam):
    """Behind the last layer, a value from before it is needed from the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        early = self.net[:2](batch[0])
        loss = cross_entropy(self.head(self.net[2:](early)), batch[1])
        if self.current_epoch > 0:
            loss = loss + 0.1 * early.pow(2).mean()
        return loss


class ProbedFirst(Adam):
    """The backbone runs without gradients in the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.set_grad_enabled(self.current_epoch > 0):
            hidden = self.net(batch[0])
        return cross_entropy(self.head(hidden), batch[1])


class OtherNumberLater(Adam):
    """Under one name a mean at first, and then a number that is none; so in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("size", logits.mean() if self.current_epoch < 1 else logits.norm())
        return cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0] if self.current_epoch < 1 else batch[0] - batch[0].mean(0)
        logits = self(x)
        self.log("validated", logits.mean() if self.current_epoch < 2 else logits.norm())


class HeadsInTurn(Adam):
    """The same operations every time, on what another head gives."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        second = self.second(self.side(batch[0]))
        first = self.head(self.net(batch[0]))
        return cross_entropy(second if batch_idx % 2 else first, batch[1])


class SkipLater(Adam):
    """The same operations every time, between other layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.net[:2](batch[0])
        second = self.net[2:4](first)
        third = self.net[4:6](second)
        last = self.net[6:](third) + (first if batch_idx % 2 else second).sigmoid()
        return cross_entropy(self.head(last), batch[1])


@spread(
    [
        *(LossLater, MiddleLeftOut, Switched, Counted, PenaltyLater),
    ],
    seldom=[
        *(HeadBetween, LogsNowAndThen, SkipLater, ByContents, Frozen, ProbedFirst),
        *(OtherOperations, InForward, HeadsInTurn),
    ],
)
def test_each_way_trains_as_under_stock_lightning(
    ranks: Callable[[int], Ranks], case: Any, layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=3)


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "case",
    [
        NoisyLater,
        OtherNumberLater,
        pytest.param(NoisyLaterByHand, marks=pytest.mark.full),
    ],
)
def test_draws_and_numbers_of_the_whole_batch_from_some_epoch_on(
    ranks: Callable[[int], Ranks], case: Any, layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=3)


def resume(*, folder: str, strategy: dict[str, Any] | None) -> dict[str, Tensor]:
    """Two epochs, and two more by another Trainer from a file."""
    file = None
    if strategy is not None:
        strategy = {"num_microbatches": 4, "timeout_s": 20, **strategy}
    for epochs in (2, 4):
        module = LossLater().double()  # Stock Lightning rounds what it loads to a module's type.
        options = {"max_epochs": epochs, "default_root_dir": folder}
        with fit(module, examples(), strategy=strategy, resume=file, **options) as run:
            file = f"{folder}/it.ckpt"
            run.trainer.save_checkpoint(file)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_a_run_that_goes_on_begins_in_a_later_way(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for name in ("stock", "piped"):
        (tmp_path / name).mkdir()
    (stock,) = ranks(1).run(resume, folder=str(tmp_path / "stock"), strategy=None)
    strategy = LAYOUTS["zb_v"]
    for weights in ranks(2).run(resume, folder=str(tmp_path / "piped"), strategy=strategy):
        for name, value in weights.items():
            assert torch.allclose(value, stock[name], rtol=0, atol=TOLERANCE), name


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("1f1b-dp2", marks=pytest.mark.full)])
def test_layers_are_picked_without_a_branch(ranks: Callable[[int], Ranks], layout: str) -> None:
    equal_to_stock(ranks, ByIndex, layout, max_epochs=3)


class Kept(Adam):
    """What a step keeps of some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        if batch_idx % 2:
            self.kept.append(logits.detach())
            self.total += float(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("kept", float(sum(len(each) for each in self.kept)), sync_dist=True)
        self.log("total", self.total, sync_dist=True)


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])
def test_what_some_batches_leave_is_counted_once(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    equal_to_stock(ranks, Kept, layout, strategy={"recompute": "full"}, max_epochs=2)


@pytest.mark.parametrize(
    ("strategy", "trainer"),
    [
        ({"overlap": "zero1"}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        pytest.param({"recompute": "full"}, {}, marks=pytest.mark.full),
        pytest.param({"recompute": "selective", "overlap": "none"}, {}, marks=pytest.mark.full),
        pytest.param(
            {"schedule": "interleaved_1f1b", "stages_per_rank": 2}, {}, marks=pytest.mark.full
        ),
    ],
)
def test_ways_beside_other_options(
    ranks: Callable[[int], Ranks], strategy: dict[str, Any], trainer: dict[str, Any]
) -> None:
    equal_to_stock(ranks, MiddleLeftOut, "1f1b-dp2", strategy=strategy, max_epochs=2, **trainer)


# -- what cannot be followed is said when it happens -----------------------------------------------


class NoLayers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            return None
        return super().training_step(batch, batch_idx)


class LeftOutByRank(Net):
    """``trainer.strategy`` knows ranks of the pipeline, which a step must not go by."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        if batch_idx < 2 or self.trainer.strategy.coordinates.pp_rank == 0:
            hidden = self.net[4](hidden)
        return cross_entropy(self.head(self.net[5:](hidden)), batch[1])


class OtherOrder(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        layers = list(self.net)
        for layer in reversed(layers) if batch_idx else layers:
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden), batch[1])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (NoLayers, "training_step calls no layer for batch 2, .* in the loader"),
        (LeftOutByRank, "something else than before for batch 2, and not on rank"),
        (OtherOrder, "must run the layers in the order of the first one"),
    ],
)
def test_a_way_that_cannot_be_followed_is_refused_when_it_comes(
    ranks: Callable[[int], Ranks], case: Any, words: str
) -> None:
    name = f"{case.__module__}:{case.__qualname__}"
    with pytest.raises(ModelError, match=words):
        ranks(2).run(train, case=name, strategy=LAYOUTS["1f1b"] | {"timeout_s": 5})


class Logged(MiddleLeftOut):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.full
def test_ways_through_layers_that_are_cut_over_ranks(ranks: Callable[[int], Ranks]) -> None:
    name = f"{Logged.__module__}:{Logged.__qualname__}"
    (stock,) = ranks(1).run(train, strategy=None, case=name, max_epochs=3)
    for fitted in ranks(4).run(train, strategy={"pp": 2, "tp": 2}, case=name, max_epochs=3):
        assert fitted.metrics == pytest.approx(stock.metrics, abs=TOLERANCE)


# -- replicas ----------------------------------------------------------------------------------


class ByKind(Adam):
    """What kind of rows a batch has decides, and replicas have batches of different kinds."""

    def loaders(self, replicas: int) -> DataLoader[Any]:
        x, y = examples().dataset.tensors  # type: ignore[attr-defined]
        x = x.clone()
        for row in range(len(x)):
            x[row, 0] = float((row // (2 * BATCH) + row % 2) % 2)  # the sampler deals rows by turns
        return DataLoader(TensorDataset(x, y), batch_size=BATCH * replicas)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        if batch[0][0, 0] > 0.5:
            hidden = self.net[4](hidden)
        return cross_entropy(self.head(self.net[5:](hidden)), batch[1])


@pytest.mark.parametrize("overlap", ["zero1", pytest.param("none", marks=pytest.mark.full)])
def test_replicas_may_go_different_ways(ranks: Callable[[int], Ranks], overlap: str) -> None:
    """The mean over replicas; a layer that only one of them calls gets half of its gradient."""
    module = ByKind().double()
    optimizer = module.configure_optimizers()
    for x, y in module.loaders(2):
        optimizer.zero_grad()
        for replica in range(2):
            loss = module.training_step((x[replica::2], y[replica::2]), 0)
            (loss / 2).backward()
        optimizer.step()
    name = f"{ByKind.__module__}:{ByKind.__qualname__}"
    strategy = LAYOUTS["zb_v-dp2"] | {"overlap": overlap}
    for fitted in ranks(4).run(train, case=name, strategy=strategy):
        for key, value in module.named_parameters():
            assert torch.allclose(fitted.weights[key], value, rtol=0, atol=TOLERANCE), key


class ByNumberOfReplica(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        alone = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        hidden = self.net[:4](batch[0])
        hidden = self.net[4](hidden) if alone else hidden
        return cross_entropy(self.head(self.net[5:](hidden)), batch[1])


def test_replicas_that_begin_differently_are_refused_before_the_first_step(
    ranks: Callable[[int], Ranks],
) -> None:
    name = f"{ByNumberOfReplica.__module__}:{ByNumberOfReplica.__qualname__}"
    with pytest.raises(PlanError, match=r"(?s)the same stages.*net\.4"):
        ranks(4).run(train, case=name, strategy=LAYOUTS["1f1b-dp2"] | {"timeout_s": 5})


class RankZeroFlag(Net):
    """Numbers that hooks set on rank 0 alone: one that the step does not read, one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.logged = self.seen = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.logged = self.seen = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.seen:
            batch_idx += 1
        return cross_entropy(self(batch[0]), batch[1])


def test_number_of_rank_zero(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, RankZeroFlag, "1f1b", strategy={"timeout_s": 600})
