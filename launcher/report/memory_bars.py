"""What each rank holds at its worst moment, by what it is for: as text, JSON and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape

from strategies.memory_model import RankMemory

_NAMES = tuple(entry.name for entry in fields(RankMemory))
# Okabe and Ito's colours, which colour-blind people can tell apart; a grey for the least.
_COLOURS = dict(
    zip(
        _NAMES,
        (
            "#0072b2", "#56b4e9", "#009e73", "#f0e442",
            "#e69f00", "#d55e00", "#cc79a7", "#999999",
        ),
        strict=True,
    )
)  # fmt: skip


def memory_mapping(ranks: Sequence[RankMemory]) -> list[dict[str, int]]:
    """Per rank the bytes by what they are for, and their sum, as result.json has them."""
    return [
        {**{name: getattr(held, name) for name in _NAMES}, "total": held.total} for held in ranks
    ]


def memory_line(held: RankMemory) -> str:
    """One rank in a line: the total, then everything that it has, largest first.

    >>> memory_line(RankMemory(parameters=2**30, activations=3 * 2**30))
    '4 GiB (activations 3, parameters 1)'
    """
    present = sorted((name for name in _NAMES if getattr(held, name)), key=_NAMES.index)
    present.sort(key=lambda name: -getattr(held, name))
    parts = ", ".join(f"{_word(name)} {getattr(held, name) / 2**30:.3g}" for name in present)
    return f"{held.total / 2**30:.4g} GiB" + (f" ({parts})" if parts else "")


def memory_html(ranks: Sequence[RankMemory], *, limit_bytes: float | None = None) -> str:
    """A bar per rank, all on one scale; a mark where the machine's memory ends.

    Args:
        ranks: At their worst moments.
        limit_bytes: Memory of one rank; None to draw no mark.
    """
    scale = max([held.total for held in ranks] + [limit_bytes or 0.0, 1.0])
    shown = [name for name in _NAMES if any(getattr(held, name) for held in ranks)]
    keys = "".join(
        f'<span><i style="background:{_COLOURS[name]}"></i>{escape(_word(name))}</span>'
        for name in shown
    )
    rows = "".join(_bar(rank, held, scale, limit_bytes) for rank, held in enumerate(ranks))
    return f'<div class="memory"><h3>memory at the peak</h3><p>{keys}</p>{rows}</div>'


def _bar(rank: int, held: RankMemory, scale: float, limit: float | None) -> str:
    parts = "".join(
        f'<i style="width:{100 * getattr(held, name) / scale:.3f}%;background:{_COLOURS[name]}" '
        f'title="{escape(_word(name))}: {getattr(held, name) / 2**30:.4g} GiB"></i>'
        for name in _NAMES
        if getattr(held, name)
    )
    mark = "" if limit is None else f'<b style="left:{100 * limit / scale:.3f}%"></b>'
    total = f"{held.total / 2**30:.4g} GiB"
    return (
        f'<div class="row"><span>rank {rank}</span><div class="bar" role="img" '
        f'aria-label="{escape(memory_line(held))}">{parts}{mark}</div><span>{total}</span></div>'
    )


def _word(name: str) -> str:
    return name.replace("_", " ")
