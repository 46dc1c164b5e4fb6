"""``model.*`` as the transformer's shape."""

from __future__ import annotations

from launcher.config.workload import ModelConfig
from launcher.workloads.transformer_shape import TransformerShape


def transformer_shape(model: ModelConfig, vocab: int) -> TransformerShape:
    """The built-in transformer of these sizes; what is null takes its default.

    Args:
        model: Sizes.
        vocab: Used where ``model.vocab`` is left to the data.

    Raises:
        PlanError: The sizes do not fit together.
    """
    return TransformerShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn or 4 * model.hidden,
        vocab=model.vocab or vocab,
        sequence=model.sequence,
        norm=model.norm,
        activation=model.activation,
        position=model.position,
        tie_embeddings=model.tie_embeddings,
        dropout=model.dropout,
    )
