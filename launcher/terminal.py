"""Lines for the person at the terminal; logs and reports go to files."""

from __future__ import annotations

import re
import shutil
import sys

from launcher.secrets import mask

# What a terminal would obey: control characters, and those that turn the direction of writing.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CLAIMED = re.compile(r"\n(?=\s*(?:error|warning):)", re.IGNORECASE)
_MOST = 8_000


def say(text: str) -> None:
    sys.stdout.write(readable(text.rstrip("\n")) + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    sys.stderr.write(readable(text.rstrip("\n")) + "\n")
    sys.stderr.flush()


def say_error(error: BaseException | str) -> None:
    """``error: ...`` as somebody may read it, whatever names and texts of others are in it."""
    complain(f"error: {shortened(mask(_CLAIMED.sub(_written, str(error))), _MOST)}")


def readable(text: str) -> str:
    r"""The text with control characters written out.

    >>> readable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _OBEYED.sub(_written, text)


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text that is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    head, tail = most * 3 // 4, most // 4
    left = len(text) - head - tail
    return f"{text[:head]} ... [{left:,} characters left out] ... {text[-tail:]}"


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def terminal_width() -> int:
    """Columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 40)).columns
