"""A small GPT on synthetic tokens, as ordinary layers that every engine cuts alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from strategies.plan import Plan
from strategies.schedules import find_schedule

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


class Share:
    """The model cut for a schedule: this rank's stages, and the batch; all stages if ``alone``."""

    def __init__(
        self, schedule: str, size: Size, num_microbatches: int, *, alone: bool = False
    ) -> None:
        self.schedule, self.size, self.num_microbatches = schedule, size, num_microbatches
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        found = find_schedule(schedule)
        shape = found.resolve(Plan(found.name, self.ranks, num_microbatches))
        placement = found.place(shape)
        self.num_stages = placement.num_stages
        self.owned = tuple(range(self.num_stages) if alone else placement.stages_of(self.rank))
        self.chunks = self.num_stages // self.ranks
        self.bounds = bounds(size, self.num_stages)
        self.batch, self.layers = batch(size, num_microbatches), layers(size)

    def stage(self, number: int) -> nn.Sequential:
        return nn.Sequential(*(self.layers[i] for i in self.bounds[number]))

    def microbatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokens, targets = (torch.split(tensor, self.size.rows) for tensor in self.batch)
        return zip(tokens, targets, strict=True)

    def weights(self) -> dict[int, Tensor]:
        """By layer, those of this rank."""
        return {i: _flat(self.layers[i]) for stage in self.owned for i in self.bounds[stage]}


def _flat(layer: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()]).clone()
