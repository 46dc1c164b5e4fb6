"""``planner.maximize=sequence_length|model_size``: how far each recompute policy gets in a layout.

Recomputation frees memory; here it is spent on longer sequences or on more layers. Per policy the
largest value whose verified program fits is searched for, and then the fastest way to run it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import lcm

from launcher.config import LaunchConfig
from launcher.planning.question import Question, question
from strategies.compiler import no_collection
from strategies.errors import PipelineError, PlanError
from strategies.plan import Recompute
from strategies.planner.group import Group
from strategies.planner.layout_search import rank_key
from strategies.planner.outcome import Outcome
from strategies.planner.problem import Order
from strategies.planner.tuner import candidates, fitted, longest

# A sequence is found to a few percent: in steps of 1/32 to 1/64 of the one that was asked.
_SHARE_BITS = 5
_MOST = {"model.sequence": 2**24, "model.layers": 100_000}


@dataclass(frozen=True, slots=True)
class Reach:
    """How far one policy gets.

    Attributes:
        value: The largest that fits; None if none does.
        step: Of the values that were tried.
        beyond_bytes: What the next value needs at least; None where the model allows no more, or
            where no order was found.
    """

    recompute: Recompute
    value: int | None
    step: int
    outcome: Outcome | None
    config: LaunchConfig | None
    asked: Question | None
    beyond_bytes: int | None


@dataclass(frozen=True, slots=True)
class Reaches:
    """How far all policies get.

    Attributes:
        key: What was varied.
        least_bytes: Where nothing fits, what the smallest value needs at least.
    """

    key: str
    reaches: tuple[Reach, ...]
    num_candidates: int
    num_simulated: int
    search_s: float
    least_bytes: int | None


def largest_model(config: LaunchConfig, asked: Question) -> Reaches:
    """The longest sequence, or the deepest model, under each policy; the own value comes first."""
    key = "model.sequence" if config.planner.maximize == "sequence_length" else "model.layers"
    if key == "model.layers":
        _check_layers(config)
    elif config.costs.name == "profiled":
        raise PlanError(
            "planner.maximize=sequence_length varies model.sequence, and a profile is of one "
            "sequence length. Try costs=analytic, or planner.maximize=model_size."
        )
    began = time.perf_counter()
    search = _Search(config, asked, key)
    with no_collection():
        reaches = search.run()
    fitting = any(reach.outcome is not None for reach in reaches)
    return Reaches(
        key,
        reaches,
        len(search.tried),
        search.num_simulated,
        time.perf_counter() - began,
        None if fitting else search.least_bytes,
    )


def _with_value(config: LaunchConfig, key: str, value: int) -> LaunchConfig:
    if key == "model.sequence":
        return replace(config, model=replace(config.model, sequence=value))
    return replace(config, model=replace(config.model, layers=value))


def _check_layers(config: LaunchConfig) -> None:
    if config.model.name == "hf":
        raise PlanError(
            "planner.maximize=model_size varies model.layers, and model=hf takes its layers from "
            "config.json. Try planner.maximize=sequence_length, or a built-in model of its sizes."
        )
    for name in ("layers_per_stage", "units_per_stage"):
        if getattr(config.schedule, name) is not None:
            raise PlanError(
                f"planner.maximize=model_size varies model.layers, and schedule.{name} cuts a "
                f"fixed number of them. Try without schedule.{name}."
            )


@dataclass(slots=True)
class _Trial:
    """One value under one policy."""

    outcome: Outcome | None
    needed_bytes: int | None


@dataclass(slots=True)
class _Search:
    config: LaunchConfig
    asked: Question
    key: str
    num_simulated: int = 0
    tried: dict[tuple[int, Recompute], _Trial] = field(default_factory=dict)
    questions: dict[int, Question | None] = field(default_factory=dict)

    @property
    def own(self) -> int:
        model = self.config.model
        return model.sequence if self.key == "model.sequence" else model.layers

    @property
    def least_bytes(self) -> int | None:
        needed = [t.needed_bytes for t in self.tried.values() if t.needed_bytes is not None]
        return min(needed, default=None)

    def run(self) -> tuple[Reach, ...]:
        step, least = 1, 1
        if self.key == "model.sequence":
            step, least = max(1, 2 ** (self.own.bit_length() - 1 - _SHARE_BITS)), 2
            if self.config.sequence_parallel:
                step = lcm(step, self.config.tp)  # Ranks share a sequence evenly.
        found: dict[Recompute, Reach] = {}
        start = self.own
        # Policies that do not adapt come first; how far they get is where the others begin.
        policies = self.asked.space.recomputes
        for policy in sorted(policies, key=lambda p: p.policy in ("mario", "optimal")):

            def fits(value: int, policy: Recompute = policy) -> bool:
                return self.trial(value, policy).outcome is not None

            value = longest(fits, start=start, step=step, least=least, most=_MOST[self.key])
            found[policy] = self.reach(policy, value, step)
            if value is not None and policy.rewrites:
                start = value
        return tuple(found[policy] for policy in policies)

    def reach(self, policy: Recompute, value: int | None, step: int) -> Reach:
        if value is None:
            needed = [t.needed_bytes for (_, p), t in self.tried.items() if p == policy]
            known = [amount for amount in needed if amount is not None]
            return Reach(policy, None, step, None, None, None, min(known, default=None))
        asked = self.question(value)
        assert asked is not None
        outcomes = [self.simulated(asked, *each) for each in self.candidates(asked, policy)]
        limit = asked.problem.machine.memory_bytes
        fitting = [o for o in outcomes if o is not None and o.peak_bytes <= limit]
        beyond = self.tried.get((value + step, policy))
        return Reach(
            policy,
            value,
            step,
            min(fitting, key=rank_key),
            _with_value(self.config, self.key, value),
            asked,
            None if beyond is None else beyond.needed_bytes,
        )

    def trial(self, value: int, policy: Recompute) -> _Trial:
        """The first program that fits, those that hold least first; or what is needed."""
        if (value, policy) not in self.tried:
            self.tried[value, policy] = self.first_that_fits(value, policy)
        return self.tried[value, policy]

    def first_that_fits(self, value: int, policy: Recompute) -> _Trial:
        asked = self.question(value)
        if asked is None:
            return _Trial(None, None)
        limit = asked.problem.machine.memory_bytes
        needed: list[int] = []
        by_size = sorted(self.candidates(asked, policy), key=lambda each: each[0].least_bytes)
        for group, order in by_size:
            if group.least_bytes > limit:
                needed.append(group.least_bytes)
                continue
            outcome = self.simulated(asked, group, order)
            if outcome is None:
                continue
            if outcome.peak_bytes <= limit:
                return _Trial(outcome, outcome.peak_bytes)
            needed.append(outcome.peak_bytes)
        return _Trial(None, min(needed, default=None))

    def candidates(self, asked: Question, policy: Recompute) -> Iterator[tuple[Group, Order]]:
        return candidates(asked.problem, replace(asked.space, recompute=policy))

    def simulated(self, asked: Question, group: Group, order: Order) -> Outcome | None:
        self.num_simulated += 1
        return fitted(asked.problem, asked.space, group, order)

    def question(self, value: int) -> Question | None:
        """The question for a value; None where the model does not allow it."""
        if value not in self.questions:
            try:
                asked = question(_with_value(self.config, self.key, value), self.asked.pinned)
            except PipelineError:
                self.questions[value] = None
            else:
                own = self.asked.space
                space = replace(asked.space, policies=own.policies, sizes=own.sizes)
                self.questions[value] = replace(asked, space=space)
        return self.questions[value]
