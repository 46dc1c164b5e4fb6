"""Model, data, callbacks, optimizer and schedule of one's own, named on the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launcher.processes.rank_server import SHARED
from tests.launcher.command_line import launch_here
from tests.launcher.own_project import OWN, write_project
from tests.launcher.runs import Finished, launch, read_result
from tests.launcher.wandb_log import read_records, rows_and_run
from tests.ranks.rank_server import rank_server_address


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project")


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Finished]]:
    """Checks a request in this process, and what it names in a fork of the tests' own server."""
    monkeypatch.setenv(SHARED, rank_server_address())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (project.parent / "home").mkdir()
    monkeypatch.setenv("HOME", str(project.parent / "home"))
    yield lambda *words: launch_here(words, project)


REFUSED = [
    (["model.path=netz:LitResNet"], "there is no module netz, "),
    (["model.path=nets:LitResnet"], "Did you mean model.path=nets:LitResNet?"),
    (["model.path=nets"], "model.path=nets could be any of LitResNet, Plain: the module defines 2"),
    (["model.path=nets:ResNet"], "ResNet (nets.py:19) is no LightningModule. It is a plain torch"),
    (["model.path=my_data.images:Images"], "is no LightningModule. Derive it from"),
    (["model.args.widht=4"], "takes no argument widht. Did you mean model.args.width? It takes"),
    (["model.args.width=wide"], "takes width as a whole number. Try model.args.width=1."),
    (["model.width=4"], "model.width is not a key. Try model.args.width=4. Arguments of a class"),
    (["model.layers=4"], "model.layers=4 has no meaning with model=class: a class of your own"),
    (["model.sequence=4"], "model.sequence=4 has no meaning with model=class"),
    (["data.args.batch_size=4"], "data.args.batch_size=4, but data.global_batch_size makes it"),
    (["data.val_fraction=0.2"], "data.val_fraction=0.2 has no meaning with data=class"),
    (["optimizer.lr=0.1"], "optimizer=adamw (optimizer.lr=0.1) has no meaning with LitResNet"),
    (["optimizer=sgd"], "has no meaning with LitResNet (nets.py:33), which has configure_optimi"),
    (["callbacks.a.path=counter:Count"], "callbacks.a.path=counter:Count: counter has no Count."),
    (["callbacks.a.path=counter:Counter"], "Counter (counter.py:7) needs file. Try callbacks.a."),
    (["callbacks.a.args.file=x"], "callbacks.a needs a path. Try callbacks.a.path="),
    (["callbacks.a.pth=x"], "callbacks.a.pth is not a key. Did you mean callbacks.a.path?"),
    (["callbacks.a=counter:Counter"], "a callback has a path. Try callbacks.a.path=counter:C"),
    (["callbacks.a.path=nets:Plain"], "is no Callback. Derive it from lightning.pytorch."),
    (["model.path='os;x'"], "expected module:Class, or file.py:Class. Try model.path=my_pkg.nets:"),
    (["model=tiny"], "model.path=nets:LitResNet belongs to model=class, but model=tiny. Try mod"),
    (
        ["model=tiny", "model.path=null", "model.args.width=4"],
        "model.args={width:4} is for a class",
    ),
    (["model.path=null"], "model=class needs the path of the class. Try model=class model.path="),
    (["model._target_=nets.LitResNet"], "Name a class of your own as model=class model.path="),
    (["allow_code=true"], "Try without allow_code."),
    (["tracking=[csv,csv]"], "each tracker stands once, and none beside no other. Try tracking=[c"),
    (["tracking=[none,wandb]"], "each tracker stands once"),
    (["tracking=[csv,wandbb]"], "tracking=wandbb does not exist. Did you mean tracking=wandb?"),
    (["tracking=csv,wandb"], "Try -m tracking=csv,wandb for one run each, or tracking=[csv,wandb]"),
    (["schedule.path=nets:LitResNet"], "but must be a function from a Shape to rows"),
    (["schedule.path=nets"], "schedule.path=nets: expected module:function, or file.py:function."),
    (["schedule=gpipe", "schedule.path=o:f"], "Try schedule=custom schedule.path=o:f."),
]


BROKEN = """
import lightning.pytorch as pl
import torch

class Bare(pl.LightningModule):
    def __init__(self): pass
    def training_step(self, batch, index): return 0

class Early(Bare):
    def __init__(self): self.net = torch.nn.Linear(2, 2)

class Sized(Bare):
    def __init__(self, width: int = 2, look: bool = False):
        pl.LightningModule.__init__(self)
        self.net = torch.nn.Linear(width, 2)
        self.norm = self.net.weight.norm().item() if look else 0

def nothing(): return None
"""
UNMADE = [
    ("Bare", "__init__ of Bare (broken.py:5) does not call super().__init__()."),
    ("Early", "Early() fails with AttributeError: cannot assign module before"),
    ("Sized model.args.width=-3", "Sized(width=-3) fails with RuntimeError: Trying to create"),
    ("nothing", "what it makes (NoneType) is no LightningModule."),
    ("Sized", None),
    ("Sized model.args.look=true", None),
]


@pytest.mark.parametrize(("named", "said"), UNMADE)
def test_validate_makes_the_model_as_ranks_would(named, said, here, project):
    (project / "broken.py").write_text(BROKEN)
    words = ("model=class", *f"model.path=broken:{named}".split())
    done = here(*words, "mode=validate", "data.max_bytes=200000")
    assert done.code == (0 if said is None else 2), done.errors
    assert (said or "") in done.errors
    assert done.errors.count("\n") == (said is not None)


@pytest.mark.parametrize(("words", "expected"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_wrong_request_is_one_sentence_and_starts_nothing(here, project, words, expected):
    before = sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)
    keys = {word.partition("=")[0] for word in words}
    own = [word for word in OWN if word.partition("=")[0] not in keys]
    done = here(*own, "mode=validate", *words)
    assert done.code == 2, done.output
    assert done.errors.startswith("error: ")
    assert done.errors.count("\n") == 1
    assert expected in done.errors
    after = sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)
    assert after == before


def test_an_order_that_cannot_be_imported_is_one_sentence(here, project):
    (project / "wrong.py").write_text("def mine(shape:\n")
    done = here("mode=simulate", "costs=uniform", "schedule.path=wrong.py:mine")
    assert (done.code, done.output, done.errors.count("\n")) == (2, "", 1)
    assert "schedule.path=wrong.py:mine cannot be imported: SyntaxError: " in done.errors


def test_every_job_of_a_sweep_is_checked_before_the_first_starts(here):
    done = here("-m", *OWN, "mode=validate", "model.args.width=4,wide")
    assert done.code == 2
    assert "model.args.width=wide" in done.errors


def test_files_of_ones_own_name_code_and_keys_too(here, project):
    for name, text in {
        "model/mine.yaml": "name: class\npath: nets:LitResNet\nargs: {lr: 3e-4, depth: 3}\n",
        "callbacks/stop.yaml": "stop:\n  path: lightning.pytorch.callbacks:EarlyStopping\n"
        "  args: {monitor: val_loss}\n",
        "callbacks/wrong.yaml": "wrong:\n  path: counter:Counter\n  args: {fil: x}\n",
        "experiment/all.yaml": "# @package _global_\ndefaults:\n  - override /model: mine\n"
        "data: {global_batch_size: 16}\nuser: {note: 3e-4}\n"
        "callbacks: {count: {path: 'counter:Counter', args: {file: x}}}\n",
    }.items():
        (project / "cfg" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "cfg" / name).write_text(text)
    words = ("--config-dir", "cfg", "experiment=all", *OWN[2:4], "pp=2", "mode=validate")
    here(*words, "callbacks=stop", "model.args.width=4").assert_done()
    shown = here(*words, "callbacks=[stop]", "--cfg", "job").assert_done().output
    assert "lr: 0.0003\n    depth: 3" in shown
    assert "note: 0.0003" in shown
    assert shown.index("stop:\n    path: lightning") < shown.index("count:\n    path: counter:")
    wrong = here(*words, "callbacks=[stop,wrong]")
    assert "callbacks.wrong.args.fil=x: Counter (counter.py:7) takes no argument fil." in (
        wrong.errors
    )


@pytest.mark.full
@pytest.mark.distributed
def test_a_sweep_over_a_width_with_callbacks_and_two_trackers(project: Path) -> None:
    words = (
        "-m", *OWN, "model.args.width=4,8", "trainer.max_steps=4", "trainer.val_check_interval=2",
        "tracking=[csv,wandb]", "user.note=first", "hydra.sweep.dir=sweep",
        "callbacks.stop.path=lightning.pytorch.callbacks:EarlyStopping",
        "callbacks.stop.args.monitor=val_acc", "callbacks.stop.args.mode=max",
        "callbacks.count.path=counter:Counter", "callbacks.count.args.file=count.txt",
    )  # fmt: skip
    done = launch(words, project, timeout_s=300).assert_done()
    assert "model.path=nets:LitResNet data=class" in done.output  # of the best job's command
    results = [read_result(project / "sweep" / str(job)) for job in range(2)]
    assert results[0]["num_parameters"] < results[1]["num_parameters"]
    assert [result["steps"] for result in results] == [4, 4]
    assert (project / "count.txt").read_text() == "first 4"
    for job, width in enumerate((4, 8)):
        folder = project / "sweep" / str(job)
        header = (folder / "metrics.csv").read_text().splitlines()[0]
        assert {"train_loss", "val_acc"} <= set(header.split(","))
        (binary,) = folder.rglob("run-*.wandb")
        rows, run = rows_and_run(read_records(binary))
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["model"]["args"] == {"width": width}
        assert config["user"] == {"note": "first"}
        shown = {"train_loss", "val_acc", "measured/step_time_s"}
        assert shown <= {name for row in rows for name in row}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run ``first`` has made three steps with an optimizer by its path."""
    project = write_project(tmp_path_factory.mktemp("own") / "project")
    (project / "orders.py").write_text(ORDER)
    launch((*FIRST, "trainer.max_steps=3", "hydra.run.dir=first"), project).assert_done()
    return project


ORDER = """
from strategies.ir.instruction import backward, forward


def plain(shape):
    return tuple(
        tuple(one(rank, m) for m in range(shape.num_microbatches) for one in (forward, backward))
        for rank in range(shape.pp)
    )
"""
FIRST = (
    *(word for word in OWN if not word.startswith("model.path")), "model.path=nets.py:Plain",
    "optimizer=class", "optimizer.path=torch.optim:RAdam", "optimizer.lr=0.01",
    "optimizer.args.weight_decay=0.1", "schedule.path=orders:plain",
    "callbacks.rate.path=lightning.pytorch.callbacks:LearningRateMonitor",
    "callbacks.count.path=counter:Counter", "callbacks.count.args.file=count.txt",
)  # fmt: skip


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.distributed
def test_an_optimizer_and_an_order_of_ones_own_and_what_callbacks_log(trained: Path) -> None:
    result = read_result(trained / "first")
    assert (result["schedule"], result["steps"]) == ("orders:plain", 3)
    rows = _rows(trained / "first")
    # Warm-up over ten steps to the rate asked for, as for built-in optimizers.
    assert [float(row["lr"]) for row in rows] == pytest.approx([0.001, 0.002, 0.003])
    assert [row["lr-RAdam/pg1"] for row in rows] == [row["lr"] for row in rows]
    assert len({row["step_time_s"] for row in rows}) == 3  # a callback's row changes none of ours


@pytest.mark.distributed
def test_a_run_goes_on_with_the_state_of_its_callbacks(trained: Path) -> None:
    last = trained / "first" / "checkpoints" / "step-00000003.ckpt"
    words = (*FIRST, "trainer.max_steps=5", f"trainer.resume={last}", "model.args.lr=0.5")
    done = launch((*words, "hydra.run.dir=second"), trained).assert_done()
    assert "note: model.args.lr=0.5 here, the default in the checkpoint\n" in done.output
    assert [row["step"] for row in _rows(trained / "second")] == ["4", "5"]
    assert (trained / "count.txt").read_text() == "None 5"


@pytest.mark.distributed
def test_a_checkpoint_names_code_only_where_it_is_allowed(trained: Path) -> None:
    last = trained / "first" / "checkpoints" / "step-00000003.ckpt"
    words = ("mode=eval", "data.global_batch_size=16", f"checkpoint={last}")
    refused = launch((*words, "hydra.run.dir=refused"), trained)
    assert refused.code == 2
    assert refused.errors == (
        f"error: {last} names nets.py:Plain as its model and my_data.images:Images as its data: "
        "code that a file names is not run. Try model.path=nets.py:Plain "
        "data.path=my_data.images:Images, or allow_code=true if you trust the file.\n"
    )
    assert not (trained / "refused").exists()
    done = launch((*words, "allow_code=true", "hydra.run.dir=allowed"), trained).assert_done()
    assert "data.path=my_data.images:Images, as the checkpoint says" in done.output
    figures = read_result(trained / "allowed")["metrics"]
    assert figures.keys() == {"val_loss", "val_acc"}
    assert f"loss {figures['val_loss']:.6f}  val_acc {figures['val_acc']:.6f}\n" in done.output


@pytest.mark.distributed
def test_what_predict_step_returns_is_written(trained: Path) -> None:
    last = trained / "first" / "checkpoints" / "step-00000003.ckpt"
    plain = [word for word in FIRST if not word.startswith(("optimizer", "callbacks"))]
    words = (*plain, "mode=predict", f"checkpoint={last}", "hydra.run.dir=predicted")
    launch(words, trained).assert_done()
    found = load_file(trained / "predicted" / "predictions_00000.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"predictions": (16, 4)}
