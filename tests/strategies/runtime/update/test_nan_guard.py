"""What one rank notes, and which finding explains the others; no processes here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.update.nan_guard import Finding, NanWatch, all_finite, first_finding

HERE = Coordinates(pp=2, dp=2, pp_rank=1, dp_rank=0)
WEIGHTS = {1: {"a": torch.ones(3), "b": torch.ones(2, 2)}}


def gradients(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(3), "b": torch.zeros(2, 2), **changes}


def found(watch: NanWatch, **changes: torch.Tensor) -> list[Finding]:
    return watch.findings(HERE, stages=WEIGHTS, gradients=gradients(**changes))


def test_the_last_parameter_of_the_forward_is_the_first_of_the_backward():
    bad = torch.full((3,), math.nan)
    (finding,) = found(NanWatch(), a=bad, b=torch.full((2, 2), math.inf))
    assert (finding.kind, finding.parameter, finding.value) == ("gradient", "b", "inf")
    assert (finding.rank, finding.stage, finding.count) == (2, 1, 2)
    assert finding.sentence().startswith(
        "the gradient of b and 1 more of that rank is inf: stage 1 on rank 2 (pp 1, dp 0, "
    )


def test_a_rank_whose_own_gradient_was_finite_says_so():
    watch = NanWatch()
    watch.note_bucket(1, 0, [torch.ones(5)])
    (finding,) = found(watch, a=torch.full((3,), math.nan))
    assert not finding.own
    watch.note_bucket(1, 1, [torch.ones(5), torch.tensor([math.inf])])
    (finding,) = found(watch, a=torch.full((3,), math.nan))
    assert finding.own


def test_outputs_and_losses_are_named_by_microbatch():
    watch = NanWatch()
    watch.note_output(0, 0, [torch.ones(2), torch.tensor([1, 2])])
    watch.note_output(0, 1, [torch.tensor([math.nan])])
    watch.note_output(0, 2, [torch.tensor([complex(0.0, math.nan)])])
    watch.note_loss(1, 1, torch.tensor(math.inf), None)
    kinds = {(item.kind, item.stage, item.microbatch, item.value) for item in found(watch)}
    assert kinds == {("output", 0, 1, "nan"), ("output", 0, 2, "nan"), ("loss", 1, 1, "inf")}
    assert watch.loss is not None
    assert torch.isnan(watch.loss)
    watch.begin()
    assert [item.kind for item in found(watch)] == ["norm"]


def test_a_weight_that_was_not_finite_before_explains_everything():
    watch = NanWatch()
    watch.note_loss(1, 0, torch.tensor(math.nan), None)
    broken = {1: {"a": torch.tensor([1.0, math.nan]), "b": torch.ones(2, 2)}}
    items = watch.findings(HERE, stages=broken, gradients=gradients())
    assert first_finding(items).sentence().startswith("the weight a of stage 1 on rank 2")


def test_finite_numbers_whose_sum_is_not_are_finite():
    assert all_finite([torch.full((4,), 3e38), torch.tensor([1, 2]), torch.empty(0)])
    assert not all_finite([torch.ones(2), torch.tensor([1.0, -math.inf, math.inf])])
    assert not all_finite([torch.tensor([complex(0, math.nan)])])


FIRST = Finding("gradient", "nan", 3, "host", HERE, stage=1, parameter="x", position=-1)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (FIRST, replace(FIRST, own=False, rank=0)),  # came with the reduction
        (FIRST, replace(FIRST, stage=0, position=0, rank=0)),  # backwards go upwards
        (replace(FIRST, kind="loss", position=1), FIRST),
        (
            replace(FIRST, kind="output", position=0, stage=0),
            replace(FIRST, kind="output", position=2, stage=2, rank=0),
        ),
        (replace(FIRST, kind="weight", position=1), replace(FIRST, kind="output", position=0)),
        (FIRST, replace(FIRST, kind="norm", rank=0)),
        (FIRST, replace(FIRST, rank=4)),
    ],
)
def test_what_comes_first_in_a_step_is_the_cause(first: Finding, other: Finding) -> None:
    assert first_finding([other, first]) is first
    assert first_finding([first, other]) is first
