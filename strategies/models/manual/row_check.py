"""Whether the losses of a step with manual optimization are means over rows of its batch.

Each microbatch runs a backward of its own, so a loss that compares rows with each other, or a value
between two layers that mixes them, would silently be another one. Nobody could tell that from
shapes. So the step is run with numbers before training, its layers replaced by random ones that
give a row the same whatever stands beside it: for a batch, and for two parts of it. What does not
come to the same is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.manual.dataflow import refuse_gradients
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.batch_rows import Rows, random_like
from strategies.models.replay.hole import (
    Args,
    Function,
    Hole,
    Kwargs,
    dataless,
    exchange,
    operation_name,
    user_line,
)
from strategies.models.replay.inference import Outcome
from strategies.models.replay.path import Path, Position
from strategies.models.replay.shape_mode import ShapeMode
from strategies.models.replay.whole_values import Hand, Share, part_of, ways_of
from strategies.models.state import kept_generators


class UndecidedError(Exception):
    """Nobody can tell where the rows are."""


class RowScout(ShapeMode):
    """Goes through a step with layers that give random rows.

    Args:
        units: As for ``ShapeMode``, like ``device`` and ``cache``.
        path: What the probe has seen: which operations draw.
        share: Which rows of the batch this is.
        whole: The run for all rows; None where this is it.
        hand: What is dealt out of the whole batch's values; None if nothing.

    Attributes:
        losses: Each backward's line and loss.
        mixed: The line of the first layer that gets rows which others have a part in.
    """

    def __init__(
        self,
        units: list[nn.Module],
        device: torch.device,
        cache: dict[Hashable, Outcome],
        *,
        path: Path,
        share: Share,
        whole: RowScout | None,
        hand: Hand | None,
    ) -> None:
        super().__init__(units, device, cache)
        self.losses: list[tuple[str, float]] = []
        self.mixed: str | None = None
        self._path = path
        self._share = share
        self._whole = whole
        self._hand = hand
        self._position: Position = (0, 0)
        self._given: dict[int, list[Tensor]] = {}
        self._made: dict[tuple[int, int], Tensor] = {}
        self._parameters: dict[str, Tensor] = {}

    def act(self, action: Any) -> None:
        """Nothing is updated: this is no training."""

    def plain(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self._hand is not None and self._inside is None and self._hand.draws(func):
            return self._hand.draw(func, args, kwargs)
        return func(*args, **kwargs)

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        call = self._position[0]
        args, kwargs = self._dealt(args, kwargs)
        given = [t.detach().clone() for t in tensors((args, kwargs)) if not isinstance(t, Hole)]
        with kept_generators():
            result, produced = self.skip(index, forward, args, kwargs, call)
        self._given[call] = given
        ways = self._ways(call, given)
        for ordinal, hole in enumerate(produced):
            if isinstance(hole, Hole):
                exchange(hole, self._output((call, ordinal), hole, ways))
                self.mark(hole)
        self._position = (call + 1, 0)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        refuse_gradients(func, args)
        if func is Tensor.backward:
            self.backward(args[0])
            return None
        known, answer = dataless(func, args, kwargs)
        if known:
            return answer
        args, kwargs = self._dealt(args, kwargs)
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
        for tensor in tensors(result):
            self.mark(tensor)
        return result

    def backward(self, loss: Any, *_: Any, **__: Any) -> None:
        if isinstance(loss, Tensor) and not isinstance(loss, Hole) and loss.numel() == 1:
            with torch._C.DisableTorchFunction():
                self.losses.append((user_line(), float(loss)))

    def _dealt(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if self._hand is None:
            return args, kwargs
        return self._hand.arguments(self._position, args, kwargs, self.tracked)

    def _ways(self, call: int, given: Sequence[Tensor]) -> list[Rows | None]:
        """How this part's rows lie in a layer's arguments of the whole batch."""
        found: list[Rows | None] = []
        if self._whole is None:
            return found
        for value, own in zip(self._whole._given.get(call, ()), given, strict=False):
            if value.shape == own.shape or value.dim() != own.dim():
                continue
            ways = ways_of(self._share, value, own)
            if not ways and self.mixed is None:
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
        rows = [Rows(dim) for dim in range(value.dim())]
        for way in [*ways, *rows]:
            own = None if way is None else part_of(self._share, value, way)
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


def compare_losses(
    run: Callable[[Any, Share, RowScout | None], RowScout],
    whole: Any,
    parts: Sequence[Any],
    rows: Sequence[int],
    *,
    step: str,
) -> None:
    """Refuses losses that are not means over rows.

    Args:
        run: Runs the step for a batch, which has these rows of another.
        whole: That batch.
        parts: Its rows, in order, in two or more batches.
        rows: How many each has.
        step: Its name.

    Raises:
        ModelError: A loss, or what a layer gets, depends on which rows are together.
    """
    total = sum(rows)
    try:
        both = run(whole, Share(0, total, total), None)
        starts = [sum(rows[:number]) for number in range(len(rows))]
        some = [
            run(part, Share(start, size, total), both)
            for part, start, size in zip(parts, starts, rows, strict=True)
        ]
    except ModelError:
        raise
    except Exception:
        return  # Random numbers are not for every step: then nobody knows.
    mixed = next((one.mixed for one in some if one.mixed is not None), None)
    if mixed is not None:
        raise ModelError(
            f"{mixed}: {step} mixes rows of the batch between its layers: what this layer gets for "
            "a row depends on the others, and microbatches have some of them. Use "
            "num_microbatches=1."
        )
    for number, (line, loss) in enumerate(both.losses):
        if any(len(one.losses) <= number for one in some):
            return
        mean = sum(
            one.losses[number][1] * size / total for one, size in zip(some, rows, strict=True)
        )
        if loss == loss and abs(mean - loss) > 1e-4 * max(abs(loss), abs(mean), 1e-6):
            raise ModelError(
                f"{line}: this loss of {step} is no mean over rows: with random numbers in place "
                f"of layers it is {loss:.6g} for {total} rows and {mean:.6g} as the mean over "
                f"parts of them. It compares rows with each other, adds them up, or "
                "averages over something else, and with manual optimization each microbatch has a "
                "backward of its own. Take the mean over rows, or use num_microbatches=1."
            )
