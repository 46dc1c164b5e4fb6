"""Steps that change what is outside of their process are refused, and nothing is written."""

import contextlib
import csv
import logging
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from strategies.errors import ModelError
from strategies.models.replay.replay_model import ReplayModel
from strategies.models.replay.side_effects import SideEffectError, watched
from tests.strategies.models.replay.test_refusals import Stack, batch


class Writing(Stack):
    """Does ``act`` in its step, with its loss."""

    def __init__(self, act, folder):
        super().__init__()
        self.act, self.folder = [act], folder

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss = self.loss(x, batch[1])
        self.act[0](self, loss)
        return loss


def probe(module, mode="train"):
    return ReplayModel.probe(module.double(), batch(), mode=mode)


def append(self, loss):
    with open(self.folder / "rows.txt", "a") as file:
        file.write("row\n")


def quietly(self, loss):
    with contextlib.suppress(Exception):
        append(self, loss)


def wrapped(self, loss):
    try:
        append(self, loss)
    except Exception as error:
        raise ValueError("mine") from error


def by_temporary_file(self, loss):
    handle, _ = tempfile.mkstemp(dir=self.folder)
    os.write(handle, b"row")
    os.close(handle)


def of_torch(self, loss):
    torch.save({"row": 1}, self.folder / "rows.pt")


def database(self, loss):
    sqlite3.connect(self.folder / "rows.db").execute("create table rows (x)")


ACTS = {
    "append": append,
    "caught": quietly,
    "wrapped": wrapped,
    "path": lambda self, loss: (self.folder / "row.txt").write_text("row"),
    "numpy": lambda self, loss: np.save(self.folder / "row.npy", np.zeros(2)),
    "os.open": lambda self, loss: os.open(self.folder / "row.txt", os.O_WRONLY | os.O_CREAT),
    "temporary": by_temporary_file,
    "torch.save": of_torch,
    "sqlite": database,
    "program": lambda self, loss: subprocess.run(["touch", self.folder / "row.txt"], check=True),
    "removed": lambda self, loss: (self.folder.parent / "kept.txt").unlink(),
    "renamed": lambda self, loss: os.rename(self.folder.parent / "kept.txt", self.folder / "x"),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_step_that_writes_is_refused_before_it_has_written(act, tmp_path):
    kept, folder = tmp_path / "kept.txt", tmp_path / "folder"
    kept.write_text("kept")
    folder.mkdir()
    with pytest.raises(SideEffectError, match=r"test_side_effects.py:\d+: a step .* Return the"):
        probe(Writing(ACTS[act], folder))
    assert not list(folder.iterdir())
    assert kept.read_text() == "kept"


def handle_of(kind, file):
    if kind == "database":
        file.execute("create table rows (x)")
        file.commit()
        return file, lambda made: made.execute("insert into rows values (1)")
    if kind == "csv":
        return csv.writer(file), lambda made: made.writerow([1])
    if kind == "object":
        return SimpleNamespace(file=[file]), lambda made: made.file[0].write("row\n")
    return file, lambda made: print("row", file=made)


@pytest.mark.parametrize("kind", ["file", "csv", "object", "database"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_writes_to_an_open_file_leaves_it_as_it_was(kind, fails, tmp_path):
    path = tmp_path / "rows"

    def act(self, loss):
        write(self.handle)
        assert not fails

    with closing(sqlite3.connect(path) if kind == "database" else path.open("a")) as file:
        module = Writing(act, tmp_path)
        module.handle, write = handle_of(kind, file)
        with pytest.raises(ModelError, match="cannot run on shapes" if fails else "writes to"):
            probe(module)
        if kind == "database":
            assert not file.execute("select * from rows").fetchall()
    assert kind == "database" or path.read_text() == ""


def test_what_a_step_reads_prints_and_logs_is_left_alone(tmp_path, capsys):
    log = logging.getLogger("a step's")
    handler = logging.FileHandler(tmp_path / "log.txt", delay=True)
    log.addHandler(handler)
    (tmp_path / "fresh_file_of_a_step.py").write_text("x = 1\n")

    def act(self, loss):
        print("printed")  # noqa: T201
        log.warning("logged")
        (tmp_path / "fresh_file_of_a_step.py").read_text()
        open(os.devnull, "w").close()
        sys.path.insert(0, str(tmp_path))
        try:
            import fresh_file_of_a_step  # noqa: F401
        finally:
            sys.path.pop(0)

    try:
        probe(Writing(act, tmp_path))
    finally:
        log.removeHandler(handler)
        handler.close()
    assert "printed" in capsys.readouterr().out
    assert "logged" in (tmp_path / "log.txt").read_text()


def test_files_are_written_freely_outside_of_steps(tmp_path):
    watched(lambda: None)
    torch.save({"row": 1}, tmp_path / "rows.pt")
    (tmp_path / "row.txt").write_text("row")
    assert len(list(Path(tmp_path).iterdir())) == 2


def test_a_report_before_a_step_gives_up_is_none_of_a_good_step(tmp_path):
    def act(self, loss):
        if not torch.isfinite(loss):
            append(self, loss)
            raise ValueError("not finite")

    probe(Writing(act, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.lightning_feature(
    "logger", "WandbLogger", note="with the graph of `watch`",
    refused="in a hook of WandbLogger.watch, which draws the model's graph in the first forward; "
    "a pipeline runs that once per microbatch and stage",
    fix="Use WandbLogger.watch(model, log='gradients', log_graph=False).",
)  # fmt: skip
def test_the_graph_that_wandb_draws_is_refused_with_the_word_that_leaves_it_out(tmp_path, refusal):
    place = f"{tmp_path}/wandb/integration/torch/wandb_torch.py"
    names = {"path": tmp_path / "graph.json"}
    exec(compile("def hook(*_): open(path, 'w').close()", place, "exec"), names)
    module = Writing(lambda *_: None, tmp_path)
    module.layers[0].register_forward_hook(names["hook"])
    with pytest.raises(SideEffectError) as error:
        probe(module)
    refusal(error.value)
    assert not names["path"].exists()
