"""Which plan of tensor shardings a module gets that says nothing about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from strategies.costs.hardware import ElementSizes, Hardware, NumberFormat
from strategies.errors import PipelineError
from strategies.models.tensor_parallel.layer_plan import plan_by_sizes
from strategies.runtime.step.microbatch import count_rows
from strategies.sharding_plan import ShardingPlan

# A script names no hardware. Orders of magnitude decide: what a message takes beside a product.
_GPU = Hardware(
    name="a GPU",
    peak_flops=1.56e14,
    efficiency=0.5,
    memory_gb=80.0,
    memory_bandwidth=2.0e12,
    intra_bandwidth=3.0e11,
    intra_latency_s=5.0e-6,
    inter_bandwidth=2.5e10,
    inter_latency_s=1.0e-5,
    gpus_per_node=8,
)
_CORE = Hardware(
    name="a core",
    peak_flops=9.6e10,
    efficiency=0.9,
    memory_gb=8.0,
    memory_bandwidth=1.8e10,
    intra_bandwidth=2.4e9,
    intra_latency_s=1.1e-4,
    inter_bandwidth=1.25e8,
    inter_latency_s=2.0e-4,
    gpus_per_node=64,
)
_FORMATS: dict[torch.dtype, NumberFormat] = {
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def chosen_plan(
    module: nn.Module,
    batch: Any,
    tp: int,
    *,
    device: torch.device,
    costs: Any,
    num_microbatches: int,
) -> ShardingPlan:
    """The best plan on this machine; the one that divides most, where none is faster than tp=1.

    Who asks for tp=2 may want the memory, so that is done and said.

    Args:
        module: Whole, with its weights.
        batch: A microbatch.
        tp: Ranks that share.
        device: Where they compute.
        costs: Of the plan of the run; those with ``hardware`` say what messages take.
        num_microbatches: Of a step.
    """
    # Needed by nobody else on a rank, and heavy.
    from strategies.tracing.operator_trace import find_shardings

    hardware = getattr(costs, "hardware", None)
    if not isinstance(hardware, Hardware):
        hardware = _GPU if device.type == "cuda" else _CORE
    kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
    kind = kinds[0] if kinds else torch.float32
    number_format = _FORMATS.get(kind, "fp32")
    if number_format not in hardware.named_peaks() and hardware.peak_flops is None:
        number_format = next(iter(hardware.named_peaks()))

    def find(machine: Hardware) -> ShardingPlan:
        return find_shardings(
            module,
            batch,
            count_rows(batch),
            tp,
            machine,
            sizes=ElementSizes.all(kind.itemsize),
            number_format=number_format,
            num_microbatches=num_microbatches,
        )

    name = type(module).__name__
    try:
        plan = find(hardware)
        if plan.worth:
            return plan
        rank_zero_info(
            f"tp={tp}: at this size no layer of {name} is faster cut over ranks, so tp=1 is as "
            "good; its weights are divided all the same."
        )
        plan = find(_with_free_messages(hardware))
        return plan if plan.worth else plan_by_sizes(module, tp)
    except PipelineError as error:
        rank_zero_info(
            f"tp={tp}: the operators of {name} cannot be looked at ({error}); its layers are "
            "divided in pairs, by their sizes."
        )
        return plan_by_sizes(module, tp)


def _with_free_messages(hardware: Hardware) -> Hardware:
    return replace(
        hardware,
        intra_bandwidth=1e15,
        inter_bandwidth=1e15,
        ring_bandwidth=None,
        intra_latency_s=0.0,
        inter_latency_s=0.0,
        ring_latency_s=None,
        lockstep_loss=0.0,
    )
