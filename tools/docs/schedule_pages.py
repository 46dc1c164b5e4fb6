"""docs/schedules/: a page and a picture per schedule, from its docstring and the simulator."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby

import yaml  # type: ignore[import-untyped]

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.timeline import Timeline
from strategies.ir.versions import staleness, weight_versions
from strategies.plan import Overlap
from strategies.schedules import SCHEDULES, Schedule
from strategies.schedules import custom as custom_module
from strategies.schedules.synonym import SYNONYMS
from tools.docs.drawing import svg
from tools.docs.pages import ROOT, difference, percent
from tools.docs.situations import PP, SITUATIONS, Situation, choice, figures

PICTURED = 8  # microbatches in pictures
COUNTS = (4, 8, 16, 32)

# When to take it: what its figures mean for somebody who has to choose.
ADVICE = {
    "naive": (
        "Never for training. It shows what a pipeline costs that does not overlap anything: the "
        "other ranks wait while one works."
    ),
    "gpipe": (
        "To understand pipelines, or where every forward must end before a backward begins. It "
        "holds the activations of the whole batch; `1f1b` takes the same time and holds `pp`."
    ),
    "1f1b": (
        "First. It is the plainest order that is any good, splits nothing, and every layer works "
        "with it. The other pages compare with it."
    ),
    "eager_1f1b": (
        "Where messages between ranks are slow and a step of `1f1b` waits for them: its longer "
        "warm-up hides them, for nearly twice the activations."
    ),
    "interleaved_1f1b": (
        "When the model has layers enough for several stages per rank and backwards cannot be "
        "split (`compile=true`). The bubble shrinks by the number of stages per rank; there are "
        "as many times more messages, and a little more memory on the first rank."
    ),
    "interleaved_zb": (
        "Instead of `zb_v` where the stages should lie in a loop rather than in a V (the first "
        "and the last stage on different ranks)."
    ),
    "looped_bfs": (
        "When gradients travel slowly and all activations fit: every stage is finished, and "
        "reduced, as early as possible. `foldx` finds the same time in less memory."
    ),
    "hanayo": (
        "As `interleaved_1f1b` with fewer activations, where messages are quick: its stages run "
        "in waves, so neighbours in time are on the same rank."
    ),
    "zb_h1": (
        "When a rank holds one stage only (few layers) and backwards may be split: a shorter step "
        "than `1f1b` at the same memory."
    ),
    "zb_h2": (
        "When activations of twice 1F1B's size fit and gradients are not clipped: the steady step "
        "has no bubble. With clipping it is as long as `zb_h1`, which holds half."
    ),
    "zb_v": (
        "When layers suffice for two stages per rank: the shortest step in 1F1B's memory. It is "
        "the one to try first when `1f1b` shows bubbles."
    ),
    "v_half": (
        "When activations of 1F1B do not fit: half of them (and a microbatch), for a step that is "
        "barely longer than `zb_v`."
    ),
    "v_min": (
        "When even `v_half` does not fit: a third of 1F1B's activations for long pipelines, and "
        "still no longer a step than `1f1b`. After it comes recomputation."
    ),
    "foldx": (
        "With data parallelism over a slow network. It simulates its group sizes with the run's "
        "own costs and takes the one that hides the gradients' reduction in the least memory."
    ),
    "foldx_fifo": (
        "The end of `foldx` that holds least: for reductions that are short beside a step."
    ),
    "foldx_aiao": (
        "The end of `foldx` that reduces earliest: for reductions as long as the step, and memory "
        "for the activations of all microbatches."
    ),
    "chimera": "Where the weights fit twice on every rank and backwards must not be split.",
    "dualpipe": (
        "Where the weights fit twice and forwards and backwards can run as one (`costs.fused` "
        "below their sum): communication of the one travels under compute of the other. Measure "
        "that gain first; without it `zb_v` does nearly as well with one copy."
    ),
    "pipedream_2bw": (
        "When a step's bubble costs more than gradients that are one update late: no bubble at any "
        "number of microbatches from pp on. Another training than with a flush: compare losses."
    ),
    "pipedream": (
        "For what was trained with it: an update per microbatch, on the first stage pp-1 updates "
        "late. `pipedream_2bw` is one update late anywhere."
    ),
    "dualpipe_v": "As `dualpipe` with one copy of the weights: half the ranks, in a V.",
}


def schedule_pages() -> Iterator[tuple[str, str]]:
    """(path below docs/, content) of every page and picture."""
    yield from pictures()
    for name in sorted(SCHEDULES):
        yield f"schedules/{name}.md", _page(name)
    yield "schedules/custom.md", _custom()


def pictures() -> Iterator[tuple[str, str]]:
    """The same of the pictures."""
    for name in sorted(SCHEDULES):
        yield f"schedules/{name}.svg", _picture(name)


def schedule_table() -> str:
    """All schedules beside each other, shortest step first."""
    heads = (
        "| schedule | step | against `1f1b` | bubble | holds at most | stages per rank | weights |"
    )
    situation = Situation("", "")
    found = {name: figures(name, situation) for name in SCHEDULES}
    base = figures("1f1b", situation)
    assert base is not None
    rows = [heads, "|---" * 7 + "|"]
    for name in sorted(found, key=lambda name: (found[name] or base).step):
        figure = found[name]
        assert figure is not None
        rows.append(
            f"| [`{name}`]({name}.md) | {figure.step:g} "
            f"| {difference(figure.step / base.step - 1)} | {percent(figure.bubble)} "
            f"| {figure.peak:g} | {figure.stages} "
            f"| {_weights(SCHEDULES[name], figure.copies)} |"
        )
    return "\n".join(rows)


def _weights(schedule: Schedule, copies: int) -> str:
    """How often a rank holds them, at most."""
    if schedule.synchronous:
        return "twice" if copies == 2 else "once"
    program = compile_program(schedule=schedule.name, pp=PP, num_microbatches=PP)
    late = max(staleness(program))
    updates = "update" if late == 1 else "updates"
    return f"{max(weight_versions(program))} versions, {late} {updates} late"


def synonym_table() -> str:
    """What schedules are called elsewhere, and what is typed here."""
    lines = ["| called | typed here |", "|---|---|"]
    for typed, names in groupby(SYNONYMS, key=SYNONYMS.__getitem__):
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {listed} | `schedule={typed}` |")
    return "\n".join(lines)


def two_schedules() -> str:
    """The picture of the first page: the order that everybody knows above a better one."""
    names = {"1f1b": "1f1b, the most common one", "zb_v": "zb_v: the same work"}
    panels = [
        (f"{words}: a step takes {timeline(name).makespan:g}", timeline(name))
        for name, words in names.items()
    ]
    return svg(panels, title="Two schedules for the same work on 4 ranks, 8 microbatches")


@cache
def timeline(name: str, num_microbatches: int = PICTURED) -> Timeline:
    program = compile_program(schedule=name, pp=PP, num_microbatches=num_microbatches)
    return simulate(program, UniformCosts())


def _picture(name: str) -> str:
    found = timeline(name)
    flushed = SCHEDULES[name].synchronous
    step = found.makespan if flushed else found.period
    heading = f"{name}, {PP} ranks, {PICTURED} microbatches: a step takes {step:g}"
    if not flushed:
        heading += ", filled once and drained once"
    return svg([(heading, found)], title=heading)


def timeline_to_read() -> str:
    """The picture of docs/guides/reading-a-timeline.md: everything that a page may show."""
    program = compile_program(schedule="1f1b", pp=4, num_microbatches=8)
    found = simulate(program, UniformCosts(grad_reduce=3, p2p=0.2))
    return svg([("1f1b, pp=4, 8 microbatches, gradients reduced", found)], title="a timeline")


def fold_at_a_flush() -> str:
    """The picture of docs/how/fold.md: four stages, two segments, a reduction of four forwards."""
    rows: dict[str, tuple[str, Overlap]] = {
        "1f1b, reduced at the flush": ("1f1b", "none"),
        "interleaved_1f1b, reduced at the flush": ("interleaved_1f1b", "none"),
        "foldx_fifo, each segment reduced as it ends": ("foldx_fifo", "grad_reduce"),
    }
    panels = []
    for words, (name, overlap) in rows.items():
        program = compile_program(schedule=name, pp=PP, num_microbatches=4, overlap=overlap)
        found = simulate(program, UniformCosts(grad_reduce=4))
        panels.append((f"{words}: a step takes {found.makespan:g}", found))
    return svg(panels, title="Fold on 4 ranks, 4 microbatches, gradients reduced over replicas")


def _page(name: str) -> str:
    schedule = SCHEDULES[name]
    first, rest = markdown(_docstring(schedule))
    summary = _summary(name)
    wins = [row.words for row in SITUATIONS if choice(row) == name]
    parts = [
        f"# {name}",
        first,
        f"**When to take it.** {ADVICE[name]}" if name in ADVICE else summary,
        f"![{name}: which rank computes what, when]({name}.svg)"
        "{ .timeline }\n\n"
        "Predicted, with a backward twice as long as a forward. A row is a rank, a number a "
        "microbatch, grey is idle: the bubble. Times are in F, one rank's forward of one "
        "microbatch.",
    ]
    if wins:
        parts.append(
            "[Which schedule do I take](../guides/which-schedule.md) chooses it for: "
            + "; ".join(wins) + "."
        )  # fmt: skip
    parts += [
        "## Figures",
        f"On {PP} ranks, times in F, activations in microbatches of the fullest rank.",
        _figures_table(name),
        _traits(schedule),
        "## Try it",
        f"    python -m launcher mode=simulate costs=uniform schedule={name} pp={PP} "
        f"num_microbatches={PICTURED}\n"
        f"    python -m launcher schedule={name} pp=2 "
        f"num_microbatches={1 if name == 'pipedream' else 8}",
        "The first draws the picture above and says how far it is from the bound; the second "
        "trains the default model with it on this machine.",
        "## How it is ordered",
        rest,
    ]
    return _made("\n\n".join(parts))


def _custom() -> str:
    first, rest = markdown(inspect.getdoc(custom_module) or "")
    order = "0F0,0F1,0F2,,0B0,,0B1,,0B2,\n,1F0,1B0,,1F1,1B1,,1F2,1B2,\n"
    return _made(
        "\n\n".join(
            [
                "# custom",
                first,
                "**When to take it.** For an order that is tried once, made by another program, or "
                "copied from a paper. One that stays is a Python function with "
                "`@register_schedule`.",
                "## An order of one's own",
                "`my.csv`, two ranks and three microbatches; an empty cell means nothing:",
                f'```csv title="my.csv"\n{order}```',
                "Any run's `schedule.csv` is such a file, so an existing order is a beginning:",
                "    python -m launcher mode=simulate costs=uniform schedule=custom "
                "schedule.file=my.csv pp=2",
                "## What is checked",
                rest,
            ]
        )
    )


def _figures_table(name: str) -> str:
    rows = [
        "| microbatches | step | against `1f1b` | bubble | steady step | holds at most |",
        "|---" * 6 + "|",
    ]
    for count in COUNTS:
        one = figures(name, Situation("", "", num_microbatches=count))
        base = figures("1f1b", Situation("", "", num_microbatches=count))
        free = figures(name, Situation("", "", num_microbatches=count, clips=False))
        assert base is not None
        if one is None or free is None:
            rows.append(f"| {count} | refused: too few for its rule | | | | |")
            continue
        rows.append(
            f"| {count} | {one.step:g} | {difference(one.step / base.step - 1)} "
            f"| {percent(one.bubble)} | {free.step:g} | {one.peak:g} |"
        )
    return "\n".join(rows)


def _traits(schedule: Schedule) -> str:
    figure = figures(schedule.name, Situation("", ""))
    assert figure is not None
    any_v = ", or any other number (`schedule.stages_per_rank`)" if schedule.virtual_stages else ""
    facts = [f"stages per rank: {figure.stages}{any_v}", f"copies of the weights: {figure.copies}"]
    if not schedule.synchronous:
        facts[1] = f"weights: {_weights(schedule, 1)}"
    facts.append("splits backwards by itself" if figure.splits else "splits no backward")
    if schedule.grouped:
        facts.append("takes `schedule.group`")
    if schedule.cost_aware:
        facts.append("the order is made for the run's own costs")
    return "".join(f"- {fact}\n" for fact in facts).rstrip()


def _docstring(schedule: Schedule) -> str:
    """Of the module that the schedule stands in; its order may be another one's, wrapped."""
    for path in sorted((ROOT / "strategies" / "schedules").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Schedule":
                named = [item.value for item in node.args[:1] if isinstance(item, ast.Constant)]
                named += [
                    word.value.value
                    for word in node.keywords
                    if word.arg == "name" and isinstance(word.value, ast.Constant)
                ]
                if schedule.name in named:
                    return inspect.cleandoc(ast.get_docstring(tree) or "")
    raise LookupError(f"no module of strategies/schedules makes {schedule.name}")


def _summary(name: str) -> str:
    text = (ROOT / "conf" / "schedule" / f"{name}.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["name"] == name
    return text.splitlines()[0].removeprefix("# ")


def markdown(docstring: str) -> tuple[str, str]:
    """A docstring's first line, and the rest, as Markdown."""
    first, _, rest = docstring.partition("\n")
    return _inline(first), _inline(re.sub(r"::\n", ":\n", rest.strip("\n")))


def _inline(text: str) -> str:
    text = text.replace("``", "`")
    return re.sub(r"(?<![<(])(https?://[^\s,;]*[^\s,;.)])", r"<\1>", text)


def _made(text: str) -> str:
    title, _, rest = text.partition("\n")
    return f"{title}\n\n<!-- Written by `make docs-page`. -->\n{rest}\n"
