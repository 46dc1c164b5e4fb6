"""Recomputed forwards in real runs: the same training, one R per pair, and the memory predicted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from strategies.analysis.memory import Sizes, peak_held
from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import Kind
from strategies.ir.text import parse_instruction
from strategies.plan import Recompute
from strategies.runtime.step.activation_bytes import ActivationBytes, StageBytes
from tests.distributed.test_parity import check
from tests.distributed.test_tensor_parallel import GROUPED
from tests.distributed.test_tensor_parallel import check as check_shared
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed

POLICIES = {
    "full": Recompute("full"),
    "selective": Recompute("selective"),
    "layer": Recompute("layer"),
    "mario-2": Recompute("mario", passes=2),
    "mario-3": Recompute("mario", passes=3),
    "mario": Recompute("mario"),
    "optimal": Recompute("optimal", max_full_activations=1),
}
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v", "foldx_aiao", "foldx_fifo", "chimera")


class Observing(Callback):
    """Counts what units run, and measures the last step's activations."""

    reads_weights = False

    def __init__(self) -> None:
        self.calls = 0
        self.measured: ActivationBytes | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.engine
        for stage in engine.owned:
            for index in engine.stages[stage][:1]:
                unit = module.get_submodule(engine.model.units[index].name)
                unit.register_forward_pre_hook(lambda *_: self._count())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.calls = 0
            self.measured = trainer.strategy.engine.measure_activations()

    def _count(self) -> None:
        self.calls += 1


def observe(case: Case) -> dict[str, Any]:
    """Two steps; the second one is watched."""
    observing = Observing()
    result = train(case, callbacks=[observing])
    assert observing.measured is not None
    return {
        **result,
        "calls": observing.calls,
        "peak": observing.measured.peak,
        "left": observing.measured.held[-1],
        "stages": observing.measured.stages,
    }


def _count(result: dict[str, Any], kind: Kind) -> int:
    items = map(parse_instruction, result["program"])
    return sum(part.kind is kind for item in items for part in item.parts)


def _pairs(result: dict[str, Any], kind: Kind) -> set[tuple[int, int | None]]:
    items = map(parse_instruction, result["program"])
    return {(p.stage, p.microbatch) for item in items for p in item.parts if p.kind is kind}


def _quick(schedule: str, policy: str, **changes: Any) -> Case:
    case = Case(schedule, pp=2, rows=7, microbatches=4, steps=3, short_last=True)
    return replace(case, recompute=POLICIES[policy], **changes)


QUICK = [
    _quick("interleaved_1f1b", "full", backend="strict"),
    _quick("chimera", "mario", backend="strict"),
    _quick("1f1b", "mario", split_backward=True, dp=2, overlap="zero1"),
    _quick("zb_v", "selective", accumulation=2),
    _quick("zb_v", "layer", tp=2, sequence_parallel=True, shape=GROUPED),
]
FULL = [
    _quick("dualpipe", "mario", pp=4, microbatches=8, rows=9, costs=UniformCosts(fused=2.5)),
    _quick("1f1b", "full"),
    _quick("1f1b", "selective", tp=2, shape=GROUPED),
    _quick("interleaved_1f1b", "layer"),
    _quick("interleaved_1f1b", "mario-2", accumulation=2, shape=small_shape(tie_embeddings=True)),
    *(_quick(schedule, "full") for schedule in ("foldx_aiao", "chimera")),
    _quick("zb_v", "mario", backend="strict"),
    _quick("1f1b", "full", tp=2, shape=GROUPED),
    _quick("1f1b", "full", tp=2, split_backward=True, sequence_parallel=True, shape=GROUPED),
    *(
        Case(
            schedule,
            pp=pp,
            dp=dp,
            rows=9,
            microbatches=8 if schedule != "chimera" or pp == 4 else 4,
            steps=4,
            short_last=True,
            accumulation=3 - dp,
            backend="strict" if pp == 4 else "auto",
            split_backward=split,
            recompute=recompute,
        )
        for schedule, recompute, pp, dp, split in itertools.product(
            SCHEDULES, POLICIES.values(), (2, 4), (1, 2), (False, True)
        )
        if not (split and schedule == "zb_v") and pp * dp <= 4
    ),
]


def _name(case: Case) -> str:
    names = [name for name, entry in POLICIES.items() if entry == case.recompute]
    policy = names[0] if names else "none"
    marks = [case.schedule, policy, f"pp{case.pp}", f"dp{case.dp}", f"tp{case.tp}"]
    marks += ["split"] * case.split_backward + [case.backend] + [case.overlap]
    return "-".join(marks)


@pytest.mark.parametrize("case", QUICK, ids=_name)
def test_recomputing_keeps_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    _check(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=_name)
def test_recomputing_keeps_parity_everywhere(case: Case, ranks: Callable[[int], Ranks]) -> None:
    _check(case, ranks)


def _check(case: Case, ranks: Callable[[int], Ranks]) -> None:
    results = check(case, ranks) if case.tp == 1 else check_shared(case, ranks)
    for result in results:
        again = _pairs(result, Kind.R)
        assert _count(result, Kind.R) == len(again)
        assert again <= _pairs(result, Kind.F)
        if case.recompute.policy == "full":
            assert again == _pairs(result, Kind.F)
        if case.recompute.inside:
            assert not again
        spans = zip(result["program"], *result["last"], strict=True)
        stamped = [word for word, start, end in spans if "R" in word and 0 < start <= end]
        recomputed = [i for i in map(parse_instruction, stamped) if i.kind is Kind.R]
        assert len(recomputed) == len(again)


@pytest.mark.parametrize(
    ("schedule", "tp", "policies"),
    [
        ("zb_v", 1, ("mario", "selective")),
        pytest.param("1f1b", 2, ("full", "selective", "layer"), marks=pytest.mark.full),
        pytest.param("chimera", 1, ("full",), marks=pytest.mark.full),
    ],
)
def test_dropout_is_the_same_bit_for_bit(
    schedule: str, tp: int, policies: tuple[str, ...], ranks: Callable[[int], Ranks]
) -> None:
    shape = replace(GROUPED if tp > 1 else small_shape(), dropout=0.25)
    case = replace(_quick(schedule, "full", tp=tp, shape=shape), recompute=Recompute())
    plain = ranks(2 * tp).run(train, case=case)
    other = ranks(2 * tp).run(train, case=replace(case, shape=replace(shape, dropout=0.0)))
    assert plain[0]["losses"] != other[0]["losses"]
    for policy in policies:
        results = ranks(2 * tp).run(train, case=replace(case, recompute=POLICIES[policy]))
        for result, expected in zip(results, plain, strict=True):
            assert result["losses"] == expected["losses"]
            for name, value in expected["parameters"].items():
                assert torch.equal(result["parameters"][name], value), name


def _memory_case(schedule: str, policy: str, pp: int = 2, **changes: Any) -> Case:
    recompute = POLICIES.get(policy, Recompute())
    case = Case(schedule, pp=pp, steps=2, rows=16, microbatches=8, recompute=recompute)
    return replace(case, shape=small_shape(hidden=16, ffn=24), **changes)


MEMORY = [
    _memory_case("1f1b", "none"),
    _memory_case("1f1b", "full"),
    _memory_case("1f1b", "mario", split_backward=True),
    _memory_case("zb_v", "none"),
    _memory_case("zb_v", "mario-2"),
    _memory_case("foldx_fifo", "mario"),
    _memory_case("chimera", "full"),
    _memory_case("interleaved_1f1b", "selective"),
    _memory_case("interleaved_1f1b", "layer"),
]
MORE_MEMORY = [
    _memory_case(schedule, policy, pp)
    for schedule in SCHEDULES
    for policy in ("none", *POLICIES)
    for pp in (2, 4)
]


def _check_memory(case: Case, ranks: Callable[[int], Ranks]) -> None:
    """The most that a rank holds is what the program says, in bytes of one microbatch."""
    results = ranks(case.pp).run(observe, case=case)
    program = compile_program(
        schedule=case.schedule,
        pp=case.pp,
        num_microbatches=case.microbatches,
        recompute=case.recompute,
        split_backward=case.split_backward,
    )
    stages: dict[int, StageBytes] = {}
    for result in results:
        for stage, found in result["stages"].items():
            assert stages.setdefault(stage, found) == found, "weight copies hold alike"
        forwards, again = _count(result, Kind.F), _count(result, Kind.R)
        if case.recompute.inside:
            assert forwards <= result["calls"] <= 2 * forwards
        else:
            assert result["calls"] == forwards + again
        assert result["left"] == 0
    sizes = Sizes.whole(
        [stages[stage].full for stage in sorted(stages)],
        [stages[stage].inputs for stage in sorted(stages)],
        [stages[stage].waiting for stage in sorted(stages)],
    )
    for result in results:
        assert result["peak"] == pytest.approx(
            peak_held(program, result["pp_rank"], sizes), rel=0.03
        )


@pytest.mark.parametrize(
    "case", [*MEMORY[:3], *(pytest.param(c, marks=pytest.mark.full) for c in MEMORY[3:])], ids=_name
)
def test_measured_activation_peaks_are_those_predicted(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    _check_memory(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_MEMORY, ids=_name)
def test_measured_activation_peaks_are_those_predicted_everywhere(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    _check_memory(case, ranks)


class Ordinary(pl.LightningModule):
    """Declares no units; has statistics, a metric, dropout and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        blocks = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(4)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = torch.relu(block(x)) + 0.5 * x
        loss = functional.mse_loss(x, y)
        self.mean.update(loss.detach())
        self.log("train_loss", loss, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit_ordinary(policy: str, schedule: str) -> dict[str, Any]:
    module = Ordinary()
    strategy = {
        "pp": 2, "schedule": schedule, "num_microbatches": 4,
        "recompute": POLICIES.get(policy, Recompute()), "seed": 1,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 44, 4, generator=generator, dtype=torch.float64).unbind()
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    with fit(module, loader, strategy=strategy, max_epochs=1, losses="train_loss") as run:
        return {
            "losses": run.losses,
            "state": {name: value.clone() for name, value in module.state_dict().items()},
            "updates": module.mean.update_count,
            "num_r": sum(item.kind is Kind.R for item in run.program),
        }


@pytest.mark.filterwarnings("ignore:.*(many workers|logging interval).*")
@pytest.mark.parametrize(
    ("schedule", "policy"),
    [pytest.param("1f1b", "full", marks=pytest.mark.full), ("zb_v", "mario")],
)
def test_modules_without_units_keep_their_statistics_metrics_and_logs(
    schedule: str, policy: str, ranks: Callable[[int], Ranks]
) -> None:
    plain = ranks(2).run(fit_ordinary, policy="none", schedule=schedule)
    for chosen in (policy, *(["selective"] if schedule == "zb_v" else [])):
        results = ranks(2).run(fit_ordinary, policy=chosen, schedule=schedule)
        assert any(result["num_r"] for result in results) == (chosen == policy)
        for result, expected in zip(results, plain, strict=True):
            assert result["losses"] == expected["losses"]
            assert result["updates"] == expected["updates"]
            for name, value in expected["state"].items():
                assert torch.equal(result["state"][name], value), name
