"""Activations that each rank holds at its worst moment, read off the program's order.

A forward counts from its start, a backward (or W) until its end. A checkpointed forward, one whose
pair has an R, holds its stage's input only, from its start until its R begins; from there on the
pair counts in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeVar

from strategies.costs.table import CostTable, StageMemory
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import KINDS, MICROBATCH_KINDS, Amounts, Kind, Purpose
from strategies.ir.program import Program, recomputed_pairs
from strategies.ir.versions import gradient_sums, weight_versions

_Number = TypeVar("_Number", int, float)
# One unit: what a microbatch holds for each purpose, per stage; of what is left out, nothing.
_Sizes = Mapping[Purpose, Sequence[_Number]]
# (kind, whether its pair is recomputed) -> per stage.
_Table = dict[tuple[Kind, bool], Sequence[_Number]]


def vector(kind: Kind, *, again: bool, keeps: bool = True) -> tuple[Amounts, Amounts]:
    """What an instruction takes when it starts and frees when it ends, by purpose.

    All that is said of memory is a sum over these vectors, in one unit or another.

    Of a part, not of a fused pair; ``again``: its (stage, microbatch) pair has an R; ``keeps`` is
    False in forward programs, where nothing outlasts the instruction that took it.
    """
    facts = KINDS[kind]
    takes = facts.checkpointed if again and facts.checkpointed is not None else facts.takes
    return takes, facts.frees if keeps else takes


def _tables(
    program: Program, plain: _Sizes[_Number], again: _Sizes[_Number]
) -> tuple[_Table[_Number], _Table[_Number]]:
    """All vectors of a program in one unit, looked up once: taken and freed."""
    keeps = program.role != "forward"
    takes: _Table[_Number] = {}
    frees: _Table[_Number] = {}
    nothing: Sequence[_Number] = (0,) * program.placement.num_stages
    for kind in KINDS:
        for is_again, sizes in ((False, plain), (True, again)):
            both = vector(kind, again=is_again, keeps=keeps)
            for table, amounts in zip((takes, frees), both, strict=True):
                counted = [(count, sizes[p]) for p, count in amounts.items() if p in sizes]
                table[kind, is_again] = _added(counted) if counted else nothing
    return takes, frees


def _added(counted: Sequence[tuple[int, Sequence[_Number]]]) -> Sequence[_Number]:
    """So many times this, and so many times that, per stage."""
    (count, size), *more = counted
    if not more and count == 1:
        return size
    counts = [count, *(count for count, _ in more)]
    sizes = [size, *(size for _, size in more)]
    return [sum(map(mul, counts, each)) for each in zip(*sizes, strict=True)]


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
        self._again = recomputed_pairs(program)
        sizes = {
            Purpose.GRAPH: full,
            Purpose.INPUT: inputs,
            Purpose.WAITING: full if waiting is None else waiting,
        }
        self._takes, self._frees = _tables(program, sizes, sizes)

    def taken(self, item: Instruction) -> float:
        return self._sum(self._takes, item)

    def freed(self, item: Instruction) -> float:
        return self._sum(self._frees, item)

    def peak(self, rank: int) -> float:
        return max(self._over_time(rank))

    def _over_time(self, rank: int) -> Iterator[float]:
        held = 0.0
        yield held
        for item in self._program.ranks[rank]:
            held += self.taken(item)
            yield held
            held -= self.freed(item)

    def _sum(self, table: _Table[float], item: Instruction) -> float:
        if item.halves:
            return sum(self._sum(table, half) for half in item.halves)
        return table[item.kind, (item.stage, item.microbatch) in self._again][item.stage]


def peak_activations(program: Program, table: CostTable | None = None) -> tuple[float, ...]:
    """Peak per rank in full-rank microbatches: (stage, microbatch) pairs over V.

    Peaks are not divided where a microbatch crosses one stage of a rank (two weight copies). The
    table says what share of a full activation a stage's input is; without one, full activations
    alone count.
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
# What each rank holds over a step, by what it is for. A forward keeps its activations and its
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


class _Moment(NamedTuple):
    """Bytes beside the state while one instruction runs."""

    place: int
    stage_inputs: int
    activations: int
    recompute: int
    communication: int
    temporaries: int


def _beside_state(moment: _Moment) -> int:
    _, inputs, activations, rebuilt, messages, needs = moment
    return inputs + activations + rebuilt + messages + needs


def memory_over_time(
    program: Program, memory: StageMemory, rank: int
) -> tuple[tuple[int, RankMemory], ...]:
    """(place in the list, held meanwhile) of each F, B, I, W, R or fused pair of a rank."""
    state = _states(program, memory)(rank)
    moments = _Walk(program, memory).moments(rank)
    return tuple((moment.place, _with(state, moment)) for moment in moments)


def peak_memory(
    program: Program, table: CostTable, ranks: Sequence[int] | None = None
) -> tuple[RankMemory, ...] | None:
    """Each rank, or of ``ranks``, at its worst moment; None where the costs know no bytes."""
    memory = table.memory
    if memory is None:
        return None
    walk = _Walk(program, memory)
    state = _states(program, memory)
    peaks = []
    for rank in range(len(program.ranks)) if ranks is None else ranks:
        moments = walk.moments(rank)
        worst = max(moments, key=_beside_state, default=_Moment(0, 0, 0, 0, 0, 0))
        update = step_bytes(memory, program.placement.stages_of(rank))
        if update > sum(worst[1:]):
            worst = _Moment(0, 0, 0, 0, 0, update)
        peaks.append(_with(state(rank), worst))
    return tuple(peaks)


def step_bytes(memory: StageMemory, stages: Sequence[int]) -> int:
    """What the update of a rank's stages takes, when nothing is kept for backwards any more."""
    return sum(memory.step_temporaries[stage] for stage in stages) if memory.step_temporaries else 0


def peak_memory_bytes(program: Program, table: CostTable) -> tuple[int | None, ...]:
    """The same as one number per rank; without a breakdown, state and activations alone."""
    peaks = peak_memory(program, table)
    return peak_bytes(program, table) if peaks is None else tuple(held.total for held in peaks)


def peak_saved(program: Program, memory: StageMemory) -> tuple[int, ...]:
    """The most that each rank holds for backwards to come."""
    walk = _Walk(program, memory)
    return tuple(
        max((sum(moment[1:4]) for moment in walk.moments(rank)), default=0)
        for rank in range(len(program.ranks))
    )


def _states(program: Program, memory: StageMemory) -> Callable[[int], RankMemory]:
    """What the stages of a rank hold all the time."""
    # Versions of weights, and sums of gradients of updates that wait, where there is no flush.
    versions, sums = weight_versions(program), gradient_sums(program)

    def of_rank(rank: int) -> RankMemory:
        stages = program.placement.stages_of(rank)
        weights, alive = sum(memory.parameters[stage] for stage in stages), versions[rank]
        if program.feeds_back:
            alive = max(alive, 2)  # The weights before an update are there where they are used.
        return RankMemory(
            parameters=alive * weights,
            gradients=sums[rank] * sum(memory.gradients[stage] for stage in stages),
            optimizer=sum(memory.optimizer[stage] for stage in stages),
        )

    return of_rank


def _with(state: RankMemory, moment: _Moment) -> RankMemory:
    return replace(
        state,
        stage_inputs=moment.stage_inputs,
        activations=moment.activations,
        recompute=moment.recompute,
        communication=moment.communication,
        temporaries=moment.temporaries,
    )


_RECEIVES = {kind: facts.receives for kind, facts in KINDS.items()}


class _Walk:
    """The lists of a program, each once."""

    def __init__(self, program: Program, memory: StageMemory) -> None:
        self._program = program
        self._memory = memory
        self._again = recomputed_pairs(program)
        self._takes, self._frees = _split(program, memory)
        nothing = (0,) * program.placement.num_stages
        self._temporaries: dict[Kind, tuple[int, ...]] = {
            kind: getattr(memory, facts.temporaries) if facts.temporaries else nothing
            for kind, facts in KINDS.items()
        }

    def moments(self, rank: int) -> Iterator[_Moment]:
        row, again, takes, frees = self._program.ranks[rank], self._again, self._takes, self._frees
        # Results: of forwards with a graph, messages handed over on this rank included.
        inputs = activations = rebuilt = results = 0
        links: dict[tuple[int, int], int] = {}  # (boundary, direction) -> latest message
        received, temporaries, sent = self._received(row), self._temporaries, 0
        for place, item in enumerate(row):
            kind = item.kind
            if kind is Kind.RECV:
                continue
            if kind is Kind.SEND:
                assert item.peer is not None
                link, size = (item.stage, item.peer), _size(item, self._memory)
                sent += size - links.get(link, 0)
                links[link] = size
                continue
            if kind not in MICROBATCH_KINDS:
                continue
            parts = item.halves or (item,)
            needs = 0
            for part in parts:
                kind, stage = part.kind, part.stage
                more = takes[kind, bool(again) and (stage, part.microbatch) in again][stage]
                inputs, activations = inputs + more[0], activations + more[1]
                rebuilt, results = rebuilt + more[2], results + more[3]
                if temporaries[kind][stage] > needs:
                    needs = temporaries[kind][stage]
            messages = results + sent + received[place]
            yield _Moment(place, inputs, activations, rebuilt, messages, needs)
            for part in parts:
                kind, stage = part.kind, part.stage
                less = frees[kind, bool(again) and (stage, part.microbatch) in again][stage]
                inputs, activations = inputs - less[0], activations - less[1]
                rebuilt, results = rebuilt - less[2], results - less[3]

    def _received(self, row: Sequence[Instruction]) -> list[int]:
        """At every place the bytes for which a receive is posted and which nothing uses yet."""
        uses, places = {}, []
        for place, item in enumerate(row):
            kind = item.kind
            if kind is Kind.RECV:
                places.append(place)
            elif kind is not Kind.SEND:
                for part in item.halves or (item,):
                    uses[_RECEIVES[part.kind], part.stage, part.microbatch] = place
        changes = [0] * (len(row) + 1)
        for index, place in enumerate(places):
            item = row[place]
            assert item.payload is not None
            ahead = index - RECEIVED_AHEAD
            changes[places[ahead] if ahead >= 0 else 0] += _size(item, self._memory)
            used = uses.get((item.payload, item.stage, item.microbatch), len(row))
            changes[used] -= _size(item, self._memory)
        return list(accumulate(changes))


_Bytes = tuple[int, ...]  # stage inputs, activations, recompute, results
_Split = dict[tuple[Kind, bool], list[_Bytes]]


def _split(program: Program, memory: StageMemory) -> tuple[_Split, _Split]:
    """All vectors of a program in bytes, by what reports say that they are for."""
    rebuilt = tuple(map(int.__sub__, memory.activations, memory.inputs))
    results: _Sizes[int] = {Purpose.RESULT: memory.outputs}
    # Per figure of ``_Bytes``: of pairs that keep their graph, and of those that rebuild it.
    units: tuple[tuple[_Sizes[int], _Sizes[int]], ...] = (
        ({}, {Purpose.INPUT: memory.inputs, Purpose.GRAPH: memory.inputs}),
        ({Purpose.GRAPH: memory.activations, Purpose.WAITING: memory.waiting}, {}),
        ({}, {Purpose.GRAPH: rebuilt, Purpose.WAITING: memory.waiting}),
        (results, results),
    )
    columns = [_tables(program, *unit) for unit in units]
    nothing: list[_Bytes] = [(0, 0, 0, 0)] * program.placement.num_stages
    takes, frees = (
        {key: _together([table[key] for table in tables], nothing) for key in tables[0]}
        for tables in zip(*columns, strict=True)
    )
    return takes, frees


def _together(figures: Sequence[Sequence[int]], nothing: list[_Bytes]) -> list[_Bytes]:
    """All figures of each stage side by side."""
    return list(zip(*figures, strict=True)) if any(map(any, figures)) else nothing


def _size(message: Instruction, memory: StageMemory) -> int:
    assert message.peer is not None
    return memory.outputs[min(message.stage, message.peer)]
