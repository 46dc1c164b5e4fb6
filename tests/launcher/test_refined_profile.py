"""A run's median step corrects a profile."""

import pytest

from launcher.refined_profile import kind_ratios, refined
from strategies import compile_program, simulate
from strategies.costs.uniform import UniformCosts
from strategies.ir.instruction import Kind
from tests.strategies.costs.test_profile import PROFILE


def test_every_kind_is_compared_over_all_ranks_and_stages():
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4, split_backward=True)
    measured = simulate(program, UniformCosts(forward=1.5, backward=3.0, backward_input=1.0))
    predicted = UniformCosts(forward=1.0, backward=2.0).table(program)
    ratios = kind_ratios(measured, predicted)
    assert ratios == pytest.approx({Kind.F: 1.5, Kind.I: 1.0, Kind.W: 2.0})


def test_the_figures_of_these_kinds_are_scaled_and_no_others():
    found = refined(PROFILE, {Kind.F: 1.5, Kind.W: 2.0})
    before, after = PROFILE.at(4), found.at(4)
    for old, new in zip(before.units, after.units, strict=True):
        assert new.seconds.forward == 1.5 * old.seconds.forward
        assert new.seconds.backward_weight == 2 * old.seconds.backward_weight
        assert new.seconds.backward == old.seconds.backward
        assert new.saved_bytes == old.saved_bytes
    assert after.fixed.forward == 1.5 * before.fixed.forward
    assert (found.machine, found.rest_s) == (PROFILE.machine, PROFILE.rest_s)
