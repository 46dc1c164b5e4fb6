"""What recording costs: the same steps with real stamps and with none, alternating in one process.

    python -m benchmarks.recorder_cost [--steps 200]

Prints medians over the steps and their ratio; asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from launcher.workloads.language_model import LanguageModel
from strategies.models.unit_model import UnitModel
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.recorder import Recorder
from tests.launcher.workloads.presets import preset

MICROBATCHES = 8
READS = 100_000
_WARM_UPS = 5


class _Silent(Recorder):
    """Keeps everything but the clock."""

    @property
    def stamp(self) -> Callable[[], float]:
        return lambda: 0.0


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help=f"of them {_WARM_UPS} to warm up")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = replace(preset("tiny"), layers=2, sequence=64)
    model = LanguageModel(shape)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    engine = Engine(
        model=UnitModel(model),
        plan=Plan("foldx_fifo", pp=1, num_microbatches=MICROBATCHES, buckets=0),
        options=Options(backend="shared", on_nan="ignore"),
        coordinates=Coordinates(1, 1, 0, 0),
        device=torch.device("cpu"),
    )
    engine.build_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(shape.vocab, (MICROBATCHES, shape.sequence + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    recorders = {
        "recorded": engine.recorder,
        "silent": _Silent(0, torch.device("cpu")),
    }
    times: dict[str, list[float]] = {name: [] for name in recorders}
    for step in range(given.steps):
        for name, recorder in recorders.items():
            engine.recorder = engine._parts.recorder = recorder
            start = time.perf_counter()
            engine.train_pass(batch, batch_idx=0, step=step, accumulation=1, update=True)
            engine.restore_gradients()
            engine.flush()
            optimizer.step()
            engine.stepped()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found[_WARM_UPS:]) for name, found in times.items()}
    instructions = sum(map(len, engine.programs.train.ranks))
    stamp = recorders["recorded"].stamp
    start = time.perf_counter()
    for _ in range(READS):
        stamp()
    read = (time.perf_counter() - start) / READS
    sys.stdout.write(
        f"{instructions} instructions per step: recorded {medians['recorded'] * 1e3:.2f} ms, "
        f"silent {medians['silent'] * 1e3:.2f} ms, "
        f"ratio {medians['recorded'] / medians['silent']:.4f}; two clock reads per "
        f"instruction take {2 * instructions * read / medians['silent']:.4%} of a step\n"
    )


if __name__ == "__main__":
    main()
