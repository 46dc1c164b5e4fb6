"""metrics.csv: on disk at every step, whatever becomes of the run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from launcher.rank.callbacks import MetricsFile


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture
def file(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.csv")


def test_a_row_is_there_before_it_is_complete(file: MetricsFile) -> None:
    file.write({"step": 1, "loss": 3.5, "norm": None}, complete=False)
    assert rows(file.path) == [{"step": "1", "loss": "3.5", "norm": ""}]
    file.write({"step": 1, "loss": 3.5, "norm": 2})
    file.write({"step": 2, "loss": 1.25e-7, "norm": None}, complete=False)
    assert rows(file.path)[0] == {"step": "1", "loss": "3.5", "norm": "2"}
    assert rows(file.path)[1] == {"step": "2", "loss": "1.25e-07", "norm": ""}
    file.write({"step": 2, "loss": 1, "norm": 1})  # shorter than what it replaces
    assert file.path.read_text() == "step,loss,norm\n1,3.5,2\n2,1,1\n"


def test_a_new_column_of_an_incomplete_row_is_added_once(file: MetricsFile) -> None:
    file.write({"step": 1})
    file.write({"step": 2}, complete=False)
    file.write({"step": 2, "val_loss": 4})
    file.write({"step": 3, "val_loss": None}, complete=False)
    assert file.path.read_text() == "step,val_loss\n1,\n2,4\n3,\n"


def test_names_of_columns_are_text_for_whoever_opens_the_file(file: MetricsFile) -> None:
    names = {"=cmd|x": "'=cmd|x", "@sum": "'@sum", "a\x1b[2J": "a\\x1b[2J", "x" * 999: "x" * 200}
    file.write({"step": 1, **dict.fromkeys(names, 2)})
    again = MetricsFile(file.path)
    again.go_on(1)
    again.write({"step": 2, **dict.fromkeys(names, -3)})
    assert [list(row) for row in rows(file.path)] == [["step", *names.values()]] * 2
    assert rows(file.path)[1]["'=cmd|x"] == "-3"


def test_a_run_that_goes_on_replaces_nothing_of_before(file: MetricsFile) -> None:
    file.write({"step": 1})
    file.write({"step": 2}, complete=False)
    again = MetricsFile(file.path)
    with file.path.open("a") as stream:  # what a machine without power may leave
        stream.write("\0\0\0,\0\nx,nan\n-1,2\n1,7,8\n")
    again.go_on(1)
    again.write({"step": 2}, complete=False)
    again.write({"step": 2})
    assert file.path.read_text() == "step\n1\n2\n"
