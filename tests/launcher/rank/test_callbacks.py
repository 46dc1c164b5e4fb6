"""How a loader process ended, whichever of torch's two ways finds it dead; terminal notes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from launcher.processes.progress import ProgressView
from launcher.rank.callbacks import Progress, as_lost_loader, how_it_ended
from strategies import PipelineStrategy
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver


class _Ending(IterableDataset[int]):
    """Ends its own process instead of the second item."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        yield 0
        time.sleep(0.3)  # a thread of its process sends the first one
        if self.number == 0:
            os._exit(7)
        os.kill(os.getpid(), self.number)
        signal.pause()


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGKILL, "SIGKILL: killed by"),
        (signal.SIGTERM, "signal 15: Term"),
        (0, "exit code 7"),
    ],
)
def test_an_exit_code_that_the_loader_has_taken_is_told(number, word):
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(DataLoader(_Ending(number), batch_size=None, num_workers=1, timeout=1))
    try:
        next(batches)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler comes too late
        with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
            next(batches)
        assert how_it_ended(caught.value).startswith(word)
    finally:
        signal.signal(signal.SIGCHLD, before)
        del batches


class _Tensors(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(1000)  # fetched from its process when it is asked for
        signal.pause()


def test_a_loader_that_dies_while_a_batch_is_fetched_from_it_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(DataLoader(_Tensors(), batch_size=None, num_workers=1))
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while batches._worker_result_queue.empty():
            time.sleep(0.01)
        pid = batches._workers[0].pid
        os.kill(pid, signal.SIGKILL)
        batches._workers[0].join()
        # Its connections have ended, and nobody can tell yet that it has.
        with monkeypatch.context() as early:
            early.setattr(batches._workers[0], "is_alive", lambda: True)
            with pytest.raises((OSError, EOFError)) as caught:
                next(batches)
        progress = SimpleNamespace(current=SimpleNamespace(ready=3))
        loop = SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=progress),
            _combined_loader=SimpleNamespace(flattened=[DataLoader(_Tensors(), num_workers=1)]),
        )
        trainer = SimpleNamespace(fit_loop=loop, current_epoch=0)
        assert str(as_lost_loader(caught.value, trainer)) == (
            f"loader process {pid} of rank 1 has died (SIGKILL: killed by somebody, or by the "
            "system for lack of memory) after 3 batches of epoch 0, with batches 3 to 4 under way. "
            "Try data.num_workers=0, which shows what a dataset raises."
        )
        assert as_lost_loader(ConnectionResetError("of something else"), trainer) is None
    finally:
        signal.signal(signal.SIGCHLD, before)
        del batches


def test_an_old_checkpoint_that_cannot_be_deleted_is_named_once_at_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = "step-00000010.ckpt.tmp cannot be deleted: Operation not permitted."
    strategy = PipelineStrategy(pp=1, num_microbatches=1)
    strategy._saver = Saver(Exchange(None))
    strategy.saver.undeleted.append(warning)
    accumulates = SimpleNamespace(_should_accumulate=lambda: True)
    trainer: Any = SimpleNamespace(strategy=strategy, fit_loop=accumulates)
    read, write = os.pipe()
    monkeypatch.setenv("FOLDPIPE_EVENTS", str(write))
    progress = Progress(None, None)
    for _ in range(2):
        progress.on_train_batch_end(trainer, trainer, None)
    os.close(write)
    with open(read) as events, ProgressView(enabled=True) as view:
        for line in events:
            view(json.loads(line))
    assert capsys.readouterr().out == f"{warning}\n"
