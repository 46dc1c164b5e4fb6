"""The least that can walk a program's lists: isend, irecv into buffers made before, and sleep.

No autograd, no shapes, no stamps, no losses. All receives of a step are posted before its first
instruction, which only somebody can do who knows all shapes and has memory for all microbatches.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from strategies.compiler import compile_program
from strategies.ir.instruction import MICROBATCH_KINDS, Instruction, Kind
from tests.benchmarks.overhead_engine import Engine, Task

_Message = tuple[Kind | None, int, int]  # payload, target stage, microbatch


class Bare(Engine):
    """Follows our program of the same schedule."""

    def __init__(self, task: Task) -> None:
        self._emulation = emulation = task.emulation
        program = compile_program(
            schedule=task.schedule, pp=task.ranks, num_microbatches=task.num_microbatches, buckets=0
        )
        self._place = program.placement.rank_of
        self._row = program.ranks[task.rank]
        self._stride = program.num_microbatches
        self._outgoing = torch.zeros(1, emulation.elements)
        self._incoming = {
            _message(item): torch.empty(1, emulation.elements)
            for item in self._row
            if item.kind is Kind.RECV
        }
        self._durations = {
            Kind.F: emulation.forward_s,
            Kind.B: emulation.input_s + emulation.weight_s,
            Kind.I: emulation.input_s,
            Kind.W: emulation.weight_s,
        }

    def step(self) -> None:
        arriving: dict[_Message, dist.Work | None] = {}
        sent: list[dist.Work | None] = []
        for item in self._row:
            if item.kind is Kind.RECV:
                message = _message(item)
                arriving[message] = dist.irecv(
                    self._incoming[message], self._peer(item), tag=self._tag(message)
                )
        for item in self._row:
            if item.kind is Kind.SEND:
                message = _message(item)
                sent.append(dist.isend(self._outgoing, self._peer(item), tag=self._tag(message)))
            elif item.kind in MICROBATCH_KINDS:
                for part in item.parts:
                    self._compute(part, arriving)
        for work in sent:
            assert work is not None
            work.wait()

    def _compute(self, item: Instruction, arriving: dict[_Message, dist.Work | None]) -> None:
        assert item.microbatch is not None
        payload = Kind.B if item.kind is Kind.I else item.kind
        work = arriving.pop((payload, item.stage, item.microbatch), None)
        if work is not None:
            work.wait()
        self._emulation.enter()
        self._emulation.leave(self._durations[item.kind])

    def _peer(self, item: Instruction) -> int:
        assert item.peer is not None
        assert item.microbatch is not None
        return self._place(item.peer, item.microbatch)

    def _tag(self, message: _Message) -> int:
        payload, stage, microbatch = message
        return 1 + 2 * (stage * self._stride + microbatch) + (payload is Kind.B)


def _message(item: Instruction) -> _Message:
    """One name for both ends."""
    target = item.stage if item.kind is Kind.RECV else item.peer
    assert target is not None
    assert item.microbatch is not None
    return item.payload, target, item.microbatch
