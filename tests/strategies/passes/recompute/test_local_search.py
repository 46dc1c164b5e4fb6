import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import UniformCosts
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_compute
from strategies.ir import Kind, verify
from strategies.ir.program import recomputed_pairs
from strategies.lowering.send_recv import add_messages
from strategies.passes.recompute.local_search import TimedLists, improve, makespan
from strategies.passes.recompute.mario import apply_checkpoint, overlap_recompute
from strategies.passes.recompute.optimal import recompute_to_fit
from strategies.passes.recompute.starts import (
    forwards_early,
    weights_at_once,
    weights_in_time,
)
from strategies.plan import Plan
from strategies.simulator.engine import simulate
from tests.strategies.programs import texts, written

COSTS = UniformCosts(p2p=0.3)


@pytest.mark.parametrize("fused", [None, 2.0])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "chimera", "zb_v", "dualpipe"])
def test_lists_take_the_time_that_the_simulator_says(schedule, fused):
    costs = UniformCosts(p2p=0.3, fused=fused)
    program = overlap_recompute(
        apply_checkpoint(compile_compute(Plan(schedule, 4, 8, costs=costs)))
    )
    wanted = simulate(add_messages(program), costs).makespan
    assert makespan(program, costs.table(program)) == pytest.approx(wanted)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_a_change_gives_the_times_of_the_changed_lists_and_can_be_undone(data):
    program = compile_compute(Plan(data.draw(st.sampled_from(["1f1b", "zb_v"])), 3, 5))
    table = COSTS.table(program)
    lists = TimedLists(program, table, (100,) * 3)
    rows, start, takes = list(lists.rows), list(lists.start), list(lists.takes)
    rank = data.draw(st.integers(0, 2))
    row = list(rows[rank])
    row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(data.draw(st.integers(0, 4))))
    pair = data.draw(st.sampled_from(sorted({pair for n in row for pair in lists.pairs[n]})))
    row.insert(row.index(lists.backward[pair]), lists.recompute[pair])
    change = lists.change(rank, row, pair=pair)
    cost = lists.retime(change)
    if cost is not None:
        fresh = TimedLists(lists.program(lists.rows), table)
        assert cost == pytest.approx(fresh.cost)
        before = lists.keep()
        found = {str(lists.items[n]): lists.start[n] for row in lists.rows for n in row}
        wanted = {str(fresh.items[n]): fresh.start[n] for row in fresh.rows for n in row}
        assert found == pytest.approx(wanted)
        lists.start, lists.end = before
    lists.undo(change)
    assert (lists.rows, lists.start, lists.takes) == (rows, start, takes)


def test_lists_that_cannot_run_or_take_too_long_cost_nothing():
    program = written("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2)
    lists = TimedLists(program, COSTS.table(program), (2, 2))
    first, second, *rest = lists.rows[0]
    change = lists.change(0, [second, first, *rest])
    assert lists.retime(change) is None
    lists.undo(change)
    same = lists.change(0, list(lists.rows[0]))
    assert lists.retime(same, limit=lists.cost.makespan) == lists.cost
    assert lists.retime(same, limit=lists.cost.makespan - 1) is None


def test_a_change_that_needs_more_room_is_not_made():
    program = written("0F0 0F1 0R1 0B0 0B1", num_microbatches=2)
    lists = TimedLists(program, COSTS.table(program), (1,))
    before = list(lists.rows)
    assert lists.peak(lists.rows[0]) == 2
    assert lists.change(0, list(lists.rows[0])) is None
    assert lists.rows == before
    fits = lists.change(0, [before[0][i] for i in (0, 1, 3, 2, 4)])
    assert texts(lists.program(lists.rows)) == ["0F0 0F1 0B0 0R1 0B1"]
    assert fits is not None


@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {}), ("zb_v", {}), ("dualpipe", {"fused": 2.0})]
)
def test_what_is_improved_keeps_its_instructions_and_its_room(schedule, options):
    costs = UniformCosts(p2p=0.05, **options)
    program = compile_compute(Plan(schedule, 4, 8, costs=costs))
    table, room = costs.table(program), (2 * program.placement.stages_per_rank,) * 4
    start = recompute_to_fit(weights_at_once(program), room)
    found = verify(improve(start, table, room, goal=0.0))
    assert makespan(found, table) < makespan(start, table)
    assert all(
        held * program.placement.stages_per_microbatch <= places + 1e-9
        for held, places in zip(peak_activations(found), room, strict=True)
    )
    for mine, theirs in zip(start.ranks, found.ranks, strict=True):
        assert sorted(str(i) for i in mine if i.kind is not Kind.R) == sorted(
            str(i) for i in theirs if i.kind is not Kind.R
        )
    assert found == improve(start, table, room, goal=0.0)
    assert improve(found, table, room, goal=makespan(found, table)) is found


def test_forwards_run_while_a_tight_rank_would_wait():
    program = written("0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1B0 1F1 1B1 1F2 1B2", num_microbatches=3)
    early = verify(forwards_early(program, UniformCosts().table(program), (True, False)))
    assert texts(early) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert forwards_early(program, COSTS.table(program), (False, False)) == program
    assert not recomputed_pairs(early)


def test_a_w_comes_earlier_where_its_place_is_needed_and_no_other():
    program = written("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2", num_microbatches=3)
    found = verify(weights_in_time(program, (2,)))
    assert texts(found) == ["0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"]
    assert recompute_to_fit(program, (2,)) is None
    assert recompute_to_fit(found, (2,)) == found
    assert weights_in_time(program, (3,)) == program
