"""What every source of costs boils down to: a number per stage and kind of instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from strategies.ir.graph import DURATION_ROWS
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import BACKWARD_KINDS, KINDS, Kind

if TYPE_CHECKING:
    from strategies.ir.program import Program


# --------------------------------------------------------------------------------------------------
# When the tokens of experts travel inside a computation, and how long a fused pair takes for it.
#
# A layer is attention | dispatch | experts | combine, and in a backward the same for gradients,
# from the last layer: dispatch | experts | combine | attention. By itself a computation waits for
# each of its exchanges. The halves of a fused pair take turns as they do on a rank (``Turns``): one
# that has sent its tokens on their way lets the other compute, and waits for them when it is its
# turn again. Exchanges of a rank follow each other on their way.

Span = tuple[float, float]


class ComputeWithExchanges(NamedTuple):
    """A computation with exchanges, in any unit of time.

    Attributes:
        took: How long it takes by itself, exchanges included.
        away: How much of that its exchanges are.
        layers: How many layers have experts elsewhere, >= 1 where anything is away.
        experts: The share of its compute that is theirs.
        backward: Whether it goes through the layers from the last one.
    """

    took: float
    away: float
    layers: int
    experts: float
    backward: bool

    @classmethod
    def of(
        cls, kind: Kind, took: float, away: float, layers: int, experts: float
    ) -> ComputeWithExchanges:
        return cls(took, min(away, took), layers, experts, kind in BACKWARD_KINDS)

    @property
    def each(self) -> float:
        """What one exchange takes; a layer has two."""
        return self.away / (2 * self.layers) if self.layers else 0.0

    def pieces(self) -> list[float]:
        """What it computes before each of its exchanges, and behind the last one."""
        compute = self.took - self.away
        if not self.layers:
            return [self.took]
        attention = compute / self.layers * (1.0 - self.experts)
        experts = compute / self.layers * self.experts
        if self.backward:
            return [0.0, *[experts, attention] * self.layers]
        return [*[attention, experts] * self.layers, 0.0]


def spans_alone(compute: ComputeWithExchanges) -> list[Span]:
    """Of each exchange, counted from the computation's start.

    >>> forward = ComputeWithExchanges(1.4, 0.4, 1, 0.5, False)
    >>> [(round(a, 2), round(b, 2)) for a, b in spans_alone(forward)]
    [(0.5, 0.7), (1.2, 1.4)]
    """
    now, found = 0.0, []
    for piece in compute.pieces()[:-1]:
        now += piece
        found.append((now, now + compute.each))
        now += compute.each
    return found


def interleave(
    first: ComputeWithExchanges, second: ComputeWithExchanges
) -> tuple[float, list[Span]]:
    """How long a pair takes, and the exchanges of its first half, then those of its second.

    >>> forward = ComputeWithExchanges(1.4, 0.4, 1, 0.5, False)
    >>> backward = ComputeWithExchanges(2.4, 0.4, 1, 0.5, True)
    >>> round(interleave(forward, backward)[0], 2)
    3.0
    """
    computes = (first, second)
    pieces = [list(reversed(compute.pieces())) for compute in computes]
    spans: tuple[list[Span], list[Span]] = ([], [])
    arrived = [0.0, 0.0]
    now = channel = 0.0
    turn = 1  # The backward comes to its experts' results at once.
    while any(pieces):
        if not pieces[turn]:
            turn = 1 - turn
        now = max(now, arrived[turn]) + pieces[turn].pop()
        if pieces[turn]:  # Behind all but its last piece there is an exchange.
            begun = max(now, channel)
            channel = arrived[turn] = begun + computes[turn].each
            spans[turn].append((begun, channel))
        turn = 1 - turn
    return now, [*spans[0], *spans[1]]


# --------------------------------------------------------------------------------------------------
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
        exchange: Per stage, how much of a forward, and as much of a backward, is an exchange of
            tokens that runs under the compute of the other half of a fused pair; () for nothing.
        exchanging: Per stage, how many layers exchange, and which share of its compute is their
            experts'; () where that is not known.
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
    exchange: tuple[float, ...] = ()
    exchanging: tuple[tuple[int, float], ...] = ()

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
        if self.exchanging:
            return self.fused * interleave(*self.computes(took, stages, (Kind.F, Kind.B)))[0]
        away = self.exchange[stages[0]] + self.exchange[stages[1]]
        return self.fused * max(sum(took) - away, away, *took)

    def computes(
        self, took: Sequence[float], stages: Sequence[int], kinds: Sequence[Kind]
    ) -> list[ComputeWithExchanges]:
        """Computations with what they exchange; ``took`` is by themselves."""
        away = self.exchange or (0.0,) * len(self.forward)
        known = self.exchanging or ((1, 0.5),) * len(self.forward)
        return [
            ComputeWithExchanges.of(kind, seconds, away[stage], *known[stage])
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
