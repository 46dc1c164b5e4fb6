from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from strategies.costs.uniform import UniformCosts
from strategies.errors import DataError
from strategies.referee.trace import kineto, put_together, read_trace
from tests.strategies.referee.trace.made_trace import Style, known, write

EVEN = UniformCosts(forward=1.0, backward=2.0)


def _same(name: str, style: Style, folder: Path, *, zipped: bool = False, steps: int = 1) -> None:
    timeline = known(name, 3, 6, EVEN)
    paths = write(folder, timeline, style=style, zipped=zipped, steps=steps)
    measured = put_together([read_trace(path) for path in paths])
    assert len(measured.steps) == steps
    program = measured.timeline.program
    ours = [
        [str(item) for item in row if item.kind.value in "FBIW"]
        for row in timeline.program.compute_rows()
    ]
    assert [list(map(str, row)) for row in program.ranks] == ours
    assert measured.timeline.makespan == pytest.approx(timeline.makespan * 0.01, rel=1e-3)
    assert measured.timeline.bubble_ratio == pytest.approx(timeline.bubble_ratio, abs=1e-3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "zb_h1"])
def test_marks_name_every_instruction(name: str, tmp_path: Path):
    _same(name, "kernels", tmp_path, zipped=True)


def test_steps_are_told_apart(tmp_path: Path):
    _same("1f1b", "marks", tmp_path, steps=3)


def test_marks_of_gpipe_name_the_rank_as_their_stage(tmp_path: Path):
    """torch's GPipe has one stage per rank, and marks ``Forward 0``."""
    timeline = known("gpipe", 3, 4, EVEN)
    paths = write(tmp_path, timeline, style="marks")
    for path in paths:
        text = re.sub(r"PP:\d+F(\d+)", r"Forward \1", path.read_text())
        path.write_text(re.sub(r"PP:\d+B(\d+)", r"Backward \1", text))
    measured = put_together([read_trace(path) for path in paths])
    assert measured.timeline.makespan == pytest.approx(timeline.makespan * 0.01, rel=1e-3)


def test_a_trace_without_marks_says_what_leaves_them(tmp_path: Path):
    path = write(tmp_path, known("1f1b", 2, 4, EVEN), style="operators")[0]
    with pytest.raises(DataError, match=r"no mark in it names .* or a CSV file"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("t.json", b"[1, 2", "no JSON"),
        ("t.json", b'{"traceEvents": 3}', "no trace"),
        ("t.json", b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        ("t.json", b"\xff\xfe\x00", "cannot be read"),
        ("t.json.gz", b"no gzip", "cannot be read"),
        ("t.json.gz", gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40], "ends too early"),
        ("t.json.gz", gzip.compress(bytes(5_000_009), mtime=0), "more than 5,000,000"),
    ],
)
def test_damaged_and_hostile_files_are_one_message(tmp_path: Path, name, data, told, monkeypatch):
    monkeypatch.setattr(kineto, "_MOST_BYTES", 5_000_000)
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=told):
        read_trace(path)


def test_a_mark_without_work_takes_no_time_and_a_fused_pair_keeps_its_name(tmp_path: Path):
    def event(name: str, start: float, end: float, cat: str = "user_annotation"):
        return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start}

    own = [
        event("PP:0F0", 0, 100), event("aten::linear", 0, 100, "cpu_op"),
        event("PP:(0F1;1I0)OVERLAP_F_B", 100, 300), event("aten::detach", 101, 102, "cpu_op"),
        event("aten::linear", 200, 300, "cpu_op"),
        event("PP:0I0", 300, 900), event("aten::detach", 301, 302, "cpu_op"),
        event("PP:0W0", 900, 1000), event("aten::mm", 910, 1000, "cpu_op"),
    ]  # fmt: skip
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": own}))
    spans = {span.name: (span.start, span.end) for span in read_trace(path).steps[0]}
    assert spans["(0F1;1I0)OVERLAP_F_B"] == (pytest.approx(200e-6), pytest.approx(300e-6))
    assert spans["0I0"] == (pytest.approx(900e-6), pytest.approx(900e-6))
    assert spans["0W0"] == (pytest.approx(910e-6), pytest.approx(1000e-6))


def test_events_that_make_no_sense_are_left_out(tmp_path: Path):
    timeline = known("1f1b", 2, 2, EVEN)
    paths = write(tmp_path, timeline)
    tree = json.loads(paths[0].read_text())
    tree["traceEvents"] += [
        None, 7, {"ph": "X"}, {"ph": "X", "name": 3, "ts": 1}, {"ph": "X", "name": "PP:0F0"},
        {"ph": "X", "name": "PP:0F0", "ts": "now", "dur": 1, "cat": "user_annotation"},
        {"ph": "X", "name": "PP:0F1", "ts": 1e300, "dur": 1, "cat": "user_annotation"},
        {"ph": "X", "name": "PP:99999999F0", "ts": 1, "dur": 1, "cat": "user_annotation"},
    ]  # fmt: skip
    paths[0].write_text(json.dumps(tree))
    measured = put_together([read_trace(path) for path in paths])
    assert measured.timeline.makespan == pytest.approx(timeline.makespan * 0.01, rel=1e-3)
