"""What tired people type: refused in one sentence, and the advice, pasted, is a run."""

from __future__ import annotations

import gzip
import os
import shlex
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.workloads.data.source import TextSource, check_source
from strategies.errors import DataError
from tests.launcher.command_line import refused_here, run_here

# A command line, what its refusal says, and the command line with the advice pasted into it.
MISTAKES = [
    # Signs and blanks.
    ("schedule:gpipe", "Try schedule=gpipe.", "schedule=gpipe"),
    ("trainer.max_steps:9", "Try trainer.max_steps=9.", "trainer.max_steps=9"),
    ("schedule==gpipe", "with one =. Try schedule=gpipe.", "schedule=gpipe"),
    ("'pp = 2'", "Try pp=2.", "pp=2"),
    ("'schedule = gpipe'", "Try schedule=gpipe.", "schedule=gpipe"),
    ("experiment:fold_laptop", "Try experiment=fold_laptop.", "experiment=fold_laptop"),
    ("pp= 2", "2: expected key=value. No blanks stand around the =", None),
    ("-m pp=1, 2", "2: expected key=value. No blanks", "-m pp=1,2"),
    ("-m pp=1 2 4", "-m pp=1,2,4 for one run each", "-m pp=1,2,4"),
    ("schedule = gpipe", "Did you mean schedule=...?", None),
    ("experiment", "Did you mean experiment=...?", None),
    # Sweeps.
    ("-m pp=1-4", "or -m pp='range(1,5)' for one run each", "-m pp='range(1,5)'"),
    ("-m pp=1:2:4", "or -m pp=1,2,4 for one run each", "-m pp=1,2,4"),
    ("-m pp=[1,2]", "or -m pp=1,2 for one run each", "-m pp=1,2"),
    ("-m \"pp='1 2'\"", "or -m pp=1,2 for one run each", "-m pp=1,2"),
    ("-m optimizer.lr=[1e-3,1e-4]", "-m optimizer.lr=0.001,0.0001", "-m optimizer.lr=0.001,0.0001"),
    ("-m 'schedule=glob(x*)'", "schedule has no value that fits. Try schedule=A,B.", None),
    ("-m pp=1,2 hydra.run.dir=x", "Try hydra.sweep.dir=x.", "-m pp=1,2 hydra.sweep.dir=x"),
    ("hydra.sweep.dir=x", "Try hydra.run.dir=x, or -m.", "hydra.run.dir=x"),
    ("hydra.sweep.subdir=x", "Try hydra.run.dir=x, or -m.", "-m hydra.sweep.subdir=x"),
    # Scripts and folders.
    ("train.py", "A script of your own is started by python itself", None),
    ("python train.py pp=2", "A script of your own is started by python itself", None),
    ("--config-dir= pp=2", "--config-dir is empty.", "pp=2"),
    ("--config-dir '' pp=2", "--config-dir is empty.", "pp=2"),
    # Numbers and their units.
    ("\"pp='2'\"", "pp='2': expected a whole number. Try pp=2.", "pp=2"),
    ("\"optimizer.lr='3e-4'\"", "Try optimizer.lr=3e-4.", "optimizer.lr=3e-4"),
    ("cluster=slurm cluster.submit=false cluster.time=2h", "Try cluster.time=02:00:00.",
     "cluster=slurm cluster.submit=false cluster.time=02:00:00"),
    ("cluster=slurm cluster.submit=false cluster.time=1d12h", "Try cluster.time=36:00:00.", None),
    ("cluster=slurm cluster.submit=false cluster.time=90min", "Try cluster.time=01:30:00.", None),
    ("trainer.limit_train_batches=0", "trains nothing", "trainer.limit_train_batches=10"),
    ("trainer.limit_train_batches=0.0", "trains nothing", "mode=eval"),
    ("data.val_fraction=1.5", "at most 0.9. Try data.val_fraction=0.1.", "data.val_fraction=0.1"),
    # What stands in ${...}.
    ("'user.x=${foo:3}'", "Unsupported interpolation type foo.", "'user.x=\"\\${foo:3}\"'"),
    ("'user.x=$\\{a'", "Try 'user.x=\"\\${a\"' for a text.", "'user.x=\"\\${a\"'"),
    ("'user.x=${a b}'", "Try 'user.x=\"\\${a b}\"' for a text.", "'user.x=\"\\${a b}\"'"),
    ("'user.x=${}'", "Try 'user.x=\"\\${}\"'.", "'user.x=\"\\${}\"'"),
    ("'pp=${eval:2*3}'", "${KEY} takes the value of another key", "pp=4"),
    ("'seed=${nope}'", "${oc.env:NAME} of a variable. Try seed=0.", "seed=0"),
    ("'user.x=${oc.decode:1}'", "`oc.decode` can only take strings", None),
    # Keys of others.
    ("data.shuffle=true", "Try data=class data.path=my_pkg.data:LitData", None),
    ("data.streaming=true", "Try data=class data.path=my_pkg.data:LitData", None),
    ("data.val_split=0.2", "Try data.val_fraction=0.2.", "data.val_fraction=0.2"),
    ("costs.fwd=1", "Try costs=uniform costs.forward=1.",
     "mode=simulate costs=uniform costs.forward=1"),
    ("costs.bwd=2", "Try costs=uniform costs.backward=2.",
     "mode=simulate costs=uniform costs.backward=2"),
    ("planner.gpu=a100", "Try hardware=a100_80g.", "mode=plan hardware=a100_80g"),
    ("cluster.hosts=[a,b]", "cluster=torchrun, which is started on each host", None),
    ("device=cuda", "Try trainer.accelerator=gpu.", None),
    ("log=wandb", "Try tracking=wandb.", "tracking=wandb"),
    ("out=x", "Try hydra.run.dir=x.", "hydra.run.dir=x"),
    ("optimizer.lr_decay_iters=9", "which ends at trainer.max_steps", None),
    ("model.model_name_or_path=gpt2", "Try model=hf model.path=/models/my_llama.", None),
    ("trainer.gpus=2", "Try pp=, dp= and tp=", "pp=2"),
    ("model.n_layers=4", "Try model.layers=4.", "model.layers=4"),
    ("training.max_steps=9", "Did you mean trainer.max_steps", "trainer.max_steps=9"),
    ("schedule.pp=4", "Did you mean pp=4?", "pp=4"),
    ("generate.max_tokens=5", "Did you mean generate.max_new_tokens=5?",
     "mode=generate generate.max_new_tokens=5"),
    ("trainer.precision=fp16", "Try trainer.precision=16-mixed.", None),
    ("optimizer.betas=[0.9]", "expected a list of two numbers", "optimizer.betas=[0.9,0.95]"),
    ("compile=default", "Try compile=true.", "compile=true"),
    ("plan=yes", "expected manual or auto. Try plan=manual.", "plan=manual"),
    ("experiment_name='my run'", "Try experiment_name=my_run.", "experiment_name=my_run"),
    ("mode=debug", "Try mode=train.", "mode=train"),
    ("overlap=zero3", "Did you mean overlap=zero1?", "overlap=zero1"),
    ("pp=02", "Try pp=2.", "pp=2"),
    ("trainer.max_steps=1,000", "or trainer.max_steps=1000 for one number",
     "trainer.max_steps=1000"),
    ("trainer.max_time=00:00:00:00", "trains nothing", "\"trainer.max_time='00:01:00:00'\""),
    ("mode=eval trainer.resume=/a.ckpt", "Try checkpoint=/a.ckpt.", "mode=eval checkpoint=/a.ckpt"),
    ("-mpp=1,2", "a blank stands behind -m. Try -m pp=", "-m pp=1,2"),
    # Names that no file has.
    ("data=text \"data.path='~nobody-here/a'\"", "knows no home of ~nobody-here.", None),
    ("\"hydra.run.dir='~nobody-here/a'\"", "knows no home of ~nobody-here.", None),
    ("\"callbacks.c.path='~nobody-here/a.py:C'\"", "knows no home of ~nobody-here.", None),
    ("--config-dir ~nobody-here/a", "Try --config-dir /path/to/it.", None),
    (f"-m pp=1,2 data=text data.path={'x' * 300}", "File name too long", None),
    (f"-m pp=1,2 trainer.resume={'x' * 300}", "File name too long", None),
    # Pasted from a page or a chat, or typed in haste.
    ("\u2013m pp=1,2", "this is another dash. Try -m.", "-m pp=1,2"),
    ("\u2014help", "Try --help.", None),
    ("trainer.max_steps=\uff11\uff10", "Try trainer.max_steps=10.", "trainer.max_steps=10"),
    ("\u201cpp=2\u201d", "letters that only look like those of a keyboard. Try pp=2.", "pp=2"),
    ("user.p=2 'pp=2\u00a0dp=2'", "is a word of its own. Try pp=2 dp=2.", "pp=2 dp=2"),
    ("'pp=2;'", "Try pp=2.", "pp=2"),
    ("model=tiny,", "a comma stands beside no value. Try model=tiny.", "model=tiny"),
    ("-m pp=1,,2", "Try -m pp=1,2 for one run each.", "-m pp=1,2"),
    ("-m pp=1,2 pp=4", "the second would replace a list of values.", None),
    ("user=3", "Try user={note:first}.", "user={note:first}"),
    ("model=class model.path=x:Y model.args=3", "Try model.args={width:64}.",
     "mode=simulate costs=uniform model=class model.path=x:Y model.args={width:64}"),
    ("-m 'pp=choice()'", "Try -m pp=4, or -m pp='choice(4)'.", "-m pp='choice(4)'"),
    ("-m +seed=1,2", "seed is there already. Try -m seed=1,2.", "-m seed=1,2"),
    ("'+user={a:1}'", 'user is there already. Try "user={a:1}".', "'user={a:1}'"),
    ("~optimizer", "keys cannot be removed", None),
    ("'experiment=[fold_laptop]'", "Try experiment=fold_laptop.", "experiment=fold_laptop"),
    ("experiment=null", "there is none unless it is named.", ""),
    ("callbacks=null", "there is none unless it is named.", ""),
    ("-m 'schedule=[gpipe,1f1b]'", "Try -m schedule=gpipe,1f1b for a run each.",
     "-m schedule=gpipe,1f1b"),
    ("experiment_name=\u00e9", "Try \"experiment_name='\u00e9'\".", None),
    ("'pp=${oc.env:NOPE,4}'", "what a variable holds is a text. Try 'pp=",
     "'pp=\"${oc.decode:${oc.env:NOPE,4}}\"'"),
    # Flags of Hydra, MPI and of habit.
    ("-cn config", "-cn is not a flag: one configuration is composed", None),
    ("-cp conf", "-cp is not a flag", None),
    ("--cfg", "Try --cfg job.", "--cfg job"),
    ("-cd", "Try --config-dir DIR.", None),
    ("--multirun=true pp=1,2", "Try -m, with lists of values", "-m pp=1,2"),
    ("-V", "Did you mean --version?", "--version"),
    ("-pp 4", "-pp is not a flag. Keys have no dashes. Try pp=VALUE.", "pp=4"),
    ("-compile", "Keys have no dashes. Try compile=VALUE.", "compile=true"),
    ("ranks=4", "Try pp=, dp= and tp=", "pp=4"),
    ("config=mine.yaml", "Try --config-dir DIR experiment=NAME", None),
    ("host=node0", "is said to torchrun itself", None),
    ("data.train=a.txt", "Try data=text data.path=/path/to/file.", None),
    ("data.batch=2", "Try data.microbatch_size=2.", "data.microbatch_size=2"),
    ("model.size=7b", "Try model=llama2_7b", "model=llama2_7b mode=simulate"),
    ("hardware.gpu=a100", "Try hardware=a100_80g.", "hardware=a100_80g mode=simulate"),
    ("hardware.name=A100 mode=plan", "Try hardware=a100_40g or hardware=a100_80g.",
     "hardware=a100_40g mode=plan"),
    ("model.name=gpt2", "Try model=gpt2_124m.", "model=gpt2_124m mode=simulate"),
    ("trainer.ckpt=x", "Try trainer.resume=auto", None),
    ("trainer.keep_best=1 trainer.monitor=val_acc", "is not logged by model=tiny; train_loss, val_",
     "trainer.keep_best=1 trainer.monitor=val_loss"),
    ("-np 4", "Try pp=, dp= and tp=", "pp=4"),
    ("-o x", "Try hydra.run.dir=FOLDER.", "hydra.run.dir=x"),
    ("tracker=wandb", "Try tracking=wandb.", "tracking=wandb"),
    ("planner.schedules=[gpipe]", "Try schedule=1f1b, which pins it", "mode=plan schedule=1f1b"),
    ("planner.partition=ilp", "Try planner.balance_ratio=1.2 for the fewest bytes",
     "mode=plan planner.balance_ratio=1.2"),
    ("cluster.queue=gpu", "Try cluster=slurm cluster.partition=gpu.", None),
    # Words for nothing and for everything, and numbers as they are written on paper.
    ("trainer.max_steps=unlimited", "Try trainer.max_steps=-1 trainer.max_epochs=1.",
     "trainer.max_steps=-1 trainer.max_epochs=1"),
    ("trainer.limit_train_batches=all", "Try trainer.limit_train_batches=null.",
     "trainer.limit_train_batches=null"),
    ("trainer.limit_val_batches=off", "Try trainer.limit_val_batches=0.",
     "trainer.limit_val_batches=0"),
    ("trainer.watchdog_s=off", "Try trainer.watchdog_s=0.", "trainer.watchdog_s=0"),
    ("optimizer.lr=1/1000", "Try optimizer.lr=0.001.", "optimizer.lr=0.001"),
    ("optimizer.warmup_steps=10%", "Try optimizer.warmup_steps=10.", "optimizer.warmup_steps=10"),
    ("trainer.gradient_clip_val=0", "For none at all, try trainer.gradient_clip_val=null.",
     "trainer.gradient_clip_val=null"),
    ("generate.top_k=-1", "For none at all, try generate.top_k=null.", None),
    ("hardware.peak_flops=312", "at least 1e+08. If these are TFLOPS, try hardware.peak_flops=",
     "hardware.peak_flops=3.12e+14"),
    ("hardware.memory_gb=8e10", "at most 100000. If these are bytes, try hardware.memory_gb=80.",
     "hardware.memory_gb=80"),
    ("hardware.inter_bandwidth=25", "If these are GB/s, try hardware.inter_bandwidth=2.5e+10.",
     "hardware.inter_bandwidth=2.5e+10"),
    ("hardware.intra_latency_s=50", "If these are microseconds, try hardware.intra_latency_s=",
     "hardware.intra_latency_s=5e-05"),
    ("'hardware.intra_bandwidth=300 GB/s'", "Try hardware.intra_bandwidth=300000000000.",
     "hardware.intra_bandwidth=300000000000"),
    ("'hardware.intra_bandwidth=100 Gb/s'", "Try hardware.intra_bandwidth=12500000000.",
     "hardware.intra_bandwidth=12500000000"),
    ("mode=simulate pp=4 num_microbatches=100000", "up to 200,000 are compiled.",
     "mode=simulate pp=4 num_microbatches=50000"),
    ("pp=2 data.global_batch_size=1000000", "1000000 microbatches", None),
    ("callbacks.path=x:Y", "a callback has a name of your choice, and under it path.", None),
    ("data=text data.path=~/x.txt", "Try \"data.path='~/x.txt'\".",
     "data=text \"data.path='~/x.txt'\""),
]  # fmt: skip


@pytest.mark.parametrize(("words", "told", "pasted"), MISTAKES, ids=lambda value: str(value)[:30])
def test_a_mistake_is_one_sentence_and_its_advice_is_a_run(
    words: str,
    told: str,
    pasted: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = run_here(shlex.split(words), tmp_path / "wrong", monkeypatch)
    done.assert_refused()
    assert told in done.errors
    if pasted is not None:
        done = run_here(shlex.split(pasted), tmp_path / "right", monkeypatch)
        assert (done.code, done.errors) == (0, "")


ORDER = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"

# What is only known when an order has been read, or a command asked: before anything is written.
LATE = [
    ("mode=validate cluster.nodes=2", "cannot be spread evenly over cluster.nodes=2. Try"),
    ("mode=validate model.sequence=1e9", "one sequence with its targets takes"),
    ("check x.csv tp=3", "tp=3 does not divide model.heads=4"),
    ("check x.csv sequence_parallel=true", "and tp=1. Try tp=2, or sequence_parallel=false."),
    ("check x.csv plan=auto", "looks at the order of schedule.file. Try without plan=auto."),
    ("check x.csv planner.top_k=3", "planner.top_k=3 has no meaning without a planner."),
    ("check x.csv export.path=x", "export.path=x has no meaning with mode=check."),
    ("check x.csv costs=profiled", "costs=profiled needs costs.file"),
    ("check x.csv model=hf", "model=hf needs the folder of a model"),
    ("check x.csv data.global_batch_size=7", "makes 7 microbatches, but x.csv has 2. Try data."),
    ("check x.csv schedule.layers_per_stage=[1,2,3]", "has 3 counts, but there are 2 stages"),
    ("explain x.json tp=2", "mode=explain finds it in the traces. Try without tp=2."),
    ("-sc foo", "expected install= or uninstall= with one of bash, zsh, fish."),
    ("-sc", "Try -sc install=bash."),
    ("\"hydra.run.dir='a\x1b[2J'\" mode=simulate", "a line break or another control character"),
    ("\"hydra.sweep.dir='a\nb'\" -m pp=1,2 mode=simulate", "Try hydra.sweep.dir=my_run."),
    ("\"hydra.sweep.subdir='a\nb'\" -m pp=1,2 mode=simulate", "Try hydra.sweep.subdir=my_run."),
    ("\"user.a='x\ny'\" 'hydra.run.dir=${user.a}' mode=simulate", "Try hydra.run.dir=my_run."),
]


@pytest.mark.parametrize(("words", "told"), LATE, ids=lambda value: ascii(value)[:30])
def test_a_mistake_that_is_found_late_leaves_nothing_either(words, told, tmp_path, monkeypatch):
    (tmp_path / "x.csv").write_text(ORDER)
    message = refused_here(shlex.split(words), tmp_path, monkeypatch)
    assert told in message
    assert message.count("\n") == 1


def test_a_working_directory_that_is_gone_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert main(["mode=simulate", "costs=uniform"]) == 2
    assert capsys.readouterr().err.startswith("error: the working directory is gone: somebody has")


OPTIONS = [
    ("mine.json", "Options are YAML: write it as cfg/experiment/mine.yaml."),
    ("experiment/mine.toml", "Options are YAML: write it as cfg/experiment/mine.yaml."),
    ("experiment/mine.yaml.txt", "Options are YAML: write it as cfg/experiment/mine.yaml."),
    ("experiment/mine", "Options are YAML: write it as cfg/experiment/mine.yaml."),
]


@pytest.mark.parametrize(("name", "told"), OPTIONS)
def test_a_file_of_options_with_another_ending_is_found(name, told, tmp_path, monkeypatch):
    file = tmp_path / "cfg" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"pp": 2}')
    monkeypatch.chdir(tmp_path)
    words = ["--config-dir", str(tmp_path / "cfg"), "experiment=mine"]
    done = run_here(words, tmp_path / "run", monkeypatch)
    done.assert_refused()
    assert told in done.errors.replace(f"{tmp_path}/", "")


# What stands in a file of optimizer/ or experiment/, and what its refusal says.
FILES = [
    ("name: adamw\n<<: *nope\n", ":2: the alias *nope stands for nothing: no &nope is above it."),
    ("name: adamw\nlr = 1e-3\n", ":2:1: could not find expected ':'. Write `lr: 1e-3`"),
    ("name: adamw\nlr:1e-3\n", ":2:1: could not find expected ':'. Write `lr: 1e-3`"),
    ("name: adamw\n lr: 1e-3\n", "(a line that is indented otherwise than its neighbours?)"),
    ("warmup_steps: 1,000\n", "Try optimizer.warmup_steps=1000, or"),
    ("lr: 1e\u22123\n", "optimizer.lr=1e\u22123: expected a number. Try optimizer.lr=1e-3."),
    ("lr: ${lr}\n", "${KEY} takes the value of another key"),
    ("# @package _group_\nlr: 1e-3\n", "Try # @package _global_, or none."),
    ("# @package _global_\ncompile: 'true'\n", "compile='true': expected true or false. Try comp"),
    ("# @package _global_\ncallbacks: x:Y\n", "Write `callbacks: {stop: {path: ...}}`."),
    ("# @package _global_\ncluster: {extra: --qos=high}\n", "Try cluster.extra=['--qos=high']."),
    ("name: class\npath: x:Y\nwidth: 3\n", "Write `args: {width: ...}`."),
]


@pytest.mark.parametrize(("text", "told"), FILES, ids=lambda value: str(value)[:30])
def test_a_mistake_in_a_file_is_one_sentence(text, told, tmp_path, monkeypatch):
    file = tmp_path / "cfg" / "optimizer" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    words = ["--config-dir", str(tmp_path / "cfg"), "optimizer=mine"]
    done = run_here(words, tmp_path / "run", monkeypatch)
    done.assert_refused()
    assert told in done.errors


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--config-dir conf optimizer=mine.yaml", "goes by its name alone. Try optimizer=mine."),
        ("--config-dir conf optimizer=conf/optimizer/mine.yaml", "Try optimizer=mine."),
        ("--config-dir conf/optimizer/mine.yaml", "is a file. Try --config-dir conf optimizer=min"),
        ("optimizer=mine", "Try --config-dir conf optimizer=mine."),
        ("experiment=my_1.yaml", "try --config-dir DIR experiment=NAME"),
    ],
)
def test_a_file_of_options_is_found_however_it_is_named(words, told, tmp_path, monkeypatch):
    file = tmp_path / "conf" / "optimizer" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("name: sgd\n")
    monkeypatch.chdir(tmp_path)
    done = run_here(shlex.split(words), tmp_path, monkeypatch)
    assert (done.code, done.calls, done.errors.count("\n")) == (2, [], 1)
    assert told in done.errors


def test_a_glob_finds_options_of_ones_own_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cfg" / "experiment"
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"mine_{number}.yaml").write_text(f"# @package _global_\npp: {number}\n")
    words = ["-m", "--config-dir", str(tmp_path / "cfg"), "experiment=glob(mine*)", "mode=simulate"]
    done = run_here(words, tmp_path / "run", monkeypatch)
    assert (done.code, [call.config.pp for call in done.calls]) == (0, [1, 2])


def test_a_variable_that_torchrun_has_left_behind_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "left")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run_here(["pp=2"], tmp_path, monkeypatch).code == 0


def test_a_tilde_is_the_users_own_folder(tmp_path, monkeypatch):
    home = tmp_path / "home"
    options = home / "cfg" / "experiment"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("# @package _global_\npp: 2\n")
    monkeypatch.setenv("HOME", str(home))
    words = ["hydra.run.dir='~/r'", "mode=simulate", "--config-dir", "~/cfg", "experiment=mine"]
    done = run_here(words, tmp_path / "here", monkeypatch)
    assert (done.code, done.errors) == (0, "")
    assert done.calls[0].run_dir == home / "r"
    assert done.calls[0].config.pp == 2
    words = ["-m", "pp=1,2", "hydra.sweep.dir='~/s'", "mode=simulate"]
    assert run_here(words, tmp_path / "here", monkeypatch).calls[1].run_dir == home / "s" / "1"
    assert list((tmp_path / "here").iterdir()) == []


FORMATS = {
    "gzip": gzip.compress(b"hello" * 9, mtime=0),
    "zip": b"PK\3\4" + b"a" * 90,
    "parquet": b"PAR1" + b"a" * 90,
    "numpy": b"\x93NUMPY" + b"\0" * 90,
    "UTF-16": "hello".encode("utf-16"),
    "no text": bytes(range(256)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_format_is_not_read_byte_by_byte(name, tmp_path):
    file = tmp_path / "it's data"
    file.write_bytes(FORMATS[name])
    with pytest.raises(DataError, match=f"{name}.* Try "):
        check_source(TextSource(kind="text", path=str(file)), sequence=4)
    if name in ("zip", "parquet", "numpy"):
        with pytest.raises(DataError, match=f"a file of {name}"):
            check_source(TextSource(kind="tokens", path=str(file)), sequence=4)
    file.write_bytes(b"plain text, which tokens are not\n" * 4)
    with pytest.raises(DataError, match="is text, and data=tokens reads every 2 bytes"):
        check_source(TextSource(kind="tokens", path=str(file)), sequence=4)
