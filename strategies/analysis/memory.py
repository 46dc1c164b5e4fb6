"""Activations that each rank holds at its worst moment, read off the program's order.

A forward counts from its start, a backward (or W) until its end. A checkpointed forward, one whose
pair has an R, holds its stage's input only, from its start until its R begins; from there on the
pair counts in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

from strategies.costs.table import CostTable, StageMemory
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.ir.program import Program, recomputed_pairs


class Holding:
    """What each instruction of a program takes and gives back, in any unit.

    Args:
        program: Any; in a forward program nothing outlasts its forward.
        full: Per stage, one microbatch's activations.
        inputs: Per stage, what a checkpointed forward keeps of them.
        waiting: Per stage, what its I leaves for its W; None for all.
    """

    def __init__(
        self,
        program: Program,
        full: Sequence[float],
        inputs: Sequence[float],
        waiting: Sequence[float] | None = None,
    ) -> None:
        self._program = program
        self._full = full
        self._inputs = inputs
        self._waiting = full if waiting is None else waiting
        self._again = recomputed_pairs(program)
        self._keeps = program.role != "forward"

    def carried(self, rank: int) -> float:
        """What a rank holds before its first instruction."""
        rank_of = self._program.placement.rank_of
        pairs = self._program.entry.in_flight
        return sum(self._kept(*pair) for pair in pairs if rank_of(*pair) == rank)

    def taken(self, item: Instruction) -> float:
        """What an instruction takes when it starts."""
        return sum(map(self._taken, item.parts))

    def freed(self, item: Instruction) -> float:
        """What it gives back when it ends."""
        return sum(map(self._freed, item.parts))

    def peak(self, rank: int) -> float:
        """What a rank holds at its worst moment."""
        return max(self._over_time(rank))

    def _over_time(self, rank: int) -> Iterator[float]:
        held = self.carried(rank)
        yield held
        for item in self._program.ranks[rank]:
            held += self.taken(item)
            yield held
            held -= self.freed(item)

    def _taken(self, part: Instruction) -> float:
        if part.kind is Kind.F and part.microbatch is not None:
            return self._kept(part.stage, part.microbatch)
        if part.kind is Kind.R:
            return self._full[part.stage] - self._inputs[part.stage]
        return 0.0

    def _freed(self, part: Instruction) -> float:
        full, waiting = self._full[part.stage], self._waiting[part.stage]
        if not self._keeps:
            return full if part.kind is Kind.F else 0.0
        if part.kind is Kind.I:
            return full - waiting
        return {Kind.B: full, Kind.W: waiting}.get(part.kind, 0.0)

    def _kept(self, stage: int, microbatch: int) -> float:
        checkpointed = (stage, microbatch) in self._again
        return self._inputs[stage] if checkpointed else self._full[stage]


def peak_activations(program: Program, table: CostTable | None = None) -> tuple[float, ...]:
    """Peak per rank in full-rank microbatches: (stage, microbatch) pairs over V.

    Peaks are not divided where a microbatch crosses one stage of a rank (two weight copies).

    Args:
        program: Any.
        table: Says what share of a full activation a stage's input is; None for nothing, which
            counts full activations alone.
    """
    count = program.placement.num_stages
    share = 1.0 / program.placement.stages_per_microbatch
    inputs = (0.0,) * count if table is None or not table.stage_input else table.stage_input
    holding = Holding(program, (1.0,) * count, inputs)
    return tuple(share * holding.peak(rank) for rank in range(len(program.ranks)))


def peak_bytes(program: Program, table: CostTable) -> tuple[int | None, ...]:
    """Peak per rank: state of its stages and activations; None where the table has no bytes."""
    if table.activation_bytes is None or table.state_bytes is None:
        return (None,) * len(program.ranks)
    full = [float(value) for value in table.activation_bytes]
    shares = table.stage_input or (0.0,) * len(full)
    holding = Holding(program, full, [s * f for s, f in zip(shares, full, strict=True)])
    return tuple(
        int(
            sum(table.state_bytes[stage] for stage in program.placement.stages_of(rank))
            + holding.peak(rank)
        )
        for rank in range(len(program.ranks))
    )


# ------------------------------------------------------------------------------------ memory model
#
# What each rank holds over a step, by what it is for, and at its worst moment.
#
# Read off the program's order, instruction by instruction. A forward keeps its activations and its
# result until the backward; a checkpointed one keeps its stage's input, until its R rebuilds the
# rest. After I a microbatch keeps what W needs. Receives are posted a few ahead of their use, as
# the runtime does, and of what a rank has sent the latest message per link counts: the one before
# has arrived by then. While an instruction runs it needs its temporaries besides.
#
# Not counted: the allocator's own losses, the batch, and what the processes need before they have a
# model.


RECEIVED_AHEAD = 4
"""Messages that a rank may have posted receives for before their turn."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds at one moment.

    Attributes:
        parameters: Weights.
        gradients: Their sums.
        optimizer: Its state and its own copy of the weights.
        stage_inputs: What checkpointed forwards have kept.
        activations: What other forwards have kept for their backwards.
        recompute: What R has rebuilt.
        communication: Results of forwards, received inputs and gradients, and messages on the way.
        temporaries: What the running instruction needs beyond that.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    stage_inputs: int = 0
    activations: int = 0
    recompute: int = 0
    communication: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self))

    @property
    def saved(self) -> int:
        """What is held for backwards to come."""
        return self.stage_inputs + self.activations + self.recompute


Pair = tuple[int, int]
"""A stage and a microbatch."""


class _Moment(NamedTuple):
    """Bytes beside the state while one instruction runs."""

    place: int
    stage_inputs: int
    activations: int
    recompute: int
    communication: int
    temporaries: int


def memory_over_time(
    program: Program, memory: StageMemory, rank: int
) -> tuple[tuple[int, RankMemory], ...]:
    """(place in the list, held meanwhile) of each F, B, I, W, R or fused pair of a rank."""
    state = _state(program, memory, rank)
    walk = _Walk(program, memory, rank, recomputed_pairs(program))
    return tuple((m.place, _with(state, m)) for m in walk.moments())


def peak_memory(program: Program, table: CostTable) -> tuple[RankMemory, ...] | None:
    """Each rank at its worst moment; None where the costs know no bytes."""
    memory = table.memory
    if memory is None:
        return None
    again = recomputed_pairs(program)
    peaks = []
    for rank in range(len(program.ranks)):
        moments = _Walk(program, memory, rank, again).moments()
        worst = max(moments, key=lambda moment: sum(moment[1:]), default=_Moment(0, 0, 0, 0, 0, 0))
        peaks.append(_with(_state(program, memory, rank), worst))
    return tuple(peaks)


def peak_memory_bytes(program: Program, table: CostTable) -> tuple[int | None, ...]:
    """The same as one number per rank; without a breakdown, state and activations alone."""
    peaks = peak_memory(program, table)
    return peak_bytes(program, table) if peaks is None else tuple(held.total for held in peaks)


def peak_saved(program: Program, memory: StageMemory) -> tuple[int, ...]:
    """The most that each rank holds for backwards to come."""
    again = recomputed_pairs(program)
    return tuple(
        max((sum(m[1:4]) for m in _Walk(program, memory, rank, again).moments()), default=0)
        for rank in range(len(program.ranks))
    )


def _state(program: Program, memory: StageMemory, rank: int) -> RankMemory:
    stages = program.placement.stages_of(rank)
    return RankMemory(
        parameters=sum(memory.parameters[stage] for stage in stages),
        gradients=sum(memory.gradients[stage] for stage in stages),
        optimizer=sum(memory.optimizer[stage] for stage in stages),
    )


def _with(state: RankMemory, moment: _Moment) -> RankMemory:
    return replace(
        state,
        stage_inputs=moment.stage_inputs,
        activations=moment.activations,
        recompute=moment.recompute,
        communication=moment.communication,
        temporaries=moment.temporaries,
    )


class _Walk:
    """One rank's list, once."""

    def __init__(
        self, program: Program, memory: StageMemory, rank: int, again: frozenset[Pair]
    ) -> None:
        self._program = program
        self._memory = memory
        self._rank = rank
        self._row = program.ranks[rank]
        self._again = again
        self._keeps = program.role != "forward"
        self._last = program.placement.num_stages - 1
        self._inputs = self._activations = self._rebuilt = 0
        self._results = 0  # of forwards with a graph, and messages handed over on this rank
        self._links: dict[tuple[int, int], int] = {}  # (boundary, direction) -> latest message

    def moments(self) -> Iterator[_Moment]:
        for stage, microbatch in self._program.entry.in_flight:
            if self._program.placement.rank_of(stage, microbatch) == self._rank:
                self._take(Instruction(Kind.F, stage, microbatch))
        received = self._received()
        for place, item in enumerate(self._row):
            if item.kind is Kind.SEND:
                assert item.peer is not None
                self._links[item.stage, item.peer] = _size(item, self._memory)
            if item.kind not in MICROBATCH_KINDS:
                continue
            for part in item.parts:
                self._take(part)
            messages = self._results + sum(self._links.values()) + received[place]
            needs = max(map(self._temporaries, item.parts))
            yield _Moment(place, self._inputs, self._activations, self._rebuilt, messages, needs)
            for part in item.parts:
                self._give_back(part)

    def _received(self) -> list[int]:
        """At every place the bytes for which a receive is posted and which nothing uses yet."""
        uses = {
            (Kind.F if part.kind is Kind.F else Kind.B, part.stage, part.microbatch): place
            for place, item in enumerate(self._row)
            for part in item.parts
            if part.kind in (Kind.F, Kind.B, Kind.I)
        }
        places = [place for place, item in enumerate(self._row) if item.kind is Kind.RECV]
        changes = [0] * (len(self._row) + 1)
        for index, place in enumerate(places):
            item = self._row[place]
            assert item.payload is not None
            ahead = index - RECEIVED_AHEAD
            changes[places[ahead] if ahead >= 0 else 0] += _size(item, self._memory)
            used = uses.get((item.payload, item.stage, item.microbatch), len(self._row))
            changes[used] -= _size(item, self._memory)
        return list(accumulate(changes))

    def _take(self, part: Instruction) -> None:
        memory, stage = self._memory, part.stage
        if part.kind is Kind.F and self._is_again(part):
            self._inputs += memory.inputs[stage]
        elif part.kind is Kind.F:
            self._activations += memory.activations[stage]
            self._results += memory.outputs[stage]
        elif part.kind is Kind.R:
            self._rebuilt += memory.activations[stage] - memory.inputs[stage]
            self._results += memory.outputs[stage]

    def _give_back(self, part: Instruction) -> None:
        memory, stage = self._memory, part.stage
        again = self._is_again(part)
        if part.kind is Kind.F and not self._keeps:
            self._activations -= memory.activations[stage]
            self._results -= memory.outputs[stage]
        elif part.kind is Kind.B or part.kind is Kind.I:
            self._results -= memory.outputs[stage]
            rest = memory.waiting[stage] if part.kind is Kind.I else 0
            if again:
                self._inputs -= memory.inputs[stage]
                self._rebuilt -= memory.activations[stage] - memory.inputs[stage] - rest
            else:
                self._activations -= memory.activations[stage] - rest
        elif part.kind is Kind.W and again:
            self._rebuilt -= memory.waiting[stage]
        elif part.kind is Kind.W:
            self._activations -= memory.waiting[stage]

    def _is_again(self, part: Instruction) -> bool:
        return part.microbatch is not None and (part.stage, part.microbatch) in self._again

    def _temporaries(self, part: Instruction) -> int:
        forward = part.kind is Kind.F or part.kind is Kind.R
        memory = self._memory
        rows = memory.forward_temporaries if forward else memory.backward_temporaries
        return rows[part.stage]


def _size(message: Instruction, memory: StageMemory) -> int:
    assert message.peer is not None
    return memory.outputs[min(message.stage, message.peer)]
