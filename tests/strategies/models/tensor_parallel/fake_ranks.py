"""A tensor-parallel group in one process: everybody has what this rank has, nothing is sent."""

import torch

from strategies.models.tensor_parallel.tensor_ranks import GatherUnderWay, SumShare, TensorRanks


class FakeRanks(TensorRanks):
    """Rank 0 of ``size``. Collectives leave their shapes and a line in ``events``."""

    def __init__(self, size=2, *, sequence=False):
        self.rank = 0
        self.size = size
        self.sequence = sequence
        self.meanwhile = None
        self.events = []

    def start_sum(self, tensor):
        self.events.append("sum begins")
        return _Work(self.events)

    def sum_(self, tensor):
        self.events.append("sum")
        return tensor

    def max_(self, tensor):
        return tensor

    def gather(self, tensor):
        self.events.append("gather")
        return torch.stack([tensor] * self.size)

    def start_gather(self, tensor):
        self.events.append("gather again")
        return GatherUnderWay(None, torch.stack([tensor] * self.size), tensor)

    def start_sum_share(self, tensor, dim):
        self.events.append("share begins")
        return SumShare(_Work(self.events), tensor.chunk(self.size, dim)[0].contiguous())


class _Work:
    def __init__(self, events):
        self._events = events

    def wait(self):
        self._events.append("ends")
