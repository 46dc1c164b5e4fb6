"""Which kernels the units of a transformer are on a GPU: products, attention cores, what moves.

Per unit and microbatch, on one of ``tp`` ranks: heads, inner width and vocabulary are cut; norms,
dropout and residual sums are whole on every rank, unless activations are cut along the sequence.
Elements are those of kernels as a GPU runs them: a norm, an activation and its bias, dropout with
the residual sum are one kernel each. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.model_share import ModelShape
from launcher.workloads.transformer_shape import MoeShape, TransformerShape
from launcher.workloads.transformer_share import padded_vocab
from strategies.costs.kernels import Attention, Core, Product, Work
from strategies.plan import Family


def unit_works(
    shape: ModelShape,
    tp: int,
    microbatch_size: int,
    *,
    sequence_parallel: bool = False,
    attention: Attention = "fused",
) -> tuple[Work, ...]:
    """The different units: embedding, attention, MLP and head; of model=hf whole layers between.

    With experts all units, as layers differ.
    """
    cut = _cut(shape, tp, microbatch_size, sequence_parallel=sequence_parallel)
    kind = attention
    if isinstance(shape, HfShape) and attention == "unfused_dropout":
        assert shape.sizes is not None
        kind = attention if shape.sizes.attention_dropout else "unfused"
    layer = (_attention(cut, kind), _mlp(cut))
    middle: tuple[Work, ...] = (_joined(*layer),) if isinstance(shape, HfShape) else layer
    if isinstance(shape, TransformerShape) and shape.moe is not None:
        attending, mlp, sparse = *layer, _sparse(cut, shape.moe, tp)
        kinds = [sparse if n in shape.moe_layers else mlp for n in range(shape.layers)]
        middle = tuple(work for kind in kinds for work in (attending, kind))
    return (_embedding(cut), *middle, _head(cut))


def update_products(shape: ModelShape, ns_steps: int) -> tuple[tuple[Product, ...], ...]:
    """What Muon computes of the matrices of each unit, as ``unit_works`` has units; tp=1.

    A Newton-Schulz step of X, turned so that it has no more rows than columns, makes X X', its
    square, and that times X. Experts are tensors of three dimensions, and no matrices; embedding
    and head are AdamW's.
    """
    cut = _cut(shape, 1, 1, sequence_parallel=False)
    fused = isinstance(shape, HfShape) and not cut.gated  # queries, keys and values in one matrix
    heads = (cut.queries + 2 * cut.keys,) if fused else (cut.queries, cut.keys, cut.keys)
    attention = (*((cut.hidden, width) for width in heads), (cut.hidden, cut.queries))
    mlp = ((cut.hidden, cut.inner),) * (3 if cut.gated else 2)
    middle: tuple[tuple[tuple[int, int], ...], ...] = (attention, mlp)
    if isinstance(shape, HfShape):
        middle = (attention + mlp,)
    elif isinstance(shape, TransformerShape) and shape.moe is not None:
        moe = shape.moe
        shared = ((cut.hidden, moe.shared * moe.ffn),) * (3 if cut.gated else 2)
        sparse = ((cut.hidden, moe.experts), *(shared if moe.shared else ()))
        kinds = [sparse if n in shape.moe_layers else mlp for n in range(shape.layers)]
        middle = tuple(matrices for kind in kinds for matrices in (attention, kind))
    computed = (
        tuple(product for sizes in matrices for product in _orthogonalised(*sizes))
        for matrices in middle
    )
    return ((), *(products * ns_steps for products in computed), ())


def _orthogonalised(rows: int, columns: int) -> tuple[Product, Product, Product]:
    few, many = sorted((rows, columns))
    return Product(few, few, many), Product(few, few, few), Product(few, many, few)


def computing_again(work: Work, families: tuple[Family, ...], flops: float) -> Work:
    """The same where a backward computes families of operations again, ``flops`` of products."""
    core = 0.0 if work.core is None else work.core.flops
    again_core = "attention" in families and 0 < core <= flops
    rest = flops - core if again_core else flops
    products = sum(product.flops for product in (*work.products, *work.experts))
    moves = "norm" in families or "activation" in families
    return replace(
        work,
        again_core=again_core,
        again_products=min(1.0, max(0.0, rest / products)) if products else 0.0,
        # Of these the residual sum alone is not needed again, and the loss.
        again_elements=(work.forward_elements - work.loss_elements) // 2 if moves else 0,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Widths of what one rank has, and the tokens of a microbatch."""

    sequences: int
    sequence: int
    stream: int  # elements between matrices, on this rank
    hidden: int
    queries: int
    keys: int
    heads: int
    head_size: int
    inner: int
    ids: int
    gated: bool
    turned: bool  # queries and keys, by their positions
    biases: bool
    dropout: bool

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence


def _cut(shape: ModelShape, tp: int, sequences: int, *, sequence_parallel: bool) -> _Cut:
    if isinstance(shape, HfShape):
        sizes = shape.sizes
        assert sizes is not None
        hidden, heads, kv_heads = sizes.hidden, sizes.heads, sizes.kv_heads
        head_size, gated, biases = sizes.head_size, sizes.kind == "llama", sizes.mlp_bias
        turned, dropout = sizes.kind == "llama", sizes.residual_dropout
        inner, vocab = sizes.ffn, sizes.vocab
    else:
        hidden, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
        head_size, gated = shape.head_size, shape.activation == "swiglu"
        biases, turned, dropout = shape.biases, shape.position == "rope", bool(shape.dropout)
        inner, vocab = shape.ffn, shape.vocab
    rows = sequences * shape.sequence // (tp if sequence_parallel else 1)
    return _Cut(
        sequences=sequences,
        sequence=shape.sequence,
        stream=rows * hidden,
        hidden=hidden,
        queries=heads * head_size // tp,
        keys=kv_heads * head_size // tp,
        heads=heads // tp,
        head_size=head_size,
        inner=inner // tp,
        ids=padded_vocab(vocab, tp) // tp,
        gated=gated,
        turned=turned,
        biases=biases,
        dropout=dropout,
    )


def _embedding(cut: _Cut) -> Work:
    whole, dropped = cut.tokens * cut.hidden, cut.stream * 5 // 2 if cut.dropout else 0
    return Work(
        forward_elements=2 * whole + dropped,
        backward_elements=3 * whole + dropped,
        forward_kernels=3,
        backward_kernels=3,
    )


def _branch(cut: _Cut) -> tuple[int, int]:
    """Elements of a norm, dropout and the residual sum, in a forward and a backward.

    A norm reads and writes; its backward reads gradient and input twice, for the input's gradient
    and the parameters', and writes one. The sum reads two and writes one, whichever way.
    """
    forward, backward = (2 + 3) * cut.stream, (5 + 3) * cut.stream
    if cut.dropout:  # with a mask of a byte, beside the sum, or in a kernel of its own
        forward += cut.stream // 2
        backward += cut.stream * 5 // 2
    if cut.biases:  # the gradient of the last one
        backward += cut.stream
    return forward, backward


def _attention(cut: _Cut, kind: Attention) -> Work:
    forward, backward = _branch(cut)
    wide = cut.tokens * (cut.queries + 2 * cut.keys)
    around = 0
    if cut.turned:
        around += 4 * cut.tokens * (cut.queries + cut.keys)
    if kind != "fused":  # into the order of batched products, and back
        around += 2 * (wide + cut.tokens * cut.queries)
    products = (
        Product(cut.tokens, cut.queries + 2 * cut.keys, cut.hidden),
        Product(cut.tokens, cut.hidden, cut.queries),
    )
    return Work(
        products=products,
        core=Core(cut.sequences * cut.heads, cut.sequence, cut.head_size, kind),
        forward_elements=forward + around,
        backward_elements=backward + around + (wide if cut.biases else 0),
        forward_kernels=6,
        backward_kernels=10,
        weights=sum(product.columns * product.inner for product in products),
    )


def _mlp(cut: _Cut) -> Work:
    forward, backward = _branch(cut)
    width = cut.tokens * cut.inner
    products = (
        Product(cut.tokens, cut.inner * (2 if cut.gated else 1), cut.hidden),
        Product(cut.tokens, cut.hidden, cut.inner),
    )
    # gelu: in, out; backward: both gradients and the input. swiglu: as two kernels.
    forward += (5 if cut.gated else 2) * width
    backward += (8 if cut.gated else 3) * width + (width if cut.biases else 0)
    return Work(
        products=products,
        forward_elements=forward,
        backward_elements=backward,
        forward_kernels=4,
        backward_kernels=8,
        weights=sum(product.columns * product.inner for product in products),
    )


# Elements that move per choice of an expert and element of its token, in a forward and a backward:
# copied, sorted, and back, each read and written; then weighted and summed.
SORTING = (9, 10)


def _sparse(cut: _Cut, moe: MoeShape, tp: int) -> Work:
    """Router, sorting, experts in groups of the mean size, the weighted sum; the shared ones.

    Of ``tp`` ranks each computes the experts for its share of the tokens.
    """
    forward, backward = _branch(replace(cut, biases=False))
    rows, shared = cut.tokens * moe.per_token // tp, moe.shared * moe.ffn // tp
    group = max(1, rows // moe.experts)
    joined = moe.ffn * (2 if cut.gated else 1)
    products = [Product(cut.tokens, moe.experts, cut.hidden)]
    if shared:
        products += [
            Product(cut.tokens, shared * (2 if cut.gated else 1), cut.hidden),
            Product(cut.tokens, cut.hidden, shared),
        ]
    sorting, sorting_back = (n * rows * cut.hidden for n in SORTING)
    width = rows * moe.ffn + cut.tokens * shared
    scores = cut.tokens * moe.experts
    forward += sorting + (5 if cut.gated else 2) * width + 8 * scores
    backward += sorting_back + (8 if cut.gated else 3) * width + 8 * scores
    return Work(
        products=tuple(products),
        experts=(
            Product(group, joined, cut.hidden, batch=moe.experts),
            Product(group, cut.hidden, moe.ffn, batch=moe.experts),
        ),
        forward_elements=forward,
        backward_elements=backward,
        forward_kernels=30,
        backward_kernels=40,
        weights=sum(product.columns * product.inner for product in products),
    )


def _head(cut: _Cut) -> Work:
    """The loss works in 32 bits: logits are cast, exponentiated, summed; and back."""
    logits = cut.tokens * cut.ids
    return Work(
        products=(Product(cut.tokens, cut.ids, cut.hidden),),
        forward_elements=2 * cut.stream + 6 * logits,
        loss_elements=6 * logits,
        backward_elements=5 * cut.stream + 5 * logits,
        forward_kernels=6,
        backward_kernels=6,
        weights=cut.ids * cut.hidden,
    )


def _joined(first: Work, second: Work) -> Work:
    return Work(
        products=first.products + second.products,
        core=first.core,
        forward_elements=first.forward_elements + second.forward_elements,
        backward_elements=first.backward_elements + second.backward_elements,
        forward_kernels=first.forward_kernels + second.forward_kernels,
        backward_kernels=first.backward_kernels + second.backward_kernels,
        weights=first.weights + second.weights,
    )
