"""When the tokens of experts travel inside a computation, and how long a fused pair takes for it.

A layer is attention | dispatch | experts | combine, and in a backward the same for gradients, from
the last layer: dispatch | experts | combine | attention. By itself a computation waits for each of
its exchanges. The halves of a fused pair take turns as they do on a rank (``TwoThreads``): one
that has sent its tokens on their way lets the other compute, and waits for them when it is its turn
again. Exchanges of a rank follow each other on their way.
"""

from __future__ import annotations

from typing import NamedTuple

Span = tuple[float, float]


class Exchange(NamedTuple):
    """How the tokens of a stage travel in a forward, and likewise in a backward.

    Attributes:
        away: How long all their exchanges take.
        layers: How many layers have experts elsewhere, >= 1 where anything is away.
        experts: The share of the stage's compute that is theirs.
    """

    away: float
    layers: int = 1
    experts: float = 0.5


class ComputeWithExchanges(NamedTuple):
    """A computation with exchanges, in any unit of time.

    Attributes:
        took: How long it takes by itself, exchanges included.
        exchange: That of its stage.
        backward: Whether it goes through the layers from the last one.
    """

    took: float
    exchange: Exchange
    backward: bool

    @property
    def each(self) -> float:
        """What one exchange takes; a layer has two."""
        layers = self.exchange.layers
        return min(self.exchange.away, self.took) / (2 * layers) if layers else 0.0

    def pieces(self) -> list[float]:
        """What it computes before each of its exchanges, and behind the last one."""
        away, layers, share = self.exchange
        if not layers:
            return [self.took]
        compute = (self.took - min(away, self.took)) / layers
        attention, experts = compute * (1.0 - share), compute * share
        if self.backward:
            return [0.0, *[experts, attention] * layers]
        return [*[attention, experts] * layers, 0.0]


def spans_alone(compute: ComputeWithExchanges) -> list[Span]:
    """Of each exchange, counted from the computation's start.

    >>> forward = ComputeWithExchanges(1.4, Exchange(0.4), False)
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

    >>> forward = ComputeWithExchanges(1.4, Exchange(0.4), False)
    >>> backward = ComputeWithExchanges(2.4, Exchange(0.4), True)
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
