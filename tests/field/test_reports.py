"""Orders from public threads, made anew after what they report: hangs, confusions, slow ones.

Each test is named by its thread and says in one sentence what is reported there. An order that
hangs is found under the promise of the transport that the thread speaks of, and repaired; one that
is slow is priced, and beaten by the same computations with messages (or layers) elsewhere.
"""

from __future__ import annotations

import pytest

from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError, ProgramError
from strategies.ir.program import Program
from strategies.lowering.send_recv import add_messages
from strategies.plan import Plan
from strategies.planner.cut import balance
from strategies.referee import Grouped, Semantics, examine, judge, repair, time_messages
from strategies.referee.foreign import Asked, layout_stages, read_flags
from strategies.referee.foreign.megatron_order import interleaved
from strategies.referee.foreign.their_words import as_csv
from strategies.referee.foreign.torch_order import named_order, one_f_one_b
from strategies.simulator.engine import simulate
from tests.field.test_threads import EARLY_RECEIVES
from tests.strategies.referee.orders import FACING, order

EVEN = UniformCosts(forward=1.0, backward=2.0, p2p=0.05)


def _stuck(program: Program, semantics: Semantics, grouped: Grouped = False) -> str:
    """The ring in words; a repaired order runs."""
    verdict = judge(program, semantics, grouped=grouped)
    assert not verdict.runs
    fixed = repair(program, semantics, grouped=grouped)
    assert fixed is not None
    left = False if fixed.ungrouped else grouped
    assert judge(fixed.program, semantics, grouped=left).runs
    return "\n".join(verdict.cycle) or str(verdict.crossing)


def _cost(program: Program, semantics: Semantics, costs: UniformCosts = EVEN) -> float:
    """What the places of its messages cost, over our placing of them."""
    bare = program.with_ranks(program.compute_rows())
    best = time_messages(add_messages(_bare(bare)), costs, semantics)
    took = time_messages(program, costs, semantics)
    assert took is not None and best is not None
    return took / best - 1


def _bare(program: Program) -> Program:
    return examine(as_csv([[str(item) for item in row] for row in program.ranks])).program


# --------------------------------------------------------------------------------- orders that hang


def test_nccl_479_both_ranks_send_before_they_receive():
    """Two ranks, each sends and then receives: stuck; as one group it runs."""
    ring = _stuck(order(FACING), "one_queue")
    assert "0SEND_F1>1" in ring and "1SEND_B0>0" in ring
    assert judge(order(FACING), "one_queue", grouped=True).runs


def test_nccl_783_the_send_is_to_be_delayed_until_the_receive():
    """The answer there: send when you also receive, as our lowering does."""
    fixed = repair(order(FACING), "rendezvous")
    assert fixed is not None
    assert fixed.placed
    assert judge(order(FACING), "buffered").runs


def test_torchcomms_2885_both_ranks_receive_before_they_send():
    """A group is replayed in its order, and a receive blocks: no buffer helps then."""
    text = FACING.replace("0SEND_F1,0RECV_B0,0B0", "0RECV_B0,0B0,0SEND_F1")
    text = text.replace("1SEND_B0,1RECV_F1", "1RECV_F1,1SEND_B0")
    assert "1RECV_F1<0" in _stuck(order(text), "buffered")


def test_pytorch_127332_forward_and_backward_messages_criss_cross():
    """Interleaved 1F1B, looped, forward and backward batched together: hangs across ranks."""
    program = order(as_csv(interleaved(3, 2, 3, 3, overlap=False)))
    assert "queues behind" in _stuck(program, "one_queue")
    assert judge(program, "one_queue", grouped=True).runs


def test_pippy_1088_the_last_send_of_the_warm_up_belongs_to_the_next_exchange():
    """Sent by itself it hangs; together with the receives of the next step it does not."""
    rows = one_f_one_b(2, 4)
    assert judge(order(as_csv(rows)), "one_queue", grouped="whole").runs
    assert rows[0][2:5] == ["0F1", "0SEND_F1", "0RECV_B0"]
    assert "0SEND_F1>1" in _stuck(order(as_csv(rows)), "one_queue")


@pytest.mark.parametrize("pp", [3, 4])
def test_torchtitan_775_fewer_microbatches_than_stages_hang_in_1f1b(pp: int):
    """One microbatch: the first rank's group of a send and a receive faces a receive alone."""
    rows = one_f_one_b(pp, 1)
    # torch's own: the last forward's send waits for the first backward's receive.
    assert rows[0] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
    program = order(as_csv(rows))
    ring = _stuck(program, "one_queue", "whole")
    assert "1RECV_F0<0 on rank 1 goes with 0SEND_F0>1, 0RECV_B0<1 and 1SEND_B0>0" in ring
    assert judge(program, "one_queue").runs and judge(program, "one_queue", grouped=True).runs


def test_pytorch_144702_as_many_microbatches_as_stages_are_enough():
    """The pull request asks for no fewer than stages; from there on the same groups run."""
    for count in (4, 5, 8):
        assert judge(order(as_csv(one_f_one_b(4, count))), "one_queue", grouped="whole").runs
    assert not judge(order(as_csv(one_f_one_b(4, 2))), "one_queue", grouped="whole").runs


def test_nccl_2130_a_group_waits_for_a_receive_that_nobody_has_sent_to_yet():
    """Asymmetric lists: two receives in one group on one side, two calls on the other."""
    text = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
    text += "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    program = order(text)
    ring = _stuck(program, "one_queue", "whole")
    assert "goes with 1RECV_F0<0, 1RECV_F1<0 and 0SEND_F1>1, which queues behind 0SEND_F0>1" in ring


def test_megatron_5100_a_fixed_order_in_each_exchange_deadlocks_where_odd_ranks_must_turn():
    """Four ranks, each sends before it receives; with odd ranks receiving first it runs."""
    rows = one_f_one_b(4, 5)
    assert "queues behind" in _stuck(order(as_csv(rows)), "one_queue")
    turned = [_turned(row) if rank % 2 else row for rank, row in enumerate(rows)]
    assert judge(order(as_csv(turned)), "one_queue").runs


def _turned(row: list[str]) -> list[str]:
    """SEND, RECV side by side as RECV, SEND."""
    found = list(row)
    for place in range(len(found) - 1):
        if "SEND" in found[place] and "RECV" in found[place + 1]:
            found[place], found[place + 1] = found[place + 1], found[place]
    return found


# ----------------------------------------------------------------------------------- wrong messages


def test_megatron_1495_two_ranks_take_an_activation_for_a_gradient():
    """PP=2, VPP=2, batched: next and previous rank are one, and what is sent as output is taken
    for a gradient."""
    program = order(as_csv(interleaved(2, 2, 4, 2, overlap=False)))
    verdict = judge(program, "one_queue", grouped=True)
    assert verdict.crossing is not None
    kinds = {verdict.crossing.sent.payload, verdict.crossing.received.payload}
    assert len(kinds) == 2
    fixed = repair(program, "one_queue", grouped=True)
    assert fixed is not None
    assert judge(fixed.program, "one_queue", grouped=True).runs


def test_megatron_750_with_overlapped_exchanges_two_ranks_are_enough():
    """The answer there: forward and backward exchanges are apart then, and nothing is confused."""
    program = order(as_csv(interleaved(2, 2, 4, 2, overlap=True)))
    for semantics in ("one_queue", "per_pair", "per_edge"):
        assert judge(program, semantics).runs


def test_deepspeed_5518_a_stage_receives_more_gradients_than_are_sent():
    """It hangs in RecvGrad: one gradient is sent, two are received."""
    text = FACING.replace("0RECV_B0,0B0", "0RECV_B0,0RECV_B0,0B0")
    with pytest.raises(ProgramError, match=r"line 1, column 6: 0RECV_B0 stands a second time"):
        examine(text)


def test_torchtitan_774_a_v_schedule_on_looped_stages():
    """ZBV was built with stages 0 4 8 on rank 0, and needs them as a V."""
    rows, _ = named_order("ZBVZeroBubble", 2, 4, None, where="x")
    with pytest.raises(ProgramError, match="the loop placement has it on rank"):
        examine(as_csv(rows), placement="loop")
    assert examine(as_csv(rows), placement="v").runs


def test_torchtitan_568_a_single_stage_schedule_on_looped_stages():
    """Stages were cut for a looped schedule, and the schedule ran one per rank: it hung."""
    with pytest.raises(PlanError, match="one stage per rank, and there are 2"):
        named_order("1F1B", 2, 4, 2, where="t.toml")
    half = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n"
    with pytest.raises(ProgramError, match="1SEND_F0 has no matching 2RECV_F0"):
        examine(half)


# -------------------------------------------------------------------------------------- slow orders


def test_pytorch_188833_a_receive_in_front_holds_up_sends_that_are_ready():
    """Interleaved 1F1B, 8 ranks, 2 stages each: in the warm-up a RECV stands before SENDs."""
    rows, _ = named_order("Interleaved1F1B", 8, 16, 2, where="x")
    assert rows[0][2] == "8RECV_F0" or "8RECV_F0" in rows[0][:20]
    assert _cost(order(as_csv(rows)), "one_queue") > 0.02


def test_pytorch_165664_rank_0_cannot_send_before_it_has_received_from_the_last_rank():
    """The list of the description: 0F0 0SEND_F0 8RECV_F0 0F1 0SEND_F1 8RECV_F1 and so on."""
    rows, _ = named_order("Interleaved1F1B", 8, 8, 2, where="x")
    program = order(as_csv(rows))
    early = time_messages(program, EVEN, "one_queue")
    apart = time_messages(program, EVEN, "per_edge")
    assert early is not None and apart is not None
    assert early > 1.05 * apart  # The remedy there: streams of their own for send and receive.


def test_torchtitan_2209_a_receive_that_blocks_computations_is_a_bubble_each():
    """Where a pending RECV holds what is behind it, its place before 0F1 costs time."""
    assert _cost(order(EARLY_RECEIVES), "rendezvous") > 0.1
    assert _cost(order(EARLY_RECEIVES), "per_edge") < 0.01


def test_zero_bubble_73_the_second_rank_begins_only_after_two_forwards_of_the_first():
    """Warm-up: what is sent of microbatch 0 leaves after the forward of microbatch 1."""
    rows = one_f_one_b(4, 8)
    late = [_late(row) for row in rows[:1]] + rows[1:]
    slow = time_messages(order(as_csv(late)), EVEN, "buffered")
    right = time_messages(order(as_csv(rows)), EVEN, "buffered")
    assert slow is not None and right is not None
    assert slow == pytest.approx(right + 1.0, abs=0.2)
    assert _cost(order(as_csv(late)), "buffered") > 0.02


def _late(row: list[str]) -> list[str]:
    """The first SEND behind the second forward."""
    found = list(row)
    found.remove("0SEND_F0")
    found.insert(found.index("0F1") + 1, "0SEND_F0")
    return found


def test_megatron_1829_groups_smaller_than_the_pipeline_make_bubbles():
    """Four ranks, groups of two microbatches: the first group's gradients come too late."""
    for group in (2, 4):
        rows = [
            [cell for cell in row if "_" not in cell]
            for row in interleaved(4, 2, 8, group, overlap=True)
        ]
        assert examine(as_csv(rows)).runs == (group == 4)
    with pytest.raises(PlanError, match="between 4 ranks and 8 microbatches"):
        read_flags(
            "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 "
            "--num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            Asked(),
            name="x.sh",
        )


# ------------------------------------------------------------------------------------------ layouts


def _layout_time(stages: tuple[str, ...], pp: int, count: int, *, head: float) -> float:
    """A step with layers of 1, the head of ``head`` layers, and an embedding that costs nothing."""
    took = [0.02 + stage.count("t") + (head if "L" in stage else 0.0) for stage in stages]
    chunks = len(stages) // pp
    costs = UniformCosts(forward=tuple(took), backward=tuple(2 * each for each in took))
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    plan = Plan(name, pp, count, chunks if chunks > 1 else None)
    return simulate(compile_plan(plan).train, costs).makespan


def test_megatron_bridge_5391_a_lighter_last_stage_balances_the_head():
    """Llama 3 70B, PP8 VP5: 80 layers evenly leave the stage with the head the slowest."""
    theirs = layout_stages("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", where="x")
    even = layout_stages("Et*2|(t*2|)*38,ttL", where="x")
    assert sum(stage.count("t") for stage in theirs) == sum(s.count("t") for s in even) == 80
    head = 1.2  # 128 k tokens x 8192 against the 0.86e9 weights of a layer
    assert _layout_time(theirs, 8, 16, head=head) < 0.99 * _layout_time(even, 8, 16, head=head)


def test_torchtitan_963_the_rest_of_the_layers_is_not_for_the_last_stage():
    """27 layers over 4 ranks, what is left over on the last one; a balanced cut is faster."""
    loads = [1.0] * 27
    last = ("E" + 6 * "t", 6 * "t", 6 * "t", 9 * "t" + "L")
    cut = balance(loads, 4)
    fair = tuple("t" * len(part) + ("L" if part.stop == 27 else "") for part in cut)
    assert _layout_time(fair, 4, 16, head=0.0) < 0.85 * _layout_time(last, 4, 16, head=0.0)


def test_megatron_1304_layers_that_the_pipeline_does_not_divide_are_not_dropped():
    """30 layers on 4 ranks: 28 were built, and nothing was said."""
    flags = (
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 "
        "--num-layers 30"
    )
    with pytest.raises(PlanError, match=r"--num-layers 30 .* 4 ranks"):
        read_flags(flags, Asked(), name="x.sh")
    layout = " --pipeline-model-parallel-layout 'Et*8|t*8|t*7|t*7L'"
    assert read_flags(flags + layout, Asked(), name="x.sh").layers == (8, 8, 7, 7)
    short = " --pipeline-model-parallel-layout 'Et*7|(t*7|)*2t*7L'"
    with pytest.raises(PlanError, match="the layout has 28 decoder layers"):
        read_flags(flags + short, Asked(), name="x.sh")


def test_megatron_1852_a_loss_that_is_not_on_the_last_stage():
    """16 ranks, two stages each: the loss with an empty stage behind it is refused, as there; a
    stage of its own for it is the layout that was asked for."""
    with pytest.raises(ProgramError, match=r"1 L \(loss\); it stands once, last of all"):
        layout_stages("Et|(tt|)*29L|", where="x")
    stages = layout_stages("Et|(tt|)*30L", where="x")
    assert len(stages) == 32 and stages[-1] == "L"
