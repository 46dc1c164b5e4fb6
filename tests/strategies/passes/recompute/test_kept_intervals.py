from strategies.compiler import compile_compute
from strategies.ir import verify
from strategies.memory import peak_activations
from strategies.passes.recompute.kept_intervals import keep_what_fits
from strategies.plan import Plan
from tests.strategies.programs import texts, written


def test_nothing_is_recomputed_where_all_fits():
    program = compile_compute(Plan("1f1b", 4, 8))
    assert keep_what_fits(program, (4, 3, 2, 1)) == program


def test_the_pair_whose_backward_comes_last_gives_its_place_up():
    program = written("0F0 0F1 0F2 0B0 0B1 0B2", num_microbatches=3)
    found = keep_what_fits(program, (2,))
    assert texts(verify(found)) == ["0F0 0F1 0F2 0B0 0B1 0R2 0B2"]
    assert peak_activations(found) == (2,)


def test_a_split_backward_holds_until_its_w():
    program = written("0F0 0I0 0F1 0I1 0W0 0W1", num_microbatches=2)
    assert keep_what_fits(program, (1,)) is None
    tight = written("0F0 0F1 0I0 0W0 0I1 0W1", num_microbatches=2)
    assert texts(keep_what_fits(tight, (1,))) == ["0F0 0F1 0I0 0W0 0R1 0I1 0W1"]
