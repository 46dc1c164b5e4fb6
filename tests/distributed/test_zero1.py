"""Sharded weights give what single-process training gives, and each replica keeps its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.ir.text import format_instruction, parse_instruction
from strategies.plan import Plan
from strategies.simulator.engine import simulate
from tests.distributed.test_parity import SHORT, check
from tests.distributed.test_training_details import Units, _loader
from tests.ranks.fit import SaveAt, trainer_of
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed
FULL = pytest.mark.full

CASES = [
    Case("interleaved_1f1b", pp=1, dp=2, clip=0.05),
    Case("zb_v", pp=2, dp=2, accumulation=2, clip=0.05, short_last=True),
    Case("chimera", pp=2, dp=1, clip=0.05, accumulation=2),
]
MORE = [
    Case("1f1b", pp=2, dp=2, clip=0.05),
    Case("foldx_fifo", pp=1, dp=2, short_last=True),
    Case("foldx_aiao", pp=1, dp=2, accumulation=2, clip=0.05),
    Case("1f1b", pp=1, dp=2, accumulation=2),
    Case("interleaved_1f1b", pp=2, dp=2, accumulation=2),
    Case("foldx_fifo", pp=2, dp=2, accumulation=2, clip=0.05),
    Case("foldx_aiao", pp=2, dp=2, short_last=True),
    Case("zb_v", pp=1, dp=2),
    Case("chimera", pp=2, dp=2, buckets_mb=25.0),
]


def _name(case: Case) -> str:
    more = "-clip" * (case.clip is not None) + "-ragged" * case.short_last
    return f"{case.schedule}-pp{case.pp}-dp{case.dp}-acc{case.accumulation}{more}"


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=FULL) for case in MORE)], ids=_name
)
def test_sharded_training_equals_a_single_process(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    results = check(replace(case, overlap="zero1", steps=SHORT), ranks)
    assert all(any("GATHER" in word for word in result["program"]) for result in results)


@pytest.mark.parametrize(
    "optimizer",
    ["AdamW", *(pytest.param(n, marks=FULL) for n in ("SGD", "RMSprop", "Adagrad", "NAdam"))],
)
def test_elementwise_optimizers_do_not_notice(
    optimizer: str, ranks: Callable[[int], Ranks]
) -> None:
    check(Case("1f1b", dp=2, steps=4, optimizer=optimizer, overlap="zero1"), ranks)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=FULL), 2])
def test_tied_embeddings_stay_whole_and_count_once(pp: int, ranks: Callable[[int], Ranks]) -> None:
    shape = small_shape(tie_embeddings=True)
    case = Case("foldx_fifo", pp=pp, dp=2, steps=SHORT, shape=shape, clip=0.05)
    check(replace(case, overlap="zero1"), ranks)


@pytest.mark.parametrize(
    ("pp", "dp", "schedule"),
    [*(pytest.param(pp, 4 // pp, "1f1b", marks=FULL) for pp in (1, 2)), (4, 1, "chimera")],
)
def test_optimizer_state_is_one_share_per_member(
    pp: int, dp: int, schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    case = Case(schedule, pp=pp, dp=dp, steps=2, buckets_mb=0.002)
    whole = ranks(4).run(train, case=case)
    shares = ranks(4).run(train, case=replace(case, overlap="zero1"))
    members = 4 // pp if schedule == "1f1b" else 2
    total = sum(result["state_elements"] for result in whole)
    assert sum(result["state_elements"] for result in shares) * members == total
    for before, after in zip(whole, shares, strict=True):
        # What does not divide is at most a row of elements per bucket and stage, for each moment.
        assert after["state_elements"] <= before["state_elements"] / members + 200
        assert after["state_elements"] > 0


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(name, marks=FULL) for name in ("1f1b", "foldx_aiao")), "chimera"]
)
def test_gathers_run_in_the_simulated_order_and_are_recorded(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    case = Case(schedule, pp=2, dp=2, steps=4, overlap="zero1")
    results = ranks(4).run(train, case=case)
    items = [parse_instruction(word) for result in results for word in result["program"]]
    buckets = {i.stage: 0 for i in items}
    for item in items:
        if item.bucket is not None:
            buckets[item.stage] = max(buckets[item.stage], item.bucket + 1)
    counts = tuple(buckets[stage] for stage in sorted(buckets))
    plan = Plan(schedule, 2, case.microbatches, buckets=counts, overlap="zero1")
    timeline = simulate(compile_plan(plan).train, UniformCosts(grad_reduce=1.0))
    for result in results:
        events = list(timeline.events(result["pp_rank"]))
        for kinds in (MICROBATCH_KINDS, {Kind.REDUCE}, {Kind.GATHER}):
            simulated = [
                format_instruction(event.instruction)
                for event in sorted(events, key=lambda event: (event.start, event.end))
                if event.instruction.kind in kinds
            ]
            spans = zip(result["program"], result["start"], strict=True)
            wanted = set(simulated)
            executed = [word for word, _ in sorted(spans, key=lambda s: s[1]) if word in wanted]
            assert executed == simulated
        # In the first step of all there is nothing to gather.
        spans = list(zip(result["program"], *result["last"], strict=True))
        gathers = [(word, start, end) for word, start, end in spans if "GATHER" in word]
        assert gathers
        for word, start, end in gathers:
            stage = word.removesuffix("GATHER")
            first = min(s for w, s, _ in spans if w.startswith(f"{stage}F"))
            assert start < end
            # The end is noted in the backend's thread, which may have to wait for a core.
            assert end < first + 0.1, "the stage's first forward waits for its gather"


class QuietSave(SaveAt):
    reads_weights = False


def train_and_save(case: Case, step: int, path: str) -> dict[str, Any]:
    return train(case, callbacks=[QuietSave(step, path)])


def train_resumed(case: Case, path: str) -> dict[str, Any]:
    return train(case, resume=path)


@pytest.mark.parametrize(
    "schedule", ["interleaved_1f1b", pytest.param("chimera", marks=pytest.mark.full)]
)
def test_a_checkpoint_does_not_tell_how_weights_were_sharded(
    schedule: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case(schedule, pp=2, dp=2, steps=5, overlap="zero1")
    world = ranks(4)
    path = str(tmp_path / "sharded.ckpt")
    whole = world.run(train_and_save, case=case, step=3, path=path)
    # An all-reduce of four adds in an order of its own.
    for overlap, tolerance in (("zero1", 0.0), ("grad_reduce", 1e-12)):
        resumed = world.run(train_resumed, case=replace(case, overlap=overlap), path=path)
        for one, other in zip(whole, resumed, strict=True):
            for name, value in one["parameters"].items():
                found = other["parameters"][name]
                assert torch.allclose(value, found, atol=tolerance, rtol=0), (overlap, name)
    # Another number of replicas, and back from one process to shards.
    alone = replace(case, schedule="gpipe", pp=1, dp=1, rows=16, overlap="grad_reduce")
    (resumed,) = ranks(1).run(train_resumed, case=alone, path=path)
    back = str(tmp_path / "alone.ckpt")
    ranks(1).run(train_and_save, case=alone, step=3, path=back)
    for result in world.run(train_resumed, case=case, path=back):
        for name, value in result["parameters"].items():
            assert torch.allclose(value, resumed["parameters"][name], atol=1e-10, rtol=0), name


class Watching(Callback):
    """Looks at the weights after each batch; says so, or does not."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]).clone())


class Blind(Watching):
    reads_weights = False


class Frozen(Units):
    """Trains only half of its weights, and hands all to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for unit in self.units[:4]:
            unit[0].weight.requires_grad_(False)


class Decaying(Units):
    """A schedule for the rate, two groups, and an extra weight that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.units[6].register_parameter("spare", torch.nn.Parameter(torch.ones(3)))

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if "bias" not in n]
        biases = [p for n, p in self.named_parameters() if "bias" in n]
        optimizer = torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.5}, {"params": biases, "lr": 0.1}], lr=0.01
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class NotElementwise(Units):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Freezing(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.units[-1][0].bias.requires_grad_(trainer.current_epoch == 0)


MODULES = {"frozen": Frozen, "decaying": Decaying, "adafactor": NotElementwise, "plain": Units}
CALLBACKS = {"none": None, "watching": Watching, "blind": Blind, "freezing": Freezing}


def fit(kind: str, overlap: str, callback: str = "none") -> dict[str, Any]:
    import warnings

    made = CALLBACKS[callback]
    callbacks = [] if made is None else [made()]
    strategy: Any = {
        "pp": 1, "dp": 2, "num_microbatches": 2, "overlap": overlap, "bucket_mb": 1e-4,
    }  # fmt: skip
    module = MODULES[kind]()
    trainer = trainer_of(strategy, max_epochs=2, callbacks=callbacks)
    strategy = trainer.strategy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, _loader(4), _loader(4))
        except Exception as error:
            return {"error": str(error)}
    result = {
        "warnings": [str(w.message) for w in caught if "zero1" in str(w.message)],
        "parameters": {n: p.detach().clone() for n, p in module.named_parameters()},
        "seen": getattr(callbacks[0], "seen", None) if callbacks else None,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "norm": strategy.stats.gradient_norm,
    }
    strategy.engine.close()
    return result


@pytest.mark.parametrize("kind", ["frozen", "decaying"])
def test_groups_frozen_and_unused_weights_are_as_without_shards(
    kind: str, ranks: Callable[[int], Ranks]
) -> None:
    plain = ranks(2).run(fit, kind=kind, overlap="grad_reduce")
    sharded = ranks(2).run(fit, kind=kind, overlap="zero1")
    for one, other in zip(plain, sharded, strict=True):
        assert one["rates"] == other["rates"]
        assert other["norm"] == pytest.approx(one["norm"], rel=1e-12)
        for name, value in one["parameters"].items():
            assert torch.allclose(value, other["parameters"][name], atol=1e-12, rtol=0), name


def test_who_looks_at_weights_after_a_batch_sees_whole_ones(
    ranks: Callable[[int], Ranks],
) -> None:
    plain = ranks(2).run(fit, kind="plain", overlap="grad_reduce", callback="watching")
    whole = ranks(2).run(fit, kind="plain", overlap="zero1", callback="watching")
    blind = ranks(2).run(fit, kind="plain", overlap="zero1", callback="blind")
    assert "Watching may look at weights" in whole[0]["warnings"][0]
    for one, two, three in zip(plain, whole, blind, strict=True):
        assert not one["warnings"]
        assert not three["warnings"]
        for before, after in zip(one["seen"], two["seen"], strict=True):
            assert torch.allclose(before, after, atol=1e-12, rtol=0)
        # Without the gather it would have seen old shares: the test can tell.
        assert not torch.allclose(three["seen"][0], one["seen"][0], atol=1e-12, rtol=0)
        for name, value in one["parameters"].items():
            assert torch.allclose(value, three["parameters"][name], atol=1e-12, rtol=0), name


def test_an_optimizer_of_whole_tensors_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(fit, kind="adafactor", overlap="zero1"):
        assert "Adafactor is not known to treat every element by itself" in result["error"]
        assert "Use overlap=grad_reduce" in result["error"]


def test_freezing_during_training_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).run(fit, kind="plain", overlap="zero1", callback="freezing"):
        assert "frozen or unfrozen during training. With overlap=zero1" in result["error"]
