"""How a rank is asked to stop, and what it is called when a run did: preempted, not failed.

Torch-free on purpose: ``StopRequest`` stands before torch is imported, which takes seconds, and a
signal that arrives in between must not kill the run without a checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from types import FrameType

from strategies.errors import RunError

PREEMPTED = 85


class PreemptedError(RunError):
    """A run that was asked to stop, and wrote a checkpoint first.

    Attributes:
        figures: What it left: steps, checkpoint.
    """

    exit_code = PREEMPTED

    def __init__(self, message: str, figures: Mapping[str, object]) -> None:
        super().__init__(message)
        self.figures = dict(figures)


class StopRequest:
    """Remembers that SIGUSR1, or SIGTERM where a scheduler sends it, has arrived.

    Nothing else happens in the handlers: a collective there would wait for ranks that are in the
    middle of a step.

    Args:
        leaves: Whether whoever has started this process is ending it: then it goes at once.

    Attributes:
        signal: Name of the first one; None as long as there is none.
    """

    def __init__(self, *, leaves: Callable[[], bool] = lambda: False) -> None:
        self.signal: str | None = None
        self._leaves = leaves
        self._obeyed = True

    def install(self, *numbers: signal.Signals) -> None:
        """Takes these signals from now on."""
        for number in numbers:
            signal.signal(number, self)

    def disregard(self) -> None:
        """From now on a signal ends this process at once: there is nothing to be saved."""
        self._obeyed = False
        if self.signal is not None:
            os._exit(143)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if not self._obeyed or self._leaves():
            # Exit handlers of a half-dead communication could wait for peers for ever.
            os._exit(143)
        if self.signal is None:
            self.signal = signal.Signals(number).name


def installed_request() -> StopRequest | None:
    """The request that this process listens for; None where nothing was installed."""
    handler = signal.getsignal(signal.SIGUSR1)
    return handler if isinstance(handler, StopRequest) else None
