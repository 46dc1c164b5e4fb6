"""A rank before its first step: its model cut, its groups, its programs, its gradients' buffers.

All ranks come here together, with the same plan and options.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from strategies.compiler import compile_plan, resolve_shape, schedule_of
from strategies.errors import ModelError
from strategies.heartbeat import Heartbeat
from strategies.ir.program import Placement
from strategies.models.collectives import LocalGroup
from strategies.models.expert_parallel import ExpertRanks, TwoThreads
from strategies.models.selective.policy import Selection
from strategies.models.stage_model import Mode, StageModel
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.plan import Options, Plan, num_buckets
from strategies.planner.cut import balance, by_counts
from strategies.runtime.engine.last_batches import Ends
from strategies.runtime.engine.plan_choice import chosen_plan
from strategies.runtime.messages import fingerprint, mesh
from strategies.runtime.messages.control import Bulletin
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.mailbox import Mailbox
from strategies.runtime.messages.mesh import Communicators, Coordinates
from strategies.runtime.messages.transport_choice import chosen_transport
from strategies.runtime.step.activation_bytes import MemoryUse
from strategies.runtime.step.executor import Executor
from strategies.runtime.step.pulse import Pulse
from strategies.runtime.step.rank_parts import RankParts
from strategies.runtime.step.recompute import Recomputation
from strategies.runtime.step.recorder import Recorder, StepStats
from strategies.runtime.step.step_mirror import StepMirror
from strategies.runtime.step.step_numbers import StepNumbers
from strategies.runtime.step.stream_state import Stream
from strategies.runtime.step.whole_batch import WholeBatch
from strategies.runtime.update.flush import Flush
from strategies.runtime.update.grad_sync import StageGradients
from strategies.runtime.update.gradient_layout import main_dtype
from strategies.runtime.update.main_weights import AllMainWeights
from strategies.runtime.update.nan_guard import NanWatch
from strategies.runtime.update.post_validation import PostValidation
from strategies.runtime.update.rank_gradients import OwnedWeights, RankGradients
from strategies.runtime.update.shared_rates import SharedRates
from strategies.runtime.update.token_weights import TokenWeights
from strategies.runtime.update.weight_versions import ErrorFeedback, WeightVersions
from strategies.sharding_plan import ShardingPlan, plan_from_json

_SAVING_S = 3600.0


def resolve_placement(plan: Plan) -> Placement:
    return schedule_of(plan).place(resolve_shape(plan))


class RankSetup:
    """What a rank is made of before its first step; ``RankWeights`` updates it."""

    def __init__(
        self,
        *,
        model: StageModel,
        plan: Plan,
        options: Options,
        coordinates: Coordinates,
        device: torch.device,
        heartbeat: Heartbeat | None = None,
        hosts: Mapping[int, str] | None = None,
        own_draws: bool = False,
    ) -> None:
        """Collective: all processes call it with the same arguments.

        With ``own_draws`` steps draw from the seed and the step's number, so that a run that is
        resumed draws what it would have drawn; else from the generators as they stand.

        Buckets that the plan leaves open are made from the stages' sizes; ``options.backend`` is
        not ``auto``.
        """
        self.model = model
        self.options = options
        self.plan = plan
        self.seed = options.seed or 0
        # The type in which gradients travel to be reduced; None for that of their sum.
        self._wire = torch.bfloat16 if options.grad_dtype == "bf16" else None
        self._narrow = options.sum_dtype == "bf16"
        self.coordinates = coordinates
        self.device = device
        self.memory = MemoryUse(device)
        self.placement = resolve_placement(plan)
        self.owned = self.placement.stages_of(coordinates.pp_rank)
        self.communicators = Communicators(coordinates)
        self.tensor_ranks = self._tensor_ranks()
        if self.tensor_ranks is not None:
            self._shard(self.tensor_ranks)
        turns = TwoThreads(device) if plan.pairs else None
        self.exchangers: ExpertRanks | None = None
        if coordinates.ep > 1 or coordinates.tp > 1:
            self.exchangers = self._expert_ranks(turns)
            model.spread(self.exchangers)
        if model.experts and not schedule_of(plan).synchronous:
            raise ModelError(
                f"schedule={plan.schedule} never drains, and experts that ranks share (ep="
                f"{coordinates.ep}, tp={coordinates.tp}) are updated by all of them together at "
                "the end of a step. Try schedule=1f1b, or ep=1 and tp=1."
            )
        if plan.pairs and not model.experts:
            raise ModelError(
                "overlap.exchange=true runs the exchange of experts' tokens under the compute of "
                "another microbatch, and nothing is exchanged here. Try overlap.exchange=false, or "
                "ep=2 with a model that has experts."
            )
        if plan.recompute.inside:
            model.select(Selection.asked(plan.recompute))
        self.stages = self._cut()
        self._weights = OwnedWeights(model, self.placement, coordinates)
        self._compare_stages()
        self._create_groups(shards=plan.overlap == "zero1")
        buckets = self._open_buckets() if plan.buckets is None else plan.buckets
        self.plan = plan = replace(
            plan, buckets=buckets, skips=model.skips, exchanges=model.exchanges
        )
        self.programs = compile_plan(plan)
        self._bulletin = Bulletin(self.control_group, coordinates.pp * coordinates.tp)
        # Replicas train on one batch together: its loss is everybody's.
        everybody = self.communicators.get("control", tuple(range(coordinates.world_size)))
        self._world_bulletin = Bulletin(everybody, coordinates.world_size)
        transport = chosen_transport(
            options.backend,
            self.communicators,
            coordinates,
            device,
            self.tensor_ranks,
            timeout_s=options.timeout_s,
        )
        self.mailbox = Mailbox(transport, device)
        self.recorder = Recorder(
            coordinates.pp_rank, device, collectives_on_device=options.backend == "nccl"
        )
        self.pulse = Pulse(heartbeat or Heartbeat(), coordinates, hosts)
        self._gradients = RankGradients(
            self._weights, self.placement, coordinates, self.communicators
        )
        last = self.placement.num_stages - 1
        source = self.placement.owners(last)[0]
        self.whole = WholeBatch(
            model, last, self.placement.weight_copies, once=plan.loss_over == "batch"
        )
        self.mirror = StepMirror(
            self.whole.state,
            group=self.control_group,
            source=coordinates.global_rank(source, coordinates.dp_rank, 0),
            knows=coordinates.pp_rank == source,
            device=device,
        )
        # Modes between whose passes hooks look at the module; the same on all ranks.
        self.mirrored: frozenset[Mode] = frozenset()
        self._parts = RankParts(
            model=model,
            mailbox=self.mailbox,
            gradients=self._gradients.stages,
            mains=self.mains,
            recorder=self.recorder,
            pulse=self.pulse,
            recomputation=Recomputation(model.module),
            whole=self.whole,
            tensor_ranks=self.tensor_ranks,
            turns=turns,
            expert_ranks=self.exchangers if plan.exchanges else None,
            watch=None if options.on_nan == "ignore" else NanWatch(),
            replicas=self._replicas(),
        )
        self._executor = Executor(coordinates.pp_rank, self._parts)
        self._numbers = StepNumbers(
            model,
            coordinates,
            group=self.control_group,
            replicas=self._parts.replicas,
            seeded=own_draws,
        )
        self._flush = Flush(
            self._parts,
            self._weights,
            self._gradients,
            self.placement,
            coordinates,
            self.communicators,
        )
        steps = self.programs.stream
        self.stream = None if steps is None else Stream(steps, coordinates.pp_rank, self._parts)
        if steps is not None:  # A few stretches as long as the program, and the lists of a drain.
            self.recorder.keep(int(3 * steps.program.steps) + plan.pp)
        self.feedback = (
            ErrorFeedback(plan.error_feedback, self.updated_parameters)
            if plan.error_feedback
            else None
        )
        self.late = PostValidation(
            mains=lambda: self.mains,
            updated=self.updated_parameters,
            looks=options.on_nan != "ignore",
            device_type=device.type,
        )
        self.tokens = TokenWeights(model.module) if plan.loss_over == "tokens" else None
        self._trained: tuple[bool, ...] = ()
        self.rates: SharedRates | None = None  # of the optimizers, once there are some
        self._compared = False
        self._began = False
        self._ways: set[int] = set()  # of the training step that all ranks know of, but the first
        self.ends: Ends = None, False, None  # as this rank knows it
        self._silence_s = min(60.0, options.timeout_s)
        self._short_told = False
        self._joined_steps: set[str] = set()  # whose rows are known
        self._uncut: dict[Hashable, ModelError | None] = {}  # steps of evaluation, and why
        self._heard_steps: set[str] = set()  # on which all ranks agree
        self._asynchronous = False
        self.stats: StepStats | None = None

    def _cut(self) -> tuple[range, ...]:
        costs = [unit.cost for unit in self.model.units]
        count = self.placement.num_stages
        self.model.refuse_stages(count)
        if self.options.units_per_stage is not None:
            stages = by_counts(self.options.units_per_stage, len(costs), count)
        else:
            stages = balance(costs, count)
        self.model.cut(stages, self.owned)
        if self.plan.loss_over == "batch":
            self.model.postpone_loss()
        if self.options.compile:
            self.model.compile_units()
        return stages

    @property
    def _runs_ahead(self) -> bool:
        """Whether the host is through its list while the device is still at its forwards.

        Then what all ranks are to know waits for the end of the list, and the host for nothing on
        the way. With messages that pass through the host, it is no further than the device.
        """
        return self.device.type == "cuda" and (self.options.backend == "nccl" or self.mailbox.alone)

    @property
    def lost(self) -> set[int]:
        """Stages of this rank that have lost the gradient of a value of the stages before them."""
        return self.mailbox.lost

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """All ranks of this replica; None if it is a single one."""
        where = self.coordinates
        return self.communicators.get("control", where.replica(where.dp_rank))

    def _replicas(self) -> dist.ProcessGroup | None:
        """What a step of this rank sees as all processes; None where there is one process."""
        where = self.coordinates
        if where.world_size == 1 or not dist.is_initialized():
            return None
        group = self.communicators.get("metrics", where.replicas((where.pp_rank,)))
        return LocalGroup(0, 1) if group is None else group

    def _tensor_ranks(self) -> TensorRanks | None:
        """Who shares the matrices of this rank's stages; needed before the model is cut."""
        where = self.coordinates
        if where.tp == 1:
            return None
        self._create(mesh.tensor_groups(where))
        group = self.communicators.get("tensor", where.sharers(where.pp_rank, where.dp_rank))
        assert group is not None
        return TensorRanks(group, sequence=self.options.sequence_parallel)

    def _expert_ranks(self, turns: TwoThreads | None) -> ExpertRanks:
        """Who holds the experts of this rank's stages; needed before the model is cut."""
        where = self.coordinates
        self._create(mesh.exchange_groups(where))
        group = self.communicators.get("exchange", where.exchangers())
        sliced = self.options.expert_tp
        return ExpertRanks(group, sharers=self.tensor_ranks, turns=turns, sliced=sliced)

    def _shard(self, ranks: TensorRanks) -> None:
        """Cuts matrices as the first rank has found it, or refuses on all ranks."""
        plan: ShardingPlan | None = None
        refused: ModelError | None = None
        try:
            search = partial(
                chosen_plan,
                tp=ranks.size,
                device=self.device,
                costs=self.plan.costs,
                num_microbatches=self.plan.num_microbatches,
            )
            plan = self.model.sharding_plan(ranks.size, search)
        except ModelError as error:
            refused = error
        said = everybody().first_says(None if plan is None else plan.to_json())
        try:
            if refused is None:
                self.model.shard(ranks, None if said is None else plan_from_json(said))
        except ModelError as error:
            refused = error
        anywhere = everybody().everyone(None if refused is None else str(refused))
        if refused is None and any(anywhere):
            refused = ModelError(next(filter(None, anywhere)))
        if refused is not None:
            raise refused

    def _compare_stages(self) -> None:
        """Before groups are made of what ranks have found: others would be waited for.

        Replicas of a stage add up gradients, and have looked at batches of their own.
        """
        shared = sorted((name, list(stages)) for name, stages in self._weights.shared.items())
        units = " ".join(unit.name for unit in self.model.units)
        found = fingerprint.shared_print({"layers": units, "weights of several stages": shared})
        for stage, named in self._weights.by_stage.items():
            found |= fingerprint.stage_print(stage, list(named))
        fingerprint.compare(found, what="stages", partial=True)

    def _create_groups(self, *, shards: bool) -> None:
        ordered = self.options.backend == "nccl"
        wanted = mesh.running_groups(
            self.coordinates,
            self.placement,
            self._weights.shared.values(),
            shards=shards,
            pairs=mesh.neighbours(self.placement, self.model.skips) if ordered else (),
        )
        if not schedule_of(self.plan).synchronous:
            wanted += mesh.verdict_groups(self.coordinates)
        if self.model.experts:
            wanted += mesh.expert_groups(self.coordinates, self.placement, shards=shards)
        self._create(wanted)
        saving_s = max(self.options.timeout_s, _SAVING_S)
        self._create(mesh.checkpoint_groups(self.coordinates), timeout_s=saving_s)

    def _create(self, wanted: mesh.Wanted, *, timeout_s: float | None = None) -> None:
        mesh.create(
            self.communicators,
            wanted,
            backend=self.options.backend,
            timeout_s=timeout_s or self.options.timeout_s,
        )

    def _open_buckets(self) -> tuple[int, ...]:
        """Buckets per stage from the stages' sizes, the same answer on every rank."""
        own = {
            stage: sum(
                p.numel() * (self._wire or self._summed(p.dtype)).itemsize
                for p in self._weights.own_of(stage)
            )
            for stage in self.owned
        }
        gathered = everybody().everyone(own)
        sizes = {stage: size for part in gathered for stage, size in part.items()}
        where, copies = self.coordinates, self.placement.weight_copies
        spread = bool(self.model.experts) and where.dp * where.tp > where.block
        reduces = where.dp > 1 or copies > 1 or spread
        return tuple(
            num_buckets(sizes[stage], self.options.bucket_mb) if reduces else 0
            for stage in range(self.placement.num_stages)
        )

    def _summed(self, dtype: torch.dtype) -> torch.dtype:
        """In which gradients of such weights are added up."""
        return dtype if self._narrow else main_dtype(dtype)

    @property
    def gradients(self) -> dict[int, StageGradients]:
        """By stage; empty until ``build_gradients``."""
        return self._gradients.stages

    @property
    def mains(self) -> AllMainWeights:
        return self._gradients.mains

    def build_gradients(self) -> None:
        """Lays out gradient buffers; call when parameters are on their device, before training."""
        self._trained = self._weights.trained()
        watch = self._parts.watch
        others = {p.dtype for p in self._weights if p.requires_grad} - {torch.bfloat16}
        if self._narrow and others:
            raise ModelError(
                "sum_dtype=bf16 sums gradients of bf16 weights in their own type, but some of the "
                f"model's are in {', '.join(sorted(map(str, others)))}. Use precision='bf16-true', "
                "or sum_dtype='fp32'."
            )
        sums = [self._gradients]
        if self.stream is not None:
            make = partial(
                RankGradients, self._weights, self.placement, self.coordinates, self.communicators
            )
            sums += [make() for _ in range(1, self.stream.num_sums)]
        for gradients in sums:
            own = gradients is self._gradients
            gradients.build(
                buckets=self.plan.stage_buckets(self.placement.num_stages),
                sharded=self.plan.overlap == "zero1",
                wire=self._wire,
                narrow=self._narrow,
                launched=self._executor.reduction_started,
                noted=None if watch is None else watch.note_bucket,
                alone=self.stream is None,
                mains=None if own else self._gradients.mains,
            )
            gradients.left_alone = self._gradients.left_alone
        if self.stream is not None:
            versions = WeightVersions(
                {stage: tuple(named.values()) for stage, named in self._weights.by_stage.items()},
                self.mains,
            )
            self.stream.keep(sums, versions)
        if self.plan.overlap != "none" and not self._asynchronous:
            self._gradients.check_asynchronous(self.device)
            self._asynchronous = True

    def _all_sums(self) -> Sequence[RankGradients]:
        """All buffers of gradients: one set, or one per update that is under way."""
        return [self._gradients] if self.stream is None else self.stream.sums

    def updated_parameters(self) -> Iterable[nn.Parameter]:
        """What the optimizer updates: owned parameters, or what stands for them."""
        return self.mains.updated_parameters(self._weights)

    def owners_group(self, stage: int, experts: bool = False) -> dist.ProcessGroup | None:
        """All processes that hold a stage, or its same ``experts``, for talk from host memory."""
        owners = self.placement.owners(stage)
        where = self.coordinates
        members = where.expert_holders(owners) if experts else where.replicas(owners)
        return self.communicators.get("control", members)
