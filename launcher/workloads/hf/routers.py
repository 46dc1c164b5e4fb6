"""The balance loss of the transformers library, which is one of the routers of all layers.

The library records what every router gives, and takes one loss of all of it at the end. Sums per
expert are all that it needs of a layer: the layers of a pipeline add theirs to what travels beside
the residual stream. That they give the library's loss is looked at when a model is built, by the
library's own function; and that a model's loss has nothing else in it, by its own forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.errors import ModelError

if TYPE_CHECKING:
    from launcher.workloads.hf.hf_shape import HfShape
    from launcher.workloads.hf.skeleton import Shell

_FUNCTION = "load_balancing_loss_func"
_KIND = "router_logits"
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Balance:
    """The loss of a model that has one.

    Attributes:
        experts: Of each layer that has some.
        per_token: Of them, each token's.
        factor: Of the loss, in the sum with that of the tokens.
    """

    experts: int
    per_token: int
    factor: float

    def nothing(self, hidden: Tensor) -> Tensor:
        """The sums before the first layer, for a residual stream ``[batch, ...]``."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return torch.zeros(hidden.shape[0], 2, self.experts, dtype=wide, device=hidden.device)

    def sums(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """What a layer adds, ``[batch, 2, experts]``: how many tokens chose each, and its chances.

        Args:
            logits: Of the router, ``[batch, sequence, experts]``.
            mask: 1 for tokens, 0 for padding, ``[batch, sequence]``; None for no padding.
        """
        chances = logits.softmax(dim=-1).to(torch.promote_types(logits.dtype, torch.float32))
        counted = torch.ones_like(chances[..., :1]) if mask is None else mask[..., None].to(chances)
        chosen = chances.detach().topk(self.per_token, dim=-1).indices.flatten(1)
        weights = counted.expand(-1, -1, self.per_token).flatten(1)
        got = torch.zeros_like(chances[:, 0]).detach().scatter_add_(1, chosen, weights)
        return torch.stack((got, (chances * counted).sum(dim=1)), dim=1)

    def loss(self, sums: Tensor) -> Tensor:
        """Of the sums of all layers ``[batch, 2, experts]``; ``per_token`` when balanced."""
        got, chances = sums.sum(dim=0)
        rows = got.sum() / self.per_token
        total: Tensor = (got / rows * chances / rows).sum()
        return self.experts * total


def read_balance(model: Any, shape: HfShape) -> Balance | None:
    """The loss that the model's configuration asks for; None if it has none, or asks for none.

    Raises:
        ModelError: It has one that the sums do not give.
    """
    config = model.config.get_text_config()
    function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
    if getattr(config, "output_router_logits", False) is not True or function is None:
        return None
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    found = [getattr(model, name, None) for name in names]
    if None not in found and recorded_routers(model) is not None:
        balance = Balance(int(found[0]), int(found[1]), float(found[2]))  # type: ignore[arg-type]
        if _agrees(balance, function):
            return balance
    raise ModelError(
        f"model.path={shape.folder}: output_router_logits=true, and the loss that "
        f"{type(model).__name__} makes of its routers is not one of sums over tokens. Try "
        '"output_router_logits": false in config.json, or the model inside a LightningModule of '
        "your own (model=class), which may return that loss."
    )


def check_loss(shell: Shell, balance: Balance | None, shape: HfShape) -> None:
    """Refuses a model whose own loss is more than that of its tokens and its routers.

    ``shell`` is its forward without layers. It is given numbers for logits and one for the loss of
    routers, and looked at what it makes of them.

    Raises:
        ModelError: Something else, which nothing here would train with.
    """
    vocab, rows, tokens = shape.vocab, 2, 4
    ids = (torch.arange(rows * tokens, device="cpu") % vocab).view(rows, tokens)
    logits = torch.sin(1.3 * torch.arange(rows * tokens * vocab, device="cpu")).view(
        rows, tokens, -1
    )
    with _answering(shell.model, balance):
        try:
            given = shell.run_head(ids, 3.0 * logits, routers=balance is not None)
            theirs, made = float(given.loss), given.logits.float()
        except Exception:  # no loss of labels, or one that needs more than a head
            return
    added = 0.0 if balance is None else balance.factor * _KNOWN
    shifted = functional.cross_entropy(made[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    unshifted = functional.cross_entropy(made.flatten(0, 1), ids.flatten())  # decoders of pairs
    if all(abs(theirs - float(own) - added) > _TOLERANCE * 10 for own in (shifted, unshifted)):
        raise ModelError(
            f"model.path={shape.folder}: {type(shell.model).__name__} adds something to the loss "
            f"of its tokens ({theirs:.4f} where that is {float(shifted) + added:.4f}), which would "
            "be left out here. Try without it (a coefficient in config.json, like "
            '"z_loss_coefficient": 0), or the model inside a LightningModule of your own '
            "(model=class), which may return that loss."
        )


_KNOWN = 0.75


@contextmanager
def _answering(model: Any, balance: Balance | None) -> Iterator[None]:
    """The library's function for the loss of routers gives a known number inside."""
    module = sys.modules[type(model).__module__]
    theirs = getattr(module, _FUNCTION, None)
    if balance is None or theirs is None:
        yield
        return
    setattr(module, _FUNCTION, lambda *_, **__: torch.tensor(_KNOWN, device="cpu"))
    try:
        yield
    finally:
        setattr(module, _FUNCTION, theirs)


def _agrees(balance: Balance, function: Any) -> bool:
    """Whether the library's function gives the same of two layers with padding and without."""
    rows, tokens = 2, 5
    numbers = torch.arange(1.0, 2 * rows * tokens * balance.experts + 1, device="cpu")
    layers = torch.sin(1.7 * numbers).view(2, rows, tokens, balance.experts)
    padding = torch.ones(rows, tokens, device="cpu")
    padding[0, 3:] = 0
    for mask in (None, padding):
        try:
            theirs = function(
                tuple(layer.flatten(0, 1) for layer in layers),
                balance.experts,
                balance.per_token,
                mask,
            )
        except Exception:  # it takes other arguments, so it is another loss
            return False
        sums = sum((balance.sums(layer, mask) for layer in layers), balance.nothing(padding))
        if not isinstance(theirs, Tensor):
            return False
        if abs(float(theirs) - float(balance.loss(sums))) > _TOLERANCE * balance.per_token:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Routers:
    """Which modules of a model are routers, in the library's own words."""

    kind: type[nn.Module]
    index: int  # of the logits in what they give
    name: str  # that must be in a module's; may be empty

    def inside(self, layer: nn.Module) -> list[nn.Module]:
        named = layer.named_modules()
        return [m for name, m in named if isinstance(m, self.kind) and self.name in name]


def recorded_routers(model: Any) -> Routers | None:
    """What the library records as router logits; None if that is nothing, or said otherwise."""
    for module in model.modules():
        recorders = getattr(type(module), "_can_record_outputs", None) or {}
        recorder = recorders.get(_KIND) if isinstance(recorders, dict) else None
        if recorder is None:
            continue
        kind = getattr(recorder, "target_class", recorder)
        if isinstance(kind, type):
            name = getattr(recorder, "layer_name", None) or ""
            return Routers(kind, int(getattr(recorder, "index", 0)), name)
    return None


@contextmanager
def recording(routers: Sequence[nn.Module], index: int) -> Iterator[list[Tensor]]:
    """Collects the logits ``[tokens, experts]`` of what runs inside."""
    seen: list[Tensor] = []

    def take(_: nn.Module, __: Any, given: Any) -> None:
        seen.append(given[index] if isinstance(given, tuple | list) else given)

    hooks = [router.register_forward_hook(take) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
