"""``sweep.trials``: the axes of a command line, and jobs chosen by Optuna where it is installed."""

from __future__ import annotations

import csv
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.commands.layouts import simulate
from launcher.compose.search import Axis, Space, asks_for_trials, find_space
from strategies.errors import PlanError, RunError
from tests.launcher.command_line import run_here

WORDS = ("-m", "mode=simulate", "costs=uniform", "hydra.sweep.dir=s", "pp=4")


def space(*words: str) -> Space:
    return find_space(OverridesParser.create().parse_overrides(list(words)))


def test_a_command_line_becomes_axes():
    found = space(
        "pp=4", "schedule=1f1b,gpipe", "optimizer.lr=tag(log, interval(1e-4,1e-2))",
        "model.layers=int(interval(2,8))", "seed=range(0,3)", "data.val_fraction=interval(0.1,0.5)",
    )  # fmt: skip
    assert found == Space(
        ("pp=4",),
        (
            Axis("schedule", choices=("1f1b", "gpipe")),
            Axis("optimizer.lr", low=1e-4, high=1e-2, log=True),
            Axis("model.layers", low=2, high=8, whole=True),
            Axis("seed", choices=("0", "1", "2")),
            Axis("data.val_fraction", low=0.1, high=0.5),
        ),
    )
    assert found.corners() == [
        ["pp=4", "schedule=1f1b", "optimizer.lr=0.0001", "model.layers=2", "seed=0",
         "data.val_fraction=0.1"],
        ["pp=4", "schedule=gpipe", "optimizer.lr=0.01", "model.layers=8", "seed=2",
         "data.val_fraction=0.5"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("optimizer.lr=interval(2,1)", "expected low < high"),
        ("optimizer.lr=tag(log, interval(0,1))", "expected 0 < low < high"),
        ("pp=4", "no key has more than one"),
    ],
)
def test_an_empty_space_is_refused(word, rule):
    with pytest.raises(PlanError, match=rule):
        space(word)


def test_a_search_is_asked_for_by_a_number():
    assert asks_for_trials(["pp=1,2", "sweep.trials=3"])
    assert not asks_for_trials(["pp=1,2", "sweep.trials=null"])
    assert not asks_for_trials(["pp=1,2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.trials=3", "pp=1"], "belongs on the command line of a sweep"),
        (["-m", "costs=uniform", "costs.forward=interval(1,2)"], "or sweep.trials=20"),
        (["-m", "sweep.trials=3", "pp=2"], "no key has more than one"),
        (["-m", "sweep.trials=3", "pp=1,2", "cluster=slurm"], "only submits them"),
        (["-m", "sweep.trials=0", "pp=1,2"], "Try sweep.trials=20"),
        # The ends are checked before anything runs.
        (["-m", "sweep.trials=3", "optimizer.lr=interval(-1,1)"], "optimizer.lr=-1"),
    ],
)
def test_a_search_that_cannot_be_is_refused(words, message, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert message in done.errors


def test_without_optuna_the_fix_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = run_here(
        [*WORDS, "sweep.trials=3", "costs.forward=interval(1,2)"], tmp_path, monkeypatch
    )
    done.assert_refused()
    assert "pip install 'optuna>=5'" in done.errors


def test_trials_move_towards_the_best(tmp_path, monkeypatch):
    words = [*WORDS, "costs.forward=interval(1,9)", "costs.backward=2", "sweep.trials=20"]
    done = run_here(words, tmp_path, monkeypatch, simulate)
    assert (done.code, done.errors, len(done.calls)) == (0, "", 20)
    tried = [call.config.costs.forward for call in done.calls]
    assert len(set(tried)) == 20
    # Less time is better: the last ones are nearer to 1 than the first, which are at random.
    assert sum(tried[10:]) < sum(tried[:10])
    with (tmp_path / "s" / "sweep.csv").open(newline="") as stream:
        assert [float(row["costs.forward"]) for row in csv.DictReader(stream)] == tried
    (line,) = [x for x in done.output.splitlines() if x.startswith("best by makespan")]
    assert f"costs.forward={min(tried):g}" in line
    assert "[20/20]" in done.output


def test_a_seed_repeats_the_search_and_a_failed_trial_does_not_end_it(tmp_path, monkeypatch):
    def fail_second(config, run_dir):
        if len(list(run_dir.parent.glob("*/.hydra"))) == 2:
            raise RunError("rank 0 was killed")
        return simulate(config, run_dir)

    words = [*WORDS, "schedule=1f1b,gpipe,foldx_fifo", "sweep.trials=4", "seed=7"]
    once = run_here(words, tmp_path / "a", monkeypatch, fail_second)
    again = run_here(words, tmp_path / "b", monkeypatch, fail_second)
    assert (once.code, len(once.calls)) == (1, 4)
    tried = [[call.config.schedule.name for call in done.calls] for done in (once, again)]
    assert tried[0] == tried[1]
    assert "job 1 of the sweep failed (exit 1)" in once.errors
