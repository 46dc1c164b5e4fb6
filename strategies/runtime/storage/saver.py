"""Saves at most one checkpoint at a time, in a thread while training goes on, or at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strategies.errors import CheckpointError
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.commit import Job, remove, write_checkpoint
from strategies.runtime.storage.part import Part, Piece, own_share


class Saver:
    """One rank's side of saving. All ranks call ``save`` in the same order.

    In a thread: what this rank writes is copied to host memory first, so parameters may change as
    soon as ``save`` returns. The thread talks to the other ranks' threads on a communicator of its
    own. What goes wrong there is raised by the next ``check``, ``finish`` or ``save``.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._host = HostCopy()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._doomed: list[Path] = []

    @property
    def pending(self) -> Path | None:
        return self._path

    def save(
        self,
        path: Path,
        collect: Callable[[], Part],
        *,
        layout: Mapping[str, int],
        metadata: Mapping[str, Any],
        in_thread: bool,
    ) -> None:
        """Writes a checkpoint; collective.

        What ``collect`` raises is raised on all ranks. In a thread it returns when this rank's
        state is copied.

        Raises:
            CheckpointError: This one was not written, or the one before.
        """
        self.finish()
        part: Part | Exception
        left: frozenset[str] = frozenset()
        try:
            part = collect()
            mine = own_share(part.pieces, self._exchange.rank)
            left = frozenset(part.pieces.keys() - mine.keys())
            part = replace(part, pieces=self._host.of(mine) if in_thread else mine)
        except Exception as error:
            part = error
        job = Job(path, part, left, layout, metadata)
        if not in_thread:
            write_checkpoint(job, self._exchange)
            return
        self._path = path
        # A daemon: a rank that fails must not wait for peers that will never answer.
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            write_checkpoint(job, self._exchange)
            self._remove_doomed()
        except BaseException as error:
            self._problem = error
        finally:
            self._path = None

    def _remove_doomed(self) -> None:
        with self._lock:
            doomed, self._doomed = self._doomed, []
            self._path = None
        for path in doomed:
            remove(path)

    def remove(self, path: Path) -> None:
        """Deletes a checkpoint, once the one that is being written is committed; not collective.

        If that fails, the old one stays.
        """
        with self._lock:
            if self._path is not None or self._problem is not None:
                self._doomed.append(path)
                return
        remove(path)

    def check(self) -> None:
        """Raises what has gone wrong since the last call; waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._doomed.clear()
        problem, self._problem = self._problem, None
        if isinstance(problem, CheckpointError):
            raise problem
        if problem is not None:
            raise CheckpointError(
                f"a checkpoint was not written, probably since another rank failed: {problem}"
            ) from problem


class HostCopy:
    """Buffers that are kept from one copy to the next: fresh memory costs more than the copy.

    Takes as much host memory as this rank writes; pinned where the pieces are on a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces as they are now; valid until the next call."""
        known, self._buffers = self._buffers, {}
        copies = {}
        devices = set()
        for name, piece in pieces.items():
            source = piece.tensor
            buffer = known.pop(name, None)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
            if source.is_cuda:
                devices.add(source.device)
            self._buffers[name] = buffer
            copies[name] = replace(piece, tensor=buffer)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies
