"""Traces the model in a process of its own: ``python -m launcher.rank.trace_job FOLDER``.

Builds the model without its weights, takes a batch from its data, and leaves ``model_trace.json``,
or ``trace_problem.json`` with what the user can do about it. A Hugging Face model may be built
only, which finds all that its ranks would refuse.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch

from launcher.config import LaunchConfig, from_dict
from launcher.config.pipeline import PlannerConfig, ScheduleConfig
from launcher.planning.model_trace import (
    BY_HAND,
    PROBLEM,
    TASK,
    TRACE,
    WRONG,
    dump_wrong,
    operators_file,
)
from launcher.rank.jobs import build_data, build_model
from launcher.rank.worker import die_with
from launcher.resolve import Run, resolve
from launcher.workloads.hf.hf_model import HfLanguageModel
from strategies.costs.trace_file import TracedModel, dump_trace
from strategies.errors import ModelError, PipelineError
from strategies.models.tensor_parallel.layer_plan import declared_plan
from strategies.models.tensor_parallel.sharding import Sharding
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.planner.cut import balance, by_counts
from strategies.planner.shardings.operators import dump_graph
from strategies.runtime.lightning.data_order import first_batch
from strategies.runtime.step.microbatch import count_rows, split_batch
from strategies.tracing.operator_trace import styles_by_hand, trace_operators
from strategies.tracing.trace import empty_weights, trace_model

_ROWS = 4


def main(folder: Path) -> int:
    die_with(int(os.environ["FOLDPIPE_PARENT"]))
    try:
        task = json.loads((folder / TASK).read_text())
        config = from_dict(task["config"])
        if task["stages"] is not None:
            build(config, **task["stages"])
        else:
            subject = _subject(config)
            if task["trace"]:
                (folder / TRACE).write_text(dump_trace(_trace(subject)))
            if task["degrees"]:
                _write_operators(folder, subject, task["degrees"])
    except PipelineError as error:
        _write_problem(folder, type(error).__name__, str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())[:300]
        _write_problem(
            folder,
            "ModelError",
            f"the model could not be built for a trace: {type(error).__name__}: {reason} "
            f"({last.filename}:{last.lineno}). A trace builds it without weights. Try mode=train "
            "with pp= and schedule= by hand.",
        )
        return 1
    return 0


def build(config: LaunchConfig, *, num_stages: int, units_per_stage: Sequence[int] | None) -> None:
    """Builds a Hugging Face model and cuts it as a rank does before it has weights.

    Raises:
        ModelError: It cannot be cut, or its files do not fit.
        PlanError: It has another number of units.
    """
    model = build_model(resolve(_alone(config)))
    assert isinstance(model, HfLanguageModel)
    costs = model.unit_costs()
    if units_per_stage is None:
        balance(costs, num_stages)
    else:
        by_counts(units_per_stage, len(costs), num_stages)
    model.check_weights()
    plan = declared_plan(model, config.tp) if config.tp > 1 else None
    if plan is not None:
        members = SimpleNamespace(rank=0, size=config.tp, sequence=False)
        Sharding(model, plan, cast(TensorRanks, members))


class _Subject(NamedTuple):
    """The model without weights, a batch of a few rows, and the types in which steps run."""

    module: pl.LightningModule
    batch: object
    autocast: Callable[[], AbstractContextManager[object]]


def trace(config: LaunchConfig) -> TracedModel:
    return _trace(_subject(config))


def _trace(subject: _Subject) -> TracedModel:
    batch = subject.batch
    rows = count_rows(batch)
    halves = [(rows // 2, split_batch(batch, 2)[-1].data)] if rows > 1 else []
    return trace_model(subject.module, [*halves, (rows, batch)], autocast=subject.autocast)


def _write_operators(folder: Path, subject: _Subject, degrees: Sequence[int]) -> None:
    """One graph per number of ranks, and the plan that the model brings; or why there is none."""
    module, batch, autocast = subject
    try:
        by_hand = styles_by_hand(module)  # where that is refused, so would the ranks be
        graphs = trace_operators(module, batch, count_rows(batch), degrees, autocast=autocast)
    except ModelError as error:
        (folder / WRONG).write_text(dump_wrong(str(error)))
        return
    for graph in graphs:
        (folder / operators_file(graph.tp)).write_text(dump_graph(graph))
    (folder / BY_HAND).write_text(json.dumps(by_hand))


def _subject(config: LaunchConfig) -> _Subject:
    run = resolve(_alone(config))
    pl.seed_everything(config.seed, workers=True, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision=cast(Any, config.trainer.precision),
    )
    plugin = trainer.precision_plugin
    with empty_weights():
        module = build_model(run)
        module.trainer = trainer
        module.configure_model()
    declare: Any = getattr(module, "declare_experts", None)
    if declare is not None:
        with suppress(ModelError):  # It has none, or none that could be shared.
            declare()
    if not module.automatic_optimization:
        raise ModelError(
            f"model={config.model.name} uses manual optimization: its step is several passes, "
            "whose costs cannot be traced.",
            fix="Say the plan yourself (plan=manual, costs=uniform).",
        )
    module = cast(pl.LightningModule, plugin.convert_module(module))
    module.train()
    batch = plugin.convert_input(_batch(run, trainer))
    return _Subject(module, batch, plugin.forward_context)


def _alone(config: LaunchConfig) -> LaunchConfig:
    """The same model and data on one rank: nothing is to be decided here."""
    return replace(
        config,
        mode="train",
        plan="manual",
        planner=PlannerConfig(),
        pp=1,
        tp=1,
        dp=1,
        ep=1,
        expert_tp=False,
        sequence_parallel=False,
        num_microbatches=1,
        overlap=replace(config.overlap, exchange=False),
        data=replace(config.data, global_batch_size=_ROWS, microbatch_size=_ROWS, num_workers=0),
        schedule=ScheduleConfig(),
        recompute=replace(config.recompute, name="none", max_full_activations=None),
    )


def _batch(run: Run, trainer: pl.Trainer) -> object:
    if not run.own_data:
        tokens = torch.randint(run.shape.vocab, (_ROWS, run.shape.sequence + 1))
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    data = build_data(run)
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    loader: Any = data.train_dataloader()
    while isinstance(loader, list | tuple):
        loader = loader[0]
    batch: Any = first_batch(loader)
    rows = count_rows(batch)
    # Whatever the loader's own size: a few rows are enough.
    return split_batch(batch, max(1, rows // _ROWS))[0].data


def _write_problem(folder: Path, kind: str, message: str) -> None:
    (folder / PROBLEM).write_text(json.dumps({"kind": kind, "message": message}))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
