"""What every source of costs boils down to: a number per stage and kind of instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from strategies.costs.token_exchange import ComputeWithExchanges, Exchange, interleave
from strategies.ir.graph import DURATION_ROWS
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, KINDS, Kind

if TYPE_CHECKING:
    from strategies.ir.program import Program

Transport = Literal["buffered", "rendezvous"]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Durations for one program, in ``time_unit``.

    Attributes:
        name: ``uniform``, ``analytic`` or ``profiled``.
        time_unit: ``F`` or ``s``.
        forward: F of one microbatch, per stage; likewise B, I, W and R.
        step: The optimizer on each stage.
        reduce: Per stage, each bucket's reduction on the rank's collective channel.
        latency: Per boundary of the program: what a message takes beside its transfer.
        occupancy: Per boundary: how long a message keeps the link from rank to rank.
        transport: ``buffered`` sends return at once, ``rendezvous`` ones wait for their receive.
        activation_bytes: Per stage, what one microbatch keeps from F to B; None if unknown.
        state_bytes: Per stage, weights, gradients and optimizer state; None if unknown.
        fused: What a fused F/B pair takes, over the sum of its halves.
        exchange: Per stage, how its tokens travel to experts of other ranks; () for nothing.
        stage_input: Per stage, the share of its full activation that a checkpointed forward keeps;
            () for nothing.
        gather: Per stage, the all-gather of its updated weights; () if they are not sharded.
        memory: What stages hold, by what it is for; None if unknown.
        one_link: Messages and reductions share one interface per rank; only for ``buffered``.
    """

    name: str
    time_unit: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    step: tuple[float, ...]
    reduce: tuple[tuple[float, ...], ...]
    latency: tuple[float, ...]
    occupancy: tuple[float, ...]
    transport: Transport = "buffered"
    activation_bytes: tuple[int, ...] | None = None
    state_bytes: tuple[int, ...] | None = None
    fused: float = 1.0
    gather: tuple[float, ...] = ()
    stage_input: tuple[float, ...] = ()
    memory: StageMemory | None = None
    one_link: bool = False
    exchange: tuple[Exchange, ...] = ()

    @property
    def hops(self) -> tuple[float, ...]:
        """Per boundary of the program: from the end of what makes a message to its arrival."""
        return tuple(map(add, self.latency, self.occupancy))

    def on_channel(self, stage: int, bucket: int) -> float:
        """How long a bucket's reduction takes, or with bucket -1 the stage's gather."""
        if bucket >= 0:
            return self.reduce[stage][bucket]
        return self.gather[stage] if self.gather else 0.0

    def of(self, item: Instruction) -> float:
        """How long an instruction occupies its rank."""
        if item.halves:
            first, second = item.halves
            took = self.of(first), self.of(second)
            return self.pair(took, (first.stage, second.stage))
        column = self._column(item.kind)
        return column[item.stage] if column else 0.0

    def pair(self, took: tuple[float, float], stages: tuple[int, int]) -> float:
        """How long a fused pair of halves that take so long by themselves occupies its rank.

        Both compute in turn; either may have to wait for its own tokens at the end.
        """
        if not self.exchange:
            return self.fused * sum(took)
        return self.fused * interleave(*self.computes(took, stages, (Kind.F, Kind.B)))[0]

    def computes(
        self, took: Sequence[float], stages: Sequence[int], kinds: Sequence[Kind]
    ) -> list[ComputeWithExchanges]:
        """Computations with what they exchange; ``took`` is by themselves."""
        exchange = self.exchange or (Exchange(0.0),) * len(self.forward)
        return [
            ComputeWithExchanges(seconds, exchange[stage], kind in BACKWARD_KINDS)
            for kind, seconds, stage in zip(kinds, took, stages, strict=True)
        ]

    def flat(self) -> list[float]:
        """What occupies a rank, in the order of ``DURATION_ROWS``: row * S + stage."""
        nothing = (0.0,) * len(self.forward)
        return [took for kind in DURATION_ROWS for took in self._column(kind) or nothing]

    def _column(self, kind: Kind) -> tuple[float, ...]:
        """Per stage, what a kind takes; () for nothing."""
        name = KINDS[kind].duration
        column: tuple[float, ...] = getattr(self, name) if name else ()
        return column


@runtime_checkable
class Costs(Protocol):
    """A source of figures, not yet bound to a program."""

    def table(self, program: Program) -> CostTable:
        """The durations of this program's instructions."""
        ...


# ------------------------------------------------------------------------------------ stage memory


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One number per stage everywhere; of one microbatch where it is not said otherwise.

    Attributes:
        parameters: The stage's weights.
        gradients: Their sums.
        optimizer: Its state, and its own copy of the weights where there is one.
        activations: From a forward, or an R, until the backward.
        waiting: Between I and W.
        inputs: From a checkpointed forward until its R.
        outputs: The boundary tensors that the stage makes; its input's gradients are as large as
            the outputs of the stage before.
        forward_temporaries: What one F or R needs beyond what stays.
        backward_temporaries: What one B, I or W needs beyond what has been there.
        step_temporaries: What the STEP needs; () for nothing.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    activations: tuple[int, ...]
    waiting: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_temporaries: tuple[int, ...]
    backward_temporaries: tuple[int, ...]
    step_temporaries: tuple[int, ...] = ()
