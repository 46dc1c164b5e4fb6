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


def test_sharers_that_divide_no_node_evenly_wait_for_those_on_two():
    """The first three ranks of a node of four were taken for all: no sum left a node."""
    group = sharers(GPUS, 3)
    assert (group.num_nodes, group.per_node, group.fewest) == (2, 2, 1)  # ranks 3, 4, 5
    # Within a node half; the rank that is alone on its node brings all of the tensor there.
    took = reduce_scatter_seconds(GPUS, group, 80)
    assert took == (1 / 2 * 80 / 8 + 0.25) + (1 / 2 * 80 / 2 + 1)
    # Where there are no more ranks than a node has, none is elsewhere.
    assert sharers(GPUS.of_ranks(3), 3).num_nodes == 1


@pytest.mark.parametrize("num_bytes", [1.0, 8.0, 80.0, 8e6])
def test_one_node_is_never_slower_than_two(num_bytes):
    """Seven steps in a node took longer than three, one to the other node: small sums of tp=8."""
    eight = replace(GPUS, gpus_per_node=8)
    took = [reduce_scatter_seconds(each, sharers(each, 8), num_bytes) for each in (eight, GPUS)]
    assert took[0] < took[1]
    # Three steps of a tree for what is small.
    assert num_bytes > 1 or took[0] == 1 / 8 + 3 * 0.25


def test_two_owners_of_a_stage_are_one_group():
    assert replicas(GPUS, (0, 1), 2, 1)[:3] == (4, 1, 4)
    assert replicas(GPUS, (0, 2), 2, 1)[:3] == (4, 2, 2)
