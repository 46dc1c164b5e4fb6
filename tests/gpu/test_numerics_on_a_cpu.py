"""The numerics that a GPU is to show, with the same functions on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.errors import PlanError
from strategies.runtime.lightning.request import plan_and_options
from tests.gpu import steps
from tests.gpu import test_nccl_on_one_gpu as nccl
from tests.gpu.layouts import (
    AXES,
    MICROBATCHES,
    TOLERANCE,
    Layout,
    all_layouts,
    allowed,
    check,
    differences,
    pairs_of,
    pairwise,
    train_alone,
)
from tests.gpu.started import check_pipeline, check_start
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
FULL = pytest.mark.full
CHOSEN = pairwise(all_layouts())
# Two of the smallest that have a reduction, shares, stages and a scaler between them.
EVERYDAY = Layout("zb_v", 2, 1, 1, "16-mixed", False, "none", True)
# Every day: test_short_weights_shard_and_resume_anywhere, in tests/distributed/test_precision.
SHARDED = Layout("1f1b", 2, 2, 1, "bf16-true", True, "none", True)


def test_each_two_choices_that_go_together_meet_in_a_layout() -> None:
    def together(*chosen: tuple[str, object]) -> bool:
        """By the rules alone: four ranks at most, and shares only between replicas."""
        has = dict(chosen)
        degrees = [has.get(name, 1) for name in ("pp", "dp", "tp")]
        if has.get("zero1"):
            degrees[1] = 2
            if has.get("dp") == 1:
                return False
        pp, dp, tp = (int(degree) for degree in degrees if isinstance(degree, int))
        return pp * dp * tp <= 4

    choices = [[(name, value) for value in values] for name, values in AXES.items()]
    wanted = {
        (*one, *other)
        for some, others in itertools.combinations(choices, 2)
        for one, other in itertools.product(some, others)
        if together(one, other)
    }
    met = {pair for layout in CHOSEN for pair in pairs_of(layout)}
    assert met == wanted
    assert len(CHOSEN) <= 17
    assert all(allowed(layout) for layout in CHOSEN)
    assert len(set(CHOSEN)) == len(CHOSEN)


def test_every_layout_is_one_that_the_strategy_takes() -> None:
    refused = []
    for layout in {replace(one, precision="32-true", clip=False) for one in all_layouts()}:
        case = layout.case(backend="staged", accelerator="gpu")
        words = {
            "pp": case.pp, "dp": case.dp, "tp": case.tp, "schedule": case.schedule,
            "num_microbatches": MICROBATCHES, "overlap": case.overlap, "recompute": case.recompute,
        }  # fmt: skip
        try:
            plan_and_options(words)
        except PlanError as error:
            refused.append(f"{layout}: {error}")
    assert refused == []


@pytest.mark.parametrize(
    "layout",
    [EVERYDAY, *(pytest.param(layout, marks=FULL) for layout in (SHARDED, *CHOSEN))],
    ids=str,
)
def test_ranks_train_as_one_process_does(layout: Layout, ranks: Callable[[int], Ranks]) -> None:
    check(layout, ranks, backend="auto", accelerator="cpu")


def test_a_microbatch_without_gradient_is_far_outside_of_what_is_allowed(
    ranks: Callable[[int], Ranks],
) -> None:
    layout = Layout("1f1b", 1, 1, 1, "32-true", False, "none", False)
    where = {"layout": layout, "accelerator": "cpu"}
    (whole,) = ranks(1).run(train_alone, **where)
    (less,) = ranks(1).run(train_alone, **where, left_out=1)
    result = {"losses": less["losses"], "shards": {}, "tp_rank": 0, "changes": {
        (name, 0, change.numel()): change.flatten() for name, change in less["changes"].items()
    }}  # fmt: skip
    _, changes = differences([result], whole)
    assert min(changes.values()) > 3 * max(TOLERANCE.values())


# ------------------------------------------------------------------------------------ NCCL's order


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=FULL, id=name) for name, case in nccl.CASES.items()],
)
def test_cases_of_nccl_hold_in_the_order_that_it_demands(
    case: nccl.Case, ranks: Callable[[int], Ranks]
) -> None:
    case = replace(case, steps=3, backend="strict")
    nccl.hold(case, ranks(case.pp * case.dp * case.tp).run(nccl.train, case=case))


@FULL
def test_short_integers_travel(ranks: Callable[[int], Ranks]) -> None:
    given = {"accelerator": "cpu"}
    (alone,) = ranks(1).run(nccl.train_marked, pp=1, backend="auto", **given)
    nccl.hold_marked(alone, ranks(2).run(nccl.train_marked, pp=2, backend="strict", **given))


# ---------------------------------------------------------------- steps, checkpoints, the launcher


@FULL
@pytest.mark.parametrize("name", steps.BAD_CASES)
def test_a_gradient_that_is_nan_stops_or_is_skipped(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    steps.check_stop(name, ranks, accelerator="cpu")
    steps.check_skip(name, ranks, accelerator="cpu")


@FULL
@pytest.mark.parametrize(("rank", "overlap", "clip"), steps.SPOILED)
def test_an_overflow_of_one_rank_skips_the_step_on_all(
    rank: tuple[int, int], overlap: str, clip: float | None, ranks: Callable[[int], Ranks]
) -> None:
    steps.check_spoiled(rank, overlap, clip, ranks, accelerator="cpu")


@pytest.mark.parametrize(
    "precision",
    [pytest.param(name, marks=FULL) for name in ("32-true", "bf16-mixed", "bf16-true")],
)
def test_a_run_resumes_at_its_layout_and_at_another(
    precision: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    steps.check_resume(precision, ranks, tmp_path, accelerator="cpu")


@FULL
def test_two_stages_lose_what_one_does(tmp_path: Path) -> None:
    check_pipeline(tmp_path, "cpu", "cpu_laptop")


@FULL
def test_forked_ranks_lose_what_fresh_ones_do(tmp_path: Path) -> None:
    check_start(tmp_path, "cpu", "cpu_laptop")
