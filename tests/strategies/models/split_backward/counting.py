"""Counts the heavy operations that torch runs."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm"}


class Count(TorchDispatchMode):
    """Matrix products, convolutions' gradients by output, embeddings' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.calls["product"] += 1
        elif name == "convolution_backward":
            data, weight, _ = args[10]
            self.calls["convolution"] += int(data) + int(weight)
        elif name == "convolution":
            self.calls["convolution"] += 1
        elif name == "embedding_dense_backward":
            self.calls["embedding"] += 1
        elif name in ("tanh", "gelu", "native_layer_norm", "_softmax"):
            self.calls["forward"] += 1
        return func(*args, **(kwargs or {}))
