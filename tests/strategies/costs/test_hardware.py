from dataclasses import replace

from strategies.costs.hardware import Hardware

MACHINE = Hardware("box", 1e12, 0.5, 40, 1e9, 100.0, 1e-6, 10.0, 1e-5, gpus_per_node=4)


def test_ranks_of_a_node_talk_over_its_inner_link():
    assert MACHINE.link(0, 3) == MACHINE.link(6, 5) == (100.0, 1e-6)


def test_ranks_of_two_nodes_talk_over_the_network():
    assert MACHINE.link(3, 4) == MACHINE.link(8, 0) == (10.0, 1e-5)


def test_what_a_device_shows_is_more_than_a_rank_holds():
    card = replace(MACHINE, memory_gb=80.0, context_gb=2.0, allocator_loss=0.25)
    assert card.reserved_bytes(40e9) == 52e9
    assert MACHINE.reserved_bytes(1e9) == 1e9
