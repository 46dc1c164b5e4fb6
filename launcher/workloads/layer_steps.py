"""What the layers of the built-in transformer do, as far as keeping and recomputing go. Torch-free.

As torch 2.13 runs them on a CPU: RMSNorm as single operations, products without a bias followed by
a view in the same memory. The tests hold these lists to what the runtime keeps, family by family.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.workloads.transformer_shape import TransformerShape
from launcher.workloads.transformer_share import padded_vocab
from strategies.plan import Family

UNIT_TYPES = ("Embedding", "Attention", "Mlp", "SparseMlp", "Head")


def unit_steps(
    shape: TransformerShape, tp: int, *, sequence_parallel: bool = False
) -> dict[str, tuple[Step, ...]]:
    """Per type of unit what it does for one sequence, on one of ``tp`` ranks."""
    tokens = shape.sequence
    cut = Cut(
        tokens=tokens,
        rows=tokens // (tp if sequence_parallel else 1),
        hidden=shape.hidden,
        dropout=bool(shape.dropout),
        rms=shape.norm == "rmsnorm",
        biases=shape.biases,
    )
    ids = padded_vocab(shape.vocab, tp) // tp
    return {
        "Embedding": (
            Asked("ids", tokens),
            made("looked up", cut.stream, "activation"),
            *dropped(cut),
        ),
        "Attention": (
            *norm(cut, "in"),
            *_mixing(shape, cut, tp),
            product("branch", cut.stream, biases=cut.biases),
            *dropped(cut),
        ),
        "Mlp": (
            *norm(cut, "in"),
            *_inner(shape, cut, tp),
            product("branch", cut.stream, biases=cut.biases),
            *dropped(cut),
        ),
        "SparseMlp": (*norm(cut, "in"), *_experts(shape, tp), *dropped(cut)) if shape.moe else (),
        "Head": (*norm(cut, "in"), Asked("normed"), product("logits", tokens * ids, biases=False)),
    }


def unit_types(shape: TransformerShape) -> list[str]:
    """Of each unit, in execution order."""
    layers = [
        kind
        for layer in range(shape.layers)
        for kind in ("Attention", "SparseMlp" if layer in shape.moe_layers else "Mlp")
    ]
    return ["Embedding", *layers, "Head"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Sizes of what lies on the residual stream."""

    tokens: int  # of a sequence
    rows: int  # of them on this rank, between matrices
    hidden: int
    dropout: bool  # whether branches are dropped in training
    rms: bool  # RMSNorm, else LayerNorm
    biases: bool  # whether products with weights add one

    @property
    def stream(self) -> int:
        return self.rows * self.hidden


def made(name: str, elements: int, *families: str) -> Made:
    """An operation with one result and no products."""
    return Made(families, ((name, elements),))  # type: ignore[arg-type]


def product(name: str, elements: int, *, biases: bool, flops: float = 0.0) -> Made:
    """A product with a weight; without a bias a view of its result follows."""
    return Made(("matmul",) if biases else ("matmul", "activation"), ((name, elements),), flops)


def norm(cut: Cut, source: str, suffix: str = "") -> tuple[Step, ...]:
    """A norm in front of matrices; its result is ``normed``, which they gather where it is cut."""
    if not cut.rms:
        results = ((f"normed{suffix}", cut.stream), (f"mean{suffix}", cut.rows),
                   (f"deviation{suffix}", cut.rows))  # fmt: skip
        return (
            Asked(source, cut.stream), Made(("norm",), results),
            Asked(f"mean{suffix}"), Asked(f"deviation{suffix}"),
        )  # fmt: skip
    return root_mean_square(
        source, cut.stream, cut.rows, first=f"scaled{suffix}", result=f"normed{suffix}"
    )


def root_mean_square(
    source: str, elements: int, rows: int, *, first: str, result: str
) -> tuple[Step, ...]:
    scale = f"scale of {result}"
    return (
        Asked(source, elements),
        made(scale, rows, "norm"),
        Asked(scale),
        made(first, elements, "activation"),
        Asked(first),
        made(result, elements, "activation"),
    )


def dropped(cut: Cut, suffix: str = "") -> tuple[Step, ...]:
    """Dropout at the end of a branch: its mask is asked for."""
    return masked(f"mask{suffix}", cut.stream) if cut.dropout else ()


def masked(name: str, elements: int) -> tuple[Step, ...]:
    """A mask is drawn in place."""
    return (made(name, elements), Asked(name))


def _rotated(name: str, elements: int) -> tuple[Step, ...]:
    """Queries or keys turned by their positions; the tables are asked for."""
    return (Asked("cosines"), Asked("sines"), made(f"rotated {name}", elements, "activation"))


def scores(sources: tuple[str, str, str], mixed: int, sums: int, flops: float) -> tuple[Step, ...]:
    """The attention core as one kernel: its result and one number per token and head."""
    return (
        *map(Asked, sources),
        Made(("attention",), (("mixed", mixed), ("sums", sums)), flops),
        Asked("sums"),
        Asked("mixed"),
    )


def _mixing(shape: TransformerShape, cut: Cut, tp: int) -> tuple[Step, ...]:
    tokens = shape.sequence
    wide, narrow = tokens * shape.hidden // tp, tokens * shape.kv_hidden // tp
    per_feature = 2.0 * shape.hidden
    steps: list[Step] = []
    for name, size in (("query", wide), ("key", narrow), ("value", narrow)):
        flops = per_feature * size
        steps += [Asked("normed"), product(name, size, biases=cut.biases, flops=flops)]
    sources = ("key", "query", "value")
    if shape.position == "rope":
        tables = tokens * shape.head_size
        steps += [made("cosines", tables, "activation"), made("sines", tables, "activation")]
        steps += [*_rotated("query", wide), *_rotated("key", narrow)]
        sources = ("rotated key", "rotated query", "value")
    core = 4.0 * tokens * wide
    return (*steps, *scores(sources, wide, tokens * shape.heads // tp, core))


def _inner(shape: TransformerShape, cut: Cut, tp: int) -> tuple[Step, ...]:
    size = shape.sequence * shape.ffn // tp
    flops = 2.0 * shape.hidden * size
    up = product("up", size, biases=cut.biases, flops=flops)
    if shape.activation == "gelu":
        return (Asked("normed"), up, *_curved("up", size))
    gate = product("gate", size, biases=cut.biases, flops=flops)
    return (Asked("normed"), up, Asked("normed"), gate, *_gated("gate", "up", size))


def _curved(source: str, size: int, suffix: str = "") -> tuple[Step, ...]:
    """gelu, in front of a product."""
    result = f"curved{suffix}"
    return (Asked(source), made(result, size, "activation"), Asked(result))


def _gated(gate: str, up: str, size: int, suffix: str = "") -> tuple[Step, ...]:
    """swiglu, in front of a product."""
    curved, result = f"curved{suffix}", f"gated{suffix}"
    return (
        Asked(gate), made(curved, size, "activation"),
        Asked(up), Asked(curved), made(result, size, "activation"), Asked(result),
    )  # fmt: skip


def _experts(shape: TransformerShape, tp: int) -> tuple[Step, ...]:
    """Routing, experts and shared experts; the sum over experts and with the shared ones.

    Of ``tp`` ranks each routes all tokens, and computes the experts for its share of them.
    """
    moe = shape.moe
    assert moe is not None
    tokens = shape.sequence
    rows, width = tokens * moe.per_token, tokens * moe.per_token * shape.hidden
    inner, shared = rows * moe.ffn // tp, tokens * moe.shared * moe.ffn // tp
    gated = shape.activation == "swiglu"
    steps: list[Step] = [
        *_routing(shape),
        made("sorted", rows, "activation"), made("order", rows, "activation"), Asked("order"),
        made("rows", width // tp, "activation"), *_grouped("up", inner, shape.hidden, "rows"),
    ]  # fmt: skip
    if gated:
        steps += [*_grouped("gate", inner, shape.hidden, "rows"), *_gated("gate", "up", inner)]
    else:
        steps += _curved("up", inner)
    steps += [
        *_grouped("results", width // tp, moe.ffn, "gated" if gated else "curved"),
        made("places", rows), Asked("places"), made("picked", width, "activation"),
        Asked("picked"), Asked("weights"),
    ]  # fmt: skip
    if not shared:
        return tuple(steps)
    flops = 2.0 * shape.hidden * shared
    up = product("shared up", shared, biases=False, flops=flops)
    steps += [Asked("normed"), up]
    if gated:
        gate = product("shared gate", shared, biases=False, flops=flops)
        steps += [Asked("normed"), gate, *_gated("shared gate", "shared up", shared, " shared")]
    else:
        steps += _curved("shared up", shared, " shared")
    return (*steps, product("branch", tokens * shape.hidden, biases=False, flops=flops))


def _routing(shape: TransformerShape) -> tuple[Step, ...]:
    moe = shape.moe
    assert moe is not None
    tokens, scores = shape.sequence, shape.sequence * moe.experts
    chosen = tokens * moe.per_token
    steps: list[Step] = [
        Asked("normed"),
        product("logits", scores, biases=False, flops=2.0 * shape.hidden * scores),
        made("scores", scores, "attention" if moe.scores == "softmax" else "activation"),
        Asked("scores"),
    ]  # fmt: skip
    if moe.scores == "sigmoid":
        steps += [made("sum", tokens, "activation"), Asked("sum")]
    steps += [made("ids", chosen, "activation"), Asked("ids"), made("chosen", chosen, "activation")]
    if moe.normalised:
        steps += [Asked("chosen"), made("all", tokens, "activation"), Asked("all")]
    steps += [
        made("weights", chosen, "activation"),
        made("load", moe.experts), made("got", moe.experts, "activation"), Asked("got"),
        Asked("logits"), made("size", tokens, "activation"), Asked("size"),
    ]  # fmt: skip
    if moe.steering:
        steps += [made("all loads", moe.experts, "activation"), Asked("all loads")]
    return tuple(steps)


def _grouped(name: str, elements: int, inner: int, source: str) -> tuple[Step, ...]:
    """Products of each expert's rows, put together."""
    flops = 2.0 * inner * elements
    return (
        Asked(source),
        product(f"parts of {name}", elements, biases=True, flops=flops),
        made(name, elements, "activation"),
    )


# -------------------------------------------------------------------------------------------- kept
# The rule of ``strategies.models.selective.region``, on names and sizes instead of tensors: a
# result is kept if one of the operations that made it is; what a backward asks for and is not kept
# is computed again, by running the layer up to the last such tensor; products in front of that are
# kept even where no backward asks for them, so that they need not run again.


class Made(NamedTuple):
    """An operation."""

    # Of the operation, and of those that hand its result on in the same memory; none for what is
    # changed in place afterwards, which is always computed again.
    families: tuple[Family, ...]
    results: tuple[tuple[str, int], ...]  # (name, elements) of what it makes
    flops: float = 0.0  # of products


class Asked(NamedTuple):
    """A tensor that a backward asks for, at the time at which the forward hands it to autograd."""

    name: str  # of a result, or of what the layer is given
    elements: int = 0  # of what the layer is given; a result has its own


Step = Made | Asked


def kept(steps: Sequence[Step], recomputed: Collection[Family]) -> tuple[int, float]:
    """(elements that a layer keeps, FLOPs of products that it runs again)."""
    again = frozenset(recomputed)
    sizes: dict[str, int] = {}
    stays: dict[str, bool] = {}
    held: dict[str, int] = {}
    last = -1  # step that hands over the last tensor that is computed again
    for place, step in enumerate(steps):
        if isinstance(step, Made):
            for name, elements in step.results:
                sizes[name] = elements
                stays[name] = not again.issuperset(step.families)
        elif stays.get(step.name, True):
            held[step.name] = sizes.get(step.name, step.elements)
        else:
            last = place
    flops = 0.0
    for step in steps[: max(0, last)]:
        if isinstance(step, Made):
            family = step.families[0] if step.families else "activation"
            if family in again:
                flops += step.flops
            elif family == "matmul":
                held.update(step.results)
    return sum(held.values()), flops
