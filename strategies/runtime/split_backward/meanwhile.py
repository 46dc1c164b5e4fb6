"""Weight gradients that are computed while something else is under way.

A backward that has to wait for a collective (the sum of an input's gradient over tensor-parallel
ranks) has work at hand that nothing waits for: the weight gradients of the layers that it has just
passed. The engine would have computed them before the collective began.
"""

from __future__ import annotations

from collections.abc import Iterable

from strategies.runtime.split_backward.deferred import Deferred
from strategies.runtime.split_backward.pending import PendingWeights


class Meanwhile:
    """Collects weight gradients during a backward; ``run`` computes what has been collected."""

    def __init__(self) -> None:
        self._alone: frozenset[int] = frozenset()
        self._waiting: list[Deferred] = []

    def expect(self, deferred: Iterable[Deferred]) -> None:
        """Tells what the backward will pass. Weights of several layers are left to the end."""
        users: dict[int, int] = {}
        items = list(deferred)
        for item in items:
            for leaf in {id(leaf) for edge in item.edges for leaf in edge.leaves}:
                users[leaf] = users.get(leaf, 0) + 1
        self._alone = frozenset(
            id(item)
            for item in items
            if all(users[id(leaf)] == 1 for edge in item.edges for leaf in edge.leaves)
        )

    def take(self, item: Deferred) -> bool:
        """Keeps a passed node's weight gradients for the next ``run``, if they can go alone."""
        if id(item) not in self._alone or not item.is_direct():
            return False
        self._waiting.append(item)
        return True

    def run(self) -> None:
        """Computes what is there, with the parameters' hooks."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            PendingWeights(waiting, exact=False, through_engine=False).run()
