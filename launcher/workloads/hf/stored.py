"""The tensors in a model folder's ``*.safetensors`` files, by their headers alone. Torch-free.

A header is JSON and says where each tensor lies, so names, shapes and a cut-off file are found in
milliseconds, whatever the size of the model. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.errors import ModelError
from strategies.small_file import FileRefusedError, opened, parse_json, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as the header spells it, e.g. BF16


def is_floating(tensor: Stored) -> bool:
    return tensor.dtype.startswith(("F", "BF"))


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a model, one file or many with an index."""
    index = folder / INDEX
    if index.is_file():
        return _by_index(index)
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    found = ""
    if others:
        found = f" (it has {others[0]}, without an index)"
    elif pickled:
        found = f" (it has {pickled[0]}, pickled, which may run code and is not read)"
    raise ModelError(
        f"model.path={folder} has neither {SINGLE} nor {INDEX}{found}. Try model.pretrained=false "
        "for fresh weights, or a folder that save_pretrained() wrote."
    )


def _read_header(file: Path) -> dict[str, Stored]:
    """Names and shapes of the tensors in one file, and whether all of it is there."""
    try:
        with opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise _damaged(file, f"its header of {length} bytes does not fit into {size} bytes")
            header: Any = parse_json(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}. Try a fresh copy.") from None
    except FileRefusedError as error:
        raise _damaged(file, f"in its header: {error}") from None
    found: dict[str, Stored] = {}
    end = 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(int(extent) for extent in entry["shape"])
            found[name] = Stored(file, shape, str(entry["dtype"]))
            end = max(end, int(entry["data_offsets"][1]))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise _damaged(file, f"its header is incomplete ({error!r})") from None
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        raise _damaged(file, f"its header asks for {expected} bytes, the file has {size}")
    return found


def _by_index(index: Path) -> dict[str, Stored]:
    try:
        named = read_json(index, most_bytes=_MAX_HEADER_BYTES)["weight_map"]
        wanted = {str(name): str(file) for name, file in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}. Try a fresh copy of it.") from None
    found: dict[str, Stored] = {}
    for name in sorted(set(wanted.values())):
        file = index.parent / name
        if Path(name).name != name or not file.is_file():
            raise ModelError(
                f"{index} names {name}, which is not there. Try a complete copy of the folder."
            )
        found |= _read_header(file)
    lost = sorted(name for name, file in wanted.items() if name not in found)
    if lost:
        raise ModelError(
            f"{index} says that {lost[0]} is in {wanted[lost[0]]}, which does not have it "
            f"({len(lost)} such tensors). Try a fresh copy of the folder."
        )
    return found


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is damaged: {why}. Try a fresh copy of it.")


# Constants that older versions of the library stored; today's networks compute them.
_CONSTANTS = (r"\.rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$")
_NAMED = 4


def match_tensors(
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    *,
    folder: Path,
    prefix: str,
    tied: Mapping[str, str],
    ignore: Iterable[str] = (),
) -> dict[str, str]:
    """Name in the network -> name in the files.

    A tied name (-> the name whose tensor it shares) that is not stored goes to that of its partner.
    Files of the bare network leave ``prefix`` out of the names, e.g. ``transformer.``; ``ignore``
    are patterns of further stored names that are no parameters.
    """
    found: dict[str, str] = {}
    for name in expected:
        for spelling in (name, name.removeprefix(prefix)):
            if spelling in stored:
                found.setdefault(name, spelling)
    for target, source in tied.items():
        if target not in found and source in found:
            found[target] = found[source]
        elif source not in found and target in found:
            found[source] = found[target]
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"model.path={folder} lacks {_listed(missing, len(expected))} that config.json asks "
            "for. Try the config.json that belongs to these files, or model.pretrained=false."
        )
    patterns = [re.compile(pattern) for pattern in (*_CONSTANTS, *ignore)]
    used = set(found.values())
    unexpected = [
        name
        for name in stored
        if name not in used and not any(pattern.search(name) for pattern in patterns)
    ]
    if unexpected:
        raise ModelError(
            f"model.path={folder} has {_listed(unexpected, len(stored))} that the model of "
            "config.json does not have. Try the config.json that belongs to these files."
        )
    for name, spelling in found.items():
        shape = stored[spelling].shape
        if not is_floating(stored[spelling]):
            raise ModelError(
                f"{stored[spelling].file}: {spelling} is of type {stored[spelling].dtype}, which "
                "is no floating-point number. Try the unquantised model."
            )
        if shape != expected[name]:
            raise ModelError(
                f"{stored[spelling].file}: {spelling} has shape {list(shape)}, but config.json "
                f"makes it {list(expected[name])}. Try the config.json that belongs to this file."
            )
    return found


def _listed(names: list[str], total: int) -> str:
    shown = ", ".join(names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} of {total} tensors ({shown}{more})"
