from collections import Counter
from dataclasses import replace

import pytest

from launcher.report.ascii import legend
from launcher.report.rows import timeline_data
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from strategies.compiler import compile_plan
from strategies.errors import PlanError
from strategies.ir.kinds import Kind
from strategies.ir.text import format_rows
from strategies.ir.versions import gradient_sums, staleness, weight_versions
from strategies.plan import Plan, Recompute
from tests.strategies.programs import lines
from tests.strategies.schedules.figures import picture


def test_the_papers_figure_without_the_pauses(golden):
    golden("schedules/pipedream_2bw", "\n".join(picture("pipedream_2bw", 4, 4)) + "\n")


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_microbatch_k_uses_the_version_of_the_paper(pp, more):
    microbatches = pp + more
    program = compile_program(schedule="pipedream_2bw", pp=pp, num_microbatches=microbatches)
    for row in program.ranks:
        for item in row:
            if item.kind in (Kind.F, Kind.B):
                k = item.microbatch + 1
                assert item.version == max((k - 1) // microbatches - 1, 0)
    assert staleness(program) == (1,) * pp
    assert weight_versions(program) == (2,) * (pp - 1) + (1,)
    assert gradient_sums(program) == (2,) * pp


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_in_steady_state_nobody_waits_from_as_many_microbatches_as_ranks_on(pp, backward):
    costs = UniformCosts(backward=backward)
    program = compile_program(schedule="pipedream_2bw", pp=pp, num_microbatches=pp)
    timeline = simulate(program, costs)
    figures = measure(timeline, costs)
    assert figures.period == figures.makespan == figures.lower_bound == pp * (1 + backward)
    assert figures.bubble_ratio == pytest.approx(0, abs=1e-9)
    assert figures.gap_to_ideal == pytest.approx(0, abs=1e-9)
    assert figures.peak_activations == tuple(range(pp, 0, -1))
    assert not figures.synchronous
    # What it takes to fill and to drain the pipeline is there once.
    batches = program.num_microbatches // pp
    assert timeline.makespan == (batches * pp + pp - 1) * (1 + backward)


def test_forwards_that_run_again_are_those_of_one_batch():
    costs = UniformCosts()
    program = compile_program(
        schedule="pipedream_2bw", pp=2, num_microbatches=2, recompute=Recompute("full")
    )
    assert measure(simulate(program, costs), costs).recomputed == 4


def test_a_forward_that_runs_again_waits_for_its_gradients_message_in_each_step():
    stream = compile_plan(Plan("pipedream_2bw", 3, 3, recompute=Recompute("full"))).stream
    assert stream is not None
    parts = stream.drain(stream.first_steady)
    for program in (*map(stream.step, range(stream.first_steady + stream.cycle)), *parts):
        for row in program.ranks[:-1]:
            seen = []
            for item in row:
                if item.kind is Kind.R:
                    here = f"{item.stage}RECV_B{item.microbatch}<{item.stage + 1}"
                    assert [*map(str, item.after)] == [here]
                    assert here in seen
                seen.append(str(item))


def test_a_step_takes_what_zero_bubbles_promise_and_no_flush_gets():
    def period(schedule):
        program = compile_program(schedule=schedule, pp=4, num_microbatches=4)
        return measure(simulate(program, UniformCosts()), UniformCosts()).period

    assert [period(name) for name in ("pipedream_2bw", "1f1b", "zb_v")] == [12, 21, 13.5]


def test_reductions_run_under_the_next_batch():
    costs = UniformCosts(grad_reduce=9.0)
    late = compile_program(schedule="pipedream_2bw", pp=4, num_microbatches=6)
    assert measure(simulate(late, costs), costs).exposed_grad_reduce == 0
    assert measure(simulate(late, costs), costs).period == 18
    # One that outlasts them is waited for; a rank that waits for something else says nothing of it.
    long = UniformCosts(grad_reduce=60.0)
    waited = measure(simulate(late, long), long).exposed_grad_reduce
    assert waited > 0
    for buckets, found in ((1, waited), (0, 0)):
        program = compile_program(
            schedule="pipedream_2bw", pp=4, num_microbatches=6, buckets=buckets
        )
        timeline = simulate(program, long)
        start = [
            [at + 5 * (i.kind is Kind.STEP) for i, at in zip(row, times, strict=True)]
            for row, times in zip(program.ranks, timeline.start, strict=True)
        ]
        assert replace(timeline, start=start).exposed_grad_reduce == found
    flushed = compile_program(schedule="1f1b", pp=4, num_microbatches=6)
    assert measure(simulate(flushed, costs), costs).exposed_grad_reduce > 0


def test_fewer_microbatches_than_ranks_are_refused():
    with pytest.raises(PlanError, match=r"num_microbatches=3: pipedream_2bw .* num_microbatches=4"):
        compile_program(schedule="pipedream_2bw", pp=4, num_microbatches=3)
    with pytest.raises(PlanError, match=r"=1 over accumulate_grad_batches=3 .* num_microbatches=2"):
        compile_plan(Plan("pipedream_2bw", 4, 1, accumulation=3))


def test_several_batches_may_make_an_update():
    plan = Plan("pipedream_2bw", 4, 2, accumulation=3)
    program = compile_plan(plan).train
    assert {(i.microbatch // 6, i.version) for i in program.ranks[0] if i.kind is Kind.F} == {
        (0, 0), (1, 0), (2, 1),
    }  # fmt: skip
    assert weight_versions(program) == (2, 2, 2, 1)
    figures = measure(simulate(program, UniformCosts()), UniformCosts())
    assert (figures.period, figures.bubble_ratio) == (6, pytest.approx(0, abs=1e-9))


def test_a_call_lets_a_batch_in_and_applies_the_update_of_the_one_before():
    calls = compile_plan(Plan("pipedream_2bw", 2, 2)).stream
    assert format_rows(calls.step(0).ranks).splitlines() == lines(
        """
        0F0 0SEND_F0>1 0F1 0RECV_B0<1 0SEND_F1>1 0B0
        1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE0#1
        """
    )
    assert format_rows(calls.step(1).ranks).splitlines() == lines(
        """
        0F2 0RECV_B1<1 0SEND_F2>1 0B1 0REDUCE0#0 0F3 0RECV_B2<1 0SEND_F3>1 0B2 0STEP#0
        1RECV_F2<0 1F2 1B2 1SEND_B2>0 1RECV_F3<0 1F3 1B3 1SEND_B3>0 1REDUCE0#1 1STEP#0
        """
    )
    assert calls.step(1) is calls.step(3)
    (end,) = calls.drain(2)
    assert format_rows(end.ranks) == "0RECV_B3<1 0B3 0REDUCE0#0 0STEP#0\n1STEP#0\n"


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "accumulation"),
    [
        *(
            (name, *sizes, 1)
            for name in ("pipedream", "pipedream_2bw")
            for sizes in ((1, 1), (2, 3), (4, 4), (4, 9))
        ),
        ("pipedream_2bw", 2, 1, 3),
        ("pipedream_2bw", 4, 2, 3),
        ("pipedream_2bw", 4, 1, 4),
        ("pipedream", 4, 1, 2),
        ("pipedream", 4, 1, 3),
        ("pipedream", 2, 1, 3),
    ],
)
def test_calls_behind_each_other_and_a_drain_are_the_stream(name, pp, microbatches, accumulation):
    """Each rank's lists, put together, run every forward, backward and update once, in order."""
    plan = Plan(name, pp, microbatches, accumulation=accumulation, overlap="zero1")
    calls = compile_plan(plan).stream
    for batches in (1, 2, 5, 8):
        programs = [calls.step(n) for n in range(batches)] + list(calls.drain(batches))
        for rank in range(pp):
            row = [item for program in programs for item in program.ranks[rank]]
            for kind in (Kind.F, Kind.B):
                found = [item.microbatch for item in row if item.kind is kind]
                count = range(batches * microbatches)
                assert found == [number % calls.microbatch_slots for number in count]
            steps = sum(item.kind is Kind.STEP for item in row)
            assert steps == -(-batches * microbatches // calls.updates.size)
            # No forward reads what the last updates make.
            read = {item.version for item in calls.program.ranks[rank] if item.kind is Kind.F}
            gathers = sum(i.kind is Kind.GATHER for i in calls.program.ranks[rank])
            assert gathers == len(read) - 1


@pytest.mark.parametrize(("count", "skips"), [
    (4, ()), (4, ((0, 2), (1, 3))), (4, ((0, 3),)), (2, ((0, 2), (0, 3), (1, 3))),
])  # fmt: skip
def test_steps_and_a_drain_have_both_ends_of_every_message(count, skips):
    """A step has no message of a batch that has not come, and none behind its update."""
    plan = Plan("pipedream_2bw", 4, count, skips=skips, accumulation=4 // count)
    steps = compile_plan(plan).stream
    for batches in (1, 2, 5):
        programs = [*map(steps.step, range(batches)), *steps.drain(batches)]
        ends = {Kind.SEND: Counter(), Kind.RECV: Counter()}
        for item in (item for each in programs for row in each.ranks for item in row):
            if item.kind in ends:
                stages = frozenset((item.stage, item.peer))
                ends[item.kind][item.payload, stages, item.microbatch] += 1
        assert ends[Kind.SEND] == ends[Kind.RECV]
        assert ends[Kind.SEND].total() == 2 * (3 + len(skips)) * count * batches
        # A step uses what it receives: the next one receives anew.
        for row in (row for each in programs for row in each.ranks):
            for place, item in enumerate(row):
                if item.kind is Kind.RECV:
                    user = replace(item, kind=item.payload, payload=None, peer=None)
                    assert user in row[place:]
                elif item.kind is Kind.STEP:
                    assert {each.kind for each in row[place:]} == {Kind.STEP}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"split_backward": True}, "schedule.split_backward=true with schedule=pipedream_2bw"),
        ({"loss_over": "batch"}, "loss_over=batch with schedule=pipedream_2bw"),
        ({"vertical_sync": True}, "schedule.vertical_sync=true: pipedream_2bw uses one version"),
        ({"error_feedback": 1.5}, "schedule.error_feedback=1.5 is a share"),
    ],
)
def test_what_needs_a_flush_is_refused(more, message):
    with pytest.raises(PlanError, match=message):
        compile_plan(Plan("pipedream_2bw", 4, 4, **more))


def test_pictures_tell_the_versions_apart():
    program = compile_program(schedule="pipedream_2bw", pp=2, num_microbatches=2)
    panel = timeline_data("predicted", simulate(program, UniformCosts())).panel
    assert panel["versions"] == 3
    first = [bar for lane in panel["rows"][0]["compute"] for bar in lane if bar[0] == 0]
    assert [bar[-1] for bar in first] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert "#1: with version 1 of the weights" in legend(simulate(program, UniformCosts()))
