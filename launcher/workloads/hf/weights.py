"""Gives one unit of a Hugging Face model its weights: drawn by its own rules, or read from files.

A rank calls this for the units of its stages only. Neither way ever holds more than one unit beyond
those that are kept.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from launcher.workloads.hf.parts import Part
from launcher.workloads.hf.skeleton import Skeleton, fill_constants
from launcher.workloads.hf.stored import Stored, is_floating, match_tensors, stored_tensors
from launcher.workloads.transformer import derived_seed
from strategies.errors import ModelError

# --------------------------------------------------------------------------------------------------
# From the tensors in files to those of a network and back, as the transformers library converts.
#
# Version 5 of the library renames and merges tensors while it loads: a file has a matrix per
# expert, the network one for all of them. The rules are the library's own
# (``get_model_conversion_mapping``) and nothing here knows one. They are tried on names and shapes
# first, so a rank knows which stored tensors each parameter is made of, and reads no others.


@dataclass(slots=True)
class _Recipe:
    """Some parameters and the stored tensors that they are made of together."""

    first: str  # the name that the library knows the whole of it by
    converter: Any | None  # None for a tensor that is taken as it is
    sources: list[tuple[str, str]] = field(default_factory=list)  # pattern, stored name


class Conversion:
    """How each tensor of a network comes from those that are stored.

    Attributes:
        made: What the stored tensors come to: name in the network -> shape and (first) file; under
            their stored names those that nothing is made of.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        expected: Mapping[str, tuple[int, ...]],
        stored: Mapping[str, Stored],
        *,
        folder: Path,
    ) -> None:
        """Works it out by names and shapes.

        Raises:
            ModelError: The stored tensors are not what the library's rules are made for.
        """
        self._skeleton = skeleton
        self._folder = folder
        ignored = [re.compile(p) for p in skeleton.model._keys_to_ignore_on_load_unexpected or ()]
        self.made: dict[str, Stored] = {}
        recipes: dict[str, _Recipe] = {}
        for name, found, pattern, converter in _renamed(skeleton, expected, stored):
            recipe = recipes.get(found)
            if found in expected and (recipe is None or converter is not None):
                recipe = recipes.setdefault(found, _Recipe(found, converter))
                recipe.sources.append((pattern or name, name))
            elif not any(rule.search(found) for rule in ignored):
                self.made[name] = stored[name]
        self._recipe_of: dict[str, _Recipe] = {}
        for recipe in recipes.values():
            # One of a type that is refused stands for all.
            source = min((stored[name] for _, name in recipe.sources), key=is_floating)
            shapes = {recipe.first: source.shape}
            if recipe.converter is not None:
                empty = self._converted(recipe, lambda name: _empty(stored[name]))
                shapes = {name: tuple(value.shape) for name, value in empty.items()}
            for name, shape in shapes.items():
                self.made[name] = replace(source, shape=shape)
                self._recipe_of[name] = recipe

    def values(
        self, names: Iterable[str], read: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the network; ``read`` gets the name of a stored one.

        Those that are made of the same stored ones should be asked for together.
        """
        waiting: dict[str, Tensor] = {}
        for name in names:
            if name not in waiting:
                recipe = self._recipe_of[name]
                waiting |= self._converted(recipe, read)
            yield name, waiting.pop(name)

    def _converted(self, recipe: _Recipe, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        if recipe.converter is None:
            return {recipe.first: read(recipe.sources[0][1])}
        # It collects what it is given, and forgets it when it has converted.
        converter = copy.deepcopy(recipe.converter)
        tensors = [read(name) for _, name in recipe.sources]
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        for (pattern, name), tensor in zip(recipe.sources, tensors, strict=True):
            converter.add_tensor(recipe.first, name, pattern, tensor.to(dtype))
        del tensors
        try:
            with self._skeleton.whole() as model:
                found = converter.convert(recipe.first, model=model, config=model.config)
            if isinstance(found, tuple):  # transformers 5.0: and what went wrong
                found = found[0]
        except Exception as error:  # the library raises whatever torch does
            raise ModelError(
                f"model.path={self._folder}: the {len(recipe.sources)} stored tensors of "
                f"{recipe.first} ({recipe.sources[0][1]}, ...) cannot be converted by the "
                f"transformers library: {' '.join(str(error).split())[:200]}. Try a complete copy "
                "of the folder, or the config.json that belongs to these files."
            ) from None
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }


def as_stored(skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What ``save_pretrained`` writes of a network's tensors: the names of files on the hub.

    Tied ones are written once. Some of the result shares memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = skeleton.tied
    once = {
        name: value
        for name, value in tensors.items()
        if name not in tied or tied[name] not in tensors
    }
    with skeleton.whole() as model:
        found: dict[str, Tensor] = revert_weight_conversion(model, once)
    return found


def _renamed(
    skeleton: Skeleton, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]
) -> Iterator[tuple[str, str, str | None, Any | None]]:
    """Per stored tensor its name, that in the network, and the converter (by which pattern)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    model = skeleton.model
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = model.base_model_prefix, dict(expected)
    # In the library's order: some of its rules act only after another one has.
    for name in sorted(stored, key=dot_natural_key):
        found, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if found not in known and name in known:
            found, pattern = rename_source_key(name, [], [], prefix, known)
        yield name, found, pattern, None if pattern is None else by_pattern[pattern]


def _empty(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, device="meta")


# --------------------------------------------------------------------------------------------------
class Weights(ABC):
    """Where the weights of a model come from."""

    borrowed: bool  # whether values lie in memory that belongs to somebody else

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton

    def fill(self, part: Part, *, device: torch.device | str = "cpu") -> None:
        """Replaces all parameters and buffers of a unit that are on the meta device."""
        for name, module in part.held_modules():
            values = dict(self._values(name, module))
            for leaf in module.modules():
                fill_constants(self._skeleton.model, leaf)
            made: dict[nn.Parameter, nn.Parameter] = {}
            for key, parameter in list(module.named_parameters(remove_duplicate=False)):
                if parameter.is_meta:
                    if parameter not in made:
                        value = values.pop(f"{name}.{key}")
                        value = value.to(device=device, dtype=parameter.dtype, copy=self.borrowed)
                        made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    _put(module, key, made[parameter])
            # After the constants: what restores those may have written to buffers beside them.
            for key, buffer in list(module.named_buffers()):
                if f"{name}.{key}" in values:
                    stored = values[f"{name}.{key}"]
                    path, _, last = key.rpartition(".")
                    stored = stored.to(dtype=buffer.dtype, copy=self.borrowed)
                    module.get_submodule(path)._buffers[last] = stored

    @abstractmethod
    def check(self) -> None:
        """Refuses what ``fill`` would refuse in any unit, as far as it takes few values."""

    @abstractmethod
    def _values(self, name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names in the library and values of all parameters of a module, and of stored buffers."""


class FreshWeights(Weights):
    """Every module draws its own, by the library's rules, from a seed of its name.

    So neither the cut nor the number of ranks changes them. They are drawn in float32 on the CPU.
    The global generator is put back.
    """

    borrowed = False

    def __init__(self, skeleton: Skeleton, seed: int) -> None:
        super().__init__(skeleton)
        self._seed = seed

    def check(self) -> None:
        # Parameters that no rule has written to: only those are worth drawing to see.
        for name, module in self._skeleton.named_parts():
            copied = copy.deepcopy(module)
            before = {key: p._version for key, p in copied.named_parameters()}
            for part in copied.modules():
                self._initialise(part)
            for key, parameter in copied.named_parameters():
                if parameter._version == before[key]:
                    path = key.rpartition(".")[0]
                    self._draw(".".join(filter(None, (name, path))), module.get_submodule(path))

    def _values(self, name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        tied = self._skeleton.tied
        drawn = self._draw(name, module)
        for key, value in drawn.items():
            source = tied.get(key)
            if source is not None and source not in drawn:
                owner = source.rpartition(".")[0]
                value = self._draw(owner, self._skeleton.part(owner))[source]
            yield key, value

    def _draw(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        copied = copy.deepcopy(module).to(torch.float32).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameter in copied.parameters():
                parameter.fill_(torch.nan)  # until there is a value
            # Children first, as the library does it: parents may redraw what they know better.
            for key, part in reversed(list(copied.named_modules())):
                torch.default_generator.manual_seed(derived_seed(self._seed, f"{name}.{key}"))
                self._initialise(part)
        drawn = {f"{name}.{key}": p.detach() for key, p in copied.named_parameters()}
        left = next((key for key, value in drawn.items() if value.isnan().any()), None)
        if left is not None:
            raise self._undrawn(f"has no rule for {left}")
        return drawn

    def _initialise(self, part: nn.Module) -> None:
        try:
            self._skeleton.model._init_weights(part)
        except Exception as error:  # rules that only a model with all of its parts can follow
            raise self._undrawn(f"fails at a {type(part).__name__} ({error})") from None

    def _undrawn(self, reason: str) -> ModelError:
        kind = type(self._skeleton.model).__name__
        return ModelError(
            f"model.pretrained=false: the transformers library draws the weights of {kind}, and "
            f"{reason}. Try weights of a file: {kind}(config).save_pretrained(FOLDER), then "
            "model.path=FOLDER model.pretrained=true."
        )


class StoredWeights(Weights):
    """Those in the ``*.safetensors`` files of a model folder."""

    borrowed = True  # by the mapped file, which may change during the run

    def __init__(self, skeleton: Skeleton, folder: Path) -> None:
        super().__init__(skeleton)
        model = skeleton.model
        self._stored: dict[str, Stored] = stored_tensors(folder)
        expected = expected_tensors(skeleton)
        self._conversion = Conversion(skeleton, expected, self._stored, folder=folder)
        self._names = match_tensors(
            expected,
            self._conversion.made,
            folder=folder,
            prefix=f"{model.base_model_prefix}.",
            tied=skeleton.tied,
            ignore=tuple(model._keys_to_ignore_on_load_unexpected or ()),
        )

    def _values(self, name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        stored = [key for key, _ in module.named_buffers() if f"{name}.{key}" in self._names]
        wanted = [f"{name}.{key}" for key, _ in module.named_parameters()]
        wanted += [f"{name}.{key}" for key in stored]
        sources = [self._names[full] for full in wanted]
        found = self._conversion.values(sources, self._read)
        for full, (_, value) in zip(wanted, found, strict=True):
            self._check_tied(full, value)
            yield full, value

    def check(self) -> None:
        for name in self._skeleton.tied:
            if self._names[name] != self._names[self._skeleton.tied[name]]:
                ((_, value),) = self._conversion.values([self._names[name]], self._read)
                self._check_tied(name, value)

    def _check_tied(self, name: str, value: Tensor) -> None:
        source = self._skeleton.tied.get(name)
        if source is None or self._names[source] == self._names[name]:
            return
        ((_, other),) = self._conversion.values([self._names[source]], self._read)
        if not torch.equal(value, other):
            raise ModelError(
                f"{self._conversion.made[self._names[name]].file}: {name} and {source} differ, but "
                "config.json ties them (tie_word_embeddings). "
                'Try "tie_word_embeddings": false there.'
            )

    def _read(self, name: str) -> Tensor:
        file = self._stored[name].file
        try:
            with safe_open(file, framework="pt") as opened:
                found: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}. Try a fresh copy of it.") from None
        return found


def expected_tensors(skeleton: Skeleton) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter and stored buffer of the whole model."""
    return {
        f"{name}.{key}": tuple(value.shape)
        for name, module in skeleton.named_parts()
        for key, value in module.state_dict().items()
    }


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)
