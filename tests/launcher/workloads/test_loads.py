"""What units take on one rank, put together to stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.workloads.loads import unit_loads
from launcher.workloads.presets import PRESETS
from launcher.workloads.transformer_shape import unit_specs
from strategies.costs.analytic import sum_loads


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_matrix_lies_on_both_stages_that_a_cut_separates(tp):
    shape = replace(PRESETS["gpt2_124m"], vocab=50258, layers=2)
    loads = unit_loads(shape, tp, 1)
    whole = sum_loads(list(loads))
    first, last = sum_loads(list(loads[:3])), sum_loads(list(loads[3:]))
    tied = unit_specs(shape)[-1].tied_parameters
    assert tied == 50258 * 768
    assert first.parameters + last.parameters == whole.parameters + tied // tp
    if tp == 1:
        assert whole.parameters == shape.num_parameters


def test_nothing_is_added_where_nothing_is_tied():
    loads = unit_loads(PRESETS["tiny"], 1, 1)
    cut = sum_loads(list(loads[:3])).parameters + sum_loads(list(loads[3:])).parameters
    assert cut == sum_loads(list(loads)).parameters
