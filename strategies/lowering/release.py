"""When a sent buffer may go: the point from which its send must have ended.

Waiting for a send inline stalls the sender until its peer has posted the receive. But once a rank
has received something that its peer sent after consuming the message, the send has ended, and
waiting for it returns at once. This is read off the lists, so that the runtime polls nothing.
"""

from __future__ import annotations

from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program


def release_points(program: Program, rank: int) -> dict[int, tuple[Instruction, ...]]:
    """For rank's list: after which place which SENDs are known to have ended.

    Returns:
        Place of a RECV's consumer-side arrival -> SENDs of this rank that its arrival proves
        ended. SENDs that nothing proves within the iteration are in no entry; they end with the
        next iteration.
    """
    placement = program.placement
    row = program.ranks[rank]
    place_of = {_message(item): place for place, item in enumerate(row) if item.kind is Kind.RECV}
    peers = {
        placement.rank_of(item.peer, item.microbatch)
        for item in row
        if item.kind is Kind.SEND and item.peer is not None and item.microbatch is not None
    }
    points: dict[int, list[Instruction]] = {}
    for peer in peers:
        # Walk the peer's list backwards, remembering its next SEND to this rank.
        proof: int | None = None
        proofs: dict[tuple[object, ...], int | None] = {}
        for item in reversed(program.ranks[peer]):
            if item.kind is Kind.SEND and _message(item) in place_of:
                proof = place_of[_message(item)]
            elif item.kind is Kind.RECV:
                # Posted at the latest at this place, hence before the later SEND.
                proofs[_message(item)] = proof
        for item in row:
            point = proofs.get(_message(item)) if item.kind is Kind.SEND else None
            if point is not None:
                points.setdefault(point, []).append(item)
    return {place: tuple(items) for place, items in points.items()}


def _message(item: Instruction) -> tuple[object, ...]:
    """One name for both ends of a message."""
    ends = (item.stage, item.peer) if item.kind is Kind.SEND else (item.peer, item.stage)
    return (item.payload, *ends, item.microbatch)
