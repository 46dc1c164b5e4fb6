"""The user's step of one microbatch on one stage, stopped where a segment ends.

A pass runs one segment of the step for all microbatches, then its backwards, before any microbatch
may go on: the frames of the user's step have to stay alive in between, with all that they hold. So
each step runs in a thread of its own, of which only one runs at a time; the others stand where
they have been stopped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strategies.models.replay.gate import StageDone
from strategies.models.replay.hole import (
    Hole,
)

if TYPE_CHECKING:
    pass


import random
import sys
from contextlib import contextmanager

from strategies.models.manual.flow_run import Report, Returned
from strategies.models.nested import leaves
from strategies.models.replay.shape_mode import MODULE_TABLES

_ABSENT = object()


class Strand:
    """Runs a step in a thread that goes on when it is told to, and only then."""

    def __init__(
        self, body: Callable[[Callable[[Report], Any]], Any], device: torch.device
    ) -> None:
        """``body`` runs the step, given what stops it."""
        self.report: Report | None = None  # why it stands; None before the first ``resume``
        self.handled = True  # whether it may go on
        self.num_actions = 0
        self.attributes: dict[tuple[int, str], Any] = {}  # of modules, as this step has set them
        self.draws: tuple[Any, Any] | None = None  # with Python and numpy
        self.rates: dict[tuple[int, int, str], Any] = {}  # of optimizers, the same
        self._body = body
        self._settings = _present_settings(device)
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._answer: Any = None
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def resume(self, answer: Any = None) -> Report:
        """Lets the step go on until it stands again; ``answer`` is what it was waiting for."""
        self._answer = answer
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._stands.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            self.report = Returned(None)
            raise error
        assert self.report is not None
        self.handled = False
        return self.report

    def stop(self) -> None:
        """Ends a step that stands somewhere in its middle."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._stopping = True
            self._go.release()
            self._thread.join(10.0)

    @contextmanager
    def own_draws(self, seed: int) -> Iterator[None]:
        """What is drawn with Python and numpy is alike on all stages of a microbatch."""
        numpy: Any = sys.modules.get("numpy")
        before = random.getstate(), None if numpy is None else numpy.random.get_state()
        if self.draws is None:
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed % 2**32)
        else:
            _set_draws(self.draws)
        try:
            yield
        finally:
            self.draws = random.getstate(), None if numpy is None else numpy.random.get_state()
            _set_draws(before)

    @contextmanager
    def own_attributes(self, watched: Sequence[nn.Module]) -> Iterator[None]:
        """Each step sees what it has assigned itself: ``self.fake = self(z)``, ``self.n += 1``."""
        before = [dict(vars(module)) for module in watched]
        for (number, name), value in self.attributes.items():
            watched[number].__dict__[name] = value
        started = [dict(vars(module)) for module in watched]
        try:
            yield
        finally:
            for number, module in enumerate(watched):
                own = module.__dict__
                for name, value in list(own.items()):
                    if name in MODULE_TABLES:
                        continue
                    if started[number].get(name, _ABSENT) is not value:
                        self.attributes[number, name] = value
                own.clear()
                own.update(before[number])

    def leave_attributes(self, watched: Sequence[nn.Module]) -> None:
        """Modules have from now on what the step has assigned."""
        for (index, name), value in self.attributes.items():
            hole = any(isinstance(leaf, Hole) for leaf in leaves(value))
            if not hole or name not in watched[index].__dict__:
                watched[index].__dict__[name] = value

    def _pause(self, report: Report) -> Any:
        if self._stopping:
            return None  # somebody's ``finally``
        self.report = report
        self._stands.release()
        self._go.acquire()
        if self._stopping:
            raise StageDone
        return self._answer

    def _run(self) -> None:
        try:
            with self._settings():
                self.report = Returned(self._body(self._pause))
        except BaseException as error:
            if not self._stopping:
                self._error = error
        self._stands.release()


def _present_settings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """What torch keeps per thread, as it is here, for another thread."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)
    index = torch.cuda.current_device() if kind == "cuda" else None

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if index is not None:
                stack.enter_context(torch.cuda.device(index))
            stack.enter_context(torch.enable_grad())
            if autocast:
                # Casts of weights are not kept: an optimizer's step may stand in between.
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    return settings


def _set_draws(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
