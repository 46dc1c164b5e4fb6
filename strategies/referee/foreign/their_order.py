"""Whatever file somebody has a pipeline's order in, as the order itself.

By its words: flags of Megatron-LM, keys of torchtitan or NeMo AutoModel, else torch's CSV.
"""

from __future__ import annotations

import re
from pathlib import Path

from strategies.errors import PlanError
from strategies.plan import read_schedule_file
from strategies.referee.foreign.megatron_flags import has_flags, read_flags
from strategies.referee.foreign.their_words import Asked, Theirs
from strategies.referee.foreign.torch_config import has_torch_keys, read_torch_config

__all__ = ["Asked", "Theirs", "read_their_file"]

_CHOSEN = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_CONFIGURATIONS = (".toml", ".py", ".yaml", ".yml")


def read_their_file(path: str, asked: Asked, *, flags: str | None = None) -> Theirs:
    """Reads a file, and tells whose words it has.

    Args:
        path: The file; ``config_registry.py:name`` for one configuration of several.
        asked: What is known beside it.
        flags: Megatron-LM's, which come after those of the file and so win.

    Raises:
        PlanError: There is no such file, or it asks for what cannot be.
        ProgramError: Its notation is unknown; the message has line and column.
    """
    match = _CHOSEN.fullmatch(path)
    plain, chosen = (match[1], match[2]) if match else (path, None)
    file = read_schedule_file(plain, placement=asked.placement)
    where, text = Path(plain), file.text
    ending, of_megatron = where.suffix.lower(), has_flags(text)
    of_torch = ending in _CONFIGURATIONS or has_torch_keys(text)
    if of_torch and not of_megatron and flags is None:
        return read_torch_config(text, asked, path=where, name=path, chosen=chosen)
    if of_megatron or ending in _SCRIPTS:
        whole = text if flags is None else f"{text}\n{flags}"
        return read_flags(whole, asked, name=path)
    if flags is not None:
        raise PlanError(
            f"check.flags={flags[:40]!a} adds to a script of Megatron-LM, and {path} is none. "
            "Try without check.flags."
        )
    return Theirs(file, "torch")
