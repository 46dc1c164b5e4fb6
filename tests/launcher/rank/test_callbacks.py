"""How a loader process ended is known, whichever of torch's two ways finds it dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset

from launcher.rank.callbacks import how_it_ended


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
