"""What torch keeps of compiled units: shared by layers of a kind, and never given up for others."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch._dynamo.utils import counters

from strategies.models.stage_model import compile_units


def graphs(units: list[nn.Module], limit: int) -> int:
    """How many graphs were compiled for one call of each."""
    torch._dynamo.reset()
    counters.clear()
    inputs = [torch.randn(3, unit.in_features, requires_grad=True) for unit in units]
    expected = [unit(data) for unit, data in zip(units, inputs, strict=True)]
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=limit):
        warnings.simplefilter("ignore")
        compile_units(units)
        found = [unit(data) for unit, data in zip(units, inputs, strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    return counters["stats"]["unique_graphs"]


def test_layers_of_one_kind_are_compiled_once():
    assert graphs([nn.Linear(4, 4) for _ in range(5)], limit=1) == 1


def test_layers_of_many_kinds_are_all_compiled():
    # Torch's limit is for the versions of one function; more of them would run uncompiled.
    assert graphs([nn.Linear(4, size) for size in (2, 3, 5)], limit=1) == 3


def test_names_and_owners_choices_stay():
    own, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own.compile(backend="eager")
    kept = own._compiled_call_impl
    module = nn.ModuleDict({"own": own, "other": other})
    names = [name for name, _ in module.named_parameters()]
    compile_units(module.values())
    assert own._compiled_call_impl is kept
    assert other._compiled_call_impl is not None
    assert [name for name, _ in module.named_parameters()] == names == [*module.state_dict()]
