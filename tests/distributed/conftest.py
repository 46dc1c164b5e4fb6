"""One set of ranks per world size for the whole session."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    known: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in known or not known[world_size].alive:
            known[world_size] = Ranks(world_size)
        return known[world_size]

    yield get
    for entry in known.values():
        entry.close()
