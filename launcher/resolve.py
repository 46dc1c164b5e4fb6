"""LaunchConfig -> everything a run needs to know, decided once and torch-free.

Parent and workers both go through here, so there is one source for every degree, batch size, stage
cut and program.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from launcher.config import LaunchConfig
from launcher.config.check_training import warmup_note
from launcher.config.decode import brings_own
from launcher.config.derived import asked_options, asked_schedule, transformer_shape, uniform_costs
from launcher.processes.nodes import asked_world
from launcher.workloads.data.source import SourceKind, TextSource
from launcher.workloads.hf.hf_shape import HfShape, read_shape
from launcher.workloads.loads import unit_loads
from launcher.workloads.model_share import (
    ModelShape,
    PlannedShape,
    check_ep,
    check_tp,
    model_costs,
    units_per_layer,
    vocabulary_note,
)
from launcher.workloads.traced_shape import TracedShape, stage_handing
from strategies.analysis.late_verdict import post_validation_pays, with_undo_buffers
from strategies.analysis.memory import peak_memory
from strategies.compiler import Programs, compile_plan
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.capacity import Capacity, capacity
from strategies.costs.hardware import ElementSizes
from strategies.costs.load import Load, sum_loads
from strategies.costs.table import Costs
from strategies.errors import PlanError
from strategies.ir.program import Placement
from strategies.ir.versions import weight_versions
from strategies.plan import (
    Options,
    Plan,
    Recompute,
    ScheduleFile,
    num_buckets,
)
from strategies.planner.cut import balance, by_counts, skips
from strategies.planner.problem import handing
from strategies.simulator.engine import simulate

ELEMENT_BYTES = {
    "32-true": ElementSizes.all(4),
    "64-true": ElementSizes.all(8),
    "bf16-mixed": ElementSizes(activation=2),
    "16-mixed": ElementSizes(activation=2),
    # Summed and updated in 32 bits.
    "bf16-true": ElementSizes(weight=2, activation=2, main=4),
}
MOMENTS = {"adamw": 2, "adam": 2, "muon": 2, "sgd": 1, "class": 2}  # of a class as of most


@dataclass(frozen=True, slots=True)
class Run:
    """A resolved configuration.

    Attributes:
        dp: Replicas, ``auto`` filled in.
        num_microbatches: M per step and replica.
        batch_size: Sequences per step and replica.
        group: Microbatches per round; None for schedules without rounds.
        options: What the ranks get beside it.
        costs: What the simulator assumes.
        num_parameters: Of the whole model; None for one that only the ranks know.
        own_model: Whether only the ranks know the model (``model=class``, an installed package's,
            or an architecture of transformers without known sizes): it is cut there, and predicted
            with uniform costs.
        own_data: Whether the data module does.
        traced: The figures of such a model, where it is planned with them.
    """

    config: LaunchConfig
    dp: int
    num_microbatches: int
    batch_size: int
    shape: ModelShape
    stages: tuple[range, ...]
    group: int | None
    plan: Plan
    options: Options
    programs: Programs
    costs: Costs
    num_parameters: int | None
    own_model: bool
    own_data: bool
    traced: TracedShape | None = None

    @property
    def world_size(self) -> int:
        return self.config.pp * self.dp * self.config.tp

    @property
    def describes_model(self) -> bool:
        """Whether a checkpoint can say of which model it is, by more than a name."""
        return isinstance(self.shape, HfShape) or not self.own_model

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said before it starts, a line each."""
        vocabulary = None if self.own_model else vocabulary_note(self.shape, self.config.tp)
        notes = vocabulary, self._pairs_note, warmup_note(self.config)
        return tuple(note for note in notes if note is not None)

    @property
    def _pairs_note(self) -> str | None:
        """Where pairs (overlap.exchange) are slower than an exchange in turn with compute."""
        if not self.plan.pairs:
            return None
        priced = bool(self.costs.table(self.programs.train).exchange)
        pairs, in_turn = (
            simulate(program, self.costs).makespan
            for program in (
                self.programs.train,
                compile_plan(replace(self.plan, pairs=False)).train,
            )
        )
        # Without a figure for the exchange: what pairs take longer hides the largest of them, too.
        if pairs <= in_turn * (1.02 if priced else _MOST_HIDDEN):
            return None
        return (
            f"overlap.exchange=true: a step of schedule={self.config.schedule.name} is predicted "
            f"to take {pairs / in_turn - 1:.0%} longer in pairs than with its exchange in turn. "
            + (
                "Try overlap.exchange=false: the exchange is too short to be worth hiding."
                if self.config.schedule.name in _PAIRED_WELL
                else "A pair waits for both neighbours. Try schedule=eager_1f1b, or "
                "overlap.exchange=false."
            )
        )

    @property
    def num_active_parameters(self) -> int | None:
        """Of the parameters those that one token meets; None where all do, or nobody knows."""
        shape = self.shape
        if self.own_model or isinstance(shape, HfShape) or shape.moe is None:
            return None
        return shape.active_parameters

    @property
    def parameters(self) -> str | None:
        """How many there are, in words; None if nobody knows."""
        if self.num_parameters is None:
            return None
        active = self.num_active_parameters
        some = "" if active is None else f" ({active:,} active)"
        return f"{self.num_parameters:,} parameters{some}"

    @property
    def layers_per_stage(self) -> tuple[float, ...]:
        """Layers per stage; a half is an attention or an MLP alone."""
        return stage_layers(self.traced or self.shape, self.stages)


_MOST_HIDDEN = 1.25
# Their ranks warm up for two forwards more than their successors.
_PAIRED_WELL = ("eager_1f1b", "interleaved_1f1b", "foldx_fifo", "zb_h2")


def resolve(
    config: LaunchConfig, file: ScheduleFile | None = None, *, traced: TracedShape | None = None
) -> Run:
    """Fills in what was left open and compiles the programs.

    ``file``: the content of ``schedule.file`` as the parent has read it; None to read it.

    Raises:
        PlanError: Degrees, batch sizes or the cut do not work together.
        ProgramError: A user's own schedule made a wrong program.
        DataError: The vocabulary is the data's, and the data cannot be read.
    """
    elsewhere = config.mode in ("simulate", "plan")  # Nothing of it runs on this machine.
    if config.trainer.precision == "16-mixed" and not (elsewhere or uses_gpu(config)):
        raise PlanError(
            "trainer.precision=16-mixed needs a GPU: on a CPU Lightning would run bf16-mixed in "
            "its place. Try trainer.precision=bf16-mixed."
        )
    dp = num_replicas(config)
    shape = model_shape(config)
    tied = bool(getattr(shape.sizes, "tied", False)) if isinstance(shape, HfShape) else None
    asked = asked_schedule(config, dp, file, tied=tied)
    sized: PlannedShape = traced or shape
    own_model = brings_own("model", config.model.name) or (
        isinstance(shape, HfShape) and shape.sizes is None
    )
    uniform = config.mode == "simulate" and config.costs.name == "uniform"
    # With uniform costs the model plays no part: any number of stages goes.
    opaque = uniform or (own_model and traced is None)
    if not opaque or (isinstance(shape, HfShape) and not uniform):
        check_tp(sized, config.tp, sequence_parallel=config.sequence_parallel)
        # What is traced of a model says nothing of experts; the ranks see them.
        if traced is None or elsewhere:
            check_ep(sized, config.ep, config.tp)
        elif isinstance(shape, HfShape):
            check_ep(shape, config.ep, config.tp)
    stages = () if opaque else _stages(config, sized, asked.placement)
    loads = _loads(config, sized, stages, asked.plan.recompute) if stages else ()
    assumed = opaque or config.costs.name == "uniform"
    costs: Costs = uniform_costs(config) if assumed else _analytic(config, dp, loads)
    handed: tuple[tuple[int, int, int], ...] = ()
    if traced is not None and isinstance(costs, AnalyticCosts):
        handed = stage_handing(traced, stages, config.data.microbatch_size)
        costs = replace(costs, stages=handing(list(costs.stages), handed), handed=handed)
    if config.costs.name == "profiled":
        costs = _profiled(config, shape, stages, costs, dp)
    plan = replace(
        asked.plan,
        buckets=_buckets(config, dp, loads, asked.placement, opaque=opaque),
        costs=costs,
        memory_bytes=None if assumed else rank_capacity(config, dp).room,
        skips=skips(handed),
        exchanges=_exchanges(config, loads),
    )
    programs = compile_plan(plan)
    if config.mode in ("train", "validate"):
        _refuse_versions(config, plan, programs)
    if config.mode not in ("simulate", "plan"):
        _ = programs.all  # What ranks may come to run is proven before one of them starts.
    by_hand = config.schedule.units_per_stage or config.schedule.layers_per_stage
    late = _post_validation(config, programs, costs, plan.memory_bytes, opaque=opaque)
    if late is True:
        costs = with_undo_buffers(costs)
    return Run(
        config=config,
        dp=dp,
        num_microbatches=plan.num_microbatches,
        batch_size=asked.batch_size,
        shape=shape,
        stages=stages,
        group=asked.shape.group if programs.choice is None else programs.choice.group,
        plan=plan,
        options=replace(
            asked_options(config, dp),
            units_per_stage=by_hand if own_model else tuple(map(len, stages)),
            post_validation=late,
        ),
        programs=programs,
        costs=costs,
        num_parameters=None if own_model and traced is None else sized.num_parameters,
        own_model=own_model,
        own_data=brings_own("data", config.data.name),
        traced=traced,
    )


def _post_validation(
    config: LaunchConfig, programs: Programs, costs: Costs, room: int | None, *, opaque: bool
) -> bool | Literal["auto"]:
    """Whether ranks update before the verdict; of a model that they alone know, they decide."""
    trainer, asked = config.trainer, config.trainer.post_validation
    by_norm = trainer.gradient_clip_val is None or trainer.gradient_clip_algorithm == "norm"
    if not trainer.waits_at_flush or not by_norm or trainer.precision == "16-mixed":
        return False
    if config.pp == 1 or config.ep > 1 or asked is False or programs.stream is not None:
        return False
    if asked is True:
        return True
    if config.mode not in ("train", "validate"):
        return False  # A prediction is of what was asked for.
    if opaque:
        return "auto"
    return post_validation_pays(simulate(programs.train, costs), costs, memory_bytes=room)


def rank_capacity(config: LaunchConfig, dp: int) -> Capacity:
    """The memory of one rank of a run, and what of it tensors may take."""
    return capacity(config.hardware, tp=config.tp, pp=config.pp, dp=dp, ep=config.ep)


def _refuse_versions(config: LaunchConfig, plan: Plan, programs: Programs) -> None:
    """Refuses versions of weights that do not fit."""
    if programs.stream is None or plan.costs is None or plan.memory_bytes is None:
        return
    held = peak_memory(programs.train, plan.costs.table(programs.train))
    for rank, memory in enumerate(held or ()):
        if memory.total > plan.memory_bytes:
            versions = weight_versions(programs.train)[rank]
            raise PlanError(
                f"schedule={plan.schedule} holds {memory.total / 1e9:.3g} GB on rank {rank}, of it "
                f"{memory.parameters / 1e9:.3g} GB for {versions} versions of its weights, and "
                f"hardware.memory_gb={config.hardware.memory_gb:g} has room for "
                f"{plan.memory_bytes / 1e9:.3g}. Try schedule=1f1b, which holds "
                "one version, more ranks (pp), or another hardware.memory_gb."
            )


def stage_layers(shape: PlannedShape, stages: Sequence[range]) -> tuple[float, ...]:
    """Layers per stage, of ranges of units; of a traced model, units."""
    if isinstance(shape, TracedShape):
        return tuple(float(len(stage)) for stage in stages)
    share = units_per_layer(shape)
    last = share * shape.layers + 1
    return tuple(sum(1 for u in stage if 0 < u < last) / share for stage in stages)


def model_shape(config: LaunchConfig) -> ModelShape:
    """The model that ``model.*`` describes; the vocabulary is the data's if left open.

    Raises:
        PlanError: Its sizes do not fit together.
        ModelError: ``model=hf`` and a folder that cannot be used.
        DataError: The vocabulary is the data's, and the data cannot be read.
    """
    model = config.model
    if model.name == "hf":
        return read_shape(
            model.path,
            pretrained=model.pretrained,
            sequence=model.sequence,
            layers_path=model.layers_path,
        )
    vocab = model.vocab
    texts = config.data.name in ("stdlib", "text")
    if vocab is None and config.data.tokenizer is None and config.data.name != "tokens":
        if not texts and not brings_own("model", config.model.name):
            raise PlanError(
                f"data={config.data.name} does not say how many token ids it has. "
                "Try model.vocab=50257."
            )
        vocab = 256  # bytes
    elif vocab is None:
        from launcher.workloads.data.source import vocab_size  # needs the tokenizers library

        vocab = vocab_size(text_source(config))
    return transformer_shape(model, vocab)


def text_source(config: LaunchConfig) -> TextSource:
    data = config.data
    cap = data.max_bytes
    if cap is None and data.name == "stdlib":
        cap = 4_000_000  # Read in hundredths of a second; more than a laptop's run gets through.
    path = None if data.path is None else str(Path(data.path).expanduser().absolute())
    kinds: dict[str, SourceKind] = {"stdlib": "stdlib", "text": "text", "tokens": "tokens"}
    return TextSource(kinds[data.name], path, data.tokenizer, data.dtype, cap)


def num_gpus() -> int:
    """GPUs of this machine, counted without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit()])


def num_cores() -> int:
    """Cores that this process may use: of a job beside others, its share."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def uses_gpu(config: LaunchConfig) -> bool:
    """Whether ranks run on GPUs: those of this machine, or those asked of the cluster."""
    if config.cluster.name == "slurm":
        return config.cluster.gpus_per_node is not None
    wanted = config.trainer.accelerator
    return wanted == "gpu" or (wanted == "auto" and num_gpus() > 0)


def num_replicas(config: LaunchConfig) -> int:
    if config.dp != "auto":
        return int(config.dp)
    return max(1, num_places(config) // (config.pp * config.tp))


def num_places(config: LaunchConfig) -> int:
    """Ranks that the cluster, or else this machine, has room for."""
    if (asked := asked_world(config)) is not None:
        return asked
    return num_gpus() if uses_gpu(config) else num_cores()


def _stages(config: LaunchConfig, shape: PlannedShape, placement: Placement) -> tuple[range, ...]:
    num_stages = placement.num_stages
    counts = config.schedule.layers_per_stage
    costs = model_costs(shape)
    if config.schedule.units_per_stage is not None:
        return by_counts(config.schedule.units_per_stage, len(costs), num_stages)
    if counts is None:
        return balance(costs, num_stages)
    if sum(counts) != shape.layers:
        even = [shape.layers // num_stages + (i < shape.layers % num_stages) for i in
                range(num_stages)]  # fmt: skip
        layers = "num_hidden_layers" if isinstance(shape, HfShape) else "model.layers"
        raise PlanError(
            f"schedule.layers_per_stage={list(counts)} adds up to {sum(counts)} layers, but "
            f"{layers}={shape.layers}. Try schedule.layers_per_stage="
            f"[{','.join(map(str, even))}]."
        )
    return by_counts(layer_units(shape, counts), len(costs), num_stages)


def layer_units(shape: PlannedShape, layers: tuple[int, ...]) -> tuple[int, ...]:
    units = [units_per_layer(shape) * count for count in layers]
    units[0] += 1  # the embedding
    units[-1] += 1  # the head
    return tuple(units)


def _loads(
    config: LaunchConfig, shape: PlannedShape, stages: tuple[range, ...], recompute: Recompute
) -> tuple[Load, ...]:
    units = unit_loads(
        shape,
        config.tp,
        config.data.microbatch_size,
        sequence_parallel=config.sequence_parallel,
        selective=recompute.inside,
        whole_layers=recompute.policy == "layer",
        gpu_element=gpu_element(config),
        layers=recompute.layers,
        attention=config.costs.attention,
        ns_steps=config.optimizer.muon_steps,
        expert_tp=config.expert_tp,
    )
    return tuple(sum_loads([units[index] for index in stage]) for stage in stages)


def _buckets(
    config: LaunchConfig,
    dp: int,
    loads: tuple[Load, ...],
    placement: Placement,
    *,
    opaque: bool,
) -> int | tuple[int, ...]:
    """Buckets per stage: none where there is nobody to reduce with and nothing to simulate."""
    if opaque:
        costs = uniform_costs(config)
        return costs.num_buckets if costs.reduces or dp > 1 else 0
    if dp < 2 and placement.weight_copies < 2 and not _spreads(config, dp):
        return 0
    size = element_sizes(config).wire
    block = config.ep * (config.tp if config.expert_tp else 1)
    held = [load.parameters - load.experts + load.experts // block for load in loads]
    return tuple(num_buckets(count * size, config.overlap.bucket_mb) for count in held)


def _exchanges(config: LaunchConfig, loads: tuple[Load, ...]) -> tuple[int, ...]:
    """Per stage, layers whose tokens travel; () where there are none, or only ranks know."""
    found = tuple(len(load.exchanged) for load in loads) if config.ep > 1 else ()
    return found if any(found) else ()


def _spreads(config: LaunchConfig, dp: int) -> bool:
    """Whether tensor-parallel ranks alone have the same experts."""
    return config.model.experts is not None and dp * config.tp > (
        config.ep * (config.tp if config.expert_tp else 1)
    )


def gpu_element(config: LaunchConfig) -> int | None:
    """Bytes of an activation on a GPU whose kernels are known; None on other machines."""
    return None if config.hardware.num_sms is None else element_sizes(config).activation


def element_sizes(config: LaunchConfig) -> ElementSizes:
    """What ``trainer.precision`` and the types of ``overlap`` make of an element."""
    sizes = ELEMENT_BYTES[config.trainer.precision]
    if config.overlap.sum_dtype == "bf16":
        return replace(sizes, gradient=2, wire=2)
    return replace(sizes, wire=2) if config.overlap.grad_dtype == "bf16" else sizes


def _profiled(
    config: LaunchConfig, shape: ModelShape, stages: tuple[range, ...], assumed: Costs, dp: int
) -> Costs:
    from launcher.planning.profile_check import profiled_costs  # It needs what this module offers.

    if not isinstance(assumed, AnalyticCosts):
        raise PlanError(
            f"costs=profiled: of model={config.model.name} only the ranks know the units. Try "
            "costs=uniform."
        )
    ranks = config.pp * dp * config.tp
    return profiled_costs(config, shape, stages, assumed, ranks=ranks, gpu=uses_gpu(config))


def _analytic(config: LaunchConfig, dp: int, loads: tuple[Load, ...]) -> AnalyticCosts:
    return AnalyticCosts(
        loads,
        config.hardware.of_ranks(config.pp * dp * config.tp),
        dp=dp,
        sizes=element_sizes(config),
        optimizer_elements=MOMENTS[config.optimizer.name],
        transport=config.costs.transport,
        tp=config.tp,
        sequence_parallel=config.sequence_parallel,
        number_format=config.trainer.number_format,
        ep=config.ep,
        expert_tp=config.expert_tp,
        imbalance=config.model.expert_imbalance,
    )
