"""Which values that a step makes without its layers are dealt out to microbatches, and how.

Found by comparing runs (``value_run.py``) for a batch with runs for some of its rows: in each value
the rows of a microbatch lie in some way, or nobody can tell, and the step is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.replay.hole import (
    Function,
    Hole,
)
from strategies.models.replay.path import Position
from strategies.models.replay.rows.batch_rows import Pair, Rows, same_values

# A tensor among the arguments of a layer or of an operation between layers: where the step is
# before that, and its place in ``leaves`` of the arguments.
Point = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Draw:
    """A call that has drawn random numbers, what it gave, and the whole numbers it was given."""

    func: Function
    result: Any
    bounds: tuple[int, ...]


def bounds_of(args: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The whole numbers that a call is given, between which it draws others."""
    return tuple(value for value in (*args, *kwargs.values()) if type(value) is int)


@dataclass(slots=True)
class Values:
    """What one run has seen.

    Attributes:
        at: The values by point, copied.
        draws: Calls that drew, in order.
        written: Points whose value the operation changes in place.
        filled: Points whose value it only writes over.
        indices: Points whose value says which entries of a layer's value are meant.
        regions: Points inside an activation checkpoint, which runs again without us.
        lines: Of points, in the user's code.
        host: Whether Python's or numpy's generator was drawn from.
        moved: Whether any generator stands elsewhere than before, be it for a seed that is set.
        longest: The longest of the sequences that are packed, packing by packing.
        trail: The layers, by index, and the operations on values of theirs, in order.
        wiring: Of the same, and of what is returned: by which of them its values were made.
        others: Names of what else is done: to values without a layer's part, behind the last layer,
            and layers that run without gradients.
        end: Where the run ended.
        failed: What the step raised there.
        returned: Whether the step came to its return.
    """

    at: dict[Point, Tensor] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)
    written: set[Point] = field(default_factory=set)
    filled: set[Point] = field(default_factory=set)
    indices: set[Point] = field(default_factory=set)
    regions: set[Point] = field(default_factory=set)
    lines: dict[Point, str] = field(default_factory=dict)
    host: bool = False
    moved: bool = False
    longest: list[int] = field(default_factory=list)
    trail: list[int | str] = field(default_factory=list)
    wiring: list[tuple[int, ...]] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    end: Position = (0, 0)
    failed: Exception | None = None
    returned: bool = False


@dataclass(frozen=True, slots=True)
class ValuePlan:
    """Which values of a step are dealt out.

    Attributes:
        ways: By position and place, how rows lie in a value; None for one that all share.
        drawing: Functions that draw.
        host: Whether the step draws with Python or numpy.
        draws: Whether it draws at all.
        last: Behind it nothing is of interest.
        inside: Points in an activation checkpoint, whose values are changed in place: it is called
            again with the same objects, and without us.
        packs: Whether it packs sequences.
        steers: Whether it is to be gone through for its generators: what is drawn may decide where
            the step goes, or it sets a seed.
    """

    ways: Mapping[Position, Mapping[int, Rows | None]]
    drawing: frozenset[Function]
    host: bool
    draws: bool
    last: Position
    inside: frozenset[Point]
    packs: bool = False
    steers: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.ways or self.host or self.packs or self.steers)


NOTHING = ValuePlan({}, frozenset(), False, False, (-1, 0), frozenset())
# Of a run that only goes through a step, up to its end.
THROUGH = ValuePlan({}, frozenset(), False, False, (sys.maxsize, 0), frozenset())


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows of a replica's batch a run has: ``rows`` from ``start`` on, of ``total``.

    The values are of ``replicas`` times as many, whose rows go round among the replicas, as a
    distributed sampler deals them.
    """

    start: int
    rows: int
    total: int
    replicas: int = 1
    replica: int = 0

    def of(self, value: Tensor, way: Rows | None) -> Tensor:
        if way is None:
            return value
        dim, whole = way.dim, self.total * self.replicas
        apart = value.reshape(*value.shape[:dim], way.blocks, whole, -1, *value.shape[dim + 1 :])
        if self.replicas > 1:
            picked = torch.arange(self.replica, whole, self.replicas, device=value.device)
            apart = apart.index_select(dim + 1, picked)
        own = apart.narrow(dim + 1, self.start, self.rows)
        return own.flatten(dim, dim + 2)

    def rows_of(self, value: Tensor, own: Tensor) -> Tensor | None:
        """This run's rows of a value, if these are in front, as they are in its ``own``."""
        if not value.dim() or not own.dim() or value.shape[1:] != own.shape[1:]:
            return None
        both = len(value) == self.total * self.replicas and len(own) == self.rows
        return self.of(value, Rows(0)) if both else None


class Given:
    """What the draws of one run were, for another one that is to go the same way.

    ``share`` are the rows that the other run has; a draw that is None is left to it.
    """

    def __init__(self, draws: Sequence[Draw | None], share: Share) -> None:
        self._draws = iter(draws)
        self._share = share

    def put_into(self, result: Any, func: Function, bounds: tuple[int, ...]) -> None:
        """Writes over what a call has drawn."""
        known = next(self._draws, None)
        if known is None or known.func is not func:
            return
        drawn = known.result
        if isinstance(result, Tensor) and isinstance(drawn, Tensor) and result.dtype == drawn.dtype:
            own = drawn_rows(known, result, self._share, bounds)
            if own is not None:
                with torch.no_grad():
                    result.copy_(own)


def drawn_rows(known: Draw, result: Tensor, share: Share, bounds: tuple[int, ...]) -> Tensor | None:
    """What a run for some rows has of a draw for all; None where nobody can tell."""
    drawn: Tensor = known.result
    if result.shape == drawn.shape:
        return drawn
    alike = result.is_floating_point() or known.bounds == bounds
    return share.rows_of(drawn, result) if alike else None


def rows_stay(whole: Values, part: Values, front: Values, pair: Pair) -> bool:
    """Whether each part makes what the whole batch makes of these rows, in all values."""
    return all(
        point in whole.filled or _known(value, part.at.get(point), front.at.get(point), pair)
        for point, value in whole.at.items()
    )


def _known(
    value: Tensor, last: Tensor | None, early: Tensor | None, pair: Pair
) -> list[Rows | None]:
    """How the rows of two parts lie in a value; the same way in both."""
    if last is None or early is None or not last.dim() == early.dim() == value.dim():
        return []
    also = ways_of(Share(0, pair.rows - pair.first, pair.rows), value, early)
    return [found for found in pair.compare(value, last) if found in also]


def find_plan(
    whole: Values,
    again: Values,
    part: Values,
    *,
    turned: Values,
    front: Values,
    still: tuple[Values, Values],
    pair: Pair,
    num_calls: int,
    step: str,
) -> ValuePlan:
    """Which values are to be dealt out, and how.

    Args:
        whole: A run for a whole batch.
        again: The same with other random numbers.
        part: A run for the last of its rows, with the numbers of the first run.
        front: A run for as many of the first rows; in one part, values may be the same by chance.
        turned: Of as many other rows, with the first run's numbers.
        still: The first and the third once more, where what is drawn is the same for all rows.
        pair: Which rows these are.
        num_calls: How many layers the step calls; values behind the last one are the loss's.
        step: Its name, for messages.

    Raises:
        ModelError: Rows are mixed, and nobody can tell where they lie afterwards.
    """
    ways: dict[Point, Rows | None] = {}
    needed: list[Point] = []
    draws = bool(whole.draws) or whole.host
    for point, value in whole.at.items():
        own, other = part.at.get(point), again.at.get(point)
        if (
            point in whole.filled
            or own is None
            or own.dtype != value.dtype
            or own.dim() != value.dim()
        ):
            continue
        drawn = draws and (
            other is None
            or other.shape != value.shape
            or _differ(value, other)
            or any(_is_result(draw.result, value) for draw in whole.draws)  # from a seed of its own
        )
        known = [] if drawn else _known(value, own, front.at.get(point), pair)
        way = by_shape(pair, value, own)
        behind = point[0] >= num_calls
        if known:
            if behind and way is None:
                continue
            ways[point] = way if isinstance(way, Rows) and way in known else known[0]
            continue
        if drawn and isinstance(way, str):
            way = _still_way(still, point, pair, way)
        numbers = not value.is_floating_point()
        if not drawn and numbers and is_same(turned.at.get(point), value):
            continue  # Places of rows, whatever is in them: a microbatch has its own.
        if point in whole.indices and way is not None:
            # Rows of layers' values are put into another order: that of the microbatch's.
            return NOTHING
        if isinstance(way, str):
            # Entries belong to rows in a way that shapes do not tell.
            if not drawn and not behind and _in_proportion(pair, value, own):
                raise _unclear(step, whole.lines[point], value, pair)
            continue
        if not drawn and behind and (way is None or _adds_up(value, own)):
            continue  # What a mean divides by, and weights: microbatches' means want their own.
        if point in whole.written:
            if not drawn:
                raise _out_of_reach(step, whole.lines[point])
            continue
        ways[point] = way
        needed.append(point)
    host = whole.host
    # All of them, or none: what is the same by chance in this batch is not in the next.
    last = max((point[:2] for point in ways), default=(-1, 0)) if needed else (-1, 0)
    if host:
        last = max(last, whole.end)
    kept: dict[Position, dict[int, Rows | None]] = {}
    for point, way in ways.items():
        if needed and point not in whole.written:
            kept.setdefault(point[:2], {})[point[2]] = way
    drawing = frozenset(draw.func for draw in whole.draws)
    return ValuePlan(kept, drawing, host, draws, last, frozenset(whole.regions))


def part_of(share: Share, value: Tensor, way: Rows) -> Tensor | None:
    """These rows of a value; None if its rows do not lie so."""
    length = value.shape[way.dim]
    if length == 0 or length % (way.blocks * share.total):
        return None
    return share.of(value, way)


def ways_of(share: Share, value: Tensor, own: Tensor) -> list[Rows | None]:
    """All ways in which one value is part of another."""
    found: list[Rows | None] = []
    if value.shape == own.shape:
        return [None] if same_values(value, own) else []
    for dim in range(value.dim()):
        for blocks in range(1, value.shape[dim] // share.total + 1):
            part = part_of(share, value, Rows(dim, blocks))
            if part is not None and part.shape == own.shape and same_values(part, own):
                found.append(Rows(dim, blocks))
    return found


def _still_way(
    still: tuple[Values, Values], point: Point, pair: Pair, way: str
) -> Rows | str | None:
    """Where rows are when nothing is random."""
    both, one = (values.at.get(point) for values in still)
    if both is None or one is None or both.dim() != one.dim():
        return way
    found = pair.compare(both, one)
    return found[0] if len(found) == 1 else way


def by_shape(pair: Pair, value: Tensor, own: Tensor) -> Rows | str | None:
    """Where a value has its rows, by shapes alone; a word where they do not tell."""
    if value.shape == own.shape:
        return None
    rows = pair.rows - pair.first
    other = [dim for dim in range(value.dim()) if value.shape[dim] != own.shape[dim]]
    if len(other) == 1 and value.shape[other[0]] == pair.rows and own.shape[other[0]] == rows:
        return Rows(other[0])
    return "unclear"


def _is_result(result: Any, value: Tensor) -> bool:
    if not isinstance(result, Tensor) or isinstance(result, Hole):
        return False
    return result.shape == value.shape and result.dtype == value.dtype and result.equal(value)


def is_same(first: Tensor | None, second: Tensor) -> bool:
    return first is not None and first.shape == second.shape and not _differ(second, first)


def _in_proportion(pair: Pair, value: Tensor, own: Tensor) -> bool:
    """Whether a value has as many more entries as the batch has more rows."""
    sizes = zip(value.shape, own.shape, strict=True)
    rows = pair.rows - pair.first
    return all(a == b or a * rows == b * pair.rows for a, b in sizes)


def _differ(value: Tensor, other: Tensor) -> bool:
    return not torch.equal(value, other) and not same_values(value, other)


def _adds_up(value: Tensor, own: Tensor) -> bool:
    """Whether values have the same sum, not zero, for all rows and for some: they are weights."""
    if not value.is_floating_point() or not value.numel():
        return False
    total, part = float(value.double().sum()), float(own.double().sum())
    size = float(value.double().abs().sum())
    return abs(total) > 1e-6 * size and abs(total - part) <= 1e-6 * abs(total)


def _unclear(step: str, line: str, value: Tensor, pair: Pair) -> ModelError:
    return ModelError(
        f"{line}: {step} hands on a value of shape {list(value.shape)} that is made of all "
        f"{pair.rows} rows of the batch, and microbatches have some of them: nobody can tell which "
        "of its entries belong to which row. Make it in on_after_batch_transfer or in the data "
        "loader's collate function, which see the whole batch, or use num_microbatches=1."
    )


def _out_of_reach(step: str, line: str) -> ModelError:
    return ModelError(
        f"{line}: {step} mixes rows of the batch, of which microbatches have some, and changes "
        "the result in place by what layers give. Write it out of place (x = x + y), mix in "
        "on_after_batch_transfer or in the data loader's collate function, which see the whole "
        "batch, or use num_microbatches=1."
    )
