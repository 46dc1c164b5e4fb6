"""Optimizers while a hook runs: groups with the parameters of all ranks, and no state of others."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import ModelError


class Groups:
    """An optimizer whose groups can have the parameters of all ranks."""

    def __init__(
        self,
        optimizer: Optimizer,
        foreign: Callable[[Tensor], bool],
        parted: Callable[[Tensor], bool],
    ) -> None:
        self.optimizer = optimizer
        self._whole: list[list[nn.Parameter]] = [list(g["params"]) for g in optimizer.param_groups]
        self._own: list[list[nn.Parameter]] = []
        self._sizes: list[int] = []
        self._shown = True
        self._parted = parted
        self._state: Any = optimizer.state
        self.hide(foreign)

    def show(self) -> None:
        if not self._shown:
            self._shown = True
            self._own = [group["params"] for group in self.optimizer.param_groups]
            self._whole += map(list, self._own[len(self._whole) :])  # added outside of hooks
            for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
                group["params"] = whole
            self._state = self.optimizer.state
            shown: Any = self.optimizer
            shown.state = _States(self._state, self._parted)
            self._sizes = [len(whole) for whole in self._whole]

    @property
    def whole(self) -> list[list[nn.Parameter]]:
        """What each group has on all ranks; what is here of one that was added outside of hooks."""
        groups = [list(group["params"]) for group in self.optimizer.param_groups]
        return groups if self._shown else [*self._whole, *groups[len(self._whole) :]]

    def hide(self, foreign: Callable[[Tensor], bool]) -> None:
        """Leaves each group its own parameters; a hook may have added groups."""
        if not self._shown:
            return
        self._shown = False
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups):
            whole = group["params"]
            known = index < len(self._own) and whole is self._whole[index]
            if known and len(whole) == self._sizes[index]:
                group["params"] = self._own[index]
            else:
                group["params"] = [p for p in whole if not foreign(p)]
                self._whole[index:] = [list(whole), *self._whole[index + 1 :]]
        del self._whole[len(groups) :]
        if isinstance(self.optimizer.state, _States):  # Nobody has loaded another one.
            kept = dict(dict.items(self.optimizer.state))
            self._state.clear()
            self._state.update(kept)
            hidden: Any = self.optimizer
            hidden.state = self._state
        for parameter in [p for p in self.optimizer.state if foreign(p)]:
            del self.optimizer.state[parameter]


class _States(defaultdict[Any, Any]):
    """An optimizer's state while a hook runs: of other ranks' parameters there is none here.

    ``parted``: whether all of a parameter's state, or some of it, is on other ranks.
    """

    def __init__(self, state: Mapping[Any, Any], parted: Callable[[Tensor], bool]) -> None:
        super().__init__(dict, state)
        self._parted = parted

    def __getitem__(self, key: Any) -> Any:
        if self._parted(key):
            self._refuse()
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        if self._parted(key):
            self._refuse()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._refuse()
        return super().__iter__()

    def keys(self) -> Any:
        self._refuse()
        return super().keys()

    def values(self) -> Any:
        self._refuse()
        return super().values()

    def items(self) -> Any:
        self._refuse()
        return super().items()

    def _refuse(self) -> None:
        """Its own methods may: they treat each parameter by itself."""
        frame = sys._getframe(2)
        for _ in range(3):
            if isinstance(frame.f_locals.get("self"), Optimizer):
                return
            if frame.f_back is None:
                break
            frame = frame.f_back
        raise ModelError(
            "a hook looks at the state of an optimizer (moments, step counts), of which each rank "
            "has that of its own parameters, or of its shares. Look at parameters and gradients, "
            "which are brought to all ranks, or at the state in a checkpoint."
        )
