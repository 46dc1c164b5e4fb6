"""A checkpoint as a Hugging Face folder, from whichever kind of model."""

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

from launcher.workloads.hf.convert import built_in_tensors, library_tensors
from launcher.workloads.hf.counterpart import config_of
from launcher.workloads.hf.families import CONFIG
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.hf.stored import SINGLE
from launcher.workloads.model_share import ModelShape
from strategies.errors import CheckpointError, RunError
from strategies.runtime.lightning.checkpointing_strategy import load_state_dict


def export_checkpoint(checkpoint: Path, shape: ModelShape, target: Path) -> None:
    """Writes the weights of a checkpoint for transformers, in the type they were trained in.

    Args:
        checkpoint: A committed one, of any layout.
        shape: Its model.
        target: The folder to be.

    Raises:
        CheckpointError: It is damaged, or has no weights.
        ModelError: The built-in transformer has a shape that the library lacks.
        RunError: The folder cannot be written.
    """
    state = load_state_dict(checkpoint)
    types = {str(value.dtype).removeprefix("torch.") for value in state.values()}
    floating = sorted(name for name in types if "float" in name)
    if not floating:
        raise CheckpointError(f"{checkpoint} has no weights to export. Use another checkpoint.")
    if isinstance(shape, HfShape):
        folder = Path(shape.folder)
        tied = _ties(shape)
        config = {k: v for k, v in shape.config.items() if k != "torch_dtype"}
        companions = [folder / name for name in COMPANIONS if (folder / name).is_file()]
        tensors = library_tensors(state, tied=tied)
        write_folder(target, config | {"dtype": floating[0]}, tensors, companions=companions)
        return
    write_folder(target, config_of(shape, floating[0]), built_in_tensors(shape, state))


def _ties(shape: HfShape) -> bool:
    if shape.sizes is not None:
        return shape.sizes.tied
    from launcher.workloads.hf.skeleton import build_skeleton

    return "lm_head.weight" in build_skeleton(shape).tied


# ------------------------------------------------------------------------------------------ folder
#
# Writes a folder that transformers loads: config.json and model.safetensors, or nothing at all.


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
