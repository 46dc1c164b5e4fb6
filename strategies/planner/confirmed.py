"""Plans whose verified program fits into memory, messages and temporaries included.

The search counts state and activations: what other buffers take is known once a program has its
messages. So the plans that it lists are compiled, and one that does not fit after all makes room
for the next.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.compiler import compile_plan
from strategies.memory_model import peak_memory_bytes
from strategies.planner.evaluate import Outcome
from strategies.planner.layout import Candidate
from strategies.planner.problem import Problem
from strategies.planner.search import Answer, search
from strategies.planner.space import Space


def search_confirmed(problem: Problem, space: Space, *, top_k: int = 5) -> Answer:
    """The fastest plans that fit; ``rank_bytes`` of each is its run's own figure.

    Args:
        problem: Model and machine.
        space: What may be chosen.
        top_k: How many plans are wanted.
    """
    limit = problem.machine.memory_bytes
    known: dict[Candidate, tuple[int, ...]] = {}
    # Some more at once: the fastest plans are those that fill the memory.
    wanted, seconds = top_k + (top_k + 1) // 2, 0.0
    while True:
        answer = search(problem, space, top_k=wanted)
        seconds += answer.search_s
        fitting: list[Outcome] = []
        refused: list[Candidate] = []
        for plan in answer.plans:
            if len(fitting) == top_k:
                break
            candidate = plan.candidate
            if candidate not in known:
                known[candidate] = _rank_bytes(plan)
            if max(known[candidate]) <= limit:
                fitting.append(replace(plan, rank_bytes=known[candidate]))
            else:
                refused.append(candidate)
        if len(fitting) == top_k or len(answer.plans) < wanted:
            break
        wanted *= 2
    rejected = answer.rejected
    rejected.slower += len(answer.plans) - len(fitting) - len(refused)
    for candidate in refused:
        rejected.too_large(max(known[candidate]), candidate)
    return replace(answer, plans=tuple(fitting), search_s=seconds)


def _rank_bytes(outcome: Outcome) -> tuple[int, ...]:
    program = compile_plan(outcome.plan).train
    assert outcome.plan.costs is not None
    held = peak_memory_bytes(program, outcome.plan.costs.table(program))
    return tuple(value for value in held if value is not None)
