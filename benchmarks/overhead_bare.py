"""The least that can walk a program's lists: isend, irecv into buffers made before, and sleep.

No autograd, no shapes, no stamps, no losses: a floor, not a runtime. ``Autograd`` is the same with
the sleeping modules under plain autograd, the floor for everything that trains.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overhead_emulation import TOKENS, SleepingStage
from benchmarks.overhead_engine import Engine, Task
from strategies.compiler import compile_program
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MICROBATCH_KINDS, Kind

Message = tuple[Kind, int, int]  # payload, target stage, microbatch


class Bare(Engine):
    """Follows our program of the same schedule, in which every message has its place."""

    def __init__(self, task: Task) -> None:
        self._emulation = emulation = task.emulation
        program = compile_program(
            schedule=task.schedule, pp=task.ranks, num_microbatches=task.num_microbatches, buckets=0
        )
        self._rank_of = program.placement.rank_of
        self._row = program.ranks[task.rank]
        self._stride = program.num_microbatches
        self._outgoing = torch.zeros(1, emulation.elements)
        self._incoming = {
            message_of(item): torch.empty(1, emulation.elements)
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
        arriving: dict[Message, dist.Work | None] = {}
        sent: list[dist.Work | None] = []
        for item in self._row:
            if item.kind is Kind.RECV:
                message = message_of(item)
                data, tag = self._incoming[message], self._tag(message)
                arriving[message] = dist.irecv(data, self._peer(item), tag=tag)
            elif item.kind is Kind.SEND:
                tag = self._tag(message_of(item))
                sent.append(dist.isend(self._outgoing, self._peer(item), tag=tag))
            elif item.kind in MICROBATCH_KINDS:
                for part in item.parts:
                    message = _needed(part)
                    work = arriving.pop(message, None)
                    if work is not None:
                        work.wait()
                    self._compute(part, self._incoming.get(message, self._outgoing))
        for work in sent:
            assert work is not None
            work.wait()

    def _compute(self, item: Instruction, data: Tensor) -> None:
        self._emulation.enter()
        self._emulation.leave(self._durations[item.kind])

    def _peer(self, item: Instruction) -> int:
        assert item.peer is not None
        assert item.microbatch is not None
        return self._rank_of(item.peer, item.microbatch)

    def _tag(self, message: Message) -> int:
        payload, stage, microbatch = message
        return 1 + 2 * (stage * self._stride + microbatch) + (payload is Kind.B)


class Autograd(Bare):
    """Walks the same list; what it sends is still a buffer made before."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        parts = [part for item in self._row for part in item.parts]
        self._stages = {
            stage: SleepingStage(task.emulation, first=stage == 0)
            for stage in {part.stage for part in parts if part.kind is Kind.F}
        }
        self._tokens = torch.zeros(1, TOKENS)
        self._graphs: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}

    def _compute(self, item: Instruction, data: Tensor) -> None:
        stage = self._stages[item.stage]
        here = (item.stage, item.microbatch)
        if item.kind is Kind.F:
            leaf = self._tokens if stage.anchor is not None else data.detach().requires_grad_()
            self._graphs[here] = leaf, stage(leaf)
            return
        leaf, output = self._graphs[here] if item.kind is Kind.I else self._graphs.pop(here)
        if item.kind is Kind.B:
            torch.autograd.backward([output], [data])
        elif item.kind is Kind.I:
            wanted = leaf if stage.anchor is None else stage.anchor
            torch.autograd.backward([output], [data], retain_graph=True, inputs=[wanted])
        else:
            torch.autograd.backward([output], [data], inputs=[stage.weight])


def message_of(item: Instruction) -> Message:
    """One name for both ends of a SEND and its RECV."""
    target = item.stage if item.kind is Kind.RECV else item.peer
    assert item.payload is not None
    assert target is not None
    assert item.microbatch is not None
    return item.payload, target, item.microbatch


def _needed(item: Instruction) -> Message:
    """What an instruction would wait for; no message has the name that a W asks for."""
    assert item.microbatch is not None
    return (Kind.B if item.kind is Kind.I else item.kind), item.stage, item.microbatch
