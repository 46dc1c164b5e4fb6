"""Programs of all schedules with one instruction deleted, doubled, swapped or moved: the verdicts.

The golden file was recorded with the verifier before values had keys, rule by rule.
"""

import random

import pytest

from strategies.compiler import Programs, compile_plan
from strategies.errors import ProgramError
from strategies.ir import Program, verify
from strategies.plan import Plan
from strategies.schedules import SCHEDULES
from tests.strategies.programs import legal_microbatches

OPTIONS = {
    "plain": {},
    "zero1": {"overlap": "zero1", "buckets": 2},
    "late reduction": {"overlap": "none"},
}


def mutants(program: Program, draw: random.Random, count: int):
    """Mutations of one list or two, and what they make."""
    for _ in range(count):
        rows = [list(row) for row in program.ranks]
        here, there = (draw.choice([r for r in rows if r]) for _ in range(2))
        place, other = draw.randrange(len(here)), draw.randrange(len(there))
        what = draw.choice(["delete", "double", "move", "swap", "neighbours", "leave"])
        if what == "delete":
            del here[place]
        elif what == "double":
            here.insert(place, here[place])
        elif what == "move":
            there.insert(other, here.pop(place))
        elif what == "swap":
            here[place], there[other] = there[other], here[place]
        elif what == "neighbours":
            here[place - 1], here[place] = here[place], here[place - 1]
        yield what, program.with_ranks(tuple(map(tuple, rows)))


def verdict(program: Program) -> str:
    try:
        verify(program)
    except ProgramError:
        return "x"
    return "."


def parts(programs: Programs, option: str):
    yield "train", programs.train
    if option == "plain":
        yield "forward", programs.forward
        yield "accumulate", programs.accumulate
        bare = programs.accumulate.compute_rows()
        yield "compute", Program(
            programs.train.schedule, programs.train.placement, programs.forward.num_microbatches,
            bare, programs.train.boundaries,
        )  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_mutated_programs_are_judged_as_before(option, golden):
    lines = []
    for name in SCHEDULES:
        if name == "custom":
            continue
        plan = Plan(name, 2, legal_microbatches(name, 2, 3), **OPTIONS[option])
        for part, program in parts(compile_plan(plan), option):
            draw = random.Random(f"{name} {part}")
            verdicts = [verdict(mutant) for _, mutant in mutants(program, draw, 60)]
            lines.append(f"{name} {part} {''.join(verdicts)}\n")
    golden(f"verdicts/{option.replace(' ', '_')}", "".join(lines))
