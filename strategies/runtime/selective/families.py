"""Which kind of work an operation does, told by its name."""

from __future__ import annotations

import functools
from typing import Any

from strategies.recompute import Family

# Products with weights. Those of batches of matrices are mostly an attention's: see below.
_MATMUL = frozenset(
    {
        "mm",
        "addmm",
        "_addmm_activation",
        "linear",
        "mkldnn_linear",
        "convolution",
        "convolution_overrideable",
        "_convolution",
        "cudnn_convolution",
        "mkldnn_convolution",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_grouped_mm",
    }
)
_ATTENTION = frozenset({"bmm", "baddbmm", "_softmax", "_safe_softmax"})
# Those that torch takes apart on some devices end with these.
_NORM = frozenset({"rsqrt", "var", "var_mean"})


@functools.cache
def family_of(operation: Any) -> Family:
    """The family of an operation of the dispatcher; ``activation`` for all that is cheap.

    >>> import torch
    >>> family_of(torch.ops.aten.addmm.default), family_of(torch.ops.aten.gelu.default)
    ('matmul', 'activation')
    """
    packet = getattr(operation, "overloadpacket", operation)
    name = str(getattr(packet, "__name__", packet))
    if name in _MATMUL:
        return "matmul"
    if name in _ATTENTION or "attention" in name:
        return "attention"
    if name in _NORM or "_norm" in name:
        return "norm"
    return "activation"
