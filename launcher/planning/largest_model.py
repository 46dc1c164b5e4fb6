"""``planner.maximize=sequence_length|model_size``: how far each recompute policy gets in a layout.

Recomputation frees memory; here it is spent on longer sequences or on more layers. Per policy the
largest value whose verified program fits is searched for, and then the fastest way to run it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import lcm

from launcher.config import LaunchConfig
from launcher.planning.question import Question, question
from strategies.compiler import no_collection
from strategies.errors import PipelineError, PlanError
from strategies.plan import Recompute
from strategies.planner.layout_search import Answer
from strategies.planner.outcome import Outcome
from strategies.planner.tuner import longest, tune

# A sequence is found to a few percent: in steps of 1/32 to 1/64 of it, wherever the search starts.
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
        sum(answer.num_simulated for answer in search.tried.values() if answer is not None),
        time.perf_counter() - began,
        None if fitting else search.needed_bytes(),
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
class _Search:
    config: LaunchConfig
    asked: Question
    key: str
    tried: dict[tuple[int, Recompute], Answer | None] = field(default_factory=dict)
    questions: dict[int, Question | None] = field(default_factory=dict)

    @property
    def own(self) -> int:
        model = self.config.model
        return model.sequence if self.key == "model.sequence" else model.layers

    def run(self) -> tuple[Reach, ...]:
        least = 2 if self.key == "model.sequence" else 1
        found: dict[Recompute, Reach] = {}
        start = self.own
        # Policies that do not adapt come first; how far they get is where the others begin.
        policies = self.asked.space.recomputes
        for policy in sorted(policies, key=lambda p: p.policy in ("mario", "optimal")):

            def fits(value: int, policy: Recompute = policy) -> bool:
                answer = self.answer(value, policy)
                return answer is not None and bool(answer.plans)

            value, step, near = None, 0, start
            while near >= least and step != self.step(near):
                step = self.step(near)
                near = max(near // step * step, step)
                value = longest(fits, start=near, step=step, least=least, most=_MOST[self.key])
                near = value if value is not None else step // 2
            found[policy] = self.reach(policy, value, step)
            if value is not None and policy.rewrites:
                start = value
        return tuple(found[policy] for policy in policies)

    def step(self, value: int) -> int:
        """Between the values that are tried around one."""
        if self.key != "model.sequence":
            return 1
        step: int = max(1, 2 ** (value.bit_length() - 1 - _SHARE_BITS))
        # Ranks share a sequence evenly.
        return lcm(step, self.config.tp) if self.config.sequence_parallel else step

    def reach(self, policy: Recompute, value: int | None, step: int) -> Reach:
        if value is None:
            return Reach(policy, None, step, None, None, None, self.needed_bytes(policy))
        answer = self.answer(value, policy)
        assert answer is not None
        return Reach(
            policy,
            value,
            step,
            answer.plans[0],
            _with_value(self.config, self.key, value),
            self.question(value),
            self.needed_bytes(policy, value + step),
        )

    def needed_bytes(self, policy: Recompute | None = None, value: int | None = None) -> int | None:
        """The least that was needed where nothing fits; of one policy and value, or of all."""
        return min(
            (
                refusal.needed_bytes
                for (tried, recompute), answer in self.tried.items()
                if answer is not None and not answer.plans
                if policy in (None, recompute) and value in (None, tried)
                for refusal in answer.refusals
                if refusal.needed_bytes is not None
            ),
            default=None,
        )

    def answer(self, value: int, policy: Recompute) -> Answer | None:
        """The fastest way to run a value; None where the model does not allow it."""
        if (value, policy) not in self.tried:
            asked = self.question(value)
            answer = None
            if asked is not None:
                space = replace(asked.space, recompute=policy)
                answer = tune(asked.problem, space, top_k=1)
            self.tried[value, policy] = answer
        return self.tried[value, policy]

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
