"""What users' code does along a width that ``tp`` cuts: the same numbers as on one process.

A declared plan cuts layers called ``up`` by outputs and ``down`` by inputs; the found one decides
by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.test_found_shardings import compare
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

ROWS, STEPS, WIDTH, WIDE, TIME, HEADS = 8, 3, 12, 24, 6, 6


class Learner(pl.LightningModule):
    """SGD, so that weights are sums of gradients."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...] = (TIME, WIDTH)) -> None:
        super().__init__()
        self.net, self.shape = net, shape

    def found(self, given: Tensor, batch_idx: int) -> Tensor:
        return self.net(given)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        given, target = batch
        found = self.found(given, batch_idx)
        loss = (found.flatten(1).mean(1) - target).square().mean() + 0.1 * found.square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def train_dataloader(self) -> Any:
        numbers = torch.Generator().manual_seed(3)
        given = torch.randn(ROWS * STEPS, *self.shape, generator=numbers, dtype=torch.float64)
        target = torch.randn(ROWS * STEPS, generator=numbers, dtype=torch.float64)
        return DataLoader(list(zip(given, target, strict=True)), batch_size=ROWS)


class Declared(Learner):
    def tensor_parallel_plan(self) -> dict[str, str]:
        words = {"up": "colwise", "down": "rowwise"}
        names = ((name, name.rpartition(".")[2]) for name, _ in self.named_modules())
        return {name: words[last] for name, last in names if last in words}


class Later(Learner):
    """The comparison before training sees the first batch alone."""

    def found(self, given: Tensor, batch_idx: int) -> Tensor:
        y = self.net.up(given)
        return self.net.down((y.cumsum(-1) if batch_idx > 0 else y).tanh())


class Between(nn.Module):
    """Two layers and something between them."""

    def __init__(self, operation: Callable[[Tensor], Tensor] = torch.tanh, out: int = WIDE) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(out, WIDTH)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.operation(self.up(x)))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """Attention over ``[batch, heads, time, size]``, whose keys and values may have fewer heads."""

    def __init__(self, attend: Attend, kv: int = HEADS, table: int = 0, size: int = 4) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        self.q, self.k, self.v, self.o = (nn.Module() for _ in range(4))
        self.q.up = nn.Linear(WIDTH, HEADS * size)
        self.k.up, self.v.up = nn.Linear(WIDTH, kv * size), nn.Linear(WIDTH, kv * size)
        self.o.down = nn.Linear(HEADS * size, WIDTH)
        if table:  # A learned bias by distance.
            self.table = nn.Embedding(2 * TIME, table)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.up(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if hasattr(self, "table"):
            at = torch.arange(x.shape[1])
            bias = self.table(at[None] - at[:, None] + TIME).permute(2, 0, 1)[None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = self.attend(q, k, v)
        return x + self.o.down(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (q @ k.mT / 2).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, n, t, d = k.shape
    k, v = (
        part[:, :, None].expand(b, n, HEADS // n, t, d).reshape(b, HEADS, t, d) for part in (k, v)
    )
    return F.scaled_dot_product_attention(q, k, v)


def _enabled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _alibi(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    return 2.0 ** -torch.arange(1.0, HEADS + 1)[:, None, None].to(q) * (at[None] - at[:, None])


def _sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 2 + _alibi(q)).softmax(-1) @ v


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = _alibi(q).expand(q.shape[0], -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotary positions by complex numbers for queries, by pairs for keys."""
    angles = torch.outer(torch.arange(q.shape[2]), torch.tensor([1.0, 0.1])).to(q)
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    q = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    even, odd, cos, sin = k[..., 0::2], k[..., 1::2], angles.cos(), angles.sin()
    k = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return F.scaled_dot_product_attention(q, k, v)


def _folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, t, d = q.shape
    q, k, v = (part.reshape(b * h, t, d) for part in (q, k, v))
    scores = torch.baddbmm(torch.zeros(b * h, t, t).to(q), q, F.normalize(k, dim=-1).mT, alpha=0.5)
    return (scores.softmax(-1) @ v).view(b, h, t, d)


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bhsd->bhtd", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1), v)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return torch.sign(y) * y.abs().mean(-1, keepdim=True) / y.shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (y.abs() < 1) + grad.mean(-1, keepdim=True)


def _split(y: Tensor) -> Tensor:
    a, b, c = y.split([5, 12, 7], -1)
    d, e, f = torch.tensor_split(y, 3, -1)
    g, _ = y.unflatten(-1, (3, 8)).narrow(-1, 2, 4).chunk(2, -2)
    joined = torch.cat((a * d[..., :5], b, c + e[..., 1:]), -1)
    return joined + f.repeat(1, 1, 3) + F.pad(g.flatten(-2), (0, 16))


def _reduced(y: Tensor) -> Tensor:
    most, at = y.max(-1, keepdim=True)
    first = (at == torch.arange(y.shape[-1])).to(y)
    scaled = (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + most.abs())
    return scaled + first * y.var((0, 2), keepdim=True) + y.median(-1, keepdim=True).values


def _chosen(y: Tensor) -> Tensor:
    even = torch.arange(0, y.shape[-1], 2)
    z = torch.where((y > 0) & ~(y > 1), y, y.flip(-1)) + y[..., even].repeat_interleave(2, -1)
    top = torch.zeros_like(y).scatter(-1, *y.topk(4, -1)[::-1])
    return z.index_select(-1, torch.arange(y.shape[-1]).roll(5)) + top


def _shaped(y: Tensor) -> Tensor:
    b, t, w = y.size()
    z = y.view(b, -1, 8).permute(0, 2, 1).contiguous().view(b, 8, t, w // 8)
    turned = y.reshape(-1, w).t().reshape(w, b, t).permute(1, 2, 0)
    return z.transpose(1, 2).reshape(y.shape) + turned


def _softmaxed(y: Tensor) -> Tensor:
    return y.softmax(-1) * y.log_softmax(-1) + F.normalize(y, dim=-1) - y.logsumexp(-1, True)


def _products(y: Tensor) -> Tensor:
    near = torch.cdist(y, y) + y @ y.mT / WIDE + F.cosine_similarity(y, y.flip(1), -1)[..., None]
    return near.softmax(-1) @ y + y @ torch.einsum("bti,btj->bij", y, y) / WIDE


def _in_place(y: Tensor) -> Tensor:
    y = y * 2
    y.add_(1).mul_(0.5).masked_fill_(y.detach() > 0.5, 0.5)
    return F.leaky_relu(y, 0.1, inplace=True)


def _over_time(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Channels first, as images have them: of three dimensions, no batch in front of them."""
    return lambda y: function(y.transpose(1, 2)).transpose(1, 2)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda y: y.cumsum(-1), "split": _split, "reduced": _reduced, "chosen": _chosen,
    "shaped": _shaped, "softmaxed": _softmaxed, "products": _products, "in_place": _in_place,
    "custom_function": Sign.apply,
    "pairs": lambda y: (y[..., ::2].sigmoid() * y[..., 1::2]).repeat(1, 1, 2),
    "stacked": lambda y: torch.stack((y.tanh(), y.sigmoid()), -1).flatten(-2)[..., :WIDE],
    "spectral": lambda y: torch.fft.irfft(torch.fft.rfft(y) * 0.5, n=WIDE) + torch.fft.fft(y).real,
    "rms": lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True)) * math.log(y.shape[-1]),
    "pooled": _over_time(lambda y: F.avg_pool2d(y, 3, 1, 1)),
    "dropped": _over_time(lambda y: F.dropout(F.dropout1d(y, 0.3), 0.3)),
    "dropped_turned": _over_time(lambda y: F.dropout(y, 0.3)),
    "selected": lambda y: y * y.select(-1, 0)[..., None] * torch.select(y, -1, 13)[..., None],
    "vector": lambda y: y + torch.linspace(0, 1, TIME).to(y) @ y[0] - y[0].T @ y[0, :, 0],
    "binary": lambda y: y * F.binary_cross_entropy(y.sigmoid(), torch.full_like(y, 0.3)),
    "noise": lambda y: y + torch.randn_like(y) + F.alpha_dropout(y, 0.1) + F.gumbel_softmax(y),
}  # fmt: skip
ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "repeated": lambda: Heads(_repeated, kv=2), "one_head": lambda: Heads(_repeated, kv=1),
    "expanded": lambda: Heads(_expanded, kv=2), "enabled": lambda: Heads(_enabled, kv=2),
    "sloped": lambda: Heads(_sloped), "masked": lambda: Heads(_masked),
    "turned": lambda: Heads(_turned), "folded": lambda: Heads(_folded),
    "einsum": lambda: Heads(_einsum), "bias": lambda: Heads(_plain, table=HEADS),
    "shared_bias": lambda: Heads(_plain, table=1),
}  # fmt: skip
NAMES = [*BETWEEN, *ATTENTIONS, "later"]


def train(name: str, tp: int, declared: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    net = Between(BETWEEN.get(name, torch.tanh)) if name not in ATTENTIONS else ATTENTIONS[name]()
    kind = Later if name == "later" else Learner
    if declared:
        kind = type("Planned", (Declared, kind), {})
    options = {"tp": tp, "num_microbatches": 2, "seed": 0}
    module = kind(net).double()
    with fit(module, strategy=options, losses="train_loss", max_steps=STEPS) as run:
        return {
            "losses": run.losses, "shards": run.shards, "weights": run.weights,
            "tp_rank": run.where.tp_rank,
        }  # fmt: skip


FOUND_SOMETHING = (
    "later",
    "dropped",
    "dropped_turned",
    "pooled",
    "shared_bias",
    "binary",
    "selected",
)


@pytest.mark.parametrize("name", FOUND_SOMETHING)
def test_code_between_layers_of_a_declared_plan_sees_the_whole_width(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = ranks(1).run(train, name=name, tp=1, declared=False)
    compare(alone, ranks(2).run(train, name=name, tp=2, declared=True))


@pytest.mark.full
@pytest.mark.parametrize("declared", [False, True], ids=["found", "declared"])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_habit_of_users_keeps_parity(
    name: str, tp: int, declared: bool, ranks: Callable[[int], Ranks]
) -> None:
    (alone,) = ranks(1).run(train, name=name, tp=1, declared=False)
    compare(alone, ranks(tp).run(train, name=name, tp=tp, declared=declared))
