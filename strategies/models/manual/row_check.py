"""Whether the losses of a step with manual optimization are means over rows of its batch.

Each microbatch runs a backward of its own, so a loss that compares rows with each other, or a value
between two layers that mixes them, would silently be another one. So the step is run with layers
that give random rows (``rows/row_scout.py``), for a batch and for two parts of it. What does not
come to the same is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.logs import LogCapture, no_means
from strategies.models.manual.dataflow import refuse_gradients
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, user_line
from strategies.models.replay.rows.batch_rows import Share
from strategies.models.replay.rows.row_scout import RowScout, scout


class LossScout(RowScout):
    """Goes through a step with manual optimization.

    Attributes:
        losses: Each backward's line and loss.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.losses: list[tuple[str, float]] = []
        self.logs: LogCapture | None = None

    def act(self, action: Any) -> None:
        """Nothing is updated: this is no training."""

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        refuse_gradients(func, args)
        if func is Tensor.backward:
            self.backward(args[0])
            return None
        return super().on_operation(func, args, kwargs)

    def backward(self, loss: Any, *_: Any, **__: Any) -> None:
        if isinstance(loss, Tensor) and not isinstance(loss, Hole) and loss.numel() == 1:
            with torch._C.DisableTorchFunction():
                self.losses.append((user_line(), float(loss)))


def compare_losses(
    run: Callable[[Any, Share, RowScout | None], LossScout],
    whole: Any,
    parts: Sequence[Any],
    rows: Sequence[int],
    *,
    step: str,
) -> tuple[str, ...]:
    """Refuses losses that are not means over rows; gives the names of what else is logged so.

    Args:
        run: Runs the step for a batch, which has these rows of another.
        whole: That batch.
        parts: Its rows, in order, in two or more batches.
        rows: How many each has.
        step: Its name.

    Raises:
        ModelError: A loss, or what a layer gets, depends on which rows are together.
    """
    found = scout(run, whole, parts, rows, step=step)
    if found is None:
        return ()
    both, some = found
    total = sum(rows)
    mixed = next((one.mixed for one in some if one.mixed is not None), None)
    if mixed is not None:
        raise ModelError(
            f"{mixed}: {step} mixes rows of the batch between its layers: what this layer gets for "
            "a row depends on the others, and microbatches have some of them. Mix rows of the "
            "batch itself in on_after_batch_transfer, or use num_microbatches=1."
        )
    for number, (line, loss) in enumerate(both.losses):
        if any(len(one.losses) <= number for one in some):
            return ()
        mean = sum(
            one.losses[number][1] * size / total for one, size in zip(some, rows, strict=True)
        )
        if loss == loss and abs(mean - loss) > 1e-4 * max(abs(loss), abs(mean), 1e-6):
            raise ModelError(
                f"{line}: this loss of {step} is no mean over rows: with random numbers in place "
                f"of layers it is {loss:.6g} for {total} rows and {mean:.6g} as the mean over "
                f"parts of them. It compares rows with each other, adds them up, or "
                "averages over something else, and with manual optimization each microbatch has a "
                "backward of its own. Take the mean over rows, or use num_microbatches=1."
            )
    logged = [(one.logged, float(size)) for one, size in zip(some, rows, strict=True)]
    return no_means(both.logged, logged, loose=False)
