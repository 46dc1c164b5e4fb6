"""Bytes of the tensors that were made while it watched and are still alive."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches storages, so that neither views nor saved tensors hide from it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage in storages((args, kwargs)):
            self._add(storage, 0)  # it came from outside, or is known
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            self._add(storage, storage.nbytes())
        return result

    def _add(self, storage, size: int) -> None:
        known = self._storages.get(storage._cdata)
        if known is None or known[0].expired():
            self._storages[storage._cdata] = (StorageWeakRef(storage), size)

    def __call__(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def storages(values):
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            yield tensor.untyped_storage()
