"""What somebody probably meant: the nearest valid keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def nearest(word: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The closest candidates, best first; empty where nothing is close."""
    return tuple(get_close_matches(word[:200], list(candidates), n=limit, cutoff=0.6))


def nearest_keys(word: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Like ``nearest`` for dotted keys: a wrong part may sit before or behind the dot.

    ``modle.hidden`` and plain ``hidden`` both lead to ``model.hidden``.
    """
    word = word[:200]
    scored = []
    for candidate in candidates:
        score = _ratio(word, candidate)
        head, _, leaf = candidate.rpartition(".")
        word_head, _, word_leaf = word.rpartition(".")
        if word_head:
            # Each part alone, so that a short wrong leaf is not lost beside a long right head.
            score = max(score, (_ratio(word_head, head) + _ratio(word_leaf, leaf)) / 2)
        elif head:
            score = max(score, 0.95 * _ratio(word, leaf))
        scored.append((score, candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    best = scored[0][0] if scored else 0.0
    return tuple(name for score, name in scored[:limit] if score >= max(0.65, best - 0.15))


def did_you_mean(matches: Iterable[str]) -> str:
    """`` Did you mean a or b?``, or nothing."""
    listed = " or ".join(matches)
    return f" Did you mean {listed}?" if listed else ""


def _ratio(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()
