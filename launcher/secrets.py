"""Refuses credentials in configuration, where every run folder and tracker would copy them.

Hydra writes the command line into ``.hydra/``, wandb into its own files; a key typed once is in
five places. Messages from here never repeat the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TextIO

from strategies.errors import PlanError

_NAME = re.compile(
    r"(?:^|[._])(?:api_?key|apikey|password|passwd|secret|secret_?key|access_?key|private_?key|"
    r"credentials?|auth_?token|access_?token|api_?token|hf_?token|token|bearer)$",
    re.IGNORECASE,
)
# A piece of text is a token, too: counts per token, and the words of a tokenizer.
_TEXT = re.compile(
    r"(?:^|[._])(?:per|num|pad|bos|eos|unk|unknown|mask|sep|cls|start|end|stop|begin|first|last|"
    r"next|image|audio|video|special|decoder_start)_token$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?\d{1,4}(?:\.\d*)?(?:[eE][+-]?\d{1,2})?|true|false|null", re.IGNORECASE)
_VARIABLE = re.compile(r"oc\.env\s*:\s*[\"'\\]*([A-Za-z0-9_]+)")
# Shapes that name themselves: wandb (40 hex digits, or wandb_v1_), Hugging Face, OpenAI, GitHub,
# GitLab, AWS, Google, Slack, JSON web tokens, PEM files.
_VALUE = re.compile(
    r"^[0-9a-f]{40}$|\blocal-[0-9a-f]{40}\b|\bwandb_v\d_\w{20,}|\bhf_[A-Za-z0-9]{20,}|"
    r"\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|"
    r"\bglpat-[\w-]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bxox[abpr]-[\w-]{10,}|"
    r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def refuse_secret(name: str, value: str, *, place: str = "the command line") -> None:
    """Raises if a key's name or its value looks like a credential.

    ``place``: where it was found, for the message.

    Raises:
        PlanError: Names the key and never the value.
    """
    shown = name if re.fullmatch(r"[\w.@/+~-]{1,80}", name) else "A key"
    if _NAME.search(name) and not _is_about_text(name, value):
        reason = f"{shown} looks like the name of a credential"
    elif _VALUE.search(value.strip().strip("'\"")):
        reason = f"the value of {shown} looks like a credential"
    elif any(_is_secret(word, os.environ.get(word, "")) for word in _VARIABLE.findall(value)):
        reason = f"{shown} reads a credential from the environment"
    elif given := [name for secret, name in secrets_of(os.environ).items() if secret in value]:
        # A shell has put it there.
        reason = f"the value of {shown} is the credential of the variable {given[0]}"
    else:
        return
    raise PlanError(
        f"{reason} (found on {place}). Configuration is copied into run folders in plain text, so "
        "no secret may be part of it. Try `wandb login`, or export WANDB_API_KEY before the run: "
        "it is read without being named here."
    )


def _is_about_text(name: str, value: str) -> bool:
    """Whether a token is one of a text: by the words before, or a number too short for a key."""
    counted = name.lower().endswith("token") and _NUMBER.fullmatch(value.strip()) is not None
    return counted or _TEXT.search(name) is not None


# Secrets of the environment: found by the names of their variables, and kept out of every text.
#
# A key reaches a process in a variable (WANDB_API_KEY, HF_TOKEN) and from there, through an
# exception or a careless print, a log that many can read. Nobody can know every secret; these are
# known.

MASK = "***"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|PASSPHRASE|PASS|PWD|"
    r"PAT|AUTH|COOKIE|JWT|BEARER|DSN|WEBHOOK|WEBHOOK_URL)(?:_|$)"
    r"|(?:PASSWORD|PASSWD|PASSPHRASE|APIKEY|TOKEN|SECRET)$",
    re.IGNORECASE,
)
# ``scheme://user:password@host``, in a variable of any name and in any text.
_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
# A shorter value would hide ordinary words; a path says where a secret lies, and is none.
_SHORTEST = 8


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Value -> variable, of everything that is to be kept out of files."""
    found = {
        value: name
        for name, value in environment.items()
        if len(value) >= _SHORTEST
        and _SECRET_NAME.search(name)
        and not value.startswith(("/", "~", "."))
    }
    for name, value in environment.items():
        for pair in _IN_URL.findall(value):
            found |= {part: name for part in (pair, pair.partition(":")[2]) if len(part) >= 6}
    return found


def _is_secret(name: str, value: str) -> bool:
    return _SECRET_NAME.search(name) is not None or _IN_URL.search(value) is not None


def mask(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with each secret of an environment (None: this process's) replaced."""
    found = secrets_of(os.environ if environment is None else environment)
    for value in sorted(found, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _IN_URL.sub(MASK, text)


class MaskedStream:
    """A text stream that never passes a secret on; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
