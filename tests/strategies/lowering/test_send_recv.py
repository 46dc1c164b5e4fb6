import pytest
from hypothesis import given

from strategies.compiler import compile_compute, compile_plan
from strategies.ir import verify
from strategies.ir.placement import bidirectional, v
from strategies.ir.program import Boundary
from strategies.lowering.send_recv import add_messages
from strategies.passes.reduce_grad import add_grad_reduce, add_steps
from strategies.passes.variants import accumulate_only, forward_only
from tests.strategies.programs import lines, plans, texts, written


def lowered(text, **options):
    """Lowered as what it is: accumulation, so that no optimizer step is asked for."""
    options.setdefault("role", "accumulate")
    return texts(verify(add_messages(verify(written(text, **options)))))


def test_a_message_leaves_behind_its_producer():
    text = """
        0F0 0B0
        1F0 1B0
    """
    assert lowered(text, num_microbatches=1) == lines(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1B0 1SEND_B0>0
        """
    )


def test_receives_stand_where_the_producer_ends_not_where_the_value_is_used():
    text = """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    assert lowered(text, num_microbatches=2) == lines(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
        1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0
        """
    )


def test_stages_that_meet_on_a_rank_exchange_no_message():
    text = """
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """
    assert lowered(text, num_microbatches=1, placement=v(2)) == lines(
        """
        0F0 0SEND_F0>1 3RECV_F0<2 3F0 3B0 3SEND_B0>2 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 2F0 2SEND_F0>3 2RECV_B0<3 2B0 1B0 1SEND_B0>0
        """
    )


def test_one_rank_needs_no_message():
    text = "0F0 1F0 1B0 0B0"
    assert lowered(text, num_microbatches=1, stages_per_rank=2) == [text]


def test_with_two_ranks_the_next_one_is_also_the_one_before():
    text = """
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
    """
    assert lowered(text, num_microbatches=1, stages_per_rank=2) == lines(
        """
        0F0 0SEND_F0>1 2RECV_F0<1 2F0 2SEND_F0>3 2RECV_B0<3 2B0 2SEND_B0>1 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1SEND_F0>2 3RECV_F0<2 3F0 3B0 3SEND_B0>2 1RECV_B0<2 1B0 1SEND_B0>0
        """
    )


def test_the_input_gradient_is_sent_before_the_weight_gradient_runs():
    text = """
        0F0 0I0 0W0
        1F0 1I0 1W0
    """
    assert lowered(text, num_microbatches=1) == lines(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0
        1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0
        """
    )


def test_odd_microbatches_of_two_copies_go_the_other_way():
    text = """
        0F0 1F1 1B1 0B0
        0F1 1F0 1B0 0B1
    """
    assert lowered(text, num_microbatches=2, placement=bidirectional(2)) == lines(
        """
        0F0 0SEND_F0>1 1RECV_F1<0 1F1 1B1 0RECV_B0<1 1SEND_B1>0 0B0
        0F1 1RECV_F0<0 0SEND_F1>1 1F0 1B0 1SEND_B0>0 0RECV_B1<1 0B1
        """
    )


def test_a_skip_connection_is_a_message_of_its_own():
    text = """
        0F0 0B0
        1F0 1B0
        2F0 2B0
    """
    boundaries = (Boundary(0, 1), Boundary(1, 2), Boundary(0, 2, ("skip",)))
    assert lowered(text, num_microbatches=1, boundaries=boundaries) == lines(
        """
        0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0
        1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0
        2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>0 2SEND_B0>1
        """
    )


def test_forwards_alone_send_no_gradients():
    text = """
        0F0 0F1
        1F0 1F1
    """
    assert lowered(text, num_microbatches=2, role="forward") == lines(
        """
        0F0 0SEND_F0>1 0F1 0SEND_F1>1
        1RECV_F0<0 1F0 1RECV_F1<0 1F1
        """
    )


def test_updates_keep_their_places():
    program = written("0F0 0B0\n1F0 1B0", num_microbatches=1)
    train = add_steps(add_grad_reduce(program, (1, 2), overlap=True))
    assert texts(verify(add_messages(verify(train)))) == lines(
        """
        0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE0 0STEP
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE0 1REDUCE1 1STEP
        """
    )


def test_a_program_is_lowered_once():
    with pytest.raises(AssertionError):
        add_messages(add_messages(written("0F0 0B0", num_microbatches=1)))


@given(plans())
def test_every_instruction_keeps_its_place_among_the_others(plan):
    compute = compile_compute(plan)
    stages = compute.placement.num_stages
    buckets = (plan.buckets,) * stages if isinstance(plan.buckets, int) else plan.buckets
    overlap = plan.overlap == "grad_reduce"
    train = add_steps(add_grad_reduce(compute, buckets, overlap=overlap))
    for program in (train, accumulate_only(train), forward_only(train)):
        result = add_messages(program)
        assert result.compute_rows() == program.ranks
        assert result.lowered
        assert (result.role, result.placement) == (program.role, program.placement)


@given(plans())
def test_every_rank_has_both_ends_of_its_messages_in_one_order_per_pair(plan):
    """What a transport without tags needs: between two ranks, sends and receives pair by order."""
    for program in (compile_plan(plan).train, compile_plan(plan).accumulate):
        rank_of = program.placement.rank_of
        for here, row in enumerate(program.ranks):
            for there in range(len(program.ranks)):
                sent = [
                    (item.payload, item.stage, item.peer, item.microbatch)
                    for item in row
                    if item.kind.value == "SEND" and rank_of(item.peer, item.microbatch) == there
                ]
                received = [
                    (item.payload, item.peer, item.stage, item.microbatch)
                    for item in program.ranks[there]
                    if item.kind.value == "RECV" and rank_of(item.peer, item.microbatch) == here
                ]
                assert sent == received
