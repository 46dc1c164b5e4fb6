"""``Strand``: a step in a thread of its own, which runs only while it is resumed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from strategies.models.manual.flow_run import Returned
from strategies.models.manual.strand import Strand

CPU = torch.device("cpu")


def test_a_step_stands_gets_answers_and_returns():
    seen = []

    def body(pause: Callable[[Any], Any]) -> str:
        seen.append(pause("first"))
        seen.append(pause("second"))
        return "done"

    strand = Strand(body, CPU)
    assert strand.report is None
    assert strand.resume("not read") == "first"
    assert not strand.handled
    assert seen == []
    assert strand.resume(1) == "second"
    assert strand.resume(2) == Returned("done") == strand.report
    assert seen == [1, 2]


def test_an_error_of_the_step_is_raised_where_it_is_resumed():
    def body(pause: Callable[[Any], Any]) -> None:
        pause("first")
        raise ValueError("in the step")

    strand = Strand(body, CPU)
    strand.resume()
    with pytest.raises(ValueError, match="in the step"):
        strand.resume()
    assert strand.report == Returned(None)


def test_a_step_that_is_stopped_runs_its_finally_and_nothing_else():
    seen = []

    def body(pause: Callable[[Any], Any]) -> None:
        try:
            pause("first")
            seen.append("behind")
        finally:
            seen.append(pause("in finally"))

    strand = Strand(body, CPU)
    strand.resume()
    strand.stop()
    strand.stop()
    assert seen == [None]
    assert strand.report == "first"


def test_a_step_has_gradients_and_the_autocast_of_its_caller():
    def body(pause: Callable[[Any], Any]) -> tuple[bool, bool, torch.dtype, bool]:
        return (
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        )  # fmt: skip

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with_autocast = Strand(body, CPU)
    assert with_autocast.resume() == Returned((True, True, torch.bfloat16, False))
    with torch.no_grad():
        assert Strand(body, CPU).resume().result[:2] == (True, False)


def drawn() -> tuple[float, float]:
    return random.random(), float(numpy.random.rand())


def test_each_step_goes_on_with_its_own_draws_and_leaves_those_of_the_process():
    strands = [Strand(lambda pause: None, CPU) for _ in range(2)]
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    found: list[list[tuple[float, float]]] = [[], []]
    for index in (0, 1, 1, 0):
        with strands[index].own_draws(7 + 2**32):
            found[index].append(drawn())
    assert found[0] == found[1]
    assert len({*found[0]}) == 2
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_each_step_sees_the_attributes_that_it_has_set_itself():
    module = nn.Linear(1, 1)
    module.count, module.kept = 0, "kept"
    strands = [Strand(lambda pause: None, CPU) for _ in range(2)]
    for index, count in ((0, 1), (1, 5), (0, 1)):
        with strands[index].own_attributes([module]):
            module.count += count
            if index:
                module.fake = "fake"
            assert hasattr(module, "fake") == bool(index)
        assert module.count == 0
        assert not hasattr(module, "fake")
    assert strands[0].attributes == {(0, "count"): 2}
    strands[0].leave_attributes([module])
    assert (module.count, module.kept) == (2, "kept")
    strands[1].leave_attributes([module])
    assert (module.count, module.fake) == (5, "fake")
