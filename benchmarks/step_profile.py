"""Where a step's CPU time goes, part by part, and the same as a flame graph.

    python -m benchmarks.step_profile [--schedule 1f1b] [--ranks 2] [--microbatches 8]
        [--steps 40] [--real] [--flame FILE.svg]

Emulated stages that take no time leave what the engine does; ``--real`` trains the built-in model
through Lightning, so that its loop, its hooks and the model are there, too. Counted is CPU time of
the rank's main thread (``time.thread_time``), which other people's load does not change much, and
calls, which it does not change at all. First unprofiled, for the figure itself; then by cProfile,
for the shares: calls are dearer there than they are, so parts with many small ones look larger.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.emulation import Emulation, Task
from benchmarks.engine import ready, steady
from benchmarks.ranks import rank_pool
from benchmarks.runtime import SleepingOurs
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks.training import Learner, Sentences, small_shape

_WARMUPS = 5
_EVERY_S = 0.0005  # between two looks at the stack

# The first whose text is part of a file's path.
_PARTS = (
    ("the loop over the list", ("step/executor.py",)),
    ("recorder", ("step/recorder.py", "analysis/timeline.py")),
    ("heartbeat", ("step/pulse.py", "strategies/heartbeat.py")),
    ("messages: bookkeeping", ("step/boundary_values.py", "messages/mailbox.py")),
    ("messages: calls", ("messages/transport.py", "messages/transport_choice.py",
                         "messages/device_", "distributed_c10d", "torch/distributed")),
    ("what ranks tell each other", ("messages/control.py", "messages/exchange.py", "/json/",
                                    "step/step_mirror.py", "models/logs.py")),
    ("batch: cut, marks, random draws", ("step/microbatch.py", "step/whole_", "models/state.py")),
    ("around a stage's F and B", ("step/stage_compute.py", "step/recompute.py", "models/")),
    ("gradients and their buffers", ("update/grad_sync.py", "update/rank_gradients.py",
                                     "update/reduction.py", "update/main_weights.py")),
    ("flush, norm and checks", ("update/",)),
    ("the step around the list", ("runtime/engine/", "strategies/ir/", "strategies/compiler")),
    ("our hooks in Lightning", ("strategies/runtime/lightning",)),
    ("autograd", ("torch/autograd", "run_backward")),
    ("optimizer", ("torch/optim",)),
    ("Lightning's loop", ("lightning/", "lightning_utilities")),
    ("the model itself", ("benchmarks/emulation", "torch/nn", "launcher/", "torch/_tensor",
                          "torch/functional", "tests/")),
)  # fmt: skip
_REST = "Python and torch besides"


@dataclass(frozen=True, slots=True)
class Found:
    """One rank, per step.

    Attributes:
        thread_us: CPU time of the main thread, not profiled.
        process_us: Of all threads.
        calls: Of Python and C functions.
        instructions: Of its list.
        parts: CPU time of the main thread and calls by part, profiled.
        stacks: CPU seconds by stack, outermost first, as ``file:function``.
    """

    thread_us: float
    process_us: float
    calls: float
    instructions: int
    parts: dict[str, tuple[float, float]]
    stacks: dict[tuple[str, ...], float]


class _Phases:
    """Steps unprofiled, then profiled, then watched."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.profile = cProfile.Profile(time.thread_time)
        self.stacks: Counter[tuple[str, ...]] = Counter()
        self.thread_s = self.process_s = 0.0
        self._watching: Any = None

    def before(self, step: int) -> None:
        phase, place = divmod(step - _WARMUPS, self.steps)
        if step < _WARMUPS or place:
            return
        now = time.thread_time(), time.process_time()
        if phase == 0:
            self.thread_s, self.process_s = now
        elif phase == 1:
            self.thread_s = now[0] - self.thread_s
            self.process_s = now[1] - self.process_s
            self.profile.enable()
        elif phase == 2:
            self.profile.disable()
            self._watching = _watched(self.stacks)
            self._watching.__enter__()
        else:
            self._watching.__exit__(None, None, None)

    @property
    def total(self) -> int:
        return _WARMUPS + 3 * self.steps

    def found(self, instructions: int) -> Found:
        stats = pstats.Stats(self.profile)
        parts = {
            part: (took / self.steps * 1e6, calls / self.steps)
            for part, (took, calls) in _by_part(stats).items()
        }
        calls = getattr(stats, "total_calls", 0) / self.steps
        return Found(
            self.thread_s / self.steps * 1e6, self.process_s / self.steps * 1e6, calls,
            instructions, parts, dict(self.stacks),
        )  # fmt: skip


def profile_emulated(*, schedule: str, num_microbatches: int, steps: int) -> Found:
    """The engine alone, on stages that take no time."""
    emulation = Emulation(0.0, 0.0, 0.0, 2**10)
    ours = SleepingOurs(Task(schedule, num_microbatches, emulation), watch_nan=True)
    phases = _Phases(steps)
    with ready(ours):
        steady(ours, warmups=_WARMUPS, steps=3 * steps, after=lambda step: phases.before(step + 1))
        return phases.found(len(ours.last_record.program.ranks[dist.get_rank()]))


class _Profiled(pl.Callback):
    reads_weights = False

    def __init__(self, phases: _Phases) -> None:
        self._phases = phases

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._phases.before(batch_idx)


def profile_real(*, schedule: str, num_microbatches: int, steps: int) -> Found:
    """The built-in model through Lightning."""
    phases = _Phases(steps)
    strategy = PipelineStrategy(
        pp=dist.get_world_size(), schedule=schedule, num_microbatches=num_microbatches, seed=0
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=phases.total + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Profiled(phases)],
    )
    rows = Sentences((phases.total + 1) * num_microbatches)
    model = Learner(small_shape(hidden=64, ffn=128, vocab=256))
    trainer.fit(model, DataLoader(rows, batch_size=num_microbatches))
    engine = strategy.engine
    rank = strategy.coordinates.pp_rank
    found = phases.found(len(engine.programs.train.ranks[rank]))
    engine.close()
    return found


def _part_of(name: str) -> str:
    for part, marks in _PARTS:
        if any(mark in name for mark in marks):
            return part
    return _REST


def _by_part(stats: pstats.Stats) -> dict[str, tuple[float, int]]:
    """Own time and calls; what C functions take is their callers'."""
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def add(part: str, took: float, calls: int) -> None:
        parts[part][0] += took
        parts[part][1] += calls

    table: dict[Any, Any] = getattr(stats, "stats", {})
    for (file, _, function), (_, calls, took, _, callers) in table.items():
        if file == "~" and "run_backward" not in function and callers:
            for (caller, _, _), (_, times, share, _) in callers.items():
                add(_part_of(caller), share, times)
        else:
            add(_part_of(function if file == "~" else file), took, calls)
    return {part: (took, int(calls)) for part, (took, calls) in parts.items()}


@contextmanager
def _watched(stacks: Counter[tuple[str, ...]]) -> Iterator[None]:
    """Looks at this thread's stack from another one; a look counts the CPU time since the last."""
    target = threading.get_ident()
    clock = time.pthread_getcpuclockid(target)
    done = threading.Event()

    def watch() -> None:
        last = time.clock_gettime(clock)
        while not done.wait(_EVERY_S):
            now = time.clock_gettime(clock)
            frame = sys._current_frames().get(target)
            names = []
            while frame is not None:
                code = frame.f_code
                names.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}")
                frame = frame.f_back
            if now > last:
                stacks[tuple(reversed(names))] += now - last  # type: ignore[assignment]
            last = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


# ------------------------------------------------------------------------------------ flame graph

_WIDTH, _ROW, _LEAST = 1200, 16, 0.004
_COLOURS = ("#e8743b", "#eb9f3c", "#f2c14e", "#d95f4c", "#c9744f", "#e6a57e")


def flame_graph(stacks: dict[tuple[str, ...], float], *, below: str) -> str:
    """As SVG: a bar per function, as wide as its CPU time, on top of what called it.

    ``below`` names the function that is the bottom bar.
    """
    merged: Counter[tuple[str, ...]] = Counter()
    for stack, took in stacks.items():
        start = next((i for i, name in enumerate(stack) if name.endswith(f":{below}")), None)
        if start is not None:
            merged[stack[start:]] += took  # type: ignore[assignment]
    bars: list[tuple[int, float, float, str]] = []

    def lay(items: list[tuple[tuple[str, ...], float]], depth: int, left: float) -> None:
        groups: dict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
        for stack, took in items:
            if len(stack) > depth:
                groups[stack[depth]].append((stack, took))
        for name, members in sorted(groups.items()):
            width = sum(took for _, took in members) / total
            if width >= _LEAST:
                bars.append((depth, left, width, name))
                lay(members, depth + 1, left)
            left += width

    total = sum(merged.values()) or 1.0
    lay(list(merged.items()), 0, 0.0)
    depth = 1 + max((bar[0] for bar in bars), default=0)
    height = depth * _ROW + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        "<title>CPU time of a step</title><style>text{font:10px system-ui,sans-serif}</style>"
    ]
    for level, left, width, name in bars:
        x, wide = left * _WIDTH, width * _WIDTH
        y = height - (level + 1) * _ROW
        file, _, function = name.rpartition(":")
        colour = _COLOURS[sum(file.encode()) % len(_COLOURS)]
        parts.append(
            f'<g><title>{escape(name)} {width:.1%}</title><rect x="{x:.1f}" y="{y}" '
            f'width="{max(wide - 0.5, 0.5):.1f}" height="{_ROW - 1}" fill="{colour}"/>'
        )
        shown = function[: int(wide / 5.5)]
        if len(shown) > 2:
            parts.append(f'<text x="{x + 2:.1f}" y="{y + 11}">{escape(shown)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _table(found: Found) -> Iterator[str]:
    all_us = sum(took for took, _ in found.parts.values())
    yield f"{'part':34} share   us/instruction  calls/instruction\n"
    for part, (took, calls) in sorted(found.parts.items(), key=lambda item: -item[1][0]):
        scaled = took / all_us * found.thread_us / found.instructions
        yield (f"{part:34}{took / all_us:6.1%} {scaled:12.1f} {calls / found.instructions:15.1f}\n")


def main() -> None:
    """Prints a table of the rank in the middle, and writes the flame graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--flame", type=Path)
    given = parser.parse_args()
    run: Callable[..., Found] = profile_real if given.real else profile_emulated
    with rank_pool(given.ranks) as ranks:
        found: list[Found] = ranks.run(
            run, schedule=given.schedule, num_microbatches=given.microbatches, steps=given.steps
        )
    middle = found[given.ranks // 2]
    kind = "the built-in model" if given.real else "stages that take no time"
    write = sys.stdout.write
    write(
        f"{given.schedule}, {given.ranks} ranks, {given.microbatches} microbatches, {kind}; rank "
        f"{given.ranks // 2}: {middle.instructions} instructions, per instruction "
        f"{middle.thread_us / middle.instructions:.1f} us CPU of the main thread, "
        f"{middle.process_us / middle.instructions:.1f} us of all threads, "
        f"{middle.calls / middle.instructions:.1f} calls\n"
    )
    for line in _table(middle):
        write(line)
    if given.flame is not None:
        below = "step" if not given.real else "advance"
        given.flame.write_text(flame_graph(middle.stacks, below=below), encoding="utf-8")
        write(f"{given.flame}\n")


if __name__ == "__main__":
    main()
