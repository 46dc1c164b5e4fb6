"""Modules in the ways people write them, whose authors have never heard of ``tp``: a second lot.

Fused and interleaved projections, layers that are called twice, weights that other code uses,
values that are written in place, random numbers inside; all small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.unannotated import (
    Module,
    _ids,
    _Mean,
    _numbers,
    _of_classes,
    _per_token,
)

Built = Callable[[], Module]


class _Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _mlp(width: int, wide: int, act: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, wide), act or nn.GELU(), nn.Linear(wide, width))


class _Fused(nn.Module):
    """Queries, keys and values from one matrix; taken apart as ``how`` says."""

    def __init__(self, width: int, heads: int, how: str, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv, size = self.qkv(x), width // self.heads
        if self.how == "view":
            q, k, v = qkv.reshape(rows, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        elif self.how == "interleaved":
            q, k, v = qkv.view(rows, length, self.heads, 3 * size).transpose(1, 2).chunk(3, -1)
        else:
            if self.how == "split":
                parts: Any = qkv.split(width, dim=2)
            elif self.how == "slices":
                parts = qkv[..., :width], qkv[:, :, width : 2 * width], qkv[..., 2 * width :]
            elif self.how == "scaled":
                parts = (qkv * 0.5).contiguous().tensor_split(3, dim=-1)
            else:
                parts = qkv.chunk(3, dim=-1)
            q, k, v = (p.view(rows, length, self.heads, size).transpose(1, 2) for p in parts)
        if self.how == "scores":
            mask = torch.full((length, length), float("-inf")).triu(1).to(x)
            scores = q @ k.transpose(-2, -1) / math.sqrt(size) + mask
            out = functional.dropout(scores.softmax(-1), 0.2, self.training) @ v
        else:
            out = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(rows, length, width))


def _blocks(width: int, attention: Callable[[], nn.Module], wide: int = 32) -> list[nn.Module]:
    return [
        nn.Sequential(
            _Residual(nn.Sequential(nn.LayerNorm(width), attention())),
            _Residual(nn.Sequential(nn.LayerNorm(width), _mlp(width, wide))),
        )
        for _ in range(2)
    ]


def _fused(how: str) -> Built:
    def made() -> Module:
        net = nn.Sequential(
            nn.Linear(6, 16), *_blocks(16, lambda: _Fused(16, 4, how)), _Mean(), nn.Linear(16, 5)
        )
        return Module(net, _of_classes(8, 6))

    return made


class _Gated(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(12, 64), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "glu":
            return self.down(functional.glu(self.up(x), -1))
        gate, value = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)


def _gated(kind: str) -> Built:
    def made() -> Module:
        net = nn.Sequential(
            nn.Linear(6, 12), _Residual(_Gated(kind)), _Residual(_Gated(kind)), nn.Linear(12, 5)
        )
        return Module(net, _of_classes(6))

    return made


class _Scan(nn.Module):
    """Mamba-like: a convolution per channel, then a recurrence over places in Python."""

    def __init__(self, width: int, inner: int, state: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select = nn.Linear(inner, 2 * state + 1)
        self.log = nn.Parameter(torch.randn(inner, state) * 0.1)
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u, gate = self.into(x).chunk(2, -1)
        u = functional.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        b, c, step = self.select(u).split([4, 4, 1], -1)
        step = functional.softplus(step)
        decay = torch.exp(-step[..., None] * torch.exp(self.log))
        h = torch.zeros(x.shape[0], u.shape[-1], 4, dtype=x.dtype)
        found = []
        for place in range(length):
            h = decay[:, place] * h + (step * u)[:, place, :, None] * b[:, place, None, :]
            found.append((h * c[:, place, None, :]).sum(-1))
        y = torch.stack(found, 1) + self.skip * u
        return self.out(y * functional.silu(gate))


def mamba_like() -> Module:
    net = nn.Sequential(
        nn.Embedding(17, 12), _Residual(_Scan(12, 16, 4)), _Residual(_Scan(12, 16, 4)),
        nn.LayerNorm(12), nn.Linear(12, 17),
    )  # fmt: skip
    return Module(net, lambda g: (_ids(g, 17, 6), _ids(g, 17, 6)), _per_token)


class _Spline(nn.Module):
    """A layer of a KAN: a base and radial functions of each input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.spline = nn.Linear(inputs * 5, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - self.grid.to(x)) ** 2))
        return self.base(functional.silu(x)) + self.spline(basis.flatten(-2))


def kan() -> Module:
    return Module(nn.Sequential(_Spline(6, 16), _Spline(16, 16), _Spline(16, 5)), _of_classes(6))


class _TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 17)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def torch_encoder() -> Module:
    return Module(_TorchEncoder(), lambda g: (_ids(g, 17, 6), _ids(g, 17, 6)), _per_token)


class _TorchBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.body = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 17)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask))


def torch_transformer() -> Module:
    return Module(
        _TorchBoth(), lambda g: (_ids(g, 17, 6), _ids(g, 17, 5), _ids(g, 17, 5)), _per_token
    )


class _GruToGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(19, 12), nn.Embedding(23, 12)
        self.encoder = nn.GRU(12, 16, batch_first=True, bidirectional=True)
        self.bridge, self.decoder = nn.Linear(32, 16), nn.GRU(12, 16, batch_first=True)
        self.score, self.mix, self.head = nn.Linear(16, 32), nn.Linear(48, 32), nn.Linear(32, 23)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, last = self.encoder(self.source(source))
        start = torch.tanh(self.bridge(last.transpose(0, 1).flatten(1)))[None]
        out, _ = self.decoder(self.target(target), start.contiguous())
        context = (self.score(out) @ seen.transpose(1, 2)).softmax(-1) @ seen
        return self.head(torch.tanh(self.mix(torch.cat([out, context], -1))))


def gru_seq2seq() -> Module:
    return Module(
        _GruToGru(), lambda g: (_ids(g, 19, 6), _ids(g, 23, 5), _ids(g, 23, 5)), _per_token
    )


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(17, 8), nn.LSTMCell(8, 16)
        self.drop, self.head = nn.Dropout(0.2), _mlp(16, 32)
        self.out = nn.Linear(16, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = c = torch.zeros(x.shape[0], 16, dtype=x.dtype)
        found = []
        for place in range(x.shape[1]):
            h, c = self.cell(x[:, place], (h, c))
            found.append(h)
        return self.out(self.head(self.drop(torch.stack(found, 1))))


def lstm_cell() -> Module:
    return Module(_Cell(), lambda g: (_ids(g, 17, 5), _ids(g, 17, 5)), _per_token)


class _Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True), nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        out += x
        return functional.relu(out, inplace=True)


def bottleneck() -> Module:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        _Bottleneck(8, 16), nn.MaxPool2d(2), _Bottleneck(8, 16), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return Module(net, _of_classes(3, 6, 6))


class _Excite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean((2, 3), keepdim=True)
        return x * self.expand(functional.relu(self.reduce(s))).sigmoid()


def mobile() -> Module:
    def block(width: int, wide: int) -> nn.Module:
        return _Residual(
            nn.Sequential(
                nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
                nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
                nn.BatchNorm2d(wide), nn.Hardswish(), _Excite(wide),
                nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
            )
        )  # fmt: skip

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), block(8, 16), block(8, 24), nn.AdaptiveMaxPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5),
    )  # fmt: skip
    return Module(net, _of_classes(3, 8, 8))


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 4 * n, 4, 3, padding=1) for n in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, functional.elu(layer(x))], 1)
        return self.head(x.amax((2, 3)))


def dense_net() -> Module:
    return Module(_Dense(), _of_classes(4, 6, 6))


class _ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(functional.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


def conv_next() -> Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), _ConvNext(8), _ConvNext(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip
    return Module(net, _of_classes(3, 8, 8))


class _Looking(nn.Module):
    """Attention over the places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, width, high, wide = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(rows, 3 * width, high * wide).chunk(3, 1)
        weight = (q.transpose(1, 2) @ k / math.sqrt(width)).softmax(-1)
        return x + self.out((v @ weight.transpose(1, 2)).reshape(rows, width, high, wide))


class _AttentionUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.time = _mlp(8, 16)
        self.shift = nn.Linear(8, 16)
        self.look, self.mid = _Looking(16), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        angles = when[:, None] * torch.arange(4).to(when)
        told = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        top = functional.silu(self.enter(x))
        low = self.look(self.down(top) + self.shift(told)[:, :, None, None])
        low = self.mid(functional.silu(low))
        return self.leave(torch.cat([self.up(low), top], 1))


def attention_unet() -> Module:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        image = _numbers(g, 3, 6, 6)
        return image, _numbers(g, 1).squeeze(1), image

    return Module(_AttentionUnet(), make, functional.mse_loss)


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(70, 8)
        self.bias = nn.Embedding(70, 1)
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.out = nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.users(user), self.items(item)
        deep = self.tower(torch.cat([u, i], -1))
        return (self.out(torch.cat([u * i, deep], -1)) + self.bias(item)).squeeze(-1)


def neural_factors() -> Module:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        return _ids(g, 50), _ids(g, 70), _ids(g, 2).double()

    return Module(_Factors(), make, functional.binary_cross_entropy_with_logits)


class _Tied(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, 16)
        self.place = nn.Parameter(torch.randn(1, length, 16) * 0.1)
        self.body = nn.Sequential(*_blocks(16, lambda: _Fused(16, 2, "scores")))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 21, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(ids) + self.place)))


def tied_decoder() -> Module:
    return Module(_Tied(6), lambda g: (_ids(g, 21, 6), _ids(g, 21, 6)), _per_token)


class _Twice(nn.Module):
    """One block that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 12), nn.Linear(12, 5)
        self.block = _Residual(_mlp(12, 32, nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(3):
            x = self.block(x)
        return self.out(x)


def shared_block() -> Module:
    return Module(_Twice(), _of_classes(6))


class _Rotating(nn.Module):
    """Many queries, one head of keys and values; rotated in pairs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q = self.q(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        k, v = (p[:, None] for p in self.kv(x).chunk(2, -1))
        angle = torch.arange(length).to(x)[:, None] * torch.tensor([1.0, 0.3]).to(x)

        def turned(value: Tensor) -> Tensor:
            one, two = value[..., 0::2], value[..., 1::2]
            both = one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()
            return torch.stack(both, -1).flatten(-2)

        scores = turned(q) @ turned(k).transpose(-1, -2) / self.size**0.5
        out = scores.softmax(-1) @ v
        return self.out(out.permute(0, 2, 1, 3).reshape(rows, length, width))


def multi_query() -> Module:
    net = nn.Sequential(
        nn.Embedding(17, 16), *_blocks(16, lambda: _Rotating(16, 4)), nn.Linear(16, 17)
    )
    return Module(net, lambda g: (_ids(g, 17, 6), _ids(g, 17, 6)), _per_token)


class _Windows(nn.Module):
    """Attention inside windows, with a learned bias per head and pair of places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(heads, 4, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        w = x.view(rows * length // 4, 4, width)
        qkv = self.qkv(w).view(-1, 4, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.table
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, width)
        return self.proj(out).view(rows, length, width)


def swin_like() -> Module:
    net = nn.Sequential(
        nn.Linear(6, 16), *_blocks(16, lambda: _Windows(16, 4)), _Mean(), nn.Linear(16, 5)
    )
    return Module(net, _of_classes(8, 6))


class _Linear(nn.Module):
    """Attention without softmax: feature maps and sums over places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k = (functional.elu(part(x).view(shape)) + 1 for part in (self.q, self.k))
        v = self.v(x).view(shape)
        kv = torch.einsum("blhd,blhe->bhde", k, v)
        norm = 1 / torch.einsum("blhd,bhd->blh", q, k.sum(1))
        out = torch.einsum("blhd,bhde,blh->blhe", q, kv, norm)
        return self.out(out.reshape(rows, length, width))


def linear_attention() -> Module:
    net = nn.Sequential(
        nn.Linear(6, 16), *_blocks(16, lambda: _Linear(16, 4)), _Mean(), nn.Linear(16, 5)
    )
    return Module(net, _of_classes(8, 6))


class _Routed(nn.Module):
    """Soft experts: all of them run, mixed by a router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(_mlp(width, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        found = torch.stack([expert(x) for expert in self.experts], -1)
        return (found * weights[..., None, :]).sum(-1)


def soft_experts() -> Module:
    net = nn.Sequential(nn.Linear(6, 12), _Residual(_Routed(12)), nn.Linear(12, 5))
    return Module(net, _of_classes(6))


class _Norms(nn.Module):
    """Values are written in place, and shapes are asked for in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 12, bias=False)
        self.head = nn.Linear(12, 5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y.mul_(self.scale.to(y))
        y.clamp_(-2.0, 2.0)
        assert y.shape[-1] == self.scale.shape[0] == y.size(-1)
        y = y / y.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        y = torch.where(y > 0, y, 0.1 * y)
        z = self.down(y)
        z += 0.1 * z.detach()
        values, _ = z.sort(-1)
        return self.head(values)


def in_place() -> Module:
    return Module(_Norms(), _of_classes(6))


class _Noise(nn.Module):
    """Random numbers between layers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.up(x))
        if self.training:
            y = y + 0.1 * torch.randn_like(y)
            y = y * torch.bernoulli(torch.full_like(y, 0.8))
            y = functional.alpha_dropout(y, 0.1, True)
        return self.down(functional.feature_alpha_dropout(y, 0.1, self.training))


def noisy() -> Module:
    return Module(_Noise(), _of_classes(6))


def weight_norm() -> Module:
    net = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 16)), nn.SELU(), _mlp(16, 32),
        nn.Linear(16, 5),
    )  # fmt: skip
    return Module(net, _of_classes(6))


class _Pairs(nn.Module):
    """Two towers whose rows are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _mlp(6, 24), _mlp(6, 24)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        one = functional.normalize(self.left(x), dim=-1)
        return one * self.scale.exp(), functional.normalize(self.right(y), dim=-1)


def two_towers() -> Module:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        return _numbers(g, 6), _numbers(g, 6), _numbers(g, 1).squeeze(1)

    def loss(found: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss((found[0] * found[1]).sum(-1), target)

    return Module(_Pairs(), make, loss)


def dlinear() -> Module:
    """A forecaster: a moving mean, and one matrix over time for each part."""

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trend, self.season = nn.Linear(12, 8), nn.Linear(12, 8)
            self.mean = nn.AvgPool1d(3, 1, 1, count_include_pad=False)

        def forward(self, x: Tensor) -> Tensor:
            trend = self.mean(x)
            return self.trend(trend) + self.season(x - trend)

    return Module(
        Forecast(), lambda g: (_numbers(g, 3, 12), _numbers(g, 3, 8)), functional.mse_loss
    )


class _Graph(nn.Module):
    """Sums over neighbours by a matrix of who is near whom."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        near = near / near.sum(-1, keepdim=True)
        y = functional.relu(near @ self.one(x))
        y = functional.relu(near @ self.two(y))
        return self.head(self.norm(y.flatten(0, 1)).view(y.shape).mean(1))


def graph_net() -> Module:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        near = (_numbers(g, 5, 5) > 0).double() + torch.eye(5).double()
        return _numbers(g, 5, 6), near, _ids(g, 5)

    return Module(_Graph(), make)


class _Wave(nn.Module):
    """Dilated convolutions with gates, and a sum of skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(2, 8, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(8, 16, 2, dilation=2**n, padding=2**n) for n in range(3)
        )
        self.skip = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 16, 1), nn.ReLU(), nn.Conv1d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        x, total = self.enter(x), 0
        for layer, skip in zip(self.dilated, self.skip, strict=True):
            both = layer(x)[..., :length]
            y = torch.tanh(both[:, :8]) * torch.sigmoid(both[:, 8:])
            x, total = x + y, total + skip(y)
        return self.out(total)


def wave_net() -> Module:
    return Module(_Wave(), lambda g: (_numbers(g, 2, 9), _numbers(g, 4, 9)), functional.mse_loss)


class _Perceiver(nn.Module):
    """A few learned queries look at a long input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, 16) * 0.3)
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(6, 32), nn.Linear(16, 16)
        self.mlp, self.head = _mlp(16, 32), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        q = self.q(self.queries).view(1, 4, 2, 8).transpose(1, 2).expand(rows, -1, -1, -1)
        k, v = self.kv(x).view(rows, -1, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.out(out)
        return self.head((y + self.mlp(y)).mean(1))


def perceiver() -> Module:
    return Module(_Perceiver(), _of_classes(9, 6))


class _Between(nn.Module):
    """Two layers and something between them that few libraries have rules for."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(6, 16), nn.Linear(16, 5), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


def _between(operation: Callable[[Tensor], Tensor]) -> Built:
    return lambda: Module(_Between(operation), _of_classes(6))


class _Stack(nn.Module):
    """Layers of one kind in a list: a pipeline takes each as a whole."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 12), nn.Linear(12, 5)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class _Statistics(nn.Module):
    """A running mean of its own, as long as the value that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean(0))
                self.seen += 1
        return self.down(torch.tanh(y - self.mean))


def own_statistics() -> Module:
    return Module(_Stack(_Statistics), _of_classes(6))


class _Chosen(nn.Module):
    """Experts that take the rows a router gives them: shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.after = nn.Linear(12, 3), _mlp(12, 32)
        self.experts = nn.ModuleList(_mlp(12, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number)[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.after(out)


def chosen_experts() -> Module:
    return Module(_Stack(_Chosen), _of_classes(6))


def odd_sizes() -> Module:
    """Three heads and odd widths: little comes out even."""
    net = nn.Sequential(
        nn.Linear(5, 15), *_blocks(15, lambda: _Fused(15, 3, "chunk"), wide=33), _Mean(),
        nn.Linear(15, 7),
    )  # fmt: skip
    return Module(net, lambda g: (_numbers(g, 6, 5), _ids(g, 7)))


FRESH: dict[str, Built] = {
    **{f"fused_{how}": _fused(how) for how in (
        "view", "interleaved", "split", "slices", "scaled", "chunk", "scores")},
    "fourier": _between(lambda y: torch.fft.rfft(y).abs()[:, :8].repeat(1, 2)),
    "cumulative": _between(lambda y: y.cumsum(-1).flip(-1).roll(3, -1)),
    "top_k": _between(lambda y: torch.zeros_like(y).scatter(1, *y.topk(4, -1)[::-1])),
    "glu": _gated("glu"), "swiglu": _gated("swiglu"),
    **{made.__name__: made for made in (
        mamba_like, kan, torch_encoder, torch_transformer, gru_seq2seq, lstm_cell, bottleneck,
        mobile, dense_net, conv_next, attention_unet, neural_factors, tied_decoder, shared_block,
        multi_query, swin_like, linear_attention, soft_experts, in_place, noisy, weight_norm,
        two_towers, dlinear, graph_net, wave_net, perceiver, own_statistics, chosen_experts,
        odd_sizes,
    )},
}  # fmt: skip
