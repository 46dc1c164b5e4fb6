"""``mode=plan`` and ``mode=simulate``: answers for which nothing is started, torch not imported.

A plan is the best degrees, stage cut and schedule, and why the others lost.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.ranks import failure_recorded, tell_size
from launcher.config import LaunchConfig
from launcher.config.pipeline import ASSUMED, QUICK
from launcher.planning.no_plan import refuse
from launcher.planning.plan_auto import is_one_layout, planned, tune_layout
from launcher.planning.question import Question, ask, calibration
from launcher.planning.report import (
    ListedPlan,
    answer_mapping,
    command_line,
    explained,
    list_plans,
    long_mapping,
    pinned_space,
)
from launcher.report.ascii import draw
from launcher.report.html import Panel, write_timeline_html
from launcher.report.plan_page import plans_html
from launcher.report.plan_table import (
    memory_bars,
    plan_table,
    reach_mapping,
    reaches_text,
    refusal_mapping,
    refusals_text,
    refused,
)
from launcher.report.predicted import (
    memory_margin,
    memory_note,
    predict,
    predicted_mapping,
    run_mapping,
    write_pictures,
)
from launcher.report.result import metrics_mapping, write_result
from launcher.report.summary import print_summary
from launcher.resolve import resolve
from launcher.terminal import say, terminal_width
from launcher.workloads.traced_shape import TracedShape
from strategies.compiler import no_collection
from strategies.planner.layout_search import Answer, search
from strategies.planner.problem import Layout
from strategies.planner.space import leaves_made_out

if TYPE_CHECKING:
    from launcher.planning.tensor_plan import TensorPlan

_LARGE = 10**9  # parameters that nobody trains on a laptop
_LAPTOPS = (ASSUMED, QUICK)
_DEFAULT = "(the default; hardware= names another) "


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Searches, compiles what is listed, and says what to type."""
    with no_collection():
        code = _answer(config, run_dir)
        gc.freeze()  # The process is about to end; walking all that was found takes seconds.
    return code


def _answer(config: LaunchConfig, run_dir: Path) -> int:
    asked = ask(config, run_dir)
    parameters = asked.shape.num_parameters or 0
    if config.hardware.name in _LAPTOPS and parameters > _LARGE:
        say(
            f"planning {parameters / 1e9:.3g} billion parameters for hardware="
            f"{config.hardware.name} {_DEFAULT.strip()}: Ctrl-C, and try hardware=a100_80g or "
            "h100, if GPUs are meant"
        )
    if is_one_layout(config, asked):
        return _tune(config, asked, run_dir)
    best = None
    if config.planner.explain:
        best = search(asked.problem, asked.space, top_k=1)
        asked = replace(asked, space=pinned_space(asked.space, config.planner.explain))
    answer = search(asked.problem, asked.space, top_k=config.planner.top_k)
    useless = None
    if not answer.plans:
        useless = None if best is None else _useless(config, best, asked, run_dir)
        if best is None or useless is None:
            raise refuse(asked, answer)
        answer = best
    listed = list_plans(config, asked, answer, in_detail=bool(config.planner.explain))
    mapping = answer_mapping(asked, answer, listed)
    first = listed[0]
    shardings = useless or _shardings(config, first, asked, run_dir)
    if shardings is not None:
        mapping["tensor_plan"] = shardings.to_json()
    exported = _export(config, first, run_dir, mapping)
    _write(run_dir, asked, first, mapping)
    _say_plans(config, asked, mapping)
    if best is not None and best.plans:
        say(explained(first, best.plans[0]))
    if shardings is not None:
        from launcher.planning.tensor_plan import tensor_plan_text

        say(tensor_plan_text(shardings))
    say(_bars(first, asked))
    found = mapping["rejected"]
    assert isinstance(found, dict)
    say(refused(found))
    left_out = leaves_made_out(asked.space, first.outcome.candidate.layout)
    if left_out is not None:
        say(left_out)
    if exported:
        say(exported)
    _say_end(config, asked, answer, first, run_dir)
    return 0


def _shardings(
    config: LaunchConfig, first: ListedPlan, asked: Question, run_dir: Path
) -> TensorPlan | None:
    """What is found for the ranks that share matrices, where that is asked for."""
    layout = first.outcome.candidate.layout
    if layout.tp == 1 or not any(word.startswith("tp") for word in config.planner.explain):
        return None
    found = _explained_shardings(config, layout, layout.tp, run_dir)
    group = first.outcome.group
    if group.recompute.policy in ("selective", "layer"):
        return found  # What backwards compute again is in the table's figures.
    table, listed = group.table, isinstance(asked.shape, TracedShape)
    return replace(found, planned_s=sum(table.forward) + sum(table.backward), listed=listed)


def _useless(
    config: LaunchConfig, best: Answer, asked: Question, run_dir: Path
) -> TensorPlan | None:
    """Of a degree over which nothing is worth cutting: what there is, layer by layer."""
    tp = asked.space.tp
    if tp is None or tp < 2 or not isinstance(asked.shape, TracedShape) or not best.plans:
        return None
    found = _explained_shardings(config, best.plans[0].candidate.layout, tp, run_dir)
    return None if found.plan.worth else found


def _explained_shardings(
    config: LaunchConfig, layout: Layout, tp: int, run_dir: Path
) -> TensorPlan:
    # Few questions need these: a plan is asked for in a second, and most of it is imports.
    from launcher.planning.tensor_plan import tensor_plan

    return tensor_plan(
        config,
        run_dir,
        tp,
        rows=layout.microbatch_size,
        num_microbatches=layout.num_microbatches,
    )


def _tune(config: LaunchConfig, asked: Question, run_dir: Path) -> int:
    found = tune_layout(config, asked, top_k=config.planner.top_k)
    first = found.listed[0]
    limit = asked.problem.room(first.outcome.candidate.layout)
    mapping = answer_mapping(asked, found.answer, found.listed)
    rejected = mapping["rejected"]
    assert isinstance(rejected, dict)
    rejected["settings"] = [refusal_mapping(refusal) for refusal in found.answer.refusals]
    mapping |= {
        "maximize": config.planner.maximize,
        "reaches": [reach_mapping(reach) for reach in found.reaches],
    }
    exported = _export(config, first, run_dir, mapping)
    _write(run_dir, asked, first, mapping)
    _say_plans(config, asked, mapping)
    say(_bars(first, asked))
    if found.reaches:
        key = first.words[-1].partition("=")[0]
        say(reaches_text(found.reaches, key, limit))
    else:
        say(refusals_text(found.answer.refusals, found.answer.plans[0].step_time_s, limit))
    if exported:
        say(exported)
    _say_end(config, asked, found.answer, first, run_dir)
    return 0


def _export(
    config: LaunchConfig, first: ListedPlan, run_dir: Path, mapping: dict[str, object]
) -> str:
    """Plan 1 for another framework, where asked for; what there is to say of it."""
    target = config.planner.export
    if target is None:
        return ""
    from launcher.planning.foreign_files import export_plan  # It reads what others write.

    exported = export_plan(target, first)
    exported.write(run_dir)
    mapping["export"] = {"target": target, "files": sorted(exported.files)}
    files = ", ".join(str(run_dir / name) for name in sorted(exported.files))
    return "\n".join([f"plan 1 for {target}: {files}", *exported.notes])


def _write(run_dir: Path, asked: Question, first: ListedPlan, mapping: dict[str, object]) -> None:
    plans = mapping["plans"]
    assert isinstance(plans, list)
    table = plans_html(plans, limit_bytes=asked.problem.room(first.outcome.candidate.layout))
    known = first.compiled
    if known is None:
        result = long_mapping(asked, first)
        write_timeline_html(run_dir / "timeline.html", (), title="plans", table=table)
    else:
        drawn = Panel("plan 1, predicted", known.timeline, known.metrics)
        result = run_mapping(known.run) | metrics_mapping(known.metrics)
        with failure_recorded(run_dir / "result.json", result | {"mode": "plan"} | mapping):
            write_pictures(run_dir, [drawn], known.run, table=table)
    write_result(run_dir / "result.json", result | {"mode": "plan"} | mapping)


def _say_plans(config: LaunchConfig, asked: Question, mapping: dict[str, object]) -> None:
    machine = asked.problem.machine
    reached = config.planner.maximize
    say(
        f"{config.model.name} on {asked.space.num_gpus} x {machine.hardware.name} "
        f"{_DEFAULT if machine.hardware.name in _LAPTOPS else ''}with "
        f"{machine.hardware.memory_gb:g} GB each, {asked.space.global_batch_size} "
        f"{'sequences' if reached == 'sequence_length' else _rows(asked)} per step, "
        f"{config.trainer.precision}"
    )
    say(calibration(asked))
    plans = mapping["plans"]
    assert isinstance(plans, list)
    say(plan_table(plans, room=terminal_width() if sys.stdout.isatty() else None))
    order = "fastest first" if reached == "throughput" else f"largest {reached} first, then fastest"
    say(f"sorted: {order}")
    if any(not plan["synchronous"] for plan in plans):
        say("without a flush gradients are one update late: pipedream_2bw is another training")


def _say_end(
    config: LaunchConfig, asked: Question, answer: Answer, first: ListedPlan, run_dir: Path
) -> None:
    say(
        f"{answer.num_candidates} candidates, {answer.num_simulated} simulated, "
        f"{answer.search_s:.2f} s"
    )
    command = command_line(run_dir, first)
    say(f"plan 1: {command}")
    if first.compiled is None:
        say(
            f"plan 1 has {first.num_instructions:,} instructions and is not drawn; with "
            "mode=simulate behind it, that command draws it"
        )
    say(f"files: {run_dir}")


def _rows(asked: Question) -> str:
    """What a batch is made of: sequences, or whatever another package's data has."""
    tokens = asked.shape.sequence
    return f"sequences of {tokens} tokens" if tokens > 1 else "samples"


def _bars(plan: ListedPlan, asked: Question) -> str:
    """What each rank holds of what tensors may take, and what a card has left then."""
    capacity = asked.problem.capacity(plan.outcome.candidate.layout)
    placement, table = plan.outcome.group.placement, plan.outcome.group.table
    assert table.state_bytes is not None
    state = [
        sum(table.state_bytes[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    ]
    moving = [held - fixed for held, fixed in zip(plan.memory, state, strict=True)]
    bars = memory_bars(state, moving, capacity.room)
    if capacity.room == capacity.total:
        return bars
    return f"{bars}\nplan 1 needs {capacity.margin(max(plan.memory))}"


def simulate(config: LaunchConfig, run_dir: Path) -> int:
    config = planned(config, run_dir)
    tell_size(config)
    resolved = resolve(config)
    timeline, metrics = predict(resolved)
    panel = Panel("predicted", timeline, metrics)
    result = predicted_mapping(resolved, metrics)
    with failure_recorded(run_dir / "result.json", result):
        write_pictures(run_dir, [panel], resolved)
    write_result(run_dir / "result.json", result)
    say(draw(timeline, width=terminal_width()))
    print_summary(result)
    for note in resolved.notes:
        say(note)
    if (short := memory_note(resolved)) is not None:
        say(f"it {short}")
    if (margin := memory_margin(resolved)) is not None:
        say(margin)
    say(f"files: {run_dir}")
    return 0
