"""All ranks' parts become one committed checkpoint, or none.

``<name>.tmp`` is written and synced beside everything that exists; the rename commits it. A
committed folder is never written into: where one of the same name exists, it steps aside only when
the new one is complete, and goes when that is in its place.
"""

from __future__ import annotations

import json
import mmap
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strategies.errors import CheckpointError
from strategies.manifest import FORMAT, MANIFEST, OLD, TENSORS, UNFINISHED, VALUES, seal, tree_file
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.storage.opened import PieceSavePlanner
from strategies.runtime.storage.part import Part, Piece, own_share
from strategies.runtime.storage.replacement import (
    free_bytes,
    put_in_place,
    remove_old,
    require_replaceable,
    said_of,
)
from strategies.runtime.storage.tensor_files import (
    TensorWriter,
    sync_folder,
    write_durably,
    write_index,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to be written."""

    path: Path  # the folder to be, the same on all ranks
    part: Part | Exception  # what this rank writes, or why it cannot
    left: frozenset[str]  # names of what it holds and leaves to other ranks
    layout: Mapping[str, int]  # degrees of parallelism, for the manifest
    metadata: Mapping[str, Any]  # for the manifest, plain data


def write_checkpoint(job: Job, exchange: Exchange) -> None:
    """Writes all ranks' parts and commits them together; collective.

    Raises:
        CheckpointError: Some rank cannot write, and nothing is committed. All ranks raise.
    """
    staging = job.path.with_name(job.path.name + UNFINISHED)
    problem: Exception | None = None
    if exchange.rank == 0:
        try:
            _prepare(staging, job.path)
        except Exception as error:
            problem = error
    said = exchange.first_says(_describe(problem, job))
    if said is not None:
        _fail(job, problem, 0, said)
    written = None
    try:
        written = _write_part(job, staging, exchange.rank)
    except Exception as error:
        problem = error
    answers = exchange.first_hears([_describe(problem, job), written])
    verdict: list[Any] | None = None
    if exchange.rank == 0:
        failed = [[rank, text] for rank, (text, _) in enumerate(answers) if text is not None]
        if not failed:
            try:
                _commit(job, staging, [found for _, found in answers])
            except Exception as error:
                problem = error
                failed = [[0, _describe(error, job)]]
        if failed:
            # A full disk must not stay full of what nobody can read.
            shutil.rmtree(staging, ignore_errors=True)
            verdict = failed[0]
    verdict = exchange.first_says(verdict)
    if verdict is not None:
        _fail(job, problem, *verdict)


def _describe(problem: Exception | None, job: Job) -> str | None:
    if problem is None or isinstance(problem, CheckpointError):
        return None if problem is None else str(problem)
    if isinstance(problem, OSError):
        needs = 0
        if isinstance(job.part, Part):
            needs = sum(piece.num_bytes for piece in job.part.pieces.values())
        return (
            f"{said_of(problem, job.path)}; this rank has {needs:,} bytes to write, and "
            f"{free_bytes(job.path):,} bytes are free there"
        )
    return f"{type(problem).__name__}: {problem}"


def _fail(job: Job, problem: Exception | None, rank: int, said: str) -> None:
    own = _describe(problem, job)
    # "another rank failed" is how the launcher tells consequences from causes.
    reason = own if own is not None else f"another rank failed, rank {rank}: {said}"
    raise CheckpointError(
        f"checkpoint {job.path} was not written: {reason.rstrip('.')}. Earlier checkpoints are "
        "whole."
    ) from problem


def _prepare(staging: Path, path: Path) -> None:
    require_replaceable(path)
    for left in (staging, path.with_name(path.name + OLD + UNFINISHED)):
        shutil.rmtree(left, ignore_errors=True)
    staging.mkdir(parents=True)


def _write_part(job: Job, staging: Path, rank: int) -> dict[str, Any]:
    part = job.part
    if isinstance(part, Exception):
        raise part
    staging.mkdir(exist_ok=True)  # made by rank 0; another host may not have seen it yet
    name = tree_file(rank)
    files = {name: write_durably(staging / name, [json.dumps(part.tree).encode()])}
    planner = PieceSavePlanner()
    planner.set_up_planner(dict(part.pieces))
    path = staging / f"rank_{rank:05d}.safetensors"
    writer = TensorWriter(path)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    results = writer.write_data(planner.finish_plan(plan), planner).value()
    assert writer.entry is not None
    files[path.name] = writer.entry
    return {
        "files": files,
        "rows": [result.storage_data for result in results],
        "values": part.values,
        "left": sorted(job.left),
    }


def _commit(job: Job, staging: Path, written: list[Any]) -> None:
    files: dict[str, Any] = {}
    values: dict[str, Any] = {}
    rows: list[Any] = []
    for found in written:
        files |= found["files"]
        values = found["values"] | values  # what several ranks hold is the first one's
        rows += found["rows"]
    names = {row[0] for row in rows}
    for rank, found in enumerate(written):
        for name in found["left"]:
            if name not in names:
                raise CheckpointError(f"rank {rank} left {name} to another rank, and none wrote it")
    unseen = [name for name in files if not (staging / name).is_file()]
    if unseen:
        raise CheckpointError(
            f"rank 0 does not see {unseen[0]}, which another rank has written below {staging}: all "
            "hosts must share this folder"
        )
    files[TENSORS] = write_index(staging, rows)
    files[VALUES] = write_durably(staging / VALUES, [json.dumps(values).encode()])
    content = {
        "format": FORMAT,
        **job.layout,
        "world_size": len(written),
        "metadata": dict(job.metadata),
        "files": files,
    }
    write_durably(staging / MANIFEST, [seal(content).encode()])
    sync_folder(staging)
    put_in_place(staging, job.path)


# --------------------------------------------------------------------------------------------------
# Saves at most one checkpoint at a time, in a thread while training goes on, or at once.
class Saver:
    """One rank's side of saving. All ranks call ``save`` in the same order.

    In a thread: what this rank writes is copied to host memory first, so parameters may change as
    soon as ``save`` returns. The thread talks to the other ranks' threads on a communicator of its
    own. What goes wrong there is raised by the next ``check``, ``finish`` or ``save``.

    Attributes:
        undeleted: Warnings about old checkpoints that stay; a callback that shows one takes it out.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._host = HostCopy()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._doomed: list[Path] = []
        self.undeleted: list[str] = []

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
            self._remove_old(path)

    def remove(self, path: Path) -> None:
        """Deletes a checkpoint, once the one that is being written is committed; not collective.

        If either fails, the old one stays.
        """
        with self._lock:
            if self._path is not None or self._problem is not None:
                self._doomed.append(path)
                return
        self._remove_old(path)

    def _remove_old(self, path: Path) -> None:
        if (warning := remove_old(path)) is not None:
            self.undeleted.append(warning)

    def wait(self, most_s: float) -> None:
        """Waits so long until nothing is being written; raises nothing."""
        if self._thread is not None:
            self._thread.join(most_s)

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


_ALIGNED_BYTES = 64


class HostCopy:
    """Memory that is kept from one copy to the next: fresh memory costs more than the copy.

    As many bytes as this rank writes, in one piece; pinned where the pieces are on a GPU.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[Any, Any] | None = None

    def of(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces as they are now; valid until the next call."""
        places, end = {}, 0
        for name, piece in pieces.items():
            places[name] = end
            end += -(-piece.tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        devices = {piece.tensor.device for piece in pieces.values() if piece.tensor.is_cuda}
        if end > len(self._memory) or (devices and self._unpin is None):
            self._allocate(end, pinned=bool(devices))
        copies = {}
        for name, piece in pieces.items():
            source, begin = piece.tensor, places[name]
            room = self._memory[begin : begin + source.nbytes]
            buffer = room.view(source.dtype).view(source.shape)
            buffer.copy_(source, non_blocking=True)
            copies[name] = replace(piece, tensor=buffer)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _allocate(self, num_bytes: int, *, pinned: bool) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # What was there goes first.
        if not pinned:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            return
        # torch's own pinned memory is rounded up to a power of two. Whole pages, since none may be
        # registered twice, and not for children: writing to a page that a child has, too, would
        # move it away from where the GPU writes.
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(memory.data_ptr(), len(memory), _PORTABLE))
        if code:
            raise CheckpointError(
                f"{len(memory):,} bytes of host memory for a checkpoint's copy cannot be pinned: "
                f"CUDA error {code}. Free some, or write it at once with trainer.async_save=false."
            )
        # Holds the memory until it is given back; a process that ends gives all back anyway.
        self._unpin = weakref.finalize(self, _unregister, memory)
        self._unpin.atexit = False
        self._memory = memory


_PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all GPUs


def _unregister(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.data_ptr())
