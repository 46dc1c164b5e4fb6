"""One set of ranks per world size for all tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Ranks


@pytest.fixture(scope="session")
def all_ranks() -> Iterator[dict[int, Ranks]]:
    known: dict[int, Ranks] = {}
    yield known
    for entry in known.values():
        entry.close()


@pytest.fixture(scope="session")
def ranks(all_ranks: dict[int, Ranks]) -> Callable[[int], Ranks]:
    def get(world_size: int) -> Ranks:
        for other, entry in all_ranks.items():
            if other != world_size:
                entry.rest()
        if world_size not in all_ranks or not all_ranks[world_size].alive:
            all_ranks[world_size] = Ranks(world_size)
        return all_ranks[world_size]

    return get


@pytest.fixture(autouse=True)
def rest(all_ranks: dict[int, Ranks]) -> Iterator[None]:
    """Idle ranks take a core from the tests that follow."""
    yield
    for entry in all_ranks.values():
        entry.rest()
