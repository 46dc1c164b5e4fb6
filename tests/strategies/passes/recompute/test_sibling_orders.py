import pytest

from strategies.compiler import compile_compute
from strategies.ir import verify
from strategies.passes.recompute.sibling_orders import sibling_orders
from strategies.plan import Plan


def siblings(schedule, pp=4, microbatches=8, *, every=True, **options):
    program = compile_compute(Plan(schedule, pp, microbatches, **options))
    return program, sibling_orders(program, every=every)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [("zb_v", 2), ("interleaved_1f1b", 2), ("1f1b", 2), ("zb_h1", 1), ("hanayo", 0),
     ("chimera", 0)],
)  # fmt: skip
def test_they_run_the_same_instructions_on_the_same_ranks(schedule, count):
    program, found = siblings(schedule)
    assert len(found) == count
    for other in found:
        assert verify(other) is other
        assert other.placement == program.placement
        assert other.ranks != program.ranks
        for mine, theirs in zip(program.ranks, other.ranks, strict=True):
            assert sorted(map(str, mine)) == sorted(map(str, theirs))
            assert len(mine) == len(theirs)


def test_a_split_program_has_split_siblings_only():
    _, found = siblings("1f1b", split_backward=True)
    assert len(found) == 1
    assert all(item.kind.name in "FIW" for row in found[0].ranks for item in row)


def test_of_long_programs_the_leanest_alone_is_asked():
    assert len(siblings("zb_v", every=False)[1]) == 1
    assert siblings("1f1b", every=False)[1] == []
