"""How many token ids a source can have, which decides a model's vocabulary.

Free of torch, and of numpy for everything but token files: whoever simulates or plans asks this
question too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.workloads.data.source import TextSource, check_file
from strategies.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_VOCAB = 256
_SCANNED_IDS = 1 << 24


def vocab_size(source: TextSource) -> int:
    """How many ids the tokens of ``source`` can have; the model's vocabulary must not be smaller.

    For a file of token ids, which does not say, it is the largest id in it plus one: a pass over
    the part that is used, about a second per gigabyte.

    Raises:
        DataError: The tokenizer or the file cannot be read, or the file holds no id.
    """
    if source.kind == "tokens":
        return _largest_id(source) + 1
    if source.tokenizer is None:
        return BYTE_VOCAB
    size: int = load_tokenizer(source.tokenizer).get_vocab_size(with_added_tokens=True)
    return size


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``.

    Raises:
        DataError: No such file, or not a tokenizer.
    """
    from tokenizers import Tokenizer  # not needed for bytes

    path = check_file("data.tokenizer", name)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"data.tokenizer={name} is no tokenizer.json of the tokenizers library: "
            f"{str(error)[:200]}. Try data.tokenizer=null for bytes."
        ) from None


def _largest_id(source: TextSource) -> int:
    from launcher.workloads.data.token_file import memory_map  # brings numpy

    ids = memory_map(source)
    if not len(ids):
        raise DataError(f"{source.label} holds no token id. Try another data.path.")
    # In parts, so that no more than one of them is in memory at a time.
    starts = range(0, len(ids), _SCANNED_IDS)
    return max(int(ids[start : start + _SCANNED_IDS].max()) for start in starts)
