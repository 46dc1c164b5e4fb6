"""Checkpointed forwards, and the R that builds their graph.

A checkpointed forward computes what any forward does and saves nothing for its backward: the
stage's inputs, the generators' states and what it changed in the module stay. R runs it again from
there. Both run with gradients enabled, because torch chooses kernels by that: without a graph the
outputs could differ in their last bits from those of R, and nobody could tell the next stage which
of them need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.errors import ModelError
from strategies.models.forward_state import Before, ForwardState, put_back
from strategies.models.nested import cloned, tensors
from strategies.models.stage_model import StageOutput
from strategies.models.state import Generators, drawing_again

Forward = Callable[[tuple[Tensor, ...], Any], StageOutput]
"""Runs a stage on its input leaves and the microbatch's data."""


@dataclass(frozen=True, slots=True)
class KeptForward:
    """What a checkpointed forward leaves for its R."""

    stage: int
    inputs: tuple[Tensor, ...]  # leaves, as they came
    data: Any
    generators: Generators  # as the forward found them
    state: Before  # what else it found and changed


class Recomputation:
    """Runs the stages of one rank without saving, and again with it."""

    def __init__(self, module: nn.Module) -> None:
        self._state = ForwardState(module)
        self._careful: dict[int, bool] = {}  # stage -> whether it changes what it is given

    def forward(
        self, stage: int, inputs: tuple[Tensor, ...], data: Any, run: Forward
    ) -> tuple[KeptForward, StageOutput]:
        """A checkpointed forward; inputs and data stay untouched.

        Raises:
            ModelError: The forward takes gradients itself, or changes buffers now and then.
        """
        generators = Generators.now()
        # A stage's first forward gets copies, to see whether it changes them.
        given = (inputs, data) if self._careful.get(stage) is False else _copies(inputs, data)
        with self._state.kept(stage) as state, saved_tensors_hooks(_drop, _refuse):
            output = run(*given)
        if stage not in self._careful:
            self._careful[stage] = any(t._version for t in (*given[0], *tensors(given[1])))
        return KeptForward(stage, inputs, data, generators, state), output

    def again(self, kept: KeptForward, run: Forward) -> tuple[tuple[Tensor, ...], StageOutput]:
        """R: the same forward, with its graph; the leaves of that, too."""
        inputs, data = kept.inputs, kept.data
        if self._careful[kept.stage]:
            inputs, data = _copies(inputs, data)
        with drawing_again(kept.generators), put_back(kept.state):
            output = run(inputs, data)
        return inputs, output


def _copies(inputs: tuple[Tensor, ...], data: Any) -> tuple[tuple[Tensor, ...], Any]:
    leaves = tuple(leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in inputs)
    return leaves, cloned(data)


def _drop(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise ModelError(
        "a forward takes gradients itself (torch.autograd.grad or backward), but it is to be "
        "recomputed and has saved nothing for them. Use recompute=none, or recompute=selective."
    )
