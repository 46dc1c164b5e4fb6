"""An exception that one rank has raised, on the others: what follows from it, and the same again.

Free of torch: a parent process decides by it which of several failing ranks is the cause.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from strategies.errors import PipelineError, RunError, without_stack

# Gloo's second word where a wait has ended in vain: the next use of what it has closed.
PAIR_CLOSED = "Application timeout"
_LOST = ("Connection", "connection", "Broken pipe", "gloo", "Timed out", PAIR_CLOSED)
_LATE = ("Timed out", "timed out")
_OTHER_FAILED = "another rank failed"
# Code that exchanges messages between ranks. What other code raises has these words by chance.
_EXCHANGE = ("torch.distributed", "strategies.runtime", "launcher.rank", "launcher.processes")
_GLOO = "/gloo/transport/"  # in what gloo says wherever it is waited for
_RANK = "_foldpipe_rank"
_MOST = 4_000  # characters of a message


def has_lost(error: BaseException | None) -> bool:
    """Whether a lost connection between ranks is what it says, or what it was raised over.

    A word alone tells nothing: a database refuses connections, too. So the exception has to come
    from code that exchanges messages.
    """
    return _loss(error) is not None


def is_late(error: BaseException) -> bool:
    """Whether it says that a wait for another rank has lasted for the time-out."""
    loss = _loss(error)
    said = "" if loss is None else str(loss)
    return PAIR_CLOSED not in said and any(word in said for word in _LATE)


def _loss(error: BaseException | None) -> BaseException | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if raised_by(error) is not None:
            return error
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = str(frames[-1].f_globals.get("__name__")) if frames else ""
        ours = any(where == name or where.startswith(f"{name}.") for name in _EXCHANGE)
        if isinstance(error, PipelineError):  # It says what it means, and may quote anything.
            return error if ours and _OTHER_FAILED in str(error) else None
        said = str(error)
        if _GLOO in said or (ours and any(word in said for word in _LOST)):
            return error
        error = error.__cause__ or error.__context__
    return None


# ------------------------------------------------------------------------------- on another rank


def in_plain_data(error: BaseException) -> dict[str, Any]:
    """What another rank needs to raise the same: its class by name, and what it was made with."""
    kind = type(error)
    said = without_stack(str(error))[:_MOST]
    found: dict[str, Any] = {"kind": f"{kind.__module__}:{kind.__qualname__}", "said": said}
    held = {name: value for name, value in vars(error).items() if _is_plain(value)}
    # That of a file has its name in no other place.
    made_with = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
    if _is_plain(made_with):
        found |= {"args": list(made_with), "held": held}
    return found


def _is_plain(value: object) -> bool:
    try:
        return len(json.dumps(value)) <= _MOST
    except (TypeError, ValueError, RecursionError):
        return False


def rebuilt(record: Mapping[str, Any], *, rank: int, step: int) -> BaseException:
    """The exception from a rank's record, marked as that rank's.

    A class that this process does not know, and an exception whose text would be another, become a
    RunError that names it. Nothing is imported, and of a user's class nothing is called.
    """
    where = f"rank {rank}" + (f" at step {step}" if step else "")
    error = _same(record)
    if error is None:
        name = record["kind"].rpartition(":")[2].rpartition(".")[2]
        error = RunError(f"{where} failed: {name}: {record['said']}")
    error.add_note(f"Raised by {where}; the other ranks of its pipeline end with it.")
    setattr(error, _RANK, rank)
    return error


def raised_by(error: BaseException) -> int | None:
    """The rank whose exception it is; None of one that was raised here."""
    found: int | None = getattr(error, _RANK, None)
    return found


def _same(record: Mapping[str, Any]) -> BaseException | None:
    module, _, path = record["kind"].partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)) or "args" not in record:
        return None
    try:
        if kind.__module__ == "builtins":
            error: BaseException = kind(*record["args"])
        else:
            base = next(one for one in kind.__mro__ if one.__module__ == "builtins")
            error = base.__new__(kind, *record["args"])
        vars(error).update(record["held"])
        same = without_stack(str(error))[:_MOST] == record["said"]
    except Exception:
        return None  # One that cannot be made of its arguments alone.
    return error if same else None
