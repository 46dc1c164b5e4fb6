"""The units of a Hugging Face model: embedding, one per decoder layer, head.

A unit owns the library's modules under their names in the library, so a parameter is called
``<unit>.<name in the library>``. Units exchange the residual stream ``[batch, sequence, hidden]``
and, for batches that have one, the attention mask ``[batch, sequence]`` as it came.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from launcher.workloads.hf.shell import Shell
from launcher.workloads.hf.skeleton import Skeleton
from launcher.workloads.hf.standins import Call

_KNOWN_SHAPES = 4  # training and validation, each with a short last microbatch


class Part(nn.Module):
    """Owns modules of the library under their names there."""

    def __init__(self) -> None:
        super().__init__()
        self.held: tuple[str, ...] = ()

    def hold(self, name: str, module: nn.Module) -> None:
        """Puts ``module`` under its name in the library, dots and all."""
        node: nn.Module = self
        *steps, last = name.split(".")
        for step in steps:
            if step not in node._modules:
                node.add_module(step, nn.Module())
            node = node.get_submodule(step)
        node.add_module(last, module)
        self.held += (name,)

    def held_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The library's modules with their names there."""
        for name in self.held:
            yield name, self.get_submodule(name)


class EmbeddingPart(Part):
    """Token ids to the residual stream of the first layer."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        for name in skeleton.embedding:
            self.hold(name, skeleton.part(name))
        self._shell = skeleton.shell(dict(self.held_modules()))

    def forward(self, tokens: Tensor, *mask: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Runs the library's forward up to its first layer."""
        inputs = {"input_ids": tokens, "attention_mask": mask[0] if mask else None}
        self._shell.run(inputs, training=self.training)
        call = self._shell.layers[0].call
        assert call is not None
        self._shell.forget()
        return (call.hidden, *mask) if mask else call.hidden


class LayerPart(Part):
    """One decoder layer."""

    def __init__(self, skeleton: Skeleton, index: int, arguments: LayerArguments) -> None:
        super().__init__()
        self._name = f"{skeleton.layers_path}.{index}"
        self.hold(self._name, copy.deepcopy(skeleton.layers[index]))
        self._index = index
        self._arguments = arguments

    def forward(self, hidden: Tensor, *mask: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Calls the layer as the library would."""
        call = self._arguments.of(self._index, hidden, mask[0] if mask else None)
        output = call.on(self.get_submodule(self._name), hidden)
        return (output, *mask) if mask else output


class HeadPart(Part):
    """The last layer's residual stream to logits ``[batch, sequence, vocab]``."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        for name in skeleton.head:
            self.hold(name, skeleton.part(name))
        self._shell = skeleton.shell(dict(self.held_modules()))

    def forward(self, hidden: Tensor, *mask: Tensor) -> Tensor:
        """Runs the library's forward from behind its last layer."""
        self._shell.layers[-1].answer = hidden
        try:
            output = self._shell.run({"inputs_embeds": _blank(hidden)}, training=self.training)
        finally:
            self._shell.forget()
        logits: Tensor = output.logits
        return logits


class LayerArguments:
    """What layers are given besides the residual stream: masks, positions, rotary constants.

    They are worked out by the library's forward on every rank that has a layer, once per batch
    shape; with an attention mask, once per layer and microbatch.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._shell: Shell = skeleton.shell({})
        self._known: dict[tuple[Any, ...], tuple[Call | None, ...]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(self, index: int, hidden: Tensor, mask: Tensor | None) -> Call:
        """How layer ``index`` is called.

        Args:
            index: Counted from the first layer of the model.
            hidden: Only its shape, type and device matter.
            mask: 1 for tokens, 0 for padding ``[batch, sequence]``; None for no padding.
        """
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = (hidden.shape, hidden.dtype, hidden.device, autocast)
        calls = self._known.get(key) if mask is None else None
        if calls is None:
            calls = self._work_out(hidden, mask)
            if mask is None:
                while len(self._known) >= _KNOWN_SHAPES:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = calls
        call = calls[index]
        assert call is not None
        return call

    def _work_out(self, hidden: Tensor, mask: Tensor | None) -> tuple[Call | None, ...]:
        # What validation works out in inference mode could not be used in training. The library
        # takes fake tensors for a compiler's and makes masks that it leaves out otherwise.
        with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            given = None if mask is None else mask.clone()
            self._shell.run({"inputs_embeds": _blank(hidden), "attention_mask": given})
        calls = tuple(
            None if layer.call is None else _without_stream(layer.call)
            for layer in self._shell.layers
        )
        self._shell.forget()
        return calls


def _blank(like: Tensor) -> Tensor:
    """A tensor of the same kind that takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _without_stream(call: Call) -> Call:
    return Call(call.hidden.new_empty(()), call.positional, call.args, call.kwargs)
