"""Exchanges of tokens inside of computations: which there are, and when they travel."""

from dataclasses import dataclass, replace

import pytest

from strategies.analysis.bounds import lower_bound
from strategies.analysis.timeline import inside
from strategies.compiler import compile_plan
from strategies.costs.table import CostTable
from strategies.costs.token_exchange import Exchange
from strategies.costs.uniform import UniformCosts
from strategies.errors import ProgramError
from strategies.ir.instruction import exchanges
from strategies.ir.kinds import EXCHANGE_KINDS, Kind
from strategies.ir.text import parse_instruction
from strategies.ir.verify import verify
from strategies.plan import NO_RECOMPUTE, Plan, Recompute
from strategies.simulator.engine import simulate, unroll


@dataclass(frozen=True)
class Exchanging:
    """Forwards of 1.0 and backwards of 2.0, and exchanges of 0.4 in each; two layers per stage."""

    away: float = 0.4

    def table(self, program) -> CostTable:
        table = UniformCosts(forward=1.0, backward=2.0).table(program)
        count = len(table.forward)
        return replace(
            table,
            forward=(1.0 + self.away,) * count,
            backward=(2.0 + self.away,) * count,
            backward_input=(1.0 + self.away,) * count,
            exchange=(Exchange(self.away, layers=2),) * count,
        )


def compiled(schedule="1f1b", *, pairs=False, recompute=NO_RECOMPUTE, num_microbatches=4):
    plan = Plan(
        schedule, pp=2, num_microbatches=num_microbatches, pairs=pairs, buckets=0,
        exchanges=(2, 1), recompute=recompute, costs=Exchanging(),
    )  # fmt: skip
    return compile_plan(plan)


def inside_of(program, rank, text):
    item = next(item for item in program.ranks[rank] if str(item) == text)
    return " ".join(map(str, exchanges(item, program.exchanges)))


def test_each_layer_with_experts_sends_and_gets_back_inside_forward_and_backward():
    program = compiled().train
    forth = "0DISPATCH_F0.0 0COMBINE_F0.0 0DISPATCH_F0.1 0COMBINE_F0.1"
    back = "0DISPATCH_B0.1 0COMBINE_B0.1 0DISPATCH_B0.0 0COMBINE_B0.0"
    assert inside_of(program, 0, "0F0") == forth
    assert inside_of(program, 0, "0B0") == back


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe", "foldx_fifo", "interleaved_1f1b"])
def test_every_program_of_any_schedule_has_them(schedule):
    stages = 2 if schedule == "dualpipe" else 4
    plan = Plan(schedule, pp=2, num_microbatches=4, exchanges=(1,) * stages)
    for program in compile_plan(plan).all:
        items = [item for row in program.ranks for item in row]
        computed = sum(
            part.kind in (Kind.F, Kind.B, Kind.I) for item in items for part in item.parts
        )
        assert sum(len(inside(program, rank)) for rank in range(2)) == 2 * computed


def test_a_forward_that_is_run_again_exchanges_again():
    program = compiled(recompute=Recompute("full")).train
    assert inside_of(program, 1, "1R0") == "1DISPATCH_R0.0 1COMBINE_R0.0"


def test_they_are_no_instructions_of_a_program():
    program = compiled().train
    first, *others = program.ranks
    wrong = (*inside(program, 0)[:1], *first)
    with pytest.raises(ProgramError, match="on rank 0 is malformed"):
        verify(program.with_ranks((wrong, *others)))
    with pytest.raises(ProgramError, match="is not an instruction"):
        parse_instruction("0DISPATCH_F0.0")


def test_without_experts_elsewhere_a_program_has_none():
    program = compile_plan(Plan("1f1b", pp=2, num_microbatches=2)).train
    assert inside(program, 0) == ()


@pytest.mark.parametrize("cores", [None, 1.0])
def test_tokens_travel_between_attention_and_experts(cores):
    program = compiled(num_microbatches=2).train
    timeline = simulate(program, Exchanging(), cores=cores)
    seen = (*timeline.events(0), *timeline.exchanges(0))
    events = {str(event.instruction): event for event in seen}
    host = events["0F0"]
    # 0.25 attention, 0.1 away, 0.25 experts, 0.1 back; twice. Slower where a core is shared.
    longer = (host.end - host.start) / 1.4
    for text, begins in (("0DISPATCH_F0.0", 0.25), ("0COMBINE_F0.0", 0.6), ("0COMBINE_F0.1", 1.3)):
        assert events[text].start == pytest.approx(host.start + begins * longer)
        assert events[text].end == pytest.approx(host.start + (begins + 0.1) * longer)


def test_in_a_pair_tokens_travel_under_the_compute_of_the_other_half():
    costs = Exchanging()
    in_turn = compiled("eager_1f1b", num_microbatches=16)
    pairs = compiled("eager_1f1b", pairs=True, num_microbatches=16)
    took = [simulate(each.train, costs).makespan for each in (in_turn, pairs)]
    assert took[0] == pytest.approx(17 * 3.8)
    assert took[1] < 17 * 3.0 * 1.06
    timeline = unroll(pairs.train, costs, steps=1)[0]
    for rank in range(2):
        spans = list(timeline.exchanges(rank))
        assert spans
        assert all(event.instruction.kind in EXCHANGE_KINDS for event in spans)
        assert all(event.end - event.start == pytest.approx(0.1) for event in spans)
        begun, ended = (sorted(times) for times in zip(*(e[2:] for e in spans), strict=True))
        assert all(b >= e - 1e-9 for b, e in zip(begun[1:], ended[:-1], strict=True))
    assert lower_bound(pairs.train, costs.table(pairs.train)).value <= took[1] * (1 + 1e-9)
