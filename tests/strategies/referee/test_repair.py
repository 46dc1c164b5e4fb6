from __future__ import annotations

import pytest

from strategies.compiler import compile_plan
from strategies.plan import Plan
from strategies.referee import SEMANTICS, Semantics, examine, judge, notation, repair
from tests.strategies.referee.orders import CROSSED, FACING, TURNED, order
from tests.strategies.referee.test_semantics import _shuffled


@pytest.mark.parametrize("text", [FACING, CROSSED])
def test_computations_keep_their_order_and_messages_get_the_places_of_our_lowering(text: str):
    broken = order(text)
    found = repair(broken, "one_queue")
    assert found is not None
    assert (found.placed, found.ungrouped) == (True, False)
    assert found.program.compute_rows() == broken.compute_rows()
    assert all(judge(found.program, each).runs for each in SEMANTICS)


def test_no_place_of_messages_helps_where_computations_wait_for_each_other():
    assert repair(order("1F0,0F0,0B0,1B0\n3F0,2F0,3B0,2B0\n"), "rendezvous") is None
    assert all(repair(order(TURNED), each) is None for each in SEMANTICS)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_whatever_is_broken_a_repaired_order_runs_with_the_same_instructions(semantics: Semantics):
    program = compile_plan(Plan("1f1b", 3, 3)).train
    for seed in range(8):
        broken = _shuffled(program, seed)
        if judge(broken, semantics).runs:
            continue
        found = repair(broken, semantics)
        assert found is not None
        assert judge(found.program, semantics).runs
        for before, after in zip(broken.ranks, found.program.ranks, strict=True):
            assert sorted(map(str, before)) == sorted(map(str, after))


def test_a_repaired_order_is_read_back_from_its_file():
    opinion = examine(FACING)
    assert opinion.repaired is not None
    again = examine(notation(opinion.repaired.program))
    assert again.runs
    assert examine(opinion.compute_file.text).runs
