"""When the tokens of experts travel inside a computation, and how long a fused pair takes for it.

A layer is attention | dispatch | experts | combine, and in a backward the same for gradients, from
the last layer: dispatch | experts | combine | attention. By itself a computation waits for each of
its exchanges. The halves of a fused pair take turns as they do on a rank (``Turns``): one that has
sent its tokens on their way lets the other compute, and waits for them when it is its turn again.
Exchanges of a rank follow each other on their way.
"""

from __future__ import annotations

from typing import NamedTuple

from strategies.ir.kinds import BACKWARD_KINDS, Kind

Span = tuple[float, float]


class Strand(NamedTuple):
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
    def of(cls, kind: Kind, took: float, away: float, layers: int, experts: float) -> Strand:
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


def spans_alone(strand: Strand) -> list[Span]:
    """Of each exchange, counted from the computation's start.

    >>> [(round(a, 2), round(b, 2)) for a, b in spans_alone(Strand(1.4, 0.4, 1, 0.5, False))]
    [(0.5, 0.7), (1.2, 1.4)]
    """
    now, found = 0.0, []
    for piece in strand.pieces()[:-1]:
        now += piece
        found.append((now, now + strand.each))
        now += strand.each
    return found


def spans_in_turn(first: Strand, second: Strand) -> tuple[float, list[Span]]:
    """How long a pair takes, and the exchanges of its first half, then those of its second.

    >>> forward = Strand(1.4, 0.4, 1, 0.5, False)
    >>> backward = Strand(2.4, 0.4, 1, 0.5, True)
    >>> round(spans_in_turn(forward, backward)[0], 2)
    3.0
    """
    strands = (first, second)
    pieces = [list(reversed(strand.pieces())) for strand in strands]
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
            channel = arrived[turn] = begun + strands[turn].each
            spans[turn].append((begun, channel))
        turn = 1 - turn
    return now, [*spans[0], *spans[1]]
