"""Keys of the pipeline itself: the schedule, the gradient reduction, and what work costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from launcher.config.key import key
from strategies.costs.hardware import Hardware
from strategies.errors import PlanError
from strategies.plan import FAMILIES, NUM_PASSES, Family, Recompute

ExportTarget = Literal["torchtitan", "megatron", "automodel"]


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """``schedule=``: which order the ranks compute in."""

    name: str = key("1f1b", "Registered schedule; normally chosen with schedule=NAME.")
    stages_per_rank: int | None = key(
        None, "V, virtual stages per rank; null = as the schedule defines.", low=1, example=2
    )
    group: Literal["auto"] | int | None = key(
        None,
        "Microbatches that run through all stages of a rank before the next: interleaved_1f1b "
        "(null = pp or a little more) and foldx (auto = least memory at the shortest simulated "
        "time).",
        low=1,
        example=4,
    )
    split_backward: bool = key(
        False,
        "Split every backward into input and weight gradients; for schedules with none of their "
        "own.",
    )
    vertical_sync: bool = key(
        False,
        "pipedream: a microbatch uses one version of the weights on all ranks, that of the first.",
    )
    synchronous_steps: int = key(
        0,
        "pipedream, pipedream_2bw: so many steps at the beginning of training end with a flush; "
        "behind them gradients are late.",
        low=0,
    )
    error_feedback: float = key(
        0.0,
        "pipedream_2bw: share of the difference between the last two updates that is added to an "
        "update, for what its gradient is late by; 1 = all of it, 0 = nothing.",
        low=0,
        high=1,
    )
    layers_per_stage: tuple[int, ...] | None = key(
        None,
        "Layers of each of the pp * stages_per_rank stages, by hand; null = balanced by cost.",
        low=0,
        example=[1, 1, 1, 1],
    )
    units_per_stage: tuple[int, ...] | None = key(
        None,
        "Units of each stage, by hand: the embedding, attention and MLP of each layer (with "
        "model=hf whole layers), the head; null = as layers_per_stage.",
        low=0,
        example=[4, 3, 3, 4],
    )
    file: str | None = key(
        None,
        "custom: the order as CSV, a line per rank, as in any run's schedule.csv.",
        example="my.csv",
    )
    path: str | None = key(
        None,
        "custom: the order as a function of yours, my_pkg.orders:mine or orders.py:mine.",
        example="orders.py:mine",
    )
    placement: Literal["loop", "v", "bidirectional"] | None = key(
        None,
        "custom: which rank the file must have each stage on; null = wherever it has them.",
        example="loop",
    )


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """``check.*``: what ``mode=check`` takes for granted of the transport that a file is for."""

    semantics: Literal["auto", "rendezvous", "buffered", "one_queue", "per_pair", "per_edge"] = key(
        "auto",
        "Promise under which the file must run; auto = what its framework relies on, one_queue "
        "for a CSV. rendezvous: SEND and RECV hold both ranks; "
        "buffered: a SEND ends at once; one_queue: a rank's messages go in its list's order (NCCL, "
        "batched); per_pair: a queue per pair of ranks (NCCL, isend and irecv); per_edge: one per "
        "pair and direction.",
    )
    grouped: Literal["auto", "whole"] | bool = key(
        "auto",
        "Messages side by side in a list go at once (ncclGroupStart); whole: none before all can; "
        "auto = where the file's framework does so, no for a CSV.",
        example=True,
    )
    flags: str | None = key(
        None,
        "Megatron-LM's flags, in place of a file or after those of a script.",
        example="--pipeline-model-parallel-size 4",
    )
    num_gpus: int | None = key(
        None,
        "GPUs of the whole job, where flags or script do not say; null = as they say.",
        low=1,
        high=10_000_000,
        example=64,
    )
    layers: int | None = key(
        None,
        "Layers of the model, where a configuration only names it; null = as it says.",
        low=1,
        high=100_000,
        example=32,
    )


@dataclass(frozen=True, slots=True)
class OverlapConfig:
    """``overlap=``: when gradients are reduced over data-parallel replicas."""

    name: Literal["grad_reduce", "none", "zero1"] = key(
        "grad_reduce",
        "grad_reduce: each stage's reduction runs under later compute; none: at the flush; zero1: "
        "replicas share the optimizer's work and state, weights are gathered under the next step.",
    )
    bucket_mb: float = key(
        25.0, "Size of one reduction bucket, in MB of gradients.", above=0, high=1e6
    )
    grad_dtype: Literal["fp32", "bf16"] = key(
        "fp32",
        "Type in which gradients are sent to be reduced; fp32 = as they are summed, bf16 = half.",
    )
    sum_dtype: Literal["fp32", "bf16"] = key(
        "fp32",
        "Type in which gradients of bf16 weights are summed over microbatches and replicas; bf16 = "
        "half the memory, and sums that lose what is small beside them.",
    )
    exchange: bool = key(
        False,
        "With ep > 1: run a forward and the backward before it as one, so that tokens of either "
        "travel to their experts while the other one computes.",
    )


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """``costs=``: how long the simulator lets instructions take."""

    name: Literal["uniform", "analytic", "profiled"] = key(
        "analytic",
        "uniform: the numbers below, in any unit; analytic: seconds from model and hardware; "
        "profiled: seconds as mode=profile has measured them.",
    )
    attention: Literal["fused", "unfused", "unfused_dropout"] = key(
        "fused",
        "analytic: on a GPU with num_sms, the attention core is one kernel, or several that keep "
        "all scores (with dropout on them, where the model can have it).",
    )
    file: str | None = key(
        None, "profiled: the file that mode=profile wrote.", example="profile.json"
    )
    refine: str | None = key(
        None,
        "profiled, train: write the profile there, scaled to what the run's instructions took.",
        example="refined.json",
    )
    any_machine: bool = key(
        False, "profiled: take a profile of another machine, to predict what happens there."
    )
    forward: float | tuple[float, ...] = key(
        1.0,
        "uniform: forward of one microbatch on one rank; a list has a number per rank, to be "
        "shared by its stages, or one per stage. So have the lists of the next five.",
        above=0,
        high=1e12,
    )
    backward: float | tuple[float, ...] = key(
        2.0, "uniform: its whole backward, or a list.", above=0, high=1e12
    )
    backward_input: float | tuple[float, ...] | None = key(
        None,
        "uniform: the part of backward for the input's gradient, or a list; null = half.",
        low=0,
        high=1e12,
        example=1.0,
    )
    backward_weight: float | tuple[float, ...] | None = key(
        None,
        "uniform: the part for the weights' gradient, or a list, in place of backward_input.",
        low=0,
        high=1e12,
        example=1.0,
    )
    recompute: float | tuple[float, ...] | None = key(
        None,
        "uniform: recomputing one forward, or a list; null = forward.",
        low=0,
        high=1e12,
        example=1.0,
    )
    grad_reduce: float | tuple[float, ...] = key(
        0.0, "uniform: reduction of one rank's whole gradient, or a list.", low=0, high=1e12
    )
    num_buckets: int = key(
        1, "uniform: buckets each stage's gradient is reduced in.", low=1, high=1024
    )
    p2p: float | tuple[float, ...] = key(
        0.0,
        "uniform: latency of one message between stages; a list has a number for each stage but "
        "the last, of what goes from it to the next one and back.",
        low=0,
        high=1e12,
    )
    transport: Literal["buffered", "rendezvous"] = key(
        "buffered", "buffered: a send never waits; rendezvous: it waits for its receive."
    )
    fused: float | None = key(
        None,
        "uniform: a forward and a backward run as one (dualpipe); null = their sum.",
        above=0,
        high=1e12,
        example=2.5,
    )
    stage_input: float = key(
        0.0,
        "uniform: what a forward that is recomputed keeps, as a share of its full activation.",
        low=0,
        high=0.99,
    )


# Less, or more, is a figure in another unit than the key's.
_LEAST_FLOPS = 1e8
_LEAST_BANDWIDTH = 1e5
_LONGEST_S = 10.0
_TFLOPS = ("TFLOPS", 1e12)
_GB_S = ("GB/s", 1e9)
_MICROSECONDS = ("microseconds", 1e-6)


# hardware=auto, before and after it has the figures of this machine; and what is assumed else.
AUTO = "auto"
QUICK = f"{AUTO} (quick calibration)"
ASSUMED = "cpu_laptop"


@dataclass(frozen=True, slots=True)
class HardwareConfig(Hardware):
    """``hardware=``: the machine that analytic costs and MFU assume."""

    name: str = key(
        AUTO,
        "Label of the machine in reports. auto: this machine, measured before its first training.",
    )
    peak_flops: float | None = key(
        9.6e10,
        "Peak of one rank in FLOP/s, for every precision that the hardware file names no peak of; "
        "set over the file's (command line, experiment), for all. null = refuse those.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=1e13,
    )
    efficiency: float = key(
        0.3,
        "Assumed share of the peak that kernels reach; with num_sms, that large products do.",
        above=0,
        high=1,
    )
    memory_gb: float = key(
        4.0, "Memory of one rank, in GB (1e9 bytes).", above=0, high=1e5, unit=("bytes", 1e-9)
    )
    memory_bandwidth: float = key(
        1.0e10,
        "Memory bandwidth of one rank, in bytes/s.",
        low=_LEAST_BANDWIDTH,
        high=1e15,
        unit=_GB_S,
    )
    intra_bandwidth: float = key(
        3.0e9,
        "Link between two ranks of a node, in bytes/s per direction.",
        low=_LEAST_BANDWIDTH,
        high=1e15,
        unit=_GB_S,
    )
    intra_latency_s: float = key(
        5.0e-5, "Its latency, in seconds.", low=0, high=_LONGEST_S, unit=_MICROSECONDS
    )
    inter_bandwidth: float = key(
        1.25e8,
        "Link between ranks of two nodes, in bytes/s per direction.",
        low=_LEAST_BANDWIDTH,
        high=1e15,
        unit=_GB_S,
    )
    inter_latency_s: float = key(
        2.0e-4, "Its latency, in seconds.", low=0, high=_LONGEST_S, unit=_MICROSECONDS
    )
    gpus_per_node: int = key(64, "Ranks that share a node and its faster links.", low=1)
    unit_overhead_s: float = key(
        0.0,
        "Seconds of a unit's forward, and of each half of its backward, beside its FLOPs.",
        low=0,
        high=_LONGEST_S,
        unit=_MICROSECONDS,
    )
    stage_overhead_s: float = key(
        0.0,
        "The same for a stage, whatever lies in it.",
        low=0,
        high=_LONGEST_S,
        unit=_MICROSECONDS,
    )
    step_overhead_s: float = key(
        0.0,
        "Seconds of an optimizer step on a rank beside its weights.",
        low=0,
        high=_LONGEST_S,
        unit=_MICROSECONDS,
    )
    ring_bandwidth: float | None = key(
        None,
        "Collectives in a node, in bytes/s; null = intra_bandwidth.",
        low=_LEAST_BANDWIDTH,
        high=1e15,
        unit=_GB_S,
        example=1e9,
    )
    ring_latency_s: float | None = key(
        None,
        "Of each step of a collective; null = intra_latency_s.",
        low=0,
        high=_LONGEST_S,
        unit=_MICROSECONDS,
        example=1e-4,
    )
    lockstep_loss: float = key(
        0.0, "Share of their compute that tensor-parallel ranks lose to waiting.", low=0, high=10
    )
    peak_fp64_flops: float | None = key(
        None,
        "Peak for trainer.precision=64-true; null = peak_flops.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=1e13,
    )
    peak_fp32_flops: float | None = key(
        None,
        "Peak for trainer.precision=32-true; null = peak_flops.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=2e13,
    )
    peak_tf32_flops: float | None = key(
        None,
        "Peak for 32-true with trainer.float32_matmul_precision=high or medium; null = peak_flops.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=1.5e14,
    )
    peak_bf16_flops: float | None = key(
        None,
        "Peak for bf16-mixed and bf16-true; null = peak_flops.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=3e14,
    )
    peak_fp16_flops: float | None = key(
        None,
        "Peak for trainer.precision=16-mixed; null = peak_flops.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=3e14,
    )
    peak_fp8_flops: float | None = key(
        None,
        "Peak in fp8, which no precision computes in yet.",
        low=_LEAST_FLOPS,
        high=1e18,
        unit=_TFLOPS,
        example=2e15,
    )
    num_sms: int | None = key(
        None,
        "A GPU's multiprocessors: units take what their kernels take; null = efficiency holds for "
        "all sizes.",
        low=1,
        example=108,
    )
    bandwidth_efficiency: float = key(
        1.0, "Share of memory_bandwidth that kernels reach.", above=0, high=1
    )
    attention_efficiency: float = key(
        1.0, "num_sms: share of the peak that a fused attention core reaches.", above=0, high=1
    )
    context_gb: float = key(
        0.0,
        "Memory of one rank, in GB, that its process takes before it has a model: context, "
        "libraries.",
        low=0,
    )
    communicator_gb: float = key(
        0.0, "Memory, in GB, that the buffers of each of a rank's communicators take.", low=0
    )
    allocator_loss: float = key(
        0.0, "What an allocator reserves beyond what it hands out, as a share of that.", low=0
    )
    kernel_overhead_s: float = key(
        0.0,
        "num_sms: seconds that starting a kernel takes.",
        low=0,
        high=_LONGEST_S,
        unit=_MICROSECONDS,
    )
    message_overhead_s: float = key(
        0.0,
        "Seconds of a message between stages beside its link's latency.",
        low=0,
        high=_LONGEST_S,
        unit=_MICROSECONDS,
    )
    measured_on: str | None = key(
        None,
        "Where mode=profile has measured these figures; null = they are a datasheet's.",
        example="a processor, torch 2.13",
    )
    fit_error: float | None = key(
        None, "Relative error of these figures on what was measured.", low=0, example=0.05
    )
    cores: int | None = key(
        None,
        "CPU cores that all ranks share in predictions; null = a core, or GPU, for each.",
        low=1,
        example=2,
    )


# Keys of recomputation: which forwards keep their input only, and are run again.


@dataclass(frozen=True, slots=True)
class RecomputeConfig:
    """``recompute=``: which activations are computed again instead of being kept."""

    name: Literal["none", "full", "layer", "selective", "mario", "optimal"] = key(
        "none",
        "none; full: every forward of a stage, right before its backward; layer: every layer, one "
        "after the other, in its backward; selective: inside the layers; "
        "mario: every forward, in the time in which ranks wait; optimal: no more than the memory "
        "demands, in an order made for it.",
    )
    passes: int = key(
        NUM_PASSES,
        "mario: how many of its passes run: 1 apply-checkpoint, 2 overlap-recompute, "
        "3 remove-redundancy, 4 prepose-forward.",
        low=1,
        high=NUM_PASSES,
    )
    max_full_activations: float | None = key(
        None,
        "optimal: full activations that a rank may hold, in full-rank microbatches; null = what "
        "hardware.memory_gb has room for.",
        above=0,
        example=1,
    )
    layers: tuple[str, ...] = key(
        (),
        "selective: types of layers and what is recomputed in them (attention, norm, activation, "
        "matmul, or none), joined by +; in others all but matmul.",
        example=["Mlp:activation", "Attention:attention+norm", "Head:none"],
    )


def recompute_policy(config: RecomputeConfig) -> Recompute:
    """``recompute.*`` as the compiler's type.

    Raises:
        PlanError: A key that the policy would ignore, or a value out of range.
    """
    layers = tuple(map(_layer, config.layers))
    return Recompute(config.name, config.passes, config.max_full_activations, layers)


def _layer(entry: str) -> tuple[str, tuple[Family, ...]]:
    name, colon, families = entry.partition(":")
    if not name or not colon or not families:
        raise PlanError(
            f"recompute.layers=[{entry}]: an entry is a type of layers, a colon, and what is "
            "recomputed in them. Try recompute.layers=[Mlp:activation]."
        )
    if families == "none":
        return name, ()
    found = families.split("+")
    for family in found:
        if family not in FAMILIES:
            raise PlanError(
                f"recompute.layers=[{entry}]: {family} is none of {', '.join(FAMILIES)}, none. "
                f"Try recompute.layers=[{name}:{'+'.join(FAMILIES[1:])}]."
            )
    return name, cast(tuple[Family, ...], tuple(found))


# Keys of the planner: what it plans for, and how thoroughly it looks.


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """``planner.*``: what ``mode=plan`` and ``plan=auto`` choose for."""

    num_gpus: int | None = key(
        None,
        "tp * pp * dp; null = those of pinned degrees, where these are all or more than this "
        "machine has, else its GPUs, or its CPU cores where it has none.",
        low=1,
        high=65536,
        example=64,
    )
    global_batch_size: int | None = key(
        None,
        "Sequences per optimizer step; null = data.global_batch_size, or 128 where that is null.",
        low=1,
        high=10_000_000,
        example=128,
    )
    memory_gb: float | None = key(
        None,
        "Memory that a rank may use, in GB (1e9 bytes); null = hardware.memory_gb.",
        above=0,
        example=36.0,
    )
    level: Literal["O2", "O3"] = key(
        "O2",
        "O2: common schedules and microbatch sizes, recomputation where memory demands it; O3: all "
        "schedules, sizes and groups. Both simulate until a bound excludes the rest.",
    )
    balance_ratio: float | None = key(
        None,
        "Cuts send the least bytes as long as no stage takes more than that many times an equal "
        "share; null: the slowest stage is as fast as it can be.",
        low=1,
        high=100,
    )
    asynchronous: bool = key(
        False,
        "Also take pipedream_2bw, which trains without a flush: gradients are one update late, so "
        "it is another training. Without it, plans are of one and the same.",
    )
    top_k: int = key(5, "Plans that are listed.", low=1, high=100)
    export: ExportTarget | None = key(
        None,
        "mode=plan: write plan 1 for another framework, too, into the run's folder: flags or "
        "configuration, CSV and layout string.",
        example="torchtitan",
    )
    maximize: Literal["throughput", "sequence_length", "model_size"] = key(
        "throughput",
        "With pp, dp, tp and schedule pinned: the fastest recompute policy and microbatch size, "
        "or the longest model.sequence, or the most model.layers that fit, and at what speed.",
    )
    explain: tuple[str, ...] = key(
        (),
        "Show the best plan of one layout in detail; with tp, how its layers are cut and why.",
        example=["tp=4", "pp=8"],
    )


# Keys of ``mode=profile``: what is measured, and where it is written.


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """``mode=profile``: measures layers and links for ``costs=profiled``."""

    file: str | None = key(
        None,
        "Where the profile goes; null = profile.json in the run's folder.",
        example="profile.json",
    )
    microbatch_sizes: tuple[int, ...] = key(
        (), "Microbatch sizes to measure; [] = data.microbatch_size.", low=1, example=[1, 2, 4]
    )
    hardware: str | None = key(
        None,
        "Also writes the figures of this machine there, as an option of hardware= for plans; the "
        "folder above it is a --config-dir.",
        example="my_conf/hardware/cpu_gloo.yaml",
    )
    iterations: int = key(
        10, "Training steps per figure; fewer where they take long.", low=3, high=25
    )
