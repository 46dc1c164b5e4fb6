"""Which stored tensor becomes which tensor of the network, and what does not fit. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.workloads.hf.stored import Stored
from strategies.errors import ModelError

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

    Args:
        expected: Names and shapes of the network's tensors, tied ones under each name.
        stored: What the files have.
        folder: For messages.
        prefix: What files of the bare network leave out of the names, e.g. ``transformer.``.
        tied: Name -> the name whose tensor it shares.
        ignore: Patterns of further stored names that are no parameters.

    Returns:
        All of ``expected``; a tied name that is not stored goes to that of its partner.

    Raises:
        ModelError: Tensors are missing, unexpected, or of another shape; they are named.
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
