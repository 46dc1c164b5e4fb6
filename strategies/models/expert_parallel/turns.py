"""A forward and a backward of one rank in turn, each while the other's tokens travel.

The forward runs in the caller's thread and the backward in another one, of which only one runs at a
time: whoever has sent its tokens on their way hands the turn on, and waits for them when it has it
back. So the exchange of one microbatch runs under the compute of the other (as in DualPipe,
https://arxiv.org/abs/2412.19437), in an order that is the same on all ranks that exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from strategies.models.state import kept_generators


class _BrokenOffError(Exception):
    """The other strand has failed; nobody is going to answer this one's exchanges."""


class Turns:
    """Two strands that take turns; between pairs nobody takes any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._mine = threading.Condition()
        self._turn = 0  # whose it is: 0 the caller's, 1 the other thread's
        self._alive = [False, False]
        self._failed = False

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Runs both to their ends; what either raises is raised.

        The second one, a backward, begins: it comes to its experts' results at once, and so has
        something on its way under the first piece of the forward, as has the forward at its end
        under the last piece of the backward.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="backward")
        self._alive, self._turn, self._failed = [True, True], 0, False
        other: Future[None] = self._pool.submit(self._run_other, second)
        try:
            self.hand_on()
            first()
        except _BrokenOffError:
            pass  # The other one's error is the one to tell.
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(0)
            error = other.exception()
        if error is not None:
            raise error

    @property
    def whose(self) -> int:
        """Who runs: 0 for the first strand, and where there is no pair; 1 for the second."""
        return self._turn if any(self._alive) else 0

    def hand_on(self) -> None:
        """Lets the other strand run until it hands on or has ended.

        Whose thread it is says nothing: autograd runs a backward on a GPU in one of its own.
        """
        number = self._turn
        if not all(self._alive):
            return
        # What a strand draws does not depend on what the other one has drawn meanwhile.
        with kept_generators(), self._mine:
            self._turn = 1 - number
            self._mine.notify_all()
            self._mine.wait_for(lambda: self._turn == number)
        if self._failed:
            raise _BrokenOffError

    def _run_other(self, second: Callable[[], None]) -> None:
        with self._mine:
            self._mine.wait_for(lambda: self._turn == 1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            if not self._failed:
                second()
        except _BrokenOffError:
            pass
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(1)

    def _end(self, number: int) -> None:
        with self._mine:
            self._alive[number] = False
            self._turn = 1 - number
            self._mine.notify_all()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
