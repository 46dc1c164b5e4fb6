"""One set of ranks per world size for all tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    known: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        for other, entry in known.items():
            if other != world_size:
                entry.rest()
        if world_size not in known or not known[world_size].alive:
            known[world_size] = Ranks(world_size)
        return known[world_size]

    yield get
    for entry in known.values():
        entry.close()
