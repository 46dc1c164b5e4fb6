"""The measures of ``benchmarks.micro`` that compute with torch."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.engine import in_turns
from benchmarks.peers_model import Block, optimizer
from benchmarks.runtime import Ours
from benchmarks.table import Table
from launcher.workloads.language_model import LanguageModel
from strategies.models.replay.replay_model import ReplayModel
from strategies.models.selective.policy import Selection
from strategies.models.stage_model import StageOutput
from strategies.models.unit_model import UnitModel
from strategies.plan import Plan
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.recompute import Recomputation
from strategies.runtime.step.recorder import Recorder
from tests.launcher.workloads.presets import preset

# -- recording -------------------------------------------------------------------------------------


class _Residual(LightningModule):
    """Layers with two operations between each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch).relu()
        return batch.mean()


def recording(*, layers: int, repetitions: int) -> None:
    """CPU time of the step, of its recording after the first, and of executing its first stage."""
    torch.set_num_threads(1)
    module, batch = _Residual(layers), torch.randn(4, 32)
    model = ReplayModel.probe(module, batch)
    units = len(model.units)
    model.cut([range(units - 1), range(units - 1, units)], range(2))
    options: dict[str, Any] = {
        "batch": batch, "batch_idx": 0, "microbatch": 0, "mode": "train",
    }  # fmt: skip
    recorded = model.record(**options)
    table = Table("part", "ms", "us per entry", numbers=True)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: module.training_step(batch, 0),
        "record": lambda: model.record(**options),
        "execute": lambda: model.forward(0, (), seed=None, recording=recorded, **options),
    }
    for name, call in calls.items():
        took = []
        for _ in range(repetitions):
            begun = time.process_time()
            call()
            took.append(1e3 * (time.process_time() - begun))
        middle = statistics.median(took)
        table.add(name, f"{middle:.2f}", f"{1e3 * middle / len(recorded.entries):.1f}")
    sys.stdout.write(f"{table}\n{len(recorded.entries)} entries\n")


# -- recorder --------------------------------------------------------------------------------------

READS = 100_000
_WARM_UPS = 5


class _Silent(Recorder):
    """Keeps everything but the clock."""

    @property
    def stamp(self) -> Callable[[], float]:
        return lambda: 0.0


def recorder(*, steps: int, microbatches: int = 8) -> None:
    """The same steps with real stamps and with none, in turns; 5 of the steps warm up."""
    torch.set_num_threads(1)
    shape = replace(preset("tiny"), layers=2, sequence=64)
    model = LanguageModel(shape)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    tokens = torch.randint(shape.vocab, (microbatches, shape.sequence + 1))
    ours = Ours(
        UnitModel(model),
        Plan("foldx_fifo", pp=1, num_microbatches=microbatches, buckets=0),
        {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]},
        optimizer=optimizer,
    )
    ours.setup()
    engine = ours.rank_engine
    recorders = {"recorded": engine.recorder, "silent": _Silent(0, torch.device("cpu"))}

    def once(name: str) -> float:
        engine.recorder = engine._parts.recorder = recorders[name]
        start = time.perf_counter()
        ours.step()
        return time.perf_counter() - start

    turns = dict.fromkeys(recorders, ours)
    times = in_turns(turns, once, warmups=_WARM_UPS, repetitions=steps - _WARM_UPS)
    recorded, silent = (statistics.median(times[name]) for name in recorders)
    instructions = sum(map(len, engine.programs.train.ranks))
    stamp = recorders["recorded"].stamp
    start = time.perf_counter()
    for _ in range(READS):
        stamp()
    read = (time.perf_counter() - start) / READS
    sys.stdout.write(
        f"{instructions} instructions per step: recorded {recorded * 1e3:.2f} ms, "
        f"silent {silent * 1e3:.2f} ms, ratio {recorded / silent:.4f}; two clock reads per "
        f"instruction take {2 * instructions * read / silent:.4%} of a step\n"
    )


# -- recompute -------------------------------------------------------------------------------------

BLOCKS = 4


@dataclass(frozen=True)
class Size:
    name: str
    dim: int
    tokens: int
    rounds: int


# Where Python's time shows, and where products do.
SIZES = (Size("small", 64, 16, 150), Size("large", 512, 256, 9))


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
    table = Table("size", "way", "F and B", "over plain", "bytes at the backward")
    for size in sizes:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(size.dim) for _ in range(BLOCKS)))
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
            table.add(size.name, name, f"{seconds * 1e3:.2f} ms", f"{ratio:.2f}", kept)
    sys.stdout.write(f"{table}\n")
