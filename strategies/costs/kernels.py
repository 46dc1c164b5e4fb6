"""How long the kernels of a unit take on a GPU: from their sizes and a handful of figures.

A share of the peak that holds for every size is wrong twice: products of few rows leave
multiprocessors idle, and what is no product (norms, activations, dropout, the scores of an unfused
attention, sums of gradients) is bound by memory, however fast products are. Here

- a product of (rows, columns, inner) is cut into tiles that multiprocessors compute in whole
  waves; the tile that is done first counts, as libraries choose it;
- everything else moves its elements at the bandwidth that kernels reach;
- an attention core is one kernel that skips what the mask hides, or several that write and read
  all scores;
- each kernel takes a fixed time to start.

Which kernels a unit has, ``launcher.workloads.unit_kernels`` says; a card's figures, and where they
come from, stand in its file under ``conf/hardware``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

from strategies.costs.hardware import ElementSizes, Hardware, NumberFormat

# As one kernel, or as several that keep all scores, with dropout on them or without.
Attention = Literal["fused", "unfused", "unfused_dropout"]


class Product(NamedTuple):
    """[rows, inner] x [inner, columns], ``batch`` times over."""

    rows: int
    columns: int
    inner: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.batch


class Core(NamedTuple):
    """An attention's scores and their sum over the values, causal.

    Attributes:
        batch: Sequences times heads.
        tokens: Of a sequence.
        kind: How it is computed.
    """

    batch: int
    tokens: int
    head_size: int
    kind: Attention = "fused"

    @property
    def flops(self) -> float:
        """Of a forward, as if nothing were masked."""
        return 4.0 * self.batch * self.tokens * self.tokens * self.head_size

    @property
    def kept_elements(self) -> int:
        """Scores, from forward to backward; dropped ones too, and a mask of bytes."""
        scores = self.batch * self.tokens * self.tokens
        return {"fused": 0, "unfused": scores, "unfused_dropout": scores * 5 // 2}[self.kind]


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels of one unit, for one microbatch on one rank.

    Attributes:
        products: With weights, of a forward; a backward has two of each.
        experts: The same of experts, as many at a time as a rank has of them (``batch``).
        core: Of the attention, where there is one.
        forward_elements: Read and written by all other kernels of a forward.
        loss_elements: Of them those of a loss, which is no layer.
        backward_elements: The same of a backward.
        forward_kernels: How many those are.
        backward_kernels: The same of a backward.
        weights: Parameters whose gradients a backward adds to their sums, beside those of experts.
        again_core: Whether a backward computes the core again.
        again_elements: Of what else it computes again, and is no product.
        again_products: Share of the products that it computes again.
    """

    products: tuple[Product, ...] = ()
    experts: tuple[Product, ...] = ()
    core: Core | None = None
    forward_elements: int = 0
    loss_elements: int = 0
    backward_elements: int = 0
    forward_kernels: int = 0
    backward_kernels: int = 0
    weights: int = 0
    again_core: bool = False
    again_elements: int = 0
    again_products: float = 0.0

    def spread(self, ranks: int, imbalance: float) -> Work:
        """Of the fullest of so many ranks that share out the experts.

        Each has its part of them and of their gradients, and the tokens of all ranks for these.
        """
        if ranks == 1 or not self.experts:
            return self
        mine = tuple(
            p._replace(rows=ceil(p.rows * ranks * imbalance), batch=max(1, p.batch // ranks))
            for p in self.experts
        )
        return replace(self, experts=mine)


class Seconds(NamedTuple):
    """Of a unit or a stage: F, the inputs' half of B, the weights' half, what B computes again."""

    forward: float
    inputs: float
    weights: float
    again: float


@lru_cache(maxsize=65536)
def unit_seconds(
    work: Work, hardware: Hardware, sizes: ElementSizes, number_format: NumberFormat
) -> Seconds:
    """Of a unit: by a card's multiprocessors, or where it says none, by FLOPs and bytes alone."""
    card = _Card(hardware, number_format, sizes.activation)
    products = (*work.products, *work.experts)
    forward = sum(map(card.product, products))
    inputs = sum(card.product(p._replace(columns=p.inner, inner=p.columns)) for p in products)
    weights = sum(card.product(p._replace(rows=p.inner, inner=p.rows)) for p in products)
    summing = work.weights + sum(p.columns * p.inner * p.batch for p in work.experts)
    core, core_back = (0.0, 0.0) if work.core is None else card.core(work.core)
    # Mixed precision reads the weights and writes them in the smaller type.
    cast = sizes.weight + sizes.activation if sizes.weight > sizes.activation else 0
    # A product adds to a wider sum as it goes: reads and writes it. To one of its own type a tensor
    # is added that it has written first.
    summed = 2 * sizes.gradient
    if sizes.gradient == sizes.activation < 4:
        summed += 2 * sizes.activation
    return Seconds(
        forward
        + core
        + card.moving(work.forward_elements, work.forward_kernels)
        + summing * cast / card.bandwidth,
        inputs + core_back + card.moving(work.backward_elements, work.backward_kernels),
        weights + summing * summed / card.bandwidth,
        card.moving(work.again_elements, 0)
        + work.again_products * forward
        + (core if work.again_core else 0.0),
    )


@lru_cache(maxsize=65536)
def product_seconds(product: Product, hardware: Hardware, number_format: NumberFormat) -> float:
    """Of one product with operands of two bytes, as optimizers have them.

    A card without a peak for the number format converts, and computes in 32 bits.
    """
    known = number_format in hardware.named_peaks() or hardware.peak_flops is not None
    return _Card(hardware, number_format if known else "fp32", 2).product(product)


def memory_bound(hardware: Hardware, num_bytes: float) -> float:
    """Seconds of reading and writing so many bytes."""
    return num_bytes / (hardware.memory_bandwidth * hardware.bandwidth_efficiency)


# ------------------------------------------------------------------------------------------- cards

# Rows and columns of a tile, and the share of the largest tile's speed that it reaches: the smaller
# it is, the more often operands are read.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.94),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.65),
)
# Filling and emptying a tile's pipeline takes as long as so many steps of the inner dimension.
_FILLING = 128
# Rows in memory that are no multiple of a cache line are read in parts (NVIDIA's guide to matrix
# products shows a fifth less on A100).
_LINE_BYTES = 128
_UNALIGNED = 1.25
# Elements that move per score. Softmax reads and writes them, its backward reads two and writes
# one; dropout, either way, reads, writes, and has a mask of a byte. It draws random numbers, too,
# which takes as long as another element.
_SOFTMAX = (2.0, 3.0)
_DROPOUT = 3.5
# A fused core skips what a causal mask hides, half of all; its backward computes scores again.
_CAUSAL = 0.5
_FUSED_BACKWARD = 2.5


class _Card:
    """A card's figures, for one number format."""

    def __init__(self, hardware: Hardware, number_format: NumberFormat, size: int) -> None:
        peak = hardware.peak(number_format)
        self.num_sms = hardware.num_sms
        self.reached_flops = peak * hardware.efficiency
        self.fused_flops = peak * hardware.attention_efficiency
        self.bandwidth = hardware.memory_bandwidth * hardware.bandwidth_efficiency
        self.start_s = hardware.kernel_overhead_s
        self.size = size

    def product(self, product: Product) -> float:
        """By the best tile, or the time of moving both operands and the result."""
        rows, columns, inner, batch = product
        elements = batch * (rows * (inner + columns) + inner * columns)
        moving = elements * self.size / self.bandwidth
        if self.num_sms is None:
            return max(product.flops / self.reached_flops, moving) + self.start_s
        waves = min(
            -(-(-(-rows // high) * -(-columns // wide) * batch) // self.num_sms)
            * (high * wide / share)
            for high, wide, share in _TILES
        )
        computing = 2.0 * waves * (inner + _FILLING) * self.num_sms / self.reached_flops
        if columns * self.size % _LINE_BYTES or inner * self.size % _LINE_BYTES:
            computing *= _UNALIGNED
        return max(computing, moving) + self.start_s

    def moving(self, elements: float, kernels: int) -> float:
        return elements * self.size / self.bandwidth + kernels * self.start_s

    def core(self, core: Core) -> tuple[float, float]:
        """(forward, backward)."""
        if core.kind == "fused":
            took = _CAUSAL * core.flops / self.fused_flops
            return took + self.start_s, _FUSED_BACKWARD * took + self.start_s
        batch, tokens, head, kind = core
        scores = batch * tokens * tokens
        both = self.product(Product(tokens, tokens, head, batch)) + self.product(
            Product(tokens, head, tokens, batch)
        )
        dropped = _DROPOUT if kind == "unfused_dropout" else 0.0
        forward, backward = (self.moving(scores * (n + dropped), 2) for n in _SOFTMAX)
        return both + forward, 2 * both + backward
