"""What the core makes of every schedule, byte by byte: timelines and lowered programs.

Each file has two sizes under uniform costs, the larger one where sends wait for their receives,
and the programs of the smaller one with every option that decides a program. An option that changes
nothing, or that the schedule refuses, is one word, so that a change of either shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.report.ascii import draw
from strategies import UniformCosts, simulate
from strategies.compiler import compile_plan
from strategies.errors import PipelineError
from strategies.ir.text import format_rows
from strategies.plan import Plan, Recompute
from strategies.schedules import SCHEDULES

SIZES = ((2, 4), (4, 8))
SMALL = Plan(pp=2, num_microbatches=4, buckets=2, costs=UniformCosts())
LAYERS = (1, 2, 0, 1)  # with experts on other ranks, of the first stages
WAITING = UniformCosts(p2p=0.1, transport="rendezvous")  # messages in an order that a search finds
OPTIMAL = Recompute("optimal", max_full_activations=1.5)  # a search: seconds for some schedules
SEARCHED = ("gpipe", "1f1b", "interleaved_1f1b", "foldx_fifo")
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap=none": {"overlap": "none"},
    "overlap=zero1": {"overlap": "zero1"},
    "split_backward": {"split_backward": True},
    "recompute=full": {"recompute": Recompute("full")},
    "recompute=mario": {"recompute": Recompute("mario")},
    "split_backward recompute=full": {"split_backward": True, "recompute": Recompute("full")},
    "exchanges": {"exchanges": LAYERS},
    "pairs": {"pairs": True},
    "pairs exchanges overlap=zero1": {"pairs": True, "exchanges": LAYERS, "overlap": "zero1"},
    "loss_over=batch": {"loss_over": "batch"},
    "vertical_sync": {"vertical_sync": True},
    "error_feedback=0.5": {"error_feedback": 0.5},
    "accumulation=2": {"accumulation": 2},
    "group=2": {"group": 2},
    "stages_per_rank=3": {"stages_per_rank": 3},
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_timelines_and_lowered_programs(golden, schedule):
    parts = [_timeline(schedule, pp, count) for pp, count in SIZES]
    plan = replace(SMALL, schedule=schedule)
    made = compile_plan(plan)
    plain = _lowered(plan)
    waiting = compile_plan(Plan(schedule, *SIZES[-1], costs=WAITING)).accumulate
    parts.append(f"rendezvous p2p=0.1\n{format_rows(waiting.ranks)}")
    parts += [f"lowered{plain}", f"accumulate\n{format_rows(made.accumulate.ranks)}"]
    parts += [f"forward\n{format_rows(made.forward.ranks)}"]
    stages = made.train.placement.num_stages
    searched = {"recompute=optimal": {"recompute": OPTIMAL}} if schedule in SEARCHED else {}
    skips = {"skips": {"skips": ((0, stages - 1),)}} if stages > 2 else {}
    for name, options in (OPTIONS | searched | skips).items():
        if "exchanges" in options:
            options = options | {"exchanges": options["exchanges"][:stages]}
        text = _lowered(replace(plan, **options))
        parts.append(f"{name}{': as without' if text == plain else text}\n")
    golden(f"compiled/{schedule}", "\n".join(part.rstrip("\n") + "\n" for part in parts))


def _timeline(schedule: str, pp: int, num_microbatches: int) -> str:
    """The picture of a size, and its program."""
    plan = Plan(schedule=schedule, pp=pp, num_microbatches=num_microbatches)
    program = compile_plan(plan).train
    lines = [line.rstrip() for line in draw(simulate(program, UniformCosts())).splitlines()]
    title = f"pp={pp} num_microbatches={num_microbatches}"
    return "\n".join([title, *lines, "", format_rows(program.ranks)])


def _lowered(plan: Plan) -> str:
    try:
        return "\n" + format_rows(compile_plan(plan).train.ranks)
    except PipelineError as error:
        return f": {type(error).__name__}"
