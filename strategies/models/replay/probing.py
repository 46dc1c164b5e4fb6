"""Running the probe on a module: everything around the step that ``Probe`` itself watches."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from strategies.errors import ModelError
from strategies.models.collectives import shapes_only
from strategies.models.logs import LogCapture
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.gate import as_written, call_step, gated, has_compiled, unchanged
from strategies.models.replay.hole import Hole, Spec, error_line
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Boundary, Cut, ParameterTable, Path
from strategies.models.replay.probe import LeakError, Place, Probe, Record, Value
from strategies.models.stage_model import STEP_NAMES, Mode
from strategies.models.step_state import CONTAINERS, StepState, is_record

P = TypeVar("P", bound=Probe)


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

    ``chain`` names the container whose children are units, where they are not found as wished.
    """
    table = ParameterTable(module, batch_device(batch, module))
    opened: frozenset[str] = frozenset()
    opens = True
    while True:
        units = select_units(module, chain, opened)
        cache: dict[Hashable, Outcome] = {}
        inside = _alike(units) if opens else {}
        try:
            path = probe_path(
                module, units, table, mode, batch, 0, cache, make, dataloader_idx, opens=inside
            )
        except LeakError as leak:
            opened |= inside[leak.unit]
            continue
        except ModelError:
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
) -> Path:
    """Runs one step of ``mode`` on shapes; leaves module, batch and random states as they were.

    ``make`` builds the probe; another one than ``Probe`` itself notes more. A unit among ``opens``
    that hands on values in objects of its own is a ``LeakError``.

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
        partial(make, opens=lambda unit: unit in opens),
        partial(_reading_what_stays, module, tuple(units.values())),
        dataloader_idx,
    )
    step = STEP_NAMES[mode]
    return _make_path(probe.record, tuple(units), step=step, clones_batch=written)


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

    The step runs inside of ``around``, given the probe.
    """
    step = STEP_NAMES[mode]
    batch = rebuild(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
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
    logs = LogCapture(lambda value: _note_log(probe, value))
    with (
        unchanged(module),
        torch.inference_mode(False),
        torch.set_grad_enabled(mode == "train"),
        table.shown(),
        gated(module, probe.units, logs.log, logs.log_dict),
        shapes_only(),
        as_written() if has_compiled() else nullcontext(),
        around(probe),
    ):
        try:
            with probe.costs, probe:
                result = call_step(module, mode, batch, batch_idx, dataloader_idx)
        except ModelError:
            raise
        except Exception as error:
            raise _unsupported(error, probe, step, type(module).__name__) from error
        probe.on_read(result)
        written = any(
            isinstance(tensor, Hole) or tensor._version != version for tensor, version in versions
        )
    return probe, result, written


@contextmanager
def _reading_what_stays(
    module: LightningModule, layers: Sequence[nn.Module], probe: Probe
) -> Iterator[None]:
    """What a step leaves on its module is needed at its end, as what it returns is.

    So is what it gathers in a container, of any layer; what it assigns only of the last one. Other
    values may be meant for the next step's layers, of which each sees a microbatch (hidden states).
    """
    state = StepState(module, layers)
    state.begin()
    held = {id(v) for m in module.modules() for v in vars(m).values() if type(v) in CONTAINERS}
    yield
    num_calls = len(probe.record.calls)
    for slot in state.changed():
        value = state.value(slot)
        gathers = slot.kind == "class" or id(value) in held
        for leaf in tensors(vars(value) if is_record(value) else value):
            if not isinstance(leaf, Hole) or leaf.value is None:
                continue
            if gathers or probe.record.values[leaf.value].key[0] == num_calls:
                probe.on_read(leaf)


def batch_device(batch: Any, module: nn.Module) -> torch.device:
    """Where a step computes: the batch's device, else that of the parameters."""
    for tensor in chain(tensors(batch), module.parameters()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def units_to_open(units: dict[str, nn.Module], path: Path, table: ParameterTable) -> frozenset[str]:
    """Units that the step never calls although it uses what is in them, piece by piece."""
    called = {path.units[call.unit] for call in path.calls}
    used = {name for events in path.events for event in events for name in event.parameters}
    by_identity = table.by_identity()
    return frozenset(
        name
        for name, unit in units.items()
        if name not in called
        and any(True for _ in unit.children())
        and any(by_identity[id(parameter)] in used for parameter in unit.parameters())
    )


def _alike(units: dict[str, nn.Module]) -> dict[int, frozenset[str]]:
    """Units with units inside, by index, and the names of all of their kind."""
    return {
        index: frozenset(name for name, other in units.items() if type(other) is type(unit))
        for index, unit in enumerate(units.values())
        if not _is_leaf(unit)
    }


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
            f"{what}, and {step} could not go on without ({type(error).__name__}: {error}). Keep "
            "it a tensor (torch.where, masks), or do it after the last layer."
        )
    line = error_line(error.__traceback__)
    if _is_packed(error):
        return ModelError(
            f"{line}: {step} uses a packed sequence, whose sizes are the lengths' values; a "
            "pipeline knows shapes alone. Give the recurrent layer the padded tensor and take its "
            "outputs at the lengths (gather), declare the units yourself, or use pp=1."
        )
    if isinstance(error, AttributeError) and str(error).startswith(f"'{module}' object has no"):
        return ModelError(
            f"{line}: {step} uses what {module} does not have yet ({error}): a pipeline looks at "
            "the step before on_fit_start, on_train_start and the like run. Give it a first value "
            "in __init__ or setup; hooks may change it."
        )
    return ModelError(
        f"{line}: {step} cannot run on shapes alone "
        f"({type(error).__name__}: {error}). If the step works with pp=1, move what needs data "
        "into a layer with parameters, or declare the units yourself."
    )


def _is_packed(error: BaseException | None) -> bool:
    """Whether torch was at work on a packed sequence."""
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        for frame, _ in frames:
            values = frame.f_locals.values()
            if frame.f_code.co_name == "pack_padded_sequence" or any(
                isinstance(value, PackedSequence) for value in values
            ):
                return True
        error = error.__cause__ or error.__context__
    return False


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
    for call, what in record.deferred:
        if call < num_calls:
            raise ModelError(
                f"{what}, before the last layer of {step} has run. Only the stage that computes a "
                "value can look at it (item, numpy, a Python branch). Keep it a tensor "
                "(torch.where, masks), do it after the last layer, or log the tensor itself."
            )
    cuts: list[Cut | str] = [Cut((0, 0), ())]
    cuts.extend(_choose(record, call) for call in range(1, num_calls + 1))
    return Path(
        names,
        tuple(record.calls),
        tuple(tuple(events) for events in record.events),
        tuple(cuts),
        clones_batch,
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


# -- units: blocks of a repeated stack as a whole, outside of it leaf by leaf ----------------------

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def select_units(
    module: nn.Module, chain: str | None, opened: frozenset[str]
) -> dict[str, nn.Module]:
    """Chooses the units of ``module`` by their global names, in registration order.

    A module without parameters is no unit: it runs on every stage. Parameters that belong to a
    module above the units (position tables, class tokens) are found by the probe where used. The
    children of ``chain`` are units whatever they contain; ``opened`` modules are none although
    they look like it, but their children are.

    Raises:
        ModelError: If ``chain`` names no container, or there is no parameter at all.
    """
    forced: nn.Module | None = None
    if chain is not None:
        forced = dict(module.named_modules()).get(chain)
        if forced is None or not any(True for _ in forced.children()):
            others = [n for n, child in module.named_modules() if isinstance(child, _CONTAINERS)]
            raise ModelError(
                f"model.pipeline_layers={chain} names no container of layers. Choose one of: "
                f"{', '.join(others) or 'none'}."
            )
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, unit in _select(module, "", forced, opened):
        first.setdefault(id(unit), (name, unit))
    if not first and not _has_parameters(module):
        raise ModelError(
            f"{type(module).__name__} has no parameters, so there is nothing to cut into stages. "
            "Build the network in __init__ or configure_model, or use pp=1."
        )
    return dict(first.values())


def _select(
    module: nn.Module, name: str, forced: nn.Module | None, opened: frozenset[str]
) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated_children(module, forced)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not _has_parameters(child):
            continue
        contains_forced = forced is not None and any(m is forced for m in child.modules())
        whole = child_name in repeated or _is_leaf(child)
        if whole and not contains_forced and path not in opened:
            yield path, child
        else:
            yield from _select(child, path, forced, opened)


def _repeated_children(module: nn.Module, forced: nn.Module | None) -> frozenset[str]:
    """Children that are blocks of a stack: two or more composite ones of the same class."""
    if module is forced:
        return frozenset(name for name, _ in module.named_children())
    composite = {
        name: child
        for name, child in module.named_children()
        if _has_parameters(child)
        and not issubclass(_kind(child), _CONTAINERS)
        and any(True for _ in getattr(child, "_orig_mod", child).children())
    }
    if not isinstance(module, _CONTAINERS):
        # Blocks kept as attributes (down1, down2, ...); two towers are looked into instead.
        composite = {name: child for name, child in composite.items() if not _has_stack(child)}
    counts = Counter(_kind(child) for child in composite.values())
    return frozenset(name for name, child in composite.items() if counts[_kind(child)] > 1)


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module, compiled or not."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return type(inner)


def _has_stack(module: nn.Module) -> bool:
    return any(
        isinstance(child, _CONTAINERS) and _repeated_children(child, None)
        for child in module.modules()
    )


def _is_leaf(module: nn.Module) -> bool:
    """Modules that are never looked into: those without children, and torch's own layers."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return _is_leaf(module._orig_mod)
    if not any(_has_parameters(child) for child in module.children()):
        return True
    library = type(module).__module__.startswith("torch.nn.")
    return library and not isinstance(module, _CONTAINERS) and not _has_stack(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
