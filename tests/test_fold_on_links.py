"""The benchmark on shaped links: its predictions and table everywhere, the links where root may."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fold_on_links
from benchmarks.fold_on_links_scenario import (
    FOLD,
    Contender,
    Link,
    Prediction,
    Scenario,
    predict,
    scenarios,
)
from benchmarks.fold_on_links_table import make_line, markdown, verdict
from benchmarks.link_hosts import MissingRightError, check_rights

LINK = Link(25e6, 1e-4)


def contender(schedule: str, overlap: str = "grad_reduce") -> Contender:
    return Contender("ours", schedule, overlap)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- predictions


def test_without_overlap_the_simulator_adds_the_whole_reduction():
    scenario = scenarios()["two-links"]
    told = predict(scenario, contender("1f1b", "none"), LINK)
    # Four buckets: a ring of two moves every byte once and takes two latencies.
    assert told.buckets == 4
    assert told.exposed_s == pytest.approx(8 * 2**20 / 25e6 + 4 * 2e-4)
    # F + B is 120 ms; M and one more of them, and a message each way at its beginning and end.
    assert told.bare_s > 9 * 0.120
    assert told.bare_s < 9 * 0.120 + 16 * 2 * (2**17 / 25e6 + 1e-4)


def test_one_link_is_never_faster_than_two():
    one, two = scenarios()["one-link"], scenarios()["two-links"]
    for chosen in (c for c in one.contenders if c.engine == "ours"):
        shared, own = predict(one, chosen, LINK), predict(two, chosen, LINK)
        assert shared.step_s > own.step_s
        assert shared.bare_s == pytest.approx(own.bare_s)


def test_the_chosen_group_is_as_fast_as_the_fastest_fold_schedule():
    for scenario in scenarios().values():
        told = {name: predict(scenario, contender(name), LINK) for name in FOLD}
        assert told["foldx"].group is not None
        assert told["foldx"].step_s <= min(p.step_s for p in told.values()) + 1e-9


def test_at_four_ranks_every_stage_is_reduced_in_60_ms():
    scenario = scenarios()["pp4"]
    for virtual in (1, 2):
        taken = scenario.stage_elements(virtual) * 4 / LINK.bandwidth
        assert taken == pytest.approx(0.060, rel=0.005)


def test_predictions_need_neither_links_nor_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["-X", "importtime", "-m", "benchmarks.fold_on_links", "--predict-only"]
    done = subprocess.run(
        [sys.executable, *words, "--scenarios", "pp4"], capture_output=True, text=True, check=True
    )
    assert " torch" not in done.stderr
    rows = done.stdout.splitlines()
    assert rows[0] == "| pp4 | step | without reductions | exposed reduction |"
    assert [row.split(",")[0] for row in rows[2:]] == [
        "| 1f1b", "| 1f1b", "| interleaved_1f1b", "| foldx_fifo", "| foldx_aiao", "| foldx",
    ]  # fmt: skip


# ------------------------------------------------------------------------------- the table

SMALL = replace(scenarios()["two-links"], num_microbatches=2, forward_s=0.1)


def step(begun: float, ended: float, outlasting: tuple[float, float] | None = None):
    return {
        "begun": begun, "ended": ended, "late": 0.0, "busy": 0.66, "sent": [2e6, 5e6],
        "outlasting": outlasting,
    }  # fmt: skip


def line(name: str, step_s: float, predicted_s: float):
    ranks = [
        {"whole": [step(1.0, 1.0 + step_s, (1.5, 1.6))], "bare": [step(3.0, 3.0 + step_s / 2)]},
        {"whole": [step(1.0, 1.4, (1.3, 1.75))], "bare": [step(3.0, 3.1)]},
    ]
    told = Prediction(predicted_s, predicted_s / 2, None, 2)
    return make_line(SMALL, contender(name), told, ranks)


def test_a_line_spans_all_ranks_and_takes_medians():
    ranks = [
        {"whole": [step(0.0, 1.0), step(2.0, 3.5), step(5.0, 9.0)], "bare": [step(0.0, 0.5)] * 3},
        {"whole": [step(0.0, 1.2), step(2.0, 3.0), step(5.0, 5.1)], "bare": [step(0.0, 0.6)] * 3},
    ]
    found = make_line(SMALL, contender("foldx"), Prediction(1.0, 0.5, 8, 2), ranks)
    assert found.steps_s == pytest.approx((1.2, 1.5, 4.0))
    assert (found.step_s, found.bare_s) == pytest.approx((1.5, 0.6))
    assert (found.ratio, found.exposed_s) == pytest.approx((1.5, 0.9))
    assert found.outlasting_s is None
    assert found.sent_mb == (2.0, 5.0)
    assert found.busy == pytest.approx(0.66 / 0.6 - 1)
    assert found.contender == "foldx, overlap=grad_reduce (auto: group=8)"


def test_reductions_outlast_the_last_compute_of_any_rank():
    assert line("1f1b", 0.8, 0.7).outlasting_s == pytest.approx(0.25)


def test_the_table_says_what_was_measured_beside_what_was_predicted():
    text = markdown(SMALL, LINK, [line("foldx_fifo", 0.8, 0.7)], conditions="once.")
    heading, rule, row, *rest = text.splitlines()
    assert heading.count("|") == rule.count("|") == row.count("|")
    assert row == (
        "| foldx_fifo, overlap=grad_reduce | 800 | 700 | 1.143 | 400 | 350 | 400 | 350 | "
        "2.0 | 5.0 |"
    )
    assert "25.0 MB/s per direction, 100 us. Times in ms; once." in rest[1]
    assert "on the worst rank: ours +10.0%." in rest[1]


def test_the_verdict_tells_a_wrong_prediction_from_a_right_one():
    right = verdict([line("foldx_fifo", 0.8, 0.7), line("foldx_aiao", 0.7, 0.68)])
    assert right.startswith("Furthest from the simulator: foldx_fifo, overlap=grad_reduce, +14.3 %")
    assert right.endswith("measured: foldx_aiao, overlap=grad_reduce (as predicted).")
    wrong = verdict([line("foldx_fifo", 0.6, 0.7), line("foldx_aiao", 0.7, 0.68)])
    assert wrong.endswith("measured: foldx_fifo, overlap=grad_reduce (NOT as predicted).")


def test_without_root_it_says_what_it_needs_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["fold_on_links", "--scenarios", "one-link"])
    with pytest.raises(SystemExit) as ended:
        fold_on_links.main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "Missing here: root" in told.err
    assert "sudo make bench-links" in told.err
    assert "--predict-only" in told.err


# ------------------------------------------------------------------------------- the links

QUICK = Scenario(
    "quick",
    "a test",
    pp=2,
    dp=2,
    interfaces=2,
    num_microbatches=2,
    forward_s=0.004,
    message_bytes=2**14,
    gradient_bytes=2**18,
    bucket_mb=0.0625,
    layers=4,
)


@pytest.fixture
def links():
    try:
        check_rights()
    except MissingRightError as error:
        pytest.skip(str(error))


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.startswith("foldlinks-")]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("interfaces", [1, 2])
def test_everybody_runs_on_the_links_and_every_byte_is_sent(interfaces: int):
    scenario = replace(QUICK, interfaces=interfaces)
    found = fold_on_links.measure(scenario, rate_mbit=200.0, warmups=1, repetitions=2)
    assert not any(name.startswith(f"foldlinks-{os.getpid()}-") for name in namespaces())
    # 200 Mbit/s are 25e6 bytes/s, of which headers take a little.
    assert 15e6 < found.link.bandwidth < 26e6
    assert len(found.lines) == len(scenario.contenders)
    for told in found.lines:
        assert len(told.steps_s) == 2
        # A rank computes 2 (F + B), and sleeps never end early.
        assert told.bare_s >= 2 * 0.012
        assert told.busy >= 0.0
        # A ring of two sends every gradient once; a message per microbatch crosses each boundary.
        messages = 2 * 2**14 * (3 if told.schedule != "1f1b" else 1) / 1e6
        sent = (messages + 2**18 / 1e6,) if interfaces == 1 else (messages, 2**18 / 1e6)
        for bytes_sent, least in zip(told.sent_mb, sent, strict=True):
            assert least <= bytes_sent <= 1.15 * least + 0.02
        if told.engine == "ours":
            assert told.outlasting_s is not None


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_namespace_and_no_rank(tmp_path: Path, number: signal.Signals):
    file = tmp_path / "figures.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fold_on_links", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    prefix = f"foldlinks-{process.pid}-"
    until = time.monotonic() + 60
    while not any(name == f"{prefix}3" for name in namespaces()):
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(2.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines()[-1].endswith("interrupted; ranks and namespaces are gone.")
    assert not any(name.startswith(prefix) for name in namespaces())
    assert not file.exists()


@pytest.mark.full  # Every day: `make bench-smoke` runs the command, as all others.
@pytest.mark.distributed
@pytest.mark.usefixtures("links")
def test_the_command_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # One of each kind; all of them meet in the full matrix.
    chosen = [contender("foldx"), Contender("torch", "1f1b", "grad_reduce")]
    scenario = replace(QUICK, contenders=tuple(chosen))
    monkeypatch.setattr(fold_on_links, "scenarios", lambda: {"quick": scenario})
    monkeypatch.setattr(fold_on_links, "WARMUPS", 0)
    figures, table = tmp_path / "figures.json", tmp_path / "table.md"
    words = ["--rate-mbit", "1000", "--repetitions", "1"]
    words += ["--json", str(figures), "--markdown", str(table)]
    monkeypatch.setattr(sys, "argv", ["fold_on_links", *words])
    fold_on_links.main()
    (content,) = json.loads(figures.read_text())["scenarios"]
    assert [line["engine"] for line in content["lines"]] == ["ours", "torch"]
    for line in content["lines"]:
        assert min(line["sent_mb"]) > 0.01, line  # messages by one, reductions by the other
    text = table.read_text()
    assert text.startswith("| quick | step | simulator | ratio |")
    assert text.splitlines()[-1] == " ".join(["python -m benchmarks.fold_on_links", *words])
    assert text.splitlines()[0] in capsys.readouterr().out
