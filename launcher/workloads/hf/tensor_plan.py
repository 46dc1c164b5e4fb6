"""How layers of the transformers library are cut over tensor-parallel ranks: by its own plans."""

from __future__ import annotations

from typing import Any

from torch import nn

from launcher.workloads.hf.shape import EMBEDDING, HEAD, NETWORK, HfShape
from launcher.workloads.hf.skeleton import Skeleton
from strategies.errors import ModelError
from strategies.runtime.tensor_parallel.styles import Column, Row, Style, Vocabulary, read_style

_LISTED = "layers.*."


def library_plan(skeleton: Skeleton, shape: HfShape) -> dict[str, Style]:
    """Module names of ``HfLanguageModel`` to styles; embedding and head are cut by token ids.

    Raises:
        ModelError: The library has no plan for this architecture, or one that is not known here.
    """
    config: Any = skeleton.model.config.get_text_config()
    given = getattr(config, "base_model_tp_plan", None)
    own = {key: word for key, word in (given or {}).items() if key.startswith(_LISTED)}
    if not own:
        raise ModelError(
            f"model.path={shape.folder}: the transformers library has no tensor-parallel plan for "
            f"model_type={shape.model_type}. Try tp=1 and a larger pp."
        )
    head = getattr(config, "head_dim", None) or shape.hidden // config.num_attention_heads
    layers = f"{NETWORK}layers.*.{skeleton.layers_path}.*."
    plan: dict[str, Style] = {}
    for key, word in own.items():
        name = key.removeprefix(_LISTED)
        style = read_style(key, word)
        if "attn" in name and isinstance(style, Column | Row):
            # Heads stay whole.
            style = Column(head, style.gather) if isinstance(style, Column) else Row(head)
        plan[layers + name] = style
    ends = ((EMBEDDING, skeleton.embedding, nn.Embedding), (HEAD, skeleton.head, nn.Linear))
    for unit, names, kind in ends:
        for name in names:
            part = skeleton.model.get_submodule(name)
            if isinstance(part, kind) and part.weight.shape[0] == shape.vocab:
                plan[f"{unit}.{name}"] = Vocabulary()
    return plan
