"""Secrets of the environment: found by the names of their variables, and kept out of every text.

A key reaches a process in a variable (WANDB_API_KEY, HF_TOKEN) and from there, through an exception
or a careless print, a log that many can read. Nobody can know every secret; these are known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TextIO

MASK = "***"
_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)",
    re.IGNORECASE,
)
# A shorter value would hide ordinary words; a path says where a secret lies, and is none.
_SHORTEST = 8


def names_secret(variable: str) -> bool:
    """Whether a variable of that name holds a credential."""
    return _NAME.search(variable) is not None


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Value -> variable, of everything that is to be kept out of files."""
    return {
        value: name
        for name, value in environment.items()
        if len(value) >= _SHORTEST and names_secret(name) and not value.startswith(("/", "~", "."))
    }


def mask(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with each of them replaced.

    Args:
        text: Any.
        environment: Where secrets are looked for; None for this process's.
    """
    found = secrets_of(os.environ if environment is None else environment)
    for value in sorted(found, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


class MaskedStream:
    """A text stream that never passes a secret on; everything else is the stream's own.

    Args:
        stream: ``sys.stderr`` for instance.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes it masked."""
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Writes all of them masked."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
