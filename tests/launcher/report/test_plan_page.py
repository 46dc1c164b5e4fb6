"""The table and the picture of plans: what is on the front, and that everything has its number."""

from __future__ import annotations

import doctest
import re

from launcher.report import summary
from launcher.report.plan_page import on_front, plans_html

GIB = 2**30


def plan(step_s: float, *gib: float, **more: object) -> dict[str, object]:
    return {
        "overrides": ["pp=2", "schedule=1f1b"], "predicted_step_time_s": step_s,
        "tokens_per_s": 100.0, "mfu": 0.4, "bubble_ratio": 0.1, "exposed_grad_reduce": 2e-3,
        "peak_memory_bytes": [int(value * GIB) for value in gib], "layers_per_stage": [2, 2],
        "bound_gap": 0.1, "sequence": 128, "layers": 4, "tp": 1, "pp": 2, "dp": 1,
        "num_microbatches": 4, "microbatch_size": 1, "schedule": "1f1b", "stages_per_rank": 1,
        "overlap": "grad_reduce", "recompute": "none", **more,
    }  # fmt: skip


def test_the_examples_hold():
    assert doctest.testmod(summary).failed == 0


def test_the_front_has_what_nothing_beats_in_both():
    plans = [plan(1.0, 8, 9), plan(1.1, 9, 9), plan(1.2, 4), plan(1.3, 5), plan(1.0, 9)]
    # The fourth is slower and larger than the third; the last is the first's equal.
    assert on_front(plans) == {0, 2, 4}
    assert on_front(plans[:1]) == {0}


def test_every_plan_is_a_row_and_a_dot():
    text = plans_html([plan(1.0, 8, 9), plan(1.2, 4, 3)], limit_bytes=10 * GIB)
    assert re.findall(r'<tr data-job="(.)"', text) == ["1", "2"]
    assert re.findall(r'<g data-dot="(.)" class="(on|beaten)"', text) == [("1", "on"), ("2", "on")]
    assert "limit 10 GiB" in text
    assert "<code>pp=2 schedule=1f1b</code>" in text
    # Sorted by the fullest rank, whatever the cell's text begins with.
    assert f'data-value="{9 * GIB:.9g}"' in text
    # A limit far above all plans would press them to the floor.
    assert "limit" not in plans_html([plan(1.0, 1)], limit_bytes=80 * GIB).split("<svg")[1]


def test_words_of_a_plan_are_no_markup():
    hostile = plan(1.0, 1, overrides=["data.path=<script>alert(1)</script>"])
    text = plans_html([hostile, plan(1.1, 1)], limit_bytes=GIB)
    assert "<script>" not in text


def test_sizes_that_differ_have_a_column():
    text = plans_html([plan(1.0, 1), plan(1.0, 1, sequence=256)], limit_bytes=GIB)
    assert ">sequence</th>" in text
    assert ">256</td>" in text
    # Their times are of different work: nothing to be on a front of.
    assert "<svg" not in text
    assert ">front</th>" not in text
