"""Published runs become requests, predictions and tables; how good they are is on the page."""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published_run import predict_run, read_runs
from launcher.compose.option_groups import conf_dir
from launcher.compose.session import hydra_session

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "predictions.md"


def written(path: Path, *changes: dict[str, str], name: str = "kor-22B-seqsel") -> Path:
    """A file of one published row, changed in so many ways."""
    with published.RUNS.open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["id"] == name)
    with path.open("w", newline="") as file:
        columns = dict.fromkeys(name for change in changes for name in change)
        writer = csv.DictWriter(file, list(row | columns))
        writer.writeheader()
        writer.writerows(row | change for change in changes)
    return path


def test_the_file_is_read_whole_and_every_row_says_where_it_comes_from():
    runs = read_runs(published.RUNS)
    cards = {path.stem for path in (conf_dir() / "hardware").glob("*.yaml")}
    assert len({run.name for run in runs}) == len(runs) >= 70
    assert {run.hardware for run in runs} <= cards
    for run in runs:
        assert run.row["where"]
        assert run.step_s is not None or run.memory_bytes is not None or run.fits is False


def test_a_run_is_predicted_and_the_tables_tell_what_cannot_be(tmp_path, monkeypatch, capsys):
    changes = (
        {},
        {"id": "slower", "step_s": "2.2", "mem_gb": "OOM"},
        {"id": "slowest", "step_s": "4.4", "mem_gb": ""},
        {"id": "fewer", "act": "relu"},
        {"id": "stranger", "schedule": "hyper"},
        {"id": "expert", "express": "no", "note": "MoE: no such layers"},
    )
    path = written(tmp_path / "runs.csv", *changes)
    monkeypatch.setattr(sys, "argv", ["published", str(path), "--rows"])
    published.main()
    printed = capsys.readouterr().out
    assert "- fewer: model.activation=relu\n" in printed
    assert re.search(r"- stranger: .*hyper", printed)
    assert "- expert: MoE: no such layers\n" in printed
    assert re.search(r"\| a100_80g \| 3 \| [\d.]+% \| -[\d.]+% \| -[\d.]+% \| 1 \|", printed)
    assert "| Korthikanti-T5 | 3 |" in printed
    assert "Fits or not: 2 of 3 right.\n\n- slower: did not fit, predicted" in printed
    with hydra_session():
        first, second, *_ = map(predict_run, read_runs(path))
    assert first.step_s == second.step_s
    assert first.error is not None
    assert second.error == pytest.approx((1 + first.error) / 2 - 1)


_SAID = [
    ({"overlap": "fsdp"}, "overlap=fsdp: weights shared out over ranks (FSDP, ZeRO-3)"),
    ({"overlap": "hsdp"}, "overlap=hsdp: weights shared out over some replicas (HSDP)"),
    ({"precision": "fp8"}, "precision=fp8: matrix products in 8 bits"),
    ({"cp": "2"}, "cp=2: context parallelism"),
    ({"head_size": "128"}, "head_size=128: heads that are not hidden / heads wide"),
    ({"gpus": "16"}, "gpus=16, but tp=8 x pp=1 x dp=1 = 8"),
    ({"dp": "two"}, "dp=two is no whole number > 0"),
    ({"tp": "0"}, "tp=0 is no whole number > 0"),
    ({"recompute": "block"}, "recompute=block"),
    ({"grad_dtype": "fp8"}, "grad_dtype=fp8"),
    ({"hidden": "", "gbs": "null"}, "no hidden and no gbs"),
]


def test_what_no_key_can_say_is_named_with_its_feature(tmp_path):
    changes = [change | {"id": str(n)} for n, (change, _) in enumerate(_SAID)]
    with hydra_session():
        found = [predict_run(run) for run in read_runs(written(tmp_path / "runs.csv", *changes))]
    assert [prediction.missing for prediction in found] == [said for _, said in _SAID]


def test_a_model_with_experts_is_a_row_like_any_other(tmp_path):
    dense = {"layers": "4", "tp": "1", "dp": "2", "gpus": "2", "sp": "false", "cp": "1"}
    experts = {"experts": "4", "experts_per_token": "2", "expert_ffn": "4096", "ep": "2"}
    path = written(tmp_path / "runs.csv", dense, dense | experts, dense | experts | {"ep": "3"})
    with hydra_session():
        few, many, wrong = map(predict_run, read_runs(path))
    assert few.missing is None
    assert many.missing is None
    assert many.flops < few.flops  # two of 4,096 instead of one of 24,576
    assert wrong.missing is not None
    assert "ep=3" in wrong.missing


def test_errors_and_ranks_are_those_of_the_figures():
    run = read_runs(published.RUNS)[0]
    found = [
        published.Prediction(replace(run, name=str(n), step_s=measured), predicted, 1.0, 2.0, 1.0)
        for n, (predicted, measured) in enumerate([(1.1, 1.0), (1.8, 2.0), (3.0, 3.0)])
    ]
    text = published.report(found)
    assert "| a100_80g | 3 | 6.7% | +0.0% | +10.0% | 0 |" in text
    assert "| SC21-T1 | 3 | +1.00 |" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": ""}, "line 2: no gpus"),
        ({"step_s": "soon"}, "step_s=soon is no number > 0"),
        ({"step_s": "-1"}, "step_s=-1 is no number > 0"),
        ({"hardware": ""}, "line 2: no hardware"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(change, said, tmp_path):
    path = written(tmp_path / "runs.csv", change)
    with pytest.raises(SystemExit, match=said):
        read_runs(path)


def test_a_file_that_is_none_is_told(tmp_path):
    with pytest.raises(SystemExit, match="no rows"):
        read_runs(written(tmp_path / "empty.csv"))
    with pytest.raises(SystemExit, match=r"nowhere\.csv"):
        read_runs(tmp_path / "nowhere.csv")


def test_the_page_holds_every_row_of_the_file():
    above, found, tables = PAGE.read_text().partition(published.MARKER)
    assert found
    assert "benchmarks.published" in above
    listed = set(re.findall(r"^\| (\S+) \|", tables, re.MULTILINE))
    missing = {
        re.split(":", line)[0] for line in re.findall(r"^- (\S+: .*)$", tables, re.MULTILINE)
    }
    assert {run.name for run in read_runs(published.RUNS)} <= listed | missing


def test_a_page_without_the_line_is_left_alone(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("mine\n")
    monkeypatch.setattr(sys, "argv", ["published", "--page", str(page)])
    with pytest.raises(SystemExit, match="has no line"):
        published.main()
    assert page.read_text() == "mine\n"
