"""``planner.explain=[tp=4,pp=8]``: in Hydra's grammar a list's entries with ``=`` need quotes."""

from __future__ import annotations

from collections.abc import Iterable

_KEY = "planner.explain="


def quote_explain(words: Iterable[str]) -> tuple[str, ...]:
    """The command line's words, with the entries of ``planner.explain`` quoted.

    >>> quote_explain(["pp=4", "planner.explain=[tp=4,pp=8]"])
    ('pp=4', "planner.explain=['tp=4','pp=8']")
    """
    return tuple(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    value = word.removeprefix(_KEY)
    if value == word or not (value.startswith("[") and value.endswith("]")) or "'" in value:
        return word
    entries = [entry.strip() for entry in value[1:-1].split(",") if entry.strip()]
    if any('"' in entry or "[" in entry for entry in entries):
        return word
    return f"{_KEY}[" + ",".join(f"'{entry}'" for entry in entries) + "]"
