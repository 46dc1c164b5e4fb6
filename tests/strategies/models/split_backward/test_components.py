"""Which weight gradients the engine of autograd gets at once: those that share parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strategies.models.split_backward.pending import _components

PARAMETERS = {name: object() for name in "abcx"}


def components(*users: str) -> list[list[int]]:
    """Of nodes that use the parameters with these letters."""
    nodes: list[Any] = [
        SimpleNamespace(edges=[SimpleNamespace(leaves=[PARAMETERS[name] for name in each])])
        for each in users
    ]
    return _components(nodes)


@pytest.mark.parametrize(
    ("users", "found"),
    [
        (("a", "b"), [[0], [1]]),
        (("a", "b", "a"), [[0, 2], [1], [0, 2]]),
        # The third one joins the first two; the fourth shares what only the second one has used.
        (("a", "bx", "ab", "x"), [[0, 1, 2, 3]] * 4),
        (("a", "bx", "ab", "c", "xc"), [[0, 1, 2, 3, 4]] * 5),
    ],
)
def test_nodes_are_joined_by_all_that_they_share(users: Any, found: list[list[int]]) -> None:
    assert components(*users) == found
