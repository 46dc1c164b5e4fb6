"""``Trainer(strategy=PipelineStrategy(pp=4))``: Lightning's hooks, answered by the engine.

Each hook here exists because Lightning's default would be silently wrong for a pipeline; the reason
stands beside it. Nothing in Lightning is patched but the function with which
``load_from_checkpoint`` opens a path, which reads our folders, too (``serve_folders``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec

from strategies.analysis.timeline import Timeline
from strategies.errors import ModelError, PlanError
from strategies.heartbeat import Heartbeat
from strategies.models.collectives import gather
from strategies.models.logs import captured_logs
from strategies.models.replay.gate import takes_batch_idx
from strategies.models.replay.side_effects import SideEffectError, watched
from strategies.models.stage_model import STEP_NAMES, Mode, NoLayersError
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_passes import PassResult
from strategies.runtime.lightning.agreement.epoch_ends import ends_loader
from strategies.runtime.lightning.checkpoints.stock_file import serve_folders
from strategies.runtime.lightning.checkpoints.whole_state import StateOnSight, bring_together
from strategies.runtime.lightning.data_order import (
    catch_up,
)
from strategies.runtime.lightning.hooks.epoch_metrics import EPOCH, STEP
from strategies.runtime.lightning.hooks.hook_state import (
    ALIKE,
    repeat_logs,
)
from strategies.runtime.lightning.hooks.hook_watch import differs_by_rank, label_of
from strategies.runtime.lightning.last_words import speak_once
from strategies.runtime.lightning.manual_optimization import ManualOptimization, UncutByHand
from strategies.runtime.lightning.ranks_strategy import make_device_mesh
from strategies.runtime.lightning.request import Keywords, check_request, plan_and_options
from strategies.runtime.lightning.setup_strategy import SetupStrategy
from strategies.runtime.messages.exchange import Exchange, everybody
from strategies.runtime.step.microbatch import concatenate, count_rows, in_order, share_sizes
from strategies.runtime.step.recorder import StepStats, gather_timeline

_log = logging.getLogger(__name__)
_SAVE = "on_save_checkpoint"


serve_folders()  # Before anybody has made a strategy: a script that evaluates makes none.


class PipelineStrategy(SetupStrategy):
    """Runs a LightningModule through a pipeline program.

    Global rank = (pp_rank * dp + dp_rank) * tp + tp_rank. A module that declares units
    (``pipeline_units``) is cut between them; any other is cut by replaying its steps
    (``strategies.models.replay``).

    What is to run is said by keywords, or by ``plan=Plan(...)`` (all that decides the program) and
    ``options=Options(...)`` (all else; each field has its keyword's name, meaning and default), not
    by both:

        PipelineStrategy(pp=4, schedule="zb_h1", num_microbatches=8, tp=2)
        PipelineStrategy(plan=Plan("zb_h1", pp=4, num_microbatches=8), options=Options(tp=2))

    A plan is what the compiler, the simulator and the planner take, so a program that was looked at
    there is the one that runs. Nothing is filled in: ``num_microbatches`` is that of the plan.

    Args:
        plan: Degrees and policies; see ``strategies.plan.Plan``.
        options: How they are run; None for ``Options()``.
        metadata: Written into every checkpoint's manifest.
        configuration: Names and values that have to be the same on all ranks, besides what is said
            here: compared before the first step.
        heartbeat: Where this rank says what it is doing, for a process that watches it.

    Keyword Args:
        pp: Pipeline ranks; 1 if left out.
        dp: Replicas; ``"auto"``, the default, fills the devices.
        tp: Ranks that share the matrices of each stage, as the module says
            (``tensor_parallel_plan``), or as it is found.
        ep: Ranks that the experts of each layer are spread over, which exchange tokens; divides
            dp * tp, and the experts. Needs a module whose layers say which of their parameters are
            experts (``strategies.models.expert_parallel.HasExperts``).
        expert_tp: With tp > 1, cut each expert's matrices over these ranks, too, along what such a
            layer says in ``expert_slices``; ep then divides dp.
        sequence_parallel: With tp > 1, cut activations between the matrices along the sequence.
        schedule: A name of the registry; ``1f1b`` if left out.
        num_microbatches: M per batch of a replica; None for 2 * pp (1 with
            ``pipedream``), or what ``file`` has. A batch with fewer rows runs with one row each.
        loss_over: ``microbatch``, the default, takes a loss of each microbatch and their mean by
            rows, which for means over rows is the same; ``tokens`` their mean by targets, of which
            the module's ``loss_weight(batch)`` says how many a microbatch has, over all
            microbatches, replicas and accumulated batches; ``batch`` puts the outputs of all
            microbatches together before one loss, as losses need that compare rows with each
            other. All forwards then come before the first backward, and their activations are held.
        stages_per_rank: V; None for the schedule's default.
        group: N microbatches per round; None for the schedule's default.
        split_backward: Split every backward of a schedule that does not split by itself.
        vertical_sync: For ``pipedream``: a microbatch uses one version of the weights on all ranks.
        error_feedback: For ``pipedream_2bw``: the share of the difference between the last two
            updates that is added to an update, for what its gradient is late by; 1 for all of it.
        synchronous_steps: For schedules without a flush: steps at the beginning of training
            (as ``trainer.global_step`` counts them) that end with one.
        recompute: Which forwards keep only their input, to be run again before their backward;
            ``selective`` recomputes inside the layers.
        costs: What instructions take (``UniformCosts``), for orders that depend on it.
        memory_bytes: Limit per rank for the group that ``foldx`` chooses.
        file: For ``schedule="custom"``: the path of its CSV, a line per rank. Every process reads
            it; what rank 0 has read is what runs.
        units_per_stage: Cut by hand; None balances by cost.
        overlap: ``grad_reduce``, the default, starts reductions inside the backward, ``none`` at
            the flush; ``zero1`` lets each replica update its share of the weights, for an
            elementwise optimizer, whose state is then spread over the replicas. Behind the backward
            the gradient of such a weight is the optimizer's alone: ``parameter.grad`` is None.
        pairs: With ep > 1, run each backward that a forward follows as one with it: tokens of
            either travel to their experts while the other one computes.
        bucket_mb: Upper size of a reduction bucket in MiB; 25 if left out.
        buckets: Buckets per stage, where the program was compiled elsewhere; overrides bucket_mb.
        grad_dtype: ``bf16`` halves what reductions send; ``fp32``, the default, sends gradients as
            they are summed. An all-reduce in ``bf16`` rounds on its way.
        sum_dtype: Gradients of 16-bit weights are summed in 32 bits on a rank, and across ranks
            with ``zero1``; ``bf16`` sums those of bf16 weights in 16: half the memory, and what is
            small beside a sum is lost. Weights that several stages share keep 32.
        backend: ``auto`` takes ``shared`` on CPU (shared memory within a machine, gloo between
            machines) and NCCL on CUDA, or ``shared`` where two ranks have one GPU, told by its
            UUID: through the memory of that GPU. ``staged`` is gloo through pinned memory, and
            ``gloo`` gloo alone; ``strict`` matches messages by order and blocks.
        timeout_s: How long a rank waits for another; 1800 if left out.
        seed: Of dropout, data order and what steps draw; None for Lightning's global seed, with
            which steps draw what they draw under stock Lightning.
        check_batches: Compare the batch between a pipeline's ranks at every step; the default.
        pipeline_layers: Where a module's layers are (``net.layers``), if they are not found.
        async_save: By default, checkpoints of a running ``fit`` are copied to host memory and
            written in a thread. ``False`` stops training until they are on disk, and takes no
            second copy.
        compile: Run each unit through ``torch.compile``; not with split backwards.
        on_nan: What happens where a loss or gradient is NaN or infinite on any rank: no rank
            applies the step, and training ends (``stop``, the default) or goes on (``skip``); see
            ``skipped_steps``. The ranks of a pipeline agree in the all-reduce of clipping by norm,
            without it in one of their own at the flush, for which a rank waits that could have
            begun its next step (schedules whose period is below their makespan); ``ignore`` looks
            at nothing. Weights or moments that are not finite end the run where they would be
            written into a checkpoint, and where a step is left out; ``ignore`` writes them, with a
            warning. With a gradient scaler, infinite gradients are the scaler's, as long as its
            scale is at least 1.
        checkpoints: What ``save_checkpoint`` and ``ModelCheckpoint`` write; both resume at any
            layout. ``file``: one file as stock Lightning writes it, for ``load_from_checkpoint``,
            ``torch.load`` and stock Trainers, for which rank 0 needs memory for all state.
            ``folder``: files per rank, hashed and written in a thread, for any size. ``auto``, the
            default, is a file, but a folder for a module that declares its units, for one with
            objects among its hyper-parameters (no file that holds them is loaded here), and where
            the state does not fit into half of rank 0's free memory.
        whole_after: Whether the module is made whole on every rank when ``fit`` and its kin end,
            so that ``state_dict()``, ``forward()`` and other Trainers find what stock Lightning
            leaves. ``auto``, the default, does so where it fits into half of a host's free
            memory. Where it stays cut, ``full_state_dict()`` brings the weights to rank 0.
        post_validation: Whether ranks update before clipping's norm, or the word that all is
            finite, is in, and undo that bit for bit where it says otherwise (``flush_repairs``
            counts how often); weights and optimizer state are kept twice for that. ``auto``, the
            default, does so where the schedule's steps get shorter by it (``zb_h2``, ``zb_v``);
            only of modules that declare their units, and where no hook looks at weights between
            two steps.
    """

    def __init__(
        self,
        pp: int | None = None,
        *,
        plan: Plan | None = None,
        options: Options | None = None,
        metadata: Mapping[str, Any] | None = None,
        configuration: Mapping[str, object] | None = None,
        heartbeat: Heartbeat | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        if heartbeat is None:
            speak_once()
        words: dict[str, Any] = dict(keywords) if pp is None else {"pp": pp, **keywords}
        if plan is None and options is None:
            plan, options = plan_and_options(words)
        elif words or plan is None:
            given = ", ".join(f"{name}=..." for name in words) or "options=... alone"
            raise PlanError(
                f"PipelineStrategy({given}): a request is either keywords, or a plan and its "
                "options, which have a field for each of them. Try PipelineStrategy(plan=Plan(...),"
                " options=Options(...))."
            )
        for name, beside in (("metadata", metadata), ("configuration", configuration)):
            if beside is not None and not isinstance(beside, Mapping):
                raise PlanError(
                    f"PipelineStrategy({name}={beside!r:.60}): expected names and values. "
                    f"Try {name}={{'note': 'first'}}."
                )
        plan, options = check_request(plan, options or Options())
        super().__init__(plan, options, metadata=metadata, heartbeat=heartbeat)
        self._configuration = dict(configuration or {})
        self._repeating = False  # the log calls of a step
        self._uncut_told: set[Mode] = set()
        self._resumed = False

    def describe(self, module: pl.LightningModule, batch: Any, *, entries: bool = False) -> str:
        """The layers of each stage, and what it hands on; starts nothing, and changes nothing.

        Args:
            module: As it is given to ``fit``; its weights may be on the meta device.
            batch: One microbatch, on the CPU.
            entries: Also list what each stage executes of the step's recording, call by call.

        Raises:
            ModelError: The module cannot be cut; with the line and the remedy.
            PlanError: It has fewer layers than there are stages.

        >>> print(PipelineStrategy(pp=2).describe(module, batch))  # doctest: +SKIP
        rank 0: stage 0: net.in, net.0 to 3, 688 parameters, 55 % of the forward; to stage 1: ...
        """
        from strategies.tracing.trace import list_stages  # Ranks do without it.

        return list_stages(
            module, batch, count_rows(batch), self._plan, self._options, entries=entries
        )

    # ------------------------------------------------------------- set-up

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks as ``[pp, dp, tp]``; from ``setup`` on, None for a single process."""
        if self.world_size == 1 or not dist.is_initialized():
            return None
        if self._device_mesh is None:
            where = self.coordinates
            self._device_mesh = make_device_mesh(where, self.engine.communicators, self.root_device)
        return self._device_mesh

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """As Lightning does; a batch that does not fit behind those under way drains first."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._loop is not None and self._trainer.training:
            self._loop.arrives(moved, self._loaders)
        return moved

    def lightning_module_state_dict(self) -> Any:
        self._refuse_apart()
        self.drain()
        self.engine.mirror.share()  # A checkpoint is of what all ranks have.
        with self._away():
            parts = super().lightning_module_state_dict()
        if not self._has_sights:
            return parts
        sight = StateOnSight(parts, partial(self._whole_in_hook, parts))
        if self._hooks is None and self._save_hooks_differ():
            sight.look()
        self._writer.sight = sight
        return sight

    def _save_hooks_differ(self) -> bool:
        """Whether only some ranks may look at the state while a checkpoint is made; collective."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        owners: list[Any] = [c for c in callbacks if is_overridden(_SAVE, c, pl.Callback)]
        owners += [self.lightning_module] * is_overridden(_SAVE, self.lightning_module)
        own = [[label_of(owner, _SAVE), differs_by_rank(owner, _SAVE)] for owner in owners]
        said = everybody().everyone(own)
        return said != [own] * len(said) or any(differs for _, differs in own)

    def _whole_in_hook(self, parts: dict[str, Any]) -> dict[str, Any] | None:
        """The whole state where it is to be had: in a hook, or behind a training; collective."""
        if self.whole.restored:
            return dict(self.whole.module.state_dict())
        if self._hooks is not None:
            return self._hooks.state()
        found = bring_together(self._first_replica(parts), everywhere=True)
        return {name: found[name] for name in self.whole.names if name in found}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._away():
            return super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        with self._away():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    # ------------------------------------------------------------- training

    def training_step(self, batch: Any, batch_idx: int | None = None, *_: Any) -> Any:
        """Runs the whole program, backwards included, up to the flush.

        Lightning leaves ``batch_idx`` out where the user's step does not take it.
        """
        self.saver.check()
        trainer = self._trainer
        if batch_idx is None:
            batch_idx = trainer.fit_loop.batch_idx
        self._heartbeat.step(trainer.global_step + 1)
        ahead = self.dp > 1 or self._loop is not None
        self.engine.ends = self._epoch_ends.now(trainer, ahead=ahead)
        if self.is_global_zero:
            rows = count_rows(batch, self._loaders)
            count = self._plan.num_microbatches
            if not self.engine.model.uncut:
                self._tell(self._rows_told.lists(batch, batch_idx, self._loaders, count))
                self._tell(self._rows_told.layers(rows, count))
                if self._hooks is not None:
                    self._rows_told.later(self._hooks.hooked)
                self._tell(self._rows_told.hooks(rows, count))
                self._tell(self._rows_told.elsewhere())
        if self._manual is not None:
            with self.precision_plugin.train_step_context():
                result = self._by_hand(batch, batch_idx)
            self._repeat_logs(result, batch)
            if isinstance(self._manual, UncutByHand):
                return result.output
            hears = "train" in self.engine.whole.carried
            self._tell(self._rows_told.by_hand(*self._manual.uneven(hears=hears)))
            return self._shown(result.loss)
        scale = None
        if self._scaler is not None:
            # Its number stays on the device: get_scale() would wait for the update before.
            scale = self._scaler.scale(torch.ones((), device=self.root_device))
        factor = 1.0 if self._own_backward is None else self._own_backward.factor()
        if self._loop is not None and not self._loop.alone:
            with self.precision_plugin.train_step_context():
                heard, loss = self._loop.train(
                    batch,
                    batch_idx=batch_idx,
                    step=trainer.fit_loop.total_batch_idx,
                    accumulation=trainer.accumulate_grad_batches,
                    factor=factor,
                    loaders=self._loaders,
                )
            for result in heard:
                self._repeat_logs(result, batch)
            output = heard[-1].output if heard else None
            return loss if output is None else {**output, "loss": loss}
        self._rows_told.before(self.engine.whole.layers())
        with self.precision_plugin.train_step_context():
            result = self.engine.train_pass(
                batch,
                batch_idx=batch_idx,
                step=trainer.fit_loop.total_batch_idx,
                accumulation=trainer.accumulate_grad_batches,
                update=not self._accumulating,
                factor=factor,
                loss_scale=scale,
                loaders=self._loaders,
            )
        if self.coordinates.dp_rank == 0:
            self._tell(self._rows_told.lost(self.engine.lost))
            self._tell(self._rows_told.loss(self.engine.whole.unlike))
            self._tell(self._rows_told.buffers(self._plan.num_microbatches))
        if self.is_global_zero:
            self._tell(self._rows_told.mixed(self.engine.whole.mixed))
            self._tell(self._rows_told.logs(self.engine.whole.uneven))
            self._tell(self._rows_told.gathered(self.engine.whole.gathered))
            self._tell(self._rows_told.kept(self.engine.whole.kept))
            hears = "train" in self.engine.whole.carried
            self._tell(self._rows_told.batch(hears and self.engine.model.changes_batch("train")))
        self._repeat_logs(result, batch)
        if result.loss is None:
            raise ModelError(
                "training_step returned no loss; skipping a step is not supported. Return a loss "
                "multiplied by zero to skip."
            )
        return self._shown(result.loss, result.output)

    def _by_hand(self, batch: Any, batch_idx: int) -> PassResult:
        """A step of manual optimization; a way of it that cannot be cut runs whole with pp=1."""
        assert self._manual is not None
        where = batch, batch_idx, self._trainer.fit_loop.total_batch_idx, self._loaders
        try:
            return self._manual.training_step(*where)
        except ModelError as why:
            cut = isinstance(self._manual, ManualOptimization) and not self._manual.begun
            if not (cut and self.engine.is_alone):
                raise
            if self.dp > 1:
                alone = "Use dp=1, or Trainer(strategy='ddp')."
                raise ModelError(f"{why} Replicas cannot begin to run it whole. {alone}") from None
            self.engine.run_whole(why)
            self._manual = UncutByHand(self)
            return self._manual.training_step(*where)

    def _tell(self, message: str | None) -> None:
        if message is not None:
            _log.warning(message)

    def _shown(self, loss: float | None, output: Any = None) -> Any:
        """A loss on every rank, so that progress bars, schedulers and callbacks decide alike."""
        if loss is None:
            return None
        # Filled in there: a copy to the device would wait for the backwards.
        shown = torch.full((), loss, dtype=torch.float64, device=self.root_device)
        return shown if output is None else {**output, "loss": shown}

    # ------------------------------------------------------------- evaluation

    def validation_step(self, batch: Any, *indices: int) -> Any:
        """The forward program; the user's ``validation_step`` runs on the last stage.

        ``indices`` are those of batch and loader, as far as the user's step is to have them.
        """
        with self.precision_plugin.val_step_context():
            return self._evaluate(batch, indices, "validate").output

    def test_step(self, batch: Any, *indices: int) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(batch, indices, "test").output

    def predict_step(self, batch: Any, *indices: int) -> Any:
        """The forward program with ``predict_step``; predictions are brought to every rank."""
        with self.precision_plugin.predict_step_context():
            result = self._evaluate(batch, indices, "predict")
            if result.uncut:
                return result.output
            try:
                return self._joined(batch, result)
            except ModelError as error:
                # It is no prediction per row: the batch's is what one run of the step returns.
                if self._hooks is None and not self.engine.is_alone:
                    raise
                number = self._which(indices, "predict")["dataloader_idx"]
                self.engine.leave_uncut(batch, "predict", number, error)
                return self._evaluate_whole(error, "predict", batch, *indices).output

    def _joined(self, batch: Any, result: PassResult) -> Any:
        """The prediction of a batch, from those of its microbatches on the last stage's ranks."""
        where = self.coordinates
        results: list[Any] = result.results
        if where.pp > 1:
            exchange = Exchange(self.engine.control_group, device=self.root_device)
            placement = self.engine.placement
            gathered = [
                exchange.says(results, source=owner * where.tp)
                for owner in placement.owners(placement.num_stages - 1)
            ]
            results = in_order(placement, gathered)
        return concatenate(results, share_sizes(count_rows(batch), len(results)))

    def _evaluate(self, batch: Any, indices: Sequence[int], mode: Mode) -> PassResult:
        which = self._which(indices, mode)
        self.engine.ends = self._epoch_ends.now(self._trainer, ahead=False)
        asks = self.engine.is_alone or self._hooks is not None
        refused = self.engine.refusal(batch, **which) if asks else None
        if refused is None:
            result = self.engine.evaluation_pass(batch, **which)
        else:
            self._epoch_ends.untold(self._trainer)
            result = self._evaluate_whole(refused, mode, batch, *indices)
        self._repeat_logs(result, batch)
        number = which["dataloader_idx"]
        if ends_loader(self._trainer, () if number is None else (number,)):
            self.engine.mirror.share()  # Lightning computes metrics before it calls hooks.
        return result

    def _which(self, indices: Sequence[int], mode: Mode) -> dict[str, Any]:
        """Which batch it is whose step has been called with these indices."""
        taken = int(takes_batch_idx(getattr(self.lightning_module, STEP_NAMES[mode])))
        return {
            "mode": mode,
            "batch_idx": indices[0] if taken else 0,
            "dataloader_idx": indices[taken] if len(indices) > taken else None,
            "loaders": self._loaders,
        }

    def _evaluate_whole(
        self, refused: ModelError, mode: Mode, batch: Any, *indices: int
    ) -> PassResult:
        """Runs a step that cannot be cut as a hook runs: on every rank, with the whole model."""
        module, name = self.lightning_module, STEP_NAMES[mode]
        assert module is not None
        if isinstance(refused, SideEffectError) and self._hooks is not None:
            raise refused
        self.engine.mirror.share()  # Batches before may have been cut, and left it on one rank.
        none = isinstance(refused, NoLayersError)  # An early return, which needs no weights.
        if self.is_global_zero and mode not in self._uncut_told and not none:
            how = (
                "every rank runs it as a whole, with all weights, which are brought to it for each "
                "batch."
            )
            if self._hooks is None:
                how = "it runs as a whole, as under stock Lightning."
            self._tell(
                f"{name} of {type(module).__name__} cannot be cut into stages: {refused} So {how}"
            )
        self._uncut_told |= set() if none else {mode}
        self.engine.complete()
        with captured_logs(module) as logs:
            step = partial(getattr(module, name), batch, *indices)
            if self._hooks is None:
                output = step()
            else:
                output = self._hooks.run(module, name, partial(watched, step))
        return self.engine.share_logs(logs.calls(), output)

    @property
    def _loaders(self) -> TreeSpec | None:
        """Where a batch has the batches of several loaders; None for a single one's."""
        combined = self._trainer._active_loop._combined_loader  # type: ignore[union-attr]
        if combined is None or combined._mode == "sequential" or len(combined.flattened) == 1:
            return None
        spec: TreeSpec = combined._spec
        return spec

    def _repeat_logs(self, result: PassResult, batch: Any) -> None:
        """The user's log calls, on every rank: ModelCheckpoint and EarlyStopping decide alike."""
        module = self.lightning_module
        assert module is not None
        alike = self.dp == 1 or result.rows is not None
        rows = count_rows(batch, self._loaders) if result.rows is None else result.rows
        self._repeating = True
        repeat_logs(module, result.logs, rows=rows, alike=alike)
        self._repeating = False

    def _reduces_each_batch(self) -> bool:
        """Whether a batch is logged at this moment, and all replicas have as many of them."""
        mode: Mode = "test" if self._trainer.testing else "validate"
        return self._repeating and (self._trainer.training or mode in self.engine.whole.together)

    # ------------------------------------------------------------- collectives

    def barrier(self, name: str | None = None) -> None:
        """All processes; what was sent is let go first. Inside a step, where not all come, none."""
        if self.inside_step or self._apart is not None:
            return
        if self._engine is not None:
            self._engine.drain()
        if dist.is_initialized():
            dist.barrier()

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean"
    ) -> Tensor | Any:
        """Over the replicas: all ranks of a pipeline hold the same value already."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized() or self.dp == 1:
            return tensor
        if group is ALIKE or group is EPOCH or (group is STEP and not self._reduces_each_batch()):
            return tensor
        names = dict.fromkeys(("mean", "avg", "sum"), dist.ReduceOp.SUM)
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = names.get(reduce_op.lower()) if isinstance(reduce_op, str) else reduce_op
        if op is None:
            op = getattr(dist.ReduceOp, str(reduce_op).upper())
        where = self.coordinates
        total = tensor.detach().clone().cpu()
        group = None  # Inside a step, the default one is that of this rank's replicas.
        if not self.inside_step:
            group = self.engine.communicators.get("metrics", where.replicas((where.pp_rank,)))
        dist.all_reduce(total, op=op, group=group)
        result = total / self.dp if mean else total
        return result.to(tensor.device)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Over the replicas, ``[dp, ...]``; with one replica as it is, as on a single device."""
        if group is not None and group is not self._world and group is not dist.group.WORLD:
            return super().all_gather(tensor, group, sync_grads)
        if self.dp == 1 or self._apart is not None:
            return tensor
        if self.inside_step:
            return gather(tensor, None, sync_grads=sync_grads)
        where = self.coordinates
        group = self.engine.communicators.get("metrics", where.replicas((where.pp_rank,)))
        return gather(tensor, group, sync_grads=sync_grads)

    # ------------------------------------------------------------- the end

    def measured_timeline(self, *, median: bool = True) -> Timeline | None:
        """The program with the times at which it really ran; collective.

        Of the last few training steps the one of median duration, or the last one.
        """
        return gather_timeline(self.engine, median=median)

    @property
    def flush_repairs(self) -> int:
        """Updates that were made before their verdict, and undone."""
        return 0 if self._engine is None else self._engine.late.repairs

    @property
    def stats(self) -> StepStats | None:
        """Figures of the step before, over the pipeline's ranks."""
        return None if self._engine is None else self._engine.stats

    def last_stats(self) -> StepStats | None:
        """Figures of the last training step; collective, for the end of training."""
        return self.engine.last_stats()

    @property
    def plan(self) -> Plan:
        """What is run; the number of buckets is known from ``setup`` on."""
        return self._plan if self._engine is None else self._engine.plan

    def on_train_start(self) -> None:
        """Continues the generators of a checkpoint: the loaders, made anew, have drawn from them.

        Runs after ``on_train_start`` of callbacks and module, which had theirs before it was saved.
        """
        self._resumed = self._random_state is not None
        self._restore_random_state()
        for order in self._shuffled:
            order.catch_up()
        self._shuffled, self._saved_orders = [], None
        self._looked.forget()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Draws what loaders have drawn at an epoch's beginning, where a run goes on with one.

        Theirs were asked when they were made, before the generators were continued.
        """
        if self._resumed and batch_idx == 0 and self._trainer.current_epoch > 0:
            catch_up(self._trainer.fit_loop._combined_loader)
        self._resumed = False

    def on_validation_start(self) -> None:
        self.drain()

    on_test_start = on_predict_start = on_validation_start

    def on_train_end(self) -> None:
        """Ends all sends, so that no peer is left without its message, and the last save."""
        self.drain()
        self.engine.drain()
        self.saver.finish()

    def on_validation_end(self) -> None:
        self.engine.drain()

    on_test_end = on_predict_end = on_validation_end

    def teardown(self) -> None:
        """Makes the module whole again where that fits; else leaves this rank's part where it is.

        Not where something has failed: others might not come here.
        """
        if self._engine is not None:
            self._engine.remove_hooks()
            if self._trainer.state.status == TrainerStatus.RUNNING and self._pipeline > 1:
                self._make_whole(asked=self._options.whole_after)
        if self._hooks is not None:
            self._hooks.unwatch()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
