"""A profile as an option of ``hardware=``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launcher.config import LaunchConfig
from launcher.config.decode import from_dict
from launcher.config.pipeline import HardwareConfig
from launcher.config.workload import ModelConfig
from launcher.planning.hardware_fit import fit_rates, hardware_file, hardware_yaml
from launcher.planning.profile_check import class_numbers
from launcher.planning.question import calibration, label, question
from launcher.resolve import model_shape
from launcher.workloads.loads import unit_loads
from strategies.costs.hardware import ElementSizes
from strategies.costs.profile_file import Link, Machine, Profile, Seconds, SizeProfile, UnitProfile
from strategies.errors import PlanError

RATE, PER_UNIT, PER_STAGE = 2e10, 3e-4, 1e-4
CONFIG = LaunchConfig(model=ModelConfig(layers=4, hidden=64, ffn=128, vocab=300))


def profile_of(config: LaunchConfig, *, noise: float = 0.0) -> Profile:
    """Of a machine that keeps to the law."""
    shape = model_shape(config)
    numbers = class_numbers(shape)
    sizes = []
    for size in (1, 4):
        loads = unit_loads(shape, 1, size)
        units = []
        for kind in range(max(numbers) + 1):
            load = loads[numbers.index(kind)]
            took = (load.forward_flops / RATE + PER_UNIT) * (1 + noise * (-1) ** (kind + size))
            seconds = Seconds(took, 2 * took, took, took, took, load.parameters * 28 / 1e10)
            units.append(UnitProfile(seconds, 0, 0, 0, 0, 0))
        sizes.append((size, SizeProfile(Seconds(PER_STAGE, 2 * PER_STAGE), tuple(units))))
    return Profile(
        Machine("a processor", None, 2, 1, "2.13"), (),
        ("net.embedding", "net.layers.*.attention", "net.layers.*.mlp", "net.head"),
        tuple(sizes), 2e-3, Link(1e-4, 2e9), Link(2e-4, 1e9),
    )  # fmt: skip


def test_a_machine_that_keeps_to_the_law_is_found_exactly():
    rates = fit_rates(profile_of(CONFIG), CONFIG, model_shape(CONFIG))
    assert rates.flops_per_s == pytest.approx(RATE)
    assert rates.unit_overhead_s == pytest.approx(PER_UNIT)
    assert rates.stage_overhead_s == pytest.approx(PER_STAGE)
    assert rates.error == pytest.approx(0.0, abs=1e-9)
    off = fit_rates(profile_of(CONFIG, noise=0.1), CONFIG, model_shape(CONFIG))
    assert off.error > 0.001


def test_the_peak_that_was_measured_is_replaced_and_the_others_are_kept():
    named = HardwareConfig(peak_flops=None, peak_fp32_flops=1e9, peak_bf16_flops=3e14)
    config = replace(CONFIG, hardware=named)
    text = hardware_yaml(
        "mine", profile_of(config), config, model_shape(config), ElementSizes(), int(8e9)
    )
    found = yaml.safe_load(text)
    assert "peak_flops" not in found
    assert found["peak_fp32_flops"] * found["efficiency"] == pytest.approx(RATE, rel=1e-3)
    assert found["peak_bf16_flops"] == 3e14
    assert text.startswith("# Measured by mode=profile, in fp32, ")


def test_the_file_is_an_option_that_says_where_it_was_measured():
    text = hardware_yaml(
        "cpu_gloo", profile_of(CONFIG), CONFIG, model_shape(CONFIG), ElementSizes(), int(8e9)
    )
    config = from_dict({"hardware": yaml.safe_load(text)})
    found = config.hardware
    assert found.peak_flops * found.efficiency == pytest.approx(RATE, rel=1e-3)
    assert found.memory_bandwidth == pytest.approx(1e10, rel=1e-3)
    assert (found.memory_gb, found.step_overhead_s) == (8.0, 2e-3)
    assert found.link(0, 1) == (2e9, 1e-4)
    assert found.ring(0, 1) == (1e9, 2e-4)
    assert found.ring(0, found.gpus_per_node) == found.link(0, found.gpus_per_node)
    assert label(question(config, ())).startswith("calibrated, +-")
    assert "a processor" in calibration(question(config, ()))
    assert calibration(question(CONFIG, ())).startswith("uncalibrated")
    alone = replace(profile_of(CONFIG), messages=None, reductions=None)
    text = hardware_yaml("x", alone, CONFIG, model_shape(CONFIG), ElementSizes(), int(8e9))
    assert from_dict({"hardware": yaml.safe_load(text)}).hardware.ring_bandwidth is None


@pytest.mark.parametrize("given", ["cpu_gloo.yaml", "hardware/cpu_gloo.json", "hardware"])
def test_a_place_where_no_option_is_looked_for_is_refused(given: str):
    with pytest.raises(PlanError, match=r"Try profile\.hardware=my_conf/hardware/cpu_gloo\.yaml"):
        hardware_file(given)
    assert hardware_file("my_conf/hardware/mine.yaml") == Path.cwd() / "my_conf/hardware/mine.yaml"
