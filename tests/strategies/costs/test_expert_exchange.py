"""What spreading experts takes and saves: the exchange by links, memory, gradients."""

from dataclasses import replace

import pytest

from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware, all_to_all, exchangers, expert_holders
from strategies.costs.load import Load
from strategies.ir.program import Program, chain, loop

GPU = Hardware(
    name="gpu", peak_flops=1e12, efficiency=1.0, memory_gb=80, memory_bandwidth=1e12,
    intra_bandwidth=100.0, intra_latency_s=1.0, inter_bandwidth=10.0, inter_latency_s=3.0,
    gpus_per_node=4, num_sms=100,
)  # fmt: skip
CPU = replace(GPU, num_sms=None)
LOAD = Load(1e12, 100, 0, 0, experts=80, expert_flops=6e11, exchanged=(40,))
ONE = Program("draft", loop(1, 1), 1, ((),), chain(1))


def test_gpus_send_to_all_others_at_one_time_each_over_its_own_links():
    assert all_to_all(GPU, exchangers(GPU, 4), 400.0) == pytest.approx(3 * 100 / 100 + 1)
    # Eight on two nodes: four of seven parts go over the network, which takes longest.
    assert all_to_all(GPU, exchangers(GPU, 8), 400.0) == pytest.approx(4 * 50 / 10 + 3)
    assert all_to_all(CPU, exchangers(CPU, 2), 400.0) == pytest.approx(200 / 100 + 1)
    assert all_to_all(GPU, exchangers(GPU, 1), 400.0) == 0


def test_the_block_that_lies_on_most_nodes_decides():
    assert exchangers(GPU, 3).num_nodes == 2  # ranks 3, 4, 5
    assert exchangers(GPU, 2).num_nodes == 1
    assert expert_holders(GPU, (0, 1), 2, 2, 2).num_ranks == 4


def table(**changes):
    costs = AnalyticCosts((LOAD,), GPU, element_bytes=1, dp=4, **changes)
    return costs.table_for(ONE, (1,), frozenset(), breakdown=True)


def test_an_exchange_goes_two_ways_in_a_forward_and_in_a_backward():
    alone, spread = table(), table(ep=4)
    travel = 2 * all_to_all(GPU, exchangers(GPU, 4), 40) + 1.0  # and how many come: a latency
    assert spread.forward[0] - alone.forward[0] == pytest.approx(travel)
    assert spread.backward[0] - alone.backward[0] == pytest.approx(travel)
    assert spread.backward_input[0] - alone.backward_input[0] == pytest.approx(travel)
    assert spread.backward_weight == alone.backward_weight


def test_a_rank_holds_and_reduces_its_share_of_the_experts():
    alone, spread = table(), table(ep=4)
    assert alone.state_bytes is not None
    assert spread.state_bytes is not None
    assert alone.state_bytes[0] == 4 * 100
    assert spread.state_bytes[0] == 4 * (20 + 80 // 4)
    # Nobody else has the same experts: 20 of 100 parameters are reduced.
    # Tensors this small move whole, in fewer steps.
    saved = 2 * 80 / GPU.intra_bandwidth
    assert alone.reduce[0][0] - spread.reduce[0][0] == pytest.approx(saved)


def test_the_fullest_rank_is_waited_for():
    even, uneven = table(ep=4), table(ep=4, imbalance=1.5)
    more = 0.5 * 6e11 / 1e12
    assert uneven.backward_weight[0] - even.backward_weight[0] == pytest.approx(more)
    assert uneven.forward[0] - even.forward[0] > more  # its tokens travel, too
    assert table(imbalance=1.5).forward == table().forward


def test_shared_experts_run_while_tokens_are_on_their_way_to_others():
    plain, alone = table(ep=2), all_to_all(GPU, exchangers(GPU, 2), 40.0)
    for flops, forward, backward in ((1e10, 0.01, 0.02), (1e14, alone, alone)):
        load = replace(LOAD, beside_flops=flops)
        costs = AnalyticCosts((load,), GPU, element_bytes=1, dp=4, ep=2)
        found = costs.table_for(ONE, (1,), frozenset())
        assert plain.forward[0] - found.forward[0] == pytest.approx(forward)
        assert plain.backward[0] - found.backward[0] == pytest.approx(backward)
        assert plain.backward_input[0] - found.backward_input[0] == pytest.approx(forward)
        assert plain.backward_weight == found.backward_weight
        assert plain.exchange[0].away - found.exchange[0].away == pytest.approx(forward)


def test_ranks_with_the_same_part_of_each_expert_lie_apart():
    two = replace(GPU, gpus_per_node=2)
    assert exchangers(two, 2).num_nodes == 1  # ranks 0 and 1
    assert exchangers(two, 2, 2).num_nodes == 2  # ranks 0 and 2


def test_with_parts_of_experts_fewer_ranks_share_an_optimizers_state():
    costs = AnalyticCosts((LOAD,), GPU, element_bytes=1, dp=4, tp=2, ep=2, expert_tp=True)
    found = costs.table_for(ONE, (1,), frozenset({0}))
    assert found.state_bytes is not None
    # Of 80 parameters of experts a rank has a fourth, as one other of the eight ranks has.
    assert found.state_bytes[0] == 2 * (20 + 20) + 2 * 20 // 4 + 2 * 20 // 2
