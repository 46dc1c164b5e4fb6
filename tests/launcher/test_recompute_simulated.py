"""``recompute=`` in simulated runs: figures, files, and what is refused."""

from __future__ import annotations

import json

import pytest

from launcher.commands import validate
from launcher.commands.layouts import simulate
from tests.launcher.command_line import launch_here, run_here

UNIFORM = ("mode=simulate", "costs=uniform", "pp=4", "hydra.run.dir=out")
CAP = "recompute.max_full_activations"


def simulated(tmp_path, monkeypatch, *words):
    done = run_here((*UNIFORM, *words), tmp_path, monkeypatch, simulate)
    assert done.code == 0, done.errors
    return json.loads((tmp_path / "out" / "result.json").read_text())


@pytest.mark.parametrize(
    ("words", "four", "six"),
    [
        (("recompute=none",), 21, 27),
        (("recompute=full",), 28, 36),
        (("recompute=mario", "recompute.passes=2"), 25, 33),
        (("recompute=mario", "recompute.passes=3"), 23, 31),
        (("recompute=mario",), 22, 30),
    ],
)
def test_the_figures_of_the_paper(tmp_path, monkeypatch, words, four, six):
    for count, wanted in ((4, four), (6, six)):
        result = simulated(tmp_path, monkeypatch, f"num_microbatches={count}", *words)
        assert result["makespan"] == wanted
        assert result["recompute"] == words[0].partition("=")[2]


@pytest.mark.parametrize(
    ("pp", "count", "cap", "split", "wanted"),
    [
        (4, 4, 1, "false", 21),
        pytest.param(4, 4, 1, "true", 19, marks=pytest.mark.full),
        (4, 8, 1, "false", 36),
        (4, 8, 2, "false", 33),
        (8, 8, 1, "false", 48),
        (8, 8, 2, "false", 45),
    ],
)
def test_the_optimum_under_a_cap(tmp_path, monkeypatch, pp, count, cap, split, wanted):
    result = simulated(
        tmp_path, monkeypatch, f"pp={pp}", f"num_microbatches={count}", "recompute=optimal",
        f"{CAP}={cap}", f"schedule.split_backward={split}",
    )  # fmt: skip
    assert result["makespan"] == wanted
    assert max(result["peak_activations"]) <= cap
    assert result["lb2"] <= wanted and result["lb1"] <= wanted
    if split == "false":
        assert result["lower_bound"] == wanted


def test_a_run_shows_what_is_run_again_everywhere(tmp_path):
    words = (*UNIFORM, "num_microbatches=8", "recompute=optimal", f"{CAP}=1")
    done = launch_here(words, tmp_path).assert_done()
    out = tmp_path / "out"
    assert "LB2 rank 2 (LB1 rank 3: 33 F)" in done.output
    assert "recompute=optimal" in done.output
    text = (out / "schedule.txt").read_text()
    assert "0R1 0B1" in text
    assert "# LB1 33 F (rank 3), LB2 36 F (rank 2); 20 forwards run again" in text
    page = (out / "timeline.html").read_text()
    assert "LB2, memory" in page
    result = json.loads((out / "result.json").read_text())
    assert (result["binding_bound"], result["recomputed"]) == ("LB2 rank 2", 20)
    assert "R" not in (out / "schedule.csv").read_text()


def test_its_order_goes_back_in_and_is_recomputed_alike(tmp_path, monkeypatch):
    words = ("num_microbatches=8", "recompute=optimal", f"{CAP}=1")
    first = simulated(tmp_path / "a", monkeypatch, *words)
    csv = tmp_path / "a" / "out" / "schedule.csv"
    again = simulated(
        tmp_path / "b", monkeypatch, "schedule=custom", f"schedule.file={csv}", *words
    )
    assert again["makespan"] == first["makespan"] == 36
    assert again["recomputed"] == first["recomputed"]


def test_analytic_costs_take_the_memory_of_the_machine(tmp_path, monkeypatch):
    words = ("mode=validate", "pp=4", "num_microbatches=8", "hydra.run.dir=out")
    done = run_here(words, tmp_path / "a", monkeypatch, validate.run)
    assert done.code == 0, done.errors
    plain = json.loads((tmp_path / "a" / "out" / "result.json").read_text())
    limit = int(0.999 * max(plain["peak_memory_bytes"])) / 1e9
    words = (*words, "recompute=optimal", f"hardware.memory_gb={limit}")
    done = run_here(words, tmp_path / "b", monkeypatch, validate.run)
    assert done.code == 0, done.errors
    result = json.loads((tmp_path / "b" / "out" / "result.json").read_text())
    assert max(result["peak_memory_bytes"]) <= limit * 1e9
    assert result["recomputed"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recompute=optimal", f"{CAP}=0.5"), "The smallest cap is 1; a step then takes 21 F"),
        (("recompute=optimal",), "Try recompute.max_full_activations=1"),
        (("recompute=mario", "recompute.passes=5"), "recompute.passes=5: expected a whole number"),
        (("recompute=full", "recompute.passes=2"), "Try recompute=mario recompute.passes=2"),
        (("recompute=full", f"{CAP}=2"), "Try recompute=optimal"),
        (("recompute=selective",), "Try costs=analytic, or recompute=full"),
        (("recompute=marrio",), "recompute=mario"),
        (("recompute.pases=2",), "recompute.passes"),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(tmp_path, monkeypatch, words, message):
    words = (*UNIFORM, "num_microbatches=4", *words)
    done = run_here(words, tmp_path, monkeypatch, simulate)
    assert done.code == 2
    assert message in done.errors
    assert done.errors.count("\n") == 1
    assert "Traceback" not in done.errors


def test_an_r_in_a_file_names_the_key_that_asks_for_it(tmp_path, monkeypatch):
    (tmp_path / "my.csv").write_text("0F0,0R0,0B0\n")
    words = ("mode=simulate", "costs=uniform", "schedule=custom", "schedule.file=my.csv", "pp=1")
    done = run_here(words, tmp_path, monkeypatch, simulate)
    assert done.code == 2
    assert "line 1, column 2" in done.errors
    assert "recompute=full" in done.errors
