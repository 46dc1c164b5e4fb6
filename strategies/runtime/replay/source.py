"""Where in the user's code we are: lines for messages, checkpoint regions for cuts.

Looks at Python frames only; knows nothing of tensors or stages.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.utils.checkpoint

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_HERE = str(Path(__file__).parent)
_TRACING = str(Path(__file__).parents[1] / "tracing")
_LIBRARY = sysconfig.get_paths()["stdlib"]


def user_line() -> str:
    """``file:line`` of the innermost user frame; a library's own frame if there is none."""
    return _best_line((frame.f_code.co_filename, frame.f_lineno) for frame in _frames())


def error_line(traceback: TracebackType | None) -> str:
    """The same for an exception: the innermost user line of its traceback."""
    places = []
    while traceback is not None:
        places.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _best_line(reversed(places))


def operation_name(func: Callable[..., Any]) -> str:
    """Readable name of a torch function; the property's own name for getters such as ``T``."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def checkpoint_region(stop: Any) -> tuple[FrameType | None, bool]:
    """The outermost activation-checkpoint call we are in, and whether it is a reentrant one.

    Args:
        stop: Code object of the frame at which to stop looking outwards.
    """
    region: FrameType | None = None
    reentrant = False
    for frame in _frames():
        if frame.f_code is stop:
            break
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            if frame.f_code.co_name == "checkpoint":
                region = frame
            reentrant = reentrant or frame.f_code.co_name == "forward"
    return region, reentrant


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _best_line(places: Iterator[tuple[str, int]]) -> str:
    fallback = "unknown line"
    for file, line in places:
        if file.startswith(("<", _HERE, _TRACING)):
            continue
        if not file.startswith(_LIBRARY) and "site-packages" not in file:
            return f"{file}:{line}"
        if fallback == "unknown line" and "/torch/" not in file and "/lightning/" not in file:
            fallback = f"{file}:{line}"
    return fallback
