"""Continues a prompt token by token with any network that maps ids to logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strategies.errors import DataError, PlanError


@torch.no_grad()
def sample_tokens(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The prompt and its continuation.

    Args:
        logits_of: Maps token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``.
        prompt: Token ids ``[sequence]`` or ``[batch, sequence]``, at least one.
        max_new_tokens: How many to append.
        context: How many of the last tokens the network is shown at most.
        temperature: 0 takes the most probable token; else logits are divided by it.
        top_k: Draw among the k most probable tokens only.
        seed: Of the draws; the same seed gives the same text, on one kind of device.

    Returns:
        Ids shaped as ``prompt`` with ``max_new_tokens`` more.

    Raises:
        DataError: An empty prompt.
        PlanError: A negative count or temperature, or ``top_k`` below 1.
    """
    if prompt.numel() == 0:
        raise DataError(
            "generate.prompt is empty, there is nothing to continue. Try generate.prompt='def '."
        )
    for key, value, low in (
        ("max_new_tokens", max_new_tokens, 0),
        ("temperature", temperature, 0),
        ("top_k", top_k if top_k is not None else 1, 1),
    ):
        if value < low:
            raise PlanError(f"generate.{key}={value} is below {low}. Try generate.{key}={low}.")
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    tokens = prompt if prompt.dim() == 2 else prompt[None]
    for _ in range(max_new_tokens):
        logits = logits_of(tokens[:, -context:])[:, -1]
        following = _choose(logits, temperature=temperature, top_k=top_k, generator=generator)
        tokens = torch.cat((tokens, following), dim=-1)
    return tokens if prompt.dim() == 2 else tokens[0]


def _choose(
    logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """One id per row of ``logits`` ``[batch, vocab]``, as ``[batch, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        values, ids = logits.topk(top_k, dim=-1)
    else:
        values, ids = logits, None
    # Shifted first: a very small temperature would otherwise overflow.
    shifted = (values - values.amax(dim=-1, keepdim=True)).double() / temperature
    drawn = torch.multinomial(shifted.softmax(dim=-1), 1, generator=generator)
    return drawn if ids is None else ids.gather(-1, drawn)
