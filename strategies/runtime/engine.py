"""One rank of a running pipeline: model, programs, gradients and messages brought together.

Knows no Lightning; ``strategy.py`` calls it from Lightning's hooks, tests call it directly.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.compiler import Programs, compile_plan, compile_short, resolve_shape, schedule_of
from strategies.errors import DataError, PlanError
from strategies.heartbeat import Heartbeat, Phase
from strategies.ir.instruction import Kind
from strategies.ir.placement import Placement
from strategies.partition import balance, by_counts
from strategies.plan import Plan, num_buckets
from strategies.runtime.activation_bytes import ActivationBytes
from strategies.runtime.control import Bulletin
from strategies.runtime.executor import Executor, StepResult
from strategies.runtime.fingerprint import compare, shared_print
from strategies.runtime.grad_sync import StageGradients, clip_, main_dtype
from strategies.runtime.logs import pack_logs, unpack_logs
from strategies.runtime.mailbox import Mailbox
from strategies.runtime.main_weights import (
    AllMainWeights,
    MainWeights,
    refuse_freezing,
    widened_piece,
)
from strategies.runtime.memory_use import MemoryUse
from strategies.runtime.mesh import Communicators, Coordinates
from strategies.runtime.microbatch import Microbatch, checksum, split_batch
from strategies.runtime.nan_guard import Finding, NanWatch, all_finite
from strategies.runtime.pulse import Pulse
from strategies.runtime.recorder import Recorder, StepRecord
from strategies.runtime.rng import kept_generators
from strategies.runtime.selective import Selection
from strategies.runtime.stage_model import LogCall, Mode, StageModel
from strategies.runtime.tensor_parallel import TensorRanks
from strategies.runtime.tensor_parallel.sliced_transport import SlicedTransport
from strategies.runtime.transport import (
    GlooTransport,
    NcclTransport,
    StagedTransport,
    StrictTransport,
    Transport,
)

_SAVING_S = 3600.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses beside the plan.

    Attributes:
        units_per_stage: Cut by hand; None balances by cost.
        bucket_mb: Upper size of a reduction bucket, where the plan leaves their number open.
        backend: ``gloo``, ``nccl``, ``staged`` or ``strict``.
        seed: Of everything random inside the model.
        check_batches: Compare the batch between the ranks of a pipeline at every step.
        timeout_s: How long any communicator waits.
        sequence_parallel: With tp > 1, cut the stream between matrices along the sequence.
        gradient_dtype: Type in which gradients travel to be reduced; None for that of their sum.
        compile: Run each unit through ``torch.compile``.
        watch_nan: Note where a loss or a gradient is not finite, for ``leaves_out``.
    """

    units_per_stage: tuple[int, ...] | None = None
    bucket_mb: float = 25.0
    backend: str = "gloo"
    seed: int = 0
    check_batches: bool = True
    timeout_s: float = 1800.0
    sequence_parallel: bool = False
    gradient_dtype: torch.dtype | None = None
    compile: bool = False
    watch_nan: bool = False


@dataclass
class PassResult:
    """A pass as all ranks of the pipeline see it.

    Attributes:
        loss: Mean over the batch's rows; None when the step returned none.
        logs: One call per logged name.
        results: Return values per microbatch; on the last stage's rank only.
    """

    loss: float | None
    logs: list[LogCall]
    results: list[Any]


@dataclass(frozen=True, slots=True)
class StepStats:
    """An earlier training step over all ranks of the pipeline, known one step later.

    Attributes:
        step: Its number, as given to ``train_pass``.
        makespan_s: First start to last end over the ranks.
        busy_s: Compute of all ranks together.
        bubble_ratio: Idle over P * makespan.
        gradient_norm: 2-norm of the whole model's gradient, before clipping.
        exposed_grad_reduce_s: How long the last reduction outlasted the last compute; 0 when
            hidden, None where nothing is reduced.
        peak_memory_bytes: Per pipeline rank, of its sharers the largest; since the engine was made.
    """

    step: int
    makespan_s: float
    busy_s: float
    bubble_ratio: float
    gradient_norm: float
    exposed_grad_reduce_s: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()


def resolve_placement(plan: Plan) -> Placement:
    """Stages to ranks, before any program is made."""
    return schedule_of(plan).place(resolve_shape(plan))


class Engine:
    """Cuts the model, then runs training and evaluation passes."""

    def __init__(
        self,
        *,
        model: StageModel,
        plan: Plan,
        buckets_open: bool,
        options: Options,
        coordinates: Coordinates,
        device: torch.device,
        heartbeat: Heartbeat | None = None,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        """Collective: all processes call it with the same arguments.

        Args:
            model: The uncut model.
            plan: What to compile; its ``buckets`` are replaced if ``buckets_open``.
            buckets_open: Choose the number of buckets from the stages' sizes.
            options: See ``Options``.
            coordinates: Where this process stands.
            device: Where its stages run.
            heartbeat: Where this rank says what it is doing; None to say it to nobody.
            hosts: Where all ranks are, for what it says.
        """
        self.model = model
        self.pulse = Pulse(heartbeat or Heartbeat(), coordinates, hosts)
        self.options = options
        self.coordinates = coordinates
        self.device = device
        self._memory = MemoryUse(device)
        self.placement = resolve_placement(plan)
        self.owned = self.placement.stages_of(coordinates.pp_rank)
        self.communicators = Communicators(coordinates)
        self.tensor_ranks = self._tensor_ranks()
        if self.tensor_ranks is not None:
            model.shard(self.tensor_ranks)
        if plan.recompute.policy == "selective":
            model.select(Selection(layers={n: frozenset(f) for n, f in plan.recompute.layers}))
        self.stages = self._cut()
        self._create_communicators(shards=plan.overlap == "zero1")
        self._shared = {name: stages for name, stages in model.shared_parameters()}
        parameters = {stage: dict(model.stage_parameters(stage)) for stage in self.owned}
        self._parameters = parameters
        if buckets_open:
            plan = replace(plan, buckets=self._open_buckets(parameters))
        self.plan = plan = replace(plan, skips=model.skips)
        self.programs = compile_plan(plan)
        pipeline = coordinates.pipeline(coordinates.dp_rank)
        self._control = self.control_group
        self._bulletin = Bulletin(self._control, coordinates.pp * coordinates.tp)
        self.mailbox = Mailbox(self._transport(pipeline), coordinates.pp_rank, device)
        self.recorder = Recorder(
            coordinates.pp_rank, device, collectives_on_device=options.backend == "nccl"
        )
        self.gradients: dict[int, StageGradients] = {}
        self.mains = AllMainWeights()
        self._shared_gradients: list[tuple[str, nn.Parameter, Tensor]] = []
        self._hooks: list[Any] = []
        self.executor = Executor(
            model=model,
            rank=coordinates.pp_rank,
            mailbox=self.mailbox,
            gradients=self.gradients,
            mains=self.mains,
            recorder=self.recorder,
            tensor_ranks=self.tensor_ranks,
            pulse=self.pulse,
        )
        self._watch = self.executor.watch = NanWatch() if options.watch_nan else None
        self._not_finite = False
        self._flushed = False
        self._compared = False
        self._shared_works: list[dist.Work] = []
        self.stats: StepStats | None = None
        self._flushed_at: Any = None
        self._trained: tuple[bool, ...] = ()
        self._norm = torch.zeros((), dtype=torch.float64)
        self._norm_work: dist.Work | None = None
        self._loss_scale: Tensor | None = None
        # What clipping costs: the only synchronisation between the ranks of a pipeline.
        self.norm_waits_s: deque[float] = deque(maxlen=1024)

    # ---------------------------------------------------------------- set-up

    def _cut(self) -> tuple[range, ...]:
        costs = [unit.cost for unit in self.model.units]
        count = self.placement.num_stages
        if self.options.units_per_stage is not None:
            stages = by_counts(self.options.units_per_stage, len(costs), count)
        else:
            stages = balance(costs, count)
        self.model.cut(stages, self.owned)
        if self.options.compile:
            self.model.compile_units()
        return stages

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """All ranks of this replica; None if it is a single one."""
        where = self.coordinates
        return self.communicators.get("control", where.replica(where.dp_rank))

    def _tensor_ranks(self) -> TensorRanks | None:
        """Who shares the matrices of this rank's stages; needed before the model is cut."""
        where = self.coordinates
        if where.tp == 1:
            return None
        sharers = [where.sharers(pp, dp) for pp in range(where.pp) for dp in range(where.dp)]
        self._create([("tensor", ranks) for ranks in sharers])
        group = self.communicators.get("tensor", where.sharers(where.pp_rank, where.dp_rank))
        assert group is not None
        return TensorRanks(group, sequence=self.options.sequence_parallel)

    def _create_communicators(self, *, shards: bool) -> None:
        """Every group that any rank's program needs, in one order on all processes."""
        where = self.coordinates
        nccl = self.options.backend == "nccl"
        wanted: list[tuple[str, tuple[int, ...]]] = []
        wanted += [("control", where.replica(replica)) for replica in range(where.dp)]
        if shards:
            wanted.append(("control", tuple(range(where.world_size))))
        for sharer in range(where.tp):
            for replica in range(where.dp):
                pipeline = where.pipeline(replica, sharer)
                wanted.append(("messages", pipeline))
                if nccl:
                    ordered = ((a, b) for a in pipeline for b in pipeline if a != b)
                    wanted += [("messages", pair) for pair in ordered]
            for stage in range(self.placement.num_stages):
                owners = where.replicas(self.placement.owners(stage), sharer)
                wanted.append(("reduce", owners))
                if shards:
                    # Optimizer state is put together from host memory.
                    wanted.append(("control", owners))
            for _, stages in self.model.shared_parameters():
                wanted.append(("reduce", self._shared_ranks(stages, sharer)))
            wanted += [("metrics", where.replicas((rank,), sharer)) for rank in range(where.pp)]
        self._create(wanted)
        # Checkpoints: one rank's disk may take much longer than any message between ranks.
        self._create(
            [("checkpoint", tuple(range(where.world_size)))],
            timeout_s=max(self.options.timeout_s, _SAVING_S),
        )

    def _create(
        self, wanted: list[tuple[str, tuple[int, ...]]], *, timeout_s: float | None = None
    ) -> None:
        if self.coordinates.world_size > 1:
            fast = "nccl" if self.options.backend == "nccl" else "gloo"
            backends = {
                "control": "gloo", "metrics": "gloo", "messages": fast, "reduce": fast,
                "tensor": fast, "checkpoint": "gloo",
            }  # fmt: skip
            self.communicators.create(
                wanted, backends=backends, timeout_s=timeout_s or self.options.timeout_s
            )

    def _shared_ranks(self, stages: Sequence[int], sharer: int | None = None) -> tuple[int, ...]:
        owners = sorted({rank for stage in stages for rank in self.placement.owners(stage)})
        return self.coordinates.replicas(tuple(owners), sharer)

    def _transport(self, pipeline: tuple[int, ...]) -> Transport | None:
        transport = self._whole_transport(pipeline)
        ranks = self.tensor_ranks
        # A stream that is cut along the sequence travels as it is.
        if transport is None or ranks is None or ranks.sequence:
            return transport
        return SlicedTransport(transport, ranks)

    def _whole_transport(self, pipeline: tuple[int, ...]) -> Transport | None:
        group = self.communicators.get("messages", pipeline)
        if group is None:
            return None
        backend = self.options.backend
        if backend == "nccl":
            rank = self.coordinates.pp_rank

            def pair(source: int, target: int) -> dist.ProcessGroup:
                found = self.communicators.get("messages", (pipeline[source], pipeline[target]))
                assert found is not None
                return found

            return NcclTransport(pair, rank)
        if backend == "strict":
            return StrictTransport(group)
        return StagedTransport(group) if backend == "staged" else GlooTransport(group)

    def _open_buckets(self, parameters: dict[int, dict[str, nn.Parameter]]) -> tuple[int, ...]:
        """Buckets per stage from the stages' sizes, the same answer on every rank."""
        own = {
            stage: sum(
                p.numel() * (self.options.gradient_dtype or main_dtype(p.dtype)).itemsize
                for name, p in named.items()
                if p.requires_grad and name not in self._shared
            )
            for stage, named in parameters.items()
        }
        sizes = dict(own)
        if self.coordinates.world_size > 1:
            gathered: list[dict[int, int]] = [{} for _ in range(self.coordinates.world_size)]
            dist.all_gather_object(gathered, own)
            sizes = {stage: size for part in gathered for stage, size in part.items()}
        reduces = self.coordinates.dp > 1 or self.placement.weight_copies > 1
        return tuple(
            num_buckets(sizes[stage], self.options.bucket_mb) if reduces else 0
            for stage in range(self.placement.num_stages)
        )

    def synchronise_weights(self) -> None:
        """Gives all copies of a weight or buffer the value of the first; collective.

        Modules that nobody seeded start differently in every process. Call when parameters are on
        their device.
        """
        where = self.coordinates
        if where.world_size == 1:
            return
        names: set[str] = set()
        for stage, named in self._parameters.items():
            for name, parameter in named.items():
                if name in self._shared or name in names:
                    continue
                names.add(name)
                self._broadcast(parameter, where.replicas(self.placement.owners(stage)))
        for name in sorted(self._shared):
            shared = self.named_parameters().get(name)
            if shared is not None:
                self._broadcast(shared, self._shared_ranks(self._shared[name]))
        if self.tensor_ranks is not None:
            for name, parameter in self.named_parameters().items():
                if name not in self.model.shards:
                    self.tensor_ranks.broadcast_(parameter.detach())

    def _broadcast(self, tensor: Tensor, members: tuple[int, ...]) -> None:
        group = self.communicators.get("reduce", members)
        if group is not None:
            dist.broadcast(tensor.detach(), src=members[0], group=group)

    def build_gradients(self) -> None:
        """Lays out gradient buffers; call when parameters are on their device, before training."""
        buckets = self.plan.buckets
        self._trained = self._which_train()
        self.remove_hooks()
        for old in self.gradients.values():
            old.detach()
        self._shared_gradients.clear()
        for stage, named in self._parameters.items():
            trained = [
                p for name, p in named.items() if p.requires_grad and name not in self._shared
            ]
            count = buckets if isinstance(buckets, int) else buckets[stage]
            owners = self.coordinates.replicas(self.placement.owners(stage))
            self.gradients[stage] = StageGradients.build(
                stage,
                trained,
                count=max(count, 1),
                group=self.communicators.get("reduce", owners) if count else None,
                launched=self.executor.reduction_started,
                noted=None if self._watch is None else self._watch.note_bucket,
                sharded=self.plan.overlap == "zero1",
                wire=self.options.gradient_dtype,
            )
            mains = MainWeights.build(self.gradients[stage])
            if mains is not None:
                self.mains.add_stage(mains)
        seen: set[str] = set()
        for named in self._parameters.values():
            for name, parameter in named.items():
                if name in self._shared and parameter.requires_grad and name not in seen:
                    seen.add(name)
                    gradient = torch.zeros_like(parameter, dtype=main_dtype(parameter.dtype))
                    self._shared_gradients.append((name, parameter, gradient))
                    if gradient.dtype != parameter.dtype:
                        self.mains.add_shared(widened_piece(parameter))
        # The same order of reductions everywhere.
        self._shared_gradients.sort(key=lambda entry: entry[0])
        self.add_hooks()

    def add_hooks(self) -> None:
        """Follows the parameters' gradients (again), after ``build_gradients``."""
        for gradients in self.gradients.values():
            gradients.add_hooks()
        if not self._hooks:
            self._hooks = [
                _widen(parameter, gradient)
                for _, parameter, gradient in self._shared_gradients
                if gradient.dtype != parameter.dtype
            ]

    def remove_hooks(self) -> None:
        """Leaves the parameters alone, until ``add_hooks``.

        Python's garbage collector cannot see through a parameter's hooks: left there, they would
        keep the engine, its weights and its message thread for ever.
        """
        for gradients in self.gradients.values():
            gradients.remove_hooks()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _which_train(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for named in self._parameters.values() for p in named.values())

    def _follow_freezing(self) -> None:
        """Lays the buffers out anew when a callback has frozen or unfrozen parameters."""
        if self._which_train() != self._trained:
            refuse_freezing(self.mains)
            self.build_gradients()

    def measure_activations(self) -> ActivationBytes:
        """Counts, from the next pass on, what this rank holds for its backwards; takes time."""
        if self.executor.activations is None:
            self.executor.activations = ActivationBytes(self.model.module)
        return self.executor.activations

    # ---------------------------------------------------------------- training

    def train_pass(
        self,
        batch: Any,
        *,
        batch_idx: int,
        step: int,
        accumulation: int,
        update: bool,
        loss_scale: Tensor | None = None,
    ) -> PassResult:
        """Forwards and backwards of one batch.

        Args:
            batch: This replica's batch, the same on all its ranks.
            batch_idx: Lightning's index.
            step: Passes since the beginning of training, also across restarts: seeds dropout.
            accumulation: Batches per optimizer step; gradients are divided by it.
            update: Whether gradients are reduced, to be followed by ``flush``.
            loss_scale: Factor on the loss, a scalar, which somebody takes off the gradients again
                between ``flush`` and the optimizer's update; None for 1.
        """
        # The same rule by which Lightning clears gradients, and as often as it calls the closure.
        fresh = batch_idx % accumulation == 0
        if fresh:
            self._follow_freezing()
            self.mains.relink()
            if self._watch is not None:
                self._watch.begin()
        self._attach(zero=fresh)
        self._flushed = False
        scale = 1.0 / (accumulation * self.coordinates.dp)
        self._loss_scale = loss_scale
        seed = (self.options.seed * 1_000_003 + step) * 1021 + self.coordinates.dp_rank
        result = self._run(
            batch, "train", batch_idx=batch_idx, step=step, scale=scale, seed=seed, update=update
        )
        # Lightning clears gradients after this and before backward(): keep ours out of its reach.
        self._detach()
        return result

    def evaluation_pass(
        self, batch: Any, *, mode: Mode, batch_idx: int, dataloader_idx: int = 0
    ) -> PassResult:
        """Forwards only."""
        self.mains.complete()
        return self._run(
            batch,
            mode,
            batch_idx=batch_idx,
            step=batch_idx,
            scale=1.0,
            seed=None,
            update=False,
            dataloader_idx=dataloader_idx,
        )

    def _programs_for(self, count: int) -> Programs:
        if count == self.plan.num_microbatches:
            return self.programs
        return compile_short(self.plan, count)

    def _run(
        self,
        batch: Any,
        mode: Mode,
        *,
        batch_idx: int,
        step: int,
        scale: float,
        seed: int | None,
        update: bool,
        dataloader_idx: int = 0,
    ) -> PassResult:
        microbatches = split_batch(batch, self.plan.num_microbatches)
        programs = self._programs_for(len(microbatches))
        if mode == "train" and not self._compared and self.coordinates.world_size > 1:
            self._compared = True
            self._compare_shapes(microbatches)
        if mode != "train":
            program = programs.forward
        else:
            program = programs.train if update else programs.accumulate
        mark = checksum(batch) if self.options.check_batches and self._control else 0
        previous = self.recorder.kept[-1] if self.recorder.kept else None

        def share(result: StepResult) -> None:
            times = self._times(previous)
            loss = None if result.loss is None else float(result.loss)
            self._bulletin.post([mark, loss, pack_logs(result.logs), times])

        with kept_generators():
            result = self.executor.run(
                program,
                microbatches,
                step=step,
                batch_idx=batch_idx,
                mode=mode,
                scale=scale,
                loss_scale=self._loss_scale if mode == "train" else None,
                seed=seed,
                dataloader_idx=dataloader_idx,
                forwards_done=share,
            )
        self.pulse.phase(Phase.SHARING)
        answers = self._bulletin.read()
        self.pulse.phase(Phase.UPDATING if mode == "train" and update else Phase.BETWEEN)
        if mode != "train" or not update:
            # Without an optimizer step the pass ends here; only training steps are kept.
            self.recorder.finish(keep=False)
        self._check_same([answer[0] for answer in answers])
        self._note_stats([answer[3] for answer in answers])
        return self._joined(answers, result)

    def _compare_shapes(self, microbatches: Sequence[Microbatch]) -> None:
        """Refuses a first batch that ranks of a pipeline see in different shapes or types.

        Replicas may have different ones; but all have to hear that some pipeline has been refused.
        """
        replica = f"replica {self.coordinates.dp_rank}, " if self.coordinates.dp > 1 else ""
        found = {f"{replica}microbatch {m}": p.signature for m, p in enumerate(microbatches)}
        compare(shared_print(found), what="first batch", partial=True)

    def _joined(self, answers: list[list[Any]], result: StepResult) -> PassResult:
        # All sharers of a stage know the same.
        answers = answers[self.coordinates.tp_rank :: self.coordinates.tp]
        losses = [answer[1] for answer in answers if answer[1] is not None]
        logs = unpack_logs([answer[2] for answer in answers])
        results = [result.results[key] for key in sorted(result.results)]
        return PassResult(sum(losses) if losses else None, logs, results)

    def _check_same(self, marks: list[int]) -> None:
        if len(set(marks)) > 1:
            tp = self.coordinates.tp
            names = [
                f"rank {place // tp}" + (f" tp {place % tp}" if tp > 1 else "")
                for place in range(len(marks))
            ]
            listing = ", ".join(
                f"{name}: {mark:08x}" for name, mark in zip(names, marks, strict=True)
            )
            raise DataError(
                "the ranks of one pipeline see different batches (checksums "
                f"{listing}). The data order must not depend on the global random state: give the "
                "loader a seeded generator or sampler, or set check_batches=False if the batches "
                "differ on purpose."
            )

    def last_stats(self) -> StepStats | None:
        """Figures of the last training step itself; collective, at the end of training."""
        record = self.recorder.kept[-1] if self.recorder.kept else None
        self._bulletin.post(self._times(record))
        self.pulse.phase(Phase.SHARING)
        self._note_stats(self._bulletin.read())
        self.pulse.phase(Phase.BETWEEN)
        return self.stats

    def _times(self, record: StepRecord | None) -> list[Any] | None:
        if record is None:
            return None
        spans = self.recorder.spans(record)
        if self._norm_work is not None:
            self._norm_work.wait()  # It was started a step ago.
            self._norm_work = None
        norm = float(self._norm)
        return [record.step, record.begun, record.finished, norm, *spans, self._memory.peak_bytes()]

    def _note_stats(self, times: list[list[Any] | None]) -> None:
        known = [entry for entry in times if entry is not None]
        if len(known) == len(times) and len({entry[0] for entry in known}) == 1:
            makespan = max(entry[2] for entry in known) - min(entry[1] for entry in known)
            norms, busy_s, computed, reduced, peaks = zip(*(e[3:] for e in known), strict=True)
            busy = sum(busy_s)
            ends = [end for end in reduced if end is not None]
            tp = self.coordinates.tp
            self.stats = StepStats(
                step=int(known[0][0]),
                makespan_s=makespan,
                busy_s=busy,
                bubble_ratio=1.0 - busy / (len(known) * makespan),
                gradient_norm=math.sqrt(sum(norms)),
                exposed_grad_reduce_s=max(0.0, max(ends) - max(computed)) if ends else None,
                peak_memory_bytes=tuple(max(peaks[i : i + tp]) for i in range(0, len(peaks), tp)),
            )

    # ---------------------------------------------------------------- the flush

    def _attach(self, *, zero: bool) -> None:
        for gradients in self.gradients.values():
            gradients.attach(zero=zero)
        for _, parameter, gradient in self._shared_gradients:
            if zero:
                gradient.zero_()
            parameter.grad = gradient if gradient.dtype == parameter.dtype else None

    def _detach(self) -> None:
        for gradients in self.gradients.values():
            gradients.detach()
        for _, parameter, _ in self._shared_gradients:
            parameter.grad = None
            for piece in self.mains.pieces_of(parameter) or ():
                piece.main.grad = None

    def restore_gradients(self) -> None:
        """Puts the accumulated gradients back where optimizers look for them."""
        self._attach(zero=False)

    def flush(self) -> None:
        """Waits for this rank's reductions; no other rank is waited for. Once per pass."""
        if self._flushed:
            return
        self._flushed = True
        self.pulse.phase(Phase.REDUCING)
        for name, _, gradient in self._shared_gradients:
            group = self.communicators.get("reduce", self._shared_ranks(self._shared[name]))
            if group is not None:
                work = dist.all_reduce(gradient, group=group, async_op=True)
                assert work is not None
                self._shared_works.append(work)
        for gradients in self.gradients.values():
            gradients.wait()
        for work in self._shared_works:
            work.wait()
        self._shared_works.clear()
        for _, parameter, gradient in self._shared_gradients:
            for piece in self.mains.pieces_of(parameter) or ():
                piece.main.grad = gradient
        self._add_up_partial()
        self._note_norm()
        self.pulse.phase(Phase.UPDATING)
        self._flushed_at = self.recorder.stamp()

    def _add_up_partial(self) -> None:
        """Sums the gradients of whole weights that each tensor-parallel rank used on its share."""
        wanted = self.model.partial_parameters
        if self.tensor_ranks is None or not wanted:
            return
        found: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for name, parameter in self.named_parameters().items():
            if name not in wanted:
                continue
            for updated in self.mains.updated_parameters((parameter,)):
                gradient = updated.grad
                if gradient is not None:
                    kind = (gradient.dtype, gradient.device)
                    found.setdefault(kind, {})[gradient.data_ptr()] = gradient
        for gradients in found.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
            self.tensor_ranks.sum_(flat)
            sizes = [gradient.numel() for gradient in gradients.values()]
            totals = torch.split(flat, sizes)
            for gradient, total in zip(gradients.values(), totals, strict=True):
                gradient.copy_(total.view_as(gradient))

    def _note_norm(self) -> None:
        """Keeps the norm for the next step's message; replicas' shares are added on the way."""
        self._norm = self._local_squared_norm()
        if self._watch is not None:
            self._not_finite = self._sees_not_finite()
        if self._loss_scale is not None:
            self._norm /= self._loss_scale.cpu().double().square()
        where = self.coordinates
        if self.mains.sharded:
            group = self.communicators.get("metrics", where.replicas((where.pp_rank,)))
            if group is not None:
                self._norm_work = dist.all_reduce(self._norm, group=group, async_op=True)

    def _sees_not_finite(self) -> bool:
        """Whether this rank alone would leave the step out; reductions have ended."""
        assert self._watch is not None
        last = self.gradients.get(self.placement.num_stages - 1)
        loss = self._watch.loss
        if last is not None and last.buffers:
            lost = last.tainted
        else:
            # A last stage without weights has nothing that would tell other holders.
            alone = self.coordinates.dp == 1 and self.placement.weight_copies == 1
            lost = alone and loss is not None and not bool(torch.isfinite(loss))
        if lost:
            return True
        if self._loss_scale is not None or bool(torch.isfinite(self._norm)):
            return False  # A scaler looks for infs itself, and lowers the scale.
        # The sum of squares may overflow where no element does.
        return not all_finite(self._reduced().values())

    def _reduced(self) -> dict[str, Tensor]:
        """This rank's gradients by name; of sharded ones only the own share is summed up."""
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        found = {name: gradient for name, _, gradient in self._shared_gradients}
        for gradients in self.gradients.values():
            found |= {names[id(p)]: gradient for p, gradient in gradients.views()}
        return found

    def leaves_out(self) -> bool:
        """Whether a loss or gradient is not finite on any rank: nobody may update then.

        Collective over the replica, with sharded weights over all processes. Replicas need no
        other word: they hold the same sums of gradients.
        """
        group = self._update_group()
        flag = torch.tensor(float(self._not_finite))
        if group is not None:
            self.pulse.phase(Phase.REDUCING)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
            self.pulse.phase(Phase.UPDATING)
            self._flushed_at = self.recorder.stamp()  # The update begins after that wait.
        return bool(flag)

    def findings(self) -> list[Finding]:
        """What is not finite on this rank, for the message; after ``leaves_out``."""
        assert self._watch is not None
        return self._watch.findings(
            self.coordinates, stages=self._parameters, gradients=self._reduced()
        )

    def left_out(self) -> None:
        """Ends a step whose update nobody has made."""
        self._end_step()

    def stepped(self) -> None:
        """Notes that the optimizer has updated the stages: the STEPs of the program have ended."""
        self.mains.updated()
        self._end_step()

    def _end_step(self) -> None:
        record = self.recorder.current
        if record is not None:
            row = record.program.ranks[self.coordinates.pp_rank]
            ended = self.recorder.stamp()
            # One optimizer steps all stages of a rank at once: the first STEP carries its time.
            started = self._flushed_at
            for place, item in enumerate(row):
                if item.kind is Kind.STEP:
                    record.start[place], record.end[place] = started, ended
                    started = ended
            self.recorder.finish()
        self.pulse.phase(Phase.BETWEEN)

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole model's gradient, a float64 scalar, equal on all ranks.

        Collective over the replica, with sharded weights over all processes. Weights that several
        ranks hold count once.
        """
        total = self._local_squared_norm()
        if self._not_finite:
            total = torch.full_like(total, math.nan)  # also for a loss
        group = self._update_group()
        if group is not None:
            asked = time.perf_counter()
            self.pulse.phase(Phase.REDUCING)
            dist.all_reduce(total, group=group)
            self.pulse.phase(Phase.UPDATING)
            self.norm_waits_s.append(time.perf_counter() - asked)
        return total.sqrt()

    def _update_group(self) -> dist.ProcessGroup | None:
        """Who together holds the gradient of a whole model once."""
        if self.mains.sharded:
            everybody = tuple(range(self.coordinates.world_size))
            return self.communicators.get("control", everybody)
        return self._control

    def _local_squared_norm(self) -> Tensor:
        """This rank's share of the squared norm; weights on several ranks count on the first."""
        total = torch.zeros((), dtype=torch.float64)
        rank = self.coordinates.pp_rank
        counts = None
        if self.coordinates.tp_rank > 0:
            # The first of the sharers counts what all of them have whole.
            shards = self.model.shards
            cut = {id(p) for name, p in self.named_parameters().items() if name in shards}

            def counts(parameter: Tensor) -> bool:
                return id(parameter) in cut

        for stage, gradients in self.gradients.items():
            if gradients.sharded or self.placement.owners(stage)[0] == rank:
                total += gradients.squared_norm(counts)
        # Replicas' sums are added only where each has a share.
        first = not self.mains.sharded or self.coordinates.dp_rank == 0
        for name, parameter, gradient in self._shared_gradients:
            if counts is not None and not counts(parameter):
                continue
            if first and self.placement.owners(self._shared[name][0])[0] == rank:
                total += torch.linalg.vector_norm(gradient).double().square().cpu()
        return total

    def clip_by_norm(self, limit: float) -> Tensor:
        """Scales the whole model's gradient to at most ``limit``; returns the norm before."""
        norm = self.gradient_norm()
        clip_(self.updated_parameters(), norm, limit)
        return norm

    def updated_parameters(self) -> Iterable[nn.Parameter]:
        """What the optimizer updates: owned parameters, or what stands for them."""
        return self.mains.updated_parameters(self.parameters())

    def owners_group(self, stage: int) -> dist.ProcessGroup | None:
        """All processes that hold a stage, for talk from host memory."""
        owners = self.placement.owners(stage)
        return self.communicators.get("control", self.coordinates.replicas(owners))

    def parameters(self) -> Iterable[nn.Parameter]:
        """Owned parameters, each once."""
        seen: set[int] = set()
        for named in self._parameters.values():
            for parameter in named.values():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Owned parameters by global name."""
        return {name: p for named in self._parameters.values() for name, p in named.items()}

    def holders(self, *, share: bool = False) -> dict[str, tuple[int, ...]]:
        """Global ranks that hold the same of an owned parameter and of its optimizer state.

        Of a parameter that several stages share, only those of the first one: the others may hold
        less of it, under fewer names.

        Args:
            share: Those that hold the same share of it, instead of the same whole.
        """
        where = self.coordinates
        sharers = (where.tp_rank,) if share else range(where.tp)

        def ranks_of(stage: int) -> tuple[int, ...]:
            owners = self.placement.owners(stage)
            return tuple(rank for sharer in sharers for rank in where.replicas(owners, sharer))

        found = {
            name: ranks_of(stage) for stage, named in self._parameters.items() for name in named
        }
        shared = {
            name: ranks_of(min(stages)) for name, stages in self._shared.items() if name in found
        }
        return found | shared

    def drain(self) -> None:
        """Ends all sends; before a barrier or the end of a loop."""
        self.mailbox.drain()

    def close(self) -> None:
        """Ends all sends and gives the communicators back; the engine is of no use afterwards."""
        self.drain()
        self.remove_hooks()
        self.communicators.destroy()


def _widen(parameter: nn.Parameter, gradient: Tensor) -> Any:
    """Lets a shared weight's gradients add up in a wider type, for a copy of it."""

    def add(_: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    hooked: Any = parameter  # The hook's registration is untyped in torch.
    return hooked.register_post_accumulate_grad_hook(add)


def check_world(*, pp: int, dp: int, tp: int = 1, world_size: int) -> None:
    """Refuses a world that the degrees do not fill.

    Raises:
        PlanError: pp * dp * tp is not the number of processes.
    """
    wanted = pp * dp * tp
    if wanted != world_size:
        sharers = "" if tp == 1 else f" times tp={tp}"
        raise PlanError(
            f"pp={pp} times dp={dp}{sharers} is {wanted} processes, but there are {world_size}. "
            f"Try devices={wanted}, or dp={max(1, world_size // (pp * tp))}."
        )
