from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from strategies.analysis.memory import vector
from strategies.costs.table import CostTable, StageMemory
from strategies.ir.kinds import COMPUTE_KINDS, EXCHANGE_KINDS, KINDS, MESSAGE_KINDS, Kind, Purpose
from strategies.schedules.schedule import Durations


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
    held = Counter(dict.fromkeys(Purpose, 0))
    for kind in (Kind.F, *((Kind.R,) if again else ()), *backward):
        takes, frees = vector(kind, again=again)
        held.update(takes)
        assert min(held.values()) == 0
        held.subtract(frees)
        assert min(held.values()) == 0
    assert not any(held.values())


def test_of_forwards_alone_nothing_is_kept():
    takes, frees = vector(Kind.F, again=False, keeps=False)
    assert takes == frees
