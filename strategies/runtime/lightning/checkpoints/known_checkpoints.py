"""Which checkpoints a run has written or loaded, and whether what they hold is finite.

Weights that an update has made infinite stay so: every later step is not finite, and so is every
later checkpoint. Such a state is found before it is written, and the newest checkpoint from before
is the one to name and to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError
from strategies.manifest import MANIFEST, NOT_FINITE, committed, read_manifest
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.update.nan_guard import not_finite


class KnownCheckpoints:
    """Paths of checkpoints, oldest first, each with what in it is not finite."""

    def __init__(self) -> None:
        self._problems: dict[Path, str | None] = {}

    def __contains__(self, path: Path) -> bool:
        return path.absolute() in self._problems

    def add(self, path: Path, problem: str | None = None) -> None:
        """``problem``: what is not finite in it, in words; None if all is finite."""
        self._problems.pop(path.absolute(), None)
        self._problems[path.absolute()] = problem

    def discard(self, path: Path) -> None:
        self._problems.pop(path.absolute(), None)

    def last_finite(self, *, without: Path | None = None) -> Path | None:
        """The newest finite one that is there."""
        skipped = None if without is None else without.absolute()
        there = [
            path
            for path, problem in self._problems.items()
            if problem is None and path != skipped and _exists(path)
        ]
        return there[-1] if there else None

    def keeps(self, path: Path) -> bool:
        """Whether none but checkpoints that are not finite would be left without this one."""
        if not any(problem is not None for problem in self._problems.values()):
            return False
        own = self._problems.get(path.absolute(), _written_problem(path))
        return own is None and self.last_finite(without=path) is None


def _exists(path: Path) -> bool:
    return path.is_file() or (path / MANIFEST).is_file()


def _written_problem(path: Path) -> str | None:
    """What an earlier run has said of it."""
    folder = committed(path)
    if not (folder / MANIFEST).is_file():
        return None
    try:
        found: str | None = read_manifest(folder)["metadata"].get(NOT_FINITE)
    except CheckpointError as error:
        return str(error)
    return found


class LastingState:
    """What of a rank's state stays when a step is left out: weights, buffers, moments.

    Where buffers and frozen parameters were not finite before training (a mask of -inf, a minimum
    that begins at inf), that is what they are meant to be.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        buffers = dict(module.named_buffers())
        self._watched_buffers = {
            name: tuple(buffer.shape)
            for name, buffer in buffers.items()
            if not_finite(buffer) is None
        }
        self._meant = {
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and not_finite(parameter) is not None
        }

    def problem(
        self, engine: Engine, optimizers: Sequence[Optimizer], *, moments: bool
    ) -> str | None:
        """The first value that is not finite, in words; waits for the device.

        ``moments``: whether the optimizers' state counts, too.
        """
        named = engine.named_parameters()
        for what, tensor in self._tensors(named):
            found = not_finite(tensor)
            if found is not None:
                return f"{what} is {found}"
        names = {
            id(updated): name
            for name, parameter in named.items()
            for updated in engine.mains.updated_parameters((parameter,))
        }
        for optimizer in optimizers if moments else ():
            state: Mapping[Any, Any] = getattr(optimizer, "optimizer", optimizer).state
            for parameter, entry in state.items():
                for key, value in entry.items() if isinstance(entry, Mapping) else ():
                    found = not_finite(value) if isinstance(value, Tensor) and value.dim() else None
                    if found is not None:
                        whose = names.get(id(parameter), "a parameter")
                        return f"the optimizer's {key} of {whose} is {found}"
        return None

    def _tensors(self, named: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in named.items():
            if name not in self._meant:
                yield f"the weight {name}", parameter
        for name, buffer in self._module.named_buffers():
            if self._watched_buffers.get(name) == tuple(buffer.shape):
                yield f"the buffer {name}", buffer


def first_problem(
    everyone: Callable[[str | None], list[str | None]], own: str | None
) -> str | None:
    """What the first rank with a problem has said, on all of them; collective."""
    said = enumerate(everyone(own))
    found = [f"{text} on rank {rank}" for rank, text in said if text is not None]
    return found[0] if found else None
