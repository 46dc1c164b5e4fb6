"""Random numbers that a step draws between its layers, as one run on the whole batch draws them.

Each microbatch's step begins where the batch's generators stand. What has one number per row is
drawn for all rows, of which the microbatch takes its own, so noise and timesteps are those of a
step without a pipeline. What has several entries per row, and a permutation of the rows, are the
microbatch's own. All other numbers (a share of a mixture, whether a layer is left out) are the
batch's. Layers draw as ``StageRun`` seeds them: the numbers here have a state of their own.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.nested import leaves, rebuild, replaced
from strategies.models.replay.hole import Args, Function, Kwargs, operation_name
from strategies.models.state import (
    Generators,
    TorchState,
    kept_generators,
    own_generators,
    reseed,
    set_torch_state,
    torch_state,
)

_DRAWING = re.compile(
    r"\w*dropout[123]?d?_?|rand(n|int|perm)?(_like)?|bernoulli_?|multinomial|(log_)?normal_?|poisson"
    r"|binomial|_standard_gamma|_sample_dirichlet|rrelu(_with_noise)?_?|gumbel_softmax"
    r"|(uniform|exponential|geometric|cauchy|random)_"
)
# Their last dimension has the weights of one draw.
_BY_WEIGHTS = frozenset({"multinomial", "_sample_dirichlet"})


class BatchDraws:
    """What the runs of one batch draw from.

    Args:
        module: Whose generators (``torch.Generator`` attributes) begin where they are now.
        base: Where all others stand at the batch's beginning.
        sizes: How many rows each microbatch has.
        replicas: How many share the rows that are drawn for; they go round among them.
        replica: Which of them this is.
        looks: Runs are compared with each other: what is not drawn by row is the same in all.

    Attributes:
        after: Where ``base`` and the module's generators stand behind the step, once a run has
            come to its end.
        own_drawn: Whether a microbatch has drawn numbers that are not the batch's.
    """

    def __init__(
        self,
        module: nn.Module,
        base: Generators,
        sizes: Sequence[int],
        *,
        replicas: int = 1,
        replica: int = 0,
        looks: bool = False,
    ) -> None:
        self.after: tuple[Generators, list[Tensor]] | None = None
        self.own_drawn = False
        self.base, self.replicas, self.replica, self.looks = base, replicas, replica, looks
        self.own = own_generators(module)
        self.rows = sum(sizes)
        self._sizes = sizes

    def run(self, microbatch: int | None) -> RunDraws:
        """For one run of the step, of a microbatch or of all rows (None); it begins now.

        Raises:
            ModelError: It is of an earlier batch (-1).
        """
        if microbatch is None:
            return RunDraws(self, 0, self.rows)
        if microbatch < 0:
            raise ModelError(
                "a forward of an earlier batch runs again, and what its step has drawn is not "
                "kept without a flush. Use recompute=none, or schedule=1f1b."
            )
        return RunDraws(self, sum(self._sizes[:microbatch]), self._sizes[microbatch])


class RunDraws:
    """What one run draws."""

    def __init__(self, batch: BatchDraws, start: int, rows: int) -> None:
        self._batch, self._start, self._rows = batch, start, rows
        self._whole = batch.rows * batch.replicas
        self._state: TorchState = batch.base.cpu, batch.base.cuda
        self._seen: tuple[Tensor, TorchState] | None = None
        batch.base.put_back(host_only=True)
        for generator, state in batch.own:
            generator.set_state(state)

    def end(self) -> None:
        """The run has come to the end of its step."""
        own = [generator.get_state() for generator, _ in self._batch.own]
        self._batch.after = Generators.now().with_torch(*self._state), own

    @contextmanager
    def seeding(self) -> Iterator[None]:
        """Inside, ``torch.manual_seed`` and ``set_rng_state`` of the step are about its draws."""
        begin, get, put = torch.manual_seed, torch.get_rng_state, torch.set_rng_state

        def manual_seed(seed: int) -> torch.Generator:
            with kept_generators():
                generator = begin(seed)
                self._state = torch_state()
            return generator

        def get_rng_state() -> Tensor:
            state = get()
            self._seen = state, self._state
            return state

        def set_rng_state(state: Tensor) -> None:
            put(state)
            known = self._seen is not None and torch.equal(self._seen[0], state)
            self._state = self._seen[1] if self._seen and known else (state, self._state[1])

        changes: list[tuple[dict[str, Any], str, Any]] = []
        for function in (manual_seed, get_rng_state, set_rng_state):
            changes += [(vars(torch), function.__name__, function)]
            changes += [(vars(torch.random), function.__name__, function)]
        with replaced(changes):
            yield

    def draw(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """What a function gives that may draw; no layer has a part in its arguments."""
        if not draws(func):
            return func(*args, **kwargs)
        with kept_generators():
            set_torch_state(self._state)
            result = self._drawn(func, args, kwargs)
            self._state = torch_state()
        return result

    def _drawn(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        place = self._rows_in(func, args, kwargs)
        if place is None or self._whole == self._rows:
            result = func(*args, **kwargs)
            return self._looked_at(func, result) if place is None or place[1] > 1 else result
        dim, blocks = place
        grown_args, grown_kwargs = self._grown(func, args, kwargs, dim, blocks)
        grown = func(*grown_args, **grown_kwargs)
        if blocks > 1 or operation_name(func) == "randperm":
            return self._of_its_own(func, args, kwargs)
        result = grown.index_select(dim, self._places(grown.device))
        first = next((leaf for leaf in leaves((grown_args, grown_kwargs)) if leaf is grown), None)
        if first is None:
            return result
        given = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor))
        with torch.no_grad():
            return given.copy_(result)  # It is drawn in place.

    def _of_its_own(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self._batch.own_drawn = True
        with kept_generators():
            # As far on as the batch's numbers, but not these.
            at = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
            reseed(at, self._start * self._batch.replicas + self._batch.replica)
            return self._looked_at(func, func(*args, **kwargs))

    def _looked_at(self, func: Function, result: Any) -> Any:
        """What is not drawn by row, the same for all rows where runs for other rows are compared.

        But for a permutation, which mixes rows.
        """
        many = isinstance(result, Tensor) and result.numel() > 1
        if many and self._batch.looks and operation_name(func) != "randperm":
            with torch.no_grad():
                result.fill_(0.5 if result.is_floating_point() else 0)
        return result

    def _rows_in(self, func: Function, args: Args, kwargs: Kwargs) -> tuple[int, int] | None:
        """Where rows are in what is drawn: the dimension, and how many entries each has there."""
        name = operation_name(func)
        if name == "randperm":
            return (0, 1) if (args[0] if args else kwargs["n"]) == self._rows else None
        shape = _shape(name, args, kwargs)
        if self._rows in shape:
            return shape.index(self._rows), 1
        found = [dim for dim, size in enumerate(shape) if size and size % self._rows == 0]
        return (found[0], shape[found[0]] // self._rows) if found and len(shape) > 1 else None

    def _grown(
        self, func: Function, args: Args, kwargs: Kwargs, dim: int, blocks: int
    ) -> tuple[Args, Kwargs]:
        """The arguments with which as many numbers are drawn as for all rows.

        Other rows have copies of these: how many numbers one takes does not depend on its values.
        """
        name = operation_name(func)
        if name == "randperm":
            return (self._whole, *args[1:]), {**kwargs, **({} if args else {"n": self._whole})}
        shape = _shape(name, args, kwargs)
        from_end = dim - len(shape) - (name in _BY_WEIGHTS)
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            whole = (*shape[:dim], blocks * self._whole, *shape[dim + 1 :])
            if name in ("rand", "randn") and args and isinstance(args[0], int):
                return whole, kwargs
            grown = tuple(whole if isinstance(a, list | tuple) else a for a in args)
            more = {k: whole if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
            return grown, more

        def grow(leaf: Any) -> Any:
            size = blocks * self._rows
            fits = isinstance(leaf, Tensor) and leaf.dim() >= -from_end
            if not fits or leaf.shape[from_end] != size:
                return leaf
            places = torch.arange(blocks * self._whole, device=leaf.device)
            if blocks == 1:
                places = places // self._batch.replicas - self._start
            return leaf.index_select(leaf.dim() + from_end, places % size)

        changed: tuple[Args, Kwargs] = rebuild((args, kwargs), grow)
        return changed

    def _places(self, device: torch.device) -> Tensor:
        rows = torch.arange(self._start, self._start + self._rows, device=device)
        return rows * self._batch.replicas + self._batch.replica


@lru_cache(1024)
def draws(func: Function) -> bool:
    """Whether a function of torch draws random numbers.

    >>> [draws(func) for func in (torch.randn_like, Tensor.normal_, torch.nn.functional.normalize)]
    [True, True, False]
    """
    return _DRAWING.fullmatch(operation_name(func)) is not None


def _shape(name: str, args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    """The shape of what is drawn, without that of each draw's weights."""
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if tensors:
        shape = max((tuple(tensor.shape) for tensor in tensors), key=len)
        return shape[:-1] if name in _BY_WEIGHTS else shape
    given = [*args, *kwargs.values()]
    sizes = [value for value in given if isinstance(value, list | tuple)]
    if sizes:
        return tuple(sizes[0])
    return tuple(a for a in args if isinstance(a, int)) if name in ("rand", "randn") else ()
