"""Which modules with weights run before and after the layers of a model, found by running it once.

And whether its layers are a chain: each is given the output of the one before, and otherwise only
what every stage can work out for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.workloads.hf.shell import Shell, sides
from launcher.workloads.hf.standins import WeightStandIn
from strategies.errors import ModelError

_ROWS, _TOKENS = 2, 4


@dataclass(frozen=True, slots=True)
class Order:
    """What a run has shown.

    Attributes:
        before: Names of the modules that run in front of the layers and have weights, or only act
            in training (dropout).
        after: The same behind them.
        returns_tuple: Whether a layer's output is a tuple.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    returns_tuple: bool


class _NoChainError(Exception):
    """Why the layers cannot be cut apart."""


def probe(model: Any, layers: Sequence[nn.Module], path: str, folder: str) -> Order:
    """Runs a few tokens through the model's own forward, without weights.

    Args:
        model: A ``PreTrainedModel`` on the meta device, its layers taken out.
        layers: Them.
        path: Where they were.
        folder: For messages.

    Raises:
        ModelError: The model is no chain of layers.
    """
    reasons = []
    for returns_tuple in (False, True):
        shell = Shell(model, layers, path, {}, returns_tuple=returns_tuple)
        try:
            before, after = _order(shell, model, path)
        except _NoChainError as reason:
            reasons.append(str(reason))
        except Exception as error:  # whatever a forward does when its parts are missing
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
        else:
            return Order(before, after, returns_tuple)
    raise ModelError(
        f"model.path={folder}: {type(model).__name__} cannot be cut between the layers of {path} "
        f"({reasons[0]}). Try another list, model.layers_path=NAME, or a LightningModule in a "
        "package of yours (entry points foldpipe.models), which may be cut anywhere."
    )


def _order(shell: Shell, model: Any, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    vocab = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % vocab
    before, after = _run(shell, input_ids=ids)
    calls = [layer.call for layer in shell.layers]
    # Later stages have neither token ids nor embeddings.
    stream = torch.zeros(_ROWS, _TOKENS, shell.width, requires_grad=True)
    _run(shell, inputs_embeds=stream)
    for index, (layer, known) in enumerate(zip(shell.layers, calls, strict=True)):
        assert layer.call is not None and known is not None
        now, then = layer.call.tensors(), known.tensors()
        wanted = next((name for name, value in now if value.requires_grad), None)
        if wanted is None and [name for name, _ in now] != [name for name, _ in then]:
            wanted = "other arguments"
        for (name, one), (_, other) in zip(now, then, strict=False):
            wanted = wanted or (None if torch.equal(one, other) else name)
        if wanted is not None:
            raise _NoChainError(f"layer {index} is given {wanted}, which depend on the tokens")
    shell.forget()
    kept = {name for name, module in sides(model, path).items() if _belongs_to_a_unit(module)}
    return (
        tuple(name for name in dict.fromkeys(before) if name in kept),
        tuple(name for name in dict.fromkeys(after) if name in kept and name not in before),
    )


def _belongs_to_a_unit(module: nn.Module) -> bool:
    """Weights do; of the others only those without constants, which are dropout and the like."""
    weights = any(True for _ in module.parameters())
    return weights or not any(True for _ in module.buffers())


def _run(shell: Shell, **inputs: Tensor) -> tuple[list[str], list[str]]:
    """Names of the modules that ran before the first and after the last layer."""
    seen: list[str | int] = []
    hooks = []
    marked: list[tuple[str | int, nn.Module]] = [*shell.sides.items(), *enumerate(shell.layers)]
    for mark, module in marked:
        hooks.append(module.register_forward_pre_hook(lambda *_, mark=mark: seen.append(mark)))
    # Each layer answers with a tensor of its own, by which the next one's input is recognised.
    answers = [torch.zeros(_ROWS, _TOKENS, shell.width) for _ in shell.layers]
    for layer, answer in zip(shell.layers, answers, strict=True):
        layer.answer = answer
    try:
        shell.run(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    order = [mark for mark in seen if isinstance(mark, int)]
    if order != list(range(len(shell.layers))):
        raise _NoChainError(f"its {len(shell.layers)} layers are called in the order {order}")
    first, last = seen.index(0), seen.index(len(shell.layers) - 1)
    weighted = {n for n, m in shell.sides.items() if isinstance(m, WeightStandIn)}
    between = [mark for mark in seen[first:last] if mark in weighted]
    if between:
        raise _NoChainError(f"{between[0]} runs between its layers")
    for index in range(1, len(shell.layers)):
        call = shell.layers[index].call
        if call is None or call.hidden is not answers[index - 1]:
            raise _NoChainError(f"layer {index} is not given the output of layer {index - 1}")
    return [str(mark) for mark in seen[:first]], [str(mark) for mark in seen[last + 1 :]]
