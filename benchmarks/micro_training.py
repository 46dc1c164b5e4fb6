"""The measures of ``benchmarks.micro`` that compute with torch."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader, TensorDataset

from launcher.workloads.language_model import LanguageModel
from strategies.manifest import read_manifest, total_bytes
from strategies.models.selective.policy import Selection
from strategies.models.split_backward.input_step import input_backward
from strategies.models.stage_model import StageOutput
from strategies.models.unit_model import UnitModel
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.strategy import PipelineStrategy
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.recompute import Recomputation
from strategies.runtime.step.recorder import Recorder
from tests.launcher.workloads.presets import preset

# -- recorder --------------------------------------------------------------------------------------

READS = 100_000
_WARM_UPS = 5


class _Silent(Recorder):
    """Keeps everything but the clock."""

    @property
    def stamp(self) -> Callable[[], float]:
        return lambda: 0.0


def recorder(*, steps: int, microbatches: int = 8) -> None:
    """The same steps with real stamps and with none, alternating; 5 of the steps warm up."""
    torch.set_num_threads(1)
    shape = replace(preset("tiny"), layers=2, sequence=64)
    model = LanguageModel(shape)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    engine = Engine(
        model=UnitModel(model),
        plan=Plan("foldx_fifo", pp=1, num_microbatches=microbatches, buckets=0),
        options=Options(backend="shared", on_nan="ignore"),
        coordinates=Coordinates(1, 1, 0, 0),
        device=torch.device("cpu"),
    )
    engine.build_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(shape.vocab, (microbatches, shape.sequence + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    recorders = {"recorded": engine.recorder, "silent": _Silent(0, torch.device("cpu"))}
    times: dict[str, list[float]] = {name: [] for name in recorders}
    for step in range(steps):
        for name, chosen in recorders.items():
            engine.recorder = engine._parts.recorder = chosen
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


# -- stages of transformer blocks ------------------------------------------------------------------

MICROBATCHES = 3
HEADS = 4
BLOCKS = 4


@dataclass(frozen=True)
class Size:
    name: str
    dim: int
    tokens: int
    rounds: int


# Where Python's time shows, and where products do.
SIZES = (Size("small", 64, 16, 150), Size("large", 512, 256, 9))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, -1)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


def _blocks(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(size.dim) for _ in range(BLOCKS)])


# -- split backward --------------------------------------------------------------------------------


class Stage:
    """Blocks whose gradients are there, as they are in a run."""

    def __init__(self, size: Size, *, first: bool) -> None:
        self.blocks = _blocks(size)
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.data = torch.randn(1, size.tokens, size.dim)
        self.gradient = torch.randn_like(self.data)
        self.first = first

    def forward(self) -> tuple[Tensor, Tensor]:
        leaf = self.data.detach().requires_grad_(not self.first)
        return leaf, self.blocks(leaf)

    def full(self) -> None:
        for _ in range(MICROBATCHES):
            _, output = self.forward()
            torch.autograd.backward([output], [self.gradient])

    def split(self, *, exact: bool = False) -> None:
        for _ in range(MICROBATCHES):
            leaf, output = self.forward()
            inputs = [] if self.first else [leaf]
            pending = input_backward([output], [self.gradient], inputs, exact=exact)
            del output
            pending.run()

    def exact(self) -> None:
        self.split(exact=True)

    def parts_ms(self, rounds: int) -> tuple[float, ...]:
        """Median milliseconds of F, I and W of one microbatch."""
        found: list[tuple[float, ...]] = []
        for _ in range(rounds):
            times = [time.process_time()]
            leaf, output = self.forward()
            times.append(time.process_time())
            inputs = [] if self.first else [leaf]
            pending = input_backward([output], [self.gradient], inputs)
            del output
            times.append(time.process_time())
            pending.run()
            times.append(time.process_time())
            found.append(tuple(b - a for a, b in pairwise(times)))
        return tuple(statistics.median(column) * 1e3 for column in zip(*found, strict=True))


def split_backward() -> None:
    """CPU time of F+I+W beside F+B of the same stage, alternating, three microbatches a round."""
    torch.set_num_threads(1)
    for size in SIZES:
        for first in (False, True):
            stage = Stage(size, first=first)
            calls = {"full": stage.full, "split": stage.split, "exact": stage.exact}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(size.rounds):
                for name, call in calls.items():
                    start = time.process_time()
                    call()
                    times[name].append((time.process_time() - start) / MICROBATCHES)
            full, split, exact = (statistics.median(t[1:]) * 1e3 for t in times.values())
            f, i, w = stage.parts_ms(size.rounds)
            sys.stdout.write(
                f"{size.name:5} {'first' if first else 'later'} stage: F+B {full:8.3f} ms, "
                f"F+I+W {split:8.3f} ms, ratio {split / full:.3f} (exact {exact / full:.3f}); "
                f"F {f:.3f}, I {i:.3f}, W {w:.3f} ms\n"
            )


# -- recompute -------------------------------------------------------------------------------------


def _ways(blocks: nn.Sequential) -> dict[str, Callable[[Tensor], Tensor]]:
    """Each runs the forward up to the graph of the backward."""
    recomputation = Recomputation(blocks)
    layers = Selection().layers_of(dict(enumerate(blocks)))

    def stage(inputs: tuple[Tensor, ...], data: object) -> StageOutput:
        return StageOutput((blocks(*inputs),))

    def again(x: Tensor) -> Tensor:
        kept, _ = recomputation.forward(0, (x,), None, stage)
        return recomputation.again(kept, stage)[1].tensors[0]

    def twice(x: Tensor) -> Tensor:
        with torch.no_grad():
            blocks(x)
        result: Tensor = blocks(x)
        return result

    def selective(x: Tensor) -> Tensor:
        for index, block in enumerate(blocks):
            x = layers[index].run(block, (x,), {})
        return x

    return {
        "plain": blocks,
        "twice": twice,
        "R": again,
        "torch": lambda x: torch_checkpoint(blocks, x, use_reentrant=False),
        "selective": selective,
    }


def recompute(sizes: tuple[Size, ...] = SIZES) -> None:
    """Time, and bytes held for the backward, of one microbatch through four transformer blocks.

    Best times over the rounds, ways alternating: plain (F, B); with R (checkpointed F, R, B);
    torch's non-reentrant checkpoint around the stage; selective (attention core, norms and
    activation again). "Twice" is plain and one more forward that saves nothing: what R can cost at
    best.
    """
    torch.set_num_threads(1)
    sys.stdout.write(
        "| size | way | F and B | over plain | bytes at the backward |\n|---|---|---|---|---|\n"
    )
    for size in sizes:
        blocks = _blocks(size)
        x = torch.randn(1, size.tokens, size.dim)
        best: dict[str, float] = {}
        held: dict[str, int] = {}
        ways = _ways(blocks)
        for _ in range(size.rounds):
            for name, way in ways.items():
                leaf = x.clone().requires_grad_()
                start = time.perf_counter()
                output = way(leaf)
                between = time.perf_counter()
                if name not in held and name in best:
                    measured = ActivationBytes(blocks)
                    measured.begin(1, ())
                    measured.graph(0, 0, (leaf,), (output,))
                    held[name] = measured.stages[0].full
                after = time.perf_counter()
                output.sum().backward()  # type: ignore[no-untyped-call]
                spent = time.perf_counter() - after + between - start
                best[name] = min(best.get(name, spent), spent)
        for name, seconds in best.items():
            # torch's holders do not say what they keep: the stage's input.
            kept = leaf.nbytes if name == "torch" else held[name]
            ratio = seconds / best["plain"]
            sys.stdout.write(
                f"| {size.name} | {name} | {seconds * 1e3:.2f} ms | {ratio:.2f} | {kept} |\n"
            )


# -- checkpoint ------------------------------------------------------------------------------------

WIDTH, LAYERS, ROWS = 2048, 12, 16
SAVES, BETWEEN = 4, 8


class _Model(pl.LightningModule):
    """50.4 M parameters: 600 MB of state with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: tuple[Tensor], _: int) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class _Clock(Callback):
    """Times steps and saves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = self._last_cpu = self._begun = 0.0
        self.quiet: list[float] = []
        self.quiet_cpu: list[float] = []
        self.busy: list[float] = []
        self.busy_cpu: list[float] = []
        self.stalls: list[float] = []
        self.committed: list[float] = []
        self.path: Path | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()
        self._writing = trainer.strategy.saver.pending is not None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        took, cpu = time.perf_counter() - self._last, time.thread_time() - self._last_cpu
        writing = trainer.strategy.saver.pending is not None
        if trainer.global_step > 3:
            whole = self._writing and writing
            (self.busy if whole else self.quiet).append(took)
            (self.busy_cpu if whole else self.quiet_cpu).append(cpu)
        if self._writing and not writing:
            self.committed.append(time.perf_counter() - self._begun)
        if trainer.global_step % BETWEEN == 0:
            self._begun = time.perf_counter()
            path = self._folder / f"step-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            self.stalls.append(time.perf_counter() - self._begun)
            if self.path is not None:
                trainer.strategy.remove_checkpoint(self.path)
            self.path = path


def _train(folder: Path, *, in_thread: bool) -> tuple[_Clock, float]:
    """Trains; returns the clock and the seconds that a load takes."""
    clock = _Clock(folder)
    data = TensorDataset(torch.randn(ROWS * (SAVES + 1) * BETWEEN, WIDTH))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=PipelineStrategy(
            pp=1, schedule="gpipe", num_microbatches=2, async_save=in_thread, check_batches=False
        ),
        max_steps=(SAVES + 1) * BETWEEN - 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(_Model(), DataLoader(data, batch_size=ROWS))
    begun = time.perf_counter()
    trainer.strategy.load_checkpoint(str(clock.path))
    return clock, time.perf_counter() - begun


def _hash_s(path: Path) -> float:
    """Seconds that SHA-256 takes over what is in memory, a file's bytes."""
    data = max(path.iterdir(), key=lambda file: file.stat().st_size).read_bytes()
    begun = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - begun


def _write_s(size: int, folder: Path) -> float:
    """Seconds that the file system takes for as many bytes, fsync included: the floor."""
    block = bytes(1 << 22)
    target = folder / "plain"
    begun = time.perf_counter()
    with target.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    took = time.perf_counter() - begun
    target.unlink()
    return took


def _ms(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values) * 1e3:.0f} (max {max(values) * 1e3:.0f}, n={len(values)})"


def checkpoint(*, folder: str) -> None:
    """An MLP of 50 M parameters with Adam on one rank, saved while training waits, and in a thread.

    Medians of the step without a save, the stall of a save, the steps while the thread writes, the
    time until a checkpoint is committed, and what hashing takes of it. On a machine that others
    use, too, the CPU time of the training thread says whether the writing one is in its way.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    where, path, size = Path(tempfile.mkdtemp(dir=folder or None)), Path(), 0
    try:
        for in_thread in (False, True):
            clock, load = _train(where, in_thread=in_thread)
            assert clock.path is not None
            path = clock.path
            size = total_bytes(read_manifest(path))
            rows = {
                "step without a save, ms": _ms(clock.quiet),
                "  its CPU time": _ms(clock.quiet_cpu),
                "stall of a save, ms": _ms(clock.stalls),
                "step while it writes, ms": _ms(clock.busy),
                "  its CPU time ": _ms(clock.busy_cpu),
                "until committed, ms": _ms(clock.committed or clock.stalls),
                "loading and verifying, ms": f"{load * 1e3:.0f}",
            }
            sys.stdout.write(
                f"async_save={str(in_thread).lower()}: {size / 1e6:.0f} MB per checkpoint\n"
            )
            for name, text in rows.items():
                sys.stdout.write(f"  {name.rstrip() + ':':29} {text}\n")
        sys.stdout.write(f"SHA-256 of the same bytes, ms:  {_hash_s(path) * 1e3:.0f}\n")
        sys.stdout.write(f"plain write and fsync, ms:      {_write_s(size, where) * 1e3:.0f}\n")
    finally:
        shutil.rmtree(where, ignore_errors=True)
