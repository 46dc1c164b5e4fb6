"""Who makes each value of a program, and who uses it: the dependencies of its instructions.

The table of kinds says which values an instruction uses and makes. Each has a key here, so that a
need is a look-up. A value is made once, what is used is made, and what is received is used: that
every message has both ends, and every microbatch one whole backward, follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count, takewhile
from typing import Any

from strategies.errors import ProgramError
from strategies.ir.graph import Graph
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import KINDS, MESSAGE_KINDS, PAYLOADS, Kind, Value
from strategies.ir.program import Program, recomputed_pairs


def build_dependencies(program: Program) -> Graph:
    """The graph without an order: for those who walk it under other rules."""
    nodes = tuple(item for row in program.ranks for item in row)
    rank = tuple(r for r, row in enumerate(program.ranks) for _ in row)
    offsets = tuple(accumulate(map(len, program.ranks), initial=0))
    return _Values(program, Graph(nodes, rank, offsets, (), ())).resolved()


# What it is, its stage, its microbatch or update, and what else tells it from others: of an
# ACTIVATION or GRADIENT the stage that holds it, of an update its rank and bucket.
_Key = tuple[Any, ...]

_USES = {kind: facts.uses for kind, facts in KINDS.items()}
_MAKES = {kind: facts.makes for kind, facts in KINDS.items()}
_MAKER: dict[object, Kind] = {
    **{value: kind for kind in reversed(tuple(Kind)) for value in _MAKES[kind]},
    Value.INPUT: Kind.F,
}
_TRAVELS = frozenset(PAYLOADS.values())
_KEPT = frozenset({Value.GRAPH, Value.INPUT, Value.SAVED_FOR_W})


class _Values:
    """Who makes which value of a program, and who uses it."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._program, self._graph = program, graph
        self._rank_of = program.placement.rank_of
        self._recomputed = recomputed_pairs(program)
        self._sources: dict[int, list[int]] = {}
        self._targets: dict[int, list[int]] = {}
        for boundary in program.boundaries:
            self._sources.setdefault(boundary.target, []).append(boundary.source)
            self._targets.setdefault(boundary.source, []).append(boundary.target)
        self._made: dict[_Key, int] = {}
        self._gathered: set[tuple[int, int]] = set()  # (stage, rank)
        self._awaited: set[_Key] = set()
        self._updates: dict[_Key, list[_Key]] = {}
        made = self._made.setdefault
        for node, (item, rank) in enumerate(zip(graph.nodes, graph.rank, strict=True)):
            for part in item.halves or (item,):
                for key in self._makes(part, rank):
                    if made(key, node) != node:
                        raise self._made_twice(node, part, key)
            if item.kind is Kind.GATHER:
                self._gathered.add((item.stage, rank))
        # Most programs make neither of these, and nearly all of their instructions would ask.
        kinds = {item.kind for item in graph.nodes}
        unmade = {v for v in (Value.GATHERED, Value.LOSS_GRADIENT) if _MAKER[v] not in kinds}
        self._used = {kind: tuple(v for v in _USES[kind] if v not in unmade) for kind in Kind}

    def _makes(self, item: Instruction, rank: int) -> list[_Key]:
        kind, stage, number = item.kind, item.stage, item.microbatch
        if kind is Kind.RECV:
            return [(PAYLOADS.get(item.payload), item.peer, number, stage)]
        keys: list[_Key] = []
        for value in _MAKES[kind]:
            if value in _TRAVELS:
                keys.append((value, stage, number, stage))
            elif value in _KEPT:
                checkpointed = kind is Kind.F and (stage, number) in self._recomputed
                keys.append((Value.INPUT if checkpointed else value, stage, number))
            elif number is not None:
                keys.append((value, stage, number))
            else:
                keys.append((value, stage, item.version, rank, item.bucket))
        # What makes none of the table's values makes itself, once: a SEND is what its RECV uses.
        return keys or [(kind, stage, number, item.payload, item.peer, item.bucket)]

    def _uses(self, item: Instruction, rank: int) -> Iterator[_Key]:
        kind, stage, number = item.kind, item.stage, item.microbatch
        if kind is Kind.SEND:
            yield PAYLOADS.get(item.payload), stage, number, stage
        elif kind is Kind.RECV:
            yield Kind.SEND, item.peer, number, item.payload, stage, None
        for value in self._used[kind]:
            if value in _TRAVELS and number is not None:
                neighbours = self._sources if value is Value.ACTIVATION else self._targets
                for other in neighbours.get(stage, ()):
                    far = self._program.lowered and self._rank_of(other, number) != rank
                    yield value, other, number, stage if far else other
            elif value in _TRAVELS:
                for each in range(self._program.num_microbatches):
                    yield value, stage, each, stage
            elif value in _KEPT:
                yield value, stage, number
            elif value is Value.SHARE:
                yield from self._shares(item, rank)
            elif value is Value.SUM:
                yield from self._sums(item, rank) or self._shares(item, rank)
            else:
                yield from self._if_made(value, item, rank)

    def _if_made(self, value: Value, item: Instruction, rank: int) -> Iterator[_Key]:
        """The gradient of the batch's loss, if there is one; weights that replicas gather."""
        key = (value, item.stage, item.version, rank, None)
        if value is Value.LOSS_GRADIENT:
            wanted = False
        else:  # Later forwards of the rank follow the first one in its list.
            wanted = bool(item.version) and (item.stage, rank) in self._gathered
            if key in self._awaited:
                return
            self._awaited.add(key)
        if wanted or key in self._made:
            yield key

    def _shares(self, item: Instruction, rank: int) -> list[_Key]:
        update = (item.stage, item.version, rank)
        if update not in self._updates:
            shares: list[_Key] = [
                (Value.SHARE, item.stage, number)
                for number in self._program.microbatches_of(item.version)
                if self._rank_of(item.stage, number) == rank
            ]
            # Of its other buckets the last share in the list says as much as all of them.
            last = max(shares, key=lambda key: self._made.get(key, -1), default=None)
            self._updates[update] = [] if last is None else [last]
            return shares
        return self._updates[update]

    def _sums(self, item: Instruction, rank: int) -> list[_Key]:
        keys = ((Value.SUM, item.stage, item.version, rank, bucket) for bucket in count())
        return list(takewhile(self._made.__contains__, keys))

    def resolved(self) -> Graph:
        """The graph with its needs.

        Raises:
            ProgramError: A value is missing, or of no use.
        """
        self._check_complete()
        graph, made = self._graph, self._made
        needs: list[tuple[int, ...]] = []
        partner: list[int] = []
        used = bytearray(len(graph.nodes))
        for node, (item, rank) in enumerate(zip(graph.nodes, graph.rank, strict=True)):
            found: list[int] = []
            for part in item.halves or (item,):
                for key in self._uses(part, rank):
                    maker = made.get(key)
                    if maker is None:
                        raise self._missing(node, part, key)
                    used[maker] = True
                    found.append(maker)
            for edge in item.after:
                found.append(self._edge(node, edge))
            needs.append(tuple(found))
            message = item.kind in MESSAGE_KINDS
            partner.append(-1 if not message else self._partner(node, item, found))
        for node, item in enumerate(graph.nodes):
            if item.kind is Kind.RECV and not used[node]:
                raise self._broken(
                    node, f"{item} on rank {graph.rank[node]} brings what nothing there uses.",
                    "Remove it, and its SEND.",
                )  # fmt: skip
        return replace(graph, needs=tuple(needs), partner=tuple(partner))

    def _partner(self, node: int, item: Instruction, needs: Sequence[int]) -> int:
        if item.kind is Kind.RECV:
            return needs[0]
        key = (PAYLOADS.get(item.payload), item.stage, item.microbatch, item.peer)
        other = self._made.get(key, node)
        if self._graph.nodes[other].kind is not Kind.RECV:
            raise self._missing(node, item, key)
        return other

    def _edge(self, node: int, edge: Instruction) -> int:
        # Of several owners' updates, that of the same rank.
        ranks = [self._graph.rank[node]]
        if edge.microbatch is None:
            ranks += range(self._program.placement.num_ranks)
        for rank in ranks:
            for key in self._makes(edge, rank):
                found = self._made.get(key)
                parts = () if found is None else self._graph.nodes[found].parts
                if found is not None and any(part.kind is edge.kind for part in parts):
                    return found
        item = self._graph.nodes[node]
        raise self._broken(node, f"{item} needs {edge}, which no rank runs.")

    # ---------------------------------------------------------------------------- what went wrong

    def _broken(self, node: int, text: str, fix: str = "") -> ProgramError:
        place = self._graph.place(node)
        return ProgramError(f"{self._program.schedule}: {text}", fix=fix, place=place)

    def _made_twice(self, node: int, part: Instruction, key: _Key) -> ProgramError:
        first = self._made[key]
        rank, there = self._graph.rank[node], self._graph.rank[first]
        other = next(p for p in self._graph.nodes[first].parts if key in self._makes(p, there))
        if other.kind is part.kind:
            name = replace(part, after=())
            text = f"{name} stands a second time on rank {rank}. Every instruction stands once."
            return self._broken(node, text)
        stage, number = part.stage, part.microbatch
        return self._broken(
            node, f"{part} on rank {rank} makes what {other} makes.",
            f"Write {stage}B{number}, or {stage}I{number} and {stage}W{number}.",
        )  # fmt: skip

    def _missing(self, node: int, part: Instruction, key: _Key) -> ProgramError:
        name = self._name(key)
        if "_" in name and part.kind in MESSAGE_KINDS:
            text = f"{part} has no matching {name}: the message never ends."
            return self._broken(node, text, f"Write {name}, or remove {part}.")
        return self._broken(
            node, f"{part} needs {name}, which no rank runs.", f"Write {name} before it."
        )

    def _name(self, key: _Key) -> str:
        """The instruction that makes a value."""
        value, stage, number, *more = key
        if value is Kind.SEND:
            letter, target = _MAKER[PAYLOADS[more[0]]].value, more[1]
            return f"{stage}SEND_{letter}{number}>{target}"
        letter = _MAKER[value].value
        if value in _TRAVELS and more[0] != stage:
            return f"{more[0]}RECV_{letter}{number}<{stage}"
        if value is Value.GATHERED:
            return f"{stage}{letter}#{number}"
        again = value is Value.GRAPH and (stage, number) in self._recomputed
        return f"{stage}{'R' if again else letter}{number}"

    def _check_complete(self) -> None:
        """Every microbatch goes through every stage, and back."""
        program = self._program
        forward = program.role == "forward"
        for stage in range(program.placement.num_stages):
            for number in range(program.num_microbatches):
                goal: _Key = (Value.SHARE, stage, number)
                if (
                    goal if not forward else (Value.ACTIVATION, *goal[1:], stage)
                ) not in self._made:
                    raise self._incomplete(stage, number)

    def _incomplete(self, stage: int, number: int) -> ProgramError:
        forward, nodes = f"{stage}F{number}", self._graph.nodes
        whole = f"{stage}B{number}, or {stage}I{number} and {stage}W{number}"
        found = self._made.get((Value.ACTIVATION, stage, number, stage))
        if found is not None:
            text = f"{forward} on rank {self._graph.rank[found]} has no whole backward."
            return self._broken(found, text, f"Write {whole}, after it.")
        later = (n for n, item in enumerate(nodes) if (item.microbatch or 0) >= number)
        more = "" if self._program.role == "forward" else f", and {whole}"
        text = f"no rank runs {forward}, and num_microbatches={self._program.num_microbatches} "
        return self._broken(
            next(later, 0), f"{text}go through every stage.", f"Write {forward}{more}."
        )
