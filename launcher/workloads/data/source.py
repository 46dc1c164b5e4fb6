"""Where tokens come from, and whether that can work, before anything starts.

Free of torch: the parent process checks a source in milliseconds, reading at most as far as the
answer needs.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from launcher.workloads.data.split import split_blocks
from launcher.workloads.data.text_files import stdlib_files, text_files
from strategies.errors import DataError, PlanError

SourceKind = Literal["stdlib", "text", "tokens"]
TokenType = Literal["uint16", "uint32"]

BYTES_PER_TOKEN: dict[TokenType, int] = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text or a file of token ids.

    Attributes:
        kind: ``stdlib`` is the Python standard library's own source text, which is on every
            machine; ``text`` a file, or a folder whose text files are read in sorted order;
            ``tokens`` a flat file of little-endian token ids without header.
        path: File or folder of ``text`` and ``tokens``.
        tokenizer: A ``tokenizer.json`` of the tokenizers library; None makes every byte a token.
        dtype: Type of one id in a ``tokens`` file.
        max_bytes: Bytes of the source that are used; None for all.

    Raises:
        PlanError: Fields that contradict each other.
    """

    kind: SourceKind = "stdlib"
    path: str | None = None
    tokenizer: str | None = None
    dtype: TokenType = "uint16"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(SourceKind):
            raise PlanError(
                f"data={self.kind} is unknown. Try data=stdlib, data=text or data=tokens."
            )
        if self.dtype not in get_args(TokenType):
            raise PlanError(
                f"data.dtype={self.dtype} is unknown. Try data.dtype=uint16 or data.dtype=uint32."
            )
        if (self.path is None) != (self.kind == "stdlib"):
            raise PlanError(
                f"data={self.kind} needs data.path. Try data={self.kind} data.path=/path/to/it."
                if self.path is None
                else f"data.path={self.path} has no meaning with data=stdlib. Try data=text."
            )
        if self.kind == "tokens" and self.tokenizer is not None:
            raise PlanError(
                f"data.tokenizer={self.tokenizer} has no meaning with data=tokens, whose file "
                "holds ids already. Try data=text."
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise PlanError(
                f"data.max_bytes={self.max_bytes} is below 1. Try data.max_bytes=4000000."
            )

    @property
    def label(self) -> str:
        """How messages name this source."""
        return "data=stdlib" if self.path is None else f"data.path={self.path}"


# 4 MB of real text: read in a few hundredths of a second, more than a laptop's run gets through.
DEFAULT_SOURCE = TextSource(max_bytes=4_000_000)


def check_source(
    source: TextSource,
    *,
    sequence: int,
    batch_size: int = 1,
    num_replicas: int = 1,
    val_fraction: float = 0.1,
    full_batches: bool = True,
) -> None:
    """Finds out whether training on ``source`` can start.

    With a tokenizer the number of tokens is known only once the text has been encoded. Here the
    number of bytes stands in for it, which is never less for real text, and the data module repeats
    the check with the true number.

    Args:
        source: What to look at.
        sequence: Tokens per sequence.
        batch_size: Sequences per batch of one data-parallel replica.
        num_replicas: Data-parallel replicas.
        val_fraction: Share of the blocks kept for validation.
        full_batches: Whether incomplete batches are left out.

    Raises:
        DataError: The source is missing, unreadable, empty, or too short.
    """
    if source.tokenizer is not None:
        check_file("data.tokenizer", source.tokenizer)
    needed = _enough_tokens(sequence, batch_size * num_replicas, val_fraction)
    split_blocks(
        _count_tokens(source, up_to=needed),
        sequence=sequence,
        batch_size=batch_size,
        num_replicas=num_replicas,
        val_fraction=val_fraction,
        full_batches=full_batches,
        label=source.label,
    )


def source_files(source: TextSource) -> Iterator[Path]:
    """The text files of a ``stdlib`` or ``text`` source, in the order they are read.

    Raises:
        DataError: The path does not exist or is neither a file nor a folder.
    """
    if source.path is None:
        return stdlib_files()
    path = Path(source.path).expanduser()
    if path.is_dir():
        return text_files(path)
    check_file("data.path", source.path)
    return iter((path,))


def check_file(key: str, name: str) -> Path:
    """The path of an existing regular file.

    Raises:
        DataError: There is no such file, or it is something else, a folder or a device.
    """
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb"):
                return path
    except FileNotFoundError:
        raise DataError(
            f"{key}={name}: there is no such file, seen from {Path.cwd()}. "
            f"Try {key}=/absolute/path."
        ) from None
    except OSError as error:
        raise DataError(
            f"{key}={name} cannot be read: {error.strerror}. Try {key}=/path/to/a/readable/file."
        ) from None
    raise DataError(f"{key}={name} is not a regular file. Try {key}=/path/to/a/file.")


def _count_tokens(source: TextSource, *, up_to: int) -> int:
    """Tokens of the source, or some number of at least ``up_to``."""
    if source.kind == "tokens":
        assert source.path is not None
        size = check_file("data.path", source.path).stat().st_size
        width = BYTES_PER_TOKEN[source.dtype]
        if size % width:
            raise DataError(
                f"{source.label} has {size} bytes, which is no multiple of the {width} bytes of "
                f"data.dtype={source.dtype}. Try "
                f"data.dtype={'uint16' if source.dtype == 'uint32' else 'uint32'}, or data=text."
            )
        return min(size, source.max_bytes or size) // width
    total, num_files = 0, 0
    limit = source.max_bytes
    for file in source_files(source):
        separator = 1 if num_files else 0
        if total >= up_to or (limit is not None and total + separator >= limit):
            return total
        total += separator + file.stat().st_size
        if limit is not None:
            total = min(total, limit)
        num_files += 1
    if not num_files:
        raise DataError(f"{source.label} holds no text file. Try data.path=/path/to/a/text/file.")
    return total


def _enough_tokens(sequence: int, sequences: int, val_fraction: float) -> int:
    """A number of tokens that certainly fills one batch on both sides of the split."""
    smaller = min(val_fraction, 1 - val_fraction) if val_fraction > 0 else 1.0
    return int((sequences + 1) / max(smaller, 1e-6) + 2) * sequence + 1
