"""The best options of cones by an integer program: for segments where too many values are alive.

One 0-1 variable for each option of a cone, one of which is taken. Where a cone needs a value in a
state, its producer leaves it so: the options that need it are no more than those that serve. Solved
by HiGHS through scipy, which is an extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategies.errors import PlanError
from strategies.planner.ilp import load_scipy
from strategies.planner.shardings.network import Cone, serves

_SECONDS = 60.0

# Two sets of (cone, option) of which equally many are taken.
Equal = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]


def solve_ilp(
    cones: Sequence[Cone],
    given: Mapping[int, str],
    left: Mapping[int, str],
    equal: Sequence[Equal],
) -> tuple[float, list[int]] | None:
    """Seconds, and the option of each cone; None where there is no way.

    Args:
        cones: In their order.
        given: States of values that no cone makes.
        left: States that values have to be left in.
        equal: What has to be taken together.

    Raises:
        PlanError: scipy is not installed, or a minute is not enough.
    """
    optimize, sparse, numpy = load_scipy(
        "this model's shardings need an integer program, which", "tensor_parallel_plan() by hand"
    )
    first, count = [], 0
    for cone in cones:
        first.append(count)
        count += len(cone.options)
    program = _Program(count)
    maker = {value: place for place, cone in enumerate(cones) for value in cone.outputs}
    for place, cone in enumerate(cones):
        program.add({first[place] + o: 1.0 for o in range(len(cone.options))}, 1.0, 1.0)
        for at, value in enumerate(cone.inputs):
            for needed in sorted({option.inputs[at] for option in cone.options}):
                users = {
                    first[place] + o: 1.0
                    for o, option in enumerate(cone.options)
                    if option.inputs[at] == needed
                }
                if value in maker:
                    source = cones[maker[value]]
                    slot = source.outputs.index(value)
                    for o, option in enumerate(source.options):
                        if serves(option.outputs[slot], needed):
                            users[first[maker[value]] + o] = -1.0
                    program.add(users, -numpy.inf, 0.0)
                elif not serves(given[value], needed):
                    program.add(users, 0.0, 0.0)
        for at, value in enumerate(cone.outputs):
            if value in left:
                others = {
                    first[place] + o: 1.0
                    for o, option in enumerate(cone.options)
                    if option.outputs[at] != left[value]
                }
                program.add(others, 0.0, 0.0)
    for one, other in equal:
        row = {first[c] + o: 1.0 for c, o in one}
        for c, o in other:
            row[first[c] + o] = row.get(first[c] + o, 0.0) - 1.0
        program.add(row, 0.0, 0.0)
    costs = numpy.array([option.seconds for cone in cones for option in cone.options])
    scale = float(costs.max()) or 1.0
    result = optimize.milp(
        costs / scale,
        constraints=optimize.LinearConstraint(
            sparse.csr_array((program.data, (program.rows, program.columns)),
                             shape=(len(program.lows), count)),
            program.lows, program.highs,
        ),
        integrality=numpy.ones(count),
        bounds=optimize.Bounds(0.0, 1.0),
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-9},
    )  # fmt: skip
    if result.status == 2:  # infeasible
        return None
    if result.x is None or result.status != 0:
        raise PlanError(
            f"{len(cones)} groups of operators in one program, which took longer than "
            f"{_SECONDS:g} s. Try planner.level=O2, or tensor_parallel_plan() by hand."
        )
    options = [
        max(range(len(cone.options)), key=lambda o, p=place: result.x[first[p] + o])  # type: ignore[misc]
        for place, cone in enumerate(cones)
    ]
    seconds = sum(cone.options[o].seconds for cone, o in zip(cones, options, strict=True))
    return seconds, options


class _Program:
    """Rows of a sparse matrix with their bounds."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.data: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []

    def add(self, row: Mapping[int, float], low: float, high: float) -> None:
        for column, value in row.items():
            self.rows.append(len(self.lows))
            self.columns.append(column)
            self.data.append(value)
        self.lows.append(low)
        self.highs.append(high)
