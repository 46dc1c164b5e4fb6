"""Whatever file somebody has a pipeline's order in, as the order itself.

By its ending: ``.toml`` and ``.py`` are torchtitan's, ``.yaml`` NeMo AutoModel's, ``.sh`` and what
speaks of ``--pipeline-model-parallel-size`` Megatron-LM's. By its words: DeepSpeed's instructions,
zero-bubble's printed orders, else torch's CSV.
"""

from __future__ import annotations

import re
from pathlib import Path

from strategies.errors import PlanError
from strategies.plan import read_schedule_file
from strategies.referee.foreign.instruction_lists import (
    has_instructions,
    has_zero_bubble,
    read_deepspeed,
    read_zero_bubble,
)
from strategies.referee.foreign.megatron_flags import has_flags, read_flags
from strategies.referee.foreign.their_words import Asked, Theirs
from strategies.referee.foreign.torch_config import (
    has_titan_flags,
    read_automodel,
    read_titan_flags,
    read_torchtitan,
)

__all__ = ["Asked", "Theirs", "read_their_file"]

_CHOSEN = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


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
    ending = where.suffix.lower()
    if has_titan_flags(text) and not has_flags(text) and ending != ".py":
        return read_titan_flags(text, asked, path=where, name=path)
    if ending in _SCRIPTS or has_flags(text):
        whole = text if flags is None else f"{text}\n{flags}"
        return read_flags(whole, asked, name=path)
    if flags is not None:
        raise PlanError(
            f"check.flags={flags[:40]!a} adds to a script of Megatron-LM, and {path} is none. "
            "Try without check.flags."
        )
    if ending == ".toml" or ending == ".py":
        return read_torchtitan(text, asked, path=where, name=path, chosen=chosen)
    if ending in (".yaml", ".yml"):
        return read_automodel(text, asked, path=where, name=path)
    if has_instructions(text):
        return read_deepspeed(text, name=path)
    if has_zero_bubble(text):
        return read_zero_bubble(text, name=path)
    return Theirs(file, "torch")
