"""Every benchmark that a document names runs and says what it should; how fast, is no test.

Every day a few that cost little; `make bench-smoke` runs all of them.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import pipeline_overhead, plan_ranking, prediction_emulated
from benchmarks import ranks as benchmark_ranks
from benchmarks.overhead_paths import critical_path
from launcher.processes.rank_server import SHARED
from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.schedules import SCHEDULES, find_schedule
from strategies.simulator.engine import simulate
from tests.ranks.pool import Ranks
from tests.ranks.rank_server import rank_server_address

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "Makefile")
# What is run below; in files of their own `published`, and `fold_on_links`, which needs root.
SMALL_MODEL = "--steps 2 --rounds 1 --layers 2 --sequence 8 --iterations 3"
ALONE = {
    "fold_table": ("--microbatches 8", r"\n\| 4, 8 \| 33 / 41 / 65 \| 26.25 / 34.25 / 58.25 \|"),
    "micro simulator": (
        "--ranks 4 --microbatches 8 --repetitions 2",
        r"1f1b pp=4 num_microbatches=8: \d+ instructions, compiled in \d+ ms, simulate\(\) .*"
        r"(\nstep_time, .*: \d+\.\d\d ms instead of \d+\.\d\d)",
    ),
    "micro passes": (
        "--ranks 8 --microbatches 8 --repetitions 1",
        r"mario, chimera pp=8 m=8: \d+ ms.*\n(.*\n)*optimal, zb_v pp=4 m=16, 4 activations: \d+",
    ),
    "micro recorder": ("--steps 7", r"\d+ instructions per step: recorded .* ratio \d"),
    "micro recording": (
        "--layers 3 --repetitions 2",
        r"step .*\n.* record .*\n.* execute .*\n\d+ entries",
    ),
    "micro messages": (
        "--schedules 1f1b zb_v --latencies 0.05",
        r"(1f1b .*%\n){3}(zb_v .*%\n){3}mean at p2p=0.05F: \S+% by producer, \S+% as chosen",
    ),
    "sharding_time": ("small --tp 2", r"small +\d+ +\S+ +\S+ +\S+  O2 .*\nsmall .*  O3 "),
    "plan_speed": (
        "13B-on-64-chimera",
        r"13B-on-64-chimera .* s CPU  search .* s, \d+/\d+  step \d+\.\d+ s\n +pp=\d+ tp=\d+ dp=",
    ),
    "micro heartbeat": (
        "--writes 100 --rounds 2",
        r"F, B, I, W: 2 writes +-?\d.*us\n(.*\n)+page of",
    ),
}
ON_TWO_RANKS = {
    "example_figures": ("resnet.py", r"\n\| `resnet` \| `\w+` \| \d+ \| \d+\.\d \| \d+\.\d % \|"),
    "flush_period": (
        "--ranks 2 --schedules 1f1b zb_v --microbatches 2 --steps 2 --rounds 1 --forward-ms 1",
        r"1f1b( +\d+){2} \|( +[\d.]+){2} \|( +[-+.\d]+%?){3} \|( +[-+.\d]+%?){3}\nzb_v ",
    ),
    "flush_period --guard": (
        "--ranks 2 --schedules zb_v --microbatches 2 --steps 2 --rounds 1 --forward-ms 1",
        r"both: period.*\nzb_v( +\d+){2} \|( +[\d.]+){2}( \|( +[-+.\d]+%?){3}){3}\n",
    ),
    "prediction": (
        f"--quick --ranks 2 {SMALL_MODEL}",
        r"emulated: 3 configurations, step time MAPE .*\n(.*\n)*real: 3 configurations, .*memory",
    ),
    "step_profile": (
        "--steps 2 --microbatches 2",
        r"2 ranks, 2 microbatches, stages that take no time; rank 1: \d+ instr(.*\n)+autograd .*%",
    ),
    "peers": (
        "--repetitions 1 --schedules interleaved_1f1b zb_v --hidden 16 --microbatches 2 "
        "--engines bare foldpipe torch",
        r"1f1b \| bare \| \d(.*\n)+\| zb_v \| foldpipe \| \d.*\n\| zb_v \| torch \| \d",
    ),
    "plan_ranking": (
        f"--layouts 1 --sizes 1,4 {SMALL_MODEL}",
        r"[2-4] layouts: Kendall tau .*; memory within",
    ),
}
LAUNCHED = {
    "dense_twin": ("2", r"\| tiny \| 1,246,848 \| .*\n\| tiny_moe \| 3,907,200 \| 1,252,992 \| "),
}
OTHERWISE = {"pipeline_overhead", "fold_on_links", "exchange_on_links", "published"}
EVERY_DAY = {"fold_table", "micro simulator", "micro messages", "micro heartbeat", "flush_period"}
ENGINES = ["ours", "torch", "torch_ours", "bare", "autograd"]


def each(names: Iterable[str]) -> list[Any]:
    """All of them, those of every day without a mark."""
    return [
        pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.full) for name in names
    ]


def test_every_benchmark_that_a_document_names_is_run_here():
    pages = [*map(ROOT.joinpath, DOCUMENTS), *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    named = set(re.findall(r"\bbenchmarks\.(micro \w+|\w+)", text))
    commands = {*ALONE, *ON_TWO_RANKS, *LAUNCHED, *OTHERWISE}
    assert named == {name.partition(" --")[0] for name in commands}


def run(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *measure = name.split()
    command: ModuleType = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(sys, "argv", [module, *measure, *words.split()])
    command.main()


@pytest.mark.parametrize("name", each(ALONE))
def test_a_command_of_one_process_prints_its_figures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words, printed = ALONE[name]
    run(name, words, monkeypatch)
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.parametrize("name", each(LAUNCHED))
def test_a_command_that_launches_others_prints_its_figures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words, printed = LAUNCHED[name]
    run(name, words, monkeypatch)
    assert re.search(printed, capsys.readouterr().out)


class Lent:
    """Ranks that outlive the command that closes them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        return self._ranks.run(function, **arguments)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Lent]:
    ranks = Ranks(2)
    yield Lent(ranks)
    ranks.close()


@pytest.mark.distributed
@pytest.mark.parametrize("name", each(ON_TWO_RANKS))
def test_a_command_on_ranks_prints_its_figures(
    name: str,
    two_ranks: Lent,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    def lend(world_size: int) -> Lent:
        assert world_size == 2
        return two_ranks

    monkeypatch.setattr(benchmark_ranks, "Ranks", lend)
    monkeypatch.setattr(prediction_emulated, "FORWARD_S", 2e-3)
    monkeypatch.setenv(SHARED, rank_server_address())  # for those that measure this machine
    words, printed = ON_TWO_RANKS[name]
    run(name, words, monkeypatch)
    assert re.search(printed, capfd.readouterr().out)


@pytest.mark.full
@pytest.mark.distributed
def test_the_command_measures_every_engine_and_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = "--ranks 2 --schedules 1f1b zb_v zb_h1 --microbatches 4 --repetitions 1"
    file = tmp_path / "figures.json"
    words = [*arguments.split(), "--forward-ms", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["pipeline_overhead", *words])
    pipeline_overhead.main()

    cells = json.loads(file.read_text())["cells"]
    expected = [("1f1b", e) for e in ENGINES] + [("zb_v", e) for e in ENGINES]
    # torch has no ZB-H1.
    expected += [("zb_h1", e) for e in ENGINES if e != "torch"]
    assert [(cell["schedule"], cell["engine"]) for cell in cells] == expected
    for cell in cells:
        # A rank computes 4 (F + I + W), and sleeps never end early: all was slept.
        assert cell["path_ms"] >= 12.0
        assert cell["step_ms"] >= 12.0
        assert cell["busy"] >= 0.0
        assert cell["steps_ms"] == [cell["step_ms"]]
        assert cell["ratio"] == cell["step_ms"] / cell["path_ms"]

    heading, rule, first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert heading == f"| m = 4 | {' | '.join(ENGINES)} |"
    assert rule == "|---|---|---|---|---|---|"
    assert [row.split()[1] for row in (first, second, third)] == ["1f1b", "zb_v", "zb_h1"]
    assert first.count(" ms)") == second.count(" ms)") == 5
    assert third.count(" ms)") == 4
    assert rest[-1] == f"python -m benchmarks.pipeline_overhead {' '.join(words)}"


@pytest.mark.full
@pytest.mark.distributed
def test_all_schedules_are_measured_by_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Not what other tests have registered here: ranks do not know it.
    own = {name: each for name, each in SCHEDULES.items() if "." not in name}
    monkeypatch.setattr(pipeline_overhead, "SCHEDULES", own)
    words = "--schedules all --engines ours --ranks 2 --microbatches 4 --repetitions 1"
    monkeypatch.setattr(sys, "argv", ["pipeline_overhead", *words.split(), "--forward-ms", "0.5"])
    pipeline_overhead.main()
    found = re.findall(r"\n\| (\w+) \| \d", capsys.readouterr().out)
    assert found == [name for name in own if find_schedule(name).synchronous]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--schedules pipedream_2bw", "pipedream_2bw has no flush"),
        ("--schedules 1f1b pipedream --steady", "pipedream has one microbatch per update"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["pipeline_overhead", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        pipeline_overhead.main()
    assert said in capsys.readouterr().err


@pytest.mark.distributed
def test_periods_of_steps_behind_each_other_are_measured_beside_the_simulated_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    file = tmp_path / "figures.json"
    words = "--steady --ranks 2 --schedules 1f1b pipedream_2bw --microbatches 2 --repetitions 2"
    arguments = [*words.split(), "--forward-ms", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["pipeline_overhead", *arguments])
    pipeline_overhead.main()
    cells = json.loads(file.read_text())["cells"]
    # 1F1B waits for fill and drain in every step, what has no flush never: 2 * (F + B).
    assert [(cell["schedule"], cell["path_ms"]) for cell in cells] == [
        ("1f1b", 9.0),
        ("pipedream_2bw", 6.0),
    ]
    assert all(cell["step_ms"] >= 6.0 for cell in cells)
    assert capsys.readouterr().out.startswith("| m = 2 | ours |")


@pytest.mark.parametrize("schedule", pipeline_overhead.SHARED)
def test_the_path_of_our_own_schedule_is_its_simulated_makespan(schedule: str):
    program = compile_program(schedule=schedule, pp=4, num_microbatches=8, buckets=0)
    expected = simulate(program, UniformCosts(forward=10.0, backward=20.0)).makespan
    assert critical_path(schedule, ranks=4, num_microbatches=8, forward=10.0) == expected


def test_the_path_of_torchs_order_has_the_first_stages_whole_backward_in_its_w():
    """Two stages: both F, the last one's I, then its W beside the first one's of twice the time."""
    order = "0F0,,0I0,0W0\n,1F0,1I0,1W0\n"
    assert critical_path("any", ranks=2, num_microbatches=1, forward=1.0, order=order) == 5.0


@pytest.mark.full
def test_the_cost_of_recomputing_is_measured_in_time_and_bytes(
    capsys: pytest.CaptureFixture[str],
):
    from benchmarks.micro_training import Size, recompute

    recompute((Size("tiny", 16, 4, 2),))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    held = {row[1]: int(row[4].removesuffix(" |")) for row in rows}
    assert list(held) == ["plain", "twice", "R", "torch", "selective"]
    assert held["plain"] == held["twice"] == held["R"]
    assert held["torch"] < held["selective"] < held["plain"]


def test_a_ranking_says_how_far_the_chosen_layout_is_off_the_best():
    held = (100,)
    rows = [
        plan_ranking.Row("a", 1.0, 1.1, held, held),
        plan_ranking.Row("b", 2.0, 1.0, (104,), held),
        plan_ranking.Row("c", 3.0, 3.0, held, held),
    ]
    assert plan_ranking.figures(rows) == pytest.approx((1 / 3, 0.1))
    assert "memory within 4.0%" in plan_ranking.table(rows)
    # Layouts are told apart by their words, and none is another's configuration.
    machine = {"name": "here", "measured_on": "here", "gpus_per_node": 2}
    configs = plan_ranking.configurations(machine, plan_ranking.SHAPE)
    assert len(configs) >= 12
    assert {config.pp * int(config.dp) * config.tp for config in configs} == {1, 2}
