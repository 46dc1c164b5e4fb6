"""When the instructions of a program without messages end: what generators compare programs by.

The simulator's model, for programs that are not lowered: lists in order, a message leaves when its
value is there and arrives ``latency`` later. Knows any program; ``replay.py`` is for split orders
that a search makes by the thousand.
"""

from __future__ import annotations

from strategies.ir.graph import Graph
from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program
from strategies.schedules.schedule import Durations


def makespan(program: Program, durations: Durations) -> float:
    """When the last instruction of a program without messages and updates ends."""
    graph = program.graph
    end = [0.0] * len(graph.nodes)
    free = [0.0] * len(program.ranks)
    for node in graph.order:
        rank = graph.rank[node]
        there = (end[need] + hop for need, hop in arrivals(graph, node, durations))
        end[node] = max([free[rank], *there]) + duration(graph.nodes[node], durations)
        free[rank] = end[node]
    return max(free)


def duration(item: Instruction, durations: Durations) -> float:
    """How long an F B I W R or fused pair occupies its rank; R takes as long as F."""
    total = 0.0
    for part in item.parts:
        stage = part.stage
        if part.kind is Kind.F or part.kind is Kind.R:
            total += durations.forward[stage]
        if part.kind is Kind.I or part.kind is Kind.B:
            total += durations.backward_input[stage]
        if part.kind is Kind.W or part.kind is Kind.B:
            total += durations.backward_weight[stage]
    return total


def arrivals(graph: Graph, node: int, durations: Durations) -> list[tuple[int, float]]:
    """(node that must have ended, time until that is known here); ``after`` edges take no time."""
    needs = graph.needs[node]
    data = len(needs) - len(graph.nodes[node].after)  # Edges stand last.
    return [
        (
            need,
            durations.latency if place < data and graph.rank[need] != graph.rank[node] else 0.0,
        )
        for place, need in enumerate(needs)
    ]
