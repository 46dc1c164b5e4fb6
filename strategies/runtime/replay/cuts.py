"""From a probe's record to the places where the step can be cut, and what crosses each."""

from __future__ import annotations

from strategies.errors import ModelError
from strategies.runtime.replay.hole import Spec
from strategies.runtime.replay.path import Boundary, Cut, Path
from strategies.runtime.replay.probe import Place, Record, Value


def make_path(record: Record, names: tuple[str, ...], *, step: str, clones_batch: bool) -> Path:
    """Chooses, before every call, the place that fewest bytes cross.

    Raises:
        ModelError: If the step looks at data before its last layer, which no cut can serve.
    """
    num_calls = len(record.calls)
    for call, what in record.deferred:
        if call < num_calls:
            raise ModelError(
                f"{what}, before the last layer of {step} has run. Only the stage that computes a "
                "value can look at it (item, numpy, a Python branch). Keep it a tensor "
                "(torch.where, masks), do it after the last layer, or log the tensor itself."
            )
    cuts: list[Cut | str] = [Cut((0, 0), ())]
    cuts.extend(_choose(record, call) for call in range(1, num_calls))
    if num_calls:
        cuts.append(_choose(record, num_calls, last=True))
    return Path(
        names,
        tuple(record.calls),
        tuple(tuple(events) for events in record.events),
        tuple(cuts),
        clones_batch,
    )


def _choose(record: Record, call: int, *, last: bool = False) -> Cut | str:
    for first, final, reason in record.uncuttable:
        if first <= call <= final:
            return reason
    places = record.places[call]
    if last:  # behind the last layer only its results cross; loss and logs are the next stage's
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


def _written_after(record: Record, place: Place, value: Value) -> bool:
    return any(clock > place.clock and storage is value.storage for clock, storage in record.writes)


def _aliased(record: Record, place: Place, alive: list[Value]) -> bool:
    storages: set[int] = set()
    for value in alive:
        if id(value.storage) in storages and _written_after(record, place, value):
            return True
        storages.add(id(value.storage))
    return False


def _boundary(record: Record, place: Place, value: Value) -> Boundary:
    order = _contiguous_order(value.spec)
    written = [clock for clock, storage in record.writes if storage is value.storage]
    return Boundary(
        value.key,
        value.spec,
        order,
        written=_written_after(record, place, value),
        uses=tuple(value.uses),
        changed=any(clock > value.born for clock in written),
    )


def _contiguous_order(spec: Spec) -> tuple[int, ...] | None:
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
