"""What is checked of single steps and of checkpoints, on whatever device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import test_nan_guard as guard
from tests.distributed.test_precision import check_skipped, fit_scaled
from tests.gpu.layouts import LOSS_TOLERANCE, SHAPE
from tests.ranks.fit import SaveAt
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, train

# Of the cases of the guard: at one stage, with clipping, in a replica's share, in a forward.
BAD_CASES = ("no clipping", "clipping", "shares", "a forward", "16-bit weights")
SPOILED = [((0, 0), "grad_reduce", None), ((1, 1), "zero1", 0.1)]
SAVED, ALL_STEPS = 4, 8


def _fault(name: str, accelerator: str) -> tuple[guard.Fault, str]:
    """In double precision as on a CPU, or in the case's own."""
    fault, says = guard.CASES[name]
    backend = "staged" if accelerator == "gpu" else "auto"
    return replace(fault, case=replace(fault.case, accelerator=accelerator, backend=backend)), says


def check_stop(name: str, ranks: Callable[[int], Ranks], *, accelerator: str) -> None:
    """``on_nan=stop``: no rank applies the step, and all name its stage and layer."""
    fault, says = _fault(name, accelerator)
    case = fault.case
    found = ranks(case.pp * case.dp * case.tp).run(guard.train, fault=fault, on_nan="stop")
    (error,) = {rank["error"] for rank in found}
    assert error.startswith(f"step {guard.BAD + 1}: ")
    assert re.search(says, error), error
    for rank in found:
        assert len(rank["weights"]) == guard.BAD
        assert guard.same(rank["weights"][-1], rank["left"])


def check_skip(name: str, ranks: Callable[[int], Ranks], *, accelerator: str) -> None:
    """``on_nan=skip``: the step moves no weight; all others do, alike on all replicas."""
    fault, _ = _fault(name, accelerator)
    case = fault.case
    found = ranks(case.pp * case.dp * case.tp).run(guard.train, fault=fault, on_nan="skip")
    copies: dict[tuple[int, str], torch.Tensor] = {}
    for rank in found:
        assert (rank["error"], rank["skipped"], rank["step"]) == ("", [guard.BAD], guard.STEPS)
        for step, weights in enumerate(rank["weights"]):
            assert guard.finite(weights)
            if step:
                assert guard.same(rank["weights"][step - 1], weights) == (step == guard.BAD), step
            for weight, value in weights.items():
                assert torch.equal(value, copies.setdefault((step, weight), value)), weight


def check_spoiled(
    rank: tuple[int, int],
    overlap: str,
    clip: float | None,
    ranks: Callable[[int], Ranks],
    *,
    accelerator: str,
) -> None:
    """16-mixed: one rank's infinite gradient skips the step on all, and halves all their scales."""
    check_skipped(
        ranks(4).run(
            fit_scaled,
            rank=rank,
            overlap=overlap,
            clip=clip,
            accelerator=accelerator,
            backend="staged" if accelerator == "gpu" else "auto",
        )
    )


# ------------------------------------------------------------------------------------- checkpoints


def train_and_save(case: Case, precision: str, path: str) -> dict[str, Any]:
    return train(case, precision=precision, callbacks=[SaveAt(SAVED, path)])


def train_on(case: Case, precision: str, path: str) -> dict[str, Any]:
    torch.manual_seed(99)  # Whatever the generators were before must not matter.
    return train(case, precision=precision, resume=path)


def check_resume(
    precision: str, ranks: Callable[[int], Ranks], folder: Path, *, accelerator: str
) -> None:
    """Bitwise at the same layout; within a loss's rounding at pp=1 and at pp=4."""
    case = Case(
        "1f1b",
        pp=2,
        steps=ALL_STEPS,
        shape=SHAPE,
        accelerator=accelerator,
        backend="staged" if accelerator == "gpu" else "auto",
        optimizer="SGD",
    )
    given = {"precision": precision, "path": str(folder / "half.ckpt")}
    whole = ranks(2).run(train_and_save, case=case, **given)
    kept = whole[0]["losses"][SAVED:]
    assert len(kept) == ALL_STEPS - SAVED
    again = ranks(2).run(train_on, case=case, **given)
    for one, other in zip(whole, again, strict=True):
        assert other["losses"] == one["losses"][SAVED:]
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name
    for pp in (1, 4):
        other = replace(case, pp=pp, backend=case.backend if pp > 1 else "auto")
        for rank in ranks(pp).run(train_on, case=other, **given):
            assert rank["losses"] == pytest.approx(kept, rel=LOSS_TOLERANCE[precision])
