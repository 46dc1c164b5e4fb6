"""Which ``model.*`` keys go with which kind of model; the others would be ignored."""

from __future__ import annotations

from launcher.config.key import keys_of, shorten, spell
from launcher.config.workload import ModelConfig
from strategies.errors import PlanError

HUGGING_FACE = "hf"
_BOTH = ("name", "sequence")
_HUGGING_FACE_ONLY = ("path", "pretrained", "layers_path")


def check_model_keys(model: ModelConfig) -> None:
    """Refuses keys of the other kind.

    Raises:
        PlanError: Sizes for a model that has its own, or a folder for one that has none.
    """
    folder = model.name == HUGGING_FACE
    for entry in keys_of(ModelConfig, "model."):
        name = entry.path.removeprefix("model.")
        value = getattr(model, name)
        if name in _BOTH or value == entry.default or (name in _HUGGING_FACE_ONLY) == folder:
            continue
        given = f"{entry.path}={shorten(value)}"
        if folder:
            raise PlanError(
                f"{given} has no meaning with model=hf, whose sizes are those of config.json in "
                f"model.path. Try without {entry.path}."
            )
        raise PlanError(
            f"{given} belongs to model=hf, but model={shorten(model.name)}. "
            f"Try model=hf {entry.path}={spell(value)}."
        )
