"""A transformers model on the meta device, taken apart: what comes before, in and after its layers.

Nothing here knows an architecture: the list of layers is found by its length, what belongs in front
of it and behind it by running the library's forward once (``_probe``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.workloads.hf.hf_shape import HfShape, require_transformers
from launcher.workloads.hf.routers import (
    Balance,
    Routers,
    check_loss,
    read_balance,
    recorded_routers,
)
from strategies.errors import ModelError


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The parts of a model, all weights on the meta device."""

    model: Any  # a ``PreTrainedModel`` without its layers; it is copied, never run
    layers: tuple[nn.Module, ...]
    layers_path: str  # where they were
    embedding: tuple[str, ...]  # names of the modules in front of the layers that a stage must own
    head: tuple[str, ...]  # the same behind them
    tied: Mapping[str, str]  # parameter name -> the name of the parameter that it shares
    returns_tuple: bool  # whether a layer's output is a tuple
    balance: Balance | None = None  # the loss of its routers, where the configuration asks for it
    routers: Routers | None = None  # which modules of its layers these are

    def part(self, name: str) -> nn.Module:
        return copy.deepcopy(self.model.get_submodule(name))  # type: ignore[no-any-return]

    def named_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules that units own, on the meta device."""
        for name in (*self.embedding, *self.head):
            yield name, self.model.get_submodule(name)
        for index, layer in enumerate(self.layers):
            yield f"{self.layers_path}.{index}", layer

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model with its layers where they were, for what asks for shapes."""
        _put(self.model, self.layers_path, nn.ModuleList(self.layers))
        try:
            yield self.model
        finally:
            _put(self.model, self.layers_path, nn.ModuleList())

    def shell(self, live: Mapping[str, nn.Module]) -> Shell:
        """The library's forward around some real modules; stand-ins for all others."""
        return Shell(
            self.model, self.layers, self.layers_path, live, returns_tuple=self.returns_tuple
        )


def build_skeleton(shape: HfShape) -> Skeleton:
    """Builds the model that ``config.json`` describes and takes it apart.

    Raises:
        ModelError: transformers is missing or does not know the architecture, or the model cannot
            be taken apart; the message says how to declare its layers.
    """
    require_transformers()
    model = _build(shape)
    balance = read_balance(model, shape)
    routers = None if balance is None else recorded_routers(model)
    # What stands for the layers has no routers: their loss is made of what the layers hand on.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    path = shape.layers_path or _find_layers(model, shape)
    layers = _layers_at(model, path, shape)
    tied = dict(model.all_tied_weights_keys)
    _put(model, path, nn.ModuleList())
    order = _probe(model, layers, path, shape.folder)
    skeleton = Skeleton(
        model, layers, path, order.before, order.after, tied, order.returns_tuple, balance, routers
    )
    check_loss(skeleton.shell({}), balance, shape)
    return skeleton


def _build(shape: HfShape) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(shape.folder)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            # Which type the weights have is the run's choice (trainer.precision).
            factory: Any = AutoModelForCausalLM
            model = factory.from_config(config, dtype=torch.float32)
    except Exception as error:  # the library raises whatever its configuration classes raise
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ModelError(
            f"model.path={shape.folder}: the transformers library cannot build "
            f"model_type={shape.model_type} as a causal language model: "
            f"{reason}. Try another model, or a newer transformers."
        ) from None
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta:  # not every way to make one asks where to
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            _put(model, name, empty)
    return model.eval()


def _find_layers(model: Any, shape: HfShape) -> str:
    lists: dict[str, int] = {
        n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    }
    # Lists inside of layers (experts) have the outer list's name in front.
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    fitting = [name for name in outer if lists[name] == wanted]
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(f"{name} ({lists[name]})" for name in outer) or "none"
    raise ModelError(
        f"model.path={shape.folder}: {type(model).__name__} has {len(fitting)} lists of "
        f"num_hidden_layers={wanted} decoder layers, one is needed; its lists: {found}. "
        f"Try naming it: model.layers_path={outer[0] if outer else 'model.layers'}."
    )


def _layers_at(model: Any, path: str, shape: HfShape) -> tuple[nn.Module, ...]:
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if path not in lists:
        raise ModelError(
            f"model.layers_path={path}: {type(model).__name__} in {shape.folder} has no list of "
            f"layers of that name. Its lists: {', '.join(lists) or 'none'}. "
            f"Try model.layers_path={next(iter(lists), 'null')}."
        )
    return tuple(lists[path])


# ------------------------------------------------------------------------------------------- probe
# Whether the layers are a chain: each is given the output of the one before, and otherwise only
# what every stage can work out for itself.


_ROWS, _TOKENS = 2, 4


@dataclass(frozen=True, slots=True)
class _Order:
    """What a run has shown."""

    # Names of the modules that run in front of the layers and have weights, or only act in training
    # (dropout).
    before: tuple[str, ...]
    after: tuple[str, ...]  # the same behind them
    returns_tuple: bool  # whether a layer's output is a tuple


class _NoChainError(Exception):
    """Why the layers cannot be cut apart."""


def _probe(model: Any, layers: Sequence[nn.Module], path: str, folder: str) -> _Order:
    """Runs a few tokens through the model's own forward, without weights."""
    reasons: list[str] = []
    for returns_tuple in (False, True):
        try:
            shell = Shell(model, layers, path, {}, returns_tuple=returns_tuple)
            before, after = _order(shell, model, path)
        except _NoChainError as reason:
            reasons.insert(0, str(reason))  # says more than what a forward has stumbled over
        except Exception as error:  # whatever a forward does when its parts are missing
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
        else:
            return _Order(before, after, returns_tuple)
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
    kept = {name for name, module in _sides(model, path).items() if _belongs_to_a_unit(module)}
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
    for layer in shell.layers:
        layer.answer, layer.answers_anew = None, True
    try:
        shell.run(inputs)
    finally:
        for layer in shell.layers:
            layer.answers_anew = False
        for hook in hooks:
            hook.remove()
    order = [mark for mark in seen if isinstance(mark, int)]
    if order != list(range(len(shell.layers))):
        raise _NoChainError(f"its {len(shell.layers)} layers are called in the order {order}")
    first, last = seen.index(0), seen.index(len(shell.layers) - 1)
    weighted = {n for n, m in shell.sides.items() if isinstance(m, _WeightStandIn)}
    between = [mark for mark in seen[first:last] if mark in weighted]
    if between:
        raise _NoChainError(f"{between[0]} runs between its layers")
    for index in range(1, len(shell.layers)):
        call = shell.layers[index].call
        if call is None or call.hidden is not shell.layers[index - 1].answer:
            raise _NoChainError(f"layer {index} is not given the output of layer {index - 1}")
        if any(value is _BESIDE for value in (*call.args, *call.kwargs.values())):
            raise _NoChainError(f"layer {index} is given more of layer {index - 1} than its output")
    return [str(mark) for mark in seen[:first]], [str(mark) for mark in seen[last + 1 :]]


class Shell:
    """Runs a copy of ``model``, on the meta device, without its layers, which were at ``path``.

    The ``live`` modules around them, which a unit owns, are shared, not copied.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        path: str,
        live: Mapping[str, nn.Module],
        *,
        returns_tuple: bool,
    ) -> None:
        copied = copy.deepcopy(model)
        self.width = int(model.get_input_embeddings().weight.shape[-1])
        self.sides = _sides(copied, path)
        for name, module in self.sides.items():
            if name in live:
                self.sides[name] = live[name]
            elif any(True for _ in module.parameters()):
                self.sides[name] = _WeightStandIn(self.width)
            else:
                fill_constants(copied, module)
            _put(copied, name, self.sides[name])
        self.layers = tuple(_LayerStandIn(layer, returns_tuple=returns_tuple) for layer in layers)
        _put(copied, path, nn.ModuleList(self.layers))
        steps = path.split(".")
        self._around = [copied.get_submodule(".".join(steps[:end])) for end in range(len(steps))]
        for module in self._around:
            _fill_own_constants(copied, module)
        self._model = copied
        self._live = live

    def run(self, inputs: Mapping[str, Tensor | None], *, training: bool = False) -> Any:
        """The forward's output; afterwards each layer's ``call`` is known.

        ``inputs`` are as the model takes them, ``input_ids`` or ``inputs_embeds`` first. Dropout
        outside of modules of its own acts in ``training``.
        """
        first = next(value for value in inputs.values() if value is not None)
        device = first.device
        for module in self._around:
            module.training = training
            _move_buffers(module, device)
        for name, module in self.sides.items():
            if isinstance(module, _WeightStandIn):
                dtype = first.dtype if first.is_floating_point() else torch.float32
                if (module.weight.dtype, module.weight.device) != (dtype, device):
                    module.become(dtype, device)
            elif name not in self._live:
                for part in module.modules():
                    _move_buffers(part, device)
        return self._model(**inputs, use_cache=False)

    def run_head(self, ids: Tensor, logits: Tensor, *, routers: bool) -> Any:
        """The forward's output with a loss of labels, where the last projection gives ``logits``.

        Labels are the token ids ``[rows, tokens]``; with ``routers`` it takes their loss, too.
        """
        asked = {"output_router_logits": True} if routers else {}
        with _projecting(self._model, logits):
            return self._model(input_ids=ids, labels=ids, use_cache=False, **asked)

    @property
    def model(self) -> Any:
        """What is run, of the library's own class."""
        return self._model

    def blank(self, stream: Tensor) -> Tensor:
        """Embeddings for a residual stream of this kind, which may be wider; takes no memory."""
        zero = torch.zeros((), dtype=stream.dtype, device=stream.device)
        return zero.expand(*stream.shape[:2], self.width)

    def forget(self) -> None:
        for layer in self.layers:
            layer.call = layer.answer = None


@contextmanager
def _projecting(model: Any, logits: Tensor) -> Iterator[None]:
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *_: logits)
    try:
        yield
    finally:
        hook.remove()


def _sides(model: nn.Module, path: str) -> dict[str, nn.Module]:
    """All modules around the list of layers at ``path``, each as large as possible, by name."""
    found: dict[str, nn.Module] = {}
    node, prefix = model, ""
    for step in path.split("."):
        for name, child in node.named_children():
            if name != step:
                found[prefix + name] = child
        node, prefix = node.get_submodule(step), f"{prefix}{step}."
    return found


def _put(model: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, value)


def fill_constants(model: Any, module: nn.Module) -> None:
    """Computes buffers (rotary frequencies) that building on the meta device has left empty."""
    for part in module.modules():
        _fill_own_constants(model, part)


def _fill_own_constants(model: Any, part: nn.Module) -> None:
    empty = {k: b for k, b in part._buffers.items() if b is not None and b.is_meta}
    if not empty:
        return
    for name, buffer in empty.items():
        kind = torch.float32 if buffer.is_floating_point() else buffer.dtype
        part._buffers[name] = torch.empty_like(buffer, dtype=kind, device="cpu")
    with torch.no_grad():
        # The library's own contract: this is how it restores them after from_pretrained().
        model._init_weights(part)
    for name, buffer in empty.items():
        filled = part._buffers[name]
        assert filled is not None
        part._buffers[name] = filled.to(buffer.dtype)


def _move_buffers(part: nn.Module, device: torch.device) -> None:
    for key, buffer in part._buffers.items():
        if buffer is not None and buffer.device != device:
            part._buffers[key] = buffer.to(device)


# ---------------------------------------------------------------------------------------- standins
# A stage never repeats what the library does between layers (masks, positions, scalings): it runs
# the library's forward with these in the places of layers and weights, and looks at what comes by.


@dataclass(frozen=True, slots=True)
class Call:
    """How the forward called one layer."""

    hidden: Tensor  # the residual stream that it was given
    positional: bool  # whether that was the first argument, or ``hidden_states=``
    args: tuple[Any, ...]  # all further positional arguments
    kwargs: dict[str, Any]  # all but ``hidden_states``

    def on(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        if self.positional:
            output = layer(hidden, *self.args, **self.kwargs)
        else:
            output = layer(*self.args, hidden_states=hidden, **self.kwargs)
        result: Tensor = output[0] if isinstance(output, tuple | list) else output
        return result

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All tensors but the residual stream, with a name for messages."""
        found: list[tuple[str, Tensor]] = []
        numbered = ((f"argument {i + 1}", value) for i, value in enumerate(self.args))
        for name, value in (*numbered, *self.kwargs.items()):
            for entry in value if isinstance(value, tuple | list) else (value,):
                if isinstance(entry, Tensor):
                    found.append((name, entry))
        return found


_BESIDE = "what a layer returns besides the residual stream"


class _LayerStandIn(nn.Module):
    """Stands for a decoder layer: remembers how it was called and hands its input on.

    The original's plain attributes are copied: some forwards ask a layer for its kind.
    """

    def __init__(self, original: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)
        self._returns_tuple = returns_tuple
        self.call: Call | None = None
        self.answer: Tensor | None = None
        self.answers_anew = False  # with zeros like its input, which ``answer`` then is

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The answer that was put in, else the residual stream as it came."""
        positional = "hidden_states" not in kwargs
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        hidden = args[0] if positional else kwargs["hidden_states"]
        self.call = Call(hidden, positional, args[1:] if positional else args, rest)
        if self.answers_anew:
            self.answer = torch.zeros_like(hidden)
        answer = hidden if self.answer is None else self.answer
        return (answer, _BESIDE) if self._returns_tuple else answer


class _WeightStandIn(nn.Module):
    """Stands for an embedding, norm or projection: the right shape, and no weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.weight: nn.Parameter
        self.become(torch.float32, torch.device("cpu"))

    def become(self, dtype: torch.dtype, device: torch.device) -> None:
        """Forwards ask weights for type and device; nothing can be computed with this one."""
        empty = torch.empty(0, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Vectors as they are; zeros of ``dtype`` for ids and positions, once per element."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if given and given[0].is_floating_point() and given[0].dim() >= 3:
            return given[0]
        ids = bool(given) and given[0].dtype in (torch.int32, torch.int64)
        zero = torch.zeros((), dtype=self.weight.dtype, device=given[0].device if given else None)
        return zero.expand(*given[0].shape, self._width) if ids else zero
