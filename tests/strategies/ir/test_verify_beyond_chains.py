"""Programs with two weight copies, with microbatches in flight between steps, with skips."""

from strategies.analysis.memory import peak_activations
from strategies.ir import verify
from strategies.ir.program import Boundary, bidirectional
from tests.strategies.programs import lines, refusal, written

TWO_COPIES = """
    0F0 1F1 1B1 0B0 0REDUCE0 1REDUCE0 0STEP 1STEP
    0F1 1F0 1B0 0B1 0REDUCE0 1REDUCE0 0STEP 1STEP
"""


def two_copies(text=TWO_COPIES, **options):
    return written(text, num_microbatches=2, placement=bidirectional(2), **options)


def test_two_weight_copies_are_accepted():
    program = verify(two_copies())
    assert peak_activations(program) == (2, 2)


def test_two_weight_copies_with_messages_are_accepted():
    text = """
        0F0 0SEND_F0>1 1RECV_F1<0 1F1 1B1 1SEND_B1>0 0RECV_B0<1 0B0 0STEP 1STEP
        0F1 1RECV_F0<0 0SEND_F1>1 1F0 1B0 0RECV_B1<1 1SEND_B0>0 0B1 0STEP 1STEP
    """
    assert verify(two_copies(text, lowered=True))


def test_both_owners_of_a_stage_reduce_it():
    first, second = lines(TWO_COPIES)
    message = refusal(two_copies(f"{first}\n{second.replace('0REDUCE0', '')}"))
    assert message == (
        "written: ranks 0 and 1 hold copies of stages [0, 1] and must meet on them in the same "
        "order, but rank 0 runs 0REDUCE0 1REDUCE0, rank 1 runs 1REDUCE0."
    )


def test_both_owners_reduce_in_the_same_order():
    first, second = lines(TWO_COPIES)
    turned = second.replace("0REDUCE0 1REDUCE0", "1REDUCE0 0REDUCE0")
    message = refusal(two_copies(f"{first}\n{turned}"))
    assert "rank 0 runs 0REDUCE0 1REDUCE0, rank 1 runs 1REDUCE0 0REDUCE0." in message


def test_both_owners_step():
    first, second = lines(TWO_COPIES)
    message = refusal(two_copies(f"{first}\n{second.replace('0STEP', '')}"))
    assert message == "written: rank 1 owns stage 0 and never runs 0STEP."


def test_a_skip_connection_is_one_more_message():
    boundaries = (Boundary(0, 1), Boundary(1, 2), Boundary(0, 2, ("skip",)))
    text = """
        0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0RECV_B0<1 0B0 0STEP
        1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1STEP
        2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>0 2SEND_B0>1 2STEP
    """
    options = {"num_microbatches": 1, "boundaries": boundaries, "lowered": True}
    assert verify(written(text, **options))
    turned = text.replace("0RECV_B0<2 0RECV_B0<1", "0RECV_B0<1 0RECV_B0<2")
    message = refusal(written(turned, **options))
    assert "[0RECV_B0<1]" in message
    assert "[2SEND_B0>0] 2SEND_B0>1 2STEP  <-- waits for step 0RECV_B0<2 to be posted" in message
    missing = text.replace("2RECV_F0<0", "")
    message = refusal(written(missing, **options))
    assert message == (
        "written: 0SEND_F0>2 has no matching 2RECV_F0<0: the message never ends. "
        "Write 2RECV_F0<0, or remove 0SEND_F0>2."
    )
