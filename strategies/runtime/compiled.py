"""``torch.compile`` for the units of a cut model, one by one.

Units, not stages: layers of one kind share their code, so a stage of many layers compiles as fast
as one of one, and what is compiled does not depend on the cut. The program around them (messages,
gradients' hooks, the order) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

# Random numbers as without compilation: dropout then does not depend on ``compile``, and depends
# on (seed, unit) alone as it does there.
_OPTIONS = {"fallback_random": True}


def compile_units(units: Iterable[nn.Module]) -> None:
    """Lets calls of modules run compiled; names, parameters and hooks stay where they are.

    A module that its owner has compiled is left alone. Nothing is compiled before the first call.
    """
    codes: dict[Hashable, CodeType] = {}
    for unit in units:
        if unit.__dict__.get("_compiled_call_impl") is None and not hasattr(unit, "_orig_mod"):
            # As ``unit.compile()`` does, which leaves torch's own modules (nn.Linear,
            # nn.Sequential) uncompiled: the frame that is traced must not be torch's.
            function = _call_of(unit, codes)
            unit._compiled_call_impl = torch.compile(function, options=dict(_OPTIONS))


def _call_of(unit: nn.Module, codes: dict[Hashable, CodeType]) -> Callable[..., Any]:
    """A function that calls the module; its code is shared with modules of the same kind.

    What torch has compiled is kept with the code object, up to a small limit, behind which calls
    run uncompiled. So modules that can share it do, and others have an object of their own.
    """
    call: Any = unit._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    shapes = ((name, p.shape, p.dtype) for name, p in unit.named_parameters())
    kind = (type(unit), tuple(shapes))
    code = codes.setdefault(kind, run.__code__.replace(co_name=type(unit).__name__))
    return FunctionType(code, run.__globals__, closure=run.__closure__)
