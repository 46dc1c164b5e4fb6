from __future__ import annotations

import pytest

from strategies.compiler import compile_plan
from strategies.ir.verify import verify
from strategies.plan import Plan
from strategies.referee import SEMANTICS, Semantics, examine, judge, notation, repair
from tests.strategies.referee.orders import CROSSED, FACING, order
from tests.strategies.referee.test_semantics import _shuffled


def test_one_message_moved_by_one_place_repairs_two_sends_that_face_each_other():
    found = repair(order(FACING), "one_queue")
    assert [str(move) for move in found.moves] == ["rank 0: 0SEND_F1>1 1 place later"]
    assert not found.anew and found.moved == 1
    assert judge(found.program, "one_queue").runs


def test_messages_that_cross_change_places():
    found = repair(order(CROSSED), "per_pair")
    assert [str(move) for move in found.moves] == ["rank 1: 1RECV_F1<0 1 place later"]


def test_computations_that_wait_for_each_other_are_moved_first():
    found = repair(order("1F0,0F0,0B0,1B0\n3F0,2F0,3B0,2B0\n"), "rendezvous")
    assert notation(found.program) == "0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n"
    verify(found.program)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_whatever_is_broken_a_repaired_order_runs_with_the_same_instructions(semantics: Semantics):
    program = compile_plan(Plan("1f1b", 3, 3)).train
    for seed in range(8):
        broken = _shuffled(program, seed)
        if judge(broken, semantics).runs:
            continue
        found = repair(broken, semantics)
        assert judge(found.program, semantics).runs
        for before, after in zip(broken.ranks, found.program.ranks, strict=True):
            assert sorted(map(str, before)) == sorted(map(str, after))


def test_a_repaired_order_is_read_back_from_its_file():
    opinion = examine(FACING)
    assert opinion.repaired is not None
    again = examine(notation(opinion.repaired.program))
    assert again.runs
    assert examine(opinion.compute_file.text).runs
