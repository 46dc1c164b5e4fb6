"""The fastest order under a cap on full activations, by a constraint solver: an oracle for tests.

Free are the order on every rank, which (stage, microbatch) pairs are recomputed, and where each R
stands. Fixed are placement, durations (whole numbers) and that microbatches keep their order on a
stage, which loses nothing where they are alike. An activation is held from the start of its F or R
to the end of its B or W.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from strategies.ir.program import Placement

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


class Exact(NamedTuple):
    makespan: int
    bound: int
    recomputed: int
    rows: list[list[tuple[int, str]]]

    @property
    def proven(self) -> bool:
        return self.makespan == self.bound


def solve(
    placement: Placement,
    num_microbatches: int,
    *,
    room: int,
    forward: int = 1,
    backward: int = 2,
    split: bool = False,
    seconds: float = 20.0,
    hint: int | None = None,
) -> Exact:
    """Args are per stage; ``room`` counts (stage, microbatch) pairs."""
    model = cp_model.CpModel()
    stages, count = placement.num_stages, num_microbatches
    ranks = placement.num_ranks
    horizon = hint or 2 * (count + stages) * (2 * forward + backward)
    inputs = backward // 2 if split else backward
    machine = [[] for _ in range(ranks)]
    memory = [[] for _ in range(ranks)]
    start, names = {}, [[] for _ in range(ranks)]
    end = model.new_int_var(0, horizon, "end")
    again = {}
    for m in range(count):
        for s in range(stages):
            rank = placement.rank_of(s, m)

            def fixed(kind, length, s=s, m=m, rank=rank):
                at = model.new_int_var(0, horizon, f"{s}{kind}{m}")
                machine[rank].append(model.new_fixed_size_interval_var(at, length, ""))
                model.add(at + length <= end)
                start[kind, s, m] = at
                names[rank].append((at, f"{s}{kind}{m}", None))
                return at

            f = fixed("F", forward)
            b = fixed("B", inputs)
            w = fixed("W", backward - inputs) if split else b
            last = w + (backward - inputs if split else inputs)
            model.add(b >= f + forward)
            if split:
                model.add(w >= b + inputs)
            redo = again[s, m] = model.new_bool_var(f"again{s}.{m}")
            r = model.new_int_var(0, horizon, f"{s}R{m}")
            machine[rank].append(model.new_optional_fixed_size_interval_var(r, forward, redo, ""))
            names[rank].append((r, f"{s}R{m}", redo))
            model.add(r >= f + forward).only_enforce_if(redo)
            model.add(b >= r + forward).only_enforce_if(redo)
            begin = model.new_int_var(0, horizon, "")
            model.add(begin == r).only_enforce_if(redo)
            model.add(begin == f).only_enforce_if(~redo)
            held = model.new_int_var(1, horizon, "")
            memory[rank].append(model.new_interval_var(begin, held, last, ""))
    for m in range(count):
        for s in range(1, stages):
            model.add(start["F", s, m] >= start["F", s - 1, m] + forward)
            model.add(start["B", s - 1, m] >= start["B", s, m] + inputs)
    copies = placement.weight_copies
    for m in range(copies, count):
        for s in range(stages):
            for kind in ("F", "B", "W") if split else ("F", "B"):
                model.add(start[kind, s, m] > start[kind, s, m - copies])
    for rank in range(ranks):
        model.add_no_overlap(machine[rank])
        model.add_cumulative(memory[rank], [1] * len(memory[rank]), room)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    rows = [
        sorted((solver.value(at), name) for at, name, on in row if on is None or solver.value(on))
        for row in names
    ]
    return Exact(
        int(solver.objective_value),
        round(solver.best_objective_bound),
        sum(solver.value(flag) for flag in again.values()),
        rows,
    )
