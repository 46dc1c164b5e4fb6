"""Text to token ids and back, for prompts and what follows them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.workloads.data.source import TextSource
from launcher.workloads.data.vocabulary import load_tokenizer
from strategies.errors import DataError


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
