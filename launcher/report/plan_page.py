"""The plans of ``mode=plan`` on its page: a table, and time against memory with the front.

Drawn as SVG, which needs no script; the table is sorted and filtered by that of sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from launcher.report.html import FILTER
from launcher.report.plan_table import head_of, own_sizes, plan_cells
from launcher.report.summary import format_duration, round_ticks

_WIDTH, _HEIGHT = 380, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
_TEXTS = ("", "batch", "schedule", "overlap", "recompute", "layers per stage")
# Columns whose cells name a unit of their own, or two numbers: what they are sorted by.
_SORTED_BY = {
    "step": "predicted_step_time_s",
    "exposed": "exposed_grad_reduce",
    "GiB per rank": "peak_memory_bytes",
}

Plan = Mapping[str, object]


def plans_html(plans: Sequence[Plan], *, limit_bytes: float) -> str:
    """A section of the page.

    Args:
        plans: As ``plans`` in result.json.
        limit_bytes: What a rank may hold.
    """
    # Models of different sizes (``planner.maximize``) do different work in their time.
    front = None if own_sizes(plans) else on_front(plans)
    picture = "" if front is None else _picture(plans, front, limit_bytes)
    return (
        f'<section class="table"><h2>plans</h2>{FILTER}<div class="plans"><div>'
        f"{_table(plans, front)}</div>{picture}</div></section>\n"
    )


def on_front(plans: Sequence[Plan]) -> frozenset[int]:
    """Plans (from 0) of which no other is at once as fast and as small, and better in one of both.

    Of two that are equal in both, each is on it.
    """
    points = [(_step(plan), _memory(plan)) for plan in plans]

    def beaten(one: tuple[float, float]) -> bool:
        return any(o[0] <= one[0] and o[1] <= one[1] and o != one for o in points)

    return frozenset(index for index, point in enumerate(points) if not beaten(point))


def _table(plans: Sequence[Plan], front: frozenset[int] | None) -> str:
    known = ("plan", *own_sizes(plans), *head_of(plans)[1:])
    heads = (*known, *(() if front is None else ("front",)), "overrides")
    row = "".join(f'<th scope="col"{_text(head)}>{escape(head)}</th>' for head in heads)
    body = ""
    for index, (plan, cells) in enumerate(zip(plans, plan_cells(plans), strict=True)):
        words = plan["overrides"]
        assert isinstance(words, Sequence)
        mark = ""
        if front is not None:
            mark = '<td class="best">yes</td>' if index in front else "<td></td>"
        code = f"<code>{escape(' '.join(map(str, words)))}</code>"
        given = [
            f"<td{_text(head)}{_value(head, plan)}>{escape(cell)}</td>"
            for head, cell in zip(known, cells, strict=True)
        ]
        body += (
            f'<tr data-job="{index + 1}">{"".join(given)}{mark}<td class="text">{code}</td></tr>\n'
        )
    return f"<table><thead><tr>{row}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def _text(head: str) -> str:
    return ' class="text"' if head in (*_TEXTS, "overrides") else ""


def _value(head: str, plan: Plan) -> str:
    name = _SORTED_BY.get(head)
    if name is None:
        return ""
    found = _memory(plan) if name == "peak_memory_bytes" else plan[name]
    return f' data-value="{found:.9g}"' if isinstance(found, (int, float)) else ""


def _picture(plans: Sequence[Plan], front: frozenset[int], limit: float) -> str:
    """Step time to the right, the fullest rank's memory upwards; lower left is better."""
    steps, held = [_step(plan) for plan in plans], [_memory(plan) for plan in plans]
    low, high = _span(steps)
    top = max(held) * 1.08
    shown = limit <= 2 * top  # else the limit would press all plans to the floor
    top = max(top, limit * 1.04) if shown else top

    def x(step: float) -> float:
        return _LEFT + (step - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(memory: float) -> float:
        return _HEIGHT - _BOTTOM - memory / top * (_HEIGHT - _TOP - _BOTTOM)

    line = sorted((steps[index], held[index]) for index in front)
    path = " ".join(
        f"L{x(step):.1f},{y(memory):.1f}" if number else f"M{x(step):.1f},{y(memory):.1f}"
        for number, (step, memory) in enumerate(_stairs(line))
    )
    dots = "".join(
        f'<g data-dot="{index + 1}" class="{"on" if index in front else "beaten"}">'
        f'<circle cx="{x(steps[index]):.1f}" cy="{y(held[index]):.1f}" r="4.5">'
        f"<title>plan {index + 1}: {format_duration(steps[index], 's')}, "
        f"{held[index] / 2**30:.3g} GiB</title></circle>"
        f'<text x="{x(steps[index]) + 6:.1f}" y="{y(held[index]) - 6:.1f}">{index + 1}</text></g>'
        for index in range(len(plans))
    )
    mark = ""
    if shown:
        mark = (
            f'<path class="limit" d="M{_LEFT},{y(limit):.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_WIDTH - _RIGHT}" y="{y(limit) - 4:.1f}" text-anchor="end">'
            f"limit {limit / 2**30:.3g} GiB</text>"
        )
    return (
        f'<svg class="front" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="step time and memory of {len(plans)} plans"><path class="axis" '
        f'd="M{_LEFT},{_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>'
        f'{"".join(_scale(low, high, top, x, y))}{mark}<path class="steps" d="{path}"/>{dots}</svg>'
    )


def _stairs(line: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The front's corners: nothing is known between two plans but that both can be had."""
    for number, (step, memory) in enumerate(line):
        if number:
            yield step, line[number - 1][1]
        yield step, memory


def _scale(low: float, high: float, top: float, x: object, y: object) -> Iterator[str]:
    assert callable(x)
    assert callable(y)
    for step in round_ticks(low, high):
        yield (
            f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">'
            f"{format_duration(step, 's')}</text>"
        )
    for gib in round_ticks(0.0, top / 2**30):
        yield (
            f'<text x="{_LEFT - 6}" y="{y(gib * 2**30) + 4:.1f}" text-anchor="end">{gib:g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">step time</text>'
    yield (
        f'<text transform="translate(12 {(_HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        'text-anchor="middle">GiB, fullest rank</text>'
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.12 or high * 0.1 or 1.0
    return max(0.0, low - room), high + room


def _step(plan: Plan) -> float:
    found = plan["predicted_step_time_s"]
    assert isinstance(found, (int, float))
    return float(found)


def _memory(plan: Plan) -> float:
    found = plan["peak_memory_bytes"]
    assert isinstance(found, Sequence)
    return float(max(found))
