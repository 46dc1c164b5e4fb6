"""From the tensors in files to those of a network and back, as the transformers library converts.

Version 5 of the library renames and merges tensors while it loads: a file has a matrix per expert,
the network one for all of them. The rules are the library's own (``get_model_conversion_mapping``)
and nothing here knows one. They are tried on names and shapes first, so a rank knows which stored
tensors each parameter is made of, and reads no others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.workloads.hf.skeleton import Skeleton
from launcher.workloads.hf.stored import Stored, is_floating
from strategies.errors import ModelError


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
