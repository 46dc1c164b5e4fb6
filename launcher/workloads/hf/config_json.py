"""``config.json`` of a model folder, read as what it is: JSON. Free of torch and transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies.errors import ModelError

CONFIG = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in ``folder``.

    Raises:
        ModelError: There is no such folder or file, or it is not a transformers configuration.
    """
    if not folder.is_dir():
        raise ModelError(
            f"model.path={folder}: no such folder. It must hold {CONFIG} and, unless "
            "model.pretrained=false, *.safetensors; nothing is downloaded. "
            "Try model.path=/models/my_llama."
        )
    file = folder / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"model.path={folder} has no {CONFIG}, so it is no model folder of the transformers "
            "library. Try the folder that save_pretrained() wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Try a fresh copy of it.") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ModelError(
            f"{file} names no model_type, so it does not say which architecture it is of. "
            'Try adding e.g. "model_type": "llama".'
        )
    _refuse(found, file)
    return found


def _refuse(config: Mapping[str, Any], file: Path) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"{file} has auto_map: its network is Python code of its own, which is not run. "
            "Try a model whose architecture is part of the transformers library."
        )
    if "quantization_config" in config:
        raise ModelError(
            f"{file} has quantization_config: quantised weights cannot be trained. "
            "Try the unquantised model."
        )


def whole_number(config: Mapping[str, Any], names: Sequence[str], default: int | None) -> int:
    """A size, under the first of ``names`` that is there; null counts as not there.

    Raises:
        ModelError: It is missing without a default, or no whole number >= 1.
    """
    given = [(name, config[name]) for name in names if config.get(name) is not None]
    name, value = given[0] if given else (names[0], default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{CONFIG}: {name}={'missing' if value is None else value}: expected a whole number "
            f'>= 1. Try "{name}": 4.'
        )
    return value


def truth(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """A yes or no.

    Raises:
        ModelError: It is something else.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f'{CONFIG}: {name}={value}: expected true or false. Try "{name}": false.')
    return value
