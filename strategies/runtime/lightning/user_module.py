"""The user's LightningModule as a model that can be cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.connectors.data_connector import (
    _DataLoaderSource,
    _parse_num_batches,
    _request_dataloader,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from strategies.errors import DataError, ModelError
from strategies.models.nested import replaced
from strategies.models.replay.gate import MARKER, unchanged, unwatched
from strategies.models.stage_model import Mode, StageModel
from strategies.models.state import Generators
from strategies.models.unit_model import HasUnits, UnitModel
from strategies.runtime.lightning.data_order import Looked
from strategies.runtime.lightning.manual_optimization import hide_states, manual_model
from strategies.runtime.step.microbatch import share_sizes, split_batch


def stage_model_of(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *,
    layers: str | None,
    looked: Looked,
    num_microbatches: int = 1,
    shared: bool = False,
    uncut: bool = False,
) -> StageModel:
    """A module that declares units as it is; any other after its step was run on shapes.

    Its layers are found unless ``layers`` says where they are (``net.layers``). ``looked`` is told
    what was read of the data for that. Where ranks share matrices (``shared``) and the module does
    not say how, the first of ``num_microbatches`` is what shardings are found for and tried on.
    Whether a step of evaluation may run uncut, as a whole on every rank, is said by ``uncut``.
    """
    if isinstance(module, HasUnits):
        declared = UnitModel(module)
        if shared and not declared.declares_plan:
            found = _first_batch(trainer, module, looked)
            declared.show(_microbatch(found, num_microbatches))
        return declared
    from strategies.models.replay.replay_model import ReplayModel

    found = _first_batch(trainer, module, looked)
    mode, which, loaders = found.mode, found.dataloader_idx, found.loaders
    plugin = trainer.precision_plugin

    @contextmanager
    def as_in_a_step() -> Iterator[None]:
        in_training = mode == "train" and module.automatic_optimization
        training = _as_in_training(trainer, module, loaders) if in_training else nullcontext()
        # The types are those of the steps that will run.
        with training, plugin.forward_context():
            yield

    def probed() -> StageModel:
        if not module.automatic_optimization:
            return manual_model(
                trainer, module, found.data, mode=mode, layers=layers, dataloader_idx=which
            )
        return ReplayModel.probe(
            module, found.data, mode=mode, chain=layers, dataloader_idx=which, around=as_in_a_step
        )

    with as_in_a_step():
        try:
            model = _probed_as_started(trainer, module, probed) if mode == "train" else probed()
        except ModelError:
            if mode == "train" or not uncut:
                raise
            model = ReplayModel.by_order(module, found.data, chain=layers)
    if shared and isinstance(model, ReplayModel):
        model.show(_microbatch(found, num_microbatches))
    return model


class _FirstBatch(NamedTuple):
    """What the loop that is about to run will see first."""

    data: Any
    mode: Mode
    dataloader_idx: int | None
    loaders: CombinedLoader


def _first_batch(trainer: pl.Trainer, module: pl.LightningModule, looked: Looked) -> _FirstBatch:
    modes: dict[Any, tuple[Mode, Any]] = {
        TrainerFn.FITTING: ("train", trainer.fit_loop),
        TrainerFn.VALIDATING: ("validate", trainer.validate_loop),
        TrainerFn.TESTING: ("test", trainer.test_loop),
        TrainerFn.PREDICTING: ("predict", trainer.predict_loop),
    }
    mode, loop = modes[trainer.state.fn]
    strategy: Any = trainer.strategy
    loaders = _requested(loop)
    if not isinstance(loaders, CombinedLoader):  # As the loop combines them.
        loaders = CombinedLoader(loaders, "max_size_cycle" if mode == "train" else "sequential")
    batch, index = looked.first_batch(loaders, dealt=strategy.dp > 1)
    several = loaders._mode == "sequential" and len(loaders.flattened) > 1
    batch = trainer.precision_plugin.convert_input(batch)
    device = torch.device("cpu") if module.device.type == "meta" else module.device
    with unchanged(module):  # The user's hooks may count, or draw.
        batch = module._on_before_batch_transfer(batch, dataloader_idx=index)
        batch = trainer.strategy.batch_to_device(batch, device=device, dataloader_idx=index)
    return _FirstBatch(batch, mode, index if several else None, loaders)


def _requested(loop: Any) -> Any:
    """The loaders that a loop is going to ask for.

    A hook that makes them is called as often as under stock Lightning: it may count its calls, and
    make others the next time. Where it draws random numbers, as ``random_split`` does, it is called
    again in its turn.
    """
    source = loop._data_source
    before = Generators.now()
    loaders = _request_dataloader(source)
    if source.is_module():
        if before.are_now():
            loop._data_source = _Requested(loop, source, loaders)
        before.put_back()
    return loaders


class _Requested(_DataLoaderSource):
    """Stands in for a source of loaders until it has been asked once."""

    def __init__(self, loop: Any, source: _DataLoaderSource, loaders: Any) -> None:
        super().__init__(source.instance, source.name)
        self._loop, self._source, self._loaders = loop, source, loaders

    def dataloader(self) -> Any:
        self._loop._data_source = self._source
        if self.instance is self._source.instance:
            return self._loaders
        self._source.instance = self.instance  # of another training than that of the look
        return self._source.dataloader()


def _microbatch(found: _FirstBatch, num_microbatches: int) -> Any:
    """The largest microbatch; all of a batch that several loaders make, or that has no rows."""
    if len(found.loaders.flattened) > 1 and found.dataloader_idx is None:
        return found.data
    try:
        return split_batch(found.data, num_microbatches)[0].data
    except DataError:
        return found.data


# -- what hooks make for the step -----------------------------------------------------------------

_STARTS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


def _probed_as_started(
    trainer: pl.Trainer, module: pl.LightningModule, probed: Callable[[], StageModel]
) -> StageModel:
    """A step may use what the hooks before its first batch make, which run after the cut.

    Where it cannot be run without, they are run once for the look at the step, and what they have
    done is taken back.

    Raises:
        ModelError: It cannot be run with it, either.
    """
    try:
        return probed()
    except ModelError as error:
        hooks = [name for name in _STARTS if is_overridden(name, module)]
        if error.__cause__ is None or not hooks:
            raise
        names = [id(parameter) for parameter in module.parameters()]
        with unchanged(module):
            try:
                with _weights_kept(module), _unheard(trainer, module):
                    for name in hooks:
                        getattr(module, name)()
                if [id(parameter) for parameter in module.parameters()] != names:
                    raise error
                model = probed()
            except Exception:
                raise error from error.__cause__
        rank_zero_info(
            f"training_step of {type(module).__name__} uses what {', '.join(hooks)} make: they "
            "have run once for a look at the step, and run again when training begins."
        )
        return model


@contextmanager
def _weights_kept(module: pl.LightningModule) -> Iterator[None]:
    before = [(p, p._version, p.requires_grad, p.detach().clone()) for p in module.parameters()]
    try:
        yield
    finally:
        for parameter, version, trained, value in before:
            parameter.requires_grad_(trained)
            if parameter._version != version:
                parameter.data.copy_(value)


@contextmanager
def _unheard(trainer: Any, module: pl.LightningModule) -> Iterator[None]:
    """Inside, nothing is logged or printed by the module's own methods."""
    own = vars(module)
    silent = [(own, name, lambda *_, **__: None) for name in ("log", "log_dict", "print")]
    loggers = [(vars(trainer), "_loggers", [DummyLogger() for _ in trainer._loggers])]
    with replaced([*silent, *loggers]):
        yield


# -- what a step finds on its trainer when it is probed -------------------------------------------
#
# A step that logs its rate looks at its optimizers, one that warms up at the number of its batches.
# Both are made later, over the cut module and the shared data; what is shown until then has the
# same form, and is thrown away.


@contextmanager
def _as_in_training(
    trainer: pl.Trainer, module: pl.LightningModule, loaders: CombinedLoader
) -> Iterator[None]:
    """Inside, the trainer shows a step what it will show in training.

    Optimizers and schedulers are made when somebody asks for them, over the uncut module; those of
    the training itself are made later, after the cut. So are the loaders.
    """
    loop: Any = trainer.fit_loop
    strategy: Any = trainer.strategy
    attributes = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
    before = dict(vars(loop)), {name: getattr(strategy, name) for name in attributes}
    asked: list[Any] = []

    def made(index: int) -> list[Any]:
        if not asked:
            optimizers, schedulers = unwatched(
                MARKER, lambda: _init_optimizers_and_lr_schedulers(module)
            )
            if strategy.coordinates.pp > 1:
                hide_states(optimizers)
            wrapped = [LightningOptimizer._to_lightning_optimizer(o, strategy) for o in optimizers]
            asked.extend((optimizers, wrapped, schedulers))
        found: list[Any] = asked[index]
        return found

    for index, name in enumerate(attributes):
        setattr(strategy, name, _Awaited(partial(made, index)))
    known = [sized_len(loader) for loader in loaders.flattened]
    lengths = [math.inf if n is None else math.ceil(n / strategy.dp) for n in known]
    batches: Any = min(lengths) if loaders._mode == "min_size" else max(lengths)
    loop._combined_loader = loaders
    loop.max_batches = _parse_num_batches(
        RunningStage.TRAINING, batches, trainer.limit_train_batches
    )
    try:
        yield
    finally:
        vars(loop).clear()
        vars(loop).update(before[0])
        for name, value in before[1].items():
            setattr(strategy, name, value)


class _Awaited(list[Any]):
    """A list whose items are made when it is first looked at."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._make: Callable[[], list[Any]] | None = make

    def _filled(self) -> _Awaited:
        if self._make is not None:
            make, self._make = self._make, None
            self.extend(make())
        return self

    def __len__(self) -> int:
        return list.__len__(self._filled())

    def __iter__(self) -> Iterator[Any]:
        return list.__iter__(self._filled())

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return list.__getitem__(self._filled(), index)


# ------------------------------------------------------------------------------------------- rows
# What compares the rows of a batch sees those of a microbatch. That is said once, when it is known:
# of layers at the first batch, of the loss behind its first batch.


class RowsTold:
    """Says what of a module sees a microbatch where its author has thought of a batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        """Of a module that is still whole."""
        self._module = module
        self._norms = [n for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
        self._hooked = [n for n, p in module.named_parameters() if p._backward_hooks]
        self._hooks_told = self._layers_told = self._loss_told = self._mixed_told = False
        self._logs_told = self._lost_told = self._gathered_told = False
        self._kept_told = self._batch_told = False
        self._passes = 0
        self._kept: list[tuple[nn.Module, str, str, Tensor, int]] = []

    def hooks(self, rows: int, num_microbatches: int) -> str | None:
        """Of parameters, at a batch of so many rows."""
        first = share_sizes(rows, num_microbatches)[0]
        if self._hooks_told or not self._hooked or first == rows:
            return None
        self._hooks_told = True
        return (
            f"{self._hooked[0]} has a hook (register_hook), which sees the gradient of each "
            f"microbatch of {first} rows, not that of the {rows} of a batch: a factor comes to the "
            "same, a limit does not. on_before_optimizer_step sees the batch's gradient."
        )

    def layers(self, rows: int, num_microbatches: int) -> str | None:
        """At a batch of so many rows; None where there is nothing to say (again)."""
        if self._layers_told:
            return None
        self._layers_told = True
        found = dict(self._module.named_modules())
        norms = [n for n in self._norms if getattr(found.get(n), "training", True)]
        first = share_sizes(rows, num_microbatches)[0]
        if not norms or first == rows:
            return None
        others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        return (
            f"{norms[0]}{others}: BatchNorm takes its mean and variance over {first} rows of a "
            f"microbatch, not over the {rows} of a batch. Larger microbatches come closer to stock "
            "Lightning (num_microbatches); GroupNorm and LayerNorm know no rows. SyncBatchNorm "
            "spans replicas, not microbatches, and loss_over=batch concerns the loss alone."
        )

    def before(self, layers: Iterable[nn.Module]) -> None:
        """Before a training pass; what is made in the first one (a cache) is not looked at."""
        self._passes += 1
        if self._passes != 2:
            return
        inside = {id(child) for layer in layers for child in layer.modules()}
        self._kept = [
            (child, name, key, buffer, buffer._version)
            for name, child in self._module.named_modules()
            if id(child) in inside and not isinstance(child, _BatchNorm)
            for key, buffer in child._buffers.items()
            if buffer is not None and not buffer.is_meta and not buffer.is_inference()
        ]

    def buffers(self, num_microbatches: int) -> str | None:
        """Behind a training pass, of what layers keep from forward to forward."""
        kept, self._kept = self._kept, []
        changed = [
            f"{name}.{key}"
            for child, name, key, before, version in kept
            if (now := child._buffers.get(key)) is not None
            and (now is not before or now._version != version)
        ]
        if not changed or num_microbatches == 1:
            return None
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return (
            f"{changed[0]}{others}: layers change these buffers in their forwards, of which a "
            f"pipeline runs {num_microbatches} per batch, on the rows of a microbatch each. "
            "Running means, counters and power iterations (spectral_norm) move on as often. Fewer "
            "and larger microbatches come closer to stock Lightning; count batches in hooks."
        )

    def lost(self, stages: Collection[int]) -> str | None:
        """Of stages that have lost a gradient of what the stages before them gave."""
        if self._lost_told or not stages:
            return None
        self._lost_told = True
        stage = min(stages)
        return (
            f"stage {stage} has no gradient any more for a value of the stages before it: "
            f"{type(self._module).__name__}.training_step detaches it there, or makes no use of it "
            "in the loss, in some microbatches alone. A pipeline sends zeros back for these, and a "
            "step without any other gradient updates weights before the cut with them: weight "
            "decay and momentum go on, where stock Lightning leaves weights without a gradient as "
            "they are. Freeze them (requires_grad_(False)) for as long, or use pp=1."
        )

    def mixed(self, line: str | None) -> str | None:
        """Of a line with a layer that gets rows which others of the batch have a part in."""
        if self._mixed_told or line is None:
            return None
        self._mixed_told = True
        return (
            f"{line}: {type(self._module).__name__}.training_step mixes rows of the batch between "
            "its layers: what this layer gets for a row depends on others, and a pipeline mixes "
            "the rows of each microbatch. Mix what goes into the first layer (that is done for the "
            "whole batch), or use num_microbatches=1."
        )

    def logs(self, names: Sequence[str]) -> str | None:
        """Of numbers that are logged before the last layer, and are no means over rows."""
        if self._logs_told or not names:
            return None
        self._logs_told = True
        return (
            f"{type(self._module).__name__}.training_step logs {', '.join(names)} before its last "
            "layer, where no stage has the whole batch, and no mean over rows: the number that is "
            "logged is the mean of the microbatches'. Log it behind the last layer (there it is "
            "that of the batch), or use num_microbatches=1."
        )

    def by_hand(self, names: Sequence[str], returned: Sequence[str]) -> str | None:
        """Of manual optimization: what is logged and no mean over rows, and returned for hooks."""
        if self._logs_told or not (names or returned):
            return None
        self._logs_told = True
        step = f"{type(self._module).__name__}.training_step"
        told = []
        if names:
            told.append(
                f"{step} logs {', '.join(names)}, no mean over rows: with manual optimization the "
                "number that is logged is the mean of the microbatches'. num_microbatches=1 gives "
                "that of the batch."
            )
        if returned:
            told.append(
                f"{step} returns {', '.join(returned)}: with manual optimization "
                "on_train_batch_end gets the loss alone. Log it."
            )
        return " ".join(told)

    def gathered(self, line: str | None) -> str | None:
        """Of a line before the last layer that makes one number of all rows, for the loss."""
        if self._gathered_told or line is None:
            return None
        self._gathered_told = True
        return (
            f"{line}: {type(self._module).__name__}.training_step makes a number of all rows "
            "before its last layer (a load balance, a decorrelation), which is no mean over rows, "
            "and the loss takes it: a pipeline trains the mean of the microbatches' numbers. Fewer "
            "and larger microbatches come closer to stock Lightning. Made behind the last layer, "
            "with loss_over=batch, it is that of the batch."
        )

    def kept(self, line: str | None) -> str | None:
        """Of a line before the last layer whose value a step keeps, and which is of no row."""
        if self._kept_told or line is None:
            return None
        self._kept_told = True
        return (
            f"{line}: {type(self._module).__name__}.training_step keeps or returns a value from "
            "before its last layer that is made of several rows, or of one: of a batch it is the "
            "mean of the microbatches' values. Keep what has a row for each of the batch's, make "
            "it behind the last layer, or use num_microbatches=1."
        )

    def batch(self, changes: bool) -> str | None:
        """Of a step that writes into its batch, if hooks get that."""
        if self._batch_told or not changes:
            return None
        self._batch_told = True
        return (
            f"{type(self._module).__name__}.training_step changes its batch, and "
            "on_train_batch_end gets it as it came: each stage and microbatch has a copy. Return "
            "what hooks need (they get it as outputs), or keep it on the module."
        )

    def loss(self, unlike: tuple[float, float] | None) -> str | None:
        """Behind a batch, of its loss as it is trained and of all rows at once, if they differ."""
        if self._loss_told or unlike is None:
            return None
        self._loss_told = True
        return (
            f"the loss of {type(self._module).__name__}.training_step depends on how rows are "
            f"grouped: the mean of its microbatches' losses is {unlike[0]:.6g}, the loss of the "
            f"whole first batch {unlike[1]:.6g}. It compares rows with each other, or is no plain "
            "mean over rows. With loss_over=batch it is that of stock Lightning."
        )
