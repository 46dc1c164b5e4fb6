"""``plan=auto``: the first plan in place of what was left open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import LaunchConfig, check
from launcher.planning.no_plan import refuse
from launcher.planning.question import Question, ask, label
from launcher.planning.report import ListedPlan, candidate_config, candidate_words, list_plans
from launcher.report.summary import format_duration
from launcher.terminal import say
from strategies.costs.capacity import capacity
from strategies.errors import PlanError
from strategies.plan import Recompute
from strategies.planner.layout_search import Answer, Rejected, rank_key, search
from strategies.planner.outcome import Outcome
from strategies.planner.space import Space
from strategies.planner.tuner import POLICIES, nearest, tune
from strategies.schedules import find_schedule

if TYPE_CHECKING:
    from launcher.planning.largest_model import Reach


def planned(config: LaunchConfig, run_dir: Path) -> LaunchConfig:
    """The configuration with the planner's choice; unchanged with ``plan=manual``."""
    if config.plan != "auto":
        return config
    asked = ask(config, run_dir)
    if is_one_layout(config, asked):
        found = tune_layout(config, asked, top_k=1)
        (only,) = found.listed
        _say_choice(only.words, only.step_time_s, asked, found.answer)
        check(only.config)
        return only.config
    answer = search(asked.problem, asked.space, top_k=1)
    if not answer.plans:
        raise refuse(asked, answer)
    best = answer.plans[0]
    batch = asked.space.global_batch_size
    _say_choice(candidate_words(best.candidate, asked), best.step_time_s, asked, answer)
    chosen = candidate_config(config, best.candidate, asked.shape, batch)
    check(chosen)
    return chosen


def _say_choice(words: Sequence[str], step_time_s: float, asked: Question, answer: Answer) -> None:
    say(
        f"plan=auto: {' '.join(words)} "
        f"({label(asked)}: {format_duration(step_time_s, 's')} per step, the best of "
        f"{answer.num_candidates} candidates, {answer.search_s:.2f} s)"
    )


# ``mode=plan`` and ``plan=auto`` for one layout: the tuner is asked, or for the largest model.

_LAYOUT = ("pp", "dp", "tp", "schedule")


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """What ``mode=plan`` says about one layout: plans, compiled, and how far each policy gets."""

    answer: Answer
    listed: tuple[ListedPlan, ...]
    reaches: tuple[Reach, ...] = ()


def is_one_layout(config: LaunchConfig, asked: Question) -> bool:
    """Whether the question leaves no layout open, but only policies and microbatch sizes."""
    maximize = config.planner.maximize
    missing = [name for name in _LAYOUT if not _pins(asked, name)]
    if config.planner.explain:
        return False
    if missing and maximize != "throughput":
        here = {"pp": config.pp, "dp": config.dp, "tp": config.tp, "schedule": config.schedule.name}
        fix = " ".join(f"{name}={here[name]}" for name in missing)
        raise PlanError(
            f"planner.maximize={maximize} is an answer for one layout, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Try {fix}."
        )
    if missing:
        return False
    schedule = find_schedule(config.schedule.name)
    if not schedule.synchronous and not config.planner.asynchronous:
        raise PlanError(
            f"schedule={schedule.name} trains without a flush, with late gradients, and plans are "
            "of one and the same training unless more is asked for. Try planner.asynchronous=true, "
            "or schedule=1f1b."
        )
    return True


def tune_layout(config: LaunchConfig, asked: Question, *, top_k: int) -> LayoutAnswer:
    """The best policies and microbatch sizes of the layout, or those that get farthest."""
    if config.planner.maximize != "throughput":
        least = (asked.problem.least_size,)
        return _largest(config, replace(asked, space=_tuning_space(asked, least)), top_k)
    asked = replace(asked, space=_tuning_space(asked, _divisors(asked.space)))
    answer = tune(asked.problem, asked.space, top_k=top_k)
    if not answer.plans:
        smallest = nearest(asked.problem, asked.space)
        raise _too_small(asked, answer, smallest) if smallest else refuse(asked, answer)
    return LayoutAnswer(answer, list_plans(config, asked, answer))


def _tuning_space(asked: Question, sizes: tuple[int, ...]) -> Space:
    """All policies and the microbatch sizes given; of a profile, those that it has figures for."""
    space = asked.space
    if space.sizes is not None:
        sizes = tuple(n for n in sizes if n in space.sizes)
    return replace(space, policies=_policies(asked), sizes=sizes)


def _policies(asked: Question) -> tuple[Recompute, ...]:
    measured = asked.problem.measured
    if measured is not None and measured.selective:
        return (Recompute("selective"),)
    leaves_out = asked.space.whole_backward or measured is not None or not asked.space.selective
    return tuple(p for p in POLICIES if not (leaves_out and p.policy == "selective"))


def _divisors(space: Space) -> tuple[int, ...]:
    rows = space.global_batch_size // (space.dp or 1)
    return tuple(n for n in range(1, rows + 1) if rows % n == 0)


def _pins(asked: Question, name: str) -> bool:
    return name in asked.pinned or f"{name}.name" in asked.pinned


def _too_small(asked: Question, answer: Answer, found: Sequence[Outcome]) -> PlanError:
    def needed(outcome: Outcome) -> float:
        capacity = asked.problem.capacity(outcome.candidate.layout)
        return _rounded_up_gb(capacity.taken(outcome.peak_bytes))

    limit = asked.problem.machine.hardware.memory_gb
    least, candidate = found[0], found[0].candidate
    layout, order = candidate.layout, candidate.order
    needs = needed(least)
    others = [each for each in found if each.group.recompute.policy == "none"]
    plain = ""
    if others and candidate.recompute.policy != "none":
        fastest = min(others, key=rank_key)
        plain = (
            f" ({format_duration(fastest.step_time_s, 's')} without recomputation, which "
            f"needs {needed(fastest):g})"
        )
    pinned = asked.space.recompute
    policy = "any recompute policy" if pinned is None else f"recompute={pinned.policy}"
    return PlanError(
        f"planner.memory_gb={limit:g}: none of {answer.num_candidates} programs of "
        f"pp={layout.pp} dp={layout.dp} tp={layout.tp} schedule={order.schedule} with {policy} "
        f"fits. The smallest, recompute={candidate.recompute.policy} "
        f"data.microbatch_size={layout.microbatch_size} overlap={candidate.overlap}, needs "
        f"{needs:g} and takes {format_duration(least.step_time_s, 's')} per step{plain}. "
        f"Try planner.memory_gb={needs:g}, or a larger pp."
    )


def _rounded_up_gb(needed: float) -> float:
    """In GB, to three digits, never too little."""
    num_bytes = math.ceil(needed)
    digit: int = 10 ** max(0, len(str(num_bytes)) - 3)
    return math.ceil(num_bytes / digit) * digit / 1e9


def _largest(config: LaunchConfig, asked: Question, top_k: int) -> LayoutAnswer:
    from launcher.planning.largest_model import largest_model  # One question of many.

    found = largest_model(config, asked)
    reaches = found.reaches
    listed: list[ListedPlan] = []
    for reach in _ranked(reaches)[:top_k]:
        assert reach.outcome is not None
        assert reach.config is not None
        assert reach.asked is not None
        alone = Answer((reach.outcome,), Rejected(), 1, 1, 0.0)
        (plan,) = list_plans(reach.config, reach.asked, alone)
        words = (*plan.words, f"{found.key}={reach.value}")
        listed.append(replace(plan, words=words))
    rejected = Rejected(memory=sum(reach.outcome is None for reach in reaches))
    rejected.slower = len(reaches) - rejected.memory - len(listed)
    answer = Answer(
        tuple(plan.outcome for plan in listed),
        rejected,
        found.num_candidates,
        found.num_simulated,
        found.search_s,
    )
    if not listed:
        raise _none_fits(asked, found.least_bytes, found.key)
    return LayoutAnswer(answer, tuple(listed), reaches)


def _ranked(reaches: Sequence[Reach]) -> list[Reach]:
    def place(reach: Reach) -> tuple[float, float, int]:
        assert reach.value is not None
        assert reach.outcome is not None
        outcome = reach.outcome
        return -reach.value, outcome.step_time_s, outcome.peak_bytes

    return sorted((reach for reach in reaches if reach.outcome is not None), key=place)


def _none_fits(asked: Question, least: int | None, key: str) -> PlanError:
    limit = asked.problem.machine.hardware.memory_gb
    enough, fix = "", "Try a larger planner.memory_gb, or a larger pp."
    if least is not None:
        space = asked.space
        pinned = {"tp": space.tp, "pp": space.pp, "dp": space.dp, "ep": space.ep}
        layout = {name: degree or 1 for name, degree in pinned.items()}
        taken = capacity(asked.problem.machine.hardware, **layout).taken(least)
        needs = _rounded_up_gb(taken)
        enough = f" At least {needs:g} GB are needed there."
        fix = f"Try planner.memory_gb={needs:g}, or a larger pp."
    return PlanError(
        f"planner.memory_gb={limit:g} has no room for the smallest {key} with any recompute "
        f"policy.{enough} {fix}"
    )
