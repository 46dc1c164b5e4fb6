"""What every engine is compared with: one process alone, and a list walked without an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.overhead_bare import Message, message_of
from benchmarks.peers_model import Size, batch, bounds, layers, loss_of, optimizer
from strategies.compiler import compile_program
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind

_CHUNKS = {"1f1b": 1}  # else 2 stages on each rank


class Peer(ABC):
    """One engine on one schedule; collective."""

    def __init__(self, schedule: str, size: Size, num_microbatches: int) -> None:
        self.schedule, self.size, self.num_microbatches = schedule, size, num_microbatches
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.chunks = _CHUNKS.get(schedule, 2)
        self.num_stages = self.ranks * self.chunks
        self.batch = batch(size, num_microbatches)
        self.layers = layers(size)
        self.build()

    @property
    def owned(self) -> list[int]:
        """This rank's stages, in turn over the ranks."""
        return list(range(self.rank, self.num_stages, self.ranks))

    def stage(self, number: int) -> nn.Sequential:
        return nn.Sequential(*(self.layers[i] for i in bounds(self.size, self.num_stages)[number]))

    def microbatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        parts = (torch.split(tensor, self.size.rows) for tensor in self.batch)
        return zip(*parts, strict=True)

    def weights(self) -> dict[int, Tensor]:
        """By layer, those of this rank."""
        cut = bounds(self.size, self.num_stages)
        return {i: flat(self.layers[i]) for stage in self.owned for i in cut[stage]}

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """A whole training step: gradients of all microbatches, and the update."""

    def close(self) -> None:
        """Ends what it holds."""
        return None


def flat(layer: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()]).clone()


class Plain(Peer):
    """One process, one microbatch behind the other; talks to nobody."""

    @property
    def owned(self) -> list[int]:
        return list(range(self.num_stages))

    def build(self) -> None:
        self._net = nn.Sequential(*self.layers)
        self._optimizer = optimizer(self._net.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        for tokens, target in self.microbatches():
            torch.autograd.backward(loss_of(self._net(tokens), target) / self.num_microbatches)
        self._optimizer.step()


class Bare(Peer):
    """Our program's list, walked with isend, irecv and plain autograd.

    All receives are posted before the first instruction, into buffers made once; messages carry
    numbers that tell them apart. Not an engine: it knows this model's shapes, and watches nothing.
    """

    def build(self) -> None:
        self._program = compile_program(
            schedule=self.schedule, pp=self.ranks, num_microbatches=self.num_microbatches, buckets=0
        )
        self._row = self._program.ranks[self.rank]
        shape = (self.size.rows, self.size.sequence, self.size.hidden)
        self._incoming = {
            message_of(item): torch.empty(shape) for item in self._row if item.kind is Kind.RECV
        }
        self._stages = {number: self.stage(number) for number in self.owned}
        self._optimizer = optimizer(p for part in self._stages.values() for p in part.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._batches = list(self.microbatches())
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._outgoing: dict[Message, Tensor] = {}
        self._arriving: dict[Message, dist.Work | None] = {}
        for item in self._row:
            if item.kind is Kind.RECV:
                message = message_of(item)
                self._arriving[message] = dist.irecv(
                    self._incoming[message], self._peer(item), tag=self._tag(message)
                )
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for item in self._row:
            if item.kind is Kind.F:
                self._forward(item)
            elif item.kind is Kind.B:
                self._backward(item)
            elif item.kind is Kind.SEND:
                message = message_of(item)
                tensor = self._outgoing.pop(message)
                work = dist.isend(tensor, self._peer(item), tag=self._tag(message))
                sent.append((work, tensor))  # It stays until it has been sent.
        for work, _ in sent:
            assert work is not None
            work.wait()
        self._optimizer.step()

    def _forward(self, item: Instruction) -> None:
        assert item.microbatch is not None
        stage, microbatch = item.stage, item.microbatch
        tokens, target = self._batches[microbatch]
        leaf = self._arrived((Kind.F, stage, microbatch)).requires_grad_() if stage else tokens
        output = self._stages[stage](leaf)
        if stage == self.num_stages - 1:
            output = loss_of(output, target) / self.num_microbatches
        else:
            self._outgoing[Kind.F, stage + 1, microbatch] = output.detach()
        self._graphs[stage, microbatch] = leaf, output

    def _backward(self, item: Instruction) -> None:
        assert item.microbatch is not None
        stage, microbatch = item.stage, item.microbatch
        leaf, output = self._graphs.pop((stage, microbatch))
        last = stage == self.num_stages - 1
        torch.autograd.backward(
            output, None if last else self._arrived((Kind.B, stage, microbatch))
        )
        if stage:
            assert leaf.grad is not None
            self._outgoing[Kind.B, stage - 1, microbatch] = leaf.grad

    def _arrived(self, message: Message) -> Tensor:
        work = self._arriving.pop(message)
        assert work is not None
        work.wait()
        return self._incoming[message].detach()

    def _peer(self, item: Instruction) -> int:
        assert item.peer is not None
        assert item.microbatch is not None
        return self._program.placement.rank_of(item.peer, item.microbatch)

    def _tag(self, message: Message) -> int:
        payload, stage, microbatch = message
        return 1 + 2 * (stage * self.num_microbatches + microbatch) + (payload is Kind.B)
