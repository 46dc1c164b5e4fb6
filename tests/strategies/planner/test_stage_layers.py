"""Tests of the list of each stage's layers."""

from __future__ import annotations

import pytest

from strategies.costs.trace_file import Line, TracedModel, TracedTensor, TracedUnit
from strategies.errors import PlanError
from strategies.planner.stage_layers import spans, stage_layers

_NONE = Line()


def _unit(name: str, parameters: int, cost: float) -> TracedUnit:
    return TracedUnit(name, parameters, (), _NONE, _NONE, _NONE, _NONE, cost=Line(0.0, cost))


MODEL = TracedModel(
    "Net",
    11_110,
    (_unit("in", 1110, 1.0), _unit("mid.0", 1000, 1.0), _unit("mid.1", 4000, 2.0),
     _unit("out", 5000, 4.0)),
    (TracedTensor(0, (1, 3), Line(0.0, 512.0)), TracedTensor(1, (2,), Line(8.0, 2048.0)),
     TracedTensor(2, (3,), Line(0.0, 3 * 2**20))),
)  # fmt: skip


def test_layers_sizes_and_what_passes_a_stage_by():
    assert stage_layers(MODEL, 3, None, rows=4) == (
        "in, mid.0, 2,110 parameters, 25 % of the forward; to stage 1: 1 tensor, 2 KiB per row and "
        "8 B; to stage 2: 1 tensor, 512 B per row",
        "mid.1, 4,000 parameters, 25 % of the forward; to stage 2: 1 tensor, 3 MiB per row",
        "out, 5,000 parameters, 50 % of the forward",
    )


def test_a_cut_by_hand_is_kept():
    first, second = stage_layers(MODEL, 2, (1, 3), rows=4)
    assert first.startswith("in, 1,110 parameters, 12 % of the forward; to stage 1: 1 tensor, 512")
    assert second.startswith("mid.0 to 1, out, 10,000 parameters")


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PlanError, match=r"5 stages .* for a model of 4 units"):
        stage_layers(MODEL, 5, None, rows=4)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.9", "a.10", "b.11"], "a.9 to 10, b.11"),
        (["a.0", "a.2", "a.3", "a.3#2"], "a.0, a.2 to 3, a.3#2"),
        ([], ""),
    ],
)
def test_runs_of_numbers_are_named_by_their_ends(names, said):
    assert spans(names) == said
