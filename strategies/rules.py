"""What a plan, its options and a training cannot be combined with: one table, checked in its order.

The launcher and ``PipelineStrategy`` check a whole request before anything starts. What the values
of one type must be stands with the type; what a schedule needs of pp, microbatches and stages is
in ``Schedule.resolve``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strategies.errors import PlanError
from strategies.plan import Options, Plan
from strategies.schedules import find_schedule
from strategies.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Training:
    """What is known of a training before it begins, beyond its plan and options.

    Attributes:
        precision: Lightning's word.
        clip: The limit of the gradients' norm; None for none.
        tied: Whether the first and the last stage are known to share weights.
        experts: Whether the model is known to have experts.
    """

    precision: str = "32-true"
    clip: float | None = None
    tied: bool = False
    experts: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What the rules look at."""

    plan: Plan
    schedule: Schedule
    options: Options
    training: Training

    @property
    def updates_apart(self) -> bool:
        """Whether each stage applies a gradient at a time of its own."""
        late = self.schedule.name == "pipedream" and not self.plan.vertical_sync
        return late and self.plan.pp > 1

    @property
    def expert_places(self) -> int:
        """The ranks that experts are spread over; 0 while the number of replicas is open."""
        replicas = 0 if self.options.dp == "auto" else self.options.dp
        return replicas * (1 if self.options.expert_tp else self.options.tp)

    @property
    def fitting_ep(self) -> int:
        places = self.expert_places
        return max(n for n in range(1, min(self.options.ep, places) + 1) if places % n == 0)

    @property
    def longest_skip(self) -> tuple[int, int]:
        return max(self.plan.skips, key=lambda ends: ends[1] - ends[0], default=(0, 0))

    @property
    def fitting_dp(self) -> int:
        ep, tp = self.options.ep, 1 if self.options.expert_tp else self.options.tp
        return math.lcm(ep, tp) // tp


def check(plan: Plan, options: Options | None = None, training: Training | None = None) -> None:
    """Refuses the first combination that a rule forbids.

    Args:
        plan: What is compiled.
        options: How ranks run it; None where nothing runs.
        training: What it trains; None where weights are not trained.

    Raises:
        PlanError: The rule that is broken.
    """
    schedule = find_schedule(plan.schedule, file=plan.file, pp=plan.pp)
    request = Request(plan, schedule, options or Options(), training or Training())
    rules = [_OF_PLANS]
    if options is not None:
        rules.append(_OF_OPTIONS)
    if training is not None:
        rules.append(_OF_TRAININGS)
    for applies, reason, fix in (rule for table in rules for rule in table):
        if applies(request):
            raise PlanError(reason.format(r=request), fix=fix.format(r=request))


def check_collectives(environment: Mapping[str, str]) -> None:
    """Refuses settings with which a collective waits inside its call.

    Raises:
        PlanError: Torch is to compare every collective over its members before it starts.
    """
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise PlanError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch wait for all members inside the call of "
            "every collective: gradients would be reduced in the middle of the backward instead of "
            "under it. Try TORCH_DISTRIBUTED_DEBUG=INFO, or overlap=none."
        )


# When a rule is broken, the reason and the fix; ``{r...}`` is the request.
Rule = tuple[Callable[[Request], bool], str, str]

_OF_PLANS: tuple[Rule, ...] = (
    (lambda r: r.plan.pairs and r.plan.loss_over == "batch",
     "overlap.exchange=true runs a forward with the backward of another microbatch, and with "
     "loss_over=batch all forwards come first.",
     "Try overlap.exchange=false, or loss_over=microbatch."),
    (lambda r: r.plan.loss_over == "batch" and r.plan.recompute.policy in ("mario", "optimal"),
     "loss_over=batch with recompute={r.plan.recompute.policy}: that makes an order of its own, in "
     "which backwards begin before the last forward, and one loss of the whole batch needs all "
     "forwards first.",
     "Try recompute=full, or loss_over=microbatch."),
    (lambda r: r.plan.loss_over == "batch" and not r.schedule.synchronous,
     "loss_over=batch with schedule={r.schedule.name}: one loss of the whole batch needs all of "
     "its forwards before the first backward, which is a flush.",
     "Try schedule=1f1b, or loss_over=microbatch."),
    (lambda r: r.plan.loss_over == "tokens" and not r.schedule.synchronous,
     "loss_over=tokens with schedule={r.schedule.name}: a loss counts by its share of the targets "
     "of an update, and without a flush updates are applied before all of them have come.",
     "Try schedule=1f1b, or loss_over=microbatch."),
    (lambda r: not r.schedule.synchronous
     and 2 * r.plan.num_microbatches <= r.longest_skip[1] - r.longest_skip[0],
     "schedule={r.schedule.name} with pp={r.plan.pp} num_microbatches={r.plan.num_microbatches}: "
     "stage {r.longest_skip[1]} reads what stage {r.longest_skip[0]} has made, which without a "
     "flush updates its weights before it can send that.",
     "Try schedule=1f1b, or schedule=pipedream_2bw num_microbatches={r.plan.pp}."),
    (lambda r: r.plan.split_backward and not r.schedule.synchronous,
     "schedule.split_backward=true with schedule={r.schedule.name}: there is no bubble for weight "
     "gradients to fill.",
     "Remove schedule.split_backward, or try schedule=zb_h1."),
    (lambda r: r.plan.split_backward and r.schedule.splits_backward,
     "schedule.split_backward=true: {r.schedule.name} splits its backwards by itself.",
     "Remove schedule.split_backward."),
    (lambda r: r.plan.error_feedback > 0 and r.schedule.synchronous,
     "schedule.error_feedback={r.plan.error_feedback:g}: {r.schedule.name} ends every step with a "
     "flush, so no gradient is late.",
     "Remove schedule.error_feedback, or try schedule=pipedream_2bw."),
    (lambda r: r.plan.error_feedback > 0 and r.schedule.name != "pipedream_2bw",
     "schedule.error_feedback={r.plan.error_feedback:g}: it corrects gradients that are one update "
     "late, and those of {r.schedule.name} are late by as many as there are ranks behind a stage.",
     "Remove schedule.error_feedback, or try schedule=pipedream_2bw."),
)  # fmt: skip

_OF_OPTIONS: tuple[Rule, ...] = (
    (lambda r: r.options.post_validation is True and not r.schedule.synchronous,
     "trainer.post_validation=true: {r.schedule.name} has no flush at which ranks would wait for "
     "the verdict on an update.",
     "Remove trainer.post_validation, or try schedule=zb_v."),
    (lambda r: r.options.synchronous_steps > 0 and r.schedule.synchronous,
     "schedule.synchronous_steps={r.options.synchronous_steps}: {r.schedule.name} ends every step "
     "with a flush.",
     "Remove schedule.synchronous_steps, or try schedule=pipedream_2bw."),
    (lambda r: r.options.sequence_parallel and r.options.tp == 1,
     "sequence_parallel=true cuts activations between the ranks of tp, and tp=1.",
     "Try tp=2, or sequence_parallel=false."),
    (lambda r: r.plan.pairs and r.options.ep == 1,
     "overlap.exchange=true runs the exchange of tokens under other compute, and ep=1 has none.",
     "Try ep=2 with a model that has experts, or overlap.exchange=false."),
    (lambda r: r.options.expert_tp and r.options.tp == 1,
     "expert_tp=true cuts each expert's matrices over the ranks of tp, and tp=1.",
     "Try tp=2, or expert_tp=false."),
    (lambda r: r.options.expert_tp and r.options.sequence_parallel,
     "expert_tp=true with sequence_parallel=true: ranks that share an expert's matrices need the "
     "same tokens.",
     "Try sequence_parallel=false."),
    (lambda r: r.options.expert_tp and r.expert_places % r.options.ep > 0,
     "expert_tp=true cuts each expert over tp={r.options.tp} ranks and leaves dp={r.options.dp} to "
     "spread them over, which ep={r.options.ep} does not divide.",
     "Try ep={r.fitting_ep}, or dp={r.fitting_dp}."),
    (lambda r: r.expert_places % r.options.ep > 0,
     "ep={r.options.ep} does not divide dp={r.options.dp} times tp={r.options.tp}, the "
     "{r.expert_places} ranks that the experts of a stage are spread over.",
     "Try ep={r.fitting_ep}, or dp={r.fitting_dp}."),
)  # fmt: skip

# A compiled unit's backward is one piece of generated code: it computes the weights' gradients with
# the inputs', so I would do all of the work and W none, which is not what is simulated.
_OF_TRAININGS: tuple[Rule, ...] = (
    (lambda r: r.options.compile and r.schedule.splits_backward,
     "compile=true with schedule={r.schedule.name}: the program runs every backward in two halves, "
     "I and W, and a compiled unit has one backward that cannot be cut.",
     "Try schedule=1f1b, which does not split them, or compile=false."),
    (lambda r: r.options.compile and r.plan.split_backward,
     "compile=true with schedule.split_backward=true: the program runs every backward in two "
     "halves, I and W, and a compiled unit has one backward that cannot be cut.",
     "Try schedule.split_backward=false, or compile=false."),
    (lambda r: r.options.compile and r.plan.recompute.inside,
     "compile=true with recompute={r.plan.recompute.policy}: what is computed again is decided "
     "operation by operation, and a compiled unit hides its operations.",
     "Try recompute=full, or compile=false."),
    (lambda r: r.training.precision == "16-mixed" and not r.schedule.synchronous,
     "precision=16-mixed with schedule={r.schedule.name}: its scale of the loss changes with an "
     "update, and microbatches under way have the one before.",
     "Try trainer.precision=bf16-mixed, or schedule=1f1b."),
    (lambda r: r.plan.num_microbatches > 1 and r.schedule.name == "pipedream",
     "num_microbatches={r.plan.num_microbatches} with schedule=pipedream: it updates the weights "
     "behind every microbatch, and a training step is one update.",
     "Try num_microbatches=1 with batches {r.plan.num_microbatches} times smaller "
     "(accumulate_grad_batches={r.plan.num_microbatches} makes one update of as many), or "
     "schedule=pipedream_2bw, which makes one update per batch."),
    (lambda r: r.updates_apart and bool(r.training.clip),
     "gradient_clip_val={r.training.clip:g} with schedule=pipedream: the last stage applies a "
     "microbatch's gradient before the first stage has its own, so no rank knows the norm of both "
     "in time.",
     "Try schedule.vertical_sync=true, where all apply it together, schedule=pipedream_2bw, or "
     "gradient_clip_algorithm=value."),
    (lambda r: r.updates_apart and r.training.tied,
     "tied embeddings with schedule=pipedream: the first and the last stage share a matrix, and "
     "each applies its gradient at a time of its own.",
     "Try schedule.vertical_sync=true, or schedule=pipedream_2bw."),
    (lambda r: r.updates_apart and r.options.on_nan == "skip",
     "on_nan=skip with schedule=pipedream: the last stage has applied a gradient before the first "
     "one knows whether its own is finite.",
     "Try on_nan=stop, schedule.vertical_sync=true, or schedule=pipedream_2bw."),
    (lambda r: not r.schedule.synchronous
     and (r.options.ep > 1 or (r.options.tp > 1 and r.training.experts)),
     "schedule={r.schedule.name} never drains, and experts that ranks share (ep={r.options.ep}, "
     "tp={r.options.tp}) are updated by all of them together at the end of a step.",
     "Try schedule=1f1b, or ep=1 and tp=1."),
)  # fmt: skip
