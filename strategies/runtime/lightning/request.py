"""What people type into ``PipelineStrategy(...)``, as a plan and options, checked where it stands.

Each keyword is a field of one of the two, of that name and meaning, and is held against that
field's type; what several of them come to together is the schedule's rule. A strategy is made
before anything is started, so all of it is told there, and not by every rank in the midst of a fit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from strategies.compiler import schedule_of
from strategies.costs.table import Costs
from strategies.errors import PlanError
from strategies.keyword_types import check_keyword, example
from strategies.plan import (
    Backend,
    CheckpointFormat,
    GradientType,
    LossOver,
    OnNan,
    Options,
    Overlap,
    Plan,
    Policy,
    Recompute,
    ScheduleFile,
    read_schedule_file,
)
from strategies.rules import check
from strategies.schedules.schedule import parse_group


class Keywords(TypedDict, total=False):
    """What people type: the fields of ``Plan`` and ``Options``, in one list.

    Defaults are theirs; ``num_microbatches``, ``group``, ``file`` and ``recompute`` may be said
    more shortly than a plan says them.
    """

    dp: int | Literal["auto"]
    tp: int
    ep: int
    expert_tp: bool
    sequence_parallel: bool
    schedule: str
    num_microbatches: int | None
    loss_over: LossOver
    stages_per_rank: int | None
    group: int | Literal["auto"] | None
    split_backward: bool
    vertical_sync: bool
    error_feedback: float
    recompute: Recompute | Policy
    costs: Costs | None
    memory_bytes: int | None
    file: str | Path | ScheduleFile | None
    units_per_stage: tuple[int, ...] | None
    overlap: Overlap
    pairs: bool
    bucket_mb: float
    buckets: int | tuple[int, ...] | None
    grad_dtype: GradientType
    sum_dtype: GradientType
    backend: Backend
    timeout_s: float
    seed: int | None
    check_batches: bool
    pipeline_layers: str | None
    async_save: bool
    compile: bool
    on_nan: OnNan
    checkpoints: CheckpointFormat
    whole_after: bool | Literal["auto"]
    post_validation: bool | Literal["auto"]
    synchronous_steps: int


# What a number must be at least; those that are not here may be any.
_LEAST: dict[str, float] = {
    "pp": 1, "dp": 1, "tp": 1, "ep": 1, "num_microbatches": 1, "stages_per_rank": 1, "group": 1,
    "memory_bytes": 1, "seed": 0, "buckets": 0, "units_per_stage": 0, "synchronous_steps": 0,
}  # fmt: skip
_MOST = {
    "pp": 65536, "dp": 65536, "tp": 65536, "ep": 65536, "num_microbatches": 1_000_000,
    "seed": 2**32 - 1,
}  # fmt: skip
_ABOVE_ZERO = ("bucket_mb", "timeout_s")


def plan_and_options(words: Mapping[str, Any]) -> tuple[Plan, Options]:
    """What people have typed.

    Raises:
        KeywordError: A keyword that does not exist; a TypeError, too.
        PlanError: A value that cannot be meant, or keywords that do not go together.
    """
    for name, value in words.items():
        if name != "pp" and name not in Keywords.__annotations__:
            raise _unknown(name)
        _check(name, value)
    words = {n: tuple(v) if isinstance(v, list) else v for n, v in words.items()}
    beside = {entry.name for entry in fields(Options)}
    options = Options(**{name: value for name, value in words.items() if name in beside})
    given = {name: value for name, value in words.items() if name not in beside}
    if isinstance(given.get("file"), str | Path):
        given["file"] = read_schedule_file(str(given["file"]))
    if isinstance(given.get("recompute"), str):
        given["recompute"] = Recompute(given["recompute"])
    count, group = given.pop("num_microbatches", None), given.pop("group", None)
    plan = Plan(**given)
    found = schedule_of(plan)
    if count is None:
        count = found.default_num_microbatches(plan.pp)
    plan = replace(plan, num_microbatches=count, group=parse_group(group, found))
    _check_together(plan, options)
    return plan, options


def check_request(plan: object, options: object) -> tuple[Plan, Options]:
    """A plan and options that were made by hand, held against the same rules.

    Raises:
        PlanError: As ``plan_and_options``.
    """
    for name, value, kind in (("plan", plan, Plan), ("options", options, Options)):
        if not isinstance(value, kind):
            raise PlanError(
                f"PipelineStrategy({name}={value!r:.60}): expected a {kind.__name__}. "
                f"Try {name}=strategies.plan.{kind.__name__}(...), or keywords alone."
            )
        for entry in fields(kind):
            if entry.name in _LEAST or entry.name in _ABOVE_ZERO:
                given = getattr(value, entry.name)
                if given != entry.default:
                    _check(entry.name, given)
    assert isinstance(plan, Plan)
    assert isinstance(options, Options)
    _check_together(plan, options)
    return plan, options


class KeywordError(PlanError, TypeError):
    """A keyword that ``PipelineStrategy`` does not take."""


# What other pipelines call theirs, and what Lightning's Trainer takes itself.
_OTHERS = {
    "stages num_stages n_stages pipeline_size num_pipeline_stages partitions pp_size pp_degree "
    "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size": "pp=4",
    "tp_size tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size": "tp=2",
    "dp_size data_parallel_size data_parallel_degree replicas": "dp=2",
    "zero zero_stage": "overlap='zero1'",
    "chunks microbatches micro_batches n_microbatches num_micro_batches num_chunks":
        "num_microbatches=8",
    "virtual_stages interleave num_model_chunks vpp": "stages_per_rank=2",
    "balance partition layers_per_stage": "units_per_stage=(4, 3, 3, 4)",
    "checkpoint activation_checkpointing gradient_checkpointing": "recompute='full'",
    "devices num_devices gpus accelerator num_nodes precision max_epochs max_steps logger "
    "callbacks gradient_clip_val accumulate_grad_batches": "Trainer({name}=...), which takes it",
    "microbatch_size batch_size": "a DataLoader with that batch_size, and num_microbatches=8",
}  # fmt: skip


def _unknown(name: str) -> KeywordError:
    known = ["pp", "plan", "options", "metadata", "configuration", *Keywords.__annotations__]
    near = get_close_matches(name.lower(), known, n=1)
    meant = next((ours for names, ours in _OTHERS.items() if name in names.split()), "")
    fix = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."
    if meant:
        fix = f"Try {meant.format(name=name)}."
    return KeywordError(f"PipelineStrategy got an unexpected keyword argument {name!r}. {fix}")


def _check_together(plan: Plan, options: Options) -> None:
    schedule = schedule_of(plan)
    if schedule.name == "pipedream_2bw":
        # How many batches make an update the Trainer says: checked when training begins.
        plan = replace(plan, accumulation=max(plan.accumulation, plan.pp))
    check(plan, options)
    stages = schedule.place(schedule.resolve(plan)).num_stages
    counts = options.units_per_stage
    if counts is not None and len(counts) != stages:
        raise PlanError(
            f"units_per_stage={counts} has {len(counts)} counts, but there are {stages} stages "
            f"({plan.schedule} on pp={plan.pp}). Give one count per stage, or leave it out."
        )
    if isinstance(plan.buckets, tuple) and len(plan.buckets) != stages:
        raise PlanError(
            f"buckets={plan.buckets} has {len(plan.buckets)} numbers, but there are {stages} "
            f"stages ({plan.schedule} on pp={plan.pp}). Give one per stage, or leave it out."
        )


def _check(name: str, value: object) -> None:
    if name in ("recompute", "overlap") and isinstance(value, str):
        return  # Their own types know all names.
    hint, default = _known()[name]
    shown = f"PipelineStrategy({name}={value!r:.60})"
    check_keyword(name, value, hint, default, shown)
    works = f"Try {name}={example(name, default)}."
    if value == "":
        raise PlanError(f"{shown} is empty. {works}")
    numbers = value if isinstance(value, tuple | list) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if name in _LEAST and number < _LEAST[name]:
            raise PlanError(f"{shown}: {name} is at least {_LEAST[name]:g}. {works}")
        if name in _MOST and number > _MOST[name]:
            raise PlanError(f"{shown:.120}: {name} is at most {_MOST[name]}. {works}")
        if name in _ABOVE_ZERO and number <= 0:
            raise PlanError(f"{shown}: {name} is above 0. {works}")


@functools.cache
def _known() -> dict[str, tuple[Any, Any]]:
    """Each keyword's type and default."""
    defaults = {entry.name: entry.default for kind in (Plan, Options) for entry in fields(kind)}
    hints = get_type_hints(Keywords) | {"pp": int}
    return {name: (hint, defaults[name]) for name, hint in hints.items()}
