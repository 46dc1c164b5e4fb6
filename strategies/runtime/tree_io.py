"""Nested state as tensors and JSON: nothing in a checkpoint is ever unpickled.

Tensors go into a flat mapping under numbered keys; the tree around them is JSON in which a tagged
object stands for what JSON lacks (tensors, tuples, dicts with keys that are no strings).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strategies.errors import CheckpointError

_TAG = "__kind__"


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Splits nested state into a JSON-ready tree and its tensors.

    Raises:
        CheckpointError: The state holds an object that is neither plain data nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(tree, tensors, "checkpoint"), tensors


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``flatten``; tensors that are not in the mapping become None."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_TAG)
    if kind is None:
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    value = tree["value"]
    if kind == "tensor":
        return tensors.get(value)
    if kind == "float":
        return float(value)
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind == "dict":
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value}
    raise CheckpointError(f"the checkpoint holds an unknown kind of value: {kind!r}.")


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        key = f"t{len(tensors)}"
        tensors[key] = value.detach()
        return {_TAG: "tensor", "value": key}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": value.hex()}
    if isinstance(value, tuple):
        items = [_encode(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
        return {_TAG: "tuple", "value": items}
    if isinstance(value, list):
        return [_encode(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: _encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
        pairs = [
            [_encode(k, tensors, path), _encode(v, tensors, f"{path}.{k}")]
            for k, v in value.items()
        ]
        return {_TAG: "dict", "value": pairs}
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors, path)
    if isinstance(value, torch.dtype):
        return str(value)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, "
        "numbers, text, lists and dicts are written (nothing is ever unpickled). Return plain data "
        "from on_save_checkpoint() or state_dict()."
    )
