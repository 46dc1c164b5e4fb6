"""Tensor parallelism inside stages: layers that hold a share of their weights as plain tensors."""

from strategies.models.tensor_parallel.layer_plan import (
    Column,
    Replicated,
    Row,
    Split,
    Stream,
    Vocabulary,
)
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks

__all__ = ["Column", "Replicated", "Row", "Shard", "Split", "Stream", "TensorRanks", "Vocabulary"]
