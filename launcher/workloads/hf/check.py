"""What can be known to be wrong with a model folder before a process is started. Torch-free."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launcher.workloads.hf.families import FAMILIES, read_sizes
from launcher.workloads.hf.match import match_tensors
from launcher.workloads.hf.shape import HfShape
from launcher.workloads.hf.stored import stored_tensors
from strategies.errors import CheckpointError, DataError, ModelError

_MAJOR = 5


def require_transformers() -> None:
    """Refuses ``model=hf`` where the library is missing or too old.

    Raises:
        ModelError: With the command that installs it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "model=hf needs the transformers library, which is not installed. "
            "Try pip install 'foldpipe[hf]'."
        )
    found = version("transformers")
    if int(found.partition(".")[0]) < _MAJOR:
        raise ModelError(
            f"model=hf needs transformers >= {_MAJOR}, but {found} is installed. "
            "Try pip install --upgrade 'foldpipe[hf]'."
        )


def check_folder(shape: HfShape) -> None:
    """Looks at the files of a model: all there, undamaged, and those that config.json asks for.

    For an architecture whose tensors are not known here, their names are checked on the ranks.

    Raises:
        ModelError: What is wrong, by file and tensor.
    """
    require_transformers()
    if not shape.pretrained:
        return
    folder = Path(shape.folder)
    stored = stored_tensors(folder)
    if shape.sizes is None:
        return
    expected = {name: size for unit in shape.tensors() for name, size in unit.items()}
    embedding = next(iter(expected))
    match_tensors(
        expected,
        stored,
        folder=folder,
        prefix=FAMILIES[shape.model_type].prefix,
        tied={"lm_head.weight": embedding} if shape.sizes.tied else {},
    )


def check_vocabulary(shape: HfShape, needed: int, data: str) -> None:
    """Refuses token ids that the model has no embedding for.

    Args:
        shape: The model.
        needed: How many ids the data may have.
        data: What the data are called.

    Raises:
        DataError: They are more than the model has.
    """
    if needed > shape.vocab:
        raise DataError(
            f"{data} has token ids up to {needed - 1}, but the model in {shape.folder} has "
            f"vocab_size={shape.vocab} and allows 0 to {shape.vocab - 1}. "
            "Try the tokenizer of the model, data.tokenizer=.../tokenizer.json."
        )


def check_same_model(path: Path, written: Any, shape: HfShape) -> None:
    """Refuses a checkpoint of another model than that of the folder.

    Args:
        path: The checkpoint.
        written: What it says about its model.
        shape: The folder's.

    Raises:
        CheckpointError: The first differences.
    """
    config = written.get("hf") if isinstance(written, dict) else None
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError(
            f"{path} is no checkpoint of model=hf. Try the model= that it was written with."
        )
    now, then = _numbers(shape.config), _numbers(config)
    wrong = [key for key in now if now[key] != then.get(key)]
    if wrong:
        listed = ", ".join(f"{key}={then.get(key)} (here {now[key]})" for key in wrong)
        raise CheckpointError(
            f"{path} is a checkpoint of another model than model.path={shape.folder}: {listed}. "
            "Try the model.path that it was written with."
        )


def _numbers(config: Any) -> dict[str, Any]:
    """What decides the shapes of the weights."""
    sizes = read_sizes(config)
    found: dict[str, Any] = {"model_type": config["model_type"]}
    if sizes is None:
        names = ("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size")
        return found | {name: config[name] for name in names if name in config}
    # Dropout changes no weight, and only learned positions are weights.
    free = {"kind"} | ({"positions"} if sizes.kind == "llama" else set())
    for entry in fields(sizes):
        if entry.name not in free and not entry.name.endswith("_dropout"):
            found[entry.name] = getattr(sizes, entry.name)
    return found
