"""The user's LightningModule as a model that can be cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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

from strategies.errors import DataError, ModelError
from strategies.models.nested import replaced
from strategies.models.replay.gate import MARKER, steps_refused, unwatched
from strategies.models.snapshot import restoring
from strategies.models.stage_model import Mode, StageModel
from strategies.models.state import Generators
from strategies.models.tensor_parallel.layer_plan import declared_plan
from strategies.models.unit_model import HasUnits, UnitModel
from strategies.runtime.lightning.data_order import Looked
from strategies.runtime.lightning.manual_optimization import hide_states, manual_model
from strategies.runtime.lightning.refusals import refuse_uncuttable
from strategies.runtime.step.microbatch import split_batch


def stage_model_of(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *,
    layers: str | None,
    looked: Looked,
    num_microbatches: int = 1,
    shared: bool = False,
    uncut: bool = False,
    whole: bool = False,
) -> StageModel:
    """A module that declares units as it is; any other after its step was run on shapes.

    Its layers are found unless ``layers`` says where they are (``net.layers``). ``looked`` is told
    what was read of the data for that. Where ranks share matrices (``shared``) and the module does
    not say how, the first of ``num_microbatches`` is what shardings are found for and tried on.
    Whether a step of evaluation may run uncut, as a whole on every rank, is said by ``uncut``; with
    ``whole`` one rank has all of the model, and a step that cannot be cut runs there as it is.
    """
    if isinstance(module, HasUnits):
        declared = UnitModel(module)
        if shared and declared_plan(module, 1) is None:
            found = _first_batch(trainer, module, looked)
            declared.show(_microbatch(found, num_microbatches))
        return declared
    from strategies.models.replay.replay_model import ReplayModel
    from strategies.models.uncut_model import UncutModel

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
        refuse_uncuttable(module)
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
            if whole and isinstance(model, ReplayModel):
                model.refuse_left()
        except ModelError as error:
            if whole:
                model = UncutModel(module, error, trains=mode == "train")
            elif mode == "train" or not uncut:
                raise
            else:
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
    with restoring(module):  # The user's hooks may count, or draw.
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
        with restoring(module):
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
    gates = ExitStack()

    def made(index: int) -> list[Any]:
        if not asked:
            optimizers, schedulers = unwatched(
                MARKER, lambda: _init_optimizers_and_lr_schedulers(module)
            )
            if strategy.coordinates.pp > 1:
                hide_states(optimizers)
            wrapped = [LightningOptimizer._to_lightning_optimizer(o, strategy) for o in optimizers]
            gates.enter_context(replaced(steps_refused(None, optimizers, wrapped, schedulers)))
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
        gates.close()
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
