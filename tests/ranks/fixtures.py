"""Pools of ranks for all tests, one per world size; tests/conftest.py names them to pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks.pool import Ranks


@pytest.fixture(scope="session")
def all_ranks() -> Iterator[dict[int, Ranks]]:
    """The pools that there are, by world size."""
    known: dict[int, Ranks] = {}
    yield known
    for entry in known.values():
        entry.close()


@pytest.fixture(scope="session")
def ranks(all_ranks: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """`ranks(4)` is the pool of four; the others are suspended meanwhile."""

    def get(world_size: int) -> Ranks:
        from tests.ranks.pool import Ranks  # only here: collecting torch-free tests stays quick

        for other, entry in all_ranks.items():
            if other != world_size:
                entry.rest()
        if world_size not in all_ranks or not all_ranks[world_size].alive:
            all_ranks[world_size] = Ranks(world_size)
        return all_ranks[world_size]

    return get


def rest(item: pytest.Item) -> None:
    """Suspends the ranks of a test that has ended: idle ones take a core from the next tests."""
    for entry in getattr(item, "funcargs", {}).get("all_ranks", {}).values():
        entry.rest()
