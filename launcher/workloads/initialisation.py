"""Initial weights that do not depend on how a model is cut, sharded or placed.

Every parameter has a generator of its own, seeded by the global seed, its unit's name and its own
name. So a unit gets the same weights whether it is built alone on the last of eight ranks or with
all the others on one.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class SeededUnit(nn.Module, ABC):
    """A unit that knows the initial distribution of each of its parameters."""

    @abstractmethod
    def initial(self, parameter: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution of one parameter."""

    def owner(self, unit_name: str, parameter: str) -> str:
        """The global name that seeds a parameter; another unit's for a tied one."""
        return f"{unit_name}.{parameter}"

    def slices(self, parameter: str) -> range | None:
        """What a parameter's first dimension counts, where its slices are drawn one by one.

        A rank that holds some of them then draws what the others' numbers leave alone.
        """
        return None


def initialise(
    unit_name: str, module: SeededUnit, seed: int, *, device: torch.device | str = "cpu"
) -> None:
    """Gives ``module`` its initial weights, in place, without touching the global generators.

    Values are drawn on the CPU in float32 and then converted, so all dtypes and devices start from
    the same numbers. Parameters on the meta device become real ones on ``device``. Peak extra
    memory is one parameter. The unit's name is that in the whole model, e.g. ``net.layers.3.mlp``.
    """
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            parameter = _materialise(module, name, device)
        mean, deviation = module.initial(name)
        if deviation == 0.0:
            nn.init.constant_(parameter, mean)
            continue
        owner, slices = module.owner(unit_name, name), module.slices(name)
        places = (
            [(owner, parameter)]
            if slices is None
            else [(f"{owner}.{n}", part) for n, part in zip(slices, parameter, strict=True)]
        )
        with torch.no_grad():
            for seeded, place in places:
                place.copy_(_draw(seeded, place.shape, seed).mul_(deviation).add_(mean))


def _draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(derived_seed(seed, name))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _materialise(module: nn.Module, name: str, device: torch.device | str) -> nn.Parameter:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    meta = owner.get_parameter(leaf)
    real = nn.Parameter(torch.empty_like(meta, device=device), requires_grad=meta.requires_grad)
    setattr(owner, leaf, real)
    return real


def derived_seed(seed: int, name: str) -> int:
    """A 64-bit signed seed from the run's seed and the name of what it is for.

    A hash, not Python's ``hash``: the latter differs between processes.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
