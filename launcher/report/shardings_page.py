"""One layer's operators and how they are cut, as a picture: a page without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from launcher.report.html import page_head
from strategies.planner.shardings.operators import Operator, OperatorGraph

_WIDE, _HIGH, _GAP, _STEP = 190, 40, 18, 74
_MOST = 60
_COLOURS = {"column": "#3b6fb5", "row": "#b5673b", "vocabulary": "#3b9a6d", "replicated": "#8a8a8a"}
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; }
svg { max-width: 100%; height: auto; }
rect { fill: #fff; stroke: #999; rx: 5; }
path { fill: none; stroke: #bbb; stroke-width: 1.4; }
path.cut { stroke: #3b6fb5; stroke-width: 2.6; }
text { font-size: 11px; text-anchor: middle; }
text.state { font-size: 10px; fill: #555; }
"""


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
    head = page_head(title, ()).replace("<style>\n", f"<style>\n{_STYLE}")
    note = (
        "An operator is a box, a value a line. R: every rank has the whole; E: the same, and its "
        "gradients are added up; S1: cut along dimension 1; V2: scores cut by class. Views are "
        "left out."
    )
    return (
        f"{head}<h1>{escape(title)}</h1>\n<p>{escape(layer)}: {len(numbers)} operators. {note}</p>"
        f"\n{_drawing(graph, picks, numbers)}\n</body>\n</html>\n"
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
    wide = max((node.place for node in nodes.values()), default=0) + 1
    high = max((node.depth for node in nodes.values()), default=0) + 1
    width, height = wide * (_WIDE + _GAP) + _GAP, high * _STEP + _GAP
    lines, boxes = "", ""
    for node in nodes.values():
        x, y = _corner(node)
        choice = node.operator.choices[picks[node.number]]
        for value, state in zip(node.operator.inputs, choice.inputs, strict=True):
            maker = nodes.get(source.get(value, -1))
            x1, y1 = (x + _WIDE / 2, y - 26) if maker is None else _foot(maker)
            x2, y2 = x + _WIDE / 2, y
            kind = ' class="cut"' if state not in ("R", "E") else ""
            lines += (
                f'<path{kind} d="M{x1:.0f},{y1:.0f}C{x1:.0f},{y1 + 16:.0f} {x2:.0f},{y2 - 16:.0f} '
                f'{x2:.0f},{y2:.0f}"/><text class="state" x="{(x1 + x2) / 2 + 12:.0f}" '
                f'y="{(y1 + y2) / 2:.0f}">{escape(state)}</text>'
            )
        boxes += _box(node, choice.style, ", ".join(choice.outputs))
    return (
        f'<svg viewBox="0 -30 {width} {height + 30}" width="{width}" role="img" '
        f'aria-label="operators of one layer and their shardings">{lines}{boxes}</svg>'
    )


def _box(node: _Node, style: str | None, left: str) -> str:
    x, y = _corner(node)
    colour = _COLOURS.get(style or "", "#999")
    name = node.operator.name.rpartition(".")[2] if node.operator.kind else _short(node.operator)
    what = f"{style or 'as its input'} > {left}" if left else str(style or "")
    return (
        f'<g><rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" style="stroke:{colour}"/>'
        f"<title>{escape(node.operator.name)}: {escape(node.operator.operation)}</title>"
        f'<text x="{x + _WIDE / 2}" y="{y + 16}">{escape(name)}</text>'
        f'<text class="state" x="{x + _WIDE / 2}" y="{y + 31}">{escape(what)}</text></g>'
    )


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


def _corner(node: _Node) -> tuple[int, int]:
    return _GAP + node.place * (_WIDE + _GAP), _GAP + node.depth * _STEP


def _foot(node: _Node) -> tuple[float, float]:
    x, y = _corner(node)
    return x + _WIDE / 2, float(y + _HIGH)
