"""A plan for the compiler: everything that decides a program, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from strategies.costs.table import Costs
from strategies.errors import PlanError
from strategies.small_file import FileRefusedError, read_text

# --------------------------------------------------------------------------------------- recompute
# Which forwards keep only their input and are run again before their backward.

Policy = Literal["none", "full", "layer", "selective", "mario", "optimal"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_INSIDE: tuple[Policy, ...] = ("layer", "selective")  # no R in the program

NUM_PASSES = 4

Family = Literal["matmul", "attention", "norm", "activation"]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True, slots=True)
class Recompute:
    """What ``recompute=`` asks for.

    Attributes:
        policy: ``none``: nothing; ``full``: every forward, right before its backward;
            ``layer``: every layer keeps its input only, and its backward runs it again, one after
            the other; ``selective``: parts of layers; both without an R in the program;
            ``mario``: every forward, moved into idle time (``passes``); ``optimal``: as many
            forwards as the memory demands, and those that cost least.
        passes: For ``mario``, how many of its passes run: 1 apply-checkpoint, 2 overlap-recompute,
            3 remove-redundancy, 4 prepose-forward.
        max_full_activations: For ``optimal``, how many full activations a rank may hold, in
            full-rank microbatches; None for what fits into the rank's memory.
        layers: For ``selective``, type names of layers and what is recomputed in them; elsewhere
            it is everything but ``matmul``, products with weights. ``attention`` is its core,
            ``activation`` all that is cheap: elementwise operations, dropout.
    """

    policy: Policy = "none"
    passes: int = NUM_PASSES
    max_full_activations: float | None = None
    layers: tuple[tuple[str, tuple[Family, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PlanError(
                f"recompute={self.policy} is unknown. Try recompute="
                f"{' or recompute='.join(POLICIES)}."
            )
        if not 1 <= self.passes <= NUM_PASSES:
            raise PlanError(
                f"recompute.passes={self.passes}: there are {NUM_PASSES}, applied in order. Try "
                f"recompute.passes={NUM_PASSES}."
            )
        if self.passes != NUM_PASSES and self.policy != "mario":
            raise PlanError(
                f"recompute.passes={self.passes} are the passes of recompute=mario, but "
                f"recompute={self.policy}. Try recompute=mario recompute.passes={self.passes}."
            )
        self._check_layers()
        cap = self.max_full_activations
        if cap is None:
            return
        if self.policy != "optimal":
            raise PlanError(
                f"recompute.max_full_activations={cap:g} is the cap of recompute=optimal, but "
                f"recompute={self.policy}. Try recompute=optimal "
                f"recompute.max_full_activations={cap:g}."
            )
        if not cap > 0:
            raise PlanError(
                f"recompute.max_full_activations={cap:g}: a backward needs one full activation. "
                "Try recompute.max_full_activations=1."
            )

    def _check_layers(self) -> None:
        if self.layers and self.policy != "selective":
            name = self.layers[0][0]
            raise PlanError(
                f"recompute.layers=[{name}:...] says what recompute=selective does in a layer, but "
                f"recompute={self.policy}. Try recompute=selective, or leave recompute.layers out."
            )
        for name, families in self.layers:
            for family in families:
                if family not in FAMILIES:
                    raise PlanError(
                        f"recompute.layers=[{name}:{family}]: {family} is none of "
                        f"{', '.join(FAMILIES)}. Try recompute.layers=[{name}:activation]."
                    )

    @property
    def inside(self) -> bool:
        """Whether layers are run again in their backwards, whatever the program."""
        return self.policy in _INSIDE

    @property
    def rewrites(self) -> bool:
        """Whether programs have R instructions."""
        return self.policy in ("full", "mario", "optimal")


NO_RECOMPUTE = Recompute()


Overlap = Literal["none", "grad_reduce", "zero1"]
OVERLAPS: tuple[Overlap, ...] = ("grad_reduce", "none", "zero1")

LossOver = Literal["microbatch", "tokens", "batch"]
LOSS_OVER: tuple[LossOver, ...] = get_args(LossOver)


@dataclass(frozen=True, slots=True)
class Plan:
    """The degrees and policies of one run.

    Attributes:
        schedule: Registry name.
        pp: Pipeline ranks.
        num_microbatches: M per step and DP replica.
        stages_per_rank: V; None for the schedule's default.
        group: N microbatches per round; None for the schedule's default, which ``foldx`` chooses
            by simulation.
        overlap: When gradient reductions start; with ``zero1`` they scatter, each replica updates
            its share of the weights, and these are gathered under the next step's forwards.
        buckets: Reduction buckets: one number for every stage, or one per stage; 0 for none; None
            for one, and on ranks, which know the sizes, for as many as ``Options.bucket_mb`` makes.
        split_backward: Split every B of a schedule that does not split by itself into I and W.
        costs: What instructions take, for everything that is ordered by time: zero-bubble orders,
            ``foldx``'s group, messages. Hashable; None for F = I = W and free messages.
        memory_bytes: Limit per rank for ``foldx``'s group and ``recompute=optimal``; None for no
            limit.
        file: What ``schedule=custom`` takes its order from.
        recompute: Which forwards keep their input only.
        loss_over: ``batch`` puts the outputs of all microbatches together before one loss, behind
            all forwards; ``microbatch`` takes one loss of each, which counts by its rows, and
            ``tokens`` one that counts by its targets.
        vertical_sync: Without a flush, use one version of the weights for a microbatch on all
            stages, where the schedule would not.
        error_feedback: Where gradients are one update late, the share of the difference between the
            last two updates that is added to an update; 0 for nothing.
        accumulation: Without a flush, batches whose gradients make one update of the weights; with
            one, 1, whatever is accumulated.
        skips: Pairs of stages that are no neighbours, between which the model sends tensors.
        pairs: Run each backward that a forward follows directly as one with it, so that the
            exchange of experts' tokens of either runs under the compute of the other.
        exchanges: Per stage, how many of its layers have experts on other ranks; () for none, and
            where only the ranks know.
    """

    schedule: str = "1f1b"
    pp: int = 1
    num_microbatches: int = 1
    stages_per_rank: int | None = None
    group: int | None = None
    overlap: Overlap = "grad_reduce"
    buckets: int | tuple[int, ...] | None = None
    split_backward: bool = False
    costs: Costs | None = None
    memory_bytes: int | None = None
    file: ScheduleFile | None = None
    recompute: Recompute = NO_RECOMPUTE
    loss_over: LossOver = "microbatch"
    vertical_sync: bool = False
    error_feedback: float = 0.0
    accumulation: int = 1
    skips: tuple[tuple[int, int], ...] = ()
    pairs: bool = False
    exchanges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.loss_over not in LOSS_OVER:
            raise PlanError(
                f"loss_over={self.loss_over} is unknown. Try loss_over="
                f"{' or loss_over='.join(LOSS_OVER)}."
            )
        if not 0 <= self.error_feedback <= 1:
            raise PlanError(
                f"schedule.error_feedback={self.error_feedback:g} is a share, 0 for nothing "
                "and 1 for the whole difference. Try schedule.error_feedback=1."
            )
        counts = (self.buckets,) if isinstance(self.buckets, int) else self.buckets
        if min(counts or (), default=0) < 0:
            raise PlanError(f"buckets={self.buckets}: a number of buckets is 0 or more.")
        if self.overlap not in OVERLAPS:
            raise PlanError(
                f"overlap={self.overlap} is unknown. Try overlap={' or overlap='.join(OVERLAPS)}."
            )

    def stage_buckets(self, num_stages: int) -> tuple[int, ...]:
        counts = 1 if self.buckets is None else self.buckets
        return (counts,) * num_stages if isinstance(counts, int) else counts


Backend = Literal["auto", "shared", "gloo", "nccl", "staged", "strict"]
GradientType = Literal["fp32", "bf16"]
OnNan = Literal["stop", "skip", "ignore"]
CheckpointFormat = Literal["auto", "file", "folder"]


@dataclass(frozen=True, slots=True)
class Options:
    """How ranks run a plan: what decides no program.

    Each is a keyword of ``PipelineStrategy``, which says what it means. A rank's engine takes them
    with nothing left open: a backend, a seed.
    """

    dp: int | Literal["auto"] = "auto"
    tp: int = 1
    ep: int = 1
    expert_tp: bool = False
    sequence_parallel: bool = False
    units_per_stage: tuple[int, ...] | None = None
    bucket_mb: float = 25.0
    grad_dtype: GradientType = "fp32"
    sum_dtype: GradientType = "fp32"
    backend: Backend = "auto"
    timeout_s: float = 1800.0
    seed: int | None = None
    check_batches: bool = True
    pipeline_layers: str | None = None
    async_save: bool = True
    compile: bool = False
    on_nan: OnNan = "stop"
    checkpoints: CheckpointFormat = "auto"
    whole_after: bool | Literal["auto"] = "auto"
    post_validation: bool | Literal["auto"] = "auto"
    synchronous_steps: int = 0


# Resident size of a rank that has imported torch and Lightning and done nothing yet.
IDLE_RANK_BYTES = 350_000_000


def num_buckets(num_bytes: int, bucket_mb: float) -> int:
    """Buckets for a stage's gradient: equal shares of at most ``bucket_mb`` MiB, at least one.

    Raises:
        PlanError: ``bucket_mb`` is not a size.

    >>> num_buckets(60 * 2**20, 25.0)
    3
    """
    if not bucket_mb > 0:
        raise PlanError(f"overlap.bucket_mb={bucket_mb:g} is no size. Try overlap.bucket_mb=25.")
    return max(1, math.ceil(num_bytes / (bucket_mb * 2**20)))


# ----------------------------------------------------------------------------------- schedule file
# Ranks compile the same plan as their parent, so a plan carries the text and not a path: what is
# read once is what runs, whatever becomes of the file. ``strategies.schedules.custom`` reads the
# text.

# A row of a million instructions; a mistyped path to a data set or device ends here.
_MAX_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """The content of ``schedule.file``.

    Attributes:
        name: What messages call it: the path as it was given.
        text: Its whole content.
        placement: ``loop``, ``v`` or ``bidirectional``; None to take it from the rows.
    """

    name: str
    text: str = field(repr=False)
    placement: str | None = None


def read_schedule_file(path: str, *, placement: str | None = None) -> ScheduleFile:
    """Reads a schedule's CSV; a relative path is one of the working directory.

    Raises:
        PlanError: There is no such file, or it is no small text.
    """
    try:
        text = read_text(Path(path).expanduser(), most_bytes=_MAX_BYTES).removeprefix("\ufeff")
    except FileNotFoundError:
        raise PlanError(
            f"schedule.file={path} does not exist in {Path.cwd()}. "
            "Try schedule.file=/path/to/my.csv."
        ) from None
    except FileRefusedError as error:
        raise PlanError(
            f"schedule.file={path} cannot be read: {error}.",
            fix="Save it as CSV (comma separated, UTF-8), or try schedule.file=/path/to/my.csv.",
        ) from None
    return ScheduleFile(path, text, placement)
