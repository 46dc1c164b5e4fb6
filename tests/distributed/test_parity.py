"""Every schedule gives what single-process training gives: losses and weights, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, evaluate, evaluated, reference, small_shape, train

TOLERANCE = 1e-10
SHORT = 3  # steps of an everyday case; those of the full matrix have ten
TIED = small_shape(tie_embeddings=True)

pytestmark = pytest.mark.distributed

# A user's own order comes from a file; late gradients are another training.
EVALUATED = [name for name in SCHEDULES if name != "custom"]
NAMES = [name for name in EVALUATED if SCHEDULES[name].synchronous]


def _degrees(schedule: str) -> tuple[int, ...]:
    """Two weight copies need two ranks."""
    return (1, 2, 4) if SCHEDULES[schedule].weight_copies == 1 else (2, 4)


def _microbatches(schedule: str, pp: int, wanted: int) -> int:
    """The next number that the schedule's rules allow."""
    for count in itertools.count(wanted):
        try:
            SCHEDULES[schedule].resolve(Plan(schedule, pp, count))
        except PlanError:
            continue
        return count
    raise AssertionError


def _case(schedule: str, pp: int, dp: int, accumulation: int, ragged: bool) -> Case:
    # 8 rows in 3 microbatches are 3, 3, 2; a last batch of 3 rows for 4 has one row each.
    count = _microbatches(schedule, pp, 3 if ragged else 4)
    return Case(
        schedule,
        pp,
        dp,
        accumulation=accumulation,
        rows=2 * count + (2 if count == 3 else ragged),
        microbatches=count,
        short_last=ragged,
    )


ALL = [
    _case(schedule, pp, *values)
    for schedule in NAMES
    for pp in _degrees(schedule)
    for values in itertools.product((1, 2), (1, 2), (False, True))
]


def _pairwise(cases: list[Case], run_anyway: Iterable[Case]) -> list[Case]:
    """Cases that hold, with those others, every pair of values of two axes at least once.

    But for a schedule's pairs with the number of stages, of which those others have a large one.
    """

    def pairs(case: Case) -> set[tuple[object, ...]]:
        axes = (case.schedule, case.pp, case.dp, case.accumulation, case.short_last)
        return {
            (i, axes[i], j, axes[j])
            for i, j in itertools.combinations(range(len(axes)), 2)
            if (i, j) != (0, 1)
        }

    missing = set().union(*map(pairs, cases)).difference(*map(pairs, run_anyway))
    chosen = []
    while missing:
        # Of those that hold as many new ones, a small one.
        best = max(cases, key=lambda case: (len(pairs(case) & missing), -case.pp * case.dp))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


# Of each family one has replicas, and the order of their reductions, every day.
REPLICATED = ("1f1b", "interleaved_1f1b", "zb_v", "foldx_fifo", "chimera", "dualpipe_v")
# On two ranks every day, on four in the full matrix: like one of the others there.
SHALLOW = ("gpipe", "naive", "eager_1f1b", "looped_bfs", "interleaved_zb", "foldx_aiao", "v_min")
# The order in which these run is looked at, too.
ORDERED = {
    schedule: _case(schedule, 2, 2, 1, ragged=False)
    if schedule in REPLICATED
    else _case(schedule, 2 if schedule in SHALLOW else 4, 1, 1, ragged=True)
    for schedule in NAMES
}
# The full matrix has the others of each family, and eight processes, which take long to start.
QUICK = _pairwise(
    [case for case in ALL if case.schedule in REPLICATED and case.pp * case.dp < 8],
    ORDERED.values(),
)


def _name(case: Case) -> str:
    ragged = "-ragged" if case.short_last else ""
    return f"{case.schedule}-pp{case.pp}-dp{case.dp}-acc{case.accumulation}{ragged}"


def check(case: Case, ranks: Callable[[int], Ranks]) -> list[dict]:
    return compare(case, ranks(case.pp * case.dp).run(train, case=case))


def compare(case: Case, results: list[dict]) -> list[dict]:
    """Holds what the ranks have come to against plain torch."""
    losses, parameters = reference(case)
    for batch, expected in enumerate(losses):
        mean = sum(result["losses"][batch] for result in results) / len(results)
        assert mean == pytest.approx(expected, abs=TOLERANCE), f"loss of batch {batch}"
    seen = set()
    for result in results:
        for name, value in result["parameters"].items():
            seen.add(name)
            difference = (value - parameters[name]).abs().max().item()
            assert difference < TOLERANCE, f"{name} on rank {result['pp_rank']}: {difference}"
    # A tied weight goes by its first name where both its users lie on one rank.
    tied = {"net.head.projection.weight"} if case.shape.tie_embeddings else set()
    assert seen >= set(parameters) - tied
    first: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result["parameters"].items():
            assert torch.equal(value, first.setdefault(name, value)), f"copies differ in {name}"
    return results


@pytest.mark.parametrize("case", QUICK, ids=_name)
def test_training_equals_a_single_process(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(replace(case, steps=SHORT), ranks)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=_name)
def test_training_equals_a_single_process_everywhere(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    check(case, ranks)


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", pp=2, dp=2, clip=0.05),
        Case("foldx_aiao", pp=2, dp=1, clip=0.05, accumulation=2),
        Case("1f1b", pp=2, dp=2, overlap="none"),
        pytest.param(Case("interleaved_1f1b", pp=2, dp=2, buckets_mb=25.0), marks=pytest.mark.full),
    ],
    ids=["clip-dp", "clip-accumulate", "no-overlap", "one-bucket"],
)
def test_clipping_and_overlap_keep_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(replace(case, steps=SHORT), ranks)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("1f1b", pp=2, shape=TIED, clip=0.1), marks=pytest.mark.full),
        Case("1f1b", pp=2, dp=2, shape=TIED, clip=0.1),
        # First and last stage on one rank.
        Case("foldx_fifo", pp=1, shape=TIED),
    ],
    ids=["two-ranks", "two-ranks-dp", "one-rank"],
)
def test_tied_embeddings_keep_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(replace(case, steps=SHORT), ranks)


UNSPLIT = [name for name in NAMES if not SCHEDULES[name].splits_backward]


def _long_but(names: list[str], *everyday: str) -> list[Any]:
    """The others run with the full matrices."""
    full = pytest.mark.full
    return [name if name in everyday else pytest.param(name, marks=full) for name in names]


@pytest.mark.parametrize("schedule", _long_but(UNSPLIT, "chimera"))
def test_split_backwards_keep_parity(schedule: str, ranks: Callable[[int], Ranks]) -> None:
    case = _case(schedule, pp=2, dp=2, accumulation=2, ragged=True)
    results = check(replace(case, split_backward=True, steps=SHORT), ranks)
    assert any("W" in word for word in results[0]["program"])
    assert not any("B" in word and "_" not in word for word in results[0]["program"])


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        pytest.param("dualpipe", "auto", marks=pytest.mark.full),
        ("dualpipe_v", "strict"),
        pytest.param("dualpipe", "strict", marks=pytest.mark.full),
        pytest.param("dualpipe_v", "auto", marks=pytest.mark.full),
    ],
)
def test_fused_pairs_keep_parity(
    schedule: str, backend: str, ranks: Callable[[int], Ranks]
) -> None:
    case = replace(_case(schedule, 4, 1, 1, ragged=True), costs=UniformCosts(fused=2.5))
    results = check(replace(case, backend=backend, steps=3), ranks)
    assert any("OVERLAP_F_B" in word for word in results[0]["program"])


@pytest.mark.parametrize(
    "schedule", _long_but(["gpipe", "1f1b", "looped_bfs", "chimera", "zb_v"], "zb_v")
)
def test_the_order_for_waiting_sends_keeps_parity(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    costs = UniformCosts(p2p=0.2, transport="rendezvous")
    case = replace(_case(schedule, 4, 1, 1, ragged=True), costs=costs, steps=3)
    check(replace(case, backend="strict"), ranks)


@pytest.mark.parametrize(
    "schedule",
    _long_but(["zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "foldx"], "zb_v"),
)
def test_orders_made_for_unequal_costs_keep_parity(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    costs = UniformCosts(forward=1.0, backward=2.7, backward_input=1.6, grad_reduce=9.0, p2p=0.1)
    check(replace(_case(schedule, 4, 1, 1, ragged=False), costs=costs, steps=3), ranks)


@pytest.mark.parametrize("schedule", _long_but(EVALUATED, *EVALUATED[::5]))
def test_every_schedule_evaluates(schedule: str, ranks: Callable[[int], Ranks]) -> None:
    check_evaluation(schedule, 2, "auto", ranks)


@pytest.mark.parametrize("schedule", _long_but(NAMES, "dualpipe"))
def test_every_schedule_evaluates_on_the_strict_transport(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    check_evaluation(schedule, 4, "strict", ranks)


def check_evaluation(schedule: str, pp: int, backend: str, ranks: Callable[[int], Ranks]) -> None:
    case = replace(_case(schedule, pp, 1, 1, ragged=True), steps=3, backend=backend)
    loss, chances = evaluated(case)
    for result in ranks(pp).run(evaluate, case=case):
        assert result["val_loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert (result["predictions"] - chances).abs().max().item() < TOLERANCE


@pytest.mark.parametrize(
    "schedule",
    _long_but(NAMES, "zb_v"),
)
def test_every_schedule_runs_on_the_strict_transport(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    count = _microbatches(schedule, 4, 6)
    case = Case(schedule, pp=4, rows=count + 1, microbatches=count, steps=3, short_last=True)
    check(replace(case, backend="strict"), ranks)


@pytest.mark.parametrize("schedule", NAMES)
def test_training_equals_a_single_process_in_the_order_of_the_simulation(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    from strategies.compiler import Plan, compile_plan
    from strategies.costs.uniform import UniformCosts
    from strategies.ir.kinds import MICROBATCH_KINDS, Kind
    from strategies.ir.text import format_instruction, parse_instruction
    from strategies.simulator.engine import simulate

    case = replace(ORDERED[schedule], steps=SHORT)
    results = check(case, ranks)
    buckets: dict[int, int] = {}
    for item in (parse_instruction(word) for result in results for word in result["program"]):
        if item.kind is Kind.REDUCE:
            buckets[item.stage] = max(buckets.get(item.stage, 0), item.bucket + 1)
    assert buckets or case.dp == 1
    counts = tuple(buckets[stage] for stage in sorted(buckets)) or 0
    for result in results:
        rank = result["pp_rank"]
        plan = Plan(schedule, case.pp, case.microbatches, buckets=counts)
        timeline = simulate(compile_plan(plan).train, UniformCosts(grad_reduce=1.0))
        for kinds in (MICROBATCH_KINDS, {Kind.REDUCE}):
            simulated = [
                format_instruction(event.instruction)
                for event in sorted(timeline.events(rank), key=lambda e: (e.start, e.end))
                if event.instruction.kind in kinds
            ]
            spans = zip(result["program"], result["start"], strict=True)
            wanted = set(simulated)
            executed = [word for word, _ in sorted(spans, key=lambda s: s[1]) if word in wanted]
            assert executed == simulated
