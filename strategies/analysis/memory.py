"""What each rank holds while each of its instructions runs: counts of (stage, microbatch) pairs.

A forward counts from its start, a backward (or W) until its end. A checkpointed forward, one whose
pair has an R, holds its stage's input only, from its start until its R begins; from there on the
pair counts in full. All that is said of memory, in activations or in bytes, is these counts times
sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import le, mul
from typing import NamedTuple

from strategies.costs.table import CostTable, StageMemory
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import KINDS, MICROBATCH_KINDS, Amounts, Kind, Purpose
from strategies.ir.program import Program
from strategies.ir.versions import gradient_sums, weight_versions


class Sizes(NamedTuple):
    """What one pair holds, per stage, in any unit; () for nothing.

    Attributes:
        kept: From a forward until its backward.
        inputs: From a checkpointed forward until its R.
        rebuilt: From an R until its backward.
        waiting: Between I and W.
        rebuilt_waiting: The same, behind an R.
        results: The boundary tensors that a forward, or its R, has made.
    """

    kept: Sequence[float] = ()
    inputs: Sequence[float] = ()
    rebuilt: Sequence[float] = ()
    waiting: Sequence[float] = ()
    rebuilt_waiting: Sequence[float] = ()
    results: Sequence[float] = ()

    @classmethod
    def whole(
        cls, full: Sequence[float], inputs: Sequence[float] = (), waiting: Sequence[float] = ()
    ) -> Sizes:
        """Of pairs that hold ``full`` with a graph, and where nothing else is said until W."""
        left = waiting or full
        return cls(full, inputs, full, left, left)

    def of(self, stages: Sequence[int]) -> list[float]:
        """In the order of ``moments`` of a rank that holds these stages."""
        return [size[stage] if size else 0 for size in self for stage in stages]


_Changes = tuple[tuple[int, int], ...]  # (which count, by how much)
_FIELDS = {
    Purpose.GRAPH: ("kept", "rebuilt"),
    Purpose.INPUT: ("inputs", "inputs"),
    Purpose.WAITING: ("waiting", "rebuilt_waiting"),
    Purpose.RESULT: ("results", "results"),
}


def _changes(amounts: Amounts, recomputed: bool) -> _Changes:
    """By fields of ``Sizes``."""
    fields = ((_FIELDS[purpose][recomputed], number) for purpose, number in amounts.items())
    return tuple((Sizes._fields.index(name), number) for name, number in fields)


# (kind, whether its pair has an R) -> what it takes when it starts, what it frees when it ends.
_CHANGES = {
    (kind, again): tuple(_changes(amounts, again) for amounts in (takes, facts.frees))
    for kind, facts in KINDS.items()
    for again in (False, True)
    for takes in [facts.takes if not again or facts.checkpointed is None else facts.checkpointed]
}


def changes(program: Program, rank: int) -> Iterator[tuple[int, _Changes, _Changes]]:
    """(place in the list, what it adds to the counts when it starts, and removes when it ends)."""
    row, stages = program.ranks[rank], program.placement.stages_of(rank)
    recomputed = {(item.stage, item.microbatch) for item in row if item.kind is Kind.R}
    keeps = program.role != "forward"  # Else nothing outlasts the instruction that took it.
    known: dict[tuple[Kind, int, bool], tuple[_Changes, _Changes]] = {}

    def of(part: Instruction) -> tuple[_Changes, _Changes]:
        again = bool(recomputed) and (part.stage, part.microbatch) in recomputed
        found = known.get((part.kind, part.stage, again))
        if found is None:
            column = stages.index(part.stage)
            takes, frees = (
                tuple((len(stages) * field + column, number) for field, number in each)
                for each in _CHANGES[part.kind, again]
            )
            found = known[part.kind, part.stage, again] = takes, frees if keeps else takes
        return found

    for place, item in enumerate(row):
        if item.kind not in MICROBATCH_KINDS:
            continue
        if item.halves:
            first, second = map(of, item.halves)
            yield place, first[0] + second[0], first[1] + second[1]
        else:
            yield place, *of(item)


def moments(program: Program, rank: int) -> Iterator[tuple[int, list[int]]]:
    """(place, counts while that runs); the same list each time, changed in between.

    Counts are per field of ``Sizes`` and stage of the rank.
    """
    counts = [0] * len(Sizes._fields) * len(program.placement.stages_of(rank))
    for place, takes, frees in changes(program, rank):
        for index, number in takes:
            counts[index] += number
        yield place, counts
        for index, number in frees:
            counts[index] -= number


def worst_counts(program: Program, rank: int) -> list[tuple[int, ...]]:
    """The counts of ``moments`` of which none is below another in all."""
    counts = [0] * len(Sizes._fields) * len(program.placement.stages_of(rank))
    found: dict[tuple[int, ...], None] = {}
    rising = False
    for _, takes, frees in changes(program, rank):
        for index, number in takes:
            counts[index] += number
            rising = True
        if rising and frees:
            found[tuple(counts)] = None
            rising = False
        for index, number in frees:
            counts[index] -= number
            rising = rising or number < 0
    return _not_below_another(found)


def _not_below_another(moments: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The moments that no other one exceeds or equals in every count; they are all different."""
    kept: list[tuple[int, ...]] = []
    larger = 0
    most = -1
    for moment in sorted(moments, key=sum, reverse=True):
        # Of as many in all, none is below another; in a steady state that is nearly all of them.
        if sum(moment) != most:
            most, larger = sum(moment), len(kept)
        if not any(all(map(le, moment, other)) for other in kept[:larger]):
            kept.append(moment)
    return kept


def held_changes(program: Program, rank: int, sizes: Sizes) -> Iterator[tuple[int, float, float]]:
    """(place, taken when it starts, freed when it ends), in the unit of the sizes."""
    each = sizes.of(program.placement.stages_of(rank))
    for place, takes, frees in changes(program, rank):
        taken, freed = (sum(n * each[index] for index, n in some) for some in (takes, frees))
        yield place, taken, freed


def peak_held(program: Program, rank: int, sizes: Sizes) -> float:
    """The most that a rank holds."""
    each = sizes.of(program.placement.stages_of(rank))
    found = (sum(map(mul, counts, each)) for _, counts in moments(program, rank))
    return max(found, default=0.0)


def peak_activations(program: Program, table: CostTable | None = None) -> tuple[float, ...]:
    """Peak per rank in full-rank microbatches: (stage, microbatch) pairs over V.

    Peaks are not divided where a microbatch crosses one stage of a rank (two weight copies). The
    table says what share of a full activation a stage's input is; without one, full activations
    alone count.
    """
    share = 1.0 / program.placement.stages_per_microbatch
    inputs = () if table is None else table.stage_input
    sizes = Sizes.whole((1.0,) * program.placement.num_stages, inputs)
    return tuple(share * peak_held(program, rank, sizes) for rank in range(len(program.ranks)))


def peak_bytes(program: Program, table: CostTable) -> tuple[int | None, ...]:
    """Peak per rank: state of its stages and activations; None where the table has no bytes."""
    full, state = table.activation_bytes, table.state_bytes
    if full is None or state is None:
        return (None,) * len(program.ranks)
    sizes = Sizes.whole(full, list(map(mul, table.stage_input, full)))
    return tuple(
        int(sum(state[stage] for stage in program.placement.stages_of(rank)))
        + int(peak_held(program, rank, sizes))
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


def memory_over_time(
    program: Program, memory: StageMemory, rank: int
) -> tuple[tuple[int, RankMemory], ...]:
    """(place in the list, held meanwhile) of each F, B, I, W, R or fused pair of a rank."""
    state, row = _states(program, memory)(rank), _RankBytes(program, memory, rank)
    return tuple(
        (place, row.memory(state, place, counts)) for place, counts in moments(program, rank)
    )


def peak_memory(
    program: Program, table: CostTable, ranks: Sequence[int] | None = None
) -> tuple[RankMemory, ...] | None:
    """Each rank, or of ``ranks``, at its worst moment; None where the costs know no bytes."""
    memory = table.memory
    if memory is None:
        return None
    state = _states(program, memory)
    peaks = []
    for rank in range(len(program.ranks)) if ranks is None else ranks:
        row, fixed = _RankBytes(program, memory, rank), state(rank)
        most, worst = -1.0, fixed
        for place, counts in moments(program, rank):
            held = row.total(place, counts)
            if held > most:
                most, worst = held, row.memory(fixed, place, counts)
        update = step_bytes(memory, program.placement.stages_of(rank))
        peaks.append(replace(fixed, temporaries=update) if update > most else worst)
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
    ranks = range(len(program.ranks))
    curves = (memory_over_time(program, memory, rank) for rank in ranks)
    return tuple(max((held.saved for _, held in curve), default=0) for curve in curves)


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


def pair_bytes(memory: StageMemory) -> Sizes:
    """All that a pair holds."""
    full, waiting = memory.activations, memory.waiting
    return Sizes(full, memory.inputs, full, waiting, waiting, memory.outputs)


class _RankBytes:
    """One rank's counts in bytes, with the messages and temporaries of each place."""

    def __init__(self, program: Program, memory: StageMemory, rank: int) -> None:
        self._row, self._memory = program.ranks[rank], memory
        stages, inputs = program.placement.stages_of(rank), memory.inputs
        rebuilt = tuple(map(int.__sub__, memory.activations, inputs))
        self._pairs = pair_bytes(memory).of(stages)
        # The same by the fields of a ``RankMemory``.
        self._parts = {
            "stage_inputs": Sizes(inputs=inputs, rebuilt=inputs).of(stages),
            "activations": Sizes(kept=memory.activations, waiting=memory.waiting).of(stages),
            "recompute": Sizes(rebuilt=rebuilt, rebuilt_waiting=memory.waiting).of(stages),
            "communication": Sizes(results=memory.outputs).of(stages),
        }
        self._messages = _messages(self._row, memory)

    def total(self, place: int, counts: Sequence[int]) -> float:
        """Beside the state of the stages."""
        pairs: float = sum(map(mul, counts, self._pairs))
        return pairs + self._messages[place] + self._temporaries(place)

    def memory(self, state: RankMemory, place: int, counts: Sequence[int]) -> RankMemory:
        parts = {name: int(sum(map(mul, counts, each))) for name, each in self._parts.items()}
        parts["communication"] += self._messages[place]
        return replace(state, temporaries=self._temporaries(place), **parts)

    def _temporaries(self, place: int) -> int:
        item = self._row[place]
        return max(
            getattr(self._memory, name)[part.stage] if (name := _TEMPORARIES[part.kind]) else 0
            for part in item.halves or (item,)
        )


_RECEIVES = {kind: facts.receives for kind, facts in KINDS.items()}
_TEMPORARIES = {kind: facts.temporaries for kind, facts in KINDS.items()}


def _messages(row: Sequence[Instruction], memory: StageMemory) -> list[int]:
    """At every place of a list the bytes that messages take.

    The latest on each link, and those for which a receive is posted and which nothing uses yet.
    """
    uses, receives = {}, []
    more = [0] * (len(row) + 1)
    links: dict[tuple[int, int | None], int] = {}
    for place, item in enumerate(row):
        if item.kind is Kind.RECV:
            receives.append(place)
        elif item.kind is Kind.SEND:
            size = _size(item, memory)
            more[place] += size - links.get((item.stage, item.peer), 0)
            links[item.stage, item.peer] = size
        else:
            for part in item.halves or (item,):
                uses[_RECEIVES[part.kind], part.stage, part.microbatch] = place
    for index, place in enumerate(receives):
        item = row[place]
        assert item.payload is not None
        ahead = index - RECEIVED_AHEAD
        more[receives[ahead] if ahead >= 0 else 0] += _size(item, memory)
        used = uses.get((item.payload, item.stage, item.microbatch), len(row))
        more[used] -= _size(item, memory)
    return list(accumulate(more))


def _size(message: Instruction, memory: StageMemory) -> int:
    assert message.peer is not None
    return memory.outputs[min(message.stage, message.peer)]
