from __future__ import annotations

import pytest

from strategies.errors import PlanError, ProgramError
from strategies.plan import ScheduleFile
from strategies.referee import SEMANTICS, examine, judge
from strategies.referee.foreign.their_words import as_csv
from strategies.referee.foreign.torch_order import named_order, one_f_one_b, torch_rows
from strategies.schedules.custom import read_order
from tests.strategies.referee.orders import order, torch_orders


def _without_bubbles(text: str) -> list[list[str]]:
    return [[cell for cell in line.split(",") if cell] for line in text.splitlines()]


def _bare(rows: list[list[str]]) -> list[list[str]]:
    """Without what speaks of sharded weights."""
    words = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    return [[cell for cell in row if not cell.endswith(words)] for row in rows]


def _same_as_torch(degrees: tuple[int, ...], counts: tuple[int, ...]) -> int:
    seen = 0
    for name, pp, count, text in torch_orders(degrees, counts):
        try:
            rows, _ = named_order(name, pp, count, None, where="x.toml")
        except PlanError:
            assert count < 2 * pp, (name, pp, count)  # An order of its own, and said so.
            continue
        assert rows == _bare(_without_bubbles(text)), (name, pp, count)
        seen += 1
    return seen


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_named_is_what_torch_makes_of_the_name_messages_included():
    assert _same_as_torch((2, 4), (8,)) >= 9


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_named_is_what_torch_makes_of_it_for_all_sizes():
    assert _same_as_torch((2, 4, 8), (2, 4, 6, 8, 12, 16, 24, 32)) >= 60


@pytest.mark.parametrize(("pp", "count"), [(2, 2), (2, 8), (4, 3), (4, 16)])
def test_the_exchanges_of_1f1b_run_as_groups_only(pp: int, count: int):
    program = order(as_csv(one_f_one_b(pp, count)))
    for semantics in SEMANTICS:
        grouped = judge(program, semantics, grouped=True).runs
        assert grouped or semantics in ("rendezvous",), semantics
    assert not judge(program, "one_queue").runs


def test_an_order_that_torch_finds_no_messages_for_is_refused():
    text = "1F0,0F0,0B0,1B0\n"
    program = read_order(ScheduleFile("x.csv", text), messages=False)
    with pytest.raises(ProgramError, match="rank 0 at 1F0"):
        torch_rows(program)


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "told"),
    [
        ("ZeroBubbleV", 4, None, "no schedule of torch"),
        ("1F1B", 4, 2, "one stage per rank"),
        ("ZBVZeroBubble", 4, 3, "does not take these numbers"),
        ("ZBVZeroBubble", 8, None, "from 15 microbatches on"),
    ],
)
def test_what_torch_does_not_have_is_refused(name: str, pp: int, chunks: int | None, told: str):
    with pytest.raises(PlanError, match=told):
        named_order(name, pp, 8, chunks, where="x.toml")


def test_a_named_order_is_read_as_any_file():
    rows, grouped = named_order("Interleaved1F1B", 2, 4, 3, where="x.toml")
    opinion = examine(as_csv(rows), grouped=grouped)
    assert opinion.runs and opinion.program.placement.num_stages == 6
