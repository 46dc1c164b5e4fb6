from __future__ import annotations

import random
from dataclasses import replace

import pytest

from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.errors import DeadlockError, PlanError
from strategies.ir.kinds import MESSAGE_KINDS, Kind
from strategies.ir.program import Program
from strategies.plan import Plan
from strategies.referee import SEMANTICS, Semantics, judge, repair, time_messages
from strategies.referee.foreign.their_words import as_csv
from strategies.referee.foreign.torch_order import one_f_one_b
from strategies.schedules import SCHEDULES
from strategies.simulator.engine import simulate
from tests.strategies.referee.orders import CROSSED, FACING, RING, order, torch_orders


def _runs(program: Program, *, grouped: bool = False) -> set[str]:
    return {each for each in SEMANTICS if judge(program, each, grouped=grouped).runs}


def test_two_ranks_that_send_first_stand_still_where_sends_wait():
    program = order(FACING)
    assert _runs(program) == {"buffered", "per_edge"}
    assert _runs(program, grouped=True) == set(SEMANTICS)
    verdict = judge(program, "one_queue")
    assert verdict.cycle == (
        "0SEND_F1>1 on rank 0 waits for 1RECV_F1<0, which queues behind 1SEND_B0>0",
        "1SEND_B0>0 on rank 1 waits for 0RECV_B0<1, which queues behind 0SEND_F1>1",
    )
    assert [line.split("|")[0] for line in verdict.grid.splitlines()] == ["rank 0 ", "rank 1 "]
    assert "[0B0]" in verdict.grid and "[1F1]" in verdict.grid


def test_messages_taken_for_each_other_are_found_in_every_queue():
    program = order(CROSSED)
    for semantics in ("one_queue", "per_pair", "per_edge"):
        crossing = judge(program, semantics).crossing
        assert crossing is not None
        assert (crossing.source, crossing.target, crossing.number) == (0, 1, 0)
        assert str(crossing) == (
            "message 1 from rank 0 to rank 1 is sent as 0SEND_F0>1 and received as 1RECV_F1<0"
        )
    assert judge(program, "buffered").runs
    assert not judge(program, "rendezvous").runs


def test_a_deadlock_over_three_ranks_is_a_ring_of_their_messages():
    # Rank 1 wants the gradient of what it has not sent on yet.
    assert _runs(order(RING)) == {"buffered", "per_edge"}
    cut = RING.replace("1SEND_F0,1RECV_B0", "1RECV_B0,1SEND_F0")
    assert "rank 2" in " ".join(judge(order(cut), "rendezvous").cycle)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "custom"])
def test_no_order_of_ours_is_called_wrong(name: str, grouped: bool):
    for pp, count in ((2, 4), (4, 8)):
        try:
            program = compile_plan(Plan(name, pp, count)).train
        except PlanError:
            continue
        assert _runs(program, grouped=grouped) == set(SEMANTICS)


def _torch(degrees: tuple[int, ...], counts: tuple[int, ...]) -> int:
    seen = 0
    for name, pp, count, text in torch_orders(degrees, counts):
        program = order(text)
        assert program.lowered
        for grouped in (False, True):
            assert _runs(program, grouped=grouped) == set(SEMANTICS), (name, pp, count)
        seen += 1
    return seen


@pytest.mark.filterwarnings("ignore")
def test_no_order_of_torch_is_called_wrong():
    assert _torch((2, 4), (8,)) >= 11


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_no_order_of_torch_is_called_wrong_however_long(pp: int):
    assert _torch((pp,), tuple(range(1, 33))) >= 100


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_torchs_exchanges_of_1f1b_are_not_called_wrong(pp: int):
    for count in range(1, 33):
        program = order(as_csv(one_f_one_b(pp, count)))
        for semantics in ("one_queue", "per_pair", "per_edge"):
            assert judge(program, semantics, grouped=True).runs, count
        # As one kernel it hangs with fewer microbatches than stages, as is reported of it.
        assert judge(program, "one_queue", grouped="whole").runs == (count >= pp), count


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "custom"])
def test_no_order_of_ours_is_called_wrong_however_long(name: str, pp: int):
    seen = 0
    for count in range(1, 33):
        for chunks in (None, 2):
            try:
                program = compile_plan(Plan(name, pp, count, chunks)).train
            except PlanError:
                continue
            for grouped in (False, True):
                assert _runs(program, grouped=grouped) == set(SEMANTICS), (count, chunks)
            seen += 1
    assert seen


def test_a_whole_group_waits_for_all_of_its_members():
    # Rank 0 sends and receives in one call; rank 1 receives first and sends after its computations.
    program = order("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert judge(program, "one_queue", grouped=True).runs
    verdict = judge(program, "one_queue", grouped="whole")
    assert verdict.cycle == (
        "1RECV_F0<0 on rank 1 goes with 0SEND_F0>1, 0RECV_B0<1 and 1SEND_B0>0, which queues behind "
        "1RECV_F0<0",
    )
    found = repair(program, "one_queue", grouped="whole")
    assert found is not None
    assert (found.ungrouped, found.placed) == (True, False)


def test_where_messages_stand_is_priced():
    costs = UniformCosts(forward=1.0, backward=2.0, p2p=0.5)
    # Two ranks, one microbatch: F, message, F, B, message, B.
    one = order("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    for semantics in SEMANTICS:
        assert time_messages(one, costs, semantics) == pytest.approx(7.0)
    # The gradient of microbatch 0 stands in rank 0's queue before its second activation.
    late = order(
        "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    apart, queued = time_messages(late, costs, "per_edge"), time_messages(late, costs, "one_queue")
    assert (apart, queued) == (pytest.approx(10.0), pytest.approx(11.0))
    assert time_messages(order(FACING), costs, "one_queue") is None


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_messages_of_our_lowering_cost_nothing_where_edges_are_apart(name: str):
    costs = UniformCosts(forward=1.0, backward=2.0, p2p=0.1)
    program = compile_plan(Plan(name, 3, 6, costs=costs)).train
    took = time_messages(program, costs, "per_edge")
    assert took == pytest.approx(simulate(program, costs).makespan, rel=0.02)


# ------------------------------------------------------------------------- against the definitions


def _shuffled(program: Program, seed: int) -> Program:
    """Messages at random legal places: each SEND after its value is made, each RECV before use."""
    draw = random.Random(seed)
    rows = []
    for row in program.ranks:
        items = [item for item in row if item.kind not in MESSAGE_KINDS]
        messages = [item for item in row if item.kind in MESSAGE_KINDS]
        draw.shuffle(messages)
        for message in messages:
            makers = (Kind.F,) if message.payload is Kind.F else (Kind.B, Kind.I)
            users = (Kind.F,) if message.payload is Kind.F else (Kind.B, Kind.I)
            kinds = makers if message.kind is Kind.SEND else users
            place = next(
                number
                for number, item in enumerate(items)
                if any(
                    (part.stage, part.microbatch) == (message.stage, message.microbatch)
                    and part.kind in kinds
                    for part in item.parts
                )
            )
            low, high = (place + 1, len(items)) if message.kind is Kind.SEND else (0, place)
            near = (min(high, low + 3), max(low, high - 3))
            low, high = (low, near[0]) if message.kind is Kind.SEND else (near[1], high)
            items.insert(draw.randint(low, high), message)
        rows.append(tuple(items))
    return replace(program, ranks=tuple(rows))


def _by_definition(program: Program, semantics: Semantics) -> bool:
    """Whether all end, found by looking at everything again and again."""
    graph = program.dependencies
    count = len(graph.nodes)

    def queue(node: int) -> object:
        peer = graph.rank[graph.partner[node]]
        sends = graph.nodes[node].kind is Kind.SEND
        return {
            "one_queue": (graph.rank[node],),
            "per_pair": (graph.rank[node], peer),
            "per_edge": (graph.rank[node], peer, sends),
        }.get(semantics)

    is_message = [partner >= 0 for partner in graph.partner]
    if semantics in ("one_queue", "per_pair", "per_edge"):
        for source in range(len(program.ranks)):
            for target in range(len(program.ranks)):
                sent, taken = (
                    [
                        node
                        for node in range(count)
                        if is_message[node]
                        and graph.nodes[node].kind is kind
                        and graph.rank[node] == here
                        and graph.rank[graph.partner[node]] == there
                    ]
                    for kind, here, there in (
                        (Kind.SEND, source, target),
                        (Kind.RECV, target, source),
                    )
                )
                if [graph.partner[node] for node in sent] != taken:
                    return False
    done: set[int] = set()

    def before(node: int) -> list[int]:
        """What stands before it on its rank and holds it up."""
        earlier = range(graph.offsets[graph.rank[node]], node)
        if semantics in ("rendezvous", "buffered"):
            return [*earlier]
        if not is_message[node]:
            return [other for other in earlier if not is_message[other]]
        return [other for other in earlier if is_message[other] and queue(other) == queue(node)]

    def free(node: int) -> bool:
        needs = [need for need in graph.needs[node] if need != graph.partner[node]]
        return all(other in done for other in [*before(node), *needs])

    going = True
    while going:
        going = False
        for node in range(count):
            if node in done:
                continue
            partner = graph.partner[node]
            ends = {node}
            if is_message[node] and semantics == "buffered":
                able = free(node) and (graph.nodes[node].kind is Kind.SEND or partner in done)
            elif is_message[node]:
                ends = {node, partner}
                able = free(node) and free(partner)
            else:
                able = free(node)
            if able:
                done |= ends
                going = True
    return len(done) == count


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("name", "pp", "count"), [("1f1b", 3, 4), ("zb_v", 2, 4), ("interleaved_1f1b", 2, 4)]
)
def test_it_is_what_the_definition_says(name: str, pp: int, count: int, semantics: Semantics):
    program = compile_plan(Plan(name, pp, count)).train
    found = set()
    for seed in range(24):
        shuffled = _shuffled(program, seed)
        verdict = judge(shuffled, semantics)
        assert verdict.runs == _by_definition(shuffled, semantics), seed
        found.add(verdict.runs)
    assert False in found or semantics == "buffered"


def test_rendezvous_is_what_the_verifier_proves():
    program = compile_plan(Plan("1f1b", 3, 4)).train
    seen = set()
    for seed in range(40):
        shuffled = _shuffled(program, seed)
        try:
            proven = len(shuffled.graph.order) > 0
        except DeadlockError:
            proven = False
        assert judge(shuffled, "rendezvous").runs == proven
        seen.add(proven)
    assert False in seen
