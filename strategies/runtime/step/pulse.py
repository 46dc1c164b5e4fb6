"""What a rank writes into its heartbeat while it runs programs: where it is, and for whom it waits.

The executor writes one word per instruction; what the words mean is laid down once per program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategies.errors import by_host, name_ranks
from strategies.heartbeat import Heartbeat, Phase
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import CHANNEL_KINDS, MESSAGE_KINDS
from strategies.ir.program import Program
from strategies.ir.text import describe
from strategies.runtime.messages.mesh import Coordinates


class Pulse:
    """A heartbeat, in the words of the programs that this rank runs."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        coordinates: Coordinates | None = None,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self._heartbeat = heartbeat
        self._where = coordinates
        self._hosts = dict(hosts or {})
        self._known: dict[int, tuple[Program, tuple[int, int]]] = {}
        self.words = heartbeat.words

    def begin(self, program: Program) -> None:
        known = self._known.get(id(program))
        fresh = known is None
        if known is None:
            known = (program, self._heartbeat.names(self._names(program)))
            self._known[id(program)] = known
        self._heartbeat.begin(known[1], fresh=fresh)

    def phase(self, phase: Phase) -> None:
        self._heartbeat.phase(phase)

    def _names(self, program: Program) -> list[tuple[str, tuple[int, ...], str]]:
        where = self._where
        if where is None:
            return []
        row = program.ranks[where.pp_rank]
        others = [_others(item, program, where) for item in row]
        return [
            (describe(item), ranks, self._in_words(ranks))
            for item, ranks in zip(row, others, strict=True)
        ]

    def _in_words(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        if len(set(self._hosts.values())) > 1:
            return by_host({rank: self._hosts[rank] for rank in ranks})
        return name_ranks(ranks)


def _others(item: Instruction, program: Program, where: Coordinates) -> tuple[int, ...]:
    """Global ranks at the other end of a message or a collective."""
    if item.kind in MESSAGE_KINDS:
        assert item.peer is not None
        assert item.microbatch is not None
        peer = program.placement.rank_of(item.peer, item.microbatch)
        return (where.global_rank(peer, where.dp_rank),)
    if item.kind in CHANNEL_KINDS:
        owners = where.replicas(program.placement.owners(item.stage))
        return tuple(
            rank for rank in owners if rank != where.global_rank(where.pp_rank, where.dp_rank)
        )
    return ()
