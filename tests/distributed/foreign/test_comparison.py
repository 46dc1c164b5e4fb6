"""The comparison itself: a plain module with a plain loss is equal everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks.comparison import EVERY_LAYOUT, Net, equal_to_stock
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


@EVERY_LAYOUT
def test_a_plain_module_is_equal(layout: str, ranks: Callable[[int], Ranks]) -> None:
    stock, piped = equal_to_stock(ranks, Net, layout)
    assert len(stock.weights) == 10
    assert all(len(fitted.weights) == 10 for fitted in piped)
