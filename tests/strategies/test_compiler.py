from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_compute, compile_plan
from strategies.errors import PlanError
from strategies.ir import Kind, verify
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.ir.text import format_rows, parse_rows
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from tests.strategies.programs import plans, texts


def kinds(program):
    return {item.kind for row in program.ranks for item in row}


@given(plans())
def test_all_three_programs_of_every_plan_are_correct_and_survive_text(plan):
    programs = compile_plan(plan)
    roles = {
        "train": programs.train,
        "accumulate": programs.accumulate,
        "forward": programs.forward,
    }
    for role, program in roles.items():
        assert program.role == role
        assert program.lowered
        assert program.num_microbatches == plan.num_microbatches
        read = replace(program, ranks=parse_rows(format_rows(program.ranks)))
        assert read == program
        assert verify(read) is read


@given(plans())
def test_the_three_programs_have_one_order(plan):
    programs = compile_plan(plan)

    def order(program, wanted):
        return [[item for item in row if item.kind in wanted] for row in program.ranks]

    if plan.schedule == "foldx" and plan.group is None:
        plan = replace(plan, group=programs.choice.group)
    # Without costs that say so, fusing gains nothing.
    bare = [[p for item in row for p in item.parts] for row in compile_compute(plan).ranks]
    train = order(programs.train, MICROBATCH_KINDS)
    assert train == order(programs.accumulate, MICROBATCH_KINDS) == bare
    assert order(programs.train, {Kind.F}) == order(programs.forward, {Kind.F})
    assert kinds(programs.accumulate) <= MICROBATCH_KINDS | {Kind.SEND, Kind.RECV}
    assert kinds(programs.forward) <= {Kind.F, Kind.SEND, Kind.RECV}


@given(plans())
def test_every_stage_is_reduced_in_its_buckets_and_stepped(plan):
    program = compile_plan(plan).train
    stages = program.placement.num_stages
    wanted = (plan.buckets,) * stages if isinstance(plan.buckets, int) else plan.buckets
    for rank, row in enumerate(program.ranks):
        owned = program.placement.stages_of(rank)
        for stage in owned:
            found = [i.bucket for i in row if i.kind is Kind.REDUCE and i.stage == stage]
            assert found == list(range(wanted[stage]))
        assert sorted(i.stage for i in row if i.kind is Kind.STEP) == list(owned)
        # Overlapped reductions start inside a backward, held ones carry an edge.
        held = plan.overlap == "none"
        assert all(bool(i.after) is held for i in row if i.kind is Kind.REDUCE)


BALANCED = st.tuples(
    st.sampled_from(("gpipe", "1f1b", "interleaved_1f1b", "foldx_fifo", "foldx_aiao")),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 4),
)


@given(BALANCED, st.sampled_from((1.0, 2.0, 3.5)))
def test_where_pp_divides_m_the_bubble_is_the_papers(case, backward):
    """(p-1)(F+B)/v over m(F+B), whatever the schedule; they differ in memory and reductions."""
    schedule, pp, rounds, stages = case
    stages = 1 if schedule in ("gpipe", "1f1b") else stages
    microbatches = rounds * pp
    program = compile_program(
        schedule=schedule, pp=pp, num_microbatches=microbatches, stages_per_rank=stages
    )
    both = 1 + backward
    expected = microbatches * both + (pp - 1) * both / stages
    assert simulate(program, UniformCosts(backward=backward)).makespan == pytest.approx(expected)


def test_keywords_and_plan_are_two_ways_to_one_program():
    plan = Plan("interleaved_1f1b", 2, 4, 3, 4, "none", (1, 2, 0, 1, 1, 1))
    by_name = compile_program(
        schedule="interleaved_1f1b",
        pp=2,
        num_microbatches=4,
        stages_per_rank=3,
        group=4,
        overlap="none",
        buckets=(1, 2, 0, 1, 1, 1),
    )
    assert compile_plan(plan).train is by_name


def test_buckets_are_given_per_stage():
    with pytest.raises(PlanError) as error:
        compile_program(schedule="foldx_fifo", pp=2, num_microbatches=2, buckets=(1, 1))
    assert str(error.value) == "buckets=[1, 1]: one number per stage is needed, here 4."


def test_a_short_batch_gets_a_program_of_its_own():
    short = compile_plan(Plan("1f1b", 2, 8, buckets=2), 3)
    assert short.train.ranks == compile_plan(Plan("1f1b", 2, 3, buckets=2)).train.ranks
    assert len(short.forward.ranks[0]) == 6


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"custom"}))
def test_a_short_batch_runs_whatever_number_its_schedule_asks_for(schedule, count):
    short = compile_plan(Plan(schedule, 2, 8), count)
    for program in (short.train, short.accumulate, short.forward):
        assert program.num_microbatches == count
        assert verify(program) is program


@pytest.mark.parametrize(
    ("stages", "microbatches", "reduction", "group", "peak"),
    [(2, 23, 12, 8, 7.5), pytest.param(4, 28, 16, 10, 9.25, marks=pytest.mark.full)],
)
def test_foldx_takes_the_group_of_least_peak_at_the_shortest_time(
    stages, microbatches, reduction, group, peak
):
    costs = UniformCosts(grad_reduce=reduction)
    plan = Plan("foldx", 4, microbatches, stages, costs=costs)
    programs = compile_plan(plan)
    assert programs.choice is not None
    assert programs.choice.group == group
    assert max(peak_activations(programs.train)) == peak
    all_in = compile_plan(replace(plan, group=microbatches)).train
    best = simulate(all_in, costs).makespan
    assert simulate(programs.train, costs).makespan == pytest.approx(best)
    assert programs.choice.reason.startswith(f"schedule.group={group}: makespan {best:.5g}")


def test_bare_compute_has_neither_messages_nor_updates():
    assert texts(compile_compute(Plan("1f1b", 2, 2))) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_a_whole_training_program():
    assert texts(compile_program(schedule="1f1b", pp=2, num_microbatches=2)) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0REDUCE0 0STEP",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE0 1STEP",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"pp": "4"}, "pp='4': expected a whole number. Try pp=2."),
        ({"pp": True}, "pp=True: expected a whole number. Try pp=2."),
        (
            {"split_backward": "yes"},
            "split_backward='yes': expected True or False. Try split_backward=False.",
        ),
        ({"vertical_sync": 1}, "vertical_sync=1: expected True or False. Try vertical_sync=False."),
        (
            {"schedule": "custom", "file": "x.csv"},
            "file='x.csv': expected a ScheduleFile or None. Try file=read_schedule_file('my.csv').",
        ),
        (
            {"pp": 2, "num_microbatches": 4.0},
            "num_microbatches=4.0: expected a whole number or None. Try",
        ),
        ({"pp": 2, "schedule": 3}, "schedule=3: expected a text. Try schedule='1f1b'."),
        (
            {"pp": 2, "costs": {}},
            "costs={}: expected costs such as UniformCosts() or None. Try costs=Uni",
        ),
        ({"pp": 2, "recompute": "full"}, "expected a Recompute. Try recompute=Recompute('full')."),
    ],
)
def test_words_of_another_type_are_refused_by_name(words, told):
    with pytest.raises(PlanError) as raised:
        compile_program(**words)
    assert told in str(raised.value)
