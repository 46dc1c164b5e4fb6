"""Backwards that become one with the forward behind them, and what that takes."""

from dataclasses import replace

import pytest

from strategies.analysis.metrics import measure
from strategies.compiler import compile_plan
from strategies.costs.token_exchange import Exchange
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.ir.kinds import COMPUTE_KINDS, Kind
from strategies.plan import Plan
from strategies.simulator.engine import simulate

FORWARD, BACKWARD, EXCHANGE = 1.0, 2.0, 0.45  # exchanges are 30 % of the compute


class Exchanging:
    """Uniform costs with an exchange in every forward and every backward."""

    def __init__(self, exchange=EXCHANGE):
        self.exchange = exchange

    def __eq__(self, other):
        return self.exchange == other.exchange

    def __hash__(self):
        return hash(self.exchange)

    def table(self, program):
        table = UniformCosts(forward=FORWARD, backward=BACKWARD).table(program)
        share = table.forward[0]
        more = self.exchange * share
        return replace(
            table,
            forward=tuple(n + more for n in table.forward),
            backward=tuple(n + more for n in table.backward),
            backward_input=tuple(n + more for n in table.backward_input),
            exchange=(Exchange(more),) * len(table.forward),
        )


def step(schedule, *, pairs, exchange=EXCHANGE, pp=4, count=16):
    costs = Exchanging(exchange)
    plan = Plan(schedule, pp=pp, num_microbatches=count, pairs=pairs, costs=costs)
    program = compile_plan(plan).train
    return simulate(program, costs).makespan


def test_a_backward_and_the_forward_behind_it_become_one():
    rows = compile_plan(Plan("eager_1f1b", pp=2, num_microbatches=3, pairs=True, buckets=0))
    computed = [i for i in rows.train.ranks[1] if i.kind in COMPUTE_KINDS - {Kind.STEP}]
    expected = "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2"
    assert " ".join(map(str, computed)) == expected


def test_weight_gradients_between_the_two_come_behind_the_pair():
    program = compile_plan(Plan("zb_v", pp=2, num_microbatches=4, pairs=True)).train
    assert all(any(item.halves for item in row) for row in program.ranks)


# Over the step without any exchange; as docs/how/expert-parallelism.md has them.
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("eager_1f1b", (1.30, 1.06)),
        ("interleaved_1f1b", (1.30, 1.07)),
        ("foldx_fifo", (1.30, 1.07)),
        ("zb_h2", (1.31, 1.10)),
        ("zb_v", (1.30, 1.13)),
        ("chimera", (1.29, 1.14)),
        ("dualpipe", (1.31, 1.13)),
        ("1f1b", (1.30, 1.80)),
    ],
)
def test_an_exchange_hides_under_the_other_half_of_a_pair(schedule, expected):
    none = step(schedule, pairs=False, exchange=0.0)
    found = tuple(step(schedule, pairs=pairs) / none for pairs in (False, True))
    assert found == pytest.approx(expected, abs=0.006)


def test_the_bounds_know_that_an_exchange_may_be_hidden():
    costs = Exchanging()
    plan = Plan("eager_1f1b", pp=2, num_microbatches=32, pairs=True, costs=costs)
    program = compile_plan(plan).train
    timeline = simulate(program, costs)
    metrics = measure(timeline, costs)
    assert metrics.lower_bound <= timeline.makespan * (1 + 1e-9)


def test_an_order_that_cannot_be_paired_is_refused():
    with pytest.raises(PlanError, match=r"in naive with pp=2 .* Try schedule=eager_1f1b"):
        compile_plan(Plan("naive", pp=2, num_microbatches=4, pairs=True))
    with pytest.raises(PlanError, match="loss_over=batch all forwards come first"):
        compile_plan(Plan("eager_1f1b", pairs=True, loss_over="batch"))
