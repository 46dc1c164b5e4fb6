"""Lists of uniform costs on the command line: what docs/guides/simulating.md says of them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from launcher.commands.layouts import simulate
from launcher.report.summary import summary
from tests.launcher.command_line import run_here

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "simulating.md"
COMMANDS = re.findall(r"^    python -m launcher (.*)$", PAGE.read_text(encoding="utf-8"), re.M)


def ran(tmp_path, monkeypatch, words):
    done = run_here([*words, "hydra.run.dir=out"], tmp_path, monkeypatch, simulate)
    assert done.code == 0, done.errors
    return json.loads((tmp_path / "out" / "result.json").read_text())


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    plain, uneven, sweep = (command.split() for command in COMMANDS)
    even = ran(tmp_path / "even", monkeypatch, plain)
    assert (even["makespan"], even["throughput"], even["num_messages"]) == (33, 8 / 33, 48)
    slower = ran(tmp_path / "slower", monkeypatch, uneven)
    # Twice as slow as the others: seven times its 6 more than the 15 that one microbatch takes.
    assert slower["makespan"] <= 15 + 7 * 6
    assert slower["throughput"] >= 8 / (15 + 7 * 6)
    words = summary(slower)
    assert re.search(r"throughput +0\.14\d+ +microbatches per F", words)
    assert re.search(r"messages +48\n", words)
    done = run_here([*sweep, "hydra.sweep.dir=s"], tmp_path, monkeypatch, simulate)
    assert done.code == 0, done.errors
    with (tmp_path / "s" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["costs.forward"] for row in rows] == ["[1,1,2,1]", "[2,1,1,1]", "1"] * 2
    # GPipe: 13 of one microbatch, and 2 + 2 for each of the other seven.
    assert [float(row["makespan"]) for row in rows[:3]] == [13 + 28, 13 + 28, 33]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["costs.forward=[1,1,2]"], "has 3 numbers, but pp=4: 4 are needed, one per rank."),
        (
            ["schedule=zb_v", "costs.backward=[2,2]"],
            "has 2 numbers, but pp=4: 4 are needed, one per rank, or 8, one per stage. "
            "Try costs.backward=[2,2,2,2].",
        ),
        (["costs.p2p=[1,1,1,1]"], "there are 3 boundaries between 4 stages (pp=4)."),
        (["costs.forward=[]"], "has 0 numbers, but pp=4"),
        (["costs.forward=[1,one,1,1]"], "expected a number or a list of numbers."),
        (["costs.grad_reduce=[1,1,1,-1]"], "a list of numbers, at least 0."),
        (
            ["costs.backward=[2,2,1,2]", "costs.backward_input=1"],
            "on stage 2 it is 1 of 1, and must lie between 0 and that.",
        ),
    ],
)
def test_lists_that_do_not_fit_are_refused(tmp_path, monkeypatch, words, message):
    done = run_here(
        ["mode=simulate", "costs=uniform", "pp=4", *words], tmp_path / "run", monkeypatch
    )
    done.assert_refused()
    assert message in done.errors
