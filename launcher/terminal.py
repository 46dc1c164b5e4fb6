"""Lines for the person at the terminal; logs and reports go to files."""

from __future__ import annotations

import shutil
import sys


def say(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


def terminal_width() -> int:
    """Columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 40)).columns
