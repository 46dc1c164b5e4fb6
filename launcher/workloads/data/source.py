"""Where tokens come from, and whether that can work, before anything starts.

Free of torch: the parent process checks a source in milliseconds, reading at most as far as the
answer needs.
"""

from __future__ import annotations

import math
import os
import shlex
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from strategies.errors import DataError, PlanError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


SourceKind = Literal["stdlib", "text", "tokens"]
TokenType = Literal["uint16", "uint32"]

_BYTES_PER_TOKEN: dict[TokenType, int] = {"uint16": 2, "uint32": 4}


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

    Raises:
        DataError: The source is missing, unreadable, empty, or too short.
    """
    if source.tokenizer is not None:
        check_file("data.tokenizer", source.tokenizer)
    if source.path is not None and not os.path.isdir(Path(source.path).expanduser()):
        _refuse_format(source, check_file("data.path", source.path))
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
    """The text files of a ``stdlib`` or ``text`` source, in the order they are read."""
    if source.path is None:
        return stdlib_files()
    path = Path(source.path).expanduser()
    if os.path.isdir(path):  # False, too, of a name that is too long
        return text_files(path)
    check_file("data.path", source.path)
    return iter((path,))


def check_file(key: str, name: str) -> Path:
    """The path of an existing regular file."""
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


# Formats that begin with bytes of their own: name, how to make a file of them that can be read.
_FORMATS = {
    b"\x1f\x8b\x08": ("gzip", "gunzip -k {file}"),
    b"BZh": ("bzip2", "bunzip2 -k {file}"),
    b"\xfd7zXZ\0": ("xz", "unxz -k {file}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd {file}"),
    b"PK\x03\x04": ("zip", "unzip {file}"),
    b"\x93NUMPY": ("numpy", ""),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > utf8.txt"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > utf8.txt"),
    b"%PDF-": ("PDF", "pdftotext {file}"),
    b"PAR1": ("parquet", ""),
    b"ARROW1": ("arrow", ""),
    b"\x89HDF": ("HDF5", ""),
    b"\x89PNG": ("PNG", ""),
    b"\xff\xd8\xff": ("JPEG", ""),
    b"SQLite format 3": ("SQLite", ""),
}
_TEXT = frozenset({*range(0x20, 0x7F), *b"\t\n\r\f"})
_OWN_DATA = "a file of text, or data=class data.path=my_pkg.data:LitData, which reads what it likes"


def _refuse_format(source: TextSource, file: Path) -> None:
    """Refuses a file that is read without an error, and is something else: bytes always look fine.

    Raises:
        DataError: It begins as a file of another format does, or as one of the other kind.
    """
    try:
        with file.open("rb") as stream:
            begin = stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise DataError(_unreadable(file, error)) from None
    for magic, (name, command) in _FORMATS.items():
        # Two bytes may be the first id of a file of ids.
        if begin.startswith(magic) and (source.kind == "text" or len(magic) > 2):
            fix = f"`{command.format(file=shlex.quote(str(file)))}`, and the file that it writes"
            if name == "numpy":
                code = f"import numpy; numpy.load({str(file)!r}).astype('uint32').tofile('ids.bin')"
                fix = f"`python -c {shlex.quote(code)}` for a list of ids, and data=tokens "
                fix += "data.path=ids.bin data.dtype=uint32"
            raise DataError(
                f"{source.label} is a file of {name}, and would be read byte by byte as if it held "
                f"{'text' if source.kind == 'text' else 'ids'}. "
                f"Try {fix if command or name == 'numpy' else _OWN_DATA}."
            )
    if source.kind == "text" and b"\0" in begin:
        raise DataError(
            f"{source.label} is no text: there is a NUL byte among its first {len(begin):,}. Try "
            f"data=tokens for a file of token ids, or {_OWN_DATA}."
        )
    if source.kind == "tokens" and len(begin) >= 64 and _TEXT.issuperset(begin):
        raise DataError(
            f"{source.label} is text, and data=tokens reads every {_BYTES_PER_TOKEN[source.dtype]} "
            f"bytes as the id of a token. Try data=text."
        )


def _count_tokens(source: TextSource, *, up_to: int) -> int:
    """Tokens of the source, or some number of at least ``up_to``."""
    if source.kind == "tokens":
        assert source.path is not None
        size = check_file("data.path", source.path).stat().st_size
        width = _BYTES_PER_TOKEN[source.dtype]
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


@dataclass(frozen=True, slots=True)
class Split:
    """Block indices of both parts; block i covers tokens ``i * sequence`` to one sequence further.

    Validation is the end of the stream, so both parts are contiguous text.
    """

    train: range
    validation: range


def split_blocks(
    num_tokens: int,
    *,
    sequence: int,
    batch_size: int = 1,
    num_replicas: int = 1,
    val_fraction: float = 0.1,
    full_batches: bool = True,
    label: str = "data",
) -> Split:
    """Divides the blocks of ``num_tokens`` tokens.

    The last token of each block's targets is the first of the next block's inputs, hence the one
    token that does not count.

    Validation gets ``val_fraction`` of the blocks, rounded, at least one unless 0. With
    ``full_batches`` it, too, needs one complete batch, as training always does.

    Raises:
        DataError: Too few tokens for one block, or too few blocks for one batch of either part.
        PlanError: ``val_fraction`` is not in [0, 1), or a count is below 1.
    """
    if not 0 <= val_fraction < 1:
        raise PlanError(
            f"data.val_fraction={val_fraction} is not in [0, 1). Try data.val_fraction=0.1."
        )
    for key, count in (("model.sequence", sequence), ("data.microbatch_size", batch_size)):
        if count < 1:
            raise PlanError(f"{key}={count} is below 1. Try {key}=1.")
    need = batch_size * num_replicas
    need_validation = (need if full_batches else num_replicas) if val_fraction else 0
    request = _Request(num_tokens, val_fraction, need, need_validation)
    train, validation = request.divide(sequence)
    if train < need or validation < need_validation:
        share = f"({batch_size} per replica * dp={num_replicas})"
        raise DataError(
            f"{label} has {request.explain(sequence, share)} {request.advise(sequence)}"
        )
    return Split(range(train), range(train, train + validation))


@dataclass(frozen=True, slots=True)
class _Request:
    """Everything but the length of a sequence, which is what an answer can vary."""

    num_tokens: int
    val_fraction: float
    need_train: int
    need_validation: int

    def divide(self, sequence: int) -> tuple[int, int]:
        blocks = max(0, self.num_tokens - 1) // sequence
        validation = max(1, round(blocks * self.val_fraction)) if self.val_fraction else 0
        return blocks - min(validation, blocks), min(validation, blocks)

    def fits(self, sequence: int) -> bool:
        train, validation = self.divide(sequence)
        return train >= self.need_train and validation >= self.need_validation

    def explain(self, sequence: int, share: str) -> str:
        train, validation = self.divide(sequence)
        if not train + validation:
            return (
                f"{max(self.num_tokens, 0)} tokens, but one sequence with its targets takes "
                f"model.sequence + 1 = {sequence + 1}."
            )
        if train < self.need_train:
            return (
                f"{train} training sequences of {sequence} tokens, but one step takes "
                f"{self.need_train} {share}."
            )
        return (
            f"{validation} validation sequences of {sequence} tokens (data.val_fraction="
            f"{self.val_fraction} of {train + validation}), but one batch takes "
            f"{self.need_validation} {share}."
        )

    def advise(self, sequence: int) -> str:
        """A value that does work, tried out before it is recommended."""
        train, validation = self.divide(sequence)
        if train >= self.need_train:
            wanted = math.ceil(100 * self.need_validation / (train + validation)) / 100
            if wanted < 1 and replace(self, val_fraction=wanted).fits(sequence):
                return f"Try data.val_fraction={wanted}."
        # No longer one leaves as many blocks as are needed.
        longest = max(0, self.num_tokens - 1) // (self.need_train + self.need_validation)
        lengths = range(min(sequence - 1, longest), 1, -1)
        shorter = next((length for length in lengths if self.fits(length)), None)
        if shorter is not None:
            return f"Try model.sequence={shorter}, or a longer text."
        return "Try a longer text, or data=stdlib."


# Not the library itself: what was installed into it, and its tests with their odd encodings.
_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_SNIFFED_BYTES = 4096


def stdlib_files() -> Iterator[Path]:
    """The Python sources of the standard library of the running interpreter."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "os.py").is_file():
        raise DataError(
            f"data=stdlib: this Python has no sources in {folder}. "
            "Try data=text data.path=/path/to/a/text/file."
        )
    return (file for file in _walk(folder, skipped=_SKIPPED) if file.suffix == ".py")


def text_files(folder: Path) -> Iterator[Path]:
    """All files below ``folder`` that are neither hidden nor binary.

    A file counts as binary if its beginning holds a NUL byte. Links to folders are not followed.
    """
    return (file for file in _walk(folder, skipped=frozenset()) if not _is_binary(file))


def _walk(folder: Path, *, skipped: frozenset[str]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(_unreadable(folder, error)) from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), skipped=skipped)
        elif entry.is_file():
            yield Path(entry.path)


def _is_binary(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise DataError(_unreadable(file, error)) from None


def _unreadable(path: Path, error: OSError) -> str:
    return (
        f"data.path: {path} cannot be read: {error.strerror}. "
        f"Try `chmod -R u+rX {path}`, or another data.path."
    )


# -------------------------------------------------------------------------------------- vocabulary
# Free of torch, and of numpy for everything but token files: whoever simulates or plans asks this
# question too.

BYTE_VOCAB = 256
_SCANNED_IDS = 1 << 24


def vocab_size(source: TextSource) -> int:
    """How many ids the tokens of ``source`` can have; the model's vocabulary must not be smaller.

    For a file of token ids, which does not say, it is the largest id in it plus one: a pass over
    the part that is used, about a second per gigabyte.
    """
    if source.kind == "tokens":
        return _largest_id(source) + 1
    if source.tokenizer is None:
        return BYTE_VOCAB
    size: int = load_tokenizer(source.tokenizer).get_vocab_size(with_added_tokens=True)
    return size


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``."""
    from tokenizers import Tokenizer  # not needed for bytes

    path = check_file("data.tokenizer", name)
    try:
        return Tokenizer.from_file(str(path))
    # The library raises bare Exception; its panics derive from BaseException.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"data.tokenizer={name} is no tokenizer.json of the tokenizers library: "
            f"{str(error)[:200]}. Try data.tokenizer=null for bytes."
        ) from None


def _largest_id(source: TextSource) -> int:
    from launcher.workloads.data.tokens import memory_map  # brings numpy

    ids = memory_map(source)
    if not len(ids):
        raise DataError(f"{source.label} holds no token id. Try another data.path.")
    # In parts, so that no more than one of them is in memory at a time.
    starts = range(0, len(ids), _SCANNED_IDS)
    return max(int(ids[start : start + _SCANNED_IDS].max()) for start in starts)
