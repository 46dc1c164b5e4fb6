"""Running the probe on a module: everything around the step that ``Probe`` itself watches."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError, one_line
from strategies.models.collectives import shapes_only
from strategies.models.contents import MISSING, adapter_of, is_foreign, walk
from strategies.models.logs import LogCapture
from strategies.models.nested import cloned, leaves, replaced, tensors
from strategies.models.replay.gate import as_written, call_step, gated, has_compiled
from strategies.models.replay.hole import Hole, Spec, error_line, user_line
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Boundary, Cut, ParameterTable, Path
from strategies.models.replay.probe import LeakError, Place, Probe, Record, Value
from strategies.models.replay.rows.draws import RunDraws
from strategies.models.replay.side_effects import (
    SideEffectError,
    files_at_rest,
    hooks_at_rest,
    install_capturing,
    variables_at_rest,
)
from strategies.models.replay.unit_search import (
    alike,
    keeper_of,
    select_units,
    units_to_open,
)
from strategies.models.snapshot import Snapshot, restoring
from strategies.models.stage_model import STEP_NAMES, Mode
from strategies.models.state import (
    Generators,
    generator_words,
    is_generator,
    own_generators,
    seed_all,
)

P = TypeVar("P", bound=Probe)
_GUARDS = 30  # of a step that stops where a value is not as it should be


@dataclass(frozen=True, slots=True)
class Probed:
    """A module's units, its parameters, the path of one step, and what replays of it reuse."""

    units: dict[str, nn.Module]
    table: ParameterTable
    path: Path
    cache: dict[Hashable, Outcome]


def probe_units(
    module: LightningModule,
    batch: Any,
    mode: Mode,
    chain: str | None,
    make: Callable[..., Probe] = Probe,
    dataloader_idx: int | None = None,
) -> Probed:
    """Probes a step until its units are those that it calls; arguments as ``probe_path``.

    ``chain`` names the container whose children are units, where they are not found as wished. All
    ranks find the same, wherever their generators stand.
    """
    before, own = Generators.now(), own_generators(module)
    seed_all(0)
    for generator, _ in own:
        generator.manual_seed(0)
    try:
        return _probe_units(module, batch, mode, chain, make, dataloader_idx)
    finally:
        before.put_back()
        for generator, state in own:
            generator.set_state(state)


def _probe_units(
    module: LightningModule,
    batch: Any,
    mode: Mode,
    chain: str | None,
    make: Callable[..., Probe],
    dataloader_idx: int | None,
) -> Probed:
    table = ParameterTable(module, batch_device(batch, module))
    opened: frozenset[str] = frozenset()
    keepers: frozenset[str] = frozenset()
    opens = True
    while True:
        units = select_units(module, chain, opened, keepers)
        cache: dict[Hashable, Outcome] = {}
        inside = alike(units) if opens else {}
        try:
            path = probe_path(
                module, units, table, mode, batch, 0, cache, make, dataloader_idx, opens=inside
            )
        except LeakError as leak:
            opened |= inside[leak.unit]
            continue
        except ModelError as error:
            keeper = keeper_of(module, error.buffer) if isinstance(error, _LookError) else ""
            if keeper and keeper not in keepers:
                keepers |= {keeper}  # It keeps something of its inputs (a codebook).
                continue
            if not opens or not opened:
                raise
            # What those units do inside needs data; as a whole they may be cut somewhere else.
            opens, opened = False, frozenset()
            continue
        more = units_to_open(units, path, table) - opened
        if not more:
            break
        opened |= more
    if not path.calls:
        raise ModelError(
            f"{STEP_NAMES[mode]} of {type(module).__name__} calls no layer that owns "
            "parameters, so there is nothing to cut. Use pp=1."
        )
    return Probed(units, table, path, cache)


def probe_path(
    module: LightningModule,
    units: dict[str, nn.Module],
    table: ParameterTable,
    mode: Mode,
    batch: Any,
    batch_idx: int,
    cache: dict[Hashable, Outcome],
    make: Callable[..., Probe] = Probe,
    dataloader_idx: int | None = None,
    opens: Collection[int] = (),
    draws: Callable[[], RunDraws] | None = None,
) -> Path:
    """Runs one step of ``mode`` on shapes; leaves module, batch and random states as they were.

    ``make`` builds the probe; another one than ``Probe`` itself notes more. A unit among ``opens``
    that hands on values in objects of its own is a ``LeakError``. The step draws from ``draws``.

    Raises:
        ModelError: If the step cannot be replayed; names the user's line and the remedy.
    """
    probe, _, written = run_probe(
        module,
        units,
        table,
        mode,
        batch,
        batch_idx,
        cache,
        partial(make, opens=lambda unit: unit in opens, draws=draws),
        partial(_reading_what_stays, module, tuple(units.values()), mode),
        dataloader_idx,
    )
    step = STEP_NAMES[mode]
    path = _make_path(probe.record, tuple(units), step=step, clones_batch=written)
    return replace(path, rewrites=probe.tape.is_rewritten())


def run_probe(
    module: LightningModule,
    units: dict[str, nn.Module],
    table: ParameterTable,
    mode: Mode,
    batch: Any,
    batch_idx: int,
    cache: dict[Hashable, Outcome],
    make: Callable[..., P],
    around: Callable[[P], AbstractContextManager[Any]] = nullcontext,
    dataloader_idx: int | None = None,
) -> tuple[P, Any, bool]:
    """The probe behind a step, what the step returned, and whether it wrote into its batch.

    The step runs inside of ``around``, given the probe. A look at a value is answered as a zero
    would; where the step cannot go on with that (``assert loss > 0``), by the other answer.

    Raises:
        ModelError: The step cannot go on with either answer, or for other reasons.
    """
    turned: list[int] = []
    found: tuple[P, Any, bool] | None = None
    while True:
        last = None
        try:
            found = _run_probe(
                module, units, table, mode, batch, batch_idx, cache, make, around, dataloader_idx,
                turned,
            )  # fmt: skip
            skips = mode == "train" and module.automatic_optimization and found[1] is None
            if skips and found[0].record.deferred:
                last = len(found[0].record.deferred) - 1
            if last is None or last in turned:
                return found
        except _StoppedError as stopped:
            last = stopped.look
            if last in turned or len(turned) > _GUARDS:
                if found is not None:
                    return found
                raise stopped.refusal from stopped.refusal.__cause__
        except ModelError:
            if found is not None:  # It was the first answer with which the step can go on.
                return found
            raise
        turned.append(last)


class _LookError(ModelError):
    """A step looks at a value between layers; where it writes it into a buffer, that is named."""

    def __init__(self, buffer: str, message: str) -> None:
        super().__init__(message)
        self.buffer = buffer


class _StoppedError(Exception):
    """A step has ended by an error of its own after its look number ``look`` at a value."""

    def __init__(self, refusal: ModelError, look: int) -> None:
        super().__init__(refusal)
        self.refusal, self.look = refusal, look


def _run_probe(
    module: LightningModule,
    units: dict[str, nn.Module],
    table: ParameterTable,
    mode: Mode,
    batch: Any,
    batch_idx: int,
    cache: dict[Hashable, Outcome],
    make: Callable[..., P],
    around: Callable[[P], AbstractContextManager[Any]],
    dataloader_idx: int | None,
    turned: Collection[int],
) -> tuple[P, Any, bool]:
    step = STEP_NAMES[mode]
    batch = cloned(batch)
    held = [id(leaf) for leaf in leaves(batch)]
    versions = [(tensor, tensor._version) for tensor in tensors(batch) if not tensor.is_inference()]
    probe = make(
        list(units.values()),
        tuple(units),
        parameters=table.by_identity(),
        buffers=_lasting_tensors(module),
        device=batch_device(batch, module),
        cache=cache,
        step=step,
    )
    probe.turned = turned
    logs = LogCapture(lambda value: _note_log(probe, value))
    begun, own = Generators.now(), own_generators(module)
    captures: list[nn.Module] = []
    with (
        restoring(module),
        _iterators_at_rest(module, step),
        files_at_rest(module),
        hooks_at_rest(module, captures),
        variables_at_rest(module, step),
        torch.inference_mode(False),
        torch.set_grad_enabled(mode == "train"),
        table.shown(),
        gated(module, probe.units, logs.log, logs.log_dict),
        shapes_only(),
        as_written() if has_compiled() else nullcontext(),
        around(probe),
    ):
        try:
            with (
                probe.costs,
                nullcontext() if probe.draws is None else probe.draws.seeding(),
                probe,
            ):
                result = call_step(module, mode, batch, batch_idx, dataloader_idx)
            drawn = any(not generator.get_state().equal(state) for generator, state in own)
            host = not begun.are_now(host_only=True)
            drawn = drawn or probe.draws is not None
            probe.record.drew = (drawn or not begun.are_now(), host)
        except SideEffectError as error:  # It may be a report before the step gives up.
            if probe.record.deferred:
                raise _StoppedError(error, len(probe.record.deferred) - 1) from error
            raise
        except ModelError:
            raise
        except Exception as error:
            refused = probe.record.refused
            if refused is not None and str(refused) in str(error):  # load_state_dict() does so.
                raise refused from error
            unsupported = _unsupported(error, probe, step, type(module).__name__)
            unsupported.__cause__ = error
            if probe.record.deferred:
                raise _StoppedError(unsupported, len(probe.record.deferred) - 1) from error
            raise unsupported from error
        probe.on_read(result)
        for leaf in leaves(result if isinstance(result, dict) else ()):
            if isinstance(leaf, Hole) and leaf.value is not None:
                probe.record.kept.append(probe.record.values[leaf.value].key)
        written = [id(leaf) for leaf in leaves(batch)] != held or any(
            isinstance(tensor, Hole) or tensor._version != version for tensor, version in versions
        )
    install_capturing(captures)
    return probe, result, written


@contextmanager
def _reading_what_stays(
    module: LightningModule, layers: Sequence[nn.Module], mode: Mode, probe: Probe
) -> Iterator[None]:
    """What a step leaves on its module is needed at its end, as what it returns is.

    So is what it gathers in a container, of any layer; what it assigns only of the last one. Other
    values may be meant for the next step's layers, of which each sees a microbatch (hidden states).
    """
    state = Snapshot(module, layers).take()
    yield
    num_calls = len(probe.record.calls)
    for ref in state.changed():
        value = state.value(ref)
        strange = _foreign_in(value)
        if strange is not None:
            raise ModelError(
                f"{STEP_NAMES[mode]} changes self.{ref.name}, and an object of type "
                f"{type(strange).__name__} cannot be brought to the ranks of other stages (nothing "
                "is ever unpickled). Keep numbers, texts, tensors, arrays, and lists and dicts of "
                "them, and make the rest of them in a hook (on_train_epoch_end)."
            )
        for leaf, _ in walk(value):
            if not isinstance(leaf, Hole) or leaf.value is None:
                continue
            key = probe.record.values[leaf.value].key
            if state.holds(value) or key[0] == num_calls:
                probe.on_read(leaf)
                probe.record.kept.append(key)
            else:
                probe.record.left.append((ref.name, key))


def _foreign_in(value: Any) -> Any:
    """What in a value of a container or an attribute cannot be sent; None if all can."""
    if isinstance(value, dict):
        return next((v for v in map(_foreign_in, value.values()) if v is not None), None)
    if isinstance(value, list | tuple | set | deque):
        return next((v for v in map(_foreign_in, value) if v is not None), None)
    return value if is_foreign(value) and value is not MISSING else None


@contextmanager
def _iterators_at_rest(module: nn.Module, step: str) -> Iterator[None]:
    """Inside, whoever takes an iterator of the module further is told that it cannot be.

    A step runs once per microbatch and stage, and no iterator can be put back. Behind it the same
    is said of objects of the module that draw numbers.
    """
    changes: list[tuple[dict[str, Any], str, Any]] = []
    drawn: list[tuple[str, Any, str]] = []
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            place = f"self.{path}.{name}" if path else f"self.{name}"
            if _is_iterator(value) and adapter_of(value) is None:
                changes.append((vars(child), name, _AtRest(place, step)))
            elif is_generator(value):
                drawn.append((place, value, generator_words(value)))
    with replaced(changes):
        yield
    for place, value, before in drawn:
        if generator_words(value) != before:
            raise ModelError(
                f"{step} draws from {place}, a {type(value).__name__} of its own, which a pipeline "
                "would draw from for each microbatch and stage. Use torch, or the global "
                "generators of numpy and random, which are followed, or draw in "
                "on_train_batch_start and keep the number on the module."
            )


def _is_iterator(value: Any) -> bool:
    """Whether it goes on whenever it is asked: a generator, a count, a pass over a loader."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


class _AtRest:
    """Stands in for an iterator."""

    def __init__(self, place: str, step: str) -> None:
        self._place = place
        self._step = step

    def __iter__(self) -> _AtRest:
        return self

    def __next__(self) -> Any:
        raise ModelError(
            f"{user_line()}: {self._step} takes the next of {self._place}, an iterator, which a "
            "pipeline would take further for each microbatch and stage. Take it in "
            "on_train_batch_start and keep it on the module (self.item = next(...)), give the "
            "trainer several loaders (CombinedLoader), or count with a number (self.n += 1)."
        )


def batch_device(batch: Any, module: nn.Module) -> torch.device:
    """Where a step computes: the batch's device, else that of the parameters."""
    for tensor in chain(tensors(batch), module.parameters()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def _note_log(probe: Probe, value: Any) -> bool:
    if isinstance(value, nn.Module):
        value = [item for item in vars(value).values() if isinstance(item, Tensor)]
    probe.on_read(value)
    return False


def _lasting_tensors(module: nn.Module) -> dict[int, str]:
    """Tensors that outlive a step: buffers and plain tensor attributes, without parameters."""
    found = {}
    for path, child in module.named_modules():
        for table in (child._buffers, vars(child)):
            for name, value in table.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter | Hole):
                    found[id(value)] = f"{path}.{name}" if path else name
    return found


def _unsupported(error: Exception, probe: Probe, step: str, module: str) -> ModelError:
    if probe.record.deferred:
        what = probe.record.deferred[0][1]
        return ModelError(
            f"{what}, and {step} could not go on without, as the answer was that of a zero or of a "
            f"one ({one_line(error)}). Keep it a tensor (torch.where, masks), or "
            "look at what the step returns in on_train_batch_end or on_validation_batch_end."
        )
    line = error_line(error.__traceback__)
    if isinstance(error, AttributeError) and str(error).startswith(f"'{module}' object has no"):
        return ModelError(
            f"{line}: {step} uses what {module} does not have yet ({error}): a pipeline looks at "
            "the step before on_fit_start, on_train_start and the like run. Give it a first value "
            "in __init__ or setup; hooks may change it."
        )
    return ModelError(
        f"{line}: {step} cannot run on shapes alone "
        f"({one_line(error)}). If the step works with pp=1, move what needs data "
        "into a layer with parameters, or declare the units yourself."
    )


# -- cuts: where a recorded step can be cut, and what crosses there --------------------------------


def _make_path(record: Record, names: tuple[str, ...], *, step: str, clones_batch: bool) -> Path:
    """Chooses, before every call, the place that fewest bytes cross.

    Raises:
        ModelError: If the step looks at data before its last layer, which no cut can serve.
    """
    num_calls = len(record.calls)
    for call, what in record.collectives:
        if call < num_calls:
            raise ModelError(
                f"{what} on a value between layers of {step}. Only the ranks of one stage get to "
                "that line. Do it after the last layer, inside a layer with parameters, or on the "
                "batch itself."
            )
    for number, (call, what) in enumerate(record.deferred):
        if call < num_calls:
            raise _LookError(
                record.written.get(number, ""),
                f"{what}, before the last layer of {step} has run. Only the stage that computes a "
                "value can look at it (item, numpy, a Python branch). Keep it a tensor "
                "(torch.where, masks), do it after the last layer, or log the tensor itself.",
            )
    cuts: list[Cut | str] = [Cut((0, 0), ())]
    cuts.extend(_choose(record, call) for call in range(1, num_calls + 1))
    return Path(
        names,
        tuple(record.calls),
        tuple(tuple(events) for events in record.events),
        tuple(cuts),
        clones_batch,
        tuple(record.left),
        record.drew,
        frozenset(record.kept),
    )


def _choose(record: Record, call: int) -> Cut | str:
    for first, final, reason in record.uncuttable:
        if first <= call <= final:
            return reason
    places = record.places[call]
    if call == len(record.calls):
        # Behind the last layer only its results cross; loss and logs are the next stage's.
        places = places[:1]
    best: Cut | None = None
    fewest = -1
    reason = ""
    for index, place in enumerate(places):
        alive = [v for v in record.values if v.born <= place.clock < v.used]
        follows = _region_after(record, call, index)
        if place.region is not None and (
            follows is place.region or any(v.region is not place.region for v in alive)
        ):
            reason = reason or "both sides are in one activation checkpoint call"
            continue
        if any(value.varies for value in alive):
            reason = "a packed sequence crosses, whose size depends on the lengths' values"
            continue
        if _aliased(record, place, alive):
            reason = "tensors that share memory are changed in place on both sides"
            continue
        num_bytes = sum(value.spec.num_bytes for value in alive)
        if best is None or num_bytes < fewest:
            boundaries = tuple(_boundary(record, place, value) for value in alive)
            best, fewest = Cut((call, place.event), boundaries, place.clock), num_bytes
    return reason if best is None else best


def _region_after(record: Record, call: int, index: int) -> object:
    if index + 1 < len(record.places[call]):
        return record.places[call][index + 1].region
    return record.regions[call] if call < len(record.regions) else None


def _written_after(record: Record, moment: int, value: Value) -> bool:
    return any(clock > moment and storage is value.storage for clock, storage in record.writes)


def _aliased(record: Record, place: Place, alive: list[Value]) -> bool:
    storages: set[int] = set()
    for value in alive:
        if id(value.storage) in storages and _written_after(record, place.clock, value):
            return True
        storages.add(id(value.storage))
    return False


def _boundary(record: Record, place: Place, value: Value) -> Boundary:
    return Boundary(
        value.key,
        value.spec,
        dense_order(value.spec),
        written=_written_after(record, place.clock, value),
        uses=tuple(value.uses),
        changed=_written_after(record, value.born, value),
    )


def dense_order(spec: Spec) -> tuple[int, ...] | None:
    """Dimensions by falling stride if that is the tensor's dense layout and not the usual one.

    A received tensor gets the layout of the sent one back: code after the cut may call ``view``.
    """
    order = sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] != 1 and spec.stride[dim] != expected:
            return None
        expected *= spec.shape[dim]
    return None if order == sorted(order) else tuple(order)
