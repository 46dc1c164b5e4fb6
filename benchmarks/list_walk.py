"""The least that can walk a program's lists: isend, and irecv into buffers made before.

No shapes, no stamps, no watching: a floor, not an engine for training. All receives are posted
before the first instruction; messages carry numbers that tell them apart. ``Bare`` only sleeps,
``Autograd`` is the floor for everything that trains.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.emulation import TOKENS, SleepingStage, Task, loss_of
from benchmarks.engine import Engine
from benchmarks.runtime import MakeOptimizer
from strategies.compiler import compile_program
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MICROBATCH_KINDS, Kind

Message = tuple[Kind, int, int]  # payload, target stage, microbatch


class ListWalk(Engine):
    """Our program of a schedule; ``shape`` is what stages hand on."""

    def __init__(self, schedule: str, num_microbatches: int, shape: Sequence[int]) -> None:
        program = compile_program(
            schedule=schedule, pp=dist.get_world_size(), num_microbatches=num_microbatches,
            buckets=0,
        )  # fmt: skip
        self.placement, self.num_microbatches = program.placement, num_microbatches
        self._row, self._shape = program.ranks[dist.get_rank()], shape

    def setup(self) -> None:
        self._incoming = {
            _message(item): (torch.empty(self._shape), self._peer(item))
            for item in self._row
            if item.kind is Kind.RECV
        }

    def step(self) -> None:
        self._arriving = {
            message: dist.irecv(data, peer, tag=self._tag(message))
            for message, (data, peer) in self._incoming.items()
        }
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for item in self._row:
            if item.kind is Kind.SEND:
                message = _message(item)
                tensor = self._made(message)
                work = dist.isend(tensor, self._peer(item), tag=self._tag(message))
                sent.append((work, tensor))  # It stays until it has been sent.
            elif item.kind in MICROBATCH_KINDS:
                for part in item.parts:
                    self._compute(part)
        for work, _ in sent:
            assert work is not None
            work.wait()

    @abstractmethod
    def _compute(self, item: Instruction) -> None: ...

    @abstractmethod
    def _made(self, message: Message) -> Tensor:
        """What a SEND sends."""

    def _arrived(self, item: Instruction) -> Tensor | None:
        """What a F, B or I waits for; None where it comes from this rank, or from nowhere."""
        assert item.microbatch is not None
        kind = Kind.F if item.kind is Kind.F else Kind.B
        message = (kind, item.stage, item.microbatch)
        if message not in self._incoming:
            return None
        work = self._arriving.pop(message)
        assert work is not None
        work.wait()
        return self._incoming[message][0]

    def _peer(self, item: Instruction) -> int:
        assert item.peer is not None
        assert item.microbatch is not None
        return self.placement.rank_of(item.peer, item.microbatch)

    def _tag(self, message: Message) -> int:
        payload, stage, microbatch = message
        return 1 + 2 * (stage * self.num_microbatches + microbatch) + (payload is Kind.B)


def _message(item: Instruction) -> Message:
    """One name for both ends of a SEND and its RECV."""
    target = item.stage if item.kind is Kind.RECV else item.peer
    assert item.payload is not None
    assert target is not None
    assert item.microbatch is not None
    return item.payload, target, item.microbatch


class Bare(ListWalk):
    """Sleeps, and sends a buffer made before."""

    def __init__(self, task: Task) -> None:
        self._emulation = emulation = task.emulation
        super().__init__(task.schedule, task.num_microbatches, (1, emulation.elements))
        self._outgoing = torch.zeros(1, emulation.elements)
        self._durations = {
            Kind.F: emulation.forward_s,
            Kind.B: emulation.backward_s,
            Kind.I: emulation.input_s,
            Kind.W: emulation.weight_s,
        }

    def _compute(self, item: Instruction) -> None:
        if item.kind is not Kind.W:
            self._arrived(item)
        self._emulation.enter()
        self._emulation.leave(self._durations[item.kind])

    def _made(self, message: Message) -> Tensor:
        return self._outgoing


class Autograd(ListWalk):
    """Modules under plain autograd; the loss is the mean over the microbatches.

    Args:
        schedule: Our name.
        modules: Makes a stage; the first one has an ``anchor`` where its backward is split.
        shape: Of what stages hand on.
        data: Input and target of each microbatch.
        loss: Of an output and its target.
        optimizer: For a step's update.
    """

    def __init__(
        self,
        schedule: str,
        modules: Callable[[int], nn.Module],
        shape: Sequence[int],
        data: Sequence[tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(schedule, len(data), shape)
        self._modules: Mapping[int, nn.Module] = {
            number: modules(number) for number in self.placement.stages_of(dist.get_rank())
        }
        self._data, self._loss, self._make_optimizer = data, loss, optimizer
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self._outgoing: dict[Message, Tensor] = {}

    def setup(self) -> None:
        super().setup()
        parameters = [p for module in self._modules.values() for p in module.parameters()]
        make = self._make_optimizer
        self._optimizer = None if make is None else make(parameters)

    def step(self) -> None:
        for module in self._modules.values():
            module.zero_grad()
        super().step()
        if self._optimizer is not None:
            self._optimizer.step()

    def _made(self, message: Message) -> Tensor:
        return self._outgoing.pop(message)

    def _taken(self, item: Instruction, message: Message) -> Tensor:
        """What was received, or made by another stage of this rank."""
        arrived = self._arrived(item)
        return self._outgoing.pop(message) if arrived is None else arrived.detach()

    def _compute(self, item: Instruction) -> None:
        assert item.microbatch is not None
        stage, here = item.stage, (item.stage, item.microbatch)
        if item.kind is Kind.F:
            self._forward(item, *here)
            return
        leaf, output, gradient = self._graphs.pop(here)
        module = self._modules[stage]
        anchor = getattr(module, "anchor", None)
        if item.kind is Kind.W:
            weights = [weight for weight in module.parameters() if weight is not anchor]
            torch.autograd.backward(output, gradient, inputs=weights)
            return
        if stage < self.placement.num_stages - 1:
            gradient = self._taken(item, (Kind.B, *here))
        if item.kind is Kind.B:
            torch.autograd.backward(output, gradient)
        else:
            wanted = leaf if anchor is None else anchor
            torch.autograd.backward(output, gradient, retain_graph=True, inputs=[wanted])
            self._graphs[here] = leaf, output, gradient
        if stage:
            assert leaf.grad is not None
            self._outgoing[Kind.B, stage - 1, item.microbatch] = leaf.grad

    def _forward(self, item: Instruction, stage: int, microbatch: int) -> None:
        data, target = self._data[microbatch]
        if stage:
            data = self._taken(item, (Kind.F, stage, microbatch)).requires_grad_()
        output = self._modules[stage](data)
        if stage == self.placement.num_stages - 1:
            output = self._loss(output, target) / self.num_microbatches
        else:
            self._outgoing[Kind.F, stage + 1, microbatch] = output.detach()
        self._graphs[stage, microbatch] = data, output, None


def sleeping_autograd(task: Task) -> Autograd:
    emulation, tokens = task.emulation, torch.zeros(1, TOKENS)
    return Autograd(
        task.schedule,
        lambda stage: SleepingStage(emulation, first=stage == 0),
        (1, emulation.elements),
        [(tokens, tokens)] * task.num_microbatches,
        loss_of,
    )
