"""Our compute orders against the lists of torch.distributed.pipelining itself."""

import pytest

from strategies import compile_program
from tests.strategies.programs import compute_texts

schedule_visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")


def of_torch(schedule, pp, microbatches, stages):
    rows = schedule_visualizer.get_schedule_ops(schedule, pp, microbatches, stages)
    return [
        " ".join(
            str(action) for action in row if action is not None and "REDUCE" not in str(action)
        )
        for row in rows
    ]


def ours(schedule, pp, microbatches, stages):
    program = compile_program(
        schedule=schedule, pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    return compute_texts(program)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_gpipe_is_that_of_torch(pp, microbatches):
    assert ours("gpipe", pp, microbatches, 1) == of_torch("GPipe", pp, microbatches, 1)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_interleaved_1f1b_is_that_of_torch(pp, rounds, stages):
    expected = of_torch("Interleaved1F1B", pp, rounds * pp, stages)
    assert ours("interleaved_1f1b", pp, rounds * pp, stages) == expected


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_1f1b_is_that_of_torch_on_all_ranks_but_the_last(pp, microbatches):
    """torch 2.13 numbers the forwards of its last rank F1..FM."""
    theirs = of_torch("1F1B", pp, microbatches, 1)
    rows = ours("1f1b", pp, microbatches, 1)
    assert rows[:-1] == theirs[:-1]
    shape = [name[:2] for name in rows[-1].split()]
    assert shape == [name[:2] for name in theirs[-1].split()]
