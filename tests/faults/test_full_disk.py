"""Row 4: a file system of 5 MB fills up while a checkpoint is written.

A real tmpfs where this user may mount one; ``tests/strategies/runtime/storage/test_saver.py`` has
the same with the error alone, and ``tests/distributed/test_checkpoint_layouts.py`` that of one rank
among several: it ends training at the next step.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.errors import CheckpointError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.saver import Saver
from tests.faults.results import record
from tests.strategies.runtime.storage.saving import newest, save, step_in

SMALL, LARGE = 50, 200_000  # the large one needs 2 * 3 MB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 5 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)], stderr=subprocess.DEVNULL
    )
    if not mounted:
        pytest.skip("this user may not mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, *, in_thread: bool) -> float:
    """One save that does not fit; returns how long its failure took to show."""
    saver = Saver(Exchange(None))
    save(saver, disk / "step-1.ckpt", 1)
    begun = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        save(saver, disk / "step-2.ckpt", 2, size=LARGE, in_thread=in_thread)
        # A training step asks without waiting; here the thread is given its time first.
        assert saver._thread is not None
        saver._thread.join()
        saver.check()
    took = time.monotonic() - begun
    message = str(raised.value)
    assert f"checkpoint {disk / 'step-2.ckpt'} was not written: No space left" in message
    needs, free = (
        int(re.search(rf"([\d,]+) bytes {what}", message)[1].replace(",", ""))
        for what in ("to write", "are free")
    )
    assert needs > free > 0
    assert [path.name for path in disk.iterdir()] == ["step-1.ckpt"]
    assert step_in(disk / "step-1.ckpt") == newest(disk) == 1
    save(saver, disk / "step-1.ckpt", 1)  # there is room again, and nothing is broken
    return took


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_old_checkpoint_stays_and_the_message_has_need_and_free(
    in_thread: bool, disk: Path
) -> None:
    fill(disk, in_thread=in_thread)


@pytest.mark.faults
def test_twenty_times(disk: Path) -> None:
    took: list[float] = []
    try:
        for number in range(20):
            took.append(fill(disk, in_thread=number % 2 == 1))
    finally:
        what = "disk full while saving: the old one loads, need and free are told"
        record(4, what, len(took), 20, max(took, default=None))
