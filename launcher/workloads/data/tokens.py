"""Turns a source into one array of token ids. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from launcher.workloads.data.source import TextSource, check_file, load_tokenizer, source_files
from strategies.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Text files hold no NUL byte, so it can part documents without a 257th token.
_SEPARATOR = b"\0"
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_PIECE_CHARACTERS = 1 << 16


def load_tokens(source: TextSource) -> Tokens:
    """All token ids of ``source``, one-dimensional, in the narrowest unsigned type.

    Without a tokenizer the ids are the bytes of the files, in order, with a NUL byte between two
    files. With one, its end-of-text token stands there, if it has such a token.
    """
    if source.kind == "tokens":
        return memory_map(source)
    documents = _read(source)
    if source.tokenizer is None:
        return np.frombuffer(_SEPARATOR.join(documents), dtype=np.uint8)
    return _encode(documents, load_tokenizer(source.tokenizer))


def _read(source: TextSource) -> list[bytes]:
    documents: list[bytes] = []
    left = source.max_bytes
    for file in source_files(source):
        if left is not None and left <= 0:
            break
        document = _read_file(file, left)
        documents.append(document)
        if left is not None:
            left -= len(document) + len(_SEPARATOR)
    return documents


def _read_file(file: Path, limit: int | None) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(-1 if limit is None else limit)
    except OSError as error:
        raise DataError(
            f"data.path: {file} cannot be read: {error.strerror}. Try another data.path."
        ) from None


def _encode(documents: list[bytes], tokenizer: Tokenizer) -> Tokens:
    end = next(
        (found for word in _END_TOKENS if (found := tokenizer.token_to_id(word)) is not None), None
    )
    narrow = tokenizer.get_vocab_size(with_added_tokens=True) <= 1 << 16
    dtype = np.uint16 if narrow else np.uint32
    arrays: list[Tokens] = []
    for index, document in enumerate(documents):
        if index and end is not None:
            arrays.append(np.array([end], dtype))
        pieces = _pieces(document.decode("utf-8", errors="replace"))
        for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False):
            arrays.append(np.array(encoding.ids, dtype))
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _pieces(text: str) -> list[str]:
    """Cuts a long text behind line ends, so that the library can encode its parts side by side."""
    pieces, start = [], 0
    while start < len(text):
        cut = text.find("\n", start + _PIECE_CHARACTERS) + 1 or len(text)
        pieces.append(text[start:cut])
        start = cut
    return pieces


def encode(source: TextSource, text: str) -> list[int]:
    """Token ids of a text, as the source's own text is encoded.

    Raises:
        DataError: The source is a file of ids, which has no text.
    """
    if source.kind == "tokens":
        raise DataError(
            "data=tokens holds ids, so generate.prompt cannot be encoded. "
            "Try data=text data.tokenizer=/path/to/tokenizer.json."
        )
    if source.tokenizer is None:
        return list(text.encode())
    ids: list[int] = load_tokenizer(source.tokenizer).encode(text, add_special_tokens=False).ids
    return ids


def decode(source: TextSource, ids: Sequence[int]) -> str:
    """Text of token ids; bytes that are no UTF-8 become replacement characters."""
    if source.tokenizer is None:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
    text: str = load_tokenizer(source.tokenizer).decode(list(ids))
    return text


Tokens = npt.NDArray[np.unsignedinteger]


def memory_map(source: TextSource) -> Tokens:
    """The ids of a ``tokens`` source, read from the disk only where they are used."""
    assert source.path is not None
    path = check_file("data.path", source.path)
    dtype = np.dtype(source.dtype).newbyteorder("<")
    size = path.stat().st_size
    count = min(size, source.max_bytes or size) // dtype.itemsize
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
