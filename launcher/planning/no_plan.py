"""Why there is no plan, and the smallest changes after which there is one: each is searched for."""

from __future__ import annotations

import math
from dataclasses import replace

from launcher.planning.question import Question, with_gpus, with_memory
from strategies.errors import PlanError
from strategies.planner.layout_search import Answer, search
from strategies.planner.problem import Candidate, Layout
from strategies.planner.space import degrees, expert_degrees
from strategies.schedules import find_schedule

_MOST_DOUBLINGS = 10
_BISECTIONS = 7


def refuse(asked: Question, answer: Answer) -> PlanError:
    space = asked.space
    late = space.schedule is not None and not find_schedule(space.schedule).synchronous
    if late and space.schedule == "pipedream":
        return PlanError(
            "schedule=pipedream updates the weights behind every microbatch, so a batch is one of "
            "them, and there is nothing to cut. Try schedule=pipedream_2bw "
            "planner.asynchronous=true, or mode=simulate."
        )
    if late and not space.asynchronous:
        return PlanError(
            f"schedule={space.schedule} trains without a flush, with late gradients, and plans are "
            "of one and the same training unless more is asked for. Try planner.asynchronous=true, "
            "or leave schedule= out."
        )
    if late and space.recompute is not None and space.recompute.policy in ("mario", "optimal"):
        return PlanError(
            f"schedule={space.schedule} with recompute={space.recompute.policy}: plans without a "
            "flush keep their order and recompute all or nothing. Try recompute=full, or leave "
            "recompute= out."
        )
    if answer.rejected.memory:
        return PlanError(_memory(asked, answer))
    found = list(degrees(space, asked.problem))
    if not found:
        return PlanError(_degrees(asked))
    if answer.rejected.tp and all(tp in answer.rejected.tp for tp, _, _ in found):
        return PlanError(answer.rejected.tp[found[0][0]])
    left = [(tp, dp) for tp, _, dp in found if tp not in answer.rejected.tp]
    usable = [dp for tp, dp in left if expert_degrees(space, asked.problem, tp, dp)]
    if not usable:
        return PlanError(_experts(asked, left))
    if answer.num_candidates == 0 and all(dp in answer.rejected.batch for dp in usable):
        return PlanError(_batch(asked, usable))
    return PlanError(
        f"schedule={space.schedule or 'any'} runs on none of the degrees of {space.num_gpus} GPUs "
        f"that are left{_pins(asked)}: its rules or its number of stages do not fit. "
        "Try without schedule= or without schedule.stages_per_rank."
    )


def describe(what: Candidate | Layout) -> str:
    if isinstance(what, Layout):
        ep = f" ep={what.ep}" if what.ep > 1 else ""
        size = what.microbatch_size
        return f"tp={what.tp} pp={what.pp} dp={what.dp}{ep} data.microbatch_size={size}"
    order = what.order
    stages = (
        f" schedule.stages_per_rank={order.stages_per_rank}" if order.stages_per_rank > 1 else ""
    )
    return (
        f"{describe(what.layout)} schedule={order.schedule}{stages} overlap={what.overlap} "
        f"recompute={what.recompute.policy}"
    )


def _memory(asked: Question, answer: Answer) -> str:
    limit = asked.problem.machine.hardware.memory_gb
    text = (
        f"None of {answer.num_candidates} plans for {asked.space.num_gpus} GPUs and "
        f"{asked.space.global_batch_size} sequences per step fits into {limit:.4g} GB per "
        f"rank{_pins(asked)}."
    )
    if answer.rejected.nearest is not None:
        needed, what = answer.rejected.nearest
        layout, at_least = what if isinstance(what, Layout) else what.layout, ""
        if isinstance(what, Layout):
            at_least = "at least "
        takes = asked.problem.capacity(layout).taken(needed)
        text += f" The nearest, {describe(what)}, needs {at_least}{takes / 1e9:.4g} GB."
    changes = [
        change
        for change in (_recompute(asked), _small_microbatches(asked), _smaller_batch(asked),
                       _more_gpus(asked), _more_memory(asked))
        if change is not None
    ]  # fmt: skip
    return f"{text} Try {', or '.join(changes)}." if changes else f"{text} Try a smaller model."


def _fits(asked: Question) -> bool:
    return bool(search(asked.problem, asked.space, top_k=1).plans)


def _recompute(asked: Question) -> str | None:
    pinned = asked.space.recompute
    if pinned is None or pinned.rewrites:
        return None
    free = replace(asked, space=replace(asked.space, recompute=None))
    return "recompute=full" if _fits(free) else None


def _small_microbatches(asked: Question) -> str | None:
    if asked.space.microbatch_size in (None, 1):
        return None
    free = replace(asked, space=replace(asked.space, microbatch_size=1, num_microbatches=None))
    return "data.microbatch_size=1" if _fits(free) else None


def _smaller_batch(asked: Question) -> str | None:
    """Fewer microbatches at once, where the schedule keeps the activations of all of them."""
    count = asked.space.global_batch_size
    space = replace(asked.space, num_microbatches=None)
    for _ in range(_MOST_DOUBLINGS):
        if count % 2:
            return None
        count //= 2
        if _fits(replace(asked, space=replace(space, global_batch_size=count))):
            return f"data.global_batch_size={count}"
    return None


def _more_gpus(asked: Question) -> str | None:
    count = asked.space.num_gpus
    for _ in range(_MOST_DOUBLINGS):
        count *= 2
        if _fits(with_gpus(asked, count)):
            return f"planner.num_gpus={count}"
    return None


def _more_memory(asked: Question) -> str | None:
    low = high = asked.problem.machine.hardware.memory_gb
    for _ in range(_MOST_DOUBLINGS):
        high *= 2
        if _fits(with_memory(asked, high)):
            break
        low = high
    else:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(with_memory(asked, middle)) else (middle, high)
    gb = math.ceil(high * 10) / 10
    return f"planner.memory_gb={gb:g}"


def _batch(asked: Question, replicas: list[int]) -> str:
    total = asked.space.global_batch_size
    size = asked.space.microbatch_size or 1
    steps = sorted({dp * size * (asked.space.num_microbatches or 1) for dp in replicas})
    nearest = min(
        (value for step in steps for value in (total // step * step, -(-total // step) * step)
         if value),
        key=lambda value: (abs(value - total), value),
    )  # fmt: skip
    return (
        f"A global batch of {total} sequences is not divisible by dp * data.microbatch_size for "
        f"any layout of {asked.space.num_gpus} GPUs{_pins(asked)} (dp is one of "
        f"{', '.join(map(str, sorted(set(replicas))))}). Try data.global_batch_size={nearest}."
    )


def _experts(asked: Question, left: list[tuple[int, int]]) -> str:
    free = replace(asked.space, ep=None, level="O3")
    known = {n for tp, dp in left for n in expert_degrees(free, asked.problem, tp, dp)}
    nearest = min(known, key=lambda n: (abs(n - (asked.space.ep or 1)), n))
    ranks = "dp" if asked.problem.expert_tp else "dp * tp"
    return (
        f"ep={asked.space.ep} divides {ranks}, the ranks that share a stage's experts, in no "
        f"layout of {asked.space.num_gpus} GPUs{_pins(replace(asked, space=free))}. "
        f"Try ep={nearest}, or without ep=."
    )


def _degrees(asked: Question) -> str:
    space, problem = asked.space, asked.problem
    node = asked.config.hardware.gpus_per_node
    text = (
        f"{space.num_gpus} GPUs are no product of degrees{_pins(asked)}: tp is at most "
        f"{node} (hardware.gpus_per_node), pp at most {problem.num_units} (the units of the model)."
    )
    fixed = math.prod(n for n in (space.tp, space.pp, space.dp) if n is not None)
    nearest = max(fixed, space.num_gpus // fixed * fixed)
    if nearest != space.num_gpus and fixed > 1:
        return f"{text} Try planner.num_gpus={nearest}."
    return f"{text} Try without tp=, pp= or dp=."


def _pins(asked: Question) -> str:
    space = asked.space
    pairs = [("tp", space.tp), ("pp", space.pp), ("dp", space.dp), ("ep", space.ep),
             ("schedule", space.schedule)]  # fmt: skip
    found = [f"{name}={value}" for name, value in pairs if value is not None]
    return f" with {' '.join(found)}" if found else ""
