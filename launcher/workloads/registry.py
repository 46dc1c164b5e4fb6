"""Models and data by name: the built-in ones, and those of other installed distributions.

A distribution adds its own through entry points (``foldpipe.models``, ``foldpipe.data``). Names are
looked up without importing anything, so a misspelt one is answered at once; only the chosen object
is loaded. Free of torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Literal

from launcher.config.decode import did_you_mean, nearest
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import DataError, ModelError, PipelineError

Group = Literal["foldpipe.models", "foldpipe.data"]

MODELS: Group = "foldpipe.models"
DATA: Group = "foldpipe.data"

_BUILT_IN: dict[Group, dict[str, str]] = {
    MODELS: {
        "transformer": "launcher.workloads.language_model:LanguageModel",
        "hf": "launcher.workloads.hf.hf_model:build",
    },
    DATA: {"text": "launcher.workloads.data.module:TextDataModule"},
}
_OPTION: dict[Group, str] = {MODELS: "model", DATA: "data"}
_ERROR: dict[Group, type[PipelineError]] = {MODELS: ModelError, DATA: DataError}


def names(group: Group) -> tuple[str, ...]:
    """All names of a group, sorted; nothing is imported."""
    return tuple(sorted({*_BUILT_IN[group], *(point.name for point in entry_points(group=group))}))


def find(group: Group, name: str, *, also: Iterable[str] = ()) -> EntryPoint:
    """The entry point behind ``name``, not loaded.

    Args:
        group: Models or data.
        name: What was asked for.
        also: Names that are valid elsewhere (the YAML files of the group), for the suggestions.

    Raises:
        ModelError: No model of that name, or several distributions offer different ones.
        DataError: The same for data.
    """
    error = _ERROR[group]
    if name in _BUILT_IN[group]:
        return EntryPoint(name, _BUILT_IN[group][name], group)
    # Two installations of one distribution list the same object twice.
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if len(found) == 1:
        return next(iter(found.values()))
    option = _OPTION[group]
    if found:
        raise error(
            f"{option}={name} is ambiguous: installed packages offer {' and '.join(sorted(found))} "
            f"under that name (entry points {group}). Try `pip uninstall` of one of them."
        )
    known = sorted({*names(group), *also})
    close = did_you_mean(f"{option}={match}" for match in nearest(name, known))
    raise error(
        f"{option}={name} is unknown.{close} Known: {', '.join(known)}. A package of yours adds "
        f"names through entry points in the group {group}; try `pip install` of that package."
    )


def load(group: Group, name: str, *, also: Iterable[str] = ()) -> Callable[..., Any]:
    """Imports what ``find`` finds: a class or function that builds the model or data module.

    Raises:
        ModelError: It is unknown, cannot be imported, or cannot be called.
        DataError: The same for data.
    """
    point = find(group, name, also=also)
    option, error = _OPTION[group], _ERROR[group]
    try:
        loaded = point.load()
    except Exception as reason:  # whatever a stranger's module does when it is imported
        raise error(
            f"{option}={name} is {point.value} (entry point in {group}), which cannot be loaded: "
            f"{type(reason).__name__}: {reason}. Try `python -c 'import {point.module}'`."
        ) from reason
    if not callable(loaded):
        raise error(
            f"{option}={name} is {point.value} (entry point in {group}), an object of "
            f"type {type(loaded).__name__}, but must be a class or function that builds it. "
            f"Try a function in {point.module}."
        )
    return loaded  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------- presets
#
# Named model shapes. Free of torch; ``conf/model/`` spells the same ones as YAML.
#
# ``tiny`` and ``small`` read bytes and are meant for a laptop. Published models keep their
# published vocabulary; parameter counts are checked in the tests.


def _gpt(layers: int, hidden: int, heads: int, sequence: int) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocab=50257,
        sequence=sequence,
        norm="layernorm",
        activation="gelu",
        position="learned",
        tie_embeddings=True,
    )


def _llama(layers: int, hidden: int, heads: int, ffn: int, sequence: int) -> TransformerShape:
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        vocab=32000,
        sequence=sequence,
    )


PRESETS: MappingProxyType[str, TransformerShape] = MappingProxyType(
    {
        # Enough units (2 * 6 + 2) for 4 ranks with 3 stages each.
        "tiny": TransformerShape(
            layers=6, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=256, sequence=128
        ),
        "small": TransformerShape(
            layers=12, hidden=384, heads=6, kv_heads=6, ffn=1024, vocab=256, sequence=256
        ),
        "gpt2_124m": _gpt(layers=12, hidden=768, heads=12, sequence=1024),
        # The papers that use "GPT3-1.6B" give no shape; this one keeps heads of 96 and tp=2,4,8.
        "gpt3_1_6b": _gpt(layers=24, hidden=2304, heads=24, sequence=2048),
        "gpt3_6_7b": _gpt(layers=32, hidden=4096, heads=32, sequence=2048),
        "gpt3_13b": _gpt(layers=40, hidden=5120, heads=40, sequence=2048),
        "gpt3_175b": _gpt(layers=96, hidden=12288, heads=96, sequence=2048),
        # LLaMA 2 has no 3B; this is OpenLLaMA 3B's shape.
        "llama2_3b": _llama(layers=26, hidden=3200, heads=32, ffn=8640, sequence=4096),
        "llama2_7b": _llama(layers=32, hidden=4096, heads=32, ffn=11008, sequence=4096),
        "llama2_13b": _llama(layers=40, hidden=5120, heads=40, ffn=13824, sequence=4096),
        # The example command line in the description of Fold3D and FoldX.
        "fold_example": _llama(layers=30, hidden=6656, heads=52, ffn=17920, sequence=2048),
    }
)
