"""A small GPT on synthetic tokens, as ordinary layers that every engine cuts alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

RATE = 0.1


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of its batches.

    Attributes:
        blocks: Transformer blocks; an even number of them per rank and virtual stage.
        hidden: Its width; the feed-forward layer is four times as wide.
        sequence: Tokens of a sequence.
        vocab: Different tokens.
        rows: Sequences of a microbatch.
    """

    blocks: int = 8
    hidden: int = 256
    sequence: int = 128
    vocab: int = 1024
    rows: int = 2


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm; ``[rows, sequence, hidden]``."""

    def __init__(self, hidden: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        inner: Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + inner


def layers(size: Size) -> list[nn.Module]:
    """The whole model, the same weights each time: embedding, blocks, norm, and head."""
    torch.manual_seed(0)
    blocks = [Block(size.hidden) for _ in range(size.blocks)]
    head = nn.Linear(size.hidden, size.vocab, bias=False)
    return [nn.Embedding(size.vocab, size.hidden), *blocks, nn.LayerNorm(size.hidden), head]


def bounds(size: Size, stages: int) -> list[range]:
    """Which layers each stage has: blocks evenly, what is around them at the ends."""
    each, last = size.blocks // stages, stages - 1
    return [
        range(1 + s * each if s else 0, size.blocks + 3 if s == last else 1 + (s + 1) * each)
        for s in range(stages)
    ]


def batch(size: Size, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Tokens and what is to come, ``[num_microbatches * rows, sequence]`` each."""
    generator = torch.Generator().manual_seed(1)
    shape = (num_microbatches * size.rows, size.sequence)
    tokens = torch.randint(size.vocab, shape, generator=generator)
    return tokens, torch.randint(size.vocab, shape, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)
