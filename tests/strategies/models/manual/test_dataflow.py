"""The order in which cells are cut: nothing flows back."""

from __future__ import annotations

import pytest

from strategies.errors import ModelError
from strategies.models.manual.dataflow import Unknown, retained
from strategies.models.manual.flow_layout import ordered_groups


def _names(costs: dict[str, float], edges: set[tuple[str, str]]) -> list[tuple[str, ...]]:
    return [cells for cells, _ in ordered_groups(costs, edges)]


def test_what_feeds_another_comes_first_whatever_the_order_of_use() -> None:
    costs = {"d1": 2.0, "d2": 2.0, "g1": 1.0, "g2": 1.0}
    edges = {("d1", "d2"), ("g1", "g2"), ("g2", "d1")}
    assert _names(costs, edges) == [("g1",), ("g2",), ("d1",), ("d2",)]


def test_cells_that_feed_each_other_are_one_group_with_the_cost_of_all() -> None:
    costs = {"ab": 1.0, "ba": 2.0, "d": 4.0}
    edges = {("ab", "ba"), ("ba", "ab"), ("ab", "d")}
    assert ordered_groups(costs, edges) == [(("ab", "ba"), 3.0), (("d",), 4.0)]


def test_a_longer_ring_is_one_group() -> None:
    costs = dict.fromkeys("abcx", 1.0)
    edges = {("a", "b"), ("b", "c"), ("c", "a"), ("x", "a")}
    assert _names(costs, edges) == [("x",), ("a", "b", "c")]


def test_cells_without_edges_stay_as_they_are_used() -> None:
    assert _names({"b": 1.0, "a": 1.0}, set()) == [("b",), ("a",)]


def test_a_backward_may_keep_its_graph_and_ask_for_nothing_else() -> None:
    assert retained((None, True), {})
    assert retained((), {"retain_graph": True})
    assert not retained((), {})
    with pytest.raises(ModelError, match="create_graph"):
        retained((), {"create_graph": True})


def test_a_number_of_another_stage_goes_into_logs_and_decides_nothing() -> None:
    number = Unknown()
    assert isinstance(2 * number + 1, Unknown)
    assert f"{number:.3f}" == "nan"
    with pytest.raises(ModelError, match="not decide"):
        assert number < 1
