"""What the executor asks of a model: run one stage for one microbatch.

Two implementations exist. ``UnitModel`` (``unit_model.py``) serves modules that declare an ordered
list of units; ``ReplayModel`` (``replay/``) cuts any other LightningModule. The executor must not
know which of the two it drives, and neither may know the schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.expert_parallel import ExpertRanks
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard, TensorRanks

if TYPE_CHECKING:
    from strategies.models.replay.path import ParameterTable
    from strategies.models.replay.rows.draws import BatchDraws
    from strategies.models.replay.step_paths import Followed
    from strategies.models.selective.policy import Selection
    from strategies.sharding_plan import ShardingPlan


Mode = Literal["train", "validate", "test", "predict"]
Search = Callable[[nn.Module, Any], "ShardingPlan"]
Step = tuple[Mode, int, Hashable]  # number of the loader or way, structure of the batch

STEP_NAMES: dict[Mode, str] = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece of a model that is cut: attention, MLP, embedding, head.

    Attributes:
        name: Fully qualified module name inside the LightningModule, e.g. ``net.layers.3``.
        cost: Relative cost of one forward (FLOPs, or parameters where FLOPs are unknown), > 0.
    """

    name: str
    cost: float


class RowsMixed(NamedTuple):
    """Where rows of a batch have a part in what others come to, before the last layer.

    Attributes:
        line: Of the first layer that gets a row which others have a part in; None for none.
        uneven: Names of what is logged there and is no mean over rows.
        number: The line of a number of all rows that the loss takes; None for none.
        kept: The line of such a value that the step keeps on its module; None for none.
    """

    line: str | None = None
    uneven: tuple[str, ...] = ()
    number: str | None = None
    kept: str | None = None


@dataclass(frozen=True, slots=True)
class LogCall:
    """One ``self.log(name, value, **options)`` of the user's step, to be repeated on every rank.

    The value may be on a device still: nobody waits for it inside the pipeline.

    Attributes:
        metric: Name inside the module of a torchmetrics object that was logged; the value is then
            that of the batch, None where the step has not asked for it.
    """

    name: str
    value: float | Tensor | None
    options: dict[str, Any]
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What one forward of one stage leaves behind.

    Attributes:
        tensors: Boundary tensors for the next stage, in a fixed order; empty on the last stage.
            Integer tensors and tensors without gradient are allowed.
        loss: The scalar loss, on the last stage of a training step only.
        result: The return value of the user's step on the last stage (predictions).
        logs: The user's log calls whose values were real on this stage.
        groups: How many of the tensors go to which stage, in the order of ``tensors``; None where
            all go to the next one.
        ends: On the last stage, what the rest of the step needs behind the last layer, for
            ``whole``; or the reason why the step cannot be taken up there.
        marks: What ``at_end`` of ``forward`` gave at that place; of ``whole``, whether the step
            has drawn random numbers before it.
        leaves: Where the gradients of the inputs arrive, if those are not the inputs themselves.
    """

    tensors: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    result: Any = None
    logs: tuple[LogCall, ...] = field(default_factory=tuple)
    groups: tuple[tuple[int, int], ...] | None = None
    ends: tuple[Tensor, ...] | str = ""
    marks: Any = None
    leaves: tuple[Tensor, ...] | None = None


class StageModel(ABC):
    """A model seen as an ordered list of units, able to run any contiguous range of them."""

    # Whether each step runs whole, once for the batch, in the place of the batch's loss.
    uncut = False

    @property
    def trains(self) -> bool:
        """Whether it may be trained as it is cut; else for evaluation alone."""
        return True

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that is cut."""

    @property
    @abstractmethod
    def units(self) -> tuple[Unit, ...]:
        """All units in execution order, those of other ranks included."""

    def refuse_stages(self, count: int) -> None:  # noqa: B027  # most models know no reason
        """Says why there are too few units for so many stages, where a reason is known.

        Raises:
            ModelError: There are too few.
        """

    @abstractmethod
    def cut(self, stages: Sequence[range], owned: Sequence[int]) -> None:
        """Fixes the stages (ranges of unit indices, contiguous, maybe empty) and the owned ones.

        Parameters that only other stages use are replaced so that they hold no memory and are not
        seen by ``parameters()``; their names stay known through ``parameter_names``.
        """

    def record(
        self,
        *,
        batch: Any,
        batch_idx: int,
        microbatch: int,
        mode: Mode,
        dataloader_idx: int | None = None,
    ) -> Any:
        """Runs the user's step once for a microbatch, on shapes; arguments as for ``forward``.

        Its stages execute what this has noted. The caller restores the module. None for a model
        that needs no such run.
        """
        return None

    @abstractmethod
    def forward(
        self,
        stage: int,
        inputs: tuple[Tensor, ...],
        *,
        batch: Any,
        batch_idx: int,
        microbatch: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
        at_end: Callable[[], Any] | None = None,
        recording: Any = None,
    ) -> StageOutput:
        """Runs ``stage`` for one microbatch.

        Args:
            stage: Global stage index; must be owned.
            inputs: Boundary tensors of the stages before, the earliest first, each one's in the
                order in which it gave them; leaves that require grad where a gradient is wanted;
                empty for stage 0.
            batch: The microbatch, as the user's data loader made it; the same on every stage.
            batch_idx: Index of the batch (not of the microbatch), as Lightning counts.
            microbatch: Index inside the batch; -1 in one of an earlier batch.
            mode: Which of the user's steps runs.
            seed: With a seed, every unit reseeds the generators from (seed, unit index) so that
                dropout does not depend on the cut; None leaves the generators alone.
            dataloader_idx: Which of several evaluation loaders the batch is from, if any.
            at_end: Called on the last stage when its last layer has run.
            recording: What ``record`` gave for the microbatch.
        """

    def whole(
        self,
        ends: Sequence[tuple[Tensor, ...]],
        shares: Sequence[float],
        *,
        batch: Any,
        batch_idx: int,
        mode: Mode,
        seed: int | None,
        dataloader_idx: int | None = None,
        short: bool = False,
    ) -> StageOutput:
        """Runs the step once for the whole batch, without its layers.

        What lies behind the last layer gets the microbatches' ``ends``, joined; what lies before
        sees shapes alone.

        Args:
            ends: Per microbatch, as ``forward`` gave them.
            shares: Of the microbatches in the batch.
            batch: The batch.
            batch_idx: As for ``forward``, like the rest.
            mode: Which step.
            seed: Of random numbers.
            dataloader_idx: Which loader.
            short: Stop where the last layer would have run.
        """
        raise ModelError(f"{type(self).__name__} runs microbatches only.")

    def postpone_loss(self) -> None:
        """Lets the last stage end before the step's loss from now on; called once, after ``cut``.

        Its forwards then give what ``loss`` takes, the values that the step uses behind its layers.

        Raises:
            ModelError: Its losses are of microbatches.
        """
        raise ModelError(
            f"loss_over=batch: {type(self.module).__name__} decides itself when backwards run "
            "(manual optimization), and its losses are those of microbatches. Use automatic "
            "optimization, or loss_over=microbatch."
        )

    def compare_rows(  # noqa: B027  # nothing to find where rows come first
        self,
        mode: Mode,
        pair: Any,
        second: Any,
        rows: tuple[int, int],
        dataloader_idx: int | None = None,
        batch_idx: int = 0,
    ) -> None:
        """Finds out how values of a whole batch are put together from those of its microbatches.

        Args:
            mode: The step; asked for once, before its first batch of a kind.
            pair: The rows of two microbatches, as one batch.
            second: The second of them.
            rows: How many rows each has.
            dataloader_idx: Which loader.
            batch_idx: The batch's number.

        Raises:
            ModelError: They cannot.
        """

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
        """Ends the step for a whole batch; on the rank of the last stage.

        Args:
            parts: What the last stage has given for each microbatch; gradients go back to these.
            shares: Of the microbatches in the batch.
            batch: All of it.
            batch_idx: As for ``forward``, like the rest.
            mode: Which of the user's steps ends.
            seed: Of what it draws at random.
            dataloader_idx: Which of several evaluation loaders the batch is from.
        """
        raise NotImplementedError

    def mixed_rows(
        self, step: Step, whole: Any, parts: Sequence[Any], rows: Sequence[int], batch_idx: int = 0
    ) -> RowsMixed:
        """Where rows of a batch have a part in what others come to, before the last layer.

        ``parts`` are two batches of the rows of ``whole``, in order, with so many ``rows`` each.
        """
        return RowsMixed()

    def drew(self, step: Step, batch: Any, batch_idx: int) -> tuple[bool, bool]:
        """Whether a step draws random numbers itself, and whether by Python or numpy."""
        return False, False

    def draw_from(self, draws: BatchDraws | None) -> None:  # noqa: B027  # nothing between units
        """Lets passes draw from these numbers; from their seeds if None."""

    def reads(self, step: Step, batch: Any, batch_idx: int, change: Callable[[], None]) -> bool:
        """Whether stages before the last one come to other values behind a change of the module."""
        return True

    @property
    def draws(self) -> Mapping[Mode, bool]:
        """For each mode that has run, whether microbatches draw numbers of their own."""
        return {}

    def layers(self) -> Iterator[nn.Module]:
        """The modules of all units; what their forwards keep is no business of the step."""
        yield from self.module.children()

    @abstractmethod
    def stage_parameters(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Owned parameters of ``stage`` with their global names; each once, in unit order."""

    @abstractmethod
    def shared_parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that several stages use, with those stages; their gradients are summed."""

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Pairs (source, target) of stages, target > source + 1, between which tensors travel.

        Known after ``cut``. Tensors that skip stages are not seen by those between.
        """
        return ()

    @property
    @abstractmethod
    def parameter_names(self) -> tuple[str, ...]:
        """Global names of all parameters of the uncut module."""

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Makes the module whole again, until ``release``.

        ``values`` has, by their names in the uncut module's state, the parameters that other ranks
        hold; those of this rank stay the objects that they are.
        """
        raise ModelError(f"{type(self).__name__} cannot be made whole: whole_after=False.")

    def release(self) -> None:
        """Takes out again what ``restore`` has put back."""
        raise ModelError(f"{type(self).__name__} has not been made whole.")

    def sharding_plan(self, tp: int, search: Search) -> ShardingPlan | None:
        """How layers are to be cut: as the module declares it, or ``search`` or their sizes say.

        ``search`` takes a module and a microbatch. None where ``shard`` refuses.
        """
        return None

    def shard(self, ranks: TensorRanks, plan: ShardingPlan | None = None) -> None:
        """Prepares for tensor-parallel ranks; called once, before ``cut``.

        Args:
            ranks: Who shares.
            plan: The same on all ranks; what ``sharding_plan`` gave on the first.

        Raises:
            ModelError: The module does not say how its layers are cut, or cannot be cut like that.
        """
        raise ModelError(
            f"tp={ranks.size} needs a module that declares its units and how their layers are cut: "
            "give it pipeline_units(), pipeline_inputs(), pipeline_result() and "
            "tensor_parallel_plan() (see strategies/models/unit_model.py), or use tp=1."
        )

    def spread(self, ranks: ExpertRanks) -> None:
        """Prepares for ranks that hold a share of the experts; at most once, before ``cut``.

        Raises:
            ModelError: The module does not say where its experts are.
        """
        if ranks.size > 1:
            raise ModelError(
                f"ep={ranks.size} needs a module that declares its units and, in them, its "
                "experts: give it pipeline_units(), pipeline_inputs() and pipeline_result() (see "
                "strategies/models/unit_model.py), and its layers num_experts, expert_parameters "
                "and exchange (strategies/models/expert_parallel/expert_shares.py), or use ep=1."
            )

    def select(self, selection: Selection) -> None:
        """Recomputes inside units from now on; called at most once, before ``cut``.

        Raises:
            ModelError: The selection does not fit the units, or they cannot do it.
        """
        raise ModelError(f"{type(self).__name__} cannot recompute inside units: recompute=full.")

    def compile_units(self) -> None:
        """Lets the units of owned stages run compiled; called once, after ``cut``."""
        compile_units(self.owned_modules())

    def owned_modules(self) -> Iterator[nn.Module]:
        """The modules of the units that run on this rank, each once; known after ``cut``."""
        raise ModelError(f"{type(self).__name__} has no modules to compile. Use compile=false.")

    @property
    def table(self) -> ParameterTable | None:
        """All parameters by name, those of other ranks as holes; None where they are not known."""
        return None

    def first_stages(self) -> Mapping[str, int]:
        """The first stage that has each parameter of the uncut module; known after ``cut``."""
        raise NotImplementedError

    def refusal(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> ModelError | None:
        """Why an evaluation step cannot be cut where this model is; None where it can."""
        return None

    @property
    def look(self) -> Hashable:
        """Of what the last look at a step's rows holds: numbers that it reads, and hooks."""
        return None

    def first_recording(self, batch: Any, batch_idx: int) -> Followed | None:
        """Records the first microbatch of a training batch, which tells the way of the step.

        None for a model that is not recorded.
        """
        return None

    def may_log(self, mode: Mode) -> bool:
        """Whether a batch may log what those before have not, on the way that they have gone."""
        return False

    def changes_batch(self, mode: Mode) -> bool:
        """Whether a step that has been looked at writes into its batch."""
        return False

    def follow_way(self, way: int, batch: Any, batch_idx: int) -> None:
        """Finds the layers of a way that is new; generators stand where its step draws from."""
        raise NotImplementedError

    def follow_freezing(self) -> None:
        """Parameters of any rank were frozen or unfrozen: later steps find out what that means."""
        raise NotImplementedError

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Names of parameters of which this rank holds a share, and how they are cut."""
        return {}

    @property
    def experts(self) -> Mapping[str, Shard | Grid]:
        """Names of the parameters that are spread over expert-parallel ranks, and how."""
        return {}

    @property
    def exchanges(self) -> tuple[int, ...]:
        """Per stage, how many layers have experts on other ranks; () for none. After ``cut``."""
        return ()

    def compute_whole(self, whole: bool) -> None:
        """Lets cut layers compute with whole weights, which are there now, or with shares again."""
        return

    @property
    def partial_parameters(self) -> Collection[str]:
        """Whole parameters whose gradients are to be added up over tensor-parallel ranks."""
        return ()


class NoLayersError(ModelError):
    """A step comes to no layer for some batch: there is nothing to cut, and nothing is missing."""


def filled(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """The same object with a value; another one where that cannot be, as on the meta device."""
    if parameter.is_meta or parameter.dtype != value.dtype:
        return nn.Parameter(value, requires_grad=parameter.requires_grad)
    parameter.data = value
    return parameter


# -- ``torch.compile`` for the units of a cut model, one by one ------------------------------------
#
# Units, not stages: layers of one kind share their code, so a stage of many layers compiles as fast
# as one of one, and what is compiled does not depend on the cut. The program around them (messages,
# gradients' hooks, the order) stays as it is.


# Random numbers as without compilation: dropout then does not depend on ``compile``, and depends
# on (seed, unit) alone as it does there.
_OPTIONS = {"fallback_random": True}


def compile_units(units: Iterable[nn.Module]) -> None:
    """Lets calls of modules run compiled; names, parameters and hooks stay where they are.

    A module that its owner has compiled is left alone. Nothing is compiled before the first call.
    """
    codes: dict[Hashable, CodeType] = {}
    for unit in units:
        if unit.__dict__.get("_compiled_call_impl") is None and not hasattr(unit, "_orig_mod"):
            # As ``unit.compile()`` does, which leaves torch's own modules (nn.Linear,
            # nn.Sequential) uncompiled: the frame that is traced must not be torch's.
            function = _call_of(unit, codes)
            unit._compiled_call_impl = torch.compile(function, options=dict(_OPTIONS))


def _call_of(unit: nn.Module, codes: dict[Hashable, CodeType]) -> Callable[..., Any]:
    """A function that calls the module; its code is shared with modules of the same kind.

    What torch has compiled is kept with the code object, up to a small limit, behind which calls
    run uncompiled. So modules that can share it do, and others have an object of their own.
    """
    call: Any = unit._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    shapes = ((name, p.shape, p.dtype) for name, p in unit.named_parameters())
    kind = (type(unit), tuple(shapes))
    code = codes.setdefault(kind, run.__code__.replace(co_name=type(unit).__name__))
    return FunctionType(code, run.__globals__, closure=run.__closure__)
