"""The plans of ``mode=plan`` on its page: a table, and time against memory with the front.

Drawn as SVG, which needs no script; the table is sorted and filtered by that of sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from launcher.report.html import FILTER, page_head
from launcher.report.plan_table import head_of, own_sizes, plan_cells
from launcher.report.summary import format_duration, round_ticks
from strategies.planner.shardings.operators import (
    ENTERED,
    WHOLE,
    Choice,
    Operator,
    OperatorGraph,
)

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


# --------------------------------------------------------------------------------------------------
# One layer's operators and how they are cut, as a picture: a page without scripts.
_WIDE, _HIGH, _GAP, _STEP, _LANE = 190, 40, 18, 82, 22
_MOST = 60
_STYLE = """
.scroll { overflow-x: auto; }
svg { display: block; }
rect { fill: var(--panel); stroke: var(--held); stroke-width: 1.5; rx: 5; }
path { fill: none; stroke: var(--held); stroke-width: 1.4; }
path.cut { stroke: #3b78c9; stroke-width: 2.6; }
rect.column { stroke: #3b78c9; } #legend i.column { background: #3b78c9; }
rect.row { stroke: #c9783b; } #legend i.row { background: #c9783b; }
rect.vocabulary { stroke: #3ba777; } #legend i.vocabulary { background: #3ba777; }
#legend i.replicated { background: var(--held); }
svg text { font-size: 12px; text-anchor: middle; fill: var(--text); }
svg text.state { font-size: 11px; fill: var(--muted); }
svg text.at { text-anchor: start; }
svg text.to { text-anchor: end; }
"""
_LEGEND = (
    ("column", "cut by outputs"),
    ("row", "cut by inputs"),
    ("vocabulary", "cut by ids or classes"),
    ("replicated", "whole, or as its input"),
)


class _Node(NamedTuple):
    number: int
    operator: Operator
    depth: int
    place: int


def shardings_html(graph: OperatorGraph, picks: Sequence[int]) -> str:
    """The first of a model's repeated layers; the whole of a model that has none.

    Args:
        graph: All operators.
        picks: The number of each operator's choice.
    """
    title = f"{graph.model}, tp={graph.tp}"
    layer, numbers = _one_layer(graph)
    head = page_head(title, ("timeline.css",)).replace("</style>", f"{_STYLE}</style>")
    legend = "".join(f'<span><i class="{c}"></i>{c}: {words}</span>' for c, words in _LEGEND)
    note = (
        "An operator is a box, a value a line, a thick one a value that is cut. R: every rank has "
        "the whole; E: the same, and its gradients are added up; S1: cut along dimension 1; S2:3: "
        "three parts along dimension 2, each of them cut; V2: scores cut by class. Views are left "
        "out."
    )
    return (
        f"{head}<h1>{escape(title)}</h1>\n<p>{escape(layer)}: {len(numbers)} operators. {note}</p>"
        f'\n<div id="legend">{legend}</div>\n<div class="scroll" tabindex="0">'
        f"{_drawing(graph, picks, numbers)}</div>\n</body>\n</html>\n"
    )


def _one_layer(graph: OperatorGraph) -> tuple[str, list[int]]:
    """Name and operators of the first layer of a container that has several."""
    for operator in graph.operators:
        parts = operator.name.split(".")
        at = next((place for place, part in enumerate(parts) if part == "0"), None)
        if at is None:
            continue
        name = ".".join(parts[: at + 1])
        second = ".".join((*parts[:at], "1"))
        numbers = [n for n, o in enumerate(graph.operators) if _inside(o.name, name)]
        if len(numbers) > 2 and any(_inside(o.name, second) for o in graph.operators):
            return name, numbers[:_MOST]
    return "the whole step", list(range(min(_MOST, len(graph.operators))))


def _inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


def _drawing(graph: OperatorGraph, picks: Sequence[int], numbers: Sequence[int]) -> str:
    source = _sources(graph, numbers)
    nodes = _placed(graph, numbers, source)
    rows: dict[int, int] = {}
    for node in nodes.values():
        rows[node.depth] = max(rows.get(node.depth, 0), node.place + 1)
    wide = max(rows.values(), default=1)
    width = wide * (_WIDE + _GAP) + _GAP
    corners = {
        # Rows stand in the middle.
        n: (
            _GAP + round((node.place + (wide - rows[node.depth]) / 2) * (_WIDE + _GAP)),
            _GAP + node.depth * _STEP,
        )
        for n, node in nodes.items()
    }
    lines, boxes, lanes = "", "", 0
    for number, node in nodes.items():
        x, y = corners[number]
        choice = node.operator.choices[picks[number]]
        count = len(node.operator.inputs)
        for place, (value, state) in enumerate(
            zip(node.operator.inputs, choice.inputs, strict=True)
        ):
            at = x + _WIDE * (place + 1) / (count + 1)
            maker = source.get(value, -1)
            given = corners.get(maker)
            if given is None:
                path = f"M{at:.0f},{y - 26}V{y}"
            elif nodes[maker].depth + 1 == node.depth:
                x1, y1 = given[0] + _WIDE / 2, given[1] + _HIGH
                path = f"M{x1:.0f},{y1}C{x1:.0f},{y1 + 20} {at:.0f},{y - 20} {at:.0f},{y}"
            else:
                # Around the boxes between them.
                lane = width + lanes * _LANE
                lanes += 1
                x1, y1 = float(given[0] + _WIDE), given[1] + _HIGH // 2
                path = (
                    f"M{x1:.0f},{y1:.0f}H{lane - 8}Q{lane},{y1:.0f} {lane},{y1 + 8:.0f}"
                    f"V{y - 30}Q{lane},{y - 22} {lane - 8},{y - 22}H{at + 8:.0f}"
                    f"Q{at:.0f},{y - 22} {at:.0f},{y - 14}V{y}"
                )
            kind = ' class="cut"' if state not in (WHOLE, ENTERED) else ""
            # On the side that the line does not come from.
            left = given is not None and given[0] + _WIDE / 2 > at + 40 and "Q" not in path
            side, beside = ("to", at - 5) if left else ("at", at + 5)
            lines += (
                f'<path{kind} d="{path}"/><text class="state {side}" x="{beside:.0f}" '
                f'y="{y - 6}">{escape(state)}</text>'
            )
        boxes += _box(node, corners[number], choice)
    high = max((node.depth for node in nodes.values()), default=0) + 1
    width, height = width + lanes * _LANE, high * _STEP + _GAP
    return (
        f'<svg viewBox="0 -30 {width} {height + 30}" width="{width}" height="{height + 30}" '
        f'role="img" aria-label="operators of one layer and their shardings">{lines}{boxes}</svg>'
    )


def _box(node: _Node, corner: tuple[int, int], choice: Choice) -> str:
    x, y = corner
    name = node.operator.name.rpartition(".")[2] if node.operator.kind else _short(node.operator)
    what: str = choice.style or "as its input"
    if choice.outputs:
        what += f" > {', '.join(dict.fromkeys(choice.outputs))}"
    sent = [message.kind for message in choice.messages if not message.once]
    if sent:
        what += f", {' and '.join(dict.fromkeys(_SENDS[kind] for kind in sent))}"
    title = f"{node.operator.name}: {node.operator.operation}"
    return (
        f'<g><rect class="{choice.style or "replicated"}" x="{x}" y="{y}" width="{_WIDE}" '
        f'height="{_HIGH}"/><title>{escape(title)}</title>'
        f'<text x="{x + _WIDE // 2}" y="{y + 17}">{escape(name)}</text>'
        f'<text class="state" x="{x + _WIDE // 2}" y="{y + 32}">{escape(what)}</text></g>'
    )


_SENDS = {"sum": "added up", "gather": "gathered"}


def _short(operator: Operator) -> str:
    return operator.operation.removeprefix("aten.").partition(".")[0].strip("_")[:28]


def _drawn(operator: Operator) -> bool:
    """Views move nothing."""
    return operator.kind is not None or operator.moved > 0 or len(operator.inputs) > 1


def _sources(graph: OperatorGraph, numbers: Sequence[int]) -> dict[int, int]:
    """The drawn operator that a value comes from, through views."""
    found: dict[int, int] = {}
    for number in numbers:
        operator = graph.operators[number]
        maker = number
        if not _drawn(operator) and operator.inputs:
            maker = found.get(operator.inputs[0], -1)
        found.update(dict.fromkeys(operator.outputs, maker))
    return found


def _placed(
    graph: OperatorGraph, numbers: Sequence[int], source: Mapping[int, int]
) -> dict[int, _Node]:
    """Below all that it reads; beside what is as deep."""
    nodes: dict[int, _Node] = {}
    taken: dict[int, int] = {}
    for number in numbers:
        operator = graph.operators[number]
        if not _drawn(operator) or not (operator.inputs or operator.kind):
            continue
        makers = [source[v] for v in operator.inputs if source.get(v, -1) in nodes]
        depth = max((nodes[maker].depth + 1 for maker in makers), default=0)
        place = taken.get(depth, 0)
        taken[depth] = place + 1
        nodes[number] = _Node(number, operator, depth, place)
    return nodes
