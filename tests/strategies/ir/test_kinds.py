from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from strategies.analysis.memory import Sizes, changes
from strategies.costs.table import CostTable, StageMemory
from strategies.ir.kinds import COMPUTE_KINDS, EXCHANGE_KINDS, KINDS, MESSAGE_KINDS, Kind
from strategies.schedules.schedule import Durations
from tests.strategies.programs import written


def test_every_kind_has_a_row():
    assert tuple(KINDS) == tuple(Kind)


def test_rows_name_columns_that_exist():
    for kind, facts in KINDS.items():
        timed = kind not in MESSAGE_KINDS | EXCHANGE_KINDS | {Kind.OVERLAP, Kind.LOSS}
        assert (facts.duration in {field.name for field in fields(CostTable)}) is timed
        assert set(facts.work) <= {field.name for field in fields(Durations)}
        if facts.temporaries:
            assert facts.temporaries in {field.name for field in fields(StageMemory)}


def test_letters_of_a_legend_differ():
    drawn = [kind.value[0] for kind in COMPUTE_KINDS]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("backward", [(Kind.B,), (Kind.I, Kind.W)])
@pytest.mark.parametrize("again", [False, True])
def test_a_pair_gives_back_what_it_has_taken(backward, again):
    kinds = (Kind.F, *((Kind.R,) if again else ()), *backward)
    program = written(" ".join(f"0{kind.value}0" for kind in kinds), num_microbatches=1)
    held = Counter(dict.fromkeys(range(len(Sizes._fields)), 0))
    for _, takes, frees in changes(program, 0):
        held.update(dict(takes))
        assert min(held.values()) == 0
        held.subtract(dict(frees))
        assert min(held.values()) == 0
    assert not any(held.values())


def test_of_forwards_alone_nothing_is_kept():
    ((_, takes, frees),) = changes(written("0F0", num_microbatches=1, role="forward"), 0)
    assert takes
    assert takes == frees
