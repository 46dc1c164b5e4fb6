"""Layouts drawn at random: each trains as one rank does, in fp64, or is refused on all alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from strategies.errors import PipelineError
from strategies.plan import Recompute
from strategies.schedules import SCHEDULES
from tests.faults.results import record
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, reference, small_shape, train

pytestmark = pytest.mark.distributed

# What updates weights in the middle of a batch is held against its own reference elsewhere.
NAMES = [name for name, made in SCHEDULES.items() if name != "custom" and made.synchronous]
STEPS = 3
TOLERANCE = 1e-10


def layout(draw: random.Random, most_ranks: int) -> Case:
    """Valid as far as single values go; whether they go together is the run's to say."""
    pp = draw.choice([n for n in (1, 2, 4) if n <= most_ranks])
    return Case(
        schedule=draw.choice(NAMES),
        pp=pp,
        dp=draw.choice([n for n in (1, 2, 4) if n * pp <= most_ranks]),
        accumulation=draw.choice([1, 1, 2]),
        rows=draw.randint(1, 9),
        microbatches=draw.randint(1, 8),
        steps=STEPS,
        clip=draw.choice([None, None, 0.05]),
        overlap=draw.choice(["grad_reduce", "grad_reduce", "none", "zero1"]),
        buckets_mb=draw.choice([0.0005, 0.001, 25.0]),
        split_backward=draw.random() < 0.2,
        recompute=Recompute(draw.choice(["none", "none", "full", "mario", "optimal"])),
        optimizer=draw.choice(["Adam", "SGD", "AdamW"]),
        shape=small_shape(layers=draw.randint(1, 5), tie_embeddings=draw.random() < 0.3),
    )


def trained(case: Case) -> dict[str, Any] | str:
    """What is worth comparing, or what the run was refused with."""
    try:
        found = train(case)
    except PipelineError as error:
        return str(error)
    return {name: found[name] for name in ("losses", "parameters")}


def judge(case: Case, ranks: Callable[[int], Ranks]) -> bool:
    """Whether it ran, with the figures of one rank."""
    results = ranks(case.pp * case.dp).run(trained, case=case)
    if any(isinstance(result, str) for result in results):
        assert len(set(map(str, results))) == 1, (case, results)
        return False
    losses, parameters = reference(case)
    for batch, expected in enumerate(losses):
        mean = sum(result["losses"][batch] for result in results) / len(results)
        assert mean == pytest.approx(expected, abs=TOLERANCE), (case, batch)
    for result in results:
        for name, value in result["parameters"].items():
            assert (value - parameters[name]).abs().max().item() < TOLERANCE, (case, name)
    return True


@pytest.mark.parametrize("seed", [6])
def test_a_layout_drawn_at_random_trains_as_one_rank_does(
    seed: int, ranks: Callable[[int], Ranks]
) -> None:
    draw = random.Random(seed)
    assert sum(judge(layout(draw, 2), ranks) for _ in range(5)) >= 2


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(12, 22))
def test_30_layouts_train_as_one_rank_does(seed: int, ranks: Callable[[int], Ranks]) -> None:
    """300 in all."""
    draw, ran, judged, begun = random.Random(seed), 0, 0, time.monotonic()
    try:
        for _ in range(30):
            ran += judge(layout(draw, 4), ranks)
            judged += 1
    finally:
        what = f"layouts of seed {seed} train as one rank does, or are refused (mean seconds)"
        record("fuzz", what, judged, 30, (time.monotonic() - begun) / max(1, judged))
    assert ran > 5
