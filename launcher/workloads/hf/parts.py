"""The units of a Hugging Face model: embedding, one per decoder layer, head.

A unit owns the library's modules under their names in the library, so a parameter is called
``<unit>.<name in the library>``. Units exchange the residual stream ``[batch, sequence, hidden]``;
where routers have a loss, what its sums have come to, ``[batch, 2, experts]``; and, for batches
that have one, the attention mask ``[batch, sequence]`` as it came.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from launcher.workloads.hf.hf_shape import EMBEDDING, HEAD, NETWORK, HfShape
from launcher.workloads.hf.routers import Balance, recording
from launcher.workloads.hf.skeleton import Call, Shell, Skeleton
from strategies.errors import ModelError
from strategies.models.tensor_parallel.layer_plan import Style, Vocabulary, read_style

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Part:
        """As any module; experts are computed one by one in double precision.

        The library has them multiplied as a group, which torch does in shorter types alone.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if any(parameter.dtype == torch.float64 for parameter in self.parameters()):
            for module in self.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "_experts_implementation", None) == "grouped_mm":
                    config._experts_implementation = "eager"
        return self

    def held_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name in self.held:
            yield name, self.get_submodule(name)


class EmbeddingPart(Part):
    """Token ids to the residual stream of the first layer."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        for name in skeleton.embedding:
            self.hold(name, skeleton.part(name))
        self._shell = skeleton.shell(dict(self.held_modules()))
        self._balance = skeleton.balance

    def forward(self, tokens: Tensor, *mask: Tensor) -> Tensor | tuple[Tensor, ...]:
        inputs = {"input_ids": tokens, "attention_mask": mask[0] if mask else None}
        self._shell.run(inputs, training=self.training)
        call = self._shell.layers[0].call
        assert call is not None
        self._shell.forget()
        sums = () if self._balance is None else (self._balance.nothing(call.hidden),)
        along = (*sums, *mask)
        return (call.hidden, *along) if along else call.hidden


class LayerPart(Part):
    """One decoder layer."""

    def __init__(self, skeleton: Skeleton, index: int, arguments: LayerArguments) -> None:
        super().__init__()
        self._name = f"{skeleton.layers_path}.{index}"
        self.hold(self._name, copy.deepcopy(skeleton.layers[index]))
        self._index = index
        self._arguments = arguments
        self._balance, self._routers = skeleton.balance, skeleton.routers

    def forward(self, hidden: Tensor, *along: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self._balance is not None:
            return self._routed(self._balance, hidden, *along)
        call = self._arguments.of(self._index, hidden, along[0] if along else None)
        output = call.on(self.get_submodule(self._name), hidden)
        return (output, *along) if along else output

    def _routed(
        self, balance: Balance, hidden: Tensor, sums: Tensor, *masks: Tensor
    ) -> tuple[Tensor, ...]:
        mask = masks[0] if masks else None
        call = self._arguments.of(self._index, hidden, mask)
        layer = self.get_submodule(self._name)
        assert self._routers is not None
        with recording(self._routers.inside(layer), self._routers.index) as seen:
            output = call.on(layer, hidden)
        for logits in seen:  # none where a layer has an MLP
            sums = sums + balance.sums(logits.view(*hidden.shape[:2], -1), mask)
        return (output, sums, *masks)


class HeadPart(Part):
    """The last layer's residual stream to logits ``[batch, sequence, vocab]``."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        for name in skeleton.head:
            self.hold(name, skeleton.part(name))
        self._shell = skeleton.shell(dict(self.held_modules()))
        self._balanced = skeleton.balance is not None

    def forward(self, hidden: Tensor, *along: Tensor) -> Tensor | tuple[Tensor, ...]:
        self._shell.layers[-1].answer = hidden
        inputs = {"inputs_embeds": self._shell.blank(hidden)}
        try:
            output = self._shell.run(inputs, training=self.training)
        finally:
            self._shell.forget()
        logits: Tensor = output.logits
        return (logits, along[0]) if self._balanced else logits


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

        Of ``hidden`` only shape, type and device matter. ``mask`` is 1 for tokens, 0 for padding
        ``[batch, sequence]``; None for no padding.
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
            self._shell.run({"inputs_embeds": self._shell.blank(hidden), "attention_mask": given})
        calls = tuple(
            None if layer.call is None else _without_stream(layer.call)
            for layer in self._shell.layers
        )
        self._shell.forget()
        return calls


def _without_stream(call: Call) -> Call:
    return Call(call.hidden.new_empty(()), call.positional, call.args, call.kwargs)


class HfNetwork(nn.Module):
    """Embedding, layers and head of a skeleton, on the meta device."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        arguments = LayerArguments(skeleton)
        self.embedding = EmbeddingPart(skeleton)
        self.layers = nn.ModuleList(
            LayerPart(skeleton, index, arguments) for index in range(len(skeleton.layers))
        )
        self.head = HeadPart(skeleton)
        self._tied: Mapping[str, str] = dict(skeleton.tied)
        self.tie()
        self.train()  # as any new module; the skeleton's parts are not

    def named_units(self) -> Iterator[tuple[str, nn.Module]]:
        yield "embedding", self.embedding
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}", layer
        yield "head", self.head

    def tie(self) -> None:
        """Makes parameters that the library ties one, where both ends are here and alike.

        A cut puts other modules in the places of units that live elsewhere; and while only one end
        has its weights, they stay two.
        """
        if not self._tied:
            return
        owners: dict[str, nn.Module] = {}
        for unit in (self.embedding, self.head):
            if isinstance(unit, Part):
                for name, _ in unit.named_parameters(remove_duplicate=False):
                    owners[name] = unit
        for target, source in self._tied.items():
            if target in owners and source in owners:
                first = owners[source].get_parameter(source)
                last = owners[target].get_parameter(target)
                if first is not last and first.is_meta == last.is_meta:
                    path, _, leaf = target.rpartition(".")
                    setattr(owners[target].get_submodule(path), leaf, first)

    def run(self, tokens: Tensor, *mask: Tensor) -> tuple[Tensor, ...]:
        """What the head gives: logits ``[batch, sequence, vocab]``, and sums if routers have some.

        Tokens and mask are ``[batch, sequence]``.
        """
        tensors: tuple[Any, ...] = (tokens, *mask)
        for _, unit in self.named_units():
            result = unit(*tensors)
            tensors = result if isinstance(result, tuple) else (result,)
        return tensors

    def forward(self, tokens: Tensor, *mask: Tensor) -> Tensor:
        """Token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``."""
        return self.run(tokens, *mask)[0]


_LISTED = "layers.*."


def library_plan(skeleton: Skeleton, shape: HfShape) -> dict[str, Style] | None:
    """Module names of ``HfLanguageModel`` to styles; embedding and head are cut by token ids.

    None where the library has no plan for the family, or one in words that are not known here.
    """
    config: Any = skeleton.model.config.get_text_config()
    given = getattr(config, "base_model_tp_plan", None)
    own = {key: word for key, word in (given or {}).items() if key.startswith(_LISTED)}
    if not own:
        return None
    head = getattr(config, "head_dim", None) or shape.hidden // config.num_attention_heads
    layers = f"{NETWORK}layers.*.{skeleton.layers_path}.*."
    plan: dict[str, Style] = {}
    for key, word in own.items():
        name = key.removeprefix(_LISTED)
        try:
            style = read_style(key, word)
        except ModelError:
            return None
        if ("attn" in name or "attention" in name) and style.style in ("column", "row"):
            style = replace(style, block=head)  # Heads stay whole.
        plan[layers + name] = style
    ends = ((EMBEDDING, skeleton.embedding, nn.Embedding), (HEAD, skeleton.head, nn.Linear))
    for unit, names, kind in ends:
        for name in names:
            part = skeleton.model.get_submodule(name)
            if isinstance(part, kind) and part.weight.shape[0] == shape.vocab:
                if type(part).forward is not kind.forward:
                    return None  # A table that scales what it gives, say.
                plan[f"{unit}.{name}"] = Vocabulary()
    return plan
