"""Thirteen configurations of a model of 1.1e9 weights: step time and peak memory.

Their predictions are in ``predicted.json``, made by ``--predict`` and committed before anything
was measured. A later change of the cost model does not change that file.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from launcher.compose.session import compose_checked, hydra_session
from launcher.resolve import Run, resolve
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import build_optimizer
from launcher.workloads.transformer_shape import TransformerShape
from strategies.analysis.memory import peak_memory_bytes
from strategies.models.unit_model import UnitModel
from strategies.plan import Options
from strategies.profiling.layer_times import draw_quickly
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.messages.mesh import Coordinates
from strategies.simulator.engine import simulate
from tools.gpu_proof.kernels import described
from tools.gpu_proof.proof import Setting
from tools.gpu_proof.timing import Clock

PREDICTED = Path(__file__).with_name("predicted.json")
# 1.1e9 weights: 16 layers, 2048 wide, 32 heads over 8 of keys and values.
LLAMA_1B = (
    "model=llama2_3b", "model.layers=16", "model.hidden=2048", "model.heads=32", "model.kv_heads=8",
    "model.ffn=8192", "model.vocab=32000", "model.sequence=2048",
)  # fmt: skip
TINY = (
    "model=tiny", "model.layers=4", "model.hidden=16", "model.heads=2", "model.kv_heads=1",
    "model.ffn=24", "model.vocab=256", "model.sequence=16",
)  # fmt: skip
_BF16, _MIXED = "trainer.precision=bf16-true", "trainer.precision=bf16-mixed"
_TF32 = ("trainer.precision=32-true", "trainer.float32_matmul_precision=high")
_FOUR = ("num_microbatches=4", "data.microbatch_size=4")
_V4 = ("schedule=interleaved_1f1b", "schedule.stages_per_rank=4")
ROWS: dict[str, tuple[str, ...]] = {
    "base": (_BF16, *_FOUR),
    "mixed": (_MIXED, *_FOUR),
    "tf32": (*_TF32, "num_microbatches=4", "data.microbatch_size=2"),
    "recompute_full": (_BF16, *_FOUR, *_V4, "recompute=full"),
    "recompute_selective": (_BF16, *_FOUR, "recompute=selective"),
    "recompute_layer": (_BF16, *_FOUR, "recompute=layer"),
    "small_microbatches": (_BF16, "num_microbatches=16", "data.microbatch_size=1"),
    "large_microbatches": (_BF16, "num_microbatches=2", "data.microbatch_size=8"),
    "zb_v": (_BF16, *_FOUR, "schedule=zb_v"),
    "interleaved": (_BF16, *_FOUR, *_V4),
    "gpipe": (_BF16, "num_microbatches=4", "data.microbatch_size=2", "schedule=gpipe"),
    "foldx_fifo": (_BF16, *_FOUR, "schedule=foldx_fifo"),
    "bf16_sums": (_BF16, *_FOUR, "overlap.sum_dtype=bf16"),
}
_REHEARSED = ("base", "mixed", "recompute_selective", "zb_v", "interleaved")
_WARM_UPS = 2


def composed(words: Sequence[str], *, quick: bool, hardware: str) -> Run:
    """A row's run as its words say it; the smallest model for a rehearsal."""
    model: tuple[str, ...] = LLAMA_1B
    if quick:
        model, words = TINY, [word for word in words if not word.startswith("model.")]
    with hydra_session():
        config, _ = compose_checked(
            ["mode=simulate", f"hardware={hardware}", "pp=1", *model, *words]
        )
    return resolve(config)


def predicted_of(run: Run) -> dict[str, Any]:
    """Seconds of a step, and bytes of the allocator at its peak."""
    program = run.programs.train
    (peak,) = peak_memory_bytes(program, run.costs.table(program))
    return {"step_s": simulate(program, run.costs).period, "peak_bytes": peak}


def predict() -> dict[str, Any]:
    """All rows on the cards that have a file; what ``--predict`` writes."""
    return {
        card: {
            name: predicted_of(composed(words, quick=False, hardware=card))
            for name, words in ROWS.items()
        }
        for card in ("a100_80g", "h100", "h200")
    }


def configurations(setting: Setting) -> dict[str, Any]:
    """Measures every row, beside its prediction."""
    clock = Clock(setting.device, quick=setting.quick)
    card = described(setting.device)
    before = json.loads(PREDICTED.read_text())[card]
    clock.warm(2.0)
    rows: dict[str, Any] = {}
    found: dict[str, Any] = {"hardware": card, "clocks": clock.clocks(), "rows": rows}
    for name, words in ROWS.items():
        if setting.quick and name not in _REHEARSED:
            continue
        run = composed(words, quick=setting.quick, hardware=card)
        expected = predicted_of(run) if setting.quick else before[name]
        rows[name] = {"words": list(words), "predicted": expected}
        try:
            rows[name] |= measure(run, clock, steps=1 if setting.quick else 3)
        except RuntimeError as error:  # An out-of-memory error is one, too.
            rows[name]["error"] = str(error).splitlines()[0][:300]
            clear()
        setting.keep(found)
    found["summary"] = summary(rows)
    found["clocks_after"] = clock.clocks()
    failed = [name for name, row in rows.items() if "error" in row]
    if failed:
        found["failed"] = "; ".join(f"{name}: {rows[name]['error']}" for name in failed)
    return found


def measure(
    run: Run, clock: Clock, *, steps: int, compile: bool = False, on_nan: str = "ignore"
) -> dict[str, Any]:
    """Seconds of a step, all of them and by the recorder, and the allocator's peak."""
    one = OneRank(run, clock, compile=compile, on_nan=on_nan)
    try:
        for number in range(_WARM_UPS):
            one.step(number)
        clock.wait()
        if clock.gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        for number in range(steps):
            one.step(_WARM_UPS + number)
        clock.wait()
        took = (time.perf_counter() - begun) / steps
        found: dict[str, Any] = {"step_s": took, "model_flops": one.model_flops}
        records = list(one.engine.recorder.kept)[_WARM_UPS:]
        busy = [one.engine.recorder.spans(record).busy for record in records]
        found["busy_s"] = statistics.median(busy)
        if clock.gpu:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
            free, total = torch.cuda.mem_get_info()
            found["beyond_reserved_bytes"] = total - free - found["reserved_bytes"]
        return found
    finally:
        one.close()
        del one
        clear()


class OneRank:
    """A pipeline of one rank as ``mode=train`` runs it, without Lightning around it."""

    def __init__(
        self, run: Run, clock: Clock, *, compile: bool = False, on_nan: str = "ignore"
    ) -> None:
        assert isinstance(run.shape, TransformerShape)
        precision = run.config.trainer.precision
        torch.set_float32_matmul_precision(run.config.trainer.float32_matmul_precision)
        with torch.device("meta"):
            module = LanguageModel(run.shape, seed=run.config.seed)
        draw_quickly(module, clock.device, module.net.tie)
        if precision == "bf16-true":
            module.to(torch.bfloat16)
        self.module = module
        self._around: Callable[[], Any] = nullcontext
        if precision == "bf16-mixed":
            self._around = lambda: torch.autocast(clock.device.type, torch.bfloat16)
        options = Options(
            units_per_stage=tuple(map(len, run.stages)),
            backend="nccl" if clock.gpu else "gloo",
            check_batches=False,
            on_nan=on_nan,  # type: ignore[arg-type]
            compile=compile,
            sum_dtype=run.options.sum_dtype,
        )
        self.engine = Engine(
            model=UnitModel(module),
            plan=run.plan,
            options=options,
            coordinates=Coordinates(1, 1, 0, 0),
            device=clock.device,
        )
        module.to(clock.device)
        self.engine.build_gradients()
        self._optimizer = build_optimizer(self.engine.updated_parameters(), run.config.optimizer)
        self.batch = batch_of(run, clock)
        tokens = self.batch["tokens"].numel()
        self.model_flops = flops_of(run.shape, tokens)

    def step(self, number: int) -> None:
        """One batch, and the update."""
        with self._around():
            self.engine.train_pass(
                self.batch, batch_idx=number, step=number, accumulation=1, update=True
            )
        self.engine.restore_gradients()
        self.engine.flush()
        self._optimizer.step()
        self.engine.stepped()

    def close(self) -> None:
        self.engine.close()


def batch_of(run: Run, clock: Clock) -> dict[str, torch.Tensor]:
    """Random tokens, on the device."""
    generator = torch.Generator().manual_seed(1)
    rows = (run.batch_size, run.shape.sequence + 1)
    tokens = torch.randint(run.shape.vocab, rows, generator=generator).to(clock.device)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def flops_of(shape: TransformerShape, tokens: int) -> float:
    """Of a step's products, the head's among them, scores as if half were masked away."""
    head = shape.hidden // shape.heads
    layer = shape.hidden * head * (2 * shape.heads + 2 * (shape.kv_heads or shape.heads))
    layer += 3 * shape.hidden * shape.ffn + shape.hidden * shape.sequence
    return 6.0 * tokens * (shape.layers * layer + shape.hidden * shape.vocab)


def clear() -> None:
    """Frees what the last row had."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of the predictions, and whether they put the rows in the right order."""
    done = {name: row for name, row in rows.items() if "step_s" in row}
    if not done:
        return {}
    errors = {name: row["predicted"]["step_s"] / row["step_s"] - 1 for name, row in done.items()}
    found: dict[str, Any] = {
        "median_size_of_time_error": statistics.median(map(abs, errors.values())),
        "worst_time_error": max(errors.values(), key=abs),
        "kendall_tau": kendall(
            [row["predicted"]["step_s"] for row in done.values()],
            [row["step_s"] for row in done.values()],
        ),
    }
    memory = [
        row["predicted"]["peak_bytes"] / row["peak_bytes"] - 1
        for row in done.values()
        if "peak_bytes" in row
    ]
    if memory:
        found["median_size_of_memory_error"] = statistics.median(map(abs, memory))
        found["worst_memory_error"] = max(memory, key=abs)
    reserved = [row for row in done.values() if "reserved_bytes" in row]
    if reserved:
        losses = [row["reserved_bytes"] / row["peak_bytes"] - 1 for row in reserved]
        found["allocator_loss"] = statistics.median(losses)
        found["context_bytes"] = statistics.median(row["beyond_reserved_bytes"] for row in reserved)
    return found


def kendall(left: Sequence[float], right: Sequence[float]) -> float:
    """Tau-a: pairs in the same order less pairs in the other, over all pairs; ties count as 0."""
    pairs = list(combinations(range(len(left)), 2))
    if not pairs:
        return 1.0

    def sign(value: float) -> int:
        return (value > 0) - (value < 0)

    agree = sum(sign(left[a] - left[b]) * sign(right[a] - right[b]) for a, b in pairs)
    return agree / len(pairs)
