"""Refuses credentials in configuration, where every run folder and tracker would copy them.

Hydra writes the command line into ``.hydra/``, wandb into its own files; a key typed once is in
five places. Messages from here never repeat the value.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from io import TextIOBase
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from strategies.errors import PlanError

_NAME = re.compile(
    r"(?:^|[._-])(?:api_?keys?|(?:secret|access|private|account|master|signing|encryption|session|"
    r"deploy|license|wandb|ssh|auth)_?key|pwd|secrets?|credentials?|"
    r"(?:auth_|access_|api_|hf_|sas_|session_|refresh_)?token|bearer|authorization|cookies?|jwt|"
    r"dsn|pat|webhook(?:_url)?)\d*$"
    r"|(?:passwords?|passwd|passphrase|passcode|apikey)\d*$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# A piece of text is a token, too: counts per token, and the words of a tokenizer.
_TEXT = re.compile(
    r"(?:^|[._])(?:per|num|pad|bos|eos|unk|unknown|mask|sep|cls|start|end|stop|begin|first|last|"
    r"next|image|audio|video|special|decoder_start)_token$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?\d{1,4}(?:\.\d*)?(?:[eE][+-]?\d{1,2})?|true|false|null", re.IGNORECASE)
_VARIABLE = re.compile(r"oc\.env\s*:\s*[\"'\\]*([A-Za-z0-9_]+)")
# Shapes that name themselves: wandb, Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack,
# Stripe, SendGrid, npm, PyPI, Docker, NVIDIA, Vault, Replicate, JSON web tokens, PEM files.
_SHAPE = re.compile(
    r"\blocal-[0-9a-f]{40}\b|\bwandb_v\d_\w{20,}|\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}|"
    r"\bsk-[A-Za-z0-9_-]{20,}|\b[srp]k_(?:live|test)_[A-Za-z0-9]{16,}|"
    r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|"
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}|"
    r"\bxox[abeoprs]-[\w-]{10,}|\bxapp-[\w-]{20,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|"
    r"\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{40,}|\bdckr_pat_[\w-]{20,}|\bnvapi-[\w-]{20,}|"
    r"\bhv[sb]\.[\w-]{20,}|\br8_[A-Za-z0-9]{30,}|\bdop_v1_[0-9a-f]{40,}|"
    r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_HEXADECIMAL = re.compile(r"(?<![0-9a-zA-Z/._-])[0-9a-f]{40}(?![0-9a-zA-Z/._-])")  # wandb's
# ``scheme://user:password@host``; ``?token=...`` behind an address; what a request's header says.
_IN_URL = re.compile(r"(?<=://)[^/\s:@'\"]*:[^\s'\"/]+(?=@)")
_IN_QUERY = re.compile(
    r"(?<=[?&])((?:[\w.-]*[_.-])?(?:token|key|secret|signature|sig|password|passwd|pwd|auth|"
    r"credential)|apikey)=([^&\s#'\"<>]{6,})",
    re.IGNORECASE,
)
_IN_HEADER = re.compile(
    r"(authorization[\"']?\s*[:=]\s*[\"']?)(?:(?:bearer|basic|token)\s+)?([^\s\"',]{6,})"
    r"|(\bbearer\s+)(?=[\w.~+/=-]*\d)([\w.~+/=-]{16,})",
    re.IGNORECASE,
)
# ``password=...`` and ``--token ...`` inside of a text: a connection's parameters, a command.
_ASSIGNED = re.compile(
    r"(?<![A-Za-z0-9_])--?(?:[\w-]*-)?(?:password|passwd|token|api-?key|secret|access-?key)"
    r"(?:\s+|=)[\"']?(?P<option>[^\s\"'$<*/~-][^\s\"']{5,})"
    r"|(?<![A-Za-z0-9])(?:[A-Za-z0-9]*[_-])?(?:password|passwd|pwd|secret|api[_-]?key|"
    r"(?:access|account|shared|private)[_-]?(?:access)?[_-]?(?:key|signature)|"
    r"(?:access|auth|api)[_-]?token)"
    r"[\"']?\s*[=:]\s*[\"']?(?P<value>[^\s\"';,&$<*/~{}\[\]][^\s\"';,&{}\[\]]{5,})",
    re.IGNORECASE,
)


def refuse_secret(name: str, value: str, *, place: str = "the command line") -> None:
    """Raises if a key's name or its value looks like a credential.

    ``place``: where it was found, for the message.

    Raises:
        PlanError: Names the key and never the value.
    """
    shown = name if re.fullmatch(r"[\w.@/+~-]{1,80}", name) and not _SHAPE.search(name) else "A key"
    if _names_credential(name) and not _is_about_text(name, value):
        reason = f"{shown} looks like the name of a credential"
    elif _SHAPE.search(name):
        reason = f"{shown} has a credential for its name"
    elif _holds_credential(value):
        reason = f"the value of {shown} looks like a credential"
    elif any(_is_secret(word, os.environ.get(word, "")) for word in _VARIABLE.findall(value)):
        reason = f"{shown} reads a credential from the environment"
    elif given := _given(value):
        # A shell has put it there.
        reason = f"the value of {shown} is the credential of the variable {given}"
    else:
        return
    raise PlanError(
        f"{reason} (found on {place}). Configuration is copied into run folders in plain text, so "
        "no secret may be part of it. Try `wandb login`, or export WANDB_API_KEY before the run: "
        "it is read without being named here."
    )


def _names_credential(name: str) -> bool:
    return _NAME.search(name) is not None or _NAME.search(_CAMEL.sub("_", name)) is not None


def _holds_credential(value: str) -> bool:
    """Whether a text is one, or has one inside."""
    return any(
        pattern.search(value)
        for pattern in (_SHAPE, _HEXADECIMAL, _IN_URL, _IN_QUERY, _IN_HEADER, _ASSIGNED)
    )


def _given(value: str) -> str:
    """The variable whose credential a text holds; empty for none."""
    found = secrets_of(os.environ).items()
    return next((name for secret, name in found if secret in value), "")


def _is_about_text(name: str, value: str) -> bool:
    """Whether a token is one of a text: by the words before, or a number too short for a key."""
    counted = name.lower().endswith("token") and _NUMBER.fullmatch(value.strip()) is not None
    return counted or _TEXT.search(name) is not None


# Whether W&B knows who is asking: told before a rank is started, which would end with it.

_WANDB_LETTERS = 40


def has_wandb_key() -> bool:
    """Whether wandb finds a login: in its variables, or where ``wandb login`` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc
    from urllib.parse import urlsplit

    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    # wandb's own server is api.forge.coreweave.com, and was api.wandb.ai.
    return any("wandb" in host or "coreweave" in host or host == own for host in hosts)


def check_wandb_key(offline: bool | str) -> None:
    """Raises where a run that is not ``offline`` could not log in; ``auto`` needs no key.

    Raises:
        PlanError: There is no key, or the one of the environment is too short to be one.
    """
    if offline is True or os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return
    letters = len(os.environ.get("WANDB_API_KEY", "").strip())
    if 0 < letters < _WANDB_LETTERS:
        raise PlanError(
            f"WANDB_API_KEY has {letters} characters, and a key of W&B {_WANDB_LETTERS} at least. "
            "Try `unset WANDB_API_KEY` and `wandb login`, or tracking.offline=true."
        )
    if offline is False and not has_wandb_key():
        raise PlanError(
            "tracking.offline=false sends to W&B, and no key is set up. Try `wandb login`, export "
            "WANDB_API_KEY, or tracking.offline=auto."
        )


# Secrets of the environment: found by the names of their variables, and kept out of every text.
#
# A key reaches a process in a variable (WANDB_API_KEY, HF_TOKEN) and from there, through an
# exception or a careless print, a log that many can read. Nobody can know every secret; these are
# known.

MASK = "***"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEYS?|KEYS?|APIKEY|TOKEN|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|PASSPHRASE|"
    r"PASS|PWD|PIN|UNSEAL|AWS_SESSION|WANDB_API|PAT|AUTH|AUTHORIZATION|COOKIE|JWT|BEARER|DSN|"
    r"WEBHOOK|WEBHOOK_URL|CONNECTION_STRING)(?:_|\d*$)"
    r"|(?:PASSWORD|PASSWD|PASSPHRASE|APIKEY|TOKEN|SECRET|BINDPW|_PW)\d*$",
    re.IGNORECASE,
)
# A shorter value would hide ordinary words.
_SHORTEST, _SHORTEST_PASSWORD = 8, 6
_PASSWORD = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|(?:^|_)(?:PASS|PWD)(?:_|$)", re.IGNORECASE)
_LINE = 16  # of a secret of several lines those that are as long are secrets themselves


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Value -> variable, of everything that is to be kept out of files."""
    return dict(_secrets_of(tuple(environment.items())))


@functools.lru_cache(maxsize=8)
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in environment:
        shortest = _SHORTEST_PASSWORD if _PASSWORD.search(name) else _SHORTEST
        if len(value) >= shortest and _SECRET_NAME.search(name) and not _is_path(value):
            found[value] = name
            if "\n" in value:
                lines = (line.strip() for line in value.splitlines())
                found |= {line: name for line in lines if len(line) >= _LINE and "---" not in line}
        for pair in _IN_URL.findall(value):
            found |= {part: name for part in (pair, pair.partition(":")[2]) if len(part) >= 6}
        found |= {secret: name for _, secret in _IN_QUERY.findall(value)}
    return found


@functools.lru_cache(maxsize=256)
def _is_path(value: str) -> bool:
    """Whether it says where a secret lies, and is none: random letters may begin with a slash."""
    if value.startswith(("~/", "./", "../")):
        return True
    if not value.startswith("/"):
        return False
    try:
        return (Path("/") / Path(value).parts[1]).exists()
    except (OSError, IndexError, ValueError):
        return False


def _is_secret(name: str, value: str) -> bool:
    return _SECRET_NAME.search(name) is not None or _IN_URL.search(value) is not None


@functools.lru_cache(maxsize=8)
def _spellings(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Every secret as texts have it: as it is, in a printed dict, in JSON and in an address."""
    found: set[str] = set()
    for value in _secrets_of(environment):
        written = value.encode(errors="surrogateescape").decode(errors="backslashreplace")
        found |= {value, repr(value)[1:-1], json.dumps(written)[1:-1], quote(written, safe="")}
    return tuple(sorted(found, key=len, reverse=True))


def mask(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with each secret of an environment (None: this process's) replaced.

    And with whatever is one by its shape, wherever it came from.
    """
    given = os.environ if environment is None else environment
    for value in _spellings(tuple(given.items())):
        text = text.replace(value, MASK)
    text = _IN_QUERY.sub(lambda found: f"{found[1]}={MASK}", _IN_URL.sub(MASK, text))
    text = _IN_HEADER.sub(lambda found: f"{found[1] or found[3]}{MASK}", text)
    return _SHAPE.sub(MASK, text)


class MaskedStream:
    """A text stream that never passes a secret on; everything else is the stream's own."""

    def __init__(self, stream: TextIO | TextIOBase) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> _MaskedBytes:
        return _MaskedBytes(self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _MaskedBytes:
    """What is written to ``sys.stdout.buffer``."""

    def __init__(self, text: MaskedStream) -> None:
        self._text = text

    def write(self, data: bytes) -> int:
        self._text.write(bytes(data).decode("utf-8", "backslashreplace"))
        return len(data)

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(self._text, "_stream").buffer, name)  # noqa: B009
