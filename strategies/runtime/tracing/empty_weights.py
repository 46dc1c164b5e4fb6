"""Building a module whose weights take no memory, while everything else in it is real.

Unlike under ``torch.device("meta")``, constants that a constructor computes (rotary tables, lists
of dropout rates) have values, so its Python code can look at them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Inside, every parameter goes to the meta device as soon as a module gets it.

    A layer of torch first asks for memory, which no page backs before it is written to, and draws
    its weights after that: nothing is written. Tied parameters stay tied.
    """
    given = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter and not param.is_meta:
            if id(param) not in moved:
                meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                moved[id(param)] = (param, meta)
            param = moved[id(param)][1]
        given(module, name, param)

    owner: Any = nn.Module
    owner.register_parameter = register
    try:
        yield
    finally:
        owner.register_parameter = given
