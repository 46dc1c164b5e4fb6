import random
import re
import sys
from dataclasses import replace
from inspect import getdoc
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.ascii import draw, legend
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.timeline import Timeline
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.schedules import SCHEDULES


def timeline(schedule, pp, num_microbatches, stages_per_rank=None, **costs):
    program = compile_program(
        schedule=schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    return simulate(program, UniformCosts(**costs))


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_1f1b_is_drawn_as_in_the_papers():
    assert draw(timeline("1f1b", 3, 4)) == picture(
        """
        rank 0 | 0F0 0F1 0F2  .   .   .   .  0B0  -  0F3 0B1  -   .  0B2  -   .  0B3  -
        rank 1 |  .  1F0 1F1  .   .  1B0  -  1F2 1B1  -  1F3 1B2  -   .  1B3  -   .   .
        rank 2 |  .   .  2F0 2B0  -  2F1 2B1  -  2F2 2B2  -  2F3 2B3  -   .   .   .   .
        """
    )


def test_a_reduction_gets_a_line_of_its_own():
    assert draw(timeline("1f1b", 2, 2, grad_reduce=2)) == picture(
        """
        rank 0 | 0F0 0F1  .   .  0B0  -   .  0B1  -   .   .
        comm 0 |  .   .   .   .   .   .   .   .   .  0.0  -
        rank 1 |  .  1F0 1B0  -  1F1 1B1  -   .   .   .   .
        comm 1 |  .   .   .   .   .   .   .  1.0  -   .   .
        """
    )


def test_virtual_stages_make_the_slot_as_short_as_their_forward():
    assert draw(timeline("foldx_aiao", 2, 2, grad_reduce=4)) == picture(
        """
        rank 0 | 0F0 0F1 2F0 2F1  .   .   .  2B0  -  2B1  -  0B0  -  0B1  -   .   .   .   .
        comm 0 |  .   .   .   .   .   .   .   .   .   .   .  2.0  -   -   -  0.0  -   -   -
        rank 1 |  .  1F0 1F1 3F0 3F1 3B0  -  3B1  -  1B0  -  1B1  -   .   .   .   .   .   .
        comm 1 |  .   .   .   .   .   .   .   .   .  3.0  -   -   -  1.0  -   -   -   .   .
        """
    )


def test_a_narrow_terminal_continues_the_picture_below():
    assert draw(timeline("gpipe", 2, 3), width=36) == picture(
        """
        rank 0 | 0F0 0F1 0F2  .   .   .
        rank 1 |  .  1F0 1F1 1F2 1B0  -

        rank 0 | 0B0  -  0B1  -  0B2  -
        rank 1 | 1B1  -  1B2  -   .   .
        """
    )


def test_times_without_a_common_divisor_are_rounded_and_the_legend_says_so():
    assert draw(timeline("gpipe", 2, 2, p2p=0.07)) == picture(
        """
        rank 0 | 0F0 0F1  .   .   .  0B0  -  0B1  -
        rank 1 |  .  1F0 1F1 1B0  -  1B1  -   .   .

        a slot is 1 F, times rounded; 2F0: stage 2, forward, microbatch 0; -: still running; .: idle
        """
    )


def test_a_very_long_picture_shows_one_kind_per_column():
    text = draw(timeline("gpipe", 2, 60), width=49)
    assert text == picture(
        """
        rank 0 | FFFFFFFFFFFFF.BBBBBBBBBBBBBBBBBBBBBBBBBB
        rank 1 | FFFFFFFFFFFFFBBBBBBBBBBBBBBBBBBBBBBBBBBB
        """
    ) + "\n\n" + legend(timeline("gpipe", 2, 60), width=49)
    assert "a column is 4.575 F" in text


def test_ranks_of_two_digits_stay_aligned():
    lines = draw(timeline("1f1b", 11, 1)).splitlines()
    assert lines[0].startswith("rank  0 | 0F0   .")
    assert lines[10].startswith("rank 10 |  .    .")
    assert len({line.index("|") for line in lines}) == 1


def test_instructions_that_overlap_on_a_rank_are_both_shown():
    whole = timeline("gpipe", 1, 2)
    together = replace(whole, start=((0.0, 0.0, 1.0, 3.0, 5.0, 5.0),))
    together = replace(together, end=((1.0, 1.0, 3.0, 5.0, 5.0, 5.0),))
    assert [str(i) for i in whole.program.ranks[0]][:2] == ["0F0", "0F1"]
    assert draw(together) == picture(
        """
        rank 0 | 0F0 0B0  -  0B1  -
               | 0F1  .   .   .   .
        """
    )


def test_a_later_step_is_drawn_from_its_own_start():
    first = timeline("1f1b", 2, 3, grad_reduce=1)
    shifted = tuple(tuple(time + 100.25 for time in row) for row in first.start)
    later = replace(
        first, start=shifted, end=tuple(tuple(t + 100.25 for t in row) for row in first.end)
    )
    assert draw(later) == draw(first)


def block(docstring: str) -> str:
    """The literal block that holds the docstring's timeline."""
    blocks = re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", docstring + "\n")
    return picture(next(text for text in blocks if "rank 0 |" in text))


DOCUMENTED = [
    name
    for name, schedule in SCHEDULES.items()
    if "rank 0 |" in (sys.modules[schedule.order.__module__].__doc__ or "")
]


def test_every_schedule_has_a_timeline_in_its_docstring():
    assert set(DOCUMENTED) == set(SCHEDULES)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_timeline_in_a_schedules_docstring_is_what_is_simulated(name):
    docstring = getdoc(sys.modules[SCHEDULES[name].order.__module__])
    caption = re.search(
        r"(\d+) ranks, (\d+) microbatches(?:, (\d+) stages per rank)?, B twice as long as F",
        " ".join(docstring.split()),
    )
    assert caption, "the caption reads: P ranks, M microbatches[, V stages per rank], B twice ..."
    pp, num_microbatches, stages = (int(part) if part else None for part in caption.groups())
    assert draw(timeline(name, pp, num_microbatches, stages), width=96) == block(docstring)


def shaken(exact: Timeline, seed: int) -> Timeline:
    """Each instruction up to half again as long, ranks kept busy in order: a measured step."""
    draws = random.Random(seed)
    starts, ends = [], []
    for start, end in zip(exact.start, exact.end, strict=True):
        # Monotone in time, so that nothing overlaps that did not.
        stretch = draws.uniform(1.0, 1.5)
        bend = draws.uniform(0.0, 0.3)
        starts.append(tuple(0.01 * (stretch * t + bend * t**1.1) for t in start))
        ends.append(tuple(0.01 * (stretch * t + bend * t**1.1) for t in end))
    return replace(exact, start=tuple(starts), end=tuple(ends), time_unit="s", origin="measured")


@given(
    name=st.sampled_from(["1f1b", "gpipe", "foldx_fifo", "interleaved_1f1b"]),
    pp=st.integers(1, 5),
    num_microbatches=st.integers(1, 9),
    backward=st.sampled_from([1.0, 1.5, 2.0, 2.3]),
    p2p=st.sampled_from([0.0, 0.1, 0.5]),
    measured=st.booleans(),
)
def test_every_instruction_is_named_exactly_once(
    name, pp, num_microbatches, backward, p2p, measured
):
    drawn = timeline(name, pp, num_microbatches, backward=backward, p2p=p2p)
    if measured:
        drawn = shaken(drawn, seed=pp * 100 + num_microbatches)
    lines = draw(drawn).splitlines()
    for rank, row in enumerate(drawn.program.ranks):
        named = [word for word in lines[rank].split(" | ")[1].split() if word not in ".-"]
        assert named == [str(item) for item in row if item.kind in MICROBATCH_KINDS]
