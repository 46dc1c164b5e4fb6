"""Lines for the person at the terminal; logs and reports go to files."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from typing import TextIO

from launcher.secrets import mask
from strategies.errors import readable, written

_CLAIMED = re.compile(r"\n(?=\s*(?:error|warning):)", re.IGNORECASE)
_MOST = 8_000


def write_anything() -> None:
    """From now on a character that a stream's encoding lacks is written out, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    sys.stdout.write(readable(text.rstrip("\n")) + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    sys.stderr.write(readable(text.rstrip("\n")) + "\n")
    sys.stderr.flush()


def say_error(error: BaseException | str) -> None:
    """``error: ...`` as somebody may read it, whatever names and texts of others are in it."""
    complain(f"error: {shortened(mask(_CLAIMED.sub(written, str(error))), _MOST)}")


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text that is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    head, tail = most * 3 // 4, most // 4
    left = len(text) - head - tail
    return f"{text[:head]} ... [{left:,} characters left out] ... {text[-tail:]}"


def terminal_width() -> int:
    """Columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 40)).columns


# What a run says must not end it: a terminal that is closed, a `tee` that Ctrl-C has ended and a
# disk without room would else take the checkpoint with them that is about to be written.


class LastingStream(io.TextIOBase):
    """A stream that goes on as if it wrote when its reader, or the room for it, has gone.

    Args:
        stream: What is written to; None for one that was closed from the beginning.
    """

    def __init__(self, stream: TextIO | None, *, told: bool = False) -> None:
        """``told``: whether standard error hears of it, once, unless a reader has just left."""
        self._stream = stream
        self._told = told

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8" if self._stream is None else self._stream.encoding

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and not self._stream.closed:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """From now on what is written goes nowhere, and what is in the buffer, too."""
        assert self._stream is not None
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._told and not isinstance(error, BrokenPipeError):
            complain(f"warning: standard output cannot be written: {error.strerror}; it goes on")


def use_lasting_streams() -> None:
    """Makes this process's own output last; to be called once, at its beginning."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would be taken for it
            os.open(os.devnull, os.O_RDWR)
    sys.stderr = LastingStream(sys.stderr)
    sys.stdout = LastingStream(sys.stdout, told=True)
