"""Named model shapes. Free of torch; ``conf/model/`` spells the same ones as YAML.

``tiny`` and ``small`` read bytes and are meant for a laptop. Published models keep their published
vocabulary; parameter counts are checked in the tests.
"""

from __future__ import annotations

from types import MappingProxyType

from launcher.workloads.transformer_shape import TransformerShape


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
