"""Which rows of a batch the values of a microbatch belong to, so that they can be put together.

For one loss of the whole batch (``loss_over=batch``) the values behind the last layer are joined
over microbatches. Where a step runs two views of each row at once (``torch.cat([a, b])``), or
takes rows apart (``x.flatten(0, 1)``), that is not simply one microbatch behind the other. Shapes
do not tell, so the step is run with numbers: as two microbatches in one, and as the second of them.
Layers give random rows, the same in both runs for the same row of the batch; what the user's own
operations make of them shows where each row has gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.nested import rebuild, tensors
from strategies.models.replay.hole import Args, Function, Hole, Kwargs, exchange, operation_name
from strategies.models.replay.path import Cut, Path
from strategies.models.replay.stage_run import StageRun


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a value has its batch's rows.

    Attributes:
        dim: The dimension.
        blocks: How many times all rows stand there one behind the other: 2 for two views of each
            row, first all first ones. What belongs to a row stands together in each block.
    """

    dim: int
    blocks: int = 1


def join(pieces: Sequence[Tensor], rows: Rows | None) -> Tensor:
    """One value of the microbatches' values; ``rows`` is None for one that has no rows."""
    if rows is None:
        return pieces[0]
    if rows.blocks == 1:
        return torch.cat(list(pieces), rows.dim)
    apart = [_apart(piece, rows.dim, rows.blocks, -1) for piece in pieces]
    return torch.cat(apart, rows.dim + 1).flatten(rows.dim, rows.dim + 1)


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows of a batch a run has: ``rows`` from ``start`` on, of ``total``."""

    start: int
    rows: int
    total: int

    def of(self, value: Tensor, way: Rows) -> Tensor | None:
        """These rows of a value; None if its rows do not lie so."""
        length = value.shape[way.dim] if way.dim < value.dim() else 0
        if length == 0 or length % (way.blocks * self.total):
            return None
        apart = _apart(value, way.dim, way.blocks, self.total, -1)
        return apart.narrow(way.dim + 1, self.start, self.rows).flatten(way.dim, way.dim + 2)

    def ways(self, value: Tensor, own: Tensor) -> list[Rows | None]:
        """All ways in which this run's value may be part of that of the batch."""
        if value.shape == own.shape:
            return [None] if same_values(value, own) else []
        if value.dim() != own.dim():
            return []
        found: list[Rows | None] = []
        for dim in range(value.dim()):
            # More than one block needs as many entries per row.
            for blocks in range(1, value.shape[dim] // self.total + 1):
                part = self.of(value, Rows(dim, blocks))
                if part is not None and part.shape == own.shape and same_values(part, own):
                    found.append(Rows(dim, blocks))
        return found


class RowRun(StageRun):
    """Replays a step up to its end with layers that give random rows.

    ``before`` is the run of both microbatches where this is that of the second one alone.
    """

    def __init__(
        self,
        units: Any,
        path: Path,
        *,
        leave: Cut,
        share: Share,
        before: RowRun | None,
        **others: Any,
    ) -> None:
        entry = Cut((0, 0), ())
        # Other numbers than before: what they have a part in is not the same in both runs.
        seed = 0 if before is None else 1
        super().__init__(
            units, path, entry=entry, leave=leave, inputs=(), seed=seed, selective={}, **others
        )
        self.share = share
        self.results: tuple[Tensor, ...] = ()  # what it came to, at ``leave``
        self._before = before
        self._given: dict[int, list[Tensor]] = {}
        self._made: dict[tuple[int, int], Tensor] = {}
        self._parameters: dict[str, Tensor] = {}

    def on_unit(self, index: int, forward: Function, args: Args, kwargs: Kwargs) -> Any:
        self._exit_if_due()
        call = self._position[0]
        self._check_call(call, index)
        given = [t.detach() for t in tensors((args, kwargs)) if not isinstance(t, Hole)]
        result, produced = self.skip(index, forward, args, kwargs, call)
        if self._before is None:
            self._given[call] = given
        rows = () if self._before is None else self._rows_of(self._before._given[call], given)
        for ordinal, hole in enumerate(produced):
            if isinstance(hole, Hole):
                exchange(hole, self._output(call, ordinal, hole, rows))
        self._arrive((call + 1, 0), produced, self._path.calls[call].tracked)
        return result

    def on_operation(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = rebuild((args, kwargs), self._with_data)
        call, event = self._position
        events = self._path.events[call]
        name = operation_name(func)
        given = tensors((args, kwargs))
        seen = events[event] if event < len(events) else None
        if seen is not None and seen.random and seen.name == name and given and not self._due():
            # Its draws differ between the runs, and where rows are does not depend on them.
            result = given[0].clone()
            self._count(name, [result])
            return result
        return super().on_operation(func, args, kwargs)

    def _rows_of(self, before: list[Tensor], given: list[Tensor]) -> tuple[Rows | None, ...]:
        """Where a call's arguments have their rows; empty where none tells, or they contradict."""
        found: list[Rows | None] = []
        for whole, second in zip(before, given, strict=False):
            ways = self.share.ways(whole, second)
            if not ways:
                return ()
            if len(ways) == 1 and ways[0] not in found:
                found.append(ways[0])
        return tuple(sorted(found, key=lambda rows: rows is None)) or (None,)

    def _output(self, call: int, ordinal: int, hole: Hole, rows: tuple[Rows | None, ...]) -> Tensor:
        spec = hole.spec
        made: Tensor | None = None
        if self._before is not None:
            whole = self._before._made.get((call, ordinal))
            for way in rows if whole is not None else ():
                assert whole is not None
                made = whole if way is None else self.share.of(whole, way)
                if made is not None and made.shape == spec.shape:
                    break
                made = None
        if made is None:
            # Of no row of the other run; what is made of it will not be found there.
            run = 0 if self._before is None else 1
            made = random_like(spec, self._device, call * 1009 + ordinal * 2 + run)
        if self._before is None:
            self._made[call, ordinal] = made
        made = made.clone().requires_grad_(spec.requires_grad)
        # No leaf: the step may write into it.
        return made.view_as(made) if not spec.requires_grad else made.clone()

    def _with_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, Hole) or leaf.parameter is None:
            return leaf
        name = leaf.parameter
        if name not in self._parameters:
            self._parameters[name] = random_like(leaf.spec, self._device, len(name))
        return self._parameters[name]


def find_rows(path: Path, cut: Cut, whole: RowRun, second: RowRun) -> list[Rows | None]:
    """How each value of the last cut is joined, in the cut's order.

    Raises:
        ModelError: One has no rows, or rows that nobody can tell apart.
    """
    found = []
    share = second.share
    values = zip(cut.tensors, whole.results, second.results, strict=True)
    for boundary, both, one in values:
        ways = share.ways(both.detach(), one.detach())
        if len(ways) == 1:
            found.append(ways[0])
            continue
        call, event, _ = boundary.key
        if event:
            seen = path.events[call][event - 1]
            what = f"{seen.line}: what {seen.name} gives"
        else:
            what = f"{path.calls[call - 1].line}: what {path.name(call - 1)} gives"
        shape = f"{list(both.shape)} for {share.total} rows"
        if ways:
            raise ModelError(
                f"loss_over=batch: {what} is used behind the last layer, {shape}, and the first "
                "batch does not tell which of them belong together. Shuffle the data, or use "
                "loss_over=microbatch."
            )
        raise ModelError(
            f"loss_over=batch: {what} is used behind the last layer and cannot be put together "
            f"from microbatches: {shape}. It mixes rows, has none, or depends on random numbers "
            "that are not drawn by row. Move that behind the last layer or into the data loader, "
            "or use loss_over=microbatch."
        )
    return found


def _apart(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape are equal up to rounding."""
    if not first.is_floating_point():
        return bool(torch.equal(first, second))
    coarse = 2e-2 if first.dtype.itemsize < 4 else 1e-4
    return torch.allclose(first.double(), second.double(), rtol=coarse, atol=coarse, equal_nan=True)


def random_like(spec: Any, device: torch.device, seed: int) -> Tensor:
    """A tensor of random numbers of this description."""
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        dtype = spec.dtype if spec.dtype.itemsize >= 4 else torch.float32
        made = torch.randn(spec.shape, generator=generator, dtype=dtype)
    else:
        made = torch.randint(2, spec.shape, generator=generator)
    return made.to(device=device, dtype=spec.dtype)
