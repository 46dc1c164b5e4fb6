"""Orders from public threads, each found broken (or whole) as its thread says, and repaired.

A test is named by its thread. Orders are the facts that were reported there; words are ours.
"""

from __future__ import annotations

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.referee import SEMANTICS, examine, judge, notation, repair
from tests.strategies.referee.orders import order

# Interleaved 1F1B, 2 ranks, 2 microbatches: each RECV at the place of its SEND.
EARLY_RECEIVES = """\
0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,\
2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,2REDUCE_GRAD,2RESHARD,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,\
0RESHARD
1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3B0,3SEND_B0,\
1RECV_B0,3F1,3B1,3SEND_B1,1RECV_B1,3REDUCE_GRAD,3RESHARD,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,\
1RESHARD
"""
# The same schedule with 4 microbatches: each RECV right before what uses it.
LATE_RECEIVES = """\
0UNSHARD,2UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,0F2,\
0SEND_F2,2RECV_B0,2B0,2SEND_B0,0F3,0SEND_F3,2RECV_B1,2B1,2SEND_B1,2RECV_F2,2F2,2SEND_F2,0RECV_B0,\
0B0,2RECV_F3,2F3,2SEND_F3,0RECV_B1,0B1,2RECV_B2,2B2,2SEND_B2,2RECV_B3,2B3,2SEND_B3,2REDUCE_GRAD,\
2RESHARD,0RECV_B2,0B2,0RECV_B3,0B3,0REDUCE_GRAD,0RESHARD
1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,\
3F1,3B1,3SEND_B1,1RECV_F2,1F2,1SEND_F2,1RECV_B0,1B0,1SEND_B0,1RECV_F3,1F3,1SEND_F3,1RECV_B1,1B1,\
1SEND_B1,3RECV_F2,3F2,3B2,3SEND_B2,3RECV_F3,3F3,3B3,3SEND_B3,3REDUCE_GRAD,3RESHARD,1RECV_B2,1B2,\
1SEND_B2,1RECV_B3,1B3,1SEND_B3,1REDUCE_GRAD,1RESHARD
"""


def _runs(program: Program) -> set[str]:
    return {each for each in SEMANTICS if judge(program, each).runs}


def test_pytorch_172668_the_order_that_blocks_computations_can_run():
    """It is slow where a pending RECV holds up what is queued behind it, but no deadlock."""
    assert _runs(order(EARLY_RECEIVES)) == set(SEMANTICS)


def test_pytorch_172833_receives_moved_to_their_use_deadlock():
    """Reported stuck at 0SEND_F1, 2RECV_F0 and 1SEND_F0, 1RECV_F1, over two nodes."""
    opinion = examine(LATE_RECEIVES)
    assert _runs(opinion.program) == {"buffered", "per_edge"}
    assert opinion.asked.cycle == (
        "0SEND_F1>1 on rank 0 waits for 1RECV_F1<0, which queues behind 1SEND_F0>2",
        "1SEND_F0>2 on rank 1 waits for 2RECV_F0<1, which queues behind 0SEND_F1>1",
    )
    assert opinion.repaired is not None
    assert examine(notation(opinion.repaired.program)).runs


def test_pytorch_195760_a_communicator_per_edge_lets_that_order_run():
    assert judge(order(LATE_RECEIVES), "per_edge").runs


def _swapped(row: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """SEND, RECV side by side as RECV, SEND."""
    items = list(row)
    for place in range(len(items) - 1):
        if (items[place].kind, items[place + 1].kind) == (Kind.SEND, Kind.RECV):
            items[place], items[place + 1] = items[place + 1], items[place]
    return tuple(items)


def test_pytorch_172668_receiving_first_on_odd_ranks_is_not_enough():
    """Reported stuck: 3SEND_B0 waits for a RECV behind 0SEND_F2, whose RECV comes after it."""
    program = order(LATE_RECEIVES)
    odd = program.with_ranks((program.ranks[0], _swapped(program.ranks[1])))
    verdict = judge(odd, "one_queue")
    assert verdict.cycle == (
        "0SEND_F2>1 on rank 0 waits for 1RECV_F2<0, which queues behind 3SEND_B0>2",
        "3SEND_B0>2 on rank 1 waits for 2RECV_B0<3, which queues behind 0SEND_F2>1",
    )
    found = repair(odd, "one_queue")
    assert found is not None
    assert judge(found.program, "one_queue").runs
