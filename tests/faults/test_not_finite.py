"""Row 6: NaN and infinity in a loss or gradient of one rank, at places drawn by chance.

``tests/distributed/test_nan_guard.py`` has one of each kind in every run.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable

import pytest

from tests.distributed.test_nan_guard import BAD, STEPS, Fault, finite, same, train
from tests.faults.results import record
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, Learner, small_shape

pytestmark = [pytest.mark.faults, pytest.mark.distributed]

COUNT = 60


def drawn(chance: random.Random) -> Fault:
    """A fault somewhere in a pipeline of two stages."""
    names = [name for name, _ in Learner(small_shape()).named_parameters()]
    dp = chance.choice([1, 2])
    case = Case(
        chance.choice(["1f1b", "gpipe", "zb_h1", "zb_v", "interleaved_1f1b"]),
        pp=2,
        dp=dp,
        accumulation=chance.choice([1, 1, 2]),
        clip=chance.choice([None, 0.1]),
        overlap=chance.choice(["grad_reduce", "none", "zero1"]) if dp > 1 else "grad_reduce",
    )
    what = chance.choice(["gradient", "gradient", "loss"])
    name = chance.choice(names) if what == "gradient" else ""
    value = chance.choice([math.nan, math.inf, -math.inf])
    return Fault(what, name, chance.randrange(dp), value, case)


def judged(world: Ranks, fault: Fault, on_nan: str) -> None:
    found = world.run(train, fault=fault, on_nan=on_nan)
    if on_nan == "stop":
        (error,) = {rank["error"] for rank in found}
        assert error.startswith(f"step {BAD + 1}: ")
        place = rf"\(pp \d, dp {fault.dp_rank}, "
        thing = f"gradient of {fault.name}" if fault.what == "gradient" else "loss of microbatch"
        # The gradient travels on: parameters of stages before it are not finite either.
        assert re.search(rf"the {re.escape(thing)}.*{place}", error), error
        for rank in found:
            assert len(rank["weights"]) == BAD
            assert same(rank["weights"][-1], rank["left"])
        return
    for rank in found:
        assert (rank["skipped"], rank["step"]) == ([BAD], STEPS)
        for step, weights in enumerate(rank["weights"]):
            assert finite(weights)
            assert step == 0 or same(rank["weights"][step - 1], weights) == (step == BAD)


def test_sixty_times(ranks: Callable[[int], Ranks]) -> None:
    chance = random.Random(6)
    passed, worst = 0, 0.0
    try:
        for number in range(COUNT):
            fault = drawn(chance)
            begun = time.monotonic()
            judged(ranks(fault.case.pp * fault.case.dp), fault, ("stop", "skip")[number % 2])
            worst = max(worst, time.monotonic() - begun)
            passed += 1
    finally:
        what = "NaN or inf on one rank: no rank updates, same step, place named"
        record(6, what, passed, COUNT, worst)
