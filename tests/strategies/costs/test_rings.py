"""Groups over nodes of four GPUs: 8 B/s and 0.25 s inside, 2 B/s and 1 s between, all by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.costs.hardware import reduce_scatter_seconds, replicas, sharers
from tests.strategies.costs.test_analytic import MACHINE

CPUS = replace(MACHINE, gpus_per_node=4)
GPUS = replace(CPUS, num_sms=10)


def test_one_rank_shares_nothing():
    assert reduce_scatter_seconds(GPUS, replicas(GPUS, (0,), 1, 1), 1e9) == 0


@pytest.mark.parametrize("machine", [CPUS, GPUS], ids=["cpus", "gpus"])
def test_a_node_is_a_ring(machine):
    group = replicas(machine, (0,), 4, 1)
    assert group[:3] == (4, 1, 4)
    assert reduce_scatter_seconds(machine, group, 80) == 3 / 4 * 80 / 8 + 3 * 0.25
    assert sharers(machine, 4) == group


def test_members_of_a_node_use_an_interface_each():
    # Eight replicas on two nodes: within a node as above, then 20 bytes each, over two nodes.
    group = replicas(GPUS, (0,), 8, 1)
    assert group[:3] == (8, 2, 4)
    assert reduce_scatter_seconds(GPUS, group, 80) == (3 / 4 * 80 / 8 + 3 * 0.25) + (
        1 / 2 * 20 / 2 + 1
    )
    # Others have one interface: a flat ring is held to it.
    flat = reduce_scatter_seconds(CPUS, replicas(CPUS, (0,), 8, 1), 80)
    assert flat == 7 / 8 * 80 / 2 + 7 * 1


def test_sharers_of_matrices_keep_replicas_apart():
    # tp=4 fills a node, so that each replica has a node, and its interface, to itself.
    group = replicas(GPUS, (0,), 4, 4)
    assert group[:3] == (4, 4, 1)
    assert reduce_scatter_seconds(GPUS, group, 80) == min(3 / 4 * 80 / 2 + 3, 80 / 2 + 2)


def test_small_tensors_go_by_trees_and_large_ones_by_rings():
    group = replicas(GPUS, (0,), 1024, 4)
    assert reduce_scatter_seconds(GPUS, group, 8) == 8 / 2 + 10  # log2 of 1024 nodes
    assert reduce_scatter_seconds(GPUS, group, 8e6) == 1023 / 1024 * 8e6 / 2 + 1023


def test_tensor_parallel_ranks_may_be_on_several_nodes():
    group = sharers(GPUS, 8)
    assert group[:3] == (8, 2, 4)
    assert reduce_scatter_seconds(GPUS, group, 80) > reduce_scatter_seconds(
        GPUS, sharers(GPUS, 4), 80
    )


def test_two_owners_of_a_stage_are_one_group():
    assert replicas(GPUS, (0, 1), 2, 1)[:3] == (4, 1, 4)
    assert replicas(GPUS, (0, 2), 2, 1)[:3] == (4, 2, 2)
