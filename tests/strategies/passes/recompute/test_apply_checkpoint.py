from strategies import UniformCosts, compile_program, simulate
from strategies.ir import verify
from strategies.passes.fused_pairs import separate_pairs
from strategies.passes.recompute.apply_checkpoint import apply_checkpoint
from strategies.recompute import Recompute
from tests.strategies.programs import texts, written


def test_every_backward_gets_an_r_that_waits_for_its_gradient():
    program = written("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", num_microbatches=2)
    assert texts(verify(apply_checkpoint(program))) == [
        "0F0 0F1 0R0@1B0 0B0 0R1@1B1 0B1",
        "1F0 1R0 1B0 1F1 1R1 1B1",
    ]


def test_with_a_split_backward_it_stands_before_the_i():
    program = written("0F0 0I0 0W0\n1F0 1I0 1W0", num_microbatches=1)
    assert texts(verify(apply_checkpoint(program))) == ["0F0 0R0@1I0 0I0 0W0", "1F0 1R0 1I0 1W0"]


def test_before_a_fused_pair_it_makes_what_the_pair_reads():
    program = written("0F0 (0F1;0B0)OVERLAP_F_B 0B1", num_microbatches=2)
    found = verify(apply_checkpoint(program))
    assert texts(found) == ["0F0 0R0 (0F1;0B0)OVERLAP_F_B 0R1 0B1"]
    assert texts(verify(separate_pairs(found))) == ["0F0 0R0 0F1 0B0 0R1 0B1"]


def test_once_there_are_messages_the_edge_names_the_receive():
    program = compile_program(pp=2, num_microbatches=1, recompute=Recompute("full"))
    assert texts(program)[0].split()[:4] == ["0F0", "0SEND_F0>1", "0RECV_B0<1", "0R0@0RECV_B0<1"]


def test_the_receive_comes_first_where_sends_wait_too():
    costs = UniformCosts(transport="rendezvous", p2p=0.1)
    for name in ("1f1b", "chimera"):
        program = compile_program(
            schedule=name, pp=2, num_microbatches=4, costs=costs, recompute=Recompute("full")
        )
        assert simulate(program, costs).makespan > 0
