"""Every rule between a plan, its options and a training: what it refuses, and what it lets pass."""

import pytest

from strategies import rules
from strategies.errors import PlanError
from strategies.plan import Options, Plan, Recompute
from strategies.rules import Training, check

REFUSED = [
    (
        (Plan("eager_1f1b", 2, 4, pairs=True, loss_over="batch"),),
        "overlap.exchange=true runs a forward with the backward of another microbatch, and with "
        "loss_over=batch all forwards come first. Try overlap.exchange=false, or "
        "loss_over=microbatch.",
    ),
    *(
        (
            (Plan("1f1b", 2, 4, loss_over="batch", recompute=Recompute(policy)),),
            f"loss_over=batch with recompute={policy}: that makes an order of its own, in which "
            "backwards begin before the last forward, and one loss of the whole batch needs all "
            "forwards first. Try recompute=full, or loss_over=microbatch.",
        )
        for policy in ("mario", "optimal")
    ),
    (
        (Plan("pipedream", 2, 1, loss_over="batch"),),
        "loss_over=batch with schedule=pipedream: one loss of the whole batch needs all of its "
        "forwards before the first backward, which is a flush. Try schedule=1f1b, or "
        "loss_over=microbatch.",
    ),
    (
        (Plan("pipedream_2bw", 2, 4, loss_over="tokens"),),
        "loss_over=tokens with schedule=pipedream_2bw: a loss counts by its share of the targets "
        "of an update, and without a flush updates are applied before all of them have come. Try "
        "schedule=1f1b, or loss_over=microbatch.",
    ),
    (
        (Plan("pipedream", 3, 1, skips=((0, 2),)),),
        "schedule=pipedream with pp=3 num_microbatches=1: stage 2 reads what stage 0 has made, "
        "which without a flush updates its weights before it can send that. Try schedule=1f1b, or "
        "schedule=pipedream_2bw num_microbatches=3.",
    ),
    (
        (Plan("pipedream", 2, 1, split_backward=True),),
        "schedule.split_backward=true with schedule=pipedream: there is no bubble for weight "
        "gradients to fill. Remove schedule.split_backward, or try schedule=zb_h1.",
    ),
    (
        (Plan("zb_h1", 2, 4, split_backward=True),),
        "schedule.split_backward=true: zb_h1 splits its backwards by itself. Remove "
        "schedule.split_backward.",
    ),
    (
        (Plan("zb_v", 2, 4, error_feedback=0.5),),
        "schedule.error_feedback=0.5: zb_v ends every step with a flush, so no gradient is late. "
        "Remove schedule.error_feedback, or try schedule=pipedream_2bw.",
    ),
    (
        (Plan("pipedream", 2, 1, error_feedback=1.0),),
        "schedule.error_feedback=1: it corrects gradients that are one update late, and those of "
        "pipedream are late by as many as there are ranks behind a stage. Remove "
        "schedule.error_feedback, or try schedule=pipedream_2bw.",
    ),
    (
        (Plan("pipedream", 2, 1), Options(post_validation=True)),
        "trainer.post_validation=true: pipedream has no flush at which ranks would wait for the "
        "verdict on an update. Remove trainer.post_validation, or try schedule=zb_v.",
    ),
    (
        (Plan("1f1b", 2, 4), Options(synchronous_steps=5)),
        "schedule.synchronous_steps=5: 1f1b ends every step with a flush. Remove "
        "schedule.synchronous_steps, or try schedule=pipedream_2bw.",
    ),
    (
        (Plan("1f1b", 2, 4), Options(sequence_parallel=True)),
        "sequence_parallel=true cuts activations between the ranks of tp, and tp=1. Try tp=2, or "
        "sequence_parallel=false.",
    ),
    (
        (Plan("eager_1f1b", 2, 4, pairs=True), Options()),
        "overlap.exchange=true runs the exchange of tokens under other compute, and ep=1 has none. "
        "Try ep=2 with a model that has experts, or overlap.exchange=false.",
    ),
    (
        (Plan("1f1b", 2, 4), Options(dp=2, ep=2, expert_tp=True)),
        "expert_tp=true cuts each expert's matrices over the ranks of tp, and tp=1. Try tp=2, or "
        "expert_tp=false.",
    ),
    (
        (Plan("1f1b", 2, 4), Options(tp=2, expert_tp=True, sequence_parallel=True)),
        "expert_tp=true with sequence_parallel=true: ranks that share an expert's matrices need "
        "the same tokens. Try sequence_parallel=false.",
    ),
    (
        (Plan("1f1b", 2, 4), Options(dp=6, tp=2, ep=4, expert_tp=True)),
        "expert_tp=true cuts each expert over tp=2 ranks and leaves dp=6 to spread them over, "
        "which ep=4 does not divide. Try ep=3, or dp=4.",
    ),
    (
        (Plan("1f1b", 2, 4), Options(dp=3, tp=2, ep=4)),
        "ep=4 does not divide dp=3 times tp=2, the 6 ranks that the experts of a stage are spread "
        "over. Try ep=3, or dp=2.",
    ),
    (
        (Plan("zb_v", 2, 4), Options(compile=True), Training()),
        "compile=true with schedule=zb_v: the program runs every backward in two halves, I and W, "
        "and a compiled unit has one backward that cannot be cut. Try schedule=1f1b, which does "
        "not split them, or compile=false.",
    ),
    (
        (Plan("1f1b", 2, 4, split_backward=True), Options(compile=True), Training()),
        "compile=true with schedule.split_backward=true: the program runs every backward in two "
        "halves, I and W, and a compiled unit has one backward that cannot be cut. Try "
        "schedule.split_backward=false, or compile=false.",
    ),
    (
        (Plan("1f1b", 2, 4, recompute=Recompute("layer")), Options(compile=True), Training()),
        "compile=true with recompute=layer: what is computed again is decided operation by "
        "operation, and a compiled unit hides its operations. Try recompute=full, or "
        "compile=false.",
    ),
    (
        (Plan("pipedream_2bw", 2, 4), Options(), Training(precision="16-mixed")),
        "precision=16-mixed with schedule=pipedream_2bw: its scale of the loss changes with an "
        "update, and microbatches under way have the one before. Try "
        "trainer.precision=bf16-mixed, or schedule=1f1b.",
    ),
    (
        (Plan("pipedream", 4, 4), Options(), Training()),
        "num_microbatches=4 with schedule=pipedream: it updates the weights behind every "
        "microbatch, and a training step is one update. Try num_microbatches=1 with batches 4 "
        "times smaller (accumulate_grad_batches=4 makes one update of as many), or "
        "schedule=pipedream_2bw, which makes one update per batch.",
    ),
    (
        (Plan("pipedream", 4, 1), Options(), Training(clip=1.0)),
        "gradient_clip_val=1 with schedule=pipedream: the last stage applies a microbatch's "
        "gradient before the first stage has its own, so no rank knows the norm of both in time. "
        "Try schedule.vertical_sync=true, where all apply it together, schedule=pipedream_2bw, or "
        "gradient_clip_algorithm=value.",
    ),
    (
        (Plan("pipedream", 4, 1), Options(), Training(tied=True)),
        "tied embeddings with schedule=pipedream: the first and the last stage share a matrix, and "
        "each applies its gradient at a time of its own. Try schedule.vertical_sync=true, or "
        "schedule=pipedream_2bw.",
    ),
    (
        (Plan("pipedream", 4, 1), Options(on_nan="skip"), Training()),
        "on_nan=skip with schedule=pipedream: the last stage has applied a gradient before the "
        "first one knows whether its own is finite. Try on_nan=stop, "
        "schedule.vertical_sync=true, or schedule=pipedream_2bw.",
    ),
    *(
        (
            (Plan("pipedream_2bw", 2, 4), options, Training(experts=True)),
            f"schedule=pipedream_2bw never drains, and experts that ranks share (ep={options.ep}, "
            f"tp={options.tp}) are updated by all of them together at the end of a step. Try "
            "schedule=1f1b, or ep=1 and tp=1.",
        )
        for options in (Options(dp=2, ep=2), Options(tp=2))
    ),
]


@pytest.mark.parametrize(
    ("request_", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED]
)
def test_what_cannot_be_combined_is_refused_with_a_fix(request_, message):
    with pytest.raises(PlanError) as refused:
        check(*request_)
    assert str(refused.value) == message
    assert refused.value.fix


def test_every_rule_of_the_table_is_broken_here_once():
    tables = (rules._OF_PLANS, rules._OF_OPTIONS, rules._OF_TRAININGS)
    parts = {reason.partition("{")[0] for table in tables for _, reason, _ in table}
    assert all(any(message.startswith(part) for _, message in REFUSED) for part in parts)
    assert sum(map(len, tables)) == len(REFUSED) - 2  # two are broken in two ways


@pytest.mark.parametrize(
    "request_",
    [
        (Plan("1f1b", 2, 4, loss_over="batch", recompute=Recompute("full")), Options()),
        (Plan("1f1b", 2, 4, split_backward=True), Options(compile=True)),
        (Plan("zb_v", 2, 4, recompute=Recompute("selective")), Options(compile=True)),
        (Plan("eager_1f1b", 2, 4, pairs=True),),
        (Plan("eager_1f1b", 2, 4, pairs=True), Options(dp=2, ep=2)),
        (Plan("1f1b", 2, 4), Options(post_validation=True)),
        (Plan("1f1b", 2, 4), Options(tp=2, ep=4, expert_tp=True)),  # dp=auto is not known yet
        (Plan("1f1b", 2, 4), Options(dp=4, tp=2, ep=8)),
        (Plan("1f1b", 2, 4), Options(dp=4, tp=2, ep=4, expert_tp=True)),
        (Plan("pipedream", 2, 1), Options(post_validation="auto")),
        (Plan("1f1b", 2, 4), Options(on_nan="skip", dp=2, ep=2), Training("16-mixed", 1.0)),
        (Plan("pipedream_2bw", 2, 4, error_feedback=1.0), Options(synchronous_steps=5)),
        (Plan("pipedream_2bw", 2, 4), Options(on_nan="skip"), Training(clip=1.0, tied=True)),
        (Plan("pipedream_2bw", 2, 4), Options(tp=2), Training()),
        (Plan("pipedream", 2, 1, vertical_sync=True), Options(), Training(clip=1.0, tied=True)),
        (Plan("pipedream", 1, 1), Options(on_nan="skip"), Training(clip=1.0)),
    ],
    ids=str,
)
def test_what_goes_together_is_not(request_):
    check(*request_)
