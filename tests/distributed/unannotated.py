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

ROWS, STEPS = 8, 3
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


def vgg() -> Module:
    """Small images, many classes: nearly all weights are the last layer's."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(16, 1001),
    )
    return Module(net, _of_classes(1, 8, 8, num=1001))


class _Residual(nn.Module):
    def __init__(self, given: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or given != width:
            conv = nn.Conv2d(given, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet() -> Module:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        _Residual(4, 4),
        _Residual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return Module(net, _of_classes(1, 8, 8))


class _Double(nn.Sequential):
    def __init__(self, given: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(given, width, 3, padding=1),
            nn.GroupNorm(2, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.SiLU(),
        )


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _Double(1, 4), _Double(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = _Double(8, 4)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        return self.last(self.join(torch.cat([first, self.up(second)], 1)))


def unet() -> Module:
    return Module(
        _UNet(), lambda g: (_numbers(g, 1, 8, 8), _numbers(g, 1, 8, 8)), functional.mse_loss
    )


class _Vit(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 32, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


def vit() -> Module:
    return Module(_Vit(), _of_classes(1, 8, 8))


class _Translator(nn.Module):
    def __init__(self, vocab: int = 17, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.body = nn.Transformer(width, 4, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.body(self.source(source), self.target(target), tgt_mask=mask))


def encoder_decoder() -> Module:
    return Module(
        _Translator(), lambda g: (_ids(g, 17, 6), _ids(g, 17, 5), _ids(g, 17, 5)), _per_token
    )


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100 + 10 * i, 8) for i in range(3))
        self.bag = nn.EmbeddingBag(50, 8, mode="mean")
        self.dense = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, ids: Tensor, words: Tensor) -> Tensor:
        found = [self.dense(numbers), self.bag(words)]
        found += [table(ids[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(found, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([found[0], products[:, rows, columns]], 1)).squeeze(1)


def recommender() -> Module:
    def make(g: torch.Generator) -> Batch:
        clicked = _ids(g, 2).double()
        return _numbers(g, 4), _ids(g, 100, 3), _ids(g, 50, 4), clicked

    return Module(_Recommender(), make, functional.binary_cross_entropy_with_logits)


class _Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Grouped(nn.Module):
    """A Llama's attention with fewer heads of keys and values, and rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = x.shape
        query = self.q_proj(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        key = self.k_proj(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2)
        value = self.v_proj(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        times = self.heads // self.kv_heads
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, width))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class _LlamaLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = _Rms(width), _Grouped(width, 4, 2)
        self.norm2 = _Rms(width)
        self.gate = nn.Linear(width, 40, bias=False)
        self.up = nn.Linear(width, 40, bias=False)
        self.down = nn.Linear(40, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class _Llama(nn.Module):
    def __init__(self, vocab: int = 33, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(_LlamaLayer(width) for _ in range(2))
        self.norm, self.head = _Rms(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1]).double()[:, None] * torch.tensor([1.0, 0.1]).double()
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def llama() -> Module:
    return Module(_Llama(), lambda g: (_ids(g, 33, 8), _ids(g, 33, 8)), _per_token)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.body = kind(8, 12, 2, batch_first=True)
        self.wide, self.head = nn.Linear(12, 32), nn.Linear(32, 17)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.body(self.embed(ids))
        return self.head(torch.tanh(self.wide(out)))


def lstm() -> Module:
    return Module(_Recurrent(nn.LSTM), lambda g: (_ids(g, 17, 6), _ids(g, 17, 6)), _per_token)


def gru() -> Module:
    return Module(_Recurrent(nn.GRU), lambda g: (_ids(g, 17, 6), _ids(g, 17, 6)), _per_token)


def conv1d() -> Module:
    net = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding="same"),
        nn.InstanceNorm1d(8, affine=True),
        nn.GELU(),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.PReLU(8),
        nn.Conv1d(8, 4, 1),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.Linear(4 * 5, 5),
    )
    return Module(net, _of_classes(3, 12))


class _Mixing(nn.Module):
    """An MLP across places, then one across channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 12), nn.GELU(), nn.Linear(12, places))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mixer() -> Module:
    net = nn.Sequential(
        nn.Linear(3, 8), _Mixing(6, 8), _Mixing(6, 8), nn.LayerNorm(8), _Mean(), nn.Linear(8, 5)
    )
    return Module(net, _of_classes(6, 3))


class _Autoencoder(nn.Module):
    """A variational one, that draws between encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, width = self.encoder(x).chunk(2, -1)
        seen = mean + torch.randn_like(mean) * (0.5 * width).exp()
        return self.decoder(seen), mean, width


def _elbo(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    seen, mean, width = outputs
    return functional.mse_loss(seen, x) - 0.5 * (1 + width - mean**2 - width.exp()).mean()


def autoencoder() -> Module:
    return Module(_Autoencoder(), lambda g: (_numbers(g, 12), _numbers(g, 12)), _elbo)


class _BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 32), nn.Linear(32, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key = self._split(self.query(x)), self._split(self.key(x))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.size) + mask
        chances = functional.dropout(scores.softmax(-1), 0.1, self.training)
        mixed = torch.matmul(chances, self._split(self.value(x))).permute(0, 2, 1, 3).contiguous()
        x = self.norm1(x + self.out(mixed.view(*mixed.size()[:-2], self.heads * self.size)))
        return self.norm2(x + self.narrow(functional.gelu(self.wide(x))))


class _Bert(nn.Module):
    def __init__(self, vocab: int = 17, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width, padding_idx=0)
        self.places, self.kinds = nn.Embedding(8, width), nn.Embedding(2, width)
        self.layers = nn.ModuleList(_BertLayer(width, 4) for _ in range(2))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids == 0)[:, None, None, :].double() * -1e9
        kinds = self.kinds(torch.zeros_like(ids))
        x = self.words(ids) + self.places(torch.arange(ids.shape[1])) + kinds
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


def bert() -> Module:
    return Module(_Bert(), lambda g: (_ids(g, 17, 8), _ids(g, 5)))


MODULES: dict[str, Callable[[], Module]] = {
    made.__name__: made
    for made in (
        mlp, vgg, resnet, unet, vit, encoder_decoder, recommender, gpt, llama, lstm, gru, conv1d,
        mixer, autoencoder, bert,
    )
}  # fmt: skip
