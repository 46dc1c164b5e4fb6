"""The file in which a trace is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from strategies.costs.trace_file import (
    Line,
    TracedAgain,
    TracedModel,
    TracedTensor,
    TracedUnit,
    dump_trace,
    parse_trace,
)
from strategies.errors import ModelError

AGAIN = TracedAgain(Line(0, 3), Line(0, 1), Line(1, 5))
UNIT = TracedUnit("a", 3, ((0, 2),), Line(0, 2), Line(0, 2), Line(0, 1), Line(4, 8))
TRACE = TracedModel(
    "Net",
    3,
    (UNIT, replace(UNIT, name="b", again=AGAIN), replace(UNIT, name="c")),
    (TracedTensor(0, (1, 2), Line(0, 4)), TracedTensor(1, (2,), Line(8, 0))),
    (("aten::mix", "b"),),
)


def test_what_is_written_is_read():
    assert parse_trace(dump_trace(TRACE)) == TRACE


def test_a_tensor_crosses_a_cut_once_and_only_while_it_is_needed():
    assert [TRACE.crossing_bytes(unit, 2) for unit in range(3)] == [8, 16, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0}, {"units": []}, {"units": None}, {"num_parameters": "many"},
        {"tensors": [{"producer": 2, "consumers": [1], "num_bytes": [0, 1]}]},
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_from_a_trace(change):
    with pytest.raises(ModelError, match="damaged"):
        parse_trace(json.dumps(json.loads(dump_trace(TRACE)) | change))
    with pytest.raises(ModelError, match="damaged"):
        parse_trace("[1, 2")


def test_a_line_goes_through_two_points_or_the_origin():
    assert Line.through((2, 5.0), (4, 9.0)) == Line(1.0, 2.0)
    assert Line.through((2, 5.0), None) == Line(0.0, 2.5)
    assert Line(-3.0, 1.0).at(2) == 0.0
