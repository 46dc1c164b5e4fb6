"""A strategy in the hands of a Trainer that is not its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import lightning.pytorch as pl
import psutil
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from strategies import PipelineStrategy
from strategies.errors import PlanError
from strategies.runtime.lightning.ranks_strategy import _can_be_started_again


def test_the_trainer_of_the_other_distribution_is_told_which_import_to_change():
    with pytest.raises(PlanError, match=r"Write `import lightning\.pytorch as pl` in place of"):
        pytorch_lightning.Trainer(strategy=PipelineStrategy(pp=2), accelerator="cpu", logger=False)


def test_more_processes_than_memory_are_refused_before_one_is_started(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_500_000_000))
    told = r"20 of them on this machine, need 6.7 GB beside .* 1.5 GB are free. .* tp: 5 at most"
    with pytest.raises(PlanError, match=told):
        pl.Trainer(strategy=PipelineStrategy(pp=10, dp=2), accelerator="cpu", logger=False)
    pl.Trainer(strategy=PipelineStrategy(pp=5), accelerator="cpu", logger=False)
    monkeypatch.setenv("LOCAL_RANK", "0")  # somebody else has started them
    pl.Trainer(strategy=PipelineStrategy(pp=10, dp=2), accelerator="cpu", logger=False)


@pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")
def test_what_is_no_file_cannot_be_run_by_several_processes(monkeypatch):
    trainer = pl.Trainer(
        strategy=PipelineStrategy(pp=2), accelerator="cpu", logger=False, max_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(
        PlanError, match=r"python -c and notebooks have none, nor have .* Try it as a file, pyth"
    ):
        trainer.fit(_Line(), DataLoader(torch.randn(8, 2), batch_size=4))


@pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")
def test_a_script_under_pythons_debugger_is_started_again(monkeypatch, tmp_path):
    trainer = pl.Trainer(
        strategy=PipelineStrategy(pp=2), accelerator="cpu", logger=False, max_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    script = tmp_path / "train.py"
    script.touch()
    main = ModuleType("__main__")
    del main.__spec__
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(script)])
    started = []

    def start(command, **_):
        started.append(command)
        raise OSError("enough")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="enough"):
        trainer.fit(_Line(), DataLoader(torch.randn(8, 2), batch_size=4))
    # Lightning adds words of Hydra where an earlier test of this process has used that.
    assert [command[:2] for command in started] == [[sys.executable, str(script)]]


@pytest.mark.parametrize(
    ("file", "argv", "spec", "can"),
    [
        ("train.py", "train.py", None, True),
        ("<stdin>", "-", None, False),
        (None, "-c", None, False),
        ("/dev/fd/63", "/dev/fd/63", None, False),
        ("gone.py", "gone.py", None, False),
        ("app/__main__.py", "app", ("__main__", "app/__main__.py"), False),
        ("app.pyz/__main__.py", "app.pyz", ("__main__", "app.pyz/__main__.py"), False),
        ("package/run.py", "package/run.py", ("package.run", "package/run.py"), True),
        ("package/run.py", "a name", ("package.run", "package/run.py"), True),
        ("cProfile.py", "train.py", ("cProfile", "cProfile.py"), False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_runs_is_started_again_or_refused(monkeypatch, tmp_path, file, argv, spec, can):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "package/run.py", "cProfile.py", "app/__main__.py", "app.pyz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    main.__spec__ = None if spec is None else ModuleSpec(spec[0], None, origin=spec[1])
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [argv])
    assert _can_be_started_again() == can


def test_a_transport_of_gpus_is_refused_on_a_cpu():
    with pytest.raises(PlanError, match=r"backend=nccl sends between GPUs.* Try backend=auto\."):
        pl.Trainer(strategy=PipelineStrategy(pp=2, backend="nccl"), accelerator="cpu", logger=False)


class _Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")
@pytest.mark.parametrize(("asked", "told"), [(8, 1), (4, 0)])
def test_more_microbatches_than_rows_are_told_once(asked, told, caplog):
    caplog.set_level(logging.INFO)
    trainer = pl.Trainer(
        strategy=PipelineStrategy(pp=1, num_microbatches=asked), accelerator="cpu", logger=False,
        max_epochs=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_Line(), DataLoader(torch.randn(7, 2), batch_size=4))  # the last one has 3 rows
    said = "num_microbatches=8, and the first batch makes 4: a microbatch has a row at least"
    assert caplog.text.count(said) == told


def test_any_other_object_is_still_no_strategy_there():
    with pytest.raises(ValueError, match="invalid strategy name"):
        pytorch_lightning.Trainer(strategy=object(), accelerator="cpu", logger=False)
