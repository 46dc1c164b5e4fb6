"""The line through measured message times: latency and bandwidth with the least relative errors."""

from __future__ import annotations

import pytest

from strategies.profiling.link_times import fit_link

SIZES = (1_000, 4_000, 64_000, 1_000_000)


def test_times_on_a_line_give_that_line():
    found = fit_link(SIZES, [2e-3 + size / 5e6 for size in SIZES])
    assert found.latency_s == pytest.approx(2e-3, rel=1e-9)
    assert found.bandwidth == pytest.approx(5e6, rel=1e-9)


def test_no_other_line_has_smaller_relative_errors():
    times = (3e-3, 2e-3, 2.5e-2, 0.19)
    found = fit_link(SIZES, times)

    def error(latency: float, slope: float) -> float:
        pairs = zip(SIZES, times, strict=True)
        return sum(((latency + slope * size) / time - 1) ** 2 for size, time in pairs)

    least = error(found.latency_s, 1 / found.bandwidth)
    for latency in (0.99, 1.0, 1.01):
        for slope in (0.99, 1.0, 1.01):
            if (latency, slope) != (1.0, 1.0):
                assert error(found.latency_s * latency, slope / found.bandwidth) > least


def test_a_line_that_would_begin_below_nothing_or_fall_ends_there():
    assert fit_link((1_000, 2_000), (1e-3, 3e-3)).latency_s == 0.0
    assert fit_link((1_000, 2_000), (3e-3, 1e-3)).bandwidth == pytest.approx(1e15)
