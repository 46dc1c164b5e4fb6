"""Tensor parallelism inside stages: layers that hold a share of their weights as plain tensors."""

from strategies.runtime.tensor_parallel.ranks import TensorRanks
from strategies.runtime.tensor_parallel.shard import Shard
from strategies.runtime.tensor_parallel.styles import (
    Column,
    Replicated,
    Row,
    Split,
    Stream,
    Vocabulary,
)

__all__ = ["Column", "Replicated", "Row", "Shard", "Split", "Stream", "TensorRanks", "Vocabulary"]
