"""Ranks' stamps of a step, joined."""

from strategies.runtime.step_stats import RankStep, joined_stats


def said(step=7, begun=0.0, finished=2.0, norm=9.0, busy=1.0, computed=1.5, reduced=None, peak=5):
    return [*RankStep(step, begun, finished, norm, busy, computed, reduced, peak)]


def test_ranks_of_one_step_are_joined():
    stats = joined_stats([said(), said(begun=0.5, norm=16.0, busy=2.0, peak=6)], tp=1)
    assert stats is not None
    assert (stats.step, stats.makespan_s, stats.busy_s) == (7, 2.0, 3.0)
    assert stats.bubble_ratio == 0.25  # 1 of 2 * 2 seconds
    assert stats.gradient_norm == 5.0
    assert stats.exposed_grad_reduce_s is None
    assert stats.peak_memory_bytes == (5, 6)


def test_a_reduction_is_exposed_behind_the_last_compute_of_all_ranks():
    late = joined_stats([said(reduced=1.75), said(computed=1.25, reduced=1.625)], tp=1)
    hidden = joined_stats([said(reduced=1.25), said(reduced=None)], tp=1)
    assert late is not None and late.exposed_grad_reduce_s == 0.25
    assert hidden is not None and hidden.exposed_grad_reduce_s == 0.0


def test_of_the_sharers_of_a_pipeline_rank_the_largest_peak_counts():
    stats = joined_stats([said(peak=1), said(peak=4), said(peak=3), said(peak=2)], tp=2)
    assert stats is not None and stats.peak_memory_bytes == (4, 3)


def test_ranks_that_speak_of_different_steps_or_of_none_give_nothing():
    assert joined_stats([said(), said(step=8)], tp=1) is None
    assert joined_stats([said(), None], tp=1) is None
