"""``tp`` on modules that have never heard of it: the same numbers, checkpoints for any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.errors import ModelError
from strategies.models.tensor_parallel import plan_trial, sharded_layers
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.share_values import WholeShapeValues
from tests.distributed.fresh_modules import FRESH
from tests.distributed.unannotated import MODULES, STEPS, Module
from tests.ranks.fit import SaveAt, fit, trainer_of
from tests.ranks.pool import Ranks

TOLERANCE = 1e-10

pytestmark = pytest.mark.distributed


def build(name: str) -> Module:
    torch.manual_seed(1)
    return (MODULES | FRESH)[name]().double()


def train(
    name: str,
    pp: int,
    tp: int,
    save: str | None = None,
    resume: str | None = None,
    module: Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    module = build(name) if module is None else module
    with fit(
        module,
        strategy={"pp": pp, "tp": tp, "num_microbatches": 2, "seed": 0, **options},
        resume=resume,
        losses="train_loss",
        max_steps=STEPS,
        gradient_clip_val=0.5,
        callbacks=[] if save is None else [SaveAt(3, save)],
    ) as run:
        return {
            "losses": run.losses,
            "shards": run.shards,
            "weights": run.weights,
            "tp_rank": run.where.tp_rank,
            "wholes": run.engine.model._sharding.values.wholes if tp > 1 else {},
        }


def compare(alone: dict[str, Any], results: list[dict[str, Any]]) -> None:
    missing = set(alone["weights"])
    for result in results:
        skipped = len(alone["losses"]) - len(result["losses"])
        assert result["losses"] == pytest.approx(alone["losses"][skipped:], abs=TOLERANCE)
        for name, value in result["weights"].items():
            whole, shard = alone["weights"][name], result["shards"].get(name)
            expected = whole if shard is None else shard.local(whole, result["tp_rank"])
            assert value.shape == expected.shape, name
            assert (value - expected).abs().max().item() < TOLERANCE, name
            missing.discard(name)
    assert not missing
    assert any(result["shards"] for result in results)


EVERYDAY = ("fused_view",)


@pytest.mark.parametrize(
    "name",
    [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in MODULES | FRESH],
)
def test_a_module_that_declares_nothing_keeps_parity(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = ranks(1).run(train, name=name, pp=1, tp=1)
    pp = 1 if name in EVERYDAY else 2  # Two stages, shared: the checkpoint below.
    compare(alone, ranks(2 * pp).run(train, name=name, pp=pp, tp=2))


@pytest.mark.full
@pytest.mark.parametrize("name", MODULES)
def test_four_ranks_share_what_comes_out_even_and_keep_parity(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = ranks(1).run(train, name=name, pp=1, tp=1)
    compare(alone, ranks(8).run(train, name=name, pp=2, tp=4))


def test_a_checkpoint_of_shares_goes_on_anywhere(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Queries, keys and values from one matrix: a rank has a share of each, three boxes."""
    path, name = str(tmp_path / "shares.ckpt"), "fused_split"
    (alone,) = ranks(1).run(train, name=name, pp=1, tp=1)
    cut = ranks(4).run(train, name=name, pp=2, tp=2, save=path)
    compare(alone, cut)
    assert any(shard.segments == 3 for result in cut for shard in result["shards"].values())
    (resumed,) = ranks(1).run(train, name=name, pp=1, tp=1, resume=path)
    assert resumed["losses"] == pytest.approx(alone["losses"][3:], abs=TOLERANCE)
    compare(alone, ranks(2).run(train, name=name, pp=1, tp=2, resume=path))


FUSED = ("view", "interleaved", "split", "slices", "scaled", "chunk")


@pytest.mark.full
@pytest.mark.parametrize("name", [*(f"fused_{how}" for how in FUSED), "glu", "swiglu", "swin_like"])
def test_values_of_several_parts_are_taken_apart_without_being_put_together(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    for result in ranks(2).run(train, name=name, pp=1, tp=2):
        assert result["wholes"] == {}


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb_h1"},
        {"schedule": "chimera"},
        {"split_backward": True},
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "layer"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_whatever_else_is_asked_for_keeps_parity(
    options: dict[str, Any], ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = ranks(1).run(train, name="gpt", pp=1, tp=1)
    compare(alone, ranks(4).run(train, name="gpt", pp=2, tp=2, **options))


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "vgg"])
def test_without_a_flush_shares_see_the_weights_that_the_whole_would(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    whole = ranks(2).run(train, name=name, pp=2, tp=1, schedule="pipedream_2bw")
    alone = whole[0] | {"weights": whole[0]["weights"] | whole[1]["weights"]}
    compare(alone, ranks(4).run(train, name=name, pp=2, tp=2, schedule="pipedream_2bw"))


@pytest.mark.full
def test_sharded_optimizers_hold_shares_of_shares(ranks: Callable[[int], Ranks]) -> None:
    whole, _ = ranks(2).run(train, name="gpt", pp=1, tp=1, dp=2)
    compare(whole, ranks(4).run(train, name="gpt", pp=1, tp=2, dp=2, overlap="zero1"))


class _ByHand(Module):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "colwise", "net.2": "rowwise"}


def train_by_hand(tp: int) -> dict[str, Any]:
    module = build("mlp")
    return train("mlp", 1, tp, module=_ByHand(module.net, module._make).double())


def test_a_plan_by_hand_wins(ranks: Callable[[int], Ranks]) -> None:
    (alone,) = ranks(1).run(train_by_hand, tp=1)
    results = ranks(2).run(train_by_hand, tp=2)
    compare(alone, results)
    assert set(results[0]["shards"]) == {"net.0.weight", "net.0.bias", "net.2.weight"}


@contextmanager
def broken(part: str) -> Iterator[None]:
    """Inside, found plans are carried out wrongly; as a rule of a library may be."""
    with pytest.MonkeyPatch.context() as patched:
        if part == "sum":  # Shares of outputs are not added up.
            patched.setattr(sharded_layers, "leave", lambda partial, ranks, whole=False: partial)
        elif part == "entrance":  # Gradients of an input are not added up.
            patched.setattr(Entrance, "__call__", lambda self, tensor: tensor)
        elif part == "bias":  # Added once per rank.
            own = sharded_layers.RowLinear.forward

            def forward(self: Any, input: Any) -> Any:
                found = own(self, input)
                return found if self.bias is None else found + self.bias

            patched.setattr(sharded_layers.RowLinear, "forward", forward)
        elif part == "alone":  # One rank of those that share matrices cannot run its share.
            own_numbers = plan_trial._numbers

            def numbers(module: Any, example: Any, values: Any) -> Any:
                found = own_numbers(module, example, values)
                if isinstance(values, WholeShapeValues) and values.ranks.rank == 1:
                    raise RuntimeError("no room")
                return found

            patched.setattr(plan_trial, "_numbers", numbers)
        elif part == "one":  # Shares of one rank are other numbers.
            own_compare = plan_trial.compare_steps

            def compare(*given: Any, **named: Any) -> Any:
                return "what net.5 gives differs" if given[3] == 1 else own_compare(*given, **named)

            patched.setattr(plan_trial, "compare_steps", compare)
        else:  # What lies cut is taken for what lies cut in another order.
            own_whole = WholeShapeValues.whole

            def whole(self: Any, value: Any) -> Any:
                found = own_whole(self, value)
                return found.roll(1, -1) if self.is_share(value) else found

            patched.setattr(WholeShapeValues, "whole", whole)
        yield


def train_broken(part: str, name: str) -> tuple[str, bool]:
    """The refusal, and whether a weight has changed before it."""
    module = build(name)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    with broken(part), pytest.raises(ModelError) as refused:
        train(name, 1, 2, module=module)
    after = module.state_dict()
    shards = [n for n, p in before.items() if p.shape == after[n].shape]
    return str(refused.value), any(not torch.equal(before[n], after[n]) for n in shards)


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("sum", "mlp", "what net.5 gives differs"),
        ("alone", "mlp", "on rank 1 of 2 alone"),
        pytest.param("one", "mlp", "what net.5 gives differs", marks=pytest.mark.full),
        pytest.param("bias", "mlp", "what net.5 gives differs", marks=pytest.mark.full),
        pytest.param("entrance", "mlp", "the gradient of net.", marks=pytest.mark.full),
        pytest.param("order", "fused_scores", "gives differs", marks=pytest.mark.full),
        pytest.param("entrance", "vit", "the gradient of net.", marks=pytest.mark.full),
    ],
)
def test_a_plan_that_computes_something_else_is_refused_by_layer_before_the_first_step(
    part: str, name: str, said: str, ranks: Callable[[int], Ranks]
) -> None:
    for message, changed in ranks(2).run(train_broken, part=part, name=name):
        assert message.startswith("tp=2: on the first microbatch the cut module computes other")
        assert said in message
        assert message.endswith(
            "Leave that layer whole by a tensor_parallel_plan() of your own, or use tp=1."
        )
        assert not changed


def test_compiled_layers_are_refused(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(ModelError, match=r"compile=true with tp=2: the layers of"):
        ranks(2).run(train, name="mlp", pp=1, tp=2, compile=True)


class _Evaluated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        *inputs, target = batch
        outputs = self.net(*inputs)
        self.log("val_loss", self._loss(outputs, target))
        self.log("right", (outputs.argmax(-1) == target).double().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(*batch[:-1]).softmax(-1)

    val_dataloader = predict_dataloader = Module.train_dataloader


def evaluate(name: str) -> tuple[dict[str, float], torch.Tensor]:
    given = build(name)
    module = _Evaluated(given.net, given._make).double()
    trainer: Any = trainer_of({"tp": 2, "num_microbatches": 2, "seed": 0})
    (found,) = trainer.validate(module, verbose=False)
    chances = torch.cat(trainer.predict(module))
    trainer.strategy.engine.close()
    return dict(found), chances


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlp", "vgg"])
def test_evaluation_is_that_of_the_whole_module(name: str, ranks: Callable[[int], Ranks]) -> None:
    module = build(name).eval()
    losses, chances = [], []
    with torch.no_grad():
        for *inputs, target in module.train_dataloader():
            outputs = module.net(*inputs)
            losses.append(module._loss(outputs, target))
            chances.append(outputs.softmax(-1))
    for found, predicted in ranks(2).run(evaluate, name=name):
        assert found["val_loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=TOLERANCE)
        assert (predicted - torch.cat(chances)).abs().max().item() < TOLERANCE
