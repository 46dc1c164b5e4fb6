"""How a script of one's own ends where ``fit`` is refused: one message, told once by one rank.

Several processes run the same script, and each would print its own traceback into the same
terminal, the sentence that matters at the very end, or above somebody else's "Connection closed by
peer". Only exceptions that nobody has caught come here; ``try: trainer.fit(...) except
PipelineError`` finds what it always did. ``FOLDPIPE_TRACEBACK=1`` keeps all tracebacks. A run that
a launcher watches is told by the launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from subprocess import Popen
from traceback import walk_tb
from types import TracebackType
from weakref import ref

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch._C._distributed_c10d import Store

from strategies.errors import PipelineError, one_line, readable
from strategies.models.replay.hole import error_line
from strategies.raised import has_lost, raised_by

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_GRACE_S = 3.0  # for rank 0, which speaks first where all ranks have something to say
_LOOK_S = 0.02


@dataclass(frozen=True)
class Voices:
    """Ranks that started together, and where they agree on who speaks.

    Attributes:
        children: Of this process, in the order of their ranks, from 1.
    """

    store: Store
    rank: int
    world_size: int
    children: list[Popen[bytes]]


class LastWords:
    """An exception hook: refusals, ours and those of Lightning, become one line and an exit code.

    All else, and everything with ``FOLDPIPE_TRACEBACK=1``, goes to the hook that was there before.
    """

    def __init__(self, before: _Hook) -> None:
        self._before = before
        self._voices: Callable[[], Voices | None] = lambda: None

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        said = str(error) if isinstance(error, PipelineError) else refused_by_lightning(error)
        refused = said is not None
        lost = has_lost(error)
        voices, source = self._voices(), raised_by(error)
        keep = os.environ.get("FOLDPIPE_TRACEBACK", "0") not in ("", "0")
        if keep or not (refused or (lost and voices is not None)):
            self._before(kind, error, trace)
            if voices is not None:
                with suppress(RuntimeError, ValueError):  # The store has gone with rank 0.
                    voices.store.set(f"done/{voices.rank}", "")
            return
        code = error.exit_code if isinstance(error, PipelineError) else 2 if refused else 1
        if voices is not None and source is not None:
            _follow(voices, source, one_line(error))
        elif voices is not None:
            code = _agree(voices, said, code)
        elif said is not None:
            _tell(said)
        raise SystemExit(code)  # The interpreter ends with it; it would end with 1 without.

    def follow(self, voices: Voices) -> None:
        """From now on these ranks speak with one voice, as long as somebody holds ``voices``."""
        self._voices = ref(voices)

    @contextmanager
    def outermost(self) -> Iterator[None]:
        """Around what sets a hook of its own, as torch does to write the rank before each line."""
        sys.excepthook = self._before
        try:
            yield
        finally:
            self._before = sys.excepthook
            sys.excepthook = self


def speak_once() -> LastWords:
    """From now on refusals that nobody catches are one message in this process."""
    found: object = sys.excepthook
    if isinstance(found, LastWords):
        return found
    words = LastWords(sys.excepthook)
    sys.excepthook = words
    return words


_NO_EXPERIMENT = (
    "logger.experiment is the logger's own object on rank 0 alone, and this script runs on every "
    "rank: on the others Lightning gives methods that do nothing, and no {!r}. Call it in a "
    "function under @rank_zero_only (lightning.pytorch.utilities), or use "
    "logger.log_hyperparams(...)."
)
_BATCH_SIZE = "Tune it with a Trainer without PipelineStrategy (pp=1), or try sizes one by one."
# What Lightning refuses, and what it leaves to be guessed.
_WAYS_OUT = {
    "No supported gpu backend found": "Try Trainer(accelerator='cpu'), or 'auto'.",
    "Tuning the batch size is currently not supported": _BATCH_SIZE,
    "The Batch size finder is not supported": _BATCH_SIZE,
    "You selected an invalid strategy name": "Try Trainer(strategy=PipelineStrategy(pp=2)), an "
    "object of the class.",
    "`model` must be a `LightningModule`": "Give it a LightningModule that has the network as an "
    "attribute, a training_step that returns the loss, and configure_optimizers.",
}


def refused_by_lightning(error: BaseException) -> str | None:
    """What Lightning says of how its Trainer or a module was set up; None of any other error."""
    if getattr(getattr(error, "obj", None), "__qualname__", "") == "_DummyExperiment.nop":
        no_experiment = _NO_EXPERIMENT.format(getattr(error, "name", None))
        return f"{error_line(error.__traceback__)}: {no_experiment}"
    said = " ".join(str(error).split())
    way_out = next((way for start, way in _WAYS_OUT.items() if said.startswith(start)), None)
    if way_out is None:
        refused = isinstance(error, MisconfigurationException) or _of_the_trainer(error)
        return said if refused and said else None
    return f"{said.rstrip('.!')}. {way_out}"


def _of_the_trainer(error: BaseException) -> bool:
    """Whether Lightning's own code has refused what its Trainer was made with."""
    if not isinstance(error, ValueError | TypeError | ModuleNotFoundError):
        return False
    code = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    made = any(
        one.co_name == "__init__" and one.co_filename.endswith(_TRAINER.replace("/", os.sep))
        for one in code
    )
    return made and f"{os.sep}lightning{os.sep}" in code[-1].co_filename


_TRAINER = "lightning/pytorch/trainer/trainer.py"


def _follow(voices: Voices, source: int, said: str) -> None:
    """Leaves it to the rank that has raised it to tell it; tells it where that one does not."""
    try:
        store = voices.store
        told = until(lambda: store.check([f"done/{source}"]), _GRACE_S)
        if not told and store.add("told", 1) == 1:
            _tell(f"rank {source}: {said}")
        _leave(voices, waits=True)
    except (RuntimeError, ValueError):
        pass  # Rank 0, which kept the store, has ended, and it does not do so in silence.


def _agree(voices: Voices, said: str | None, code: int) -> int:
    """Tells it, or leaves that to another rank; returns the code to end with."""
    rank, store = voices.rank, voices.store
    others = [other for other in range(voices.world_size) if other != rank]
    try:
        if said is not None:
            store.set(f"said/{rank}", json.dumps([code, said]))
        if rank:
            until(lambda: store.check(["told"]), _GRACE_S)
        first = store.add("told", 1) == 1
        spoken = rank
        if said is None:
            found = [other for other in others if store.check([f"said/{other}"])]
            if found:
                spoken = found[0]
                code, said = json.loads(store.get(f"said/{spoken}"))
        if first and said is not None:
            _tell(f"rank {spoken}: {said}" if spoken else said)
        elif first:
            _tell(
                f"rank {rank} has lost its connection to another rank, which has ended: by an "
                "error that it tells itself, or by a kill (for lack of memory, say). "
                "FOLDPIPE_TRACEBACK=1 shows where each rank was."
            )
        _leave(voices, waits=not first)
    except (RuntimeError, ValueError):
        pass  # Rank 0, which kept the store, has ended, and it does not do so in silence.
    return code


def _leave(voices: Voices, *, waits: bool) -> None:
    """Rank 0 ends last, the others with it; ``waits``: this one, for rank 0."""
    rank, store = voices.rank, voices.store
    store.set(f"done/{rank}", "")
    if rank == 0:
        others = [f"done/{other}" for other in range(1, voices.world_size)]
        until(lambda: store.check(others), _GRACE_S / 6)
        _end_waiting(voices)
    elif waits:
        # Lightning's observer in rank 0 would report an end of ours that comes first. The
        # store is left alone: torch writes a page about one that has gone.
        parent = os.getppid()
        until(lambda: os.getppid() != parent, _GRACE_S / 3)


def _end_waiting(voices: Voices) -> None:
    """Ends children that still wait for this rank, before they complain that it is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Lightning's observer would send us one.
    for rank, process in enumerate(voices.children, 1):
        if not voices.store.check([f"done/{rank}"]):
            process.kill()  # SIGTERM is handled by Lightning, and would be written about.


# Messages name keys of the command line; whoever reads them here types Python.
_IN_PYTHON = tuple(
    (re.compile(rf"(?<![\w.]){key}=([\w./~+:-]*[\w/])" if "{" in there else rf"\b{key}\b"), there)
    for key, there in {
        r"trainer\.on_nan": 'PipelineStrategy(on_nan="{}")',
        r"trainer\.resume": 'fit(ckpt_path="{}")',
        r"trainer\.precision": 'Trainer(precision="{}")',
        r"schedule\.file": 'file="{}"',
        r"cluster\.timeout_s": "timeout_s",
    }.items()
)


def in_python(text: str) -> str:
    """The message with what Trainer and strategy call those keys.

    >>> in_python("Use trainer.precision=32-true, or another optimizer.")
    'Use Trainer(precision="32-true"), or another optimizer.'
    """
    for pattern, there in _IN_PYTHON:
        text = pattern.sub(lambda found, there=there: there.format(*found.groups()), text)  # type: ignore[misc]
    return text


def _tell(text: str) -> None:
    text = in_python(text)
    sys.stderr.write(
        f"error: {readable(text)}\n"
    )  # one write: lines of several processes stay whole
    sys.stderr.flush()


def until(ready: Callable[[], bool], most_s: float) -> bool:
    began = time.monotonic()
    while not (done := ready()) and time.monotonic() - began < most_s:
        time.sleep(_LOOK_S)
    return done
