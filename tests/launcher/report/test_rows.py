from dataclasses import dataclass, replace

from launcher.report.rows import KIND_NAMES, held_over_time, timeline_data, waits
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_plan
from strategies.costs.token_exchange import Exchange
from strategies.plan import Plan
from tests.strategies.programs import ALL_SCHEDULES
from tests.strategies.programs import legal_microbatches as legal


def reasons(timeline):
    graph = timeline.program.graph
    return {
        str(graph.nodes[node]).partition("@")[0]: (
            str(graph.nodes[wait.node]).partition("@")[0],
            wait.how,
            wait.since,
        )
        for node, wait in waits(timeline).items()
    }


def test_the_last_predecessor_to_end_is_the_reason():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=2)
    found = reasons(simulate(program, UniformCosts(grad_reduce=2, p2p=0.5)))
    assert found == {
        "0F1": ("0F0", "rank", 1.0),
        "0B0": ("1B0", "message", 5.0),
        "0B1": ("1B1", "message", 8.0),
        "0REDUCE0": ("0B1", "release", 10.0),
        "0STEP": ("0REDUCE0", "value", 12.0),
        "1F0": ("0F0", "message", 1.5),
        "1B0": ("1F0", "rank", 2.5),
        "1F1": ("1B0", "rank", 4.5),
        "1B1": ("1F1", "rank", 5.5),
        "1REDUCE0": ("1B1", "release", 7.5),
        "1STEP": ("1REDUCE0", "value", 9.5),
    }


def test_a_bucket_waits_for_its_channel_or_for_its_release_inside_the_backward():
    program = compile_program(schedule="gpipe", pp=1, num_microbatches=1, buckets=2)
    found = reasons(simulate(program, UniformCosts(grad_reduce=1)))
    assert found["0REDUCE0"] == ("0B0", "release", 2.0)
    assert found["0REDUCE1"] == ("0B0", "release", 3.0)
    found = reasons(simulate(program, UniformCosts(grad_reduce=8)))
    assert found["0REDUCE1"] == ("0REDUCE0", "channel", 6.0)


@dataclass(frozen=True)
class Exchanging:
    def table(self, program):
        return replace(UniformCosts().table(program), exchange=(Exchange(0.4),) * 2)


def test_tokens_travel_inside_of_a_computation_and_wait_for_that():
    program = compile_plan(Plan("1f1b", 2, 2, exchanges=(1, 0))).train
    first, second = timeline_data("", simulate(program, Exchanging())).panel["rows"]
    bars = [bar for lane in first["channel"] for bar in lane]
    assert [(KIND_NAMES[bar[0]], bar[5:8]) for bar in bars[:2]] == [
        ("DISPATCH", ["0F0", 0, "release"]), ("COMBINE", ["0F0", 0, "release"]),
    ]  # fmt: skip
    assert all(bar[8] == bar[3] for bar in bars)
    assert len(bars) == 8
    assert not any(second["channel"])


def test_nothing_waits_for_what_ends_after_its_start():
    for name in ALL_SCHEDULES:
        program = compile_program(schedule=name, pp=2, num_microbatches=legal(name, 2, 3))
        timeline = simulate(program, UniformCosts(grad_reduce=3, p2p=0.25))
        starts = [time for row in timeline.start for time in row]
        for node, wait in waits(timeline).items():
            assert wait.since <= starts[node] + 1e-9


def test_what_is_held_peaks_where_the_metrics_say_and_drains():
    for name in ALL_SCHEDULES:
        program = compile_program(schedule=name, pp=4, num_microbatches=legal(name, 4, 5))
        timeline = simulate(program, UniformCosts())
        for rank, peak in enumerate(peak_activations(program)):
            curve = held_over_time(timeline, rank)
            assert max(value for _, value in curve) == peak
            assert curve[-1][1] == 0.0
            assert [time for time, _ in curve] == sorted({time for time, _ in curve})


def test_a_forward_only_program_holds_one_stage_at_a_time():
    programs = compile_plan(Plan(schedule="1f1b", pp=2, num_microbatches=2))
    timeline = simulate(programs.forward, UniformCosts())
    assert held_over_time(timeline, 1) == ((0.0, 0.0), (1.0, 1.0), (2.0, 1.0), (3.0, 0.0))
