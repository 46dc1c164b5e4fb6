"""The command line from outside: what it refuses and how, and what it leaves behind."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.compose.option_groups import find_groups
from launcher.config import LaunchConfig
from launcher.config.foreign_words import MEANT_KEYS
from launcher.config.key import is_free, keys_of, typed
from launcher.processes.local import our_path, our_python, rank_environment
from launcher.workloads.own_code import require_place
from strategies.errors import ModelError, PlanError, RunError
from tests.launcher.command_line import launch_here, run_here

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = "0123456789abcdef0123456789abcdef01234567"


def run_outside(words, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "launcher", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": our_path(os.environ), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


REFUSED = [
    (["schedle=1f1b"], "schedle is not a key. Did you mean schedule=1f1b?"),
    (["schedule=1f1bb"], "Did you mean schedule=1f1b?"),
    (["schedule=vpp"], "Here it is called interleaved_1f1b. Try schedule=interleaved_1f1b."),
    (["-m", "schedule=gpipe,X"], "Try schedule=chimera."),
    (["model.hiden=64"], "model.hiden is not a key. Did you mean model.hidden=64?\n"),
    (["modle.hidden=3"], "Did you mean model.hidden=3?"),
    (["hidden=64"], "Did you mean model.hidden=64?"),
    (["optimizer.lrr=3"], "optimizer.lrr is not a key. Did you mean optimizer.lr=3?\n"),
    (["optimizer.lrr=abc"], "optimizer.lrr is not a key. Did you mean optimizer.lr?\n"),
    (["-m", "optimizer.lrr=3,4"], "Did you mean -m optimizer.lr=3,4?\n"),
    (["trainer.max_step=3"], "Did you mean trainer.max_steps=3?\n"),
    (["mode=foo"], "mode=foo does not exist. --help mode lists its values. Try mode=train.\n"),
    (["wandb=online"], "wandb is not a key. Try tracking=wandb.\n"),
    (["wandb=offline"], "Try tracking=wandb tracking.offline=true.\n"),
    (["wandb.mode=offline"], "Try tracking.offline=true.\n"),
    (["modle=tny"], "Did you mean model=tiny?"),
    (["model.experts=2", "model.experts_per_token=3"], "Try model.experts_per_token=2."),
    (["model.experts_per_token=2"], "is about experts, and model=tiny has none. Try model.experts"),
    (["model.experts=8", "model.router=relu"], "model.router=relu"),
    (["pp=four"], "pp=four: expected a whole number. Try pp=4."),
    (["pp=1.5"], "pp=1.5: expected a whole number"),
    (["pp=true"], "pp=true: expected a whole number"),
    (["pp="], "pp=: expected a whole number"),
    (["pp=null"], "pp=null: expected a whole number"),
    (["pp"], "pp: expected key=value. Did you mean pp=...?"),
    (["simulate"], "Did you mean mode=simulate?"),
    (["mode=simulat"], "Try mode=simulate."),
    (["=3"], "expected key=value"),
    (["=="], "expected key=value"),
    ([""], "expected key=value"),
    (["'"], "expected key=value"),
    (["+model.hiden=64"], "Did you mean model.hidden=64?"),
    (["++model.hiden=64"], "Did you mean model.hidden=64?"),
    (["+pp=4"], "pp is there already. Try pp=4."),
    (["+schedule=gpipe"], "Try schedule=gpipe."),
    (["~pp"], "keys cannot be removed"),
    (["~schedule"], "keys cannot be removed"),
    (["schedule@model=gpipe"], "Try schedule=gpipe."),
    (["schedule=null"], "takes the name of one option"),
    (["model={hidden:3}"], "takes the name of one option"),
    (["model=[tiny,small]"], "takes the name of one option"),
    (["model=../../x"], "does not exist"),
    (["schedule=Auto"], "schedule=Auto does not exist. Try plan=auto, which takes the fastest"),
    (["schedule=gpipe", "schedule=1f1b"], "schedule= is given twice"),
    (["generate=3"], "generate holds keys"),
    (["generate={propmt: a}"], "generate.propmt is not a key. Did you mean generate.prompt"),
    (["schedule=gpipe,1f1b"], "Try -m schedule=gpipe,1f1b for one run each."),
    (["generate.prompt=a, b"], "\"generate.prompt='a, b'\" for a text with commas"),
    (["schedule.layers_per_stage=1,2"], "schedule.layers_per_stage=[1,2] for a list"),
    (["schedule.layers_per_stage=[1,a]"], "expected a list of whole numbers or null"),
    (["generate.prompt=a: b=c"], "Try \"generate.prompt='a: b=c'\""),
    (["pp=[1,2"], "expected a whole number. Try pp=4."),
    (["optimizer.betas=(0.9,0.95)"], "Try optimizer.betas=[0.9,0.95]."),
    (["cluster.extra=--qos=high"], "Try \"cluster.extra=['--qos=high']\"."),
    (["trainer..max_steps=3"], "Did you mean trainer.max_steps=...?"),
    (["pp=${pp}"], "pp: Recursive interpolation"),
    (["pp=${nope}"], "'nope' not found"),
    (["pp=${oc.env:FOLDPIPE_NOPE}"], "'FOLDPIPE_NOPE' not found"),
    (["pp=" + "[" * 2000], "expected a whole number"),
    (["hydra.run.dir='" + "[" * 2000], "cannot be read"),
    (["generate.prompt=" + "x" * 20_000], "at most 16384 are read"),
    (["seed=1e400"], "expected a whole number"),
    (["optimizer.lr=nan"], "expected a number"),
    (["optimizer.lr=-1"], "more than 0"),
    (["experiment=mine"], "To only name a run: experiment_name=NAME."),
    (["+model._target_=os.system"], "_target_ would run code"),
    (["model={_target_: os.system}"], "_target_ would run code"),
    (["hydra.job_logging.root=x"], "only hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir"),
    (["hydra/launcher=joblib"], "only hydra.run.dir"),
    (["hydra={run: {dir: x}}"], "only hydra.run.dir"),
    (["++hydra.run.dir=a"], "Try hydra.run.dir=my_folder."),
    (["pp=a\nb", "seed=1"], "pp=a\\nb: expected a whole number. Try pp=4."),
    (["hydra.mode=MULTIRUN"], "Try -m for a sweep."),
    (["hydra.searchpath=[/tmp]"], "Try --config-dir DIR."),
    (["hydra.run.dir=${nope}"], "'nope' not found"),
    (["hydra.run.dir=/dev/null/x"], "/dev/null/x cannot be created"),
    (["--confg-dir", "x"], "Did you mean --config-dir"),
    (["--experimental-rerun", "x.pickle"], "is not a flag"),
    (["--cfg", "jobs"], "invalid choice: 'jobs'"),
    (["--resolve"], "Try --cfg job --resolve."),
    (["--cfg", "job", "-m", "pp=1,2"], "Choose one"),
    (["--config-dir", "/nope"], "--config-dir /nope: no such folder"),
    (["-m", "pp=interval(1,2)"], "a sweep needs a list of values"),
    (["-m", "schedule=interval(1,2)"], "takes option names"),
    (["-m", "pp=range(1,100000)"], "at most", "1001 jobs"),
    (["-m", "pp=range(1,9,0)"], "this range() cannot be read. Try -m pp=4"),
    (["-m", "schedule=gpipe,1f1bb"], "Did you mean schedule=1f1b?"),
    (["-m", "pp=1,2,four"], "pp=four: expected a whole number"),
    (["-m", "hydra.sweep.dir=a,b"], "hydra.sweep.dir takes one folder"),
    (["pp=${seed"], "nothing closes it. Try 'pp=${seed}' or pp=4."),
    (["tracking.tags=[${pp]"], "nothing closes it."),
    (["user.x=a${b"], """Try 'user.x=a${b}' or 'user.x="a\\${b"'."""),
    (["optimizer.lr=0,001"], "or optimizer.lr=0.001 for one number."),
    (["schedule=./a b.csv"], """Try schedule=custom "schedule.file='./a b.csv'"."""),
    (["data=corpus.txt"], "Try data=text data.path=corpus.txt."),
    (["model=nets.py:Net"], "Try model=class model.path=nets.py:Net."),
    (["model=class", "model.path=.nets:Net"], "expected module:Class"),
    (["mine.yaml"], "try --config-dir DIR experiment=NAME"),
    (["--config", "mine.yaml"], "try --config-dir DIR experiment=NAME"),
    (["--gpus", "2"], "Try pp=, dp= and tp="),
    (["--resume"], "Try trainer.resume=auto"),
    (["--max-steps", "3"], "Keys have no dashes. Try trainer.max_steps=VALUE."),
]

# What people type in their first hour, from Hydra, Lightning, Megatron and torchrun.
FIRST_HOUR = [
    ("--hydra-help", "Did you mean --help?"),
    ("--config-name=x", "Did you mean --config-dir?"),
    ("--config-path=x", "Did you mean --config-dir?"),
    ("--pp=4", "keys have no dashes. Try pp=VALUE."),
    ("-pp=4", "keys have no dashes. Try pp=VALUE."),
    ("--model.layers=4", "keys have no dashes. Try model.layers=VALUE."),
    ("~tracking", "give tracking= another value"),
    ("~model.dropout", "give model.dropout= another value"),
    ("+experiment=fold_laptop", "Try experiment=fold_laptop."),
    ("+foo=1", "foo is not a key"),
    ("++foo.bar=1", "foo.bar is not a key"),
    ("hydra/launcher=submitit_slurm", "only hydra.run.dir"),
    ("hydra.job.name=x", "only hydra.run.dir"),
    ("hydra.verbose=true", "only hydra.run.dir"),
    ("model._target_=torch.nn.Linear", "would run code"),
    ("data._target_=x.Y", "would run code"),
    ("callbacks=x", "Try callbacks.x.path=lightning.pytorch.callbacks:EarlyStopping"),
    ("trainer.callbacks=x", "Try callbacks.stop.path=lightning.pytorch.callbacks:EarlyStopping"),
    ("tracking=wandb,tensorboard", "Try -m tracking=wandb,tensorboard"),
    ("logger=wandb", "Try tracking=wandb.\n"),
    ("model=llama3_8b", "Did you mean model=llama2_7b"),
    ("model=qwen", "Try --help model, which lists its 22 options.\n"),
    ("model=gpt2", "Did you mean model=gpt2_124m?"),
    ("model.width=32", "Try model.hidden=32."),
    ("model.hidden=130", "Try model.hidden=128."),
    ("model.num_layers=4", "Try model.layers=4."),
    ("schedule=Auto", "does not exist. Try plan=auto"),
    ("schedule=zbv", "does not exist. Did you mean schedule=zb_v?\n"),
    ("mode=demo", "Try python -m launcher demo."),
    ("--foldx-mode aiao", "--foldx-mode is not a flag. Try schedule=foldx_aiao."),
    ("callbacks.stop.path=EarlyStopping", "Try callbacks.stop.path=lightning.pytorch.callbacks:"),
    ("optimizer=lion", "Did you mean optimizer=class optimizer.path=lion_pytorch:Lion, of pip"),
    ("optimizer=qqq", "Options of optimizer: adam, adamw, class, muon, sgd."),
    ("optimizer.schedule=linear", "expected cosine or constant"),
    ("data=wikitext", "Did you mean data=text?"),
    ("data=text", "Try data=text data.path=/path/to/file."),
    ("schedule=", "Try --help schedule, which lists its 22 options.\n"),
    ("schedule=1fb1", "Did you mean schedule=1f1b?"),
    ("schedule=1F1B", "Did you mean schedule=1f1b?"),
    ("hardware=H100", "Did you mean hardware=h100?"),
    ("schedule=interleaved", "interleaved_1f1b"),
    ("schedule=chimera pp=3", "Try pp=2 or pp=4."),
    ("schedule=chimera pp=2 num_microbatches=1", "Try num_microbatches=2."),
    ("pp=0", "at least 1. Try pp=4."),
    ("pp=two", "expected a whole number"),
    ("dp=0", "Try dp=1."),
    ("tp=3", "Try tp=2."),
    ("ep=2", "ep=2 spreads the experts of a model over ranks, and this one has none"),
    ("overlap.exchange=true", "Try ep=2 with a model that has experts"),
    ("model.experts=6 dp=4 ep=4", "does not divide model.experts=6. Try ep=3."),
    ("model.experts=4 expert_tp=true", "and tp=1. Try tp=2, or expert_tp=false."),
    ("model=tiny tp=2 expert_tp=true", "has none. Try expert_tp=false, or model.experts=8."),
    ("model.experts=4 model.expert_ffn=9 tp=2 expert_tp=true", "Try model.expert_ffn=10"),
    ("model.experts=4 tp=2 ep=2 expert_tp=true", "ep=2 does not divide. Try ep=1, or dp=2."),
    ("mode=plan expert_tp=true", "has none. Try expert_tp=false, or model.experts=8."),
    ("model=hf model.path=little model.config.vocab_size=9", "Change it there, and add"),
    ("model=hf model.path=little model.seq_length=9", "Try model.sequence=9."),
    ("model=hf model.path=little tp=2 expert_tp=true", "Try expert_tp=false ep=2, which"),
    ("model.experts=8 dp=3 ep=2", "the 3 ranks that the experts of a stage are spread over"),
    ("model.experts=8 dp=2 ep=2 sequence_parallel=true tp=2", "balance loss"),
    ("pp=1,2", "Try -m pp=1,2"),
    ("pp 4", "Did you mean pp=...?"),
    ("pp:4", "Try pp=4."),
    ("num_microbatches=0", "Try num_microbatches=8."),
    ("trainer.max_step=3", "Did you mean trainer.max_steps"),
    ("trainer.epochs=3", "Try trainer.max_epochs=3."),
    ("trainer.max_epochs=-5", "at least 1"),
    ("trainer.gradient_clip_val=-1", "more than 0"),
    ("trainer.accumulate_grad_batches=0", "at least 1"),
    ("lr=3e-4", "Did you mean optimizer.lr=3e-4?"),
    ("learning_rate=1e-3", "Try optimizer.lr=1e-3."),
    ("optimizer.lr=", "expected a number"),
    ("batch_size=8", "Try data.global_batch_size=64"),
    ("seed=-1", "at least 0"),
    ("mode=fit", "Try mode=train."),
    ("mode=test", "mode=test does not exist. Try mode=eval."),
    ("mode=sample", "Try mode=generate."),
    ("compile=yes", "Try compile=true."),
    ("overlap=true", "does not exist. Did you mean overlap=grad_reduce?\n"),
    ("recompute=true", "does not exist. Did you mean recompute=full?\n"),
    ("experiment=unknown", "experiment_name=NAME"),
    ("world_size=4", "Try pp=, dp= and tp="),
    ("nproc_per_node=4", "Try pp=, dp= and tp="),
    ("cluster=torchrun pp=2", "Try python -m torch.distributed.run --nproc-per-node=2"),
    ("cluster.time=abc cluster=slurm cluster.submit=false", "Try cluster.time=24:00:00."),
    ("-m optimizer.lr=interval(1e-4,1e-2)", "sweep.trials=20"),
    ("sweep.trials=3", "Try -m sweep.trials=3"),
    ("hardware.memory_gb=0", "more than 0. Try hardware.memory_gb="),
    ("hardware.memory_gb=80GiB", "Try hardware.memory_gb=80."),
    ("overlap.exchange=yes", "Try overlap.exchange=true."),
    ("model.name=llama2_7b", "Try model=llama2_7b."),
    ("hardware.name=h100", "Try hardware=h100."),
    ("data=text data.path=s3://bucket/x", "nothing is downloaded. Try data.path=/path/to/it."),
    ("trainer.resume=", "trainer.resume= is empty. Try trainer.resume=auto."),
    ("hydra.run.dir=", "it is empty. Try hydra.run.dir=my_run."),
    ("hydra.run.dir=/", "nobody's run. Try hydra.run.dir=my_run."),
    ("trainer.max_steps=99999999999999999999", "at most 9007199254740992"),
    ("optimizer=sgd optimizer.nesterov=true", "belongs to optimizer=muon"),
    ("--wandb-key=abcdefgh", "--wandb-key is not a flag. Try --help."),
    ("--config-dir x --config-dir y", "--config-dir is given twice"),
    ("-c job -p trainr", "Did you mean trainer or tracking?"),
    ("demo pp=99999", "at most 65536"),
    ("plan", "Did you mean mode=plan?"),
]


@pytest.mark.parametrize(("words", "told"), FIRST_HOUR)
def test_a_mistake_of_the_first_hour_is_one_sentence_with_a_way_out(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = run_here(words.split(), tmp_path, monkeypatch)
    done.assert_refused()
    assert told in done.errors


@pytest.mark.parametrize(
    "text", ["a b", "it's", 'say "hi"', "5 $HOME `ls` !", "it's $5", "tail\\", "a,b=(c)", "x: y"]
)
def test_advice_with_a_text_can_be_pasted_into_a_shell(text: str) -> None:
    (word,) = shlex.split(typed("user.note", text))
    parsed = OverridesParser.create().parse_override(word)
    assert (parsed.key_or_group, parsed.value()) == ("user.note", text)


def test_names_of_libraries_in_the_working_directory_hide_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("yaml", "random", "select", "strategies"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')\n")
    done = run_outside(["schedle=1f1b"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: schedle is not a key. Did you mean schedule=1f1b?\n"
    # Nor in what the launcher starts, where Python could not even begin with the last of these.
    (tmp_path / "launcher").mkdir()
    for name in ("launcher/__init__", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')\n")
    command = [*our_python("launcher"), "--version"]
    child = subprocess.run(command, cwd=tmp_path, env=rank_environment(1), capture_output=True)
    assert (child.returncode, child.stderr) == (0, b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"my_random:Net after renaming the file to my_random.py"):
        require_place("model", "random:Net")


def test_another_python_than_the_installed_one_is_told_so(tmp_path: Path) -> None:
    def end(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-S", *words],  # without site-packages
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    told = (
        f"error: this Python ({sys.executable}) has no hydra, which foldpipe needs. `make install` "
    )
    code, output, errors = end("-m", "launcher", "pp=2")
    assert (code, output, errors[: len(told)], errors.count("\n")) == (2, "", told, 1)
    old = "import sys; sys.version_info = (3, 10, 1); sys.argv = ['-m']; import launcher"
    code, output, errors = end("-c", old)
    assert (code, output) == (2, "")
    assert errors.startswith("error: foldpipe needs Python 3.11 or newer, and ")
    assert errors.count("\n") == 1


def test_a_checkout_runs_with_the_schedules_that_stand_beside_its_launcher(tmp_path):
    """Whichever foldpipe is installed: here the one whose tests these are."""
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "__init__.py").write_text("")
    shutil.copytree(
        REPOSITORY / "launcher", tmp_path / "launcher", ignore=lambda *_: ["__pycache__"]
    )
    code = "import sys; sys.argv = ['-m']; import launcher, strategies; print(strategies.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "strategies" / "__init__.py")


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case[0])[:40])
def test_a_wrong_request_is_refused_with_one_message(case, tmp_path, monkeypatch):
    words, *expected = case
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert expected[-1] in done.errors


@pytest.mark.parametrize(
    "words",
    [
        ["wandb.api_key=hunter2hunter2"],
        ["+tracking.password=hunter2hunter2"],
        [f"tracking.entity={SECRET}"],
        [f"experiment_name='{SECRET}'"],
        ["tracking.tags=[hf_abcdefghijklmnopqrstuvwxyz]"],
        ["generate.prompt=sk-proj-abcdefghijklmnopqrstu"],
        ["data.path=${oc.env:MY_SECRET_THING}"],
        ["tracking.entity=${oc.env:FOLDPIPE_HARMLESS}"],
    ],
    ids=lambda words: words[0][:30],
)
def test_a_credential_is_refused_and_not_repeated(words, tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDPIPE_HARMLESS", SECRET)
    monkeypatch.setenv("MY_SECRET_THING", SECRET)
    done = run_here([*words, "mode=simulate"], tmp_path, monkeypatch)
    done.assert_refused()
    assert "credential" in done.errors
    for secret in ("hunter2", SECRET, "hf_abc", "sk-proj"):
        assert secret not in done.errors


@pytest.mark.parametrize(
    "words",
    [
        ["data=text", "data.path=/data/tokens/0123456789abcdef0123456789abcdef01234567/x"],
        ["data=text", "data.path=/x", "data.tokenizer=/models/tokenizer.json"],
        ["generate.max_new_tokens=5"],
        ["generate.prompt='the key: a token, a secret'"],
        ["data=text", "data.path=${oc.env:HOME}/corpus"],
        ["++pp=2"],
        ["generate={prompt: hello}"],
        ["pp=2", "seed=${pp}"],
        ["pp=3", "pp=2"],
    ],
    ids=lambda words: words[-1][:30],
)
def test_what_only_looks_suspicious_is_accepted(words, tmp_path, monkeypatch):
    done = run_here([*words, "mode=simulate"], tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")


def test_a_run_gets_an_absolute_private_folder_named_after_it(tmp_path, monkeypatch):
    done = run_here(["schedule=gpipe", "pp=2", "mode=simulate"], tmp_path, monkeypatch)
    (call,) = done.calls
    assert call.run_dir.is_absolute()
    assert re.fullmatch(r"\d\d-\d\d-\d\d_simulate_gpipe_pp2", call.run_dir.name)
    assert call.run_dir.parents[1] == tmp_path / "outputs"
    files = sorted(file.name for file in (call.run_dir / ".hydra").iterdir())
    assert files == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert stat.S_IMODE(call.run_dir.stat().st_mode) == 0o700
    assert (done.output, done.errors) == ("", "")


def test_two_runs_in_one_second_do_not_share_a_folder(tmp_path, monkeypatch):
    runs = [run_here(["mode=simulate"], tmp_path, monkeypatch) for _ in range(3)]
    assert len({run.calls[0].run_dir for run in runs}) == 3


def test_a_chosen_folder_is_used_as_it_is(tmp_path, monkeypatch):
    for _ in range(2):
        done = run_here(["hydra.run.dir=a/it is", "mode=simulate"], tmp_path, monkeypatch)
        assert done.calls[0].run_dir == tmp_path / "a" / "it is"


def refuse(config, run_dir):
    raise PlanError("pp=9 is too much. Try pp=1.")


def test_a_command_that_refuses_leaves_nothing_behind(tmp_path, monkeypatch):
    done = run_here(["hydra.run.dir=a/b/c"], tmp_path, monkeypatch, refuse)
    assert (done.code, done.errors) == (2, "error: pp=9 is too much. Try pp=1.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_refuses_restores_an_earlier_run(tmp_path, monkeypatch):
    run_here(["hydra.run.dir=a", "seed=1"], tmp_path, monkeypatch)
    (tmp_path / "a" / "result.json").write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert run_here(["hydra.run.dir=a", "seed=2"], tmp_path, monkeypatch, refuse).code == 2
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_failed_run_keeps_its_folder(tmp_path, monkeypatch):
    def fail(config, run_dir):
        (run_dir / "result.json").write_text("{}")
        raise RunError("rank 3 was killed")

    done = run_here(["hydra.run.dir=a"], tmp_path, monkeypatch, fail)
    assert (done.code, done.errors) == (1, "error: rank 3 was killed\n")
    assert (tmp_path / "a" / "result.json").exists()


def test_a_defect_shows_its_traceback_and_fails(tmp_path, monkeypatch):
    done = run_here([], tmp_path, monkeypatch, lambda config, run_dir: 1 // 0)
    assert done.code == 1
    assert "ZeroDivisionError" in done.errors


@pytest.mark.parametrize("code", [0, 1, 85])
def test_the_exit_code_of_the_command_is_that_of_the_program(code, tmp_path, monkeypatch):
    assert run_here([], tmp_path, monkeypatch, lambda config, run_dir: code).code == code


def test_a_sweep_runs_every_combination_in_a_folder_of_its_own(tmp_path, monkeypatch):
    words = ["-m", "schedule=gpipe,1f1b", "pp=1,2", "mode=simulate", "hydra.sweep.dir=s"]
    done = run_here(words, tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")
    assert [(c.config.schedule.name, c.config.pp, c.run_dir) for c in done.calls] == [
        ("gpipe", 1, tmp_path / "s" / "0"),
        ("gpipe", 2, tmp_path / "s" / "1"),
        ("1f1b", 1, tmp_path / "s" / "2"),
        ("1f1b", 2, tmp_path / "s" / "3"),
    ]
    assert done.output.splitlines()[1] == "[1/4] schedule=gpipe pp=1  0 s"
    loud = run_here(["--verbose", *words], tmp_path / "b", monkeypatch)
    assert "[1/4] schedule=gpipe pp=1 mode=simulate" in loud.output.splitlines()[0]


def test_flags_may_stand_between_overrides(tmp_path, monkeypatch):
    done = run_here(["pp=1,2", "-m", "mode=simulate"], tmp_path, monkeypatch)
    assert [call.config.pp for call in done.calls] == [1, 2]


def test_glob_sweeps_over_all_options(tmp_path, monkeypatch):
    done = run_here(["-m", "schedule=glob(fold*)", "mode=simulate"], tmp_path, monkeypatch)
    assert [call.config.schedule.name for call in done.calls] == [
        "foldx",
        "foldx_aiao",
        "foldx_fifo",
    ]


def test_a_failed_job_does_not_stop_the_others_but_fails_the_sweep(tmp_path, monkeypatch):
    def fail_first(config, run_dir):
        if config.pp == 1:
            raise RunError("rank 0 was killed")
        return 0

    done = run_here(["-m", "pp=1,2,3"], tmp_path, monkeypatch, fail_first)
    assert (done.code, len(done.calls)) == (1, 3)
    assert "job 0 of the sweep failed (exit 1): pp=1" in done.errors


def test_a_preempted_job_ends_the_sweep(tmp_path, monkeypatch):
    done = run_here(["-m", "pp=1,2,3"], tmp_path, monkeypatch, lambda config, run_dir: 85)
    assert (done.code, len(done.calls)) == (85, 1)


def test_nothing_of_a_sweep_starts_if_its_last_job_is_wrong(tmp_path, monkeypatch):
    words = ["-m", "schedule=interleaved_1f1b", "pp=2", "num_microbatches=4", "schedule.group=4,5"]
    done = run_here(words, tmp_path, monkeypatch)
    done.assert_refused()
    assert "schedule.group=5" in done.errors


def test_cfg_prints_the_configuration_and_starts_nothing(tmp_path, monkeypatch):
    done = run_here(["--cfg", "job", "-p", "schedule", "pp=2"], tmp_path, monkeypatch)
    assert done.code == 0
    assert "name: 1f1b" in done.output
    assert done.calls == []
    assert list(tmp_path.iterdir()) == []


MUTATED_VALUES = [
    "", "null", "true", "-1", "0", "1", "2", "1e9", "-0.5", "1e400", "nan", "inf", "four", "auto",
    "[]", "[1,2]", "[1,", "{a:1}", "{", "}", "'", "\"", "'x'", "${pp}", "${nope}", "${", "$", "a,b",
    "1,2", "range(1,3)", "interval(0,1)", "choice(1,2)", "glob(*)", "sort(1,2)", "???", "\\", "\n",
    "\x00", "é", "日本", "a b", "../x", "0x10", "1_000", "!!int 3", "*a", "&a", "@x", "=", ":",
]  # fmt: skip
PREFIXES = ["", "", "", "", "+", "++", "~", "-", "--", "-m ", "@", " "]


def mutate(draw: random.Random, keys: list[str]) -> list[str]:
    words = []
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(keys)
        for _ in range(draw.choice([0, 0, 1, 2])):
            at = draw.randrange(len(name) + 1)
            edit = draw.choice([".", "/", "@", "=", "x", "", "[0]", "_target_"])
            name = name[:at] + edit + name[at + draw.randint(0, 2) :]
        word = f"{draw.choice(PREFIXES)}{name}{draw.choice(['=', '=', '=', '=', ''])}"
        words += (word + draw.choice(MUTATED_VALUES)).split("-m ")
    return words if draw.random() < 0.8 else ["-m", *words]


def test_200_mutated_requests_end_in_a_run_or_in_one_message(tmp_path, monkeypatch):
    draw = random.Random(20)
    groups = find_groups(None)
    keys = [entry.path for entry in keys_of(LaunchConfig)]
    keys += [*groups.names(), "hydra.run.dir", "hydra.verbose", "experiment"]
    refused = 0
    for number in range(200):
        # Whether a mutation leaves anything valid is chance, and changes with the list of keys.
        words = mutate(draw, keys) if number % 20 else ["pp=2"]
        folder = tmp_path / str(number)
        done = run_here([*words, "mode=simulate"], folder, monkeypatch)
        assert "Traceback" not in done.errors, words
        if done.code:
            done.assert_refused()
            refused += 1
    assert 100 < refused < 200


def test_from_outside_a_wrong_request_imports_no_torch_and_leaves_nothing(tmp_path):
    done = run_outside(["schedle=1f1b"], tmp_path, PYTHONPROFILEIMPORTTIME="1")
    *times, message = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in times}
    assert "launcher.config" in imported
    assert not {"torch", "lightning", "numpy", "matplotlib", "wandb"} & imported
    assert (done.returncode, done.stdout) == (2, "")
    assert message == "error: schedle is not a key. Did you mean schedule=1f1b?"
    assert list(tmp_path.iterdir()) == []


def test_from_outside_a_broken_file_is_one_message(tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "bad.yaml").write_text("name: m\nname: n\n")
    done = run_outside(["--config-dir", str(tmp_path / "mine"), "model=bad"], tmp_path / "cwd")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.yaml:2: the key name is there twice" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_front_imports_neither_torch_nor_lightning_nor_wandb(tmp_path):
    code = (
        "import sys, contextlib, io\n"
        "from launcher.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert main(['--help']) == 0\n"
        "heavy = {'torch', 'lightning', 'wandb', 'transformers', 'numpy', 'pytorch_lightning'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=REPOSITORY, check=True, timeout=60
    )


def test_a_worker_reads_its_configuration_without_hydra():
    code = (
        "import sys\n"
        "from launcher.config import from_dict, check\n"
        "check(from_dict({'pp': 2}))\n"
        "assert not {'hydra', 'omegaconf', 'yaml', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=REPOSITORY, check=True, timeout=60
    )


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("trainer.devices=4", "Try pp=, dp= and tp=, whose product is the number of processes."),
        ("gpus=4", "Try pp=, dp= and tp="),
        ("trainer.strategy=ddp", "Try dp=2, the number of replicas."),
        ("optimizer.learning_rate=1", "Try optimizer.lr=1."),
        ("cluster.qos=a", "Try cluster=slurm, or without cluster.qos."),
        ("cluster.nodelist=a", "Try \"cluster.extra=['--nodelist=VALUE']\""),
        ("cluster.modules=a", 'Try "cluster.setup=['),
        ("trainer.precision=bf16", "Try trainer.precision=bf16-mixed."),
        ("trainer.precision=32", "Try trainer.precision=32-true."),
    ],
)
def test_names_from_elsewhere_lead_to_ours(word, advice, tmp_path, monkeypatch):
    done = run_here([word], tmp_path / "run", monkeypatch)
    done.assert_refused()
    assert advice in done.errors


def test_all_advice_for_names_from_elsewhere_can_be_typed():
    known = {entry.path for entry in keys_of(LaunchConfig)} | {
        "hydra.run.dir",
        *find_groups(None).names(),
    }
    advice = " ".join(MEANT_KEYS.values())
    words = re.findall(r"(?<![\w.])([a-z][a-z0-9_.]*)=", advice)
    assert len(words) > 30
    own = {word for word in words if is_free(word, LaunchConfig)}
    assert set(words) - own <= known


def test_a_plan_may_be_for_another_machine(tmp_path):
    words = ("mode=simulate", "trainer.precision=16-mixed", "hardware=v100_32g", "pp=2")
    launch_here(words, tmp_path).assert_done()


def test_printed_commands_carry_the_folder_of_option_files(tmp_path):
    own = tmp_path / "my cfg" / "model" / "deep.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: transformer\nlayers: 6\n")
    words = ("--config-dir", "my cfg", "model=deep", "mode=validate")
    done = launch_here(words, tmp_path).assert_done()
    assert (
        "command on this machine: python -m launcher --config-dir 'my cfg' model=deep\n"
        in done.output
    )
    plans = launch_here((*words[:3], "mode=plan", "planner.num_gpus=2"), tmp_path).assert_done()
    assert "plan 1: python -m launcher --config-dir 'my cfg' model=deep pp=" in plans.output


def test_nothing_typed_trains_a_pipeline_of_two(tmp_path, monkeypatch):
    (call,) = run_here([], tmp_path, monkeypatch).calls
    assert (call.config.mode, call.config.pp) == ("train", 2)
    assert "- pp=2" in (call.run_dir / ".hydra" / "overrides.yaml").read_text()
    (call,) = run_here(["schedule=gpipe"], tmp_path / "b", monkeypatch).calls
    assert call.config.pp == 1


def test_verbose_prints_every_figure_of_a_training_run(tmp_path, monkeypatch):
    def trained(config, run_dir):
        (run_dir / "report.txt").write_text("above the bound 3 %\n")
        return 0

    assert run_here([], tmp_path, monkeypatch, trained).output == ""
    done = run_here(["--verbose", "pp=2"], tmp_path, monkeypatch, trained)
    assert (done.code, done.output) == (0, "above the bound 3 %\n")


def test_verbose_is_refused_where_there_is_no_more_to_say(tmp_path, monkeypatch):
    done = run_here(["--verbose", "mode=simulate"], tmp_path, monkeypatch)
    done.assert_refused()
    assert "Try it without" in done.errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--info", "pp=4"], ("Config search path", "Defaults Tree", "pp: 4")),
        (["--info", "searchpath"], ("provider", "main")),
        (["-i", "defaults", "schedule=zb_v"], ("schedule/zb_v",)),
        (["-m", "--info=config", "pp=2,4"], ("mode: train",)),
    ],
)
def test_info_tells_where_the_configuration_comes_from(words, said, tmp_path, monkeypatch):
    done = run_here(words, tmp_path, monkeypatch)
    assert (done.code, done.errors, done.calls) == (0, "", [])
    assert all(word.lower() in done.output.lower() for word in said), done.output
    assert list(tmp_path.iterdir()) == []
