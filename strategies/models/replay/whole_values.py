"""What a step makes of its batch and of random numbers alone, as the whole batch would have it.

A microbatch's step has some of the rows. What its layers give does not depend on the others, but
what stands before them may: a mixup takes rows of the whole batch, ``x.flip(0)`` its last ones, and
noise is drawn for all rows at once. No layer has a part in such values, so every rank can compute
them: the step runs once for the whole batch without its layers (``ValueRun``), and wherever a
microbatch's step hands such a value to a layer, or joins it with what layers gave, it gets its rows
of the whole batch's (``Hand``). Which values that concerns, and how their rows lie, is found before
the first step by runs that are compared (``find_plan``); a step without any costs nothing more.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.collectives import is_collective
from strategies.models.nested import leaves, rebuild, tensors
from strategies.models.replay.batch_rows import Pair, Rows, same_values
from strategies.models.replay.gate import STEP_FRAME, StageDone
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    checkpoint_region,
    dataless,
    operation_name,
    user_line,
)
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Position
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.stage_model import STEP_NAMES, Mode
from strategies.models.state import Generators, kept_generators

_INDEXING = """
    __getitem__ __setitem__ index_select gather take_along_dim index_add index_add_ index_copy
    index_copy_ index_put index_put_ index_fill scatter scatter_ scatter_add scatter_add_
    scatter_reduce take
"""
_INDEXES = frozenset(_INDEXING.split())
_FILLING = frozenset({"__setitem__", "copy_", "zero_", "fill_"})
_NEUTRAL = 0.5

# Mode, index of the loader, structure of the batch.
Step = tuple[Mode, int, Hashable]
Where = tuple[int, int | None]  # indices of batch and loader, as the step is given them
# A tensor among the arguments of a layer or of an operation between layers: where the step is
# before that, and its place in ``leaves`` of the arguments.
Point = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Draw:
    """A call that has drawn random numbers, and what it gave."""

    func: Function
    result: Any


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
        end: Where the run ended.
    """

    at: dict[Point, Tensor] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)
    written: set[Point] = field(default_factory=set)
    filled: set[Point] = field(default_factory=set)
    indices: set[Point] = field(default_factory=set)
    regions: set[Point] = field(default_factory=set)
    lines: dict[Point, str] = field(default_factory=dict)
    host: bool = False
    end: Position = (0, 0)


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
    """

    ways: Mapping[Position, Mapping[int, Rows | None]]
    drawing: frozenset[Function]
    host: bool
    draws: bool
    last: Position
    inside: frozenset[Point]

    @property
    def is_empty(self) -> bool:
        return not self.ways and not self.host


NOTHING = ValuePlan({}, frozenset(), False, False, (-1, 0), frozenset())


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


class Hand:
    """What a run for some rows gets of the whole batch's values."""

    def __init__(self, plan: ValuePlan, values: Values, share: Share) -> None:
        self._plan = plan
        self._values = values
        self._share = share
        self._drawn: int | None = 0

    @property
    def last(self) -> Position:
        return self._plan.last

    def arguments(
        self, position: Position, args: Args, kwargs: Kwargs, tracked: Callable[[Tensor], bool]
    ) -> tuple[Args, Kwargs]:
        """The arguments of a call, with this run's rows of what is dealt out."""
        ways = self._plan.ways.get(position)
        if ways is None:
            return args, kwargs
        places = count()

        def dealt(leaf: Any) -> Any:
            place = next(places)
            point = (*position, place)
            value = self._values.at.get(point) if place in ways else None
            if value is None or not isinstance(leaf, Tensor) or tracked(leaf):
                return leaf
            own = self._share.of(value, ways[place])
            if own.shape != leaf.shape or leaf.requires_grad:
                return leaf
            if point in self._plan.inside:
                leaf.data.copy_(own)
                return leaf
            return own

        changed: tuple[Args, Kwargs] = rebuild((args, kwargs), dealt)
        return changed

    def draws(self, func: Function) -> bool:
        return func in self._plan.drawing

    def draw(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """What a drawing call gives: the whole batch's result, where it is one for all rows.

        What has rows is drawn for these rows alone, and dealt out where it is used.
        """
        known: Draw | None = None
        if self._drawn is not None:
            draws = self._values.draws
            known = draws[self._drawn] if self._drawn < len(draws) else None
            # Past the last one, or on another way than the whole batch's step.
            self._drawn = None if known is None or known.func is not func else self._drawn + 1
        with _kept(kwargs.get("generator")):
            result = func(*args, **kwargs)
        if self._drawn is None or known is None:
            return result
        drawn = known.result
        both = isinstance(result, Tensor) and isinstance(drawn, Tensor)
        if both and result.shape == drawn.shape and result.dtype == drawn.dtype:
            with torch.no_grad():
                result.copy_(drawn)
        return result


class Dealer:
    """Finds out what of a module's steps is dealt out, and deals it.

    ``run`` goes through a step, given its key, a batch, its indices, a plan, and whether draws are
    to be neutral; ``calls`` tells how many layers it calls.
    """

    def __init__(
        self,
        run: Callable[[Step, Any, Where, ValuePlan | None, bool], Values],
        calls: Callable[[Step, Any, Where], int],
    ) -> None:
        self._run = run
        self._calls = calls
        self._plans: dict[Step, ValuePlan] = {}
        self._plan: ValuePlan | None = None
        self._values = Values()
        self._shares: Sequence[Share] = ()
        self._begin: Generators | None = None

    def plan(self, step: Step) -> ValuePlan | None:
        """What is known of a step; None before ``look``."""
        return self._plans.get(step)

    def look(
        self,
        step: Step,
        whole: Any,
        part: Any,
        turned: Any,
        front: Any,
        *,
        rows: int,
        first: int,
        where: Where,
    ) -> ValuePlan:
        """Finds the plan of a step from a batch of so many rows, and those from ``first`` on.

        ``turned`` has as many other rows of the batch, ``front`` its first rows, as many as
        ``part``. The generators are the caller's care.

        Raises:
            ModelError: As ``find_plan``.
        """

        def run(batch: Any, *, seed: int = 1, neutral: bool = False) -> Values:
            seed_all(seed)
            return self._run(step, batch, where, None, neutral)

        every, last, early = run(whole), run(part), run(front)
        pair = Pair(rows, first)
        plan = NOTHING
        if every.draws or every.host or not _rows_stay(every, last, early, pair):
            still = (every, last)
            if every.draws:
                still = (run(whole, neutral=True), run(part, neutral=True))
            plan = find_plan(
                every,
                run(whole, seed=2),
                last,
                turned=run(turned),
                front=early,
                still=still,
                pair=pair,
                num_calls=self._calls(step, part, where),
                step=STEP_NAMES[step[0]],
            )
        self._plans[step] = plan
        return plan

    def read_before(
        self, step: Step, batch: Any, *, where: Where, place: Position, change: Callable[[], None]
    ) -> bool:
        """Whether layers, or operations up to a place, get other values behind a change.

        The generators are the caller's care, and so is the change. Where the step cannot be run,
        nobody knows that they do not.
        """
        try:
            seed_all(1)
            first = self._run(step, batch, where, None, False).at
            change()
            seed_all(1)
            second = self._run(step, batch, where, None, False).at
        except Exception:
            return True
        return any(
            point[:2] <= place and not _is_same(second.get(point), value)
            for point, value in first.items()
        )

    def deal(self, step: Step, whole: Any, shares: Sequence[Share], *, where: Where) -> None:
        """Computes a batch's values, drawing from the generators where they are.

        Args:
            step: Of which ``plan`` is known.
            whole: The rows of all replicas.
            shares: Of the microbatches, and last that of this replica's batch.
            where: For the step's arguments.
        """
        self._plan, self._shares = self._plans[step], shares
        self._begin = Generators.now() if self._plan.host else None
        self._values = self._run(step, whole, where, self._plan, False)

    def clear(self) -> None:
        """Passes get nothing until ``deal``."""
        self._plan, self._values, self._shares, self._begin = None, Values(), (), None

    def begin(self) -> None:
        """Behind it, Python and numpy draw what they drew for the batch."""
        if self._begin is not None:
            self._begin.put_back(host_only=True)

    def hand(self, microbatch: int | None) -> Hand | None:
        """For a run of one microbatch, or of all, which begins now; None if nothing is dealt."""
        if self._plan is None:
            return None
        self.begin()
        share = self._shares[-1 if microbatch is None else microbatch]
        return Hand(self._plan, self._values, share)


class ValueRun(ShapeMode):
    """Goes through a step without its layers and notes what is made without them.

    Without a ``plan`` it notes everything; it ends where a value of a layer would be looked at.
    If it is ``neutral``, what is drawn is the same for each row, which leaves rows where they are.
    """

    def __init__(
        self,
        units: list[nn.Module],
        device: torch.device,
        cache: MutableMapping[Hashable, Outcome],
        plan: ValuePlan | None = None,
        *,
        neutral: bool = False,
    ) -> None:
        super().__init__(units, device, cache)
        self.values = Values()
        self._plan = plan
        self._neutral = neutral
        self._position: Position = (0, 0)

    def begin(self) -> None:
        self._before = Generators.now() if self._plan is None else None
        self._leave_if_through()

    def close(self) -> Values:
        """What it has seen; its generators are wherever the step has left them."""
        if self._before is not None:
            self.values.host = not self._before.are_now(host_only=True)
        self._twins.clear()
        return self.values

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        self._note(args, kwargs)
        call = self._position[0]
        with kept_generators():
            result, _ = self.skip(index, forward, args, kwargs, call)
        self._arrive((call + 1, 0))
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            return self.on_backward(func)
        points = self._note(args, kwargs)
        with kept_generators():
            outcome = self.answer(func, args, kwargs)
        if outcome.dependent:
            return self.on_look(func, args)
        if self._plan is None:
            given = [points.get(place) for place in range(len(list(leaves((args, kwargs)))))]
            if operation_name(func) in _INDEXES:
                at = self.values.at
                found = {point for point in points.values() if not at[point].is_floating_point()}
                self.values.indices |= found
            over = operation_name(func) in _FILLING or is_collective(func)
            written = (given[index] for index, _ in outcome.mutated)
            changed = self.values.filled if over else self.values.written
            changed.update(point for point in written if point is not None)
        result = self.instantiate(outcome, None, args, kwargs)
        name = operation_name(func)
        if name == "__setitem__" or tensors(result):
            call, event = self._position
            self._arrive((call, event + 1))
        return result

    def on_look(self, func: Function, args: Args) -> Any:
        """Somebody wants to see a value of a layer."""
        raise StageDone

    def on_backward(self, func: Function) -> Any:
        raise StageDone

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._inside is not None:
            return func(*args, **kwargs)
        if self._plan is not None:
            result = func(*args, **kwargs)
            if func in self._plan.drawing:
                self.values.draws.append(Draw(func, _copy(result)))
            return result
        before = _drawn_so_far()
        result = func(*args, **kwargs)
        if kwargs.get("generator") is not None or not _same_states(before, _drawn_so_far()):
            self.values.draws.append(Draw(func, _copy(result)))
            if self._neutral and isinstance(result, Tensor):
                _make_neutral(func, result)
        return result

    def _note(self, args: Args, kwargs: Kwargs) -> dict[int, Point]:
        """Keeps the untracked tensors among the arguments, where they are of interest."""
        wanted = None if self._plan is None else self._plan.ways.get(self._position, {})
        points: dict[int, Point] = {}
        if wanted is not None and not wanted:
            return points
        region = None
        if self._plan is None:
            region, _ = checkpoint_region(STEP_FRAME)
        for place, leaf in enumerate(leaves((args, kwargs))):
            if not isinstance(leaf, Tensor) or self.tracked(leaf) or leaf.is_meta:
                continue
            if wanted is not None and place not in wanted:
                continue
            point = (*self._position, place)
            points[place] = point
            self.values.at[point] = leaf.detach().clone()
            if self._plan is None:
                self.values.lines[point] = user_line()
                if region is not None:
                    self.values.regions.add(point)
        return points

    def _arrive(self, position: Position) -> None:
        self._position = self.values.end = position
        self._leave_if_through()

    def _leave_if_through(self) -> None:
        if self._plan is not None and self._position > self._plan.last:
            raise StageDone


def _make_neutral(func: Function, result: Tensor) -> None:
    with torch.no_grad():
        if func is torch.randperm:
            result.copy_(torch.arange(len(result)))
        else:
            result.fill_(_NEUTRAL if result.is_floating_point() else 0)


def seed_all(seed: int) -> None:
    """All generators, without a word to Lightning."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _rows_stay(whole: Values, part: Values, front: Values, pair: Pair) -> bool:
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
        if not drawn and numbers and _is_same(turned.at.get(point), value):
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


def _is_same(first: Tensor | None, second: Tensor) -> bool:
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


@contextmanager
def _kept(generator: torch.Generator | None) -> Iterator[None]:
    """What is drawn inside counts for nobody else."""
    state = None if generator is None else generator.get_state()
    try:
        with kept_generators():
            yield
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


def _drawn_so_far() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _same_states(before: list[Tensor], now: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(before, now, strict=False))


def _copy(result: Any) -> Any:
    return (
        result.detach().clone()
        if isinstance(result, Tensor) and not isinstance(result, Hole)
        else result
    )
