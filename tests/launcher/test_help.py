"""``--help`` of everything, and what a shell completes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from launcher.compose.help_text import completions
from launcher.compose.option_groups import find_groups
from launcher.config import LaunchConfig
from launcher.config.key import describe, keys_of, nodes_of
from launcher.config.launch import MODES
from tests.launcher.command_line import launch_here, refused_here, run_here

PATHS = [entry.path for entry in keys_of(LaunchConfig)]


def explain(words, folder, monkeypatch) -> str:
    done = run_here(["--help", *words], folder, monkeypatch)
    assert (done.code, done.errors, done.calls) == (0, "", [])
    assert list(folder.iterdir()) == []
    return done.output


def test_help_is_one_page_of_what_people_type(tmp_path, monkeypatch):
    text = explain([], tmp_path, monkeypatch)
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 88
    assert all(f"\n  {mode} " in text for mode in MODES)
    for node in nodes_of(LaunchConfig):
        assert f" {node}=" in text or f" {node}.*" in text
    # What it names is there.
    known = {*PATHS, *find_groups(None).names()}
    named = set(re.findall(r"(?<= )([a-z][a-z_.]*)=", text)) - {"install"}
    assert len(named) > 20
    assert named <= known, named - known


def test_the_examples_of_help_are_accepted(tmp_path, monkeypatch):
    text = explain([], tmp_path, monkeypatch)
    examples = re.findall(r"^  python -m launcher(.*?)(?:  .*)?$", text, re.MULTILINE)
    assert len(examples) == 5
    for number, words in enumerate(examples):
        done = run_here(words.split(), tmp_path / str(number), monkeypatch)
        assert done.code == 0, (words, done.errors)


def test_help_of_all_explains_every_key_and_every_option(tmp_path, monkeypatch):
    written = explain(["all"], tmp_path, monkeypatch)
    assert max(map(len, written.splitlines())) <= 100
    text = " ".join(written.split())
    for entry in keys_of(LaunchConfig):
        assert f"{entry.path}= {describe(entry.hint)}" in text
        assert " ".join(entry.help_text.split()) in text
    groups = find_groups(None)
    for group in groups.names():
        for option in groups.options(group):
            assert f"{group}={option}" in text


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("schedule", "schedule=zb_v               Two stages per rank in V shape"),
        ("planner.*", "planner.num_gpus="),
        ("cluster.container", "cluster.container.image="),
        ("optimizer.lr", "  optimizer.lr=               a number, above 0 [0.001]. Peak learning"),
        ("lr", "  optimizer.lr=               a number, above 0 [0.001]. Peak learning"),
        ("pp=", "  pp=                         a whole number, at least 1"),
        ("a100_80g", "\n  peak_bf16_flops: 3.12e14"),
        ("zb_v", "mode=simulate costs=uniform schedule=zb_v pp=4"),
        ("simulate", "mode=simulate\n  draw the timeline"),
        ("none", "tracking=none"),
        ("experiment", "experiment=fold_laptop"),
        ("callbacks", "callbacks=                  keys of your own"),
    ],
)
def test_help_of_a_word_explains_it(topic, said, tmp_path, monkeypatch):
    assert said in explain([topic], tmp_path, monkeypatch)


def test_every_group_key_option_and_mode_can_be_asked_for(tmp_path, monkeypatch):
    groups = find_groups(None)
    options = {option for group in groups.names() for option in groups.options(group)}
    words = [*nodes_of(LaunchConfig), *groups.names(), *PATHS, *options, *MODES]
    assert explain(words, tmp_path, monkeypatch).count("\n") > 800


def test_help_shows_the_values_that_the_overrides_lead_to(tmp_path, monkeypatch):
    text = explain(["model", "model=gpt3_13b"], tmp_path, monkeypatch)
    assert re.search(r"model\.layers= +a whole number, at least 1, at most 100,000 \[40\]", text)


def test_help_knows_the_options_of_a_folder_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "deep.yaml").write_text("# Many layers.\nlayers: 40\n")
    cwd = tmp_path / "cwd"
    text = explain(["model", "--config-dir", str(tmp_path / "mine")], cwd, monkeypatch)
    assert "model=deep                  Many layers.\n" in text


@pytest.mark.parametrize(
    ("topic", "fix"),
    [
        ("trainer.max_step", "Try --help trainer.max_steps."),
        ("schedul", "Try --help schedule."),
        ("zbv", "Try --help zb_v."),
        ("learning_rate", "Try --help optimizer.lr."),
        ("A100", "Try --help a100_40g."),
        ("demo", "Try python -m launcher demo --help."),
        ("xyzzy", "Try --help, which lists the groups."),
    ],
)
def test_help_of_a_word_that_is_nothing_names_the_nearest(topic, fix, tmp_path, monkeypatch):
    assert refused_here(["--help", topic], tmp_path, monkeypatch).endswith(f" {fix}\n")


@pytest.mark.parametrize("command", ["check", "explain"])
def test_help_behind_a_command_explains_its_mode(command, tmp_path):
    done = launch_here([command, "--help"], tmp_path)
    assert done.code == 0
    assert done.output.startswith(f"mode={command}\n  {MODES[command]}\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("foldpipe sched", ["schedule.", "schedule="]),
        ("foldpipe dem", ["demo"]),
        ("foldpipe pp=2 dem", []),
        (
            "foldpipe schedule=fold",
            ["schedule=foldx", "schedule=foldx_aiao", "schedule=foldx_fifo"],
        ),
        ("foldpipe -m schedule=1f1b,zb_h", ["schedule=1f1b,zb_h1", "schedule=1f1b,zb_h2"]),
        ("foldpipe model.hid", ["model.hidden="]),
        ("foldpipe hydra.run", ["hydra.run.dir="]),
        ("foldpipe mode=e", ["mode=eval", "mode=explain", "mode=export"]),
        ("foldpipe compile=", ["compile=false", "compile=true"]),
        ("foldpipe dp=", ["dp=auto"]),
        ("foldpipe optimizer.lr=", ["optimizer.lr=0.001"]),
        ("foldpipe trainer.prec", ["trainer.precision="]),
        ("foldpipe trainer.precision=16", ["trainer.precision=16-mixed"]),
        ("foldpipe trainer.resume=a", ["trainer.resume=auto"]),
        ("foldpipe data.path=", ["data.path=corpus/", "data.path=mine/", "data.path=null"]),
        ("foldpipe data.path=corpus/", ["data.path=corpus/a.txt"]),
        ("foldpipe schedule.file=corpus/a", ["schedule.file=corpus/a.txt"]),
        ("foldpipe check cor", ["corpus/"]),
        ("foldpipe --config-dir mi", ["mine/"]),
        ("foldpipe --config-dir mine model=de", ["model=deep", "model=deepseek_moe_16b"]),
        ("foldpipe --ver", ["--verbose", "--version"]),
        ("foldpipe --help optimizer.l", ["optimizer.lr"]),
        ("foldpipe --help zb", ["zb_h1", "zb_h2", "zb_v"]),
        ("foldpipe nonsense=", []),
    ],
)
def test_a_shell_is_offered_choices_and_files(line, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("corpus/a.txt", "corpus/.hidden", "mine/model/deep.yaml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("layers: 3\n")
    assert completions(line) == found


def test_the_query_of_a_shell_reads_the_line_up_to_the_cursor(tmp_path, monkeypatch):
    line = "foldpipe schedule=zb_h pp=4"
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(line.index(" pp")))
    done = run_here(["-sc", "query=bash"], tmp_path, monkeypatch)
    assert done.output == "schedule=zb_h1\nschedule=zb_h2\n"


COMPLETED = """\
python() {{ :; }}
_before() {{ COMPREPLY=(before); }}
complete -F _before python
{script}
try() {{ COMP_LINE="$1"; COMP_POINT=${{#1}}; COMPREPLY=(); _foldpipe_completion; echo "${{COMPREPLY[@]}}"; }}
try "{python} -m launcher pp=2 schedule=foldx_"
try "{python} script.py sch"
complete -p python3
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_python_m_launcher_and_leaves_other_uses_of_python_alone(
    tmp_path, monkeypatch
):
    script = run_here(["-sc", "install=bash"], tmp_path, monkeypatch).output
    text = COMPLETED.format(script=script, python=sys.executable)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "foldx_aiao foldx_fifo",
        "before",
        "complete -o bashdefault -o default -o nospace -F _foldpipe_completion python3",
    ], done.stderr
