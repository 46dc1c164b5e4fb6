"""A published training run as a row of a file, as a request to foldpipe, and as it is predicted.

A row says what was run (model, degrees, batch, schedule, what was recomputed) and what was measured
(seconds of a step, memory of the fullest rank, or ``OOM``). The request is made of the keys that a
user would type, so what no key can say cannot be predicted: ``missing`` names it.

Columns: id; group (the table that it stands in: rows of one group are ranked); hardware (an option
of ``hardware=``); layers, hidden, heads, kv_heads, ffn, act, vocab, seq, tie; of models with
experts ep, expert_tp, experts, experts_per_token, expert_ffn, shared_experts, first_dense_layers;
gpus, tp, pp, dp; v (stages per rank); mbs, gbs; schedule; recompute (none, full, selective,
selective-attention); sp; overlap; precision; grad_dtype; attention (as ``costs.attention``); units
(per stage, ``5|6|5``); step_s; mem_gb, mem_what; express (``no`` with the missing feature in note);
where; note. Columns that a file lacks are empty; some others (``_FEATURES``) name what cannot be
asked for.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.compose.session import compose_checked, search_path
from launcher.report.predicted import rank_memory
from launcher.resolve import Run, rank_capacity, resolve
from launcher.workloads.model_share import model_units
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.capacity import Capacity
from strategies.errors import PipelineError
from strategies.simulator.engine import simulate

# Columns whose values are those of a key.
_KEYS = {
    "layers": "model.layers",
    "hidden": "model.hidden",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "ffn": "model.ffn",
    "vocab": "model.vocab",
    "seq": "model.sequence",
    "tie": "model.tie_embeddings",
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "mbs": "data.microbatch_size",
    "gbs": "data.global_batch_size",
    "schedule": "schedule",
    "overlap": "overlap",
    "precision": "trainer.precision",
    "sp": "sequence_parallel",
    "ep": "ep",
    "expert_tp": "expert_tp",
    "experts": "model.experts",
    "experts_per_token": "model.experts_per_token",
    "expert_ffn": "model.expert_ffn",
    "shared_experts": "model.shared_experts",
    "first_dense_layers": "model.first_dense_layers",
}
_DEGREES = ("tp", "pp", "dp")
# What a table may tell that no key can say. A column of that name with anything but none of it:
_FEATURES = {
    "cp": "context parallelism",
    "head_size": "heads that are not hidden / heads wide",
    "window": "attention within a window",
    "fsdp": "weights shared out over ranks (FSDP, ZeRO-3)",
    "zero": "a ZeRO stage in a column of its own (overlap=zero1 is stage 1)",
    "offload": "states kept in the memory of hosts",
}
_NONE_OF_IT = ("", "0", "1", "null", "none", "no", "false")
# And values of the others:
_VALUES = {
    ("overlap", "zero2"): "gradients shared out over ranks (ZeRO-2)",
    ("overlap", "zero3"): "weights shared out over ranks (FSDP, ZeRO-3)",
    ("overlap", "fsdp"): "weights shared out over ranks (FSDP, ZeRO-3)",
    ("overlap", "hsdp"): "weights shared out over some replicas (HSDP)",
    ("precision", "fp8"): "matrix products in 8 bits",
    ("precision", "bf16-fp8"): "matrix products in 8 bits",
    ("precision", "transformer-engine"): "matrix products in 8 bits",
}
# GPT: LayerNorm, biases and learned positions; Llama: none of them.
_ACTIVATIONS = {
    "gelu": ("gelu", "layernorm", "learned"),
    "swiglu": ("swiglu", "rmsnorm", "rope"),
}
_RECOMPUTED: Mapping[str, tuple[str, ...]] = {
    "none": ("recompute=none",),
    # Layer by layer, as Megatron-LM does.
    "full": ("recompute=layer",),
    "selective": ("recompute=selective",),
    # The attention core alone; ``request`` says which types of layers there are besides.
    "selective-attention": ("recompute=selective",),
}
# Without these a request would be one for the model, or batch, that keys have by themselves.
_NEEDED = ("layers", "hidden", "heads", "vocab", "seq", "mbs", "gbs")
_SUMS = {"": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}  # as many bytes


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row.

    Attributes:
        group: The table of the source that it stands in.
        step_s: Measured seconds of a step; None where only memory is told.
        memory_bytes: Measured, of the fullest rank; None where it is not told.
        fits: Whether it ran; None where the source says nothing about memory.
        row: Its cells.
    """

    name: str
    group: str
    hardware: str
    num_gpus: int
    step_s: float | None
    memory_bytes: float | None
    fits: bool | None
    row: Mapping[str, str]

    @property
    def source(self) -> str:
        """The publication: a group's name up to its first hyphen."""
        return re.split(r"[-\d]", self.group, maxsplit=1)[0] or self.group


@dataclass(frozen=True, slots=True)
class Prediction:
    """What foldpipe says of a run.

    Attributes:
        step_s: Predicted seconds.
        memory_bytes: Of the fullest rank, as ``mem_what`` says that it was measured.
        limit_bytes: What a rank has.
        flops: Model FLOPs of a step, of all ranks.
        missing: Why it cannot be predicted; None if it can.
        taken_bytes: What the device of the fullest rank shows as taken.
    """

    run: PublishedRun
    step_s: float = 0.0
    memory_bytes: float = 0.0
    limit_bytes: float = 0.0
    flops: float = 0.0
    missing: str | None = None
    taken_bytes: float = 0.0

    @property
    def error(self) -> float | None:
        """Of the step time, relative and signed."""
        measured = self.run.step_s
        return None if self.missing or not measured else self.step_s / measured - 1.0

    @property
    def memory_error(self) -> float | None:
        measured = self.run.memory_bytes
        return None if self.missing or not measured else self.memory_bytes / measured - 1.0

    @property
    def fits(self) -> bool:
        return self.taken_bytes <= self.limit_bytes

    def speeds(self) -> tuple[float, float]:
        """(predicted, measured) FLOP/s of one rank."""
        assert self.run.step_s is not None
        each = self.flops / self.run.num_gpus
        return each / self.step_s, each / self.run.step_s


def read_runs(path: Path) -> list[PublishedRun]:
    """The rows of a file.

    Raises:
        SystemExit: The file has no such rows: the message says which column or number is wrong.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SystemExit(f"{path}: {error}. Try benchmarks/published.csv.") from error
    if not rows:
        raise SystemExit(f"{path} has no rows. Try benchmarks/published.csv as an example.")
    return [_read(row, f"{path}, line {number}") for number, row in enumerate(rows, start=2)]


def _read(row: Mapping[str, str | None], place: str) -> PublishedRun:
    # A field too many lands in a list under None, one too few is None.
    cells = {name: (text or "").strip() for name, text in row.items() if isinstance(name, str)}
    for column in ("id", "hardware", "gpus"):
        if not cells.get(column):
            raise SystemExit(f"{place}: no {column}. Every row needs id, hardware and gpus.")
    step = _number(cells, "step_s", place)
    told = cells.get("mem_gb", "")
    held = None if told == "OOM" else _number(cells, "mem_gb", place)
    # What torch and nvidia-smi print as GB are GiB; sums of GiB have been converted.
    unit = 1e9 if "GiB" in cells.get("mem_what", "") else 2.0**30
    gpus = _number(cells, "gpus", place)
    assert gpus is not None
    return PublishedRun(
        name=cells["id"],
        group=cells.get("group") or "?",
        hardware=cells["hardware"],
        num_gpus=int(gpus),
        step_s=step,
        memory_bytes=None if held is None else held * unit,
        fits=False if told == "OOM" else True if step is not None else None,
        row=cells,
    )


def _number(cells: Mapping[str, str], column: str, place: str) -> float | None:
    text = cells.get(column, "")
    if text in ("", "null"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise SystemExit(f"{place}: {column}={text} is no number > 0.")
    return value


class InexpressibleError(Exception):
    """What a run had that no key can say."""


def request(run: PublishedRun) -> list[str]:
    """The words of a command line that asks for the run.

    Raises:
        InexpressibleError: There are none.
    """
    row = run.row
    if row.get("express") == "no":
        raise InexpressibleError(row.get("note") or "the file says so")
    _refuse_missing(row)
    _check_ranks(run)
    activation = row.get("act") or "gelu"
    recompute = row.get("recompute") or "none"
    if activation not in _ACTIVATIONS:
        raise InexpressibleError(f"model.activation={activation}")
    if recompute not in _RECOMPUTED:
        raise InexpressibleError(f"recompute={recompute}")
    sums = row.get("grad_dtype", "")
    if sums not in _SUMS:
        raise InexpressibleError(f"grad_dtype={sums}")
    curve, norm, position = _ACTIVATIONS[activation]
    words = ["mode=simulate", "costs=analytic", f"hardware={run.hardware}", "seed=0"]
    words += [f"{key}={row[name]}" for name, key in _KEYS.items() if row.get(name)]
    # Small models of this project share keys and values; what a row does not tell is no sharing.
    words += [f"{_KEYS[name]}=null" for name in ("kv_heads", "ffn") if not row.get(name)]
    words += [f"model.activation={curve}", f"model.norm={norm}", f"model.position={position}"]
    words += _RECOMPUTED[recompute]
    if recompute == "selective-attention":
        words.append(f"recompute.layers=[Attention:attention,{_others(row)}]")
    words += _software(run)
    if (row.get("schedule") or "").startswith("zb"):
        # The paper's optimizer looks at the norm afterwards: ranks go on without a barrier.
        words.append("trainer.on_nan=ignore")
    else:
        # All others clip gradients by their norm: a step ends with a barrier.
        words.append("trainer.gradient_clip_val=1.0")
    if (row.get("v") or "1") != "1":
        words.append(f"schedule.stages_per_rank={row['v']}")
    if row.get("units"):
        words.append(f"schedule.units_per_stage=[{row['units'].replace('|', ',')}]")
    if _SUMS[sums] == "bf16":
        words.append("overlap.sum_dtype=bf16")
    return words


def _others(row: Mapping[str, str]) -> str:
    """Types of layers beside attention, which keep all."""
    experts = row.get("experts", "").lower() not in _NONE_OF_IT
    dense = not experts or row.get("first_dense_layers", "") not in _NONE_OF_IT
    types = ["Embedding", *["Mlp"] * dense, *["SparseMlp"] * experts, "Head"]
    return ",".join(f"{name}:none" for name in types)


def _software(run: PublishedRun) -> list[str]:
    """What tables do not say and the programs of their time did.

    Megatron-LM before FlashAttention (GPT models on V100 and A100; the zero-bubble paper's memory
    shows it, too) ran attention as several kernels, with dropout of 0.1 there and on the branches.
    Llama models, and all that ran on later cards, had fused attention and no dropout. Buckets of
    Megatron-LM have 40 M gradients, or 1 M per replica if that is more.
    """
    row = run.row
    kind = row.get("attention")
    if not kind:
        early = run.hardware.startswith(("v100", "a100")) and row.get("act") != "swiglu"
        kind = "unfused_dropout" if early else "fused"
    words = [f"costs.attention={kind}"]
    if kind == "unfused_dropout":
        words.append("model.dropout=0.1")
    replicas = _count(row, "dp")
    words.append(f"overlap.bucket_mb={4 * max(40, replicas)}")
    for name, more in _CLUSTERS.items():
        if run.group.startswith(name):
            words += more
    return words


def _refuse_missing(row: Mapping[str, str]) -> None:
    absent = [name for name in _NEEDED if row.get(name, "") in ("", "null")]
    if absent:
        raise InexpressibleError(f"no {' and no '.join(absent)}")
    for column, feature in _FEATURES.items():
        told = row.get(column, "")
        if (
            column == "head_size"
            and told
            and _count(row, "heads") * _count(row, column) == _count(row, "hidden")
        ):
            continue
        if told.lower() not in _NONE_OF_IT:
            raise InexpressibleError(f"{column}={told}: {feature}")
    for (column, value), feature in _VALUES.items():
        if row.get(column, "").lower() == value:
            raise InexpressibleError(f"{column}={row[column]}: {feature}")


def _check_ranks(run: PublishedRun) -> None:
    degrees = [_count(run.row, name) for name in _DEGREES]
    if math.prod(degrees) != run.num_gpus:
        product = " x ".join(f"{name}={n}" for name, n in zip(_DEGREES, degrees, strict=True))
        raise InexpressibleError(f"gpus={run.num_gpus}, but {product} = {math.prod(degrees)}")


def _count(row: Mapping[str, str], column: str) -> int:
    text = row.get(column) or "1"
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise InexpressibleError(f"{column}={text} is no whole number > 0")
    return int(text)


# Networks that are not what a card's file assumes, as their owners have measured them.
_CLUSTERS = {
    # Jean Zay's Omni-Path: 40.5 Gb/s of bus bandwidth over nodes of eight A100, shared by these
    # (github bigscience-workshop/bigscience experiments/bandwidth/all_reduce_bench-a100-n4.txt).
    "BLOOM": ["hardware.inter_bandwidth=6.3e8"],
}


# What an allocator shows as reserved counts blocks that it would give back where memory is short:
# more than a run needs, on average 1.15 times what is in use (GMLake, ASPLOS 2024).
_CACHED = 1.15


def predict_run(run: PublishedRun) -> Prediction:
    """Inside ``hydra_session``; what cannot be asked for is a prediction with ``missing``."""
    try:
        config = compose_checked([*search_path(None), *request(run)])[0]
        resolved = _to_the_end(resolve(config))
    except (InexpressibleError, PipelineError) as error:
        return Prediction(run, missing=str(error))
    timeline = simulate(resolved.programs.train, resolved.costs)
    memory = rank_memory(resolved)
    # With all scores, as the sources count: the order of their tables is by these.
    forward = sum(unit.forward_flops for unit in model_units(resolved.shape))
    assert memory is not None
    held = max(rank.total for rank in memory)
    room = rank_capacity(config, resolved.dp)
    return Prediction(
        run,
        step_s=timeline.makespan if config.trainer.waits_at_flush else timeline.period,
        memory_bytes=_as_measured(run, held, room),
        taken_bytes=room.taken(held),
        limit_bytes=room.total,
        flops=3.0 * forward * resolved.batch_size * resolved.dp,
    )


def _as_measured(run: PublishedRun, held: float, room: Capacity) -> float:
    """What was read: of the device, of what torch's allocator reserved, or of what it gave out."""
    what = run.row.get("mem_what", "").lower()
    if "nvidia-smi" in what:
        return held * _CACHED + room.context + room.communicators
    return held * _CACHED if "reserved" in what else held


def _to_the_end(run: Run) -> Run:
    """Those programs ran a layer again to its end, with the product there and its sum."""
    if run.config.recompute.name != "layer" or not isinstance(run.costs, AnalyticCosts):
        return run
    stages = tuple(
        replace(
            load,
            again_sums=load.forward_sums if load.again_sums else (),
            works=tuple(
                (replace(work, again_products=1.0, again_elements=work.forward_elements), n)
                if work.again_products
                else (work, n)
                for work, n in load.works
            ),
        )
        for load in run.costs.stages
    )
    return replace(run, costs=replace(run.costs, stages=stages))
