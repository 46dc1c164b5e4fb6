"""What happens between ``Trainer.fit()`` and the first batch: the module cut, optimizers, loaders.

Each hook here exists because Lightning's default would be silently wrong for a pipeline; the reason
stands beside it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from strategies.compiler import schedule_of
from strategies.errors import ModelError
from strategies.heartbeat import Heartbeat
from strategies.models.collectives import LocalGroup, default_group
from strategies.models.manual.segments import SegmentModel
from strategies.models.stage_model import StageModel
from strategies.models.uncut_model import UncutModel, tell_uncut, uncut_plan
from strategies.models.unit_model import UnitModel
from strategies.plan import Options, Plan
from strategies.rules import Training, check
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.agreement.epoch_ends import EpochEnds
from strategies.runtime.lightning.agreement.same_module import (
    agree_on_cut,
    agree_on_module,
)
from strategies.runtime.lightning.checkpoints.whole_state import (
    LEFT,
    WholeModule,
    look_at_whole,
    refuse_cut,
)
from strategies.runtime.lightning.data_order import (
    DeviceOrder,
    Looked,
    is_order,
    shard,
    undisturbed,
)
from strategies.runtime.lightning.hooks.hook_state import HookState, count_replicas
from strategies.runtime.lightning.hooks.hook_watch import Listings, OwnBackward
from strategies.runtime.lightning.hooks.overridden_hooks import OverriddenHooks
from strategies.runtime.lightning.hooks.parameter_hooks import ParameterHooks
from strategies.runtime.lightning.manual_optimization import (
    ManualOptimization,
    UncutByHand,
    hide_states,
)
from strategies.runtime.lightning.refusals import (
    SharedGradScaler,
    WholeWeights,
    refuse_module,
    refuse_optimizers,
)
from strategies.runtime.lightning.rows_told import RowsTold
from strategies.runtime.lightning.stream_loop import (
    StreamLoop,
    refuse_engine,
    refuse_stream,
)
from strategies.runtime.lightning.updating_strategy import ConfirmedWeights, UpdatingStrategy
from strategies.runtime.lightning.user_module import stage_model_of
from strategies.runtime.messages import fingerprint
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.fingerprint import compare
from strategies.runtime.messages.meeting import meeting
from strategies.runtime.update.main_optimizer import (
    MainOptimizer,
    check_elementwise,
)
from strategies.runtime.update.main_weights import refuse_freezing
from strategies.runtime.update.shared_rates import SharedRates


class SetupStrategy(UpdatingStrategy):
    """Everything from ``setup`` to the first batch."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        metadata: Mapping[str, Any] | None,
        heartbeat: Heartbeat | None,
    ) -> None:
        super().__init__(plan, options, metadata=metadata, heartbeat=heartbeat)
        self._configuration: dict[str, object] = {}
        self._device_mesh: DeviceMesh | None = None
        self._engine_module: pl.LightningModule | None = None
        self._own_sampler = True
        self._looked = Looked()
        self._epoch_ends = EpochEnds(lambda: self.engine)
        self._shuffled: list[DeviceOrder] = []  # in which loaders shuffle
        self._saved_orders: list[Mapping[str, Any]] | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Cuts the module, then builds the optimizer over what is left of it."""
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        options = self._options
        shared = options.tp > 1 or options.ep > 1
        refuse_module(trainer, module, self._plan, shared=shared)
        if trainer.state.fn == TrainerFn.FITTING:
            by_norm = trainer.gradient_clip_algorithm in (None, "norm")
            training = Training(
                precision="32-true" if self._scaler is None else "16-mixed",
                clip=trainer.gradient_clip_val if by_norm else None,
            )
            check(self._plan, options, training)
        if not schedule_of(self._plan).synchronous:
            if trainer.state.fn == TrainerFn.FITTING:
                refuse_stream(trainer, module, self._plan.schedule)
            self._plan = replace(self._plan, accumulation=trainer.accumulate_grad_batches)
        if trainer.state.fn == TrainerFn.FITTING and self._pipeline * self._options.ep > 1:
            self._writer.refuse_networks(module)
        self._take_over_sampling(trainer)
        self.model = self.precision_plugin.convert_module(module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._engine is not None and self._met != meeting().number:
            refuse_cut(module)  # The connections of its engine have ended with a fit that failed.
            self._engine = self._saver = self._device_mesh = None
        other = self._engine is not None and (
            self._engine_module is not module or self.whole.changed
        )
        if other or (fitting and self._cut_for_evaluation):
            self.engine.close()  # Another model in the same Trainer, or other parameters in it.
            self._engine = self._saver = self._device_mesh = None
        if self._engine is not None:
            vars(module).pop(LEFT, None)  # It has failed before, and goes on as it is.
        if self._engine is None:
            refuse_cut(module)
            look_at_whole(trainer, module)
            self._start_engine(trainer, module)
        elif self.whole.restored:
            look_at_whole(trainer, module)
            self.whole.release(self._engine.model)
        self.model_to_device()
        self._groups.orders = None
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, HookState) for callback in callbacks):
            callbacks.insert(
                0, HookState(lambda: self.engine, lambda: self._overridden, self._epoch_ends)
            )
        count_replicas(callbacks, replicas=self.dp, size=self.world_size // self.dp)
        self._overridden = OverriddenHooks.agreed(trainer, module)
        if fitting and self._loop is not None:
            refuse_engine(self.engine)
            self._loop.listen()
        if fitting:
            self._reset_optimizers_and_schedulers()
            if self.engine.gradients:
                self.engine.add_hooks()
            else:
                self.engine.build_gradients()
            self._build_optimizers(trainer)
        own = fitting and is_overridden("backward", module)
        self._own_backward = OwnBackward(module, self.root_device) if own else None
        if self._hooks is not None:
            self._hooks.watch(trainer)
        self.setup_precision_plugin()
        if fitting and self._pipeline > 1:
            hide_states(self._lightning_optimizers, hidden=lambda: self.inside_step)
        # The stock plugin clips by the norm of this rank's parameters alone, without an error.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self.precision_plugin._after_closure = self._after_closure  # type: ignore[method-assign]
        clip_by_value: Any = self.precision_plugin.clip_grad_by_value

        def clip_what_is_here(optimizer: Optimizer, clip_val: float) -> None:
            groups = optimizer.param_groups
            if any(p.grad is not None for group in groups for p in group["params"]):
                clip_by_value(optimizer, clip_val)  # which takes no empty list

        self.precision_plugin.clip_grad_by_value = clip_what_is_here  # type: ignore[method-assign]
        scaler = self._scaler
        if scaler is not None and not isinstance(scaler, SharedGradScaler):
            # The stock scaler would skip a step on the ranks that have seen an inf, and only there.
            plugin: Any = self.precision_plugin
            plugin.scaler = SharedGradScaler.like(scaler, device=self.root_device)

    @property
    def _cut_for_evaluation(self) -> bool:
        """Whether the module was cut without a look at its training step."""
        return self._engine is not None and not self._engine.model.trains

    def _start_engine(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Cuts the module and makes what runs it; collective."""
        if self._plan.file is not None:
            # It may have changed between two reads.
            self._plan = replace(self._plan, file=self.broadcast(self._plan.file))
        self._engine_module, self._whole = module, WholeModule(module)
        self._met = meeting().number
        self._rows_told = RowsTold(module)
        seed = self._options.seed
        if seed is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        options = replace(self._options, dp=self.dp, backend=self.backend, seed=seed)
        # Before the first group is made: ranks that differ would wait for each other there.
        compare(
            fingerprint.versions_print()
            | fingerprint.options_print("", self._plan)
            | fingerprint.options_print("", options)
            | fingerprint.shared_print(self._configuration)
            | fingerprint.shared_print(
                {
                    "precision": self.precision_plugin.precision,
                    "accumulate_grad_batches": trainer.accumulate_grad_batches,
                    "gradient_clip_val": trainer.gradient_clip_val,
                    "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
                }
            )
            | fingerprint.weights_print(module),
            what="versions, configuration and model",
        )
        alone = self._pipeline == self._options.tp == self._options.ep == 1
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        hooks = agree_on_module(module, self.root_device, callbacks=callbacks, seeded=self._seeded)
        model: StageModel | None = None
        refused: ModelError | None = None
        try:
            with default_group(LocalGroup(self.coordinates.dp_rank, self.dp)):
                model = stage_model_of(
                    trainer,
                    module,
                    layers=self._options.pipeline_layers,
                    looked=self._looked,
                    num_microbatches=self._plan.num_microbatches,
                    shared=self._options.tp > 1,
                    uncut=self.coordinates.pp > 1 and self._options.tp == self._options.ep == 1,
                    whole=alone,
                )
        except ModelError as error:
            refused = error
        units = () if model is None else model.units
        agree_on_cut([unit.name for unit in units], refused, hooks={} if alone else hooks)
        assert model is not None
        plan = self._plan
        if alone:
            model = self._uncut_anywhere(module, model)
        if model.uncut:
            plan = uncut_plan(plan)
        self._engine = Engine(
            model=model,
            plan=plan,
            options=options,
            coordinates=self.coordinates,
            device=self.root_device,
            heartbeat=self._heartbeat,
            hosts=self._hosts,
            own_draws=self._options.seed is not None,
        )
        programs = self._engine.programs
        compare(
            {
                f"program {program.role}": fingerprint.program_print(program)
                for program in programs.all
            },
            what="programs",
        )
        self.model_to_device()
        self.engine.synchronise_weights()
        self._rows_told.stages(self.engine.named_parameters())
        self._note_cut()
        stream = self._engine.stream
        self._loop = None if stream is None else StreamLoop(self, self._engine)
        self._hooks = None
        where = self.coordinates
        whole = self._engine.model.table is not None and (where.pp > 1 or self._loop)
        if whole or where.tp > 1 or where.ep > 1:
            self._hooks = ParameterHooks(
                self._engine,
                module,
                reduced=self._gradients_are_whole,
                changed=self._weights_changed,
                settle=self.drain,
            )
        elif isinstance(model, UnitModel):
            model.on_listing(Listings(type(module).__name__, where))

    def _uncut_anywhere(self, module: pl.LightningModule, model: StageModel) -> StageModel:
        """The same kind of model on all replicas, which have looked at batches of their own."""
        why = model.why if isinstance(model, UncutModel) else None
        found = everybody().everyone(None if why is None else str(why))
        refused = next(filter(None, found), None)
        if refused is None:
            return model
        why = ModelError(refused)
        tell_uncut(module, why)
        return model if model.uncut else UncutModel(module, why, trains=model.trains)

    def _gradients_are_whole(self) -> bool:
        if self._manual is not None:
            return self.dp == 1 or self.engine.settled
        return self.dp == 1 or not self._accumulating

    def _weights_changed(self) -> None:
        """A hook has had the whole model, on all ranks."""
        self._last_norm = None
        self.whole.meet()

    def _build_optimizers(self, trainer: pl.Trainer) -> None:
        try:
            hooks = self._hooks
            with nullcontext() if hooks is None else hooks.whole_groups(lambda: self.optimizers):
                self.setup_optimizers(trainer)
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            where = self.coordinates
            raise ModelError(
                f"pipeline rank {where.pp_rank} has no parameter to train, and "
                "configure_optimizers() refuses that. Try another cut (units_per_stage, or "
                "schedule.layers_per_stage), or a smaller pp."
            ) from error

        where = self.coordinates
        refuse_optimizers(
            self.optimizers,
            world_size=self.world_size,
            pipeline=where.pp,
            on_nan=self._options.on_nan,
        )
        if where.tp > 1 and self.engine.model.shards:
            for optimizer in self.optimizers:
                check_elementwise(optimizer, parts=f"tp={where.tp}", instead="tp=1")
        compare(
            fingerprint.optimizers_print(
                self.optimizers, pp_rank=where.pp_rank, tp_rank=where.tp_rank
            )
            | fingerprint.schedulers_print(self.lr_scheduler_configs)
            | fingerprint.groups_print(self._group_names(), self.optimizers),
            what="optimizers",
            partial=True,
        )
        self._rates = self.engine.rates = SharedRates(self.optimizers)
        self._updates, self._updating = 0, False
        self.engine.updated_by(self.optimizers)
        self._main_optimizers = []
        self._groups.check(saves=bool(self._overridden.saves))
        mains = self.engine.mains
        mains.refresh()  # Somebody may have written weights since the last fit().
        self._main_optimizers = [
            MainOptimizer.take_over(optimizer, mains) for optimizer in self.optimizers if mains
        ]
        self._manual = None
        if isinstance(self.engine.model, SegmentModel):
            self._manual = ManualOptimization(self, self.engine.model)
        elif not trainer.lightning_module.automatic_optimization:
            self._manual = UncutByHand(self)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, BaseFinetuning) for callback in callbacks):
            refuse_freezing(mains)
        late, watched = self._loop is not None, self._hooks is not None
        shown = mains.sharded or (late and not watched)
        if shown and not any(isinstance(c, WholeWeights) for c in callbacks):
            callbacks.insert(
                0,
                WholeWeights(
                    self._show_weights,
                    lambda: self._overridden.weights,
                    watched=watched,
                    late=late,
                ),
            )
        if self._asks_early():
            limit = trainer.gradient_clip_val if self._clips_by_norm else None
            self.engine.ask_early(None if limit is None else float(limit))
        self._unchanged = self._leaves_gradients()
        self._late = self._goes_on_late(trainer)
        if self._late and not any(isinstance(c, ConfirmedWeights) for c in callbacks):
            callbacks.insert(0, ConfirmedWeights(lambda: self.engine.complete()))
        self.engine.late.left_out = self._leave_out_late

    def _group_names(self) -> list[list[list[str]]]:
        """Per optimizer and group the names of its parameters; [] where a rank sees its own."""
        if self._hooks is not None:
            return self._hooks.group_names()
        if self.coordinates.pp > 1:
            return []
        assert self.lightning_module is not None
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        return [
            [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def drain(self) -> bool:
        """Brings what is under way to its end, where a schedule has no flush; collective.

        Behind it every batch that has entered has made its update. False where nothing was.
        """
        if self._loop is None:
            return False
        with self._away():
            return self._loop.drain()

    def _show_weights(self) -> None:
        if self._hooks is None:
            self.drain()
        self.engine.complete()

    def _take_over_sampling(self, trainer: pl.Trainer) -> None:
        # Lightning's injected sampler shuffles a training loader that is not to be shuffled
        # (Lightning issue 21447) and cannot resume; process_dataloader() puts ours there. A user's
        # use_distributed_sampler=False stays respected.
        connector = trainer._accelerator_connector
        if connector.use_distributed_sampler:
            connector.use_distributed_sampler = False
        else:
            self._own_sampler = self._engine is not None and self._own_sampler

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Parameters are drawn on the host: layouts must not change them."""
        with self.precision_plugin.tensor_init_context():
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Gives a replica its share, and continues where a checkpoint was written."""
        share = self._share_of(dataloader)
        self._epoch_ends.compare(share, self._trainer)
        return undisturbed(share, rank=self.global_rank) if self._watched else share

    def _share_of(self, dataloader: object) -> object:
        if not self._own_sampler:
            return self._looked.resumed(dataloader)
        trainer = self._trainer
        training = trainer.state.fn == TrainerFn.FITTING and trainer.training
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        epochs: Any = trainer.fit_loop.epoch_progress.current
        # Until an epoch begins, the batch counter is still that of the epoch before.
        inside = training and epochs.ready > epochs.processed
        given = shard(
            dataloader,
            num_replicas=self.dp,
            replica=self.coordinates.dp_rank,
            training=training,
            seed=self.engine.seed,
            epoch=epochs.processed if training else 0,
            batches_done=batches.processed if inside else 0,
            asked=self._looked.asked,
            on_device=None if self._options.seed is not None else self._device_order,
        )
        return self._looked.resumed(dataloader) if given is dataloader else given

    def _device_order(self, *given: Any, **options: Any) -> DeviceOrder:
        if self._random_state is not None and self._saved_orders is None:
            kept = self._trainer.fit_loop._combined_loader_states_to_load
            self._saved_orders = [state for state in kept if is_order(state)]
        order = DeviceOrder(
            *given,
            **options,
            agree=self._is_everywhere,
            saved=self._saved_orders.pop(0) if self._saved_orders else None,
            restore=self._repeat_random_state,
        )
        self._shuffled.append(order)
        return order

    def _is_everywhere(self, number: int) -> bool:
        return self.world_size == 1 or len({*everybody().everyone(number)}) == 1
