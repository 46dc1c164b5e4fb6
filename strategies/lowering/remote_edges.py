"""Edges to instructions of other ranks become edges to the messages that tell of them.

A rank sees what it computes itself and what it receives. An R that waits for its gradient names the
backward that makes it; once there are messages it names the RECV that brings it.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.ir.instruction import BACKWARD_KINDS, Instruction, Kind
from strategies.ir.placement import Placement


def on_this_rank(item: Instruction, placement: Placement) -> Instruction:
    """An R with its edges to other ranks' backwards as edges to its own rank's RECVs."""
    if item.kind is not Kind.R or not item.after:
        return item
    return replace(item, after=tuple(_seen(item, edge, placement) for edge in item.after))


def _seen(item: Instruction, edge: Instruction, placement: Placement) -> Instruction:
    here, there = item.microbatch, edge.microbatch
    if edge.kind not in BACKWARD_KINDS or here is None or there != here:
        return edge
    if placement.rank_of(edge.stage, here) == placement.rank_of(item.stage, here):
        return edge
    return Instruction(Kind.RECV, item.stage, here, payload=Kind.B, peer=edge.stage)
