"""The playground's answers are those of ``mode=simulate``, for every schedule and every mistake."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys

import pytest

from launcher.compose.session import compose_checked, hydra_session
from launcher.config import dump
from launcher.playground import MAX_FORWARDS, MAX_RANKS, answer, answer_json, configuration
from launcher.resolve import resolve
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.schedules import SCHEDULES
from tests.launcher.command_line import launch_here
from tools.docs.playground import FIRST, NPM, ROOT, compose_options, copy_pyodide, modules

OPTIONS = compose_options()
GRID = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
HOSTILE = '0F0,<img src=x onerror="alert(1)">\n'


def order(programs):
    return tuple(
        tuple(item for item in row if item.kind in MICROBATCH_KINDS) for row in programs.train.ranks
    )


# One of each family every day.
DAILY = (
    "1f1b",
    "interleaved_1f1b",
    "zb_v",
    "foldx",
    "chimera",
    "dualpipe_v",
    "pipedream",
    "custom",
)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.full)
        for name in dict.fromkeys([*SCHEDULES, "custom"])
    ],
)
def test_figures_and_order_are_those_of_the_command_line(schedule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"schedule={schedule}", "pp=4", "costs=uniform", "costs.p2p=0.25"]
    if schedule == "custom":
        given = answer(["schedule=zb_v", *words[1:]], OPTIONS)
        (tmp_path / "my.csv").write_text(given["csv"])
        words.append("schedule.file=my.csv")
    found = answer(words, OPTIONS)
    with hydra_session():
        asked = compose_checked(["mode=simulate", *words])[0]
        trained = compose_checked(shlex.split(found["train"])[3:])[0]
    assert configuration(words, OPTIONS) == asked
    assert order(resolve(trained).programs) == order(resolve(asked).programs)
    assert found["result"]["makespan"] > 0 and "<canvas" in found["page"]


@pytest.mark.parametrize(
    "words",
    [
        ["schedule=foldx", "pp=2", "costs=uniform", "costs.grad_reduce=6"],
        ["schedule=1f1b", "pp=4", "costs=uniform", "costs.forward=[1,1,3,1]", "recompute=mario"],
        ["pp=8", "model=llama2_7b", "hardware=h100", "trainer.precision=bf16-mixed"],
        ["pp=2", "hardware=v100_32g", "model=gpt2_124m", "schedule=zb_v"],
    ],
    ids=" ".join,
)
def test_result_and_page_are_the_files_of_a_run(words, tmp_path):
    found = answer(words, OPTIONS)
    assert launch_here(["mode=simulate", *words], tmp_path).code == 0
    result = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert json.loads(json.dumps(found["result"])) == result
    assert found["page"] == next(tmp_path.rglob("timeline.html")).read_text()
    assert found["csv"] == next(tmp_path.rglob("schedule.csv")).read_text()


@pytest.mark.parametrize(
    "word",
    [
        "pp=0",
        "pp=-3",
        "pp=two",
        "pp=1.5",
        "pp=NaN",
        "pp=",
        "num_microbatches=0",
        "num_microbatches=1e400",
        "schedule=zb_w",
        "schedule.stages_per_rank=3",
        "costs.forward=-1",
        "costs.forward=0",
        "costs.backward_input=9",
        "costs.forward=[1,2,3]",
        "costs.frward=1",
        "recompute.max_full_activations=1",
        "schedule.group=auto",
        "overlap.bucket_mb=0",
    ],
)
def test_a_mistake_is_refused_in_the_words_of_the_command_line(word, tmp_path):
    words = ["schedule=zb_v", "pp=4", "costs=uniform"]
    words = [old for old in words if not old.startswith(word.partition("=")[0] + "=")] + [word]
    found = answer(words, OPTIONS)
    done = launch_here(["mode=simulate", *words], tmp_path)
    assert list(found) == ["error"]
    assert f"error: {found['error']}\n" == done.errors


def test_a_size_that_a_browser_would_not_manage_is_told_with_the_way_out():
    tall = answer(["pp=200", "costs=uniform"], OPTIONS)["error"]
    assert f"pp=200: this page draws at most {MAX_RANKS} ranks" in tall
    wide = answer(["schedule=1f1b", "pp=64", "num_microbatches=512", "costs=uniform"], OPTIONS)
    assert wide["error"] == (
        "pp=64 * num_microbatches=512 are 32,768 forwards, and this page takes at most 16,384. Try "
        "num_microbatches=256. On a machine of yours: python -m launcher mode=simulate "
        "schedule=1f1b pp=64 num_microbatches=512 costs=uniform"
    )
    assert (
        "65,536 forwards"
        in answer(["schedule=zb_v", "pp=64", "num_microbatches=512"], OPTIONS)["error"]
    )


def test_a_file_is_told_its_place_its_deadlock_and_its_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["schedule=custom", "schedule.file=my.csv", "pp=2", "costs=uniform"]
    file = tmp_path / "my.csv"
    file.write_text(GRID)
    deadlock = answer(words, OPTIONS)["error"]
    assert (
        deadlock.startswith("my.csv, line 1, column 2: 0B0 on rank 0 never begins")
        and "\n" in deadlock
    )
    file.write_text(HOSTILE)
    assert "line 1, column 2: '<img src=x onerror=\"alert(1)\">'" in answer(words, OPTIONS)["error"]
    file.write_text("0F0," * (MAX_FORWARDS + 1))
    assert f"has {MAX_FORWARDS + 1:,} forwards" in answer(words, OPTIONS)["error"]
    file.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in answer(words, OPTIONS)["error"]
    file.unlink()
    assert "does not exist" in answer(words, OPTIONS)["error"]


def test_what_the_page_decides_is_no_word():
    for word in ("mode=train", "plan=auto", "schedule.path=os:system", "pp", "=4", "x" * 3000):
        assert list(answer(["schedule=1f1b", word], OPTIONS)) == ["error"]
    assert "[[[[" in answer(["pp=" + "[" * 1500], OPTIONS)["error"]


def test_training_gets_the_layers_and_replicas_that_the_picture_speaks_of():
    found = answer(["schedule=1f1b", "pp=32", "costs=uniform", "costs.grad_reduce=4"], OPTIONS)
    assert found["train"].endswith("schedule=1f1b pp=32 model.layers=15 dp=2")
    kept = answer(["schedule=zb_v", "pp=4", "costs=uniform", "costs.backward=3"], OPTIONS)
    assert kept["train"].endswith("costs=uniform costs.backward=3")


def test_a_worker_exchanges_text():
    found = json.loads(answer_json(json.dumps(FIRST), OPTIONS))
    assert found["result"]["makespan"] == 25.5


def test_options_are_those_that_hydra_composes():
    with hydra_session():
        for group, name in (
            ("hardware", "h100"),
            ("hardware", "v100_32g"),
            ("hardware", "cpu_laptop"),
            ("model", "llama2_7b"),
            ("schedule", "foldx"),
            ("recompute", "mario"),
        ):
            composed = dump(compose_checked([f"{group}={name}", "mode=simulate"])[0])
            assert OPTIONS.groups[group][name] == composed[group]


def test_the_archive_has_all_that_the_page_imports_and_nothing_that_needs_more():
    names = [path.relative_to(ROOT).as_posix() for path in modules("launcher.playground")]
    assert "launcher/playground.py" in names and "strategies/schedules/zb_v.py" in names
    assert not [n for n in names if n.startswith(("launcher/rank/", "strategies/runtime/"))]
    known = {n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in names}
    loaded = {n for n in sys.modules if n.startswith(("launcher.", "strategies."))}
    assert {"launcher.resolve", "strategies.compiler"} <= known & loaded


# CPython for browsers comes without these modules of the standard library.
ABSENT = ("resource", "fcntl", "termios", "pwd", "grp", "syslog", "tty", "pty", "curses")


def test_the_page_answers_without_the_modules_that_a_browser_has_not():
    """Nor does any other module that is packed, imported now or later, need them."""
    files = [path.relative_to(ROOT).with_suffix("") for path in modules("launcher.playground")]
    packed = [".".join(file.parts).removesuffix(".__init__") for file in files]
    probe = f"""
import importlib, json, sys
sys.modules |= dict.fromkeys({ABSENT!r})
for name in {packed!r}:
    importlib.import_module(name)
from launcher.playground import Options, answer
print(answer({FIRST!r}, Options(**json.load(sys.stdin)))["result"]["makespan"])
"""
    options = json.dumps({"base": OPTIONS.base, "groups": OPTIONS.groups})
    done = subprocess.run(
        [sys.executable, "-c", probe], input=options, capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "25.5\n", "")


def test_without_npm_there_is_no_pyodide_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.docs.playground.NPM", tmp_path / "nowhere")
    assert not copy_pyodide(tmp_path / "site")
    assert NPM.parts[-3:] == ("build", "npm", "node_modules")
    assert math.isfinite(MAX_FORWARDS)
