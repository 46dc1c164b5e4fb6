"""Everything a user can cause, as one exception tree.

Every message says what was asked, the rule with its numbers, and the fix in command-line spelling.
The command line prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


class PipelineError(Exception):
    """Root of all errors that a user's input, data or machine can cause.

    The message is the reason, then the fix: either ``fix``, or all from the first sentence that
    begins with "Try".

    Attributes:
        reason: What was asked, and the rule.
        fix: What to type instead; empty where nothing can be typed.
    """

    exit_code = 2

    def __init__(self, reason: str, *, fix: str = "") -> None:
        if not fix:
            reason, tried, rest = reason.partition(" Try ")
            fix = f"Try {rest}" if tried else ""
        super().__init__(f"{reason} {fix}" if fix else reason)
        self.reason, self.fix = reason, fix


class PlanError(PipelineError):
    """Degrees, batch sizes or a stage cut that cannot work together."""


class ProgramError(PipelineError):
    """A program that breaks a rule of the instruction set.

    Attributes:
        place: Rank, and place in its list, of the instruction that the message is about; None for
            one that is about the whole program.
    """

    def __init__(self, reason: str, *, fix: str = "", place: tuple[int, int] | None = None) -> None:
        super().__init__(reason, fix=fix)
        self.place = place


class DeadlockError(ProgramError):
    """Lists of instructions in an order that cannot run; the place is that of one that waits."""


class CostError(PipelineError):
    """Costs, hardware figures or a profile that cannot be used."""


class ModelError(PipelineError):
    """A model that cannot be cut, or a step that took another path than its cut allows."""


class DataError(PipelineError):
    """Missing, empty or unsuitable data, or stages that see different batches."""


class CheckpointError(PipelineError):
    """A checkpoint that is missing, damaged, or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not what was written: an earlier one may do."""


class RunError(PipelineError):
    """A run that started and failed; the first failing rank is named."""

    exit_code = 1


class NotFiniteError(RunError):
    """A loss or gradient that is not finite; no rank has applied the step."""


# ------------------------------------------------------------------------------ names of others

# What a terminal would obey instead of showing it: control characters, those that turn the
# direction of writing, annotations and tags that nobody sees, and halves of characters.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def readable(text: str) -> str:
    r"""The text with all of that written out.

    >>> readable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _OBEYED.sub(written, without_stack(text))


# Torch puts the stack of its own C++ code behind what it says.
_STACK = re.compile(
    r"^[ \t]*(?:Exception raised from .*|C\+\+ CapturedTraceback:|(?:frame )?#\d+[: ].*)(?:\n|\Z)",
    re.MULTILINE,
)


def without_stack(text: str) -> str:
    r"""A message of torch as far as it says something.

    >>> without_stack("recv: closed\nException raised from a.cpp:1 (most recent call first):\n"
    ...               "frame #0: c10::Error + 0x9 (0x7f in libc10.so)\nframe #1: main\nnext")
    'recv: closed\nnext'
    """
    if "Exception raised from " not in text and "C++ CapturedTraceback:" not in text:
        return text
    return _STACK.sub("", text).rstrip("\n")


def written(found: re.Match[str]) -> str:
    """A character as Python's source has it."""
    return found[0].encode("unicode_escape").decode("ascii")


# ---------------------------------------------------------------------------------- ranks in words
# Ranks and hosts as messages name them.


def name_ranks(ranks: Sequence[int]) -> str:
    """Their numbers.

    >>> name_ranks([3]), name_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_host(hosts: Mapping[int, str]) -> str:
    """Ranks, gathered by where they are.

    >>> by_host({0: "a", 1: "a", 2: "b"})
    'ranks 0, 1 on a; rank 2 on b'
    """
    places: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        places.setdefault(host, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in places.items())


# ---------------------------------------------------------------------------- optional packages

_OPTIONAL = (
    "optuna>=5", "tensorboard>=2.16", "transformers>=5", "wandb-workspaces>=0.4.13",
)  # fmt: skip


def install_words(package: str) -> str:
    """The command that installs what one of our extras asks for, by the package's own name.

    >>> install_words("optuna")
    "pip install 'optuna>=5'"
    """
    (requirement,) = (line for line in _OPTIONAL if line.startswith(f"{package}>"))
    return f"pip install '{requirement}'"


def one_line(error: BaseException) -> str:
    """A library's error in a message: its kind and the first line, without C++ frames."""
    first = without_stack(str(error)).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
