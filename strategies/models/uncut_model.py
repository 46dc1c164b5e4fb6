"""``UncutModel``: a module whose steps cannot be cut, run whole on a rank that has all of it.

With pp=1 nothing has to be cut. So a step that cannot be followed on shapes (second-order
gradients, an early exit, a hidden state that lives on) runs once per batch, with all rows, as under
stock Lightning: in the place of the loss of a batch, behind forwards that do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.logs import captured_logs
from strategies.models.replay.gate import call_step
from strategies.models.replay.stage_run import final_output
from strategies.models.stage_model import Mode, StageModel, StageOutput, Unit
from strategies.plan import NO_RECOMPUTE, Plan

if TYPE_CHECKING:
    from strategies.models.selective.policy import Selection


def tell_uncut(module: nn.Module, why: ModelError) -> None:
    rank_zero_info(
        f"{str(why).partition('. ')[0]}. So with pp=1 the steps of {type(module).__name__} run "
        "whole, as under stock Lightning: once per batch, and num_microbatches has no effect."
    )


def uncut_plan(plan: Plan) -> Plan:
    """The program that has a place for such steps."""
    return replace(plan, loss_over="batch", recompute=NO_RECOMPUTE, pairs=False)


class UncutModel(StageModel):
    """One stage of one unit; ``why`` is the reason that there are not more."""

    uncut = True

    def __init__(self, module: nn.Module, why: ModelError, *, trains: bool) -> None:
        self._module: Any = module
        self.why = why
        self._trains = trains

    @property
    def trains(self) -> bool:
        return self._trains

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._module
        return module

    @property
    def units(self) -> tuple[Unit, ...]:
        return (Unit(type(self._module).__name__, 1.0),)

    def refuse_stages(self, count: int) -> None:
        if count > 1:
            raise ModelError(
                f"{str(self.why).partition('. ')[0]}. So with pp=1 the steps of "
                f"{type(self._module).__name__} run whole, in one stage, and the schedule has "
                f"{count}: use schedule=1f1b."
            )

    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        assert len(stages) == 1

    def forward(self, stage: int, inputs: tuple[Tensor, ...], **_: Any) -> StageOutput:
        return StageOutput()

    def postpone_loss(self) -> None:
        return

    def loss(
        self,
        parts: Sequence[tuple[Tensor, ...]],
        shares: Sequence[float],
        *,
        batch: Any,
        batch_idx: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
    ) -> StageOutput:
        with captured_logs(self._module) as logs:
            result = call_step(self._module, mode, batch, batch_idx, dataloader_idx, whole=True)
        return final_output(result, mode, logs.calls(), self._module)

    def select(self, selection: Selection) -> None:
        """Nothing is recomputed inside a step that runs once."""

    def owned_modules(self) -> Iterator[nn.Module]:
        yield from self._module.children()

    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._module.named_parameters()

    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._module.named_parameters())

    def first_stages(self) -> dict[str, int]:
        return dict.fromkeys(self.parameter_names, 0)

    def follow_freezing(self) -> None:
        return
