"""Seeds of their own for every named purpose. Free of torch."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, name: str) -> int:
    """A 64-bit signed seed from the run's seed and the name of what it is for.

    A hash, not Python's ``hash``: the latter differs between processes.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
