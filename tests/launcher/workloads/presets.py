"""The shapes that conf/model/ names, as the launcher makes them of the files."""

from __future__ import annotations

import yaml  # type: ignore[import-untyped]

from launcher.compose.option_groups import conf_dir
from launcher.config import from_dict
from launcher.config.derived import transformer_shape
from launcher.workloads.transformer_shape import TransformerShape

_NO_SIZES = ("hf", "class")
PRESETS = sorted(
    path.stem for path in (conf_dir() / "model").glob("*.yaml") if path.stem not in _NO_SIZES
)
BYTES = 256  # token ids of the data where a file leaves them to the data


def preset(name: str) -> TransformerShape:
    text = (conf_dir() / "model" / f"{name}.yaml").read_text(encoding="ascii")
    return transformer_shape(from_dict({"model": yaml.safe_load(text)}).model, BYTES)
