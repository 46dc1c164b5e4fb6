"""docs/guides/which-schedule.md: which schedule to take, decided by simulating all of them.

A situation is a machine and a wish in the simulator's terms. Of the schedules that it admits the
shortest step wins; of equal ones the one that holds least, then the plainest. Nothing on the page
is an opinion but the list of situations. `make docs-page` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.errors import PlanError
from strategies.ir.kinds import Kind
from strategies.schedules import SCHEDULES
from tools.docs.pages import difference

PP = 4
PLAIN = UniformCosts()
# Of equal ones the first: fewest new ideas.
PLAINEST = (
    "1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "foldx", "zb_v", "v_half", "v_min", "zb_h2",
    "interleaved_zb", "eager_1f1b", "foldx_fifo", "looped_bfs", "foldx_aiao", "hanayo",
    "dualpipe_v", "chimera", "dualpipe", "naive",
)  # fmt: skip


class Figures(NamedTuple):
    """One schedule in one situation, in units of a rank's forward of one microbatch.

    Attributes:
        step: Makespan, or the period where ranks do not wait for each other.
        peak: Activations that the fullest rank holds, in microbatches.
    """

    step: float
    bubble: float
    peak: float
    copies: int
    stages: int
    splits: bool


@dataclass(frozen=True, slots=True)
class Situation:
    """A row of the table.

    Attributes:
        words: What the reader has, or wants.
        why: What decides then.
        memory: Microbatches' activations that a rank has room for.
        max_stages: Stages per rank that the model can be cut into.
        copies: How often its weights fit.
        splits: Whether backwards may be split.
        clips: Whether gradients are clipped, which makes ranks wait for each other.
    """

    words: str
    why: str
    num_microbatches: int = 16
    costs: UniformCosts = PLAIN
    memory: float = 1e9
    max_stages: int = 8
    copies: int = 1
    splits: bool = True
    clips: bool = True

    def admits(self, found: Figures) -> bool:
        return (
            found.peak <= self.memory
            and found.stages <= self.max_stages
            and found.copies <= self.copies
            and (self.splits or not found.splits)
        )

    @property
    def command(self) -> str:
        """What prints this situation's figures."""
        words = [f"pp={PP}", f"num_microbatches={self.num_microbatches}"]
        for name in ("backward", "grad_reduce", "p2p"):
            if getattr(self.costs, name) != getattr(PLAIN, name):
                words.append(f"costs.{name}={getattr(self.costs, name):g}")
        return "python -m launcher -m mode=simulate costs=uniform " + " ".join(words)


SITUATIONS = (
    Situation(
        "a first run, or few layers: one stage per rank",
        "it is the order that everybody knows, and reads most easily in a timeline",
        max_stages=1, splits=False,
    ),
    Situation(
        "few layers, and backwards may be split",
        "weight gradients wait until a rank would be idle",
        max_stages=1, memory=4,
    ),
    Situation(
        "as much memory as 1F1B needs, and two layers per rank or more",
        "the shortest step in 1F1B's memory",
        memory=4,
    ),
    Situation(
        "few microbatches: as many as ranks",
        "fill and drain are most of the step here; more microbatches help more than any order",
        num_microbatches=4, memory=4,
    ),
    Situation(
        "three quarters of the memory that 1F1B needs",
        "rather a longer step than one that does not fit",
        memory=3,
    ),
    Situation(
        "half of the memory that 1F1B needs",
        "beyond it there is recomputation (`recompute=mario`), with any schedule",
        memory=2,
    ),
    Situation(
        "`compile=true`: backwards are not split",
        "virtual stages shorten fill and drain; nothing is split",
        splits=False, memory=5.5,
    ),
    Situation(
        "gradients travel slowly (data parallel over a slow network: an all-reduce of 8 forwards)",
        "gradients are reduced stage by stage while others still compute",
        costs=UniformCosts(grad_reduce=8.0), splits=False,
    ),
    Situation(
        "the same, of 32 forwards",
        "the reduction is the longest part of the step; the earlier it starts the better",
        costs=UniformCosts(grad_reduce=32.0), splits=False,
    ),
    Situation(
        "messages between stages are slow (half a forward each)",
        "every crossing costs; fewer stages, and a longer warm-up, hide it",
        costs=UniformCosts(p2p=0.5), memory=8,
    ),
    Situation(
        "`trainer.on_nan=ignore` and no clipping: ranks need not wait for each other at the update",
        "a rank starts the next step while others still drain: no bubble is left",
        clips=False, memory=4,
    ),
    Situation(
        "the weights fit twice, and one microbatch more than 1F1B holds",
        "two opposed pipes fill each other's bubbles",
        copies=2, memory=8,
    ),
)  # fmt: skip


@cache
def figures(name: str, situation: Situation) -> Figures | None:
    """None where the schedule cannot serve so few microbatches."""
    costs = situation.costs
    try:
        program = compile_program(
            schedule=name, pp=PP, num_microbatches=situation.num_microbatches, costs=costs,
            group="auto" if SCHEDULES[name].chooses_group else None,
        )  # fmt: skip
    except PlanError:  # its rule of P and M
        return None
    timeline = simulate(program, costs)
    placement = program.placement
    flushed = program.updates is None  # Without a flush nobody waits for a verdict at its end.
    return Figures(
        timeline.makespan if situation.clips and flushed else timeline.period,
        timeline.bubble_ratio,
        max(peak_activations(program)),
        placement.weight_copies,
        len(placement.stages_of(0)),
        any(item.kind is Kind.W for row in program.ranks for item in row),
    )


def choice(situation: Situation) -> str:
    """The schedule to take."""
    found = {name: figures(name, situation) for name in PLAINEST}
    admitted = [name for name, figure in found.items() if figure and situation.admits(figure)]

    def rank(name: str) -> tuple[float, float, int]:
        figure = found[name]
        assert figure is not None
        return round(figure.step, 6), round(figure.peak, 6), PLAINEST.index(name)

    return min(admitted, key=rank)


def decision_table() -> str:
    """A row per situation: what to take, and what it gives."""
    rows = [
        "| you have, or want | take | its step | against `1f1b` | holds (`1f1b`: 4) | because |",
        "|---" * 6 + "|",
    ]
    for situation in SITUATIONS:
        name = choice(situation)
        found, base = figures(name, situation), figures("1f1b", situation)
        assert found is not None and base is not None
        rows.append(
            f"| {situation.words} | [`{name}`](../schedules/{name}.md) | {found.step:g} "
            f"| {difference(found.step / base.step - 1)} | {found.peak:g} | {situation.why} |"
        )
    return "\n".join(rows)


def matrix() -> str:
    """Every schedule in the situations that differ in what is simulated."""
    shown = {
        "16 microbatches": Situation("", ""),
        "4 microbatches": Situation("", "", num_microbatches=4),
        "messages of 0.5": Situation("", "", costs=UniformCosts(p2p=0.5)),
        "reduction of 8": Situation("", "", costs=UniformCosts(grad_reduce=8.0)),
        "reduction of 32": Situation("", "", costs=UniformCosts(grad_reduce=32.0)),
    }
    rows = [f"| schedule | {' | '.join(shown)} | holds |", "|---" * (len(shown) + 2) + "|"]
    for name in PLAINEST:
        cells = []
        for situation in shown.values():
            found = figures(name, situation)
            cells.append("-" if found is None else f"{found.step:g}")
        plain = figures(name, Situation("", ""))
        assert plain is not None
        rows.append(
            f"| [`{name}`](../schedules/{name}.md) | {' | '.join(cells)} | {plain.peak:g} |"
        )
    return "\n".join(rows)
