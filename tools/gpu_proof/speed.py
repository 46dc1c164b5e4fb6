"""How fast it is: MFU, what is added to a plain loop, and two ranks on one card."""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from launcher.resolve import Run
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import build_optimizer
from launcher.workloads.transformer_shape import TransformerShape
from strategies.profiling.layer_times import draw_quickly
from strategies.runtime.lightning.strategy import PipelineStrategy
from tools.gpu_proof.configurations import (
    LLAMA_1B,
    TINY,
    OneRank,
    batch_of,
    clear,
    composed,
    measure,
)
from tools.gpu_proof.kernels import described
from tools.gpu_proof.launches import ended, start, words_of
from tools.gpu_proof.proof import Setting
from tools.gpu_proof.timing import Clock

_BF16, _MIXED = "trainer.precision=bf16-true", "trainer.precision=bf16-mixed"
# Kernels of microseconds: the host decides. 16 layers, 256 wide, 256 tokens.
_LAUNCH_BOUND = (
    "model.layers=16", "model.hidden=256", "model.heads=4", "model.kv_heads=4", "model.ffn=768",
    "model.sequence=256", "num_microbatches=4", "data.microbatch_size=1",
)  # fmt: skip
_WARM_UPS = 2


def speed(setting: Setting) -> dict[str, Any]:
    """MFU eager and compiled, and our step over that of a plain loop."""
    clock = Clock(setting.device, quick=setting.quick)
    clock.warm(2.0)
    found: dict[str, Any] = {"clocks": clock.clocks()}
    for name, words, steps in (
        ("launch_bound", (*_LAUNCH_BOUND, "trainer.precision=32-true"), 10),
        ("large", (_MIXED, "num_microbatches=4", "data.microbatch_size=4"), 4),
        ("small_microbatches", (_MIXED, "num_microbatches=16", "data.microbatch_size=1"), 2),
    ):
        if setting.quick and name != "large":
            continue
        run = composed(words, quick=setting.quick, hardware=described(setting.device))
        found[name] = overhead(run, clock, steps=2 if setting.quick else steps)
        setting.keep(found)
    words = (_BF16, "num_microbatches=2", "data.microbatch_size=8")
    run = composed(words, quick=setting.quick, hardware=described(setting.device))
    peak = _matmul_flops(clock)
    found["matmul_flops_per_s"] = peak
    for name, compiled in (("eager", False), ("compiled", True)):
        if compiled and setting.quick:
            continue  # A compiler's minute shows nothing of a GPU.
        row = measure(run, clock, steps=1 if setting.quick else 5, compile=compiled, on_nan="stop")
        reached = row["model_flops"] / row["step_s"]
        found[name] = row | {"flops_per_s": reached, "of_matmul": reached / peak}
        setting.keep(found)
    found["clocks_after"] = clock.clocks()
    return found


def _matmul_flops(clock: Clock) -> float:
    side = 64 if clock.quick else 8192
    a, b = clock.random(side, side), clock.random(side, side)
    return 2 * side**3 / clock.seconds(lambda: a @ b, 0.3, 100)


def overhead(run: Run, clock: Clock, *, steps: int) -> dict[str, Any]:
    """Seconds of a step by a plain loop, by the engine, and by a Trainer with the strategy."""
    found: dict[str, Any] = {
        "plain": _by_hand(*_plain(run, clock), clock, steps),
        "engine": _by_hand(*_engine(run, clock), clock, steps),
        "trainer": _by_trainer(run, clock, steps),
    }
    for name in ("engine", "trainer"):
        found[f"{name}_over_plain"] = found[name]["step_s"] / found["plain"]["step_s"]
    return found


def _by_hand(
    step: Callable[[int], object], end: Callable[[], None], clock: Clock, steps: int
) -> dict[str, Any]:
    for number in range(_WARM_UPS):
        step(number)
    clock.wait()
    begun = time.perf_counter()
    for number in range(steps):
        step(_WARM_UPS + number)
    clock.wait()
    took = (time.perf_counter() - begun) / steps
    with host_waits(clock) as waits:
        step(_WARM_UPS + steps)
    end()
    del step, end
    clear()
    return {"step_s": took, "host_waits": len(waits), "places": waits}


@contextmanager
def host_waits(clock: Clock) -> Iterator[list[str]]:
    """Where the host waits for the device inside the block; nothing is counted on a CPU.

    Those that torch warns of (a number that is read, a copy that blocks), and waits for events and
    streams that the device has not reached.
    """
    found: list[str] = []
    if not clock.gpu:
        yield found
        return

    def counted(kind: Any) -> Any:
        wait = kind.synchronize

        def synchronize(self: Any) -> None:
            if not self.query():
                found.append(f"{kind.__name__} {_place()}")
            wait(self)

        return mock.patch.object(kind, "synchronize", synchronize)

    with (
        counted(torch.cuda.Event),
        counted(torch.cuda.Stream),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [
        f"read {one.filename.rpartition('/')[2]}:{one.lineno}"
        for one in caught
        if "called a synchronizing" in str(one.message)
    ]


def _place() -> str:
    """File and line of the code that waits, below torch's own."""
    frames = traceback.extract_stack()[:-2]
    outside = [frame for frame in frames if "/torch/" not in frame.filename]
    return f"{outside[-1].filename.rpartition('/')[2]}:{outside[-1].lineno}"


Made = tuple[Callable[[int], object], Callable[[], None]]


def _module(run: Run, clock: Clock) -> LanguageModel:
    assert isinstance(run.shape, TransformerShape)
    with torch.device("meta"):
        module = LanguageModel(run.shape, optimizer=run.config.optimizer, seed=run.config.seed)
    draw_quickly(module, clock.device, module.net.tie)
    for name, _ in module.pipeline_units():
        module.initialise_unit(name)
    return module.to(clock.device)


def _plain(run: Run, clock: Clock) -> Made:
    """The same model, microbatches, optimizer and precision in ten lines of torch."""
    module = _module(run, clock)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = build_optimizer(module.parameters(), run.config.optimizer)
    batch = batch_of(run, clock)
    size, count = run.config.data.microbatch_size, run.num_microbatches
    parts = [
        {key: value[n * size : (n + 1) * size] for key, value in batch.items()}
        for n in range(count)
    ]
    mixed = run.config.trainer.precision == "bf16-mixed"

    def step(number: int) -> None:
        for part in parts:
            with torch.autocast(clock.device.type, torch.bfloat16) if mixed else nullcontext():
                loss = module.training_step(part, number) / count
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step, lambda: None


def _engine(run: Run, clock: Clock) -> Made:
    one = OneRank(run, clock, on_nan="stop")
    return one.step, one.close


class _Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, run: Run, steps: int) -> None:
        self._sequence, self._count = run.shape.sequence, run.batch_size * steps
        self._tokens = torch.randint(run.shape.vocab, (run.batch_size, self._sequence + 1))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._tokens[index % len(self._tokens)]
        return {"tokens": row[:-1], "targets": row[1:]}


def _by_trainer(run: Run, clock: Clock, steps: int) -> dict[str, Any]:
    """A step of ``Trainer(strategy=PipelineStrategy(pp=1))``, from one batch's end to the next."""
    watch = _Watch(clock, steps)
    strategy = PipelineStrategy(
        pp=1, schedule=run.config.schedule.name, num_microbatches=run.num_microbatches,
        whole_after=False,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="gpu" if clock.gpu else "cpu", devices=1, strategy=strategy,
        precision=run.config.trainer.precision, max_steps=_WARM_UPS + steps + 1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[watch], num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(_Tokens(run, _WARM_UPS + steps + 1), batch_size=run.batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(_module(run, clock), loader)
    strategy.engine.close()
    del trainer, strategy
    clear()
    return {"step_s": watch.seconds, "host_waits": len(watch.waits), "places": watch.waits}


class _Watch(pl.Callback):
    """The time of some steps, and the host's waits in the one after them."""

    reads_weights = False

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._steps = clock, steps
        self._ended, self._begun = 0, 0.0
        self._counting = ExitStack()
        self.seconds = 0.0
        self.waits: list[str] = []

    def on_train_batch_end(self, *_: object) -> None:
        self._ended += 1
        if self._ended == _WARM_UPS:
            self._clock.wait()
            self._begun = time.perf_counter()
        elif self._ended == _WARM_UPS + self._steps:
            self._clock.wait()
            self.seconds = (time.perf_counter() - self._begun) / self._steps
            self.waits = self._counting.enter_context(host_waits(self._clock))
        elif self._ended > _WARM_UPS + self._steps:
            self._counting.close()


def shared_card(setting: Setting) -> dict[str, Any]:
    """Pipelines whose ranks share the card, beside one rank with the whole model.

    Kernels of two processes take turns on a card, so a step is the sum of the ranks' work: the
    step of one rank, and what messages cost.
    """
    model = TINY if setting.quick else (*LLAMA_1B, "model.layers=8")
    steps = 3 if setting.quick else 8
    rows: dict[str, Any] = {}
    until = time.monotonic() + setting.seconds - 4
    layouts = {
        "pp1": ("pp=1",),
        "pp2_staged": ("pp=2", "cluster.backend=staged"),
        "pp2_shared": ("pp=2", "cluster.backend=shared"),
        "pp2_zb_v_shared": ("pp=2", "schedule=zb_v", "cluster.backend=shared"),
    }
    with tempfile.TemporaryDirectory() as name:
        for layout, words in list(layouts.items())[: 1 if setting.quick else None]:
            folder = Path(name) / layout
            asked = [
                *words_of(setting, model), *words, _BF16, "num_microbatches=4",
                "data.microbatch_size=4", f"trainer.max_steps={steps}",
                f"hardware={described(setting.device)}" if setting.device == "cuda"
                else "hardware=cpu_laptop",
            ]  # fmt: skip
            one = ended(start(asked, folder), folder, until - time.monotonic())
            result = one.pop("result", {})
            kept = (
                "step_time_s", "measured_bubble_ratio", "bytes_sent", "peak_memory_bytes",
                "predicted_step_time_s", "backend", "loss_last",
            )  # fmt: skip
            rows[layout] = one | {key: result[key] for key in kept if key in result}
            setting.keep({"rows": rows})
    found: dict[str, Any] = {"rows": rows}
    broken = [layout for layout, row in rows.items() if row["exit"] != 0]
    if broken:
        return found | {"failed": "did not train: " + ", ".join(broken)}
    alone = rows["pp1"]["step_time_s"]
    return found | {
        "over_one_rank": {name: row["step_time_s"] / alone for name, row in rows.items()}
    }
