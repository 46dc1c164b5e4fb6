"""What layers get of each row of a batch, told with numbers: whether other rows have a part in it.

Nobody could tell that from shapes. So the step is run with numbers before training, its layers
replaced by random ones that give a row the same whatever stands beside it: for a batch, and for
parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from strategies.errors import ModelError, one_line
from strategies.models.logs import no_means
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    dataless,
    error_line,
    exchange,
    operation_name,
    user_line,
)
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Key, Path, Position
from strategies.models.replay.rows.batch_rows import Rows, Share, random_like
from strategies.models.replay.rows.draws import RunDraws
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.stage_model import STEP_NAMES, LogCall, Mode, RowsMixed
from strategies.models.state import Generators, kept_generators

Scout = TypeVar("Scout", bound="RowScout")


_FEW = 4096  # entries of a value that may be a number of the rows


class FewRowsError(ModelError):
    """A step runs on a batch, but not on a microbatch; ``behind``: not behind its last layer."""

    behind = False


def few_rows(step: str, error: Exception, rows: int, part: int, *, behind: bool) -> FewRowsError:
    few = f"not on the {part} of a microbatch ({one_line(error)}). Try"
    if behind:
        few = (
            f"behind its last layer {few} loss_over=batch, which computes one loss of all rows, or"
        )
    found = FewRowsError(
        f"{error_line(error.__traceback__)}: {step} runs on the {rows} rows of a batch, but {few} "
        "a smaller num_microbatches."
    )
    found.behind = behind
    return found


def mixed_rows(
    run: Callable[[Any, Share, RowScout | None], RowScout],
    whole: Any,
    parts: Sequence[Any],
    rows: Sequence[int],
    *,
    mode: Mode,
    stays: frozenset[Key],
    loose: bool,
) -> RowsMixed:
    """What ``StageModel.mixed_rows`` gives; arguments as for ``scout``.

    ``stays`` are values that the step keeps or returns; numbers are ``loose`` where they have 16
    bits.
    """
    try:
        runs = scout(run, whole, parts, rows, step=STEP_NAMES[mode])
    except FewRowsError:
        raise
    except ModelError:
        return RowsMixed()
    if runs is None:
        return RowsMixed()
    both, some = runs
    shares = [(one.logged, float(number)) for one, number in zip(some, rows, strict=True)]
    mixed = next((one.mixed for one in some if one.mixed), None)
    parts_of = [float(number) for number in rows]
    number = number_of_rows(both, some, parts_of, loose=loose) if mode == "train" else None
    kept = kept_number(both, some, parts_of, stays, loose=loose)
    return RowsMixed(mixed, no_means(both.logged, shares, loose=loose), number, kept)


def scout(
    run: Callable[[Any, Share, RowScout | None], Scout],
    whole: Any,
    parts: Sequence[Any],
    rows: Sequence[int],
    *,
    step: str,
) -> tuple[Scout, list[Scout]] | None:
    """Runs a step for a batch and for its parts; None where random numbers are not for it.

    Args:
        run: Runs the step for a batch, which has these rows of another.
        whole: That batch.
        parts: Its rows, in order, in two or more batches.
        rows: How many each has.
        step: Its name.

    Raises:
        ModelError: The step does what a ``run`` refuses.
        FewRowsError: It fails for a part: a row refers to one of another (an edge of a graph), or
            these are too few.
    """
    total = sum(rows)
    starts = [sum(rows[:number]) for number in range(len(rows))]
    try:
        both = run(whole, Share(0, total, total), None)
        if both.failed is not None:
            return None
        some = []
        for part, start, size in zip(parts, starts, rows, strict=True):
            some.append(run(part, Share(start, size, total), both))
            failed = some[-1].failed
            if failed is not None:
                raise few_rows(step, failed, total, min(rows), behind=some[-1].is_behind)
            if some[-1].drawn != both.drawn:
                return None  # Python or numpy draws for each row, and the parts draw the same.
        return both, some
    except UndecidedError:
        return None


def number_of_rows(
    whole: RowScout, parts: Sequence[RowScout], shares: Sequence[float], *, loose: bool
) -> str | None:
    """The line of a number that the loss takes, made before the last layer of all rows at once.

    Such a number is no mean over rows, and neither is the loss. None if nobody has seen one.
    """
    gathered = next((part.gathered for part in parts if part.gathered is not None), None)
    if gathered is not None:
        return gathered
    losses = [part.loss for part in parts if part.loss is not None]
    if whole.loss is None or len(losses) < len(parts):
        return None
    mean = torch.tensor([whole.loss]), torch.tensor([_mean(losses, shares)])
    if _alike(*mean, loose=loose):
        return None
    found = _no_means(whole, parts, shares, loose=loose)
    return next(iter(found.values()), None)


def kept_number(
    whole: RowScout,
    parts: Sequence[RowScout],
    shares: Sequence[float],
    kept: frozenset[tuple[int, int, int]],
    *,
    loose: bool,
) -> str | None:
    """The line of a value that is no mean over rows, among those that the step has ``kept``."""
    if not any(place in kept for place in whole.numbers):
        return None
    found = _no_means(whole, parts, shares, loose=loose)
    return next((line for place, line in found.items() if place in kept), None)


def _no_means(
    whole: RowScout, parts: Sequence[RowScout], shares: Sequence[float], *, loose: bool
) -> dict[tuple[int, int, int], str]:
    """The lines of values before the last layer that are no means of the parts' values."""
    lines = {}
    for place, (value, line) in whole.numbers.items():
        own = [part.numbers[place][0] for part in parts if place in part.numbers]
        known = len(own) == len(parts) and all(each.shape == value.shape for each in own)
        if known and not _alike(value, _mean(own, shares), loose=loose):
            lines[place] = line
    return lines


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    total = sum(shares)
    return sum(value * (share / total) for value, share in zip(values, shares, strict=True))


def _alike(first: Tensor, second: Tensor, *, loose: bool) -> bool:
    first, second = first.double(), second.double()
    if not bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
        return True
    return bool(torch.allclose(first, second, rtol=0.03 if loose else 1e-4, atol=1e-6))


class UndecidedError(Exception):
    """Nobody can tell where the rows are."""


class RowScout(ShapeMode):
    """Goes through a step with layers that give random rows.

    Args:
        units: As for ``ShapeMode``, like ``device`` and ``cache``.
        path: What the probe has seen: which operations draw.
        share: Which rows of the batch this is.
        whole: The run for all rows; None where this is it.
        draws: What the step draws from; None if it draws nothing.

    Attributes:
        mixed: The line of the first layer that gets rows which others have a part in.
        logged: What the step has logged before its last layer.
        loss: What the step has returned, of this run's rows; None if nobody knows.
        gathered: The line of the first layer that gives one number for all its rows.
        failed: What the step has raised.
        drawn: The same number in runs that have drawn as many numbers by Python and numpy.
        numbers: By position and place, small values that are made of layers' before the last one,
            with their lines.
    """

    def __init__(
        self,
        units: list[nn.Module],
        device: torch.device,
        cache: MutableMapping[Hashable, Outcome],
        *,
        path: Path,
        share: Share,
        whole: RowScout | None,
        draws: RunDraws | None,
    ) -> None:
        super().__init__(units, device, cache)
        self.mixed: str | None = None
        self.logged: tuple[LogCall, ...] = ()
        self.loss: float | None = None
        self.gathered: str | None = None
        self.failed: Exception | None = None
        self.drawn: tuple[int, int] | None = None
        self.numbers: dict[tuple[int, int, int], tuple[Tensor, str]] = {}
        self._path = path
        self._share = share
        self._whole = whole
        self._draws = draws
        self._position: Position = (0, 0)
        self._given: dict[int, list[Tensor]] = {}
        self._picks: dict[int, Tensor] = {}
        self._made: dict[tuple[int, int], Tensor] = {}
        self._parameters: dict[str, Tensor] = {}

    @property
    def is_behind(self) -> bool:
        """Whether the run has come to its last layer."""
        return self._position[0] >= len(self._path.calls)

    def step(self, call: Callable[[], Any]) -> Any:
        """What a call of the step in this run gives; None if it has ``failed``."""
        try:
            with self:
                result = call()
            self.drawn = Generators.now().marks()[1:]
            return result
        except (ModelError, UndecidedError):
            raise
        except Exception as error:
            self.failed = error
            return None

    def logs_early(self, value: Any) -> bool:
        """Whether a number is logged that no stage knows of the whole batch."""
        return (
            not self.is_behind
            and isinstance(value, Tensor | int | float)
            and not isinstance(value, Hole)
        )

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._draws is not None and self._inside is None:
            return self._draws.draw(func, args, kwargs)
        return func(*args, **kwargs)

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        call = self._position[0]
        given = [t.detach().clone() for t in tensors((args, kwargs)) if not isinstance(t, Hole)]
        with kept_generators():
            result, produced = self.skip(index, forward, args, kwargs, call)
        self._given[call] = given
        ways = self._ways(call, given)
        for ordinal, hole in enumerate(produced):
            if isinstance(hole, Hole):
                single = math.prod(hole.spec.shape) == 1 and hole.spec.dtype.is_floating_point
                if any(ways) and single and self.gathered is None:
                    self.gathered = user_line()
                exchange(hole, self._output((call, ordinal), hole, ways))
                self.mark(hole)
        self._position = (call + 1, 0)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        args, kwargs = rebuild((args, kwargs), self._with_data)
        call, event = self._position
        events = self._path.events[call] if call < len(self._path.events) else ()
        given = tensors((args, kwargs))
        if event < len(events) and events[event].random and given:
            result: Any = given[0].clone()  # Draws of layers' values have no part in this.
        else:
            result = func(*args, **kwargs)
        if operation_name(func) == "__setitem__" or tensors(result):
            self._position = (call, event + 1)
        for place, tensor in enumerate(tensors(result)):
            self.mark(tensor)
            few = call < len(self._path.calls) and tensor.numel() <= _FEW
            if few and tensor.is_floating_point():
                self.numbers[(*self._position, place)] = tensor.detach().clone(), user_line()
        return result

    def _ways(self, call: int, given: Sequence[Tensor]) -> list[Rows | None]:
        """How this part's rows lie in a layer's arguments of the whole batch."""
        found: list[Rows | None] = []
        if self._whole is None:
            return found
        for value, own in zip(self._whole._given.get(call, ()), given, strict=False):
            if value.shape == own.shape or value.dim() != own.dim():
                continue
            ways = self._share.ways(value, own)
            picked = None if ways else _picked(value, own)
            if picked is not None:
                self._picks.setdefault(call, picked)
            elif not ways and self.mixed is None:
                self.mixed = user_line()
            found += [way for way in ways if way not in found]
        return found

    def _output(self, key: tuple[int, int], hole: Hole, ways: list[Rows | None]) -> Tensor:
        spec = hole.spec
        if self._whole is None:
            made = random_like(spec, self._device, key[0] * 1009 + key[1])
            if spec.dtype.is_floating_point:
                made = made.sigmoid()  # Some losses take nothing but probabilities.
            self._made[key] = made
            return made.clone()
        value = self._whole._made.get(key)
        if value is None:
            raise UndecidedError
        if value.shape == spec.shape:
            return value.clone()
        picks = self._picks.get(key[0])
        if picks is not None and (len(picks), *value.shape[1:]) == spec.shape:
            return value.index_select(0, picks)
        rows = [Rows(dim) for dim in range(value.dim())]
        for way in [*ways, *rows]:
            own = None if way is None else self._share.of(value, way)
            if own is not None and own.shape == spec.shape:
                return own.clone()
        raise UndecidedError

    def _with_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, Hole | nn.Parameter):
            return leaf
        if isinstance(leaf, Hole) and leaf.parameter is None:
            raise UndecidedError
        if isinstance(leaf, nn.Parameter):
            return leaf.detach()
        name = str(leaf.parameter)
        if name not in self._parameters:
            self._parameters[name] = random_like(leaf.spec, self._device, len(name))
        return self._parameters[name]


def _picked(value: Tensor, own: Tensor) -> Tensor | None:
    """Which rows of a value these are, in whatever order; None if one is of no row alone."""
    if value.dim() == 0 or value.shape[1:] != own.shape[1:]:
        return None
    if value.dim() == 1:  # Lengths, maybe: equal numbers say nothing.
        raise UndecidedError
    with torch._C.DisableTorchFunction():
        same = (own.flatten(1)[:, None] == value.flatten(1)[None]).all(dim=2)
        return same.int().argmax(dim=1) if bool(same.any(dim=1).all()) else None
