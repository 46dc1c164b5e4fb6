"""What a script of one's own prints where nobody catches what went wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch._C._distributed_c10d import HashStore

from launcher.processes.local import our_path
from strategies import PipelineStrategy
from strategies.errors import ModelError, PipelineError, PlanError
from strategies.runtime.lightning.last_words import LastWords, Voices, in_python, speak_once

CLOSED = "[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. GLHF!"

SCRIPT = """
import lightning.pytorch as pl, torch
from torch import nn
from strategies import PipelineStrategy
from strategies.errors import PipelineError


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        {hook}

    def configure_optimizers(self):
        return torch.optim.{optimizer}(self.parameters())


try:
    PipelineStrategy(pp=0)
except PipelineError:
    print("caught")
data = torch.utils.data.DataLoader(torch.eye(4).repeat(8, 1), batch_size=4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = pl.Trainer(
    strategy=PipelineStrategy(pp=2, num_microbatches=2), accelerator="cpu", max_epochs=1,
    enable_model_summary=False, **quiet
)
trainer.fit(Net(), data)
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, terminate = sys.excepthook, signal.getsignal(signal.SIGTERM)
    yield
    sys.excepthook = before
    signal.signal(signal.SIGTERM, terminate)


def _end(words: LastWords, error: BaseException) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        words(type(error), error, None)
    return ended.value.code


def test_a_refusal_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError):
        PipelineStrategy(pp=0)
    words = sys.excepthook
    assert isinstance(words, LastWords)
    assert _end(words, PlanError("pp=0: ranks are counted from 1.\x1b[2J")) == 2
    assert capsys.readouterr().err == "error: pp=0: ranks are counted from 1.\\x1b[2J\n"


def no_gpu() -> None:  # as a machine without one says it
    raise MisconfigurationException("No supported gpu backend found!")


def finder() -> None:  # as the callback says it, which wants a loader of the module's own
    raise MisconfigurationException(
        "The Batch size finder is not supported with distributed strategies."
    )


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (
            lambda trainer: finder(),
            "error: The Batch size finder is not supported with distributed strategies. Tune it "
            "with a Trainer without PipelineStrategy (pp=1), or try sizes one by one.\n",
        ),
        (
            lambda trainer: no_gpu(),
            "error: No supported gpu backend found. Try Trainer(accelerator='cpu'), or 'auto'.\n",
        ),
        (
            lambda trainer: trainer.fit(torch.nn.Linear(2, 2)),
            "error: `model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got "
            "`Linear`. Give it a LightningModule that has the network as an attribute, a "
            "training_step that returns the loss, and configure_optimizers.\n",
        ),
        (
            lambda trainer: trainer.fit(pl.LightningModule()),
            "error: No `training_step()` method defined. Lightning `Trainer` expects as minimum ",
        ),
        (
            lambda trainer: pl.Trainer(accelerator="cpu", precision="bf16-mixd", logger=False),
            "error: Precision 'bf16-mixd' is invalid. Allowed precision values: (",
        ),
        (
            lambda trainer: pl.Trainer(accelerator="cpu", gradient_clip_val="1", logger=False),
            "error: `gradient_clip_val` should be an int or a float. Got 1.",
        ),
        (
            lambda trainer: pl.Trainer(strategy=PipelineStrategy, logger=False),
            "error: You selected an invalid strategy name: `strategy=<class ",
        ),
        (
            lambda trainer: pl.Trainer(strategy="pipeline", logger=False),
            "error: You selected an invalid strategy name: `strategy='pipeline'`",
        ),
    ],
    ids=[
        "the batch size",
        "no gpu",
        "a plain module",
        "no step",
        "a precision",
        "a text for a number",
        "a class",
        "a name",
    ],
)
def test_what_lightning_refuses_is_one_line_as_well(
    ask: Callable[[Any], object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = speak_once()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises((TypeError, ValueError, MisconfigurationException)) as raised:
        ask(trainer)
    capsys.readouterr()
    assert _end(words, raised.value) == 2
    assert capsys.readouterr().err.startswith(told)


def test_a_loggers_own_object_is_on_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger: Any = CSVLogger("unused")
    with pytest.raises(AttributeError) as raised:
        logger.experiment.config.update({"rate": 0.1})
    assert _end(speak_once(), raised.value) == 2
    assert re.fullmatch(
        f"error: {re.escape(__file__)}:[0-9]+: logger.experiment is the logger's own object on "
        "rank 0 alone, and this script runs on every rank: on the others Lightning gives methods "
        r"that do nothing, and no 'update'\. Call it in a function under @rank_zero_only "
        r"\(lightning.pytorch.utilities\), or use logger.log_hyperparams\(\.\.\.\)\.\n",
        capsys.readouterr().err,
    )


def test_a_strategy_that_is_none_is_refused_in_a_script_that_has_made_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    from strategies import PipelineStrategy as Given  # the first line of a script

    words = sys.excepthook
    assert isinstance(words, LastWords)
    with pytest.raises(ValueError) as raised:
        pl.Trainer(strategy=Given, logger=False)  # type: ignore[arg-type]
    capsys.readouterr()
    assert _end(words, raised.value) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Try Trainer(strategy=PipelineStrategy(pp=2)), an object of the class." in told


def test_keys_of_the_command_line_are_told_as_python_has_them() -> None:
    told = "trainer.on_nan=skip goes on; trainer.resume=a/b.ckpt goes on, say."
    assert in_python(told) == (
        'PipelineStrategy(on_nan="skip") goes on; fit(ckpt_path="a/b.ckpt") goes on, say.'
    )
    assert in_python("within 5 s (cluster.timeout_s); pp=4") == "within 5 s (timeout_s); pp=4"


def test_all_else_goes_to_the_hook_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    words = speak_once()
    assert speak_once() is words
    words(ValueError, ValueError("mine"), None)
    words(RuntimeError, RuntimeError(CLOSED), None)  # nobody else was there
    monkeypatch.setenv("FOLDPIPE_TRACEBACK", "1")
    words(PlanError, PlanError("no"), None)
    assert [str(error) for error in seen] == ["mine", CLOSED, "no"]


def _together(
    first: BaseException, second: BaseException, capsys: pytest.CaptureFixture[str]
) -> tuple[list[int | str | None], str]:
    """Exit codes of two ranks that end by these, and what both have written."""
    store = HashStore()
    voices = [Voices(store, rank, 2, []) for rank in range(2)]
    words = [LastWords(sys.__excepthook__) for _ in range(2)]
    for one, of in zip(words, voices, strict=True):
        one.follow(of)
    codes: list[int | str | None] = [None, None]

    def other() -> None:
        codes[1] = _end(words[1], second)

    thread = threading.Thread(target=other)
    thread.start()
    if not isinstance(first, PipelineError):
        thread.join()  # It has lost what the other one has left.
    codes[0] = _end(words[0], first)
    thread.join()
    return codes, capsys.readouterr().err


def test_ranks_that_are_refused_together_say_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    codes, said = _together(ModelError("cannot be cut"), ModelError("cannot be cut"), capsys)
    assert codes == [2, 2]
    assert said == "error: cannot be cut\n"


def test_what_another_rank_refuses_is_told_in_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    lost = RuntimeError(CLOSED)
    codes, said = _together(lost, ModelError("only here"), capsys)
    assert codes == [2, 2]
    assert said == "error: rank 1: only here\n"


def test_a_lost_rank_is_one_line_where_nobody_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words, voices = LastWords(sys.__excepthook__), Voices(HashStore(), 0, 2, [])
    words.follow(voices)
    assert _end(words, RuntimeError(CLOSED)) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: rank 0 has lost its connection to another rank, [^\n]*\n", said)


def _run(folder: Path, *, optimizer: str, hook: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(optimizer=optimizer, hook=hook))
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": our_path(os.environ), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


REFUSE = (
    "from strategies.errors import ModelError\n"
    "        if self.trainer.strategy.local_rank == {rank} and batch_idx == 1:\n"
    "            raise ModelError('only here')"
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("optimizer", "hook", "told", "code"),
    [
        pytest.param(
            "LBFGS",
            "pass",
            "LBFGS decides on each rank by itself how ",
            2,
            id="all",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "Adam", REFUSE.format(rank=0), "only here", 2, id="first", marks=pytest.mark.full
        ),
        pytest.param(
            "Adam", REFUSE.format(rank=1), "rank 1: only here", 2, id="last", marks=pytest.mark.full
        ),
        pytest.param(
            "Adam",
            "import os; self.trainer.strategy.local_rank == 1 and batch_idx == 1 and os._exit(7)",
            "rank 0 has lost its connection to another rank",
            1,
            id="killed",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_script_ends_with_one_message(
    optimizer: str, hook: str, told: str, code: int, tmp_path: Path
) -> None:
    done = _run(tmp_path, optimizer=optimizer, hook=hook)
    assert done.stdout.count("caught") == 2  # each rank goes through the whole script
    assert "Traceback" not in done.stderr and "GLHF" not in done.stderr
    said = done.stderr.rstrip("\n").split("\n")
    assert said[-1].startswith(f"error: {told}"), done.stderr
    assert sum(line.startswith("error: ") for line in said) == 1
    assert done.returncode == code
