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

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError, one_line
from strategies.models.nested import rebuild
from strategies.models.replay.hole import (
    Args,
    Function,
    Kwargs,
    error_line,
)
from strategies.models.replay.path import Position
from strategies.models.replay.rows.batch_rows import Pair
from strategies.models.replay.rows.packed_rows import keep_longest
from strategies.models.replay.rows.value_plan import (
    NOTHING,
    Draw,
    Given,
    Share,
    ValuePlan,
    Values,
    bounds_of,
    drawn_rows,
    find_plan,
    is_same,
    rows_stay,
)
from strategies.models.replay.rows.value_run import seed_all
from strategies.models.stage_model import STEP_NAMES, Mode
from strategies.models.state import Generators, kept_generators


class FewRowsError(Exception):
    """A step cannot run on some rows of a batch; ``refusal`` says so."""

    def __init__(self, refusal: ModelError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


# Mode, index of the loader, structure of the batch.
Step = tuple[Mode, int, Hashable]
Where = tuple[int, int | None]  # indices of batch and loader, as the step is given them


class Hand:
    """What a run for some rows gets of the whole batch's values."""

    def __init__(
        self, plan: ValuePlan, values: Values, share: Share, *, goes_on: bool = False
    ) -> None:
        """``goes_on``: what draws behind all that is known does so where generators stand."""
        self._plan = plan
        self._goes_on = goes_on
        self._values = values
        self._share = share
        self._drawn: int | None = 0
        self._packed = 0

    @property
    def packs(self) -> bool:
        return self._plan.packs

    def on_packing(self, counts: Tensor) -> None:
        """What is packed will be filled up to the longest sequence of the whole batch."""
        if self._packed < len(self._values.longest):
            keep_longest(counts, self._values.longest[self._packed])
        self._packed += 1

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
        """What a drawing call gives: the whole batch's result, or these rows of it.

        What has its rows elsewhere than in front is drawn for these rows alone, and so are the
        numbers of rows (``randperm``); they are dealt out where they are used.
        """
        known: Draw | None = None
        if self._drawn is not None:
            draws = self._values.draws
            known = draws[self._drawn] if self._drawn < len(draws) else None
            # Past the last one, or on another way than the whole batch's step.
            self._drawn = None if known is None or known.func is not func else self._drawn + 1
        if self._goes_on and self._drawn is None:
            return func(*args, **kwargs)
        with _kept(kwargs.get("generator")):
            result = func(*args, **kwargs)
        if self._drawn is None or known is None:
            return result
        drawn = known.result
        if isinstance(result, Tensor) and isinstance(drawn, Tensor) and result.dtype == drawn.dtype:
            own = drawn_rows(known, result, self._share, bounds_of(args, kwargs))
            if own is not None:
                with torch.no_grad():
                    result.copy_(own)
        return result


class Dealer:
    """Finds out what of a module's steps is dealt out, and deals it.

    ``run`` goes through a step, given its key, a batch, its indices, a plan, whether draws are to
    be neutral, and what is to be drawn; ``calls`` tells how many layers it calls, ``decides``
    whether it has branches, which may hang on what is drawn.
    """

    def __init__(
        self,
        run: Callable[..., Values],
        calls: Callable[[Step, Any, Where], int],
        decides: Callable[[Mode], bool] = lambda mode: False,
    ) -> None:
        self._run = run
        self._calls = calls
        self._decides = decides
        self._by_numbers: dict[Hashable, dict[Step, ValuePlan]] = {}
        self.turn_to(None)
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
        once: bool = False,
        alone: bool = False,
        wide: tuple[Any, int, int] | None = None,
    ) -> ValuePlan:
        """Finds the plan of a step from a batch of so many rows, and those from ``first`` on.

        ``turned`` has as many other rows of the batch, ``front`` its first rows, as many as
        ``part``. The generators stand where the step draws from, and are the caller's care. With
        ``once``, what is behind the last layer runs for the whole batch alone, and so does all of
        the step if it is ``alone``. ``wide``: the rows of all replicas, how many these are, and
        which this one is.

        Raises:
            ModelError: As ``find_plan``.
            FewRowsError: The step cannot run on a part.
        """
        standing = Generators.now() if self._decides(step[0]) else None

        def run(
            batch: Any, *, seed: int = 1, neutral: bool = False, given: Given | None = None
        ) -> Values:
            seed_all(seed)
            if standing is not None:
                standing.put_back(host_only=seed != 1)  # Other numbers might lead another way.
            found = self._run(step, batch, where, None, neutral, given)
            if found.failed is not None and batch is whole:
                raise _in_words(found.failed, STEP_NAMES[step[0]])
            return found

        same: Sequence[Draw | None] = ()
        if standing is not None and wide is not None:
            same = run(wide[0]).draws  # As the batch will be gone through.
        every = run(whole, given=Given(same, Share(0, rows, rows, *(wide or (None,))[1:])))
        same = every.draws if standing is not None else ()
        last = run(part, given=Given(same, Share(first, rows - first, rows)))
        early = run(front, given=Given(same, Share(0, rows - first, rows)))
        pair = Pair(rows, first)
        plan = NOTHING
        for found in (last, early):
            if found.failed is None:
                continue
            if alone:
                self._plans[step] = plan
                return plan
            behind = found.end[0] >= self._calls(step, whole, where)
            if not (once and behind):
                raise FewRowsError(
                    few_rows(STEP_NAMES[step[0]], found.failed, rows, rows - first, behind=behind)
                )
        if every.draws or every.host or not rows_stay(every, last, early, pair):
            still = (every, last)
            if every.draws and standing is None:
                still = (run(whole, neutral=True), run(part, neutral=True))
            # What is drawn for no rows may decide about the way, and stays.
            pairs = zip(every.draws, last.draws, strict=False)
            same = [one if _shape(one) == _shape(other) else None for one, other in pairs]
            same = same if standing is not None else ()
            plan = find_plan(
                every,
                run(whole, seed=2, given=Given(same, Share(0, rows, rows))),
                last,
                turned=run(turned),
                front=early,
                still=still,
                pair=pair,
                num_calls=self._calls(step, part, where),
                step=STEP_NAMES[step[0]],
            )
        if every.longest:
            plan = replace(plan, packs=True, last=max(plan.last, every.end))
        seeds = every.moved and not every.draws and not every.host
        if seeds or (every.draws and standing is not None):
            drawing = frozenset(draw.func for draw in every.draws)
            end = max(plan.last, every.end)
            plan = replace(plan, draws=True, steers=True, last=end, drawing=drawing)
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
            point[:2] <= place and not is_same(second.get(point), value)
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
        if self._values.failed is not None:
            raise self._values.failed

    def forget(self) -> None:
        """Steps are to be looked at again."""
        for plans in self._by_numbers.values():
            plans.clear()

    @property
    def num_looks(self) -> int:
        """For how many sets of numbers steps were looked at."""
        return len(self._by_numbers)

    def turn_to(self, numbers: Hashable) -> None:
        """Of steps that read other ``numbers``, which as factors hide what is mixed, look anew."""
        self._plans = self._by_numbers.setdefault(numbers, {})

    def clear(self) -> None:
        """Passes get nothing until ``deal``."""
        self._plan, self._values, self._shares, self._begin = None, Values(), (), None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, other batches may be dealt; behind it, the pass goes on with its own."""
        before = self._plan, self._values, self._shares, self._begin
        try:
            yield
        finally:
            self._plan, self._values, self._shares, self._begin = before

    @property
    def longest(self) -> tuple[int, ...]:
        """Of the sequences that the batch's step packs."""
        return tuple(self._values.longest)

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
        return Hand(self._plan, self._values, share, goes_on=microbatch is None)


def _in_words(error: Exception, step: str) -> Exception:
    if "TorchScript interpreter" not in str(error):
        return error
    return ModelError(
        f"{error_line(error.__traceback__)}: {step} calls a TorchScript function between its "
        "layers, which runs below Python, where values of other stages are not. Use the Python "
        "function (torch.compile makes it faster), or call it inside a layer with parameters."
    )


def _shape(draw: Draw) -> torch.Size | None:
    return draw.result.shape if isinstance(draw.result, Tensor) else None


def few_rows(step: str, error: Exception, rows: int, part: int, *, behind: bool) -> ModelError:
    """The refusal of a step that cannot run on a microbatch."""
    line = error_line(error.__traceback__)
    said = one_line(error)
    if behind:
        return ModelError(
            f"{line}: {step} runs on the {rows} rows of a batch, but behind its last layer not on "
            f"the {part} of a microbatch ({said}). Try loss_over=batch, which computes one loss of "
            "all rows, or a smaller num_microbatches."
        )
    return ModelError(
        f"{line}: {step} runs on the {rows} rows of a batch, but not on the {part} of a microbatch "
        f"({said}). Try a smaller num_microbatches."
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
