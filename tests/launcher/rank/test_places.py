"""Where a rank is, where nobody but RANK tells it."""

from __future__ import annotations

import pytest

from launcher.rank.jobs import _Places


@pytest.mark.parametrize(("rank", "per_node", "node"), [(0, 1, 0), (1, 1, 1), (3, 2, 1), (5, 8, 0)])
def test_a_rank_is_on_the_node_that_its_number_says(rank, per_node, node, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("NODE_RANK", "7")
    monkeypatch.setenv("GROUP_RANK", "7")
    assert _Places(per_node).node_rank() == node
