from strategies.costs.hardware import Hardware

MACHINE = Hardware("box", 1e12, 0.5, 40, 1e9, 100.0, 1e-6, 10.0, 1e-5, gpus_per_node=4)


def test_ranks_of_a_node_talk_over_its_inner_link():
    assert MACHINE.link(0, 3) == MACHINE.link(6, 5) == (100.0, 1e-6)


def test_ranks_of_two_nodes_talk_over_the_network():
    assert MACHINE.link(3, 4) == MACHINE.link(8, 0) == (10.0, 1e-5)
