"""Row 4: a file system of 5 MB fills up while a checkpoint is written.

A real tmpfs where this user may mount one; ``tests/strategies/runtime/storage/test_saver.py`` has
the same with the error alone, and ``tests/distributed/test_checkpoint_layouts.py`` that of one rank
among several: it ends training at the next step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.errors import CheckpointError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Saver
from tests.faults.results import record
from tests.launcher.command_line import launch_here
from tests.launcher.runs import MODEL, launch
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
    # wandb's own process ends a moment after the run that it served; one that stays is a fault.
    for seconds_left in range(10, -1, -1):
        ended = subprocess.run(
            ["umount", str(place)], check=seconds_left == 0, stderr=subprocess.DEVNULL
        )
        if ended.returncode == 0:
            return
        time.sleep(1.0)


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


# What is asked for, how much of the 5 MB is free, what lies there as well, and what is told.
ASKED = [
    (("mode=simulate", "costs=uniform", "pp=32", "num_microbatches=64"), 1_100_000, "r/trace.json"),
    (("mode=validate", "pp=16", "model.layers=16", "num_microbatches=64"), 1_100_000, "r/"),
    (("mode=plan", "planner.num_gpus=8", "planner.level=O3", "model=llama2_7b", "pp=8",
      "hardware=a100_80g", "trainer.precision=bf16-mixed", "dp=1", "data.global_batch_size=64",
      "data.microbatch_size=1", "schedule=zb_v"), 1_060_000, "r/"),
]  # fmt: skip


@pytest.mark.faults
def test_modes_that_start_nothing(disk: Path, tmp_path: Path) -> None:
    held, took = 0, []
    for words, free, named in ASKED:
        (disk / "fill").write_bytes(bytes(5_242_880 - free))
        begun = time.monotonic()
        done = launch_here([*words, f"hydra.run.dir={disk}/r"], tmp_path)
        took.append(time.monotonic() - begun)
        result = json.loads((disk / "r" / "result.json").read_text())
        one = done.code == 1 and done.errors.count("\n") == 1
        held += one and f"error: {disk}/{named}" in done.errors and result["status"] == "failed"
        shutil.rmtree(disk / "r")
    record("4n", "disk full while mode=simulate, validate, plan write", held, len(ASKED), max(took))
    assert held == len(ASKED)


@pytest.mark.faults
def test_folders_of_wandb_that_are_full_end_no_training(disk: Path, tmp_path: Path) -> None:
    (disk / "fill").write_bytes(bytes(5_242_880))
    begun, places = time.monotonic(), ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR")
    words = (*MODEL, "pp=2", "trainer.max_steps=3", "tracking=wandb", "tracking.offline=true")
    done = launch(words, tmp_path, **dict.fromkeys(places, str(disk))).assert_done()
    held = "warning: wandb's folders take no more" in done.output + done.errors
    record("4n", "wandb's folders are full: one warning", int(held), 1, time.monotonic() - begun)
    assert held
