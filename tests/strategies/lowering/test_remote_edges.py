from strategies.ir.placement import loop, v
from strategies.ir.text import format_instruction, parse_instruction
from strategies.lowering.remote_edges import on_this_rank


def seen(text, placement):
    return format_instruction(on_this_rank(parse_instruction(text), placement))


def test_a_gradient_from_another_rank_is_known_by_its_receive():
    assert seen("0R3@1B3", loop(2, 1)) == "0R3@0RECV_B3<1"
    assert seen("0R3@1I3", loop(2, 1)) == "0R3@0RECV_B3<1"


def test_one_of_the_same_rank_keeps_its_name():
    assert seen("1R0@2B0", v(2)) == "1R0@2B0"


def test_other_edges_stay():
    assert seen("0R1@1B0", loop(2, 1)) == "0R1@1B0"
    assert seen("0R1", loop(2, 1)) == "0R1"
    assert seen("0REDUCE0@1B0", loop(2, 1)) == "0REDUCE0@1B0"
