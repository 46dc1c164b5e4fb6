"""The planner's answer as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.compose.overrides import quote_explain
from launcher.report.plan_table import memory_bars, plan_table, profile_table, refused, short_layers
from tests.strategies.costs.test_profile_file import PROFILE

GIB = 2**30
PLAN = {
    "tp": 2, "pp": 4, "dp": 1, "num_microbatches": 8, "microbatch_size": 2, "schedule": "zb_v",
    "stages_per_rank": 2, "overlap": "grad_reduce", "recompute": "none",
    "predicted_step_time_s": 0.0125, "tokens_per_s": 12345.6, "mfu": 0.4567, "bubble_ratio": 0.1,
    "exposed_grad_reduce": 0.0, "peak_memory_bytes": [2 * GIB, 3 * GIB], "bound_gap": 0.02,
    "layers_per_stage": [1.5, 2, 2, 2, 1],
}  # fmt: skip


def test_a_plan_is_a_line_with_all_its_figures():
    head, line = plan_table([PLAN]).splitlines()
    assert head.split()[:4] == ["tp", "pp", "dp", "batch"]
    for part in ("8 x 2", "zb_v x2", "12.5 ms", "12,346", "45.7 %", "10.0 %", "2-3", "1.5 3x2 1"):
        assert part in line
    assert len(head) <= len(line) + len("layers per stage")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [([4, 4, 4], "3x4"), ([3.5, 4, 4, 0], "3.5 2x4 0"), ([2], "2"), ([1, 2, 1], "1 2 1")],
)
def test_equal_neighbours_are_counted(layers, expected):
    assert short_layers(layers) == expected


def test_bars_show_state_activations_and_the_limit():
    head, first, second = memory_bars([GIB, 2 * GIB], [GIB, 2 * GIB], 4.0 * GIB).splitlines()
    assert "4 GiB" in head
    assert (first.count("#"), first.count("=")) == (8, 8)
    assert (second.count("#"), second.count("=")) == (16, 16)
    assert first.index("|") == second.index("|")


def test_of_many_ranks_the_first_are_shown():
    lines = memory_bars([GIB] * 20, [GIB] * 20, 4.0 * GIB).splitlines()
    assert lines[-1].strip() == "and 4 more ranks, of 20"


def test_reasons_and_the_nearest_miss_are_named():
    text = refused(
        {
            "slower": 5,
            "memory": 3,
            "dominated": 1,
            "tp": {"8": "tp=8 does not divide model.heads=4. Try tp=4."},
            "batch": [3, 6],
            "memory_limit_bytes": 4 * GIB,
            "nearest": {"plan": "tp=1 pp=2", "bytes": 5 * GIB},
        }
    )
    assert "5 slower, 3 too large for memory" in text
    assert "tp=8 does not divide" in text
    assert "dp=3,6: does not divide" in text
    assert "tp=1 pp=2 needs 5 GiB of 4" in text


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("planner.explain=[tp=4,pp=8]", "planner.explain=['tp=4','pp=8']"),
        ("planner.explain=[tp=4, pp=8]", "planner.explain=['tp=4','pp=8']"),
        ("planner.explain=['tp=4']", "planner.explain=['tp=4']"),
        ("planner.explain=[]", "planner.explain=[]"),
        ("schedule.layers_per_stage=[1,2]", "schedule.layers_per_stage=[1,2]"),
    ],
)
def test_entries_with_an_equals_sign_are_quoted_for_hydra(word, expected):
    assert quote_explain([word]) == (expected,)


def test_a_profile_is_a_block_per_microbatch_size_with_its_error():
    (small, first), large = PROFILE.sizes
    text = profile_table(replace(PROFILE, sizes=((small, replace(first, error=0.025)), large)))
    assert "microbatches of 1: ms per unit, to 2.5 %, MiB per microbatch" in text
    assert "microbatches of 4: ms per unit, MiB per microbatch" in text
    assert sum(line.strip().startswith("any stage") for line in text.splitlines()) == 2


def test_rows_of_models_of_several_sizes_show_their_own():
    plain = plan_table([PLAN | {"sequence": 64, "layers": 4}] * 2)
    assert "sequence" not in plain and "layers  " not in plain.splitlines()[0][:40]
    lines = plan_table([PLAN | {"sequence": n, "layers": 4} for n in (4352, 1152)]).splitlines()
    assert lines[0].split()[:3] == ["sequence", "tp", "pp"]
    assert [line.split()[:3] for line in lines[1:]] == [["1", "4352", "2"], ["2", "1152", "2"]]


def test_a_model_of_images_makes_samples_per_second():
    head, line = plan_table([{**PLAN, "tokens_per_s": None, "samples_per_s": 25.0}]).splitlines()
    assert "samples/s" in head and "tokens/s" not in head
    assert "  25  " in line


def test_a_narrow_terminal_gets_fewer_columns_and_their_names():
    wide = plan_table([PLAN, PLAN])
    assert plan_table([PLAN, PLAN], room=200) == wide
    narrow = plan_table([PLAN, PLAN], room=80).splitlines()
    assert max(map(len, narrow)) <= 80
    assert narrow[-1].startswith("in timeline.html: exposed, over bound")
    assert "tokens/s" in narrow[0]
    assert "exposed" not in narrow[0]
