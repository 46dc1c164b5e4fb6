"""The answer of ``mode=plan``: each listed plan compiled and simulated as its run would be."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.commands.predicted import predict
from launcher.config import LaunchConfig
from launcher.planning.calibration import calibration_error, is_calibrated
from launcher.planning.chosen import chosen_config, chosen_words
from launcher.planning.no_plan import describe
from launcher.planning.question import Question
from launcher.resolve import Run, resolve
from launcher.workloads.specs import model_units
from launcher.workloads.traced_shape import TracedShape
from strategies.metrics import Metrics
from strategies.planner.evaluate import Outcome
from strategies.planner.search import Answer
from strategies.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Listed:
    """One plan with the figures of its verified program.

    Attributes:
        outcome: What the search found.
        words: Overrides that reproduce it.
        run: Resolved as a run would be.
        timeline: Its predicted step.
        metrics: The figures of that.
        step_time_s: Period, or makespan where clipping waits at the flush.
        tokens_per_s: Of all ranks.
        mfu: Model FLOPs over the peak of all ranks.
    """

    outcome: Outcome
    words: tuple[str, ...]
    run: Run
    timeline: Timeline
    metrics: Metrics
    step_time_s: float
    tokens_per_s: float
    mfu: float

    @property
    def memory(self) -> tuple[int, ...]:
        """Peak bytes per rank."""
        return tuple(value for value in self.metrics.peak_memory_bytes if value is not None)


def list_plans(config: LaunchConfig, asked: Question, answer: Answer) -> tuple[Listed, ...]:
    """Compiles and simulates what the search lists."""
    batch = asked.space.global_batch_size
    flops = sum(unit.forward_flops for unit in model_units(asked.shape))
    memory_gb = asked.problem.machine.hardware.memory_gb
    found = []
    for outcome in answer.plans:
        candidate = outcome.candidate
        traced = asked.shape if isinstance(asked.shape, TracedShape) else None
        run = resolve(chosen_config(config, candidate, asked.shape, batch), traced=traced)
        timeline, metrics = predict(run)
        waits = asked.problem.machine.waits_at_flush
        step = metrics.makespan if waits else metrics.period
        peak = asked.space.num_gpus * config.hardware.peak_flops
        found.append(
            Listed(
                outcome,
                tuple(chosen_words(candidate, asked.shape, batch, memory_gb=memory_gb)),
                run,
                timeline,
                metrics,
                step,
                tokens_per_s=batch * asked.shape.sequence / step,
                mfu=3 * flops * batch / (step * peak),
            )
        )
    return tuple(found)


def command_line(typed: Sequence[str], plan: Listed) -> str:
    """What to type to train with a plan."""
    chosen = {word.partition("=")[0] for word in plan.words}
    dropped = ("mode", "plan", "experiment_name")
    kept = [
        word
        for word in typed
        if not word.startswith(("planner.", "hydra.run.dir"))
        and word.partition("=")[0] not in chosen
        and word.partition("=")[0] not in dropped
        and word.partition("=")[0] not in ("num_microbatches", "schedule.layers_per_stage")
    ]
    words = " ".join(shlex.quote(word) for word in [*kept, *plan.words])
    return f"python -m launcher {words}"


def answer_mapping(asked: Question, answer: Answer, listed: Sequence[Listed]) -> dict[str, object]:
    """The keys that planning adds to result.json."""
    rejected = answer.rejected
    nearest = None
    if rejected.nearest is not None:
        needed, what = rejected.nearest
        nearest = {"plan": describe(what), "bytes": needed}
    return {
        "plans": [_plan_mapping(plan) for plan in listed],
        "rejected": {
            "memory": rejected.memory,
            "slower": rejected.slower,
            "dominated": rejected.dominated,
            "tp": {str(tp): reason for tp, reason in rejected.tp.items()},
            "batch": sorted(rejected.batch),
            "memory_limit_bytes": asked.problem.machine.memory_bytes,
            "nearest": nearest,
        },
        "search_s": answer.search_s,
        "num_candidates": answer.num_candidates,
        "num_simulated": answer.num_simulated,
        "calibrated": is_calibrated(asked),
        "calibration_error": calibration_error(asked),
    }


def _plan_mapping(plan: Listed) -> dict[str, object]:
    layout = plan.outcome.candidate.layout
    return {
        "overrides": list(plan.words),
        "predicted_step_time_s": plan.step_time_s,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "bubble_ratio": plan.metrics.bubble_ratio,
        "exposed_grad_reduce": plan.metrics.exposed_grad_reduce,
        "peak_memory_bytes": list(plan.memory),
        "layers_per_stage": list(plan.run.layers_per_stage),
        "units_per_stage": list(plan.outcome.candidate.units),
        "lower_bound": plan.metrics.lower_bound,
        "bound_gap": plan.metrics.bound_gap,
        "pp": layout.pp,
        "tp": layout.tp,
        "dp": layout.dp,
        "num_microbatches": layout.num_microbatches,
        "microbatch_size": layout.microbatch_size,
        "schedule": plan.outcome.candidate.order.schedule,
        "stages_per_rank": plan.outcome.candidate.order.stages_per_rank,
        "overlap": plan.outcome.candidate.overlap,
        "recompute": plan.outcome.candidate.recompute.policy,
    }
