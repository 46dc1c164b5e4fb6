import pytest

from strategies import compile_program
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware
from strategies.costs.load import Load
from strategies.costs.profile_costs import ProfiledCosts, stage_classes
from strategies.errors import CostError
from tests.strategies.costs.test_profile_file import PROFILE

HARDWARE = Hardware("h", 1e12, 0.5, 8.0, 1e10, 5e8, 1e-6, 1e8, 1e-3, 8)
STAGES = ((0, 1), (1, 1, 2))


def costs(**changes):
    loads = (Load(1e9, 1000, 50, 500), Load(2e9, 2000, 10, 700))
    return ProfiledCosts(PROFILE, STAGES, 1, AnalyticCosts(loads, HARDWARE, **changes))


def table(**options):
    program = compile_program(
        schedule="1f1b", pp=2, num_microbatches=4, buckets=1, **options.pop("program", {})
    )
    return costs(**options).table(program)


def test_a_stage_takes_something_by_itself_and_what_its_units_add():
    found = table()
    assert found.name == "profiled"
    assert found.time_unit == "s"
    assert found.forward == (0.5 + 0 + 2, 0.5 + 2 + 2 + 1)
    assert found.backward == (1 + 4, 1 + 4 + 4 + 2)
    assert found.backward_input == found.backward_weight == found.recompute == found.forward
    assert found.step == pytest.approx((0.05 + 0.2 + 0.25, 0.05 + 0.5 + 0.25))


def test_links_are_the_measured_ones():
    found = table(dp=2)
    assert found.latency == (1e-4,)
    assert found.occupancy == (50 * 4 / 1e9,)
    # A ring of two: 2 (n-1)/n of 4000 bytes, and two latencies.
    assert found.reduce[0] == pytest.approx((4000 / 2e9 + 2 * 2e-4,))


def test_between_nodes_the_assumed_link_counts():
    hardware = Hardware("h", 1e12, 0.5, 8.0, 1e10, 5e8, 1e-6, 1e8, 1e-3, gpus_per_node=1)
    loads = (Load(1e9, 1000, 50, 500), Load(2e9, 2000, 10, 700))
    found = ProfiledCosts(PROFILE, STAGES, 1, AnalyticCosts(loads, hardware)).table(
        compile_program(schedule="1f1b", pp=2, num_microbatches=4)
    )
    assert found.latency == (1e-3,)


def test_replicas_share_updates_with_zero1():
    found = table(dp=4, program={"overlap": "zero1"})
    assert found.step[0] == pytest.approx((0.05 + 0.2) / 4 + 0.25)


def test_tokens_travel_beside_what_was_measured():
    experts = {"experts": 1600, "exchanged": (40,)}
    loads = (Load(1e9, 1000, 50, 500), Load(2e9, 2000, 10, 700, **experts))
    assumed = AnalyticCosts(loads, HARDWARE, dp=2, ep=2)
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4, buckets=1)
    found = ProfiledCosts(PROFILE, STAGES, 1, assumed).table(program)
    before = table(dp=2)
    # Of 40 elements half to the other one and back, and before that how many, a latency each.
    travel = 2 * (40 * 4 / 2 / 1e9 + 1e-4) + 1e-4
    for name in ("forward", "backward", "backward_input", "recompute"):
        first, second = getattr(found, name)
        assert first == getattr(before, name)[0]
        assert second - getattr(before, name)[1] == pytest.approx(travel, rel=1e-6)
    assert found.backward_weight == before.backward_weight
    assert found.exchange[1].away == pytest.approx(2 * (40 * 4 / 2 / 1e9 + 1e-4))
    assert found.step[1] - 0.25 == pytest.approx((before.step[1] - 0.25) * 1200 / 2000)


def test_memory_is_measured_and_state_computed():
    memory = table().memory
    assert memory.activations == (200, 300)
    assert memory.waiting == (100, 150)
    assert memory.outputs == (25, 0)
    assert memory.inputs == (0, 25)
    assert memory.forward_temporaries == (10, 10)
    assert memory.backward_temporaries == (20, 20)
    assert memory.parameters == (4000, 8000)
    assert table().stage_input == (0, 25 / 300)


def test_the_cut_is_told_in_the_profile_s_classes():
    classes = ("embedding", "layers.*", "layers.*", "head")
    stages = stage_classes(PROFILE, classes, [range(2), range(2, 4)])
    assert stages == ((0, 1), (1, 2))
    with pytest.raises(CostError, match=r"no figures for layers\.\*#2, only for embedding"):
        stage_classes(PROFILE, ("embedding", "layers.*#2"), [range(2)])


def test_costs_can_be_a_key_of_plans():
    assert len({costs(), costs()}) == 1
