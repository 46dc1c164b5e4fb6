"""A checkpoint as a Hugging Face folder, from whichever kind of model."""

from __future__ import annotations

from pathlib import Path

from launcher.workloads.hf.convert import built_in_tensors, library_tensors
from launcher.workloads.hf.counterpart import config_of
from launcher.workloads.hf.folder import COMPANIONS, write_folder
from launcher.workloads.hf.shape import HfShape
from launcher.workloads.specs import ModelShape
from strategies.errors import CheckpointError
from strategies.runtime.checkpoint import load_state_dict


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
