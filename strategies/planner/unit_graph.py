"""A model as a graph of units and tensors, and its cuts along one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from strategies.errors import ModelError
from strategies.planner.cut import cut_chain


@dataclass(frozen=True, slots=True)
class Tensor:
    """What one unit makes and others use.

    Attributes:
        producer: Number of the unit.
        consumers: Numbers of the units that use it, all larger.
        num_bytes: Sent once per boundary that it crosses, however many use it there.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True)
class UnitGraph:
    """Units in an order in which they can run, and the tensors between them.

    Attributes:
        times: What each unit takes, > 0.
        tensors: Producers before consumers.

    Raises:
        ModelError: A tensor is used before it is made, or by a unit that does not exist.
    """

    times: tuple[float, ...]
    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            for unit in tensor.consumers:
                if not 0 <= tensor.producer < unit < len(self.times):
                    raise ModelError(
                        f"unit {unit} uses what unit {tensor.producer} makes, of "
                        f"{len(self.times)} units in order. Number units in an order in which "
                        "they can run."
                    )

    @property
    def live_bytes(self) -> tuple[float, ...]:
        """What a cut behind each unit sends: all that is used further on, each tensor once."""
        behind = [0.0] * len(self.times)
        for tensor in self.tensors:
            for unit in range(tensor.producer, max(tensor.consumers, default=0)):
                behind[unit] += tensor.num_bytes
        return tuple(behind)


def chain_graph(times: Sequence[float], sent: Sequence[float]) -> UnitGraph:
    """Each unit feeds the next; ``sent[i]`` bytes leave unit i."""
    tensors = tuple(Tensor(i, (i + 1,), float(sent[i])) for i in range(len(times) - 1))
    return UnitGraph(tuple(map(float, times)), tensors)


def cut_in_order(
    graph: UnitGraph, num_stages: int, *, balance_ratio: float
) -> tuple[int, ...] | None:
    """Units per stage along the graph's own order: least bytes within the balance.

    The slowest stage may take ``balance_ratio`` times an equal share, or as long as the best cut
    needs if that is longer.
    """
    return cut_chain(graph.times, num_stages, sent=graph.live_bytes, balance_ratio=balance_ratio)


def crossing_bytes(graph: UnitGraph, stage_of: Sequence[int]) -> float:
    """What is sent over all boundaries, a tensor once per boundary that it crosses."""
    return sum(
        tensor.num_bytes
        * (max(stage_of[unit] for unit in tensor.consumers) - stage_of[tensor.producer])
        for tensor in graph.tensors
        if tensor.consumers
    )


# ------------------------------------------------------------------------------------------ routes
# What the stages of a graph hand to which others, as the runtime does it.
#
# A tensor goes from the stage that makes it to the first stage that uses it, from there to the next
# one that does, and so on (``strategies.models.replay.layout``): a long skip passes by the stages
# between.


def handed_on(graph: UnitGraph, units_per_stage: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(source, target, size) of every pair of stages between which something travels."""
    stage_of = [stage for stage, count in enumerate(units_per_stage) for _ in range(count)]
    sums: dict[tuple[int, int], float] = {}
    for tensor in graph.tensors:
        users = {stage_of[unit] for unit in tensor.consumers}
        for ends in pairwise(sorted({stage_of[tensor.producer], *users})):
            sums[ends] = sums.get(ends, 0.0) + tensor.num_bytes
    return tuple((*ends, round(size)) for ends, size in sorted(sums.items()))


def skips(handed: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages that are no neighbours."""
    return tuple((source, target) for source, target, _ in handed if target > source + 1)
