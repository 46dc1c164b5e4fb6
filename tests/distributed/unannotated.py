"""Modules as people write them, none with a word about pipelines or about who holds what; fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

ROWS, STEPS = 8, 5
Batch = tuple[Tensor, ...]


class Module(pl.LightningModule):
    """A network, a loss of its outputs, and batches."""

    def __init__(
        self,
        net: nn.Module,
        make: Callable[[torch.Generator], Batch],
        loss: Callable[[Any, Tensor], Tensor] = functional.cross_entropy,
    ) -> None:
        super().__init__()
        self.net = net
        self._make = make
        self._loss = loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        *inputs, target = batch
        loss = self._loss(self.net(*inputs), target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        numbers = torch.Generator().manual_seed(3)
        columns = self._make(numbers)
        rows = [tuple(column[i] for column in columns) for i in range(ROWS * STEPS)]
        return DataLoader(rows, batch_size=ROWS)  # type: ignore[arg-type]


def _numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(ROWS * STEPS, *shape, generator=generator, dtype=torch.float64)


def _ids(generator: torch.Generator, most: int, *shape: int) -> Tensor:
    return torch.randint(most, (ROWS * STEPS, *shape), generator=generator)


def _of_classes(*shape: int, num: int = 5) -> Callable[[torch.Generator], Batch]:
    return lambda g: (_numbers(g, *shape), _ids(g, num))


def _per_token(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def mlp() -> Module:
    net = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 5)
    )
    return Module(net, _of_classes(6))


class _HardCoded(nn.Module):
    """Attention that views by its own number of heads, and splits at a width of its own."""

    mask: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.heads, self.width = heads, width
        self.register_buffer("mask", torch.tril(torch.ones(length, length))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        query, key, value = self.c_attn(x).split(self.width, dim=2)
        size = width // self.heads
        query = query.view(rows, length, self.heads, size).transpose(1, 2)
        key = key.view(rows, length, self.heads, size).transpose(1, 2)
        value = value.view(rows, length, self.heads, size).transpose(1, 2)
        scores = query @ key.transpose(-2, -1) / math.sqrt(size)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed = self.drop(scores.softmax(-1)) @ value
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(rows, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), _HardCoded(width, heads, length)
        self.between = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class _Gpt(nn.Module):
    def __init__(self, vocab: int = 17, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, 4, length) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt() -> Module:
    return Module(_Gpt(), lambda g: (_ids(g, 17, 8), _ids(g, 17, 8)), _per_token)


MODULES: dict[str, Callable[[], Module]] = {"mlp": mlp, "gpt": gpt}


def build(name: str) -> Module:
    torch.manual_seed(1)
    return MODULES[name]().double()
