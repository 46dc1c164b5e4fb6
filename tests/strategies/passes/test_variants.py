from strategies.ir import verify
from strategies.passes.updates import accumulate_only, forward_only
from tests.strategies.programs import lines, texts, written

TRAIN = written(
    """
    0GATHER 0F0 0F1 0R0 0I0 0W0 0B1 0REDUCE0@0B1 0STEP
    1GATHER 1F0 1B0 1F1 1B1 1REDUCE0 1STEP
    """,
    num_microbatches=2,
)


def test_an_accumulating_program_has_all_gradients_and_no_update():
    program = verify(accumulate_only(TRAIN))
    assert program.role == "accumulate"
    assert texts(program) == lines(
        """
        0GATHER 0F0 0F1 0R0 0I0 0W0 0B1
        1GATHER 1F0 1B0 1F1 1B1
        """
    )


def test_a_forward_program_has_only_the_forwards_in_their_order():
    program = verify(forward_only(TRAIN))
    assert program.role == "forward"
    assert texts(program) == ["0F0 0F1", "1F0 1F1"]


def test_the_training_program_stays_as_it_was():
    before = texts(TRAIN)
    accumulate_only(TRAIN)
    forward_only(TRAIN)
    assert (texts(TRAIN), TRAIN.role) == (before, "train")
