"""Modules with ``automatic_optimization = False``: several passes per batch, steps in between.

The user's step decides when backwards and optimizer steps are; ``models/manual/segments.py`` has
cut it into segments. Here each segment becomes a pass of the engine, and what happens once per
batch is done for real, on every rank: gradients are added up on each replica until somebody steps,
clips or looks, and are reduced then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec

from strategies.errors import ModelError
from strategies.models.logs import captured_logs
from strategies.models.manual.flow_run import Action
from strategies.models.manual.segments import Ended, SegmentModel
from strategies.models.replay.gate import call_step
from strategies.models.replay.hole import user_line
from strategies.models.stage_model import LogCall, Mode
from strategies.models.unit_model import HasUnits
from strategies.plan import Plan
from strategies.runtime.engine.rank_passes import PassResult
from strategies.runtime.step.microbatch import count_rows, split_batch

if TYPE_CHECKING:
    from strategies.runtime.lightning.updating_strategy import UpdatingStrategy


def refuse_manual(trainer: pl.Trainer, module: pl.LightningModule, plan: Plan) -> None:
    """Refuses what does not go together with a step that takes several passes."""
    name = type(module).__name__
    if isinstance(module, HasUnits):
        raise ModelError(
            f"{name} uses manual optimization and declares units (pipeline_units): what its "
            "training_step does between them would never run. Remove pipeline_units, so that the "
            "step itself is cut, or automatic_optimization=False."
        )
    if is_overridden("backward", module):
        raise ModelError(
            f"{name} uses manual optimization and overrides backward(), which a pipeline never "
            "calls: it runs the backward of each stage itself. Scale the loss in training_step, "
            "before manual_backward."
        )
    if plan.recompute.policy != "none":
        raise ModelError(
            f"{name} uses manual optimization, whose forwards stand in the middle of the step and "
            f"cannot run again: recompute={plan.recompute.policy}. Use recompute=none, or "
            "torch.utils.checkpoint (use_reentrant=False) inside the layers."
        )
    if plan.overlap == "zero1":
        raise ModelError(
            f"{name} uses manual optimization: overlap=zero1 gathers weights under the next step, "
            "which may be in the same batch. Use overlap=grad_reduce."
        )
    precision = trainer.precision_plugin.precision
    if getattr(trainer.precision_plugin, "scaler", None) is not None or precision in (
        "bf16-true",
        "16-true",
    ):
        raise ModelError(
            f"{name} uses manual optimization with precision={precision}, which needs a loss scale "
            "or a second copy of the weights, kept over one optimizer step per batch. Use "
            "precision=bf16-mixed, 32-true or 64-true."
        )


def manual_model(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    batch: Any,
    *,
    mode: Mode,
    layers: str | None,
    dataloader_idx: int | None,
) -> SegmentModel:
    """The module as a model that can be cut; in training its optimizers are built for that, too."""
    if mode != "train":
        return SegmentModel.probe(
            module, batch, mode=mode, chain=layers, dataloader_idx=dataloader_idx
        )
    strategy: Any = trainer.strategy
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
    if strategy.coordinates.pp > 1:
        hide_states(strategy.optimizers)
    try:
        optimized = [_names_of(optimizer, names) for optimizer in strategy.optimizers]
        return SegmentModel.probe(module, batch, mode=mode, chain=layers, optimized=optimized)
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = [], []


def _names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ModelError(
                    "an optimizer updates a parameter that is no part of the module, so no stage "
                    "has it. Build optimizers from self.parameters()."
                )
            found.append(names[id(parameter)])
    return found


class _StateInSteps(MutableMapping[Any, Any]):
    """An optimizer's state, which steps do not see: a rank has that of its own parameters."""

    def __init__(self, find: Callable[[], Any], hidden: Callable[[], bool]) -> None:
        self._find = find
        self._hidden = hidden

    def _there(self) -> Any:
        if self._hidden():
            raise ModelError(
                f"{user_line()}: a step looks at the state of an optimizer (moments, step counts), "
                "of which each rank of a pipeline has that of its own parameters. Use "
                "self.global_step to count, on_before_optimizer_step to look at all parameters and "
                "gradients, or pp=1."
            )
        return self._find()

    def __getitem__(self, key: Any) -> Any:
        return self._there()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._there()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._there()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._there()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())


def hide_states(optimizers: Iterable[Any], *, hidden: Callable[[], bool] = lambda: True) -> None:
    """Refuses looks at optimizers' states as long as they are hidden.

    Those are Lightning's own of the training, or others that are made to be looked at in a probe.
    """
    for optimizer in optimizers:
        own = optimizer.state
        raw = getattr(optimizer, "_optimizer", None)
        find = partial(getattr, raw, "state") if raw is not None else partial(_itself, own)
        optimizer.state = _StateInSteps(find, hidden)


def _itself(value: Any) -> Any:
    return value


class ManualOptimization:
    """Runs the batches of one training."""

    def __init__(self, strategy: UpdatingStrategy, model: SegmentModel) -> None:
        self._strategy = strategy
        self._model = model
        self.begun = False  # whether the step of a batch has done something
        self._flags: tuple[bool, ...] | None = None
        self._extras: list[str] = []  # what the last step has returned besides the loss
        model.forget_optimizers()

    def training_step(
        self, batch: Any, batch_idx: int, step: int, loaders: TreeSpec | None
    ) -> PassResult:
        """Runs the step; its result is the loss that it returns, if it returns one."""
        engine, model = self._strategy.engine, self._model
        self.begun = False
        self._check_flags()
        microbatches = split_batch(batch, engine.plan.num_microbatches, loaders)
        seed = engine.seed_of(step)
        where = engine.coordinates.pp_rank
        places = [
            (stage, number)
            for stage in sorted(engine.owned)
            for number in range(len(microbatches))
            if engine.placement.rank_of(stage, number) == where
        ]
        engine.begin_segments()
        layout = model.open(
            [microbatch.data for microbatch in microbatches],
            places,
            batch_idx=batch_idx,
            seeds=[seed * 8191 + number for number in range(len(microbatches))],
            perform=self._perform,
        )
        way = model.number_of(layout)
        engine.number_segments(
            batch, microbatches, loaders, batch_idx=batch_idx, step=step,
            way=model.kind_of(layout),
            check=partial(model.compare_losses, layout),
        )  # fmt: skip
        logs: list[LogCall] = []
        self.begun = True
        try:
            while (wanted := model.advance()) is not None:
                if isinstance(wanted, Action):
                    model.performed(wanted, self._perform(wanted))
                    continue
                backward = layout.flow.ends_with_backward(wanted)
                retain = backward and layout.flow.marks[wanted].retain
                result = engine.segment_pass(
                    batch,
                    batch_idx=batch_idx,
                    step=step,
                    loaders=loaders,
                    part=f"/{way}/{wanted}",
                    backward=backward,
                    retain_graph=retain,
                )
                logs += result.logs
                model.passed()
                if backward:
                    self._after_backward(result.loss)
        finally:
            ended = model.close()
        engine.end_segments()
        shares = [microbatch.share for microbatch in microbatches]
        last = self._share(ended, shares, layout.result_stage, count_rows(batch, loaders))
        return PassResult(last.loss, [*logs, *last.logs], [], rows=last.rows)

    def _share(
        self, ended: Sequence[Ended], shares: Sequence[float], result_stage: int, rows: int
    ) -> PassResult:
        """What the steps have returned, and logged behind their last pass; collective."""
        values = [
            (_scalar(end.result), shares[end.microbatch])
            for end in ended
            if end.stage == result_stage
        ]
        results = [end.result for end in ended if isinstance(end.result, Mapping)]
        self._extras = sorted({str(name) for each in results for name in each} - {"loss"})
        known = [value * share for value, share in values if value is not None]
        own = sum(known) if known and len(known) == len(values) else None
        calls = [
            (call, shares[end.microbatch], end.stage, end.microbatch)
            for end in ended
            for call in end.logs
        ]
        return self._strategy.engine.share_ends(own, calls, rows)

    def uneven(self, *, hears: bool) -> tuple[Sequence[str], Sequence[str]]:
        """Names of what is logged and no mean over rows, and of what is returned for hooks."""
        return self._model.uneven, self._extras if hears else ()

    def _check_flags(self) -> None:
        """Freezing between batches would leave gradients out of the replicas' sums."""
        flags = self._strategy.engine.trained_flags()
        if self._flags is None:
            self._flags = flags
        elif self._flags != flags:
            raise ModelError(
                "requires_grad of parameters has changed between two batches, which manual "
                "optimization in a pipeline does not follow. Untoggle each optimizer that was "
                "toggled, and freeze parameters before fit()."
            )

    def _after_backward(self, loss: float | None) -> None:
        """Lightning's hooks around a backward, which has run on all stages by now."""
        strategy: Any = self._strategy
        module = strategy.lightning_module
        value = torch.full((), loss or 0.0, dtype=torch.float64, device=strategy.root_device)
        strategy.precision_plugin.pre_backward(value, module)
        if strategy.looks_after_backward:
            strategy.engine.settle()
        strategy.precision_plugin.post_backward(value, module)

    def _perform(self, action: Action) -> Any:
        engine = self._strategy.engine
        raw = action.kind == "step" and "raw" in tuple(action.signature)  # type: ignore[arg-type]
        if action.kind == "clip_gradients" or raw:
            engine.settle()
        result = action.perform()
        if raw:
            engine.stepped()
        if action.kind == "zero_grad":
            assert action.optimizer is not None
            engine.clear_gradients(_parameters_of(self._strategy.optimizers[action.optimizer]))
        return result


class UncutByHand:
    """Runs steps that cannot be cut: whole, on a rank that has all of the model.

    Lightning and torch run them then. A backward adds up the gradients of all replicas, as under
    DDP.
    """

    def __init__(self, strategy: UpdatingStrategy) -> None:
        self._strategy = strategy

    def training_step(
        self, batch: Any, batch_idx: int, step: int, loaders: TreeSpec | None
    ) -> PassResult:
        """Runs the step; what it returns is the ``output``."""
        engine, module = self._strategy.engine, self._strategy.lightning_module
        assert module is not None
        engine.begin_segments()
        with captured_logs(module) as logs, engine.draws_of(step):
            output = call_step(module, "train", batch, batch_idx, whole=True)
        calls = [(call, 1.0, 0, 0) for call in logs.calls()]
        result = engine.share_ends(_scalar(output), calls, count_rows(batch, loaders))
        result.output = output
        return result

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Adds up gradients, which are whole behind it."""
        engine, strategy = self._strategy.engine, self._strategy
        module = strategy.lightning_module
        assert module is not None
        engine.begin_sum()
        share = loss / strategy.dp if strategy.dp > 1 else loss
        strategy.precision_plugin.backward(share, module, None, *args, **kwargs)
        engine.settle()


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _scalar(result: Any) -> float | None:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    return None
