"""A module that declares a few of its units only, and has weights for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from strategies.runtime.unit_model import Elsewhere

_DEVIATION = 0.02


def choose_units(module: Any, units: Sequence[int]) -> nn.Module:
    """Leaves the chosen units in a module that is on the meta device.

    Args:
        module: Declares units (``HasUnits``).
        units: Places of those that stay.

    Returns:
        The same module; its ``pipeline_units`` and ``unit_costs`` know the chosen ones only.
    """
    declared = module.pipeline_units()
    kept = [declared[place] for place in units]
    names = {name for name, _ in kept}
    for name, _ in declared:
        if name not in names:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, Elsewhere())
    module.pipeline_units = lambda: kept
    module.unit_costs = lambda: [1.0] * len(kept)
    assert isinstance(module, nn.Module)
    return module


def draw_quickly(module: Any, device: torch.device, tie: Callable[[], None]) -> None:
    """Lets a module's weights be made on a device, from any numbers: only their sizes matter.

    Args:
        module: Its ``initialise_unit`` is replaced.
        device: Where.
        tie: Called after each unit, to share what is shared.
    """

    def initialise_unit(name: str) -> None:
        unit = module.get_submodule(name)
        for path, parameter in list(unit.named_parameters()):
            if parameter.is_meta:
                owner, _, leaf = path.rpartition(".")
                real = torch.empty_like(parameter, device=device).uniform_(-_DEVIATION, _DEVIATION)
                setattr(unit.get_submodule(owner), leaf, nn.Parameter(real))
        tie()

    module.initialise_unit = initialise_unit
