"""Pipeline programs: generated, verified, simulated and executed from one instruction list.

``PipelineStrategy`` runs a LightningModule through such a program; ``compile_program`` and
``simulate`` need no torch. Names are imported when they are used, so that importing the
instruction set stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.compiler import compile_program
    from strategies.costs.uniform import UniformCosts
    from strategies.runtime.lightning.strategy import PipelineStrategy
    from strategies.simulator.engine import simulate

_HOMES = {
    "PipelineStrategy": "strategies.runtime.lightning.strategy",
    "compile_program": "strategies.compiler",
    "simulate": "strategies.simulator.engine",
    "UniformCosts": "strategies.costs.uniform",
}

__all__ = ["PipelineStrategy", "UniformCosts", "compile_program", "simulate"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    if name == "PipelineStrategy":  # Trainer(strategy=PipelineStrategy) is refused before one is.
        import_module("strategies.runtime.lightning.last_words").speak_once()
    return found
