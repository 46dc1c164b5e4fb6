"""Writes a folder that transformers loads: config.json and model.safetensors, or nothing at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from launcher.workloads.hf.config_json import CONFIG
from launcher.workloads.hf.stored import SINGLE
from strategies.errors import RunError

# What belongs to a model besides its weights: text in, text out.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "merges.txt",
)  # fmt: skip


def write_folder(
    target: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    companions: Sequence[Path] = (),
) -> None:
    """Writes beside ``target``, syncs, and renames.

    Args:
        target: Does not exist, or is an empty folder.
        config: The content of ``config.json``.
        tensors: The weights under the library's names.
        companions: Files that are copied along.

    Raises:
        RunError: It cannot be written; nothing is left behind.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        staging.mkdir(parents=True)
        for file in companions:
            shutil.copyfile(file, staging / file.name)
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Two names must not share memory there.
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(plain, staging / SINGLE, metadata={"format": "pt"})
        for file in (*staging.iterdir(), staging):
            _sync(file)
        os.rename(staging, target)
        _sync(target.parent)
    except OSError as error:
        raise RunError(
            f"export.path={target} cannot be written: {error.strerror or error}. "
            "Try another export.path."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
