"""``PipelineStrategy.describe``: the stages of a module, without ranks and without training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from strategies.compiler import compile_plan
from strategies.plan import Options, Plan
from strategies.planner.stage_layers import stage_layers


def list_stages(
    module: pl.LightningModule, batch: Any, rows: int, plan: Plan, options: Options
) -> str:
    """A line per stage, in the order of ranks; ``rows``: of the batch."""
    from strategies.tracing.trace import trace_model  # with torch's operator tables: half a second

    placement = compile_plan(plan).train.placement
    trace = trace_model(module, [(rows, batch)], chain=options.pipeline_layers)
    counts = options.units_per_stage
    lines = stage_layers(trace, placement.num_stages, counts, rows=rows)
    return "\n".join(
        f"rank {rank}: stage {stage}: {lines[stage]}"
        for rank in range(placement.num_ranks)
        for stage in placement.stages_of(rank)
    )
