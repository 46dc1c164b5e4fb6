"""A transformers model on the meta device, taken apart: what comes before, in and after its layers.

Nothing here knows an architecture: the list of layers is found by its length, what belongs in front
of it and behind it by running the library's forward once (``probe``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from launcher.workloads.hf.check import require_transformers
from launcher.workloads.hf.probe import probe
from launcher.workloads.hf.shape import HfShape
from launcher.workloads.hf.shell import Shell, put
from strategies.errors import ModelError


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The parts of a model, all weights on the meta device.

    Attributes:
        model: A ``PreTrainedModel`` without its layers; it is copied, never run.
        layers: The decoder layers.
        layers_path: Where they were.
        embedding: Names of the modules in front of the layers that a stage must own.
        head: The same behind them.
        tied: Parameter name -> the name of the parameter that it shares.
        returns_tuple: Whether a layer's output is a tuple.
    """

    model: Any
    layers: tuple[nn.Module, ...]
    layers_path: str
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    tied: Mapping[str, str]
    returns_tuple: bool

    def part(self, name: str) -> nn.Module:
        """A copy of one of the modules around the layers, on the meta device."""
        return copy.deepcopy(self.model.get_submodule(name))  # type: ignore[no-any-return]

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
    path = shape.layers_path or _find_layers(model, shape)
    layers = _layers_at(model, path, shape)
    tied = dict(model.all_tied_weights_keys)
    put(model, path, nn.ModuleList())
    order = probe(model, layers, path, shape.folder)
    return Skeleton(model, layers, path, order.before, order.after, tied, order.returns_tuple)


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
