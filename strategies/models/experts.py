"""A mixture of experts: a router sends each token to a few of many small networks.

One layer is four steps, each a method of ``Mixture``: ``route`` (who goes where, with what weight),
``dispatch`` (tokens in the order of their experts), ``compute`` (every expert its tokens) and
``combine`` (back in the order of the tokens, weighted). Between the second and the third stand rows
in groups, nothing else: whoever spreads experts over ranks exchanges these rows, and holds a slice
of the experts. No token is ever dropped: groups are as large as they come out.

What balances the experts is here, too: two losses that a layer hands on, and a bias that steers
the choice without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.models.expert_parallel import ExpertRanks

Scores = Literal["softmax", "sigmoid"]
Span = Literal["sequence", "microbatch"]


class Routing(NamedTuple):
    """Where the tokens of a batch go; ``tokens`` are those of all sequences, one after the other.

    Attributes:
        ids: Experts of each token, ``[tokens, k]``, int64.
        weights: How much each of their outputs counts, ``[tokens, k]``, in 32 bits at least.
        losses: Per sequence the balance loss and the z-loss, ``[batch, 2]``, not yet scaled.
        load: Per sequence how many tokens each expert got, ``[batch, experts]``; no gradient.
    """

    ids: Tensor
    weights: Tensor
    losses: Tensor
    load: Tensor


class Dispatched(NamedTuple):
    """Tokens in the order of their experts.

    Attributes:
        rows: One per token and chosen expert, ``[tokens * k, hidden]``.
        counts: Rows of each expert, ``[experts]``, int64; their sum is ``tokens * k``.
        order: The place of each row among the choices ``ids.flatten()``, ``[tokens * k]``.
    """

    rows: Tensor
    counts: Tensor
    order: Tensor


class Router(nn.Module):
    """Scores every expert for every token, in 32 bits whatever the model computes in.

    Args:
        experts: How many there are.
        per_token: How many each token goes to.
        hidden: Width of a token.
        scores: ``softmax`` over the experts, or each expert's own ``sigmoid``.
        normalised: Whether the weights of a token's experts are made to sum to 1.
        scale: Factor of all weights.
        steered: Whether a bias per expert is added to the scores before the choice (and not to the
            weights), as in DeepSeek-V3 (arXiv 2408.15664). Its gradient is no loss's: see
            ``SURPLUS``.
        span: What the balance loss is taken over: each sequence, which gives the same loss
            however a batch is cut, or all tokens that go through the layer at once.
    """

    def __init__(
        self,
        *,
        experts: int,
        per_token: int,
        hidden: int,
        scores: Scores = "softmax",
        normalised: bool = True,
        scale: float = 1.0,
        steered: bool = False,
        span: Span = "sequence",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bias = nn.Parameter(torch.zeros(experts)) if steered else None
        self.per_token = per_token
        self._scores: Scores = scores
        self._normalised = normalised
        self._scale = scale
        self._span: Span = span

    def forward(self, tokens: Tensor) -> Routing:
        """``tokens`` are ``[batch, sequence, hidden]``."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(tokens.to(wide), self.weight.to(wide))
            if self._scores == "softmax":
                scores = logits.softmax(dim=-1)
                shares = scores
            else:
                scores = logits.sigmoid()
                shares = scores / scores.sum(dim=-1, keepdim=True)
            chosen = scores.detach()
            if self.bias is not None:
                chosen = chosen + self.bias.detach().to(wide)
            ids = chosen.topk(self.per_token, dim=-1).indices
            weights = scores.gather(-1, ids)
            if self._normalised:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            weights = weights * self._scale
            load = _load(ids, experts=logits.shape[-1], dtype=wide)
            losses = self._losses(logits, shares, load)
            if self.bias is not None:
                weights = _Surplus.apply(  # type: ignore[no-untyped-call]
                    weights, self.bias, load.sum(dim=0)
                )
        return Routing(ids.flatten(0, 1), weights.flatten(0, 1), losses, load)

    def _losses(self, logits: Tensor, shares: Tensor, load: Tensor) -> Tensor:
        """Switch Transformer's balance loss (arXiv 2101.03961), 1 when balanced; ST-MoE's z-loss.

        Balance: experts * sum over them of (share of the tokens it got) * (mean of its score). z
        (arXiv 2202.08906): the mean square of the logits' log-sum-exp.
        """
        batch, sequence, experts = logits.shape
        got, wanted = load / (sequence * self.per_token), shares.mean(dim=1)
        if self._span == "microbatch":
            got, wanted = (part.mean(dim=0, keepdim=True) for part in (got, wanted))
        balance = experts * (got * wanted).sum(dim=-1)
        size = logits.logsumexp(dim=-1).square().mean(dim=-1)
        return torch.stack((balance.expand(batch), size), dim=-1)


# What the gradient of a router's bias is multiplied with, a power of two: the load that is left of
# an expert's when each has got the mean, counts that add up over microbatches and replicas on the
# ways of any gradient. An optimizer steps by its sign alone, which no factor changes, and beside
# the other gradients it is nothing in a norm that clips.
SURPLUS = 2.0**-64


class _Surplus(torch.autograd.Function):
    """Hands the weights on; its backward gives the bias what its experts got too much."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        ctx.dtype = bias.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (load,) = ctx.saved_tensors
        surplus = (load * len(load) - load.sum()) * SURPLUS
        return gradients[0], surplus.to(ctx.dtype), None


class Experts(nn.Module):
    """The experts' matrices, one above the other: ``[experts, outputs, inputs]``, no biases.

    A rank may hold a slice of them: ``first`` is the global number of its first one.
    """

    def __init__(
        self, *, experts: int, hidden: int, inner: int, gated: bool = True, first: int = 0
    ) -> None:
        super().__init__()
        self.first = first
        wide, narrow = (experts, inner, hidden), (experts, hidden, inner)
        self.gate = nn.Parameter(torch.empty(wide)) if gated else None
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(narrow))

    # A compiler would make code for every size of a group that it meets.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows ``[any, hidden]`` in groups of ``counts`` ``[experts]`` to rows of the same shape.

        A group may be empty: its expert's matrices then get a gradient of zeros.
        """
        product = _Groups(rows, counts)
        inner = product(rows, self.up)
        if self.gate is not None:
            inner = functional.silu(product(rows, self.gate)) * inner
        else:
            inner = functional.gelu(inner, approximate="tanh")
        return product(inner, self.down)


class Mixture(nn.Module):
    """Router and experts; the four steps may be replaced one by one."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.exchange: ExpertRanks | None = None  # who has the other experts

    def forward(
        self, tokens: Tensor, beside: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Routing]:
        """``[batch, sequence, hidden]`` to the same shape, and how tokens were routed.

        ``beside`` is what all tokens go through (shared experts); its result is added. Where rows
        travel to other ranks it is computed meanwhile.
        """
        routing = self.route(tokens)
        flat, weights, ranks = tokens.flatten(0, 1), routing.weights, self.exchange
        if ranks is not None:
            flat, weights = ranks.enter(flat), ranks.enter(weights)
        sent = self.dispatch(flat, routing.ids)
        other = None
        if ranks is None or beside is None:
            results = self.compute(sent.rows, sent.counts)
        else:
            travelling = ranks.send(sent.rows, sent.counts)
            other = beside(tokens)
            results = ranks.computed(self.experts, travelling)
        mixed = self.combine(results, sent.order, weights)
        if ranks is not None:
            mixed = ranks.leave(mixed)
        mixed = mixed.view_as(tokens)
        if beside is None:
            return mixed, routing
        return mixed + (beside(tokens) if other is None else other), routing

    def route(self, tokens: Tensor) -> Routing:
        routing: Routing = self.router(tokens)
        return routing

    def dispatch(self, tokens: Tensor, ids: Tensor) -> Dispatched:
        """Tokens ``[tokens, hidden]`` once per choice ``ids`` ``[tokens, k]``, sorted by expert.

        Ties stay in the order of the tokens, so the same routing gives the same sums everywhere.
        """
        num_tokens, per_token = ids.shape
        choices = ids.flatten()
        order = choices.argsort(stable=True)
        # Repeated first: the gradient of a plain lookup would add up rows in any order on a GPU.
        repeated = tokens[:, None].expand(-1, per_token, -1).reshape(num_tokens * per_token, -1)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, choices, torch.ones_like(choices))
        return Dispatched(repeated.index_select(0, order), counts, order)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.exchange is not None:
            return self.exchange.around(self.experts, rows, counts, parts=True)
        results: Tensor = self.experts(rows, counts)
        return results

    def combine(self, results: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Rows ``[tokens * k, hidden]`` to tokens ``[tokens, hidden]``, weighted sums."""
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        picked = results.index_select(0, places).view(*weights.shape, results.shape[-1])
        return (picked * weights.to(picked.dtype)[..., None]).sum(dim=1)

    @property
    def num_experts(self) -> int:
        """Of the whole layer, wherever they are held."""
        return self.router.weight.shape[0]

    @property
    def expert_parameters(self) -> tuple[str, ...]:
        """What is spread where ranks share the experts."""
        return tuple(f"experts.{name}" for name, _ in self.experts.named_parameters())

    @property
    def expert_slices(self) -> dict[str, int]:
        """Where ranks share each expert, too: its inner width, of which results are sums."""
        dims = {"gate": 1, "up": 1, "down": 2}
        return {f"experts.{name}": dims[name] for name, _ in self.experts.named_parameters()}


class _Groups:
    """Products of rows in groups with one matrix per group."""

    def __init__(self, rows: Tensor, counts: Tensor) -> None:
        self._counts = counts
        self._ends = counts.cumsum(0).to(torch.int32)
        self._sizes: list[int] | None = None
        device = rows.device.type
        cast = torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device) if cast else rows.dtype

    def __call__(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """``[rows, inputs]`` and ``[experts, outputs, inputs]`` to ``[rows, outputs]``."""
        rows, turned = rows.to(self._dtype), matrices.to(self._dtype).mT
        if _in_one_kernel(rows, turned):
            return functional.grouped_mm(rows, turned, offs=self._ends)
        if self._sizes is None:
            self._sizes = self._counts.tolist()
        groups = zip(torch.split(rows, self._sizes), turned.unbind(0), strict=True)
        return torch.cat([group @ matrix for group, matrix in groups])


def _in_one_kernel(rows: Tensor, turned: Tensor) -> bool:
    """Whether torch has a kernel for such groups: bfloat16 in multiples of 16 bytes."""
    aligned = all(size * rows.element_size() % 16 == 0 for size in turned.shape[1:])
    return rows.is_cuda and rows.dtype is torch.bfloat16 and aligned


def _load(ids: Tensor, *, experts: int, dtype: torch.dtype) -> Tensor:
    """How often each expert is chosen in each sequence: ``[batch, sequence, k]`` to counts."""
    chosen = ids.flatten(1)
    load = torch.zeros(ids.shape[0], experts, dtype=dtype, device=ids.device)
    return load.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=dtype))
