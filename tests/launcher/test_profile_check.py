"""A run's median step corrects a profile."""

from dataclasses import replace

import pytest

from launcher.planning.profile_check import (
    kind_ratios,
    rank_threads,
    refined,
    with_error,
    write_refined,
)
from strategies import compile_program, simulate
from strategies.costs.profile_file import dump_profile, parse_profile
from strategies.costs.uniform import UniformCosts
from strategies.ir.kinds import Kind
from tests.strategies.costs.test_profile_costs import costs
from tests.strategies.costs.test_profile_file import PROFILE


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


def test_the_run_s_step_says_how_far_the_corrected_profile_is_from_it(tmp_path):
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4)
    before = costs()
    slower = replace(before, profile=refined(PROFILE, {Kind.F: 1.5, Kind.B: 1.5}))
    measured = simulate(program, slower)
    write_refined(tmp_path / "p.json", before, measured)
    found = parse_profile((tmp_path / "p.json").read_text(), label="p.json")
    assert found.errors == pytest.approx((0.0, 0.0), abs=1e-9)
    assert found.at(1).units[1].seconds.forward == pytest.approx(3.0)


def test_an_error_is_kept_in_the_file_and_the_larger_counts_between_sizes():
    for error in (None, 0.25):
        found = parse_profile(dump_profile(with_error(PROFILE, error)), label="p.json")
        assert found.at(1).error == found.at(2).error == error
    sizes = ((1, replace(PROFILE.at(1), error=0.1)), (4, replace(PROFILE.at(4), error=0.3)))
    assert replace(PROFILE, sizes=sizes).at(2).error == 0.3


def test_ranks_share_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("launcher.planning.profile_check.num_cores", lambda: 6)
    assert [rank_threads(ranks) for ranks in (1, 2, 4, 8)] == [6, 3, 1, 1]
