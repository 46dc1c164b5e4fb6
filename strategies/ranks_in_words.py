"""Ranks and hosts as messages name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """Their numbers.

    >>> name_ranks([3]), name_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_host(hosts: Mapping[int, str]) -> str:
    """Ranks, gathered by where they are.

    >>> by_host({0: "a", 1: "a", 2: "b"})
    'ranks 0, 1 on a; rank 2 on b'
    """
    places: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        places.setdefault(host, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in places.items())
