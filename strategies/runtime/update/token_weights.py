"""How much each microbatch counts where losses are means over tokens (``loss_over=tokens``).

A microbatch's loss is the mean over its targets, and the batch's loss the mean over all of them. So
a microbatch counts by the number of its targets, which the module's ``loss_weight(batch)`` says of
the batch before its first forward: no loss waits for another, and a schedule stays as it is.

What replicas and accumulated batches have is known when their passes have ended. Until then their
gradients are added up by the targets of a batch over those of the first one, and the flush
multiplies the sum once. Where all batches have as many targets, that factor is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.errors import DataError, ModelError
from strategies.ir.instruction import Instruction
from strategies.runtime.step.microbatch import Microbatch


class TokenWeights:
    """Weighs the microbatches of passes, and the sums of gradients that updates are made of.

    Args:
        module: Its ``loss_weight`` takes a microbatch as its step does, and returns over how many
            targets the loss is a mean.

    Raises:
        ModelError: The module has no ``loss_weight``, or runs its backwards itself.
    """

    def __init__(self, module: nn.Module) -> None:
        weight = getattr(module, "loss_weight", None)
        name = type(module).__name__
        if not getattr(module, "automatic_optimization", True):
            raise ModelError(
                f"loss_over=tokens: {name} decides itself when backwards run (manual "
                "optimization), and with which losses.",
                fix="Use automatic optimization, or loss_over=microbatch.",
            )
        if not callable(weight):
            raise ModelError(
                f"loss_over=tokens: {name} has no method loss_weight(batch), which says over how "
                "many targets the loss of a microbatch is a mean.",
                fix='Define it, as return (batch["labels"] != -100).sum(), or use '
                "loss_over=microbatch.",
            )
        self._name = name
        self._weight: Callable[[Any], Any] = weight
        self._first: float | None = None  # targets of the first batch, the most of any replica
        self._parts = 1  # replicas times accumulated batches, of the update under way
        self._seen = 0.0  # targets of all replicas' batches of that update so far

    def weigh(self, microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], float]:
        """The microbatches, each with its share of the batch's targets; and their number.

        Raises:
            DataError: ``loss_weight`` returns what is no number of targets.
        """
        found = [self._weight(microbatch.data) for microbatch in microbatches]
        if any(isinstance(number, Tensor) and not number.is_cpu for number in found):
            found = torch.stack([torch.as_tensor(number) for number in found]).tolist()
        try:
            numbers = [float(number) for number in found]
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._no_number(found[0]) from error
        wrong = [number for number in numbers if not 0 <= number < math.inf]
        if wrong:
            raise self._no_number(wrong[0])
        total = math.fsum(numbers)
        return [
            replace(microbatch, weight=number / total if total else 0.0)
            for microbatch, number in zip(microbatches, numbers, strict=True)
        ], total

    def _no_number(self, found: Any) -> DataError:
        what = f"{found:g}" if isinstance(found, float) else f"a {type(found).__name__}"
        return DataError(
            f"loss_over=tokens: {self._name}.loss_weight() returns {what}, and it says over how "
            "many targets the loss of a microbatch is a mean.",
            fix="Return a number from 0 on, or a tensor with one element.",
        )

    def begin(self, parts: int) -> None:
        """The first batch of an update comes, which replicas and accumulated batches make."""
        self._parts, self._seen = parts, 0.0

    def scale(self, targets: float) -> float:
        """The factor on the gradients of a batch with so many targets.

        Collective over all processes the first time.
        """
        if self._parts == 1:
            return 1.0
        if self._first is None:
            most = torch.tensor(targets, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
            self._first = float(most) or 1.0
        return targets / self._first

    def add(self, targets: Iterable[float]) -> None:
        """The replicas' batches have so many."""
        self._seen += math.fsum(targets)

    @property
    def factor(self) -> float:
        """On the sum of the update's gradients, which are divided by its parts already.

        Not a number where there was no target.
        """
        if not self._seen:
            return math.nan
        return 1.0 if self._first is None else self._parts * self._first / self._seen


def pass_no_gradients(inputs: Sequence[Tensor], item: Instruction, *, exchanges: bool) -> None:
    """The backward of a mean over no target, whose gradients are not a number times zero: none.

    Raises:
        DataError: The backward ``exchanges`` tokens of experts, so it has to run.
    """
    if exchanges:
        raise DataError(
            f"microbatch {item.microbatch} has no target, so its loss is not a number; but its "
            "backward exchanges tokens of experts with other ranks.",
            fix="Return a finite loss for it: loss.sum() / targets.clamp(min=1).",
        )
    for leaf in inputs:
        if leaf.requires_grad:
            leaf.grad = torch.zeros_like(leaf)
