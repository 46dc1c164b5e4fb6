"""Short runs of the launcher, and the losses that they write down, on whatever device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.measure import TINY, Device, train
from tests.launcher.runs import read_metrics

STEPS = 6
# 32 bits, where two stages compute what one does: a mean over 64 tokens and more, of which each
# has an error of some roundoffs (2^-24), after weights have moved six times.
TOLERANCE = 2.0**-24 * 2**8


def losses(folder: Path, accelerator: str, hardware: str, *words: str) -> list[float]:
    """Of each step, as ``metrics.csv`` has them."""
    train(
        Device(accelerator, hardware, TINY), folder, "num_microbatches=4",
        f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", *words, timeout_s=120,
    )  # fmt: skip
    (file,) = folder.rglob("metrics.csv")
    found = [row["train_loss"] for row in read_metrics(file.parent)]
    assert len(found) == STEPS
    assert None not in found
    return [float(loss) for loss in found if loss is not None]


def check_pipeline(folder: Path, accelerator: str, hardware: str, *words: str) -> None:
    one = losses(folder / "one", accelerator, hardware, "pp=1")
    two = losses(folder / "two", accelerator, hardware, "pp=2", *words)
    assert two == pytest.approx(one, rel=TOLERANCE)


def check_start(folder: Path, accelerator: str, hardware: str, *words: str) -> None:
    found = {
        start: losses(
            folder / start, accelerator, hardware, "pp=2", f"cluster.start={start}", *words
        )
        for start in ("fork", "fresh")
    }
    assert found["fork"] == found["fresh"]
