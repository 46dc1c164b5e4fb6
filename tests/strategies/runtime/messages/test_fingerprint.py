"""What ranks lay beside each other, and how a difference is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from strategies.compiler import compile_plan
from strategies.costs.analytic import AnalyticCosts
from strategies.plan import Plan, Recompute
from strategies.runtime.messages.fingerprint import (
    checksums,
    difference,
    options_print,
    program_print,
    shared_print,
    versions_print,
    weights_print,
)
from tests.strategies.costs.test_analytic import MACHINE, STAGES


def test_a_difference_names_ranks_hosts_and_values():
    common = {"torch": "2.13.0", "pp": "2"}
    gathered = [
        (0, "a", common | {"seed": "1"}),
        (1, "a", common | {"seed": "1", "torch": "2.11.0"}),
        (2, "b", common),
    ]
    assert difference(gathered, "versions") == (
        "the ranks do not have the same versions, so nothing was trained:\n"
        "  torch: 2.13.0 on ranks 0, 2, 2.11.0 on rank 1\n"
        "  seed: 1 on ranks 0, 1, nothing on rank 2\n"
        "(ranks 0, 1 on a; rank 2 on b) Give all of them the same code, packages, configuration "
        "and data."
    )
    assert difference([gathered[0], (1, "b", gathered[0][2])], "versions") is None


def test_a_name_may_concern_only_those_who_have_it():
    gathered = [
        (0, "a", {"replica 0, microbatch 0": "[8, 6]"}),
        (1, "a", {"replica 1, microbatch 0": "[8, 7]"}),
        (2, "a", {"replica 0, microbatch 0": "[8, 6]"}),
    ]
    assert difference(gathered, "first batch", partial=True) is None
    assert difference(gathered, "first batch") is not None
    gathered.append((3, "a", {"replica 1, microbatch 0": "[8, 6]"}))
    assert "\n  replica 1, microbatch 0: [8, 7] on rank 1, [8, 6] on rank 3\n" in (
        difference(gathered, "first batch", partial=True) or ""
    )


def test_of_many_differences_the_first_few_are_shown():
    found = difference(
        [(0, "a", {str(n): "1" for n in range(9)}), (1, "a", {str(n): "2" for n in range(9)})], "x"
    )
    assert "\n  4: 1 on rank 0, 2 on rank 1\n  and 4 more\n" in found


def test_versions_are_those_that_run():
    found = versions_print()
    assert torch.__version__.startswith(found["torch"])
    assert set(found) == {
        "python",
        "byte order",
        "torch",
        "lightning",
        "numpy",
        "foldpipe-launcher",
    }


def test_equal_plans_print_alike_and_every_field_counts():
    plan = Plan("1f1b", pp=2, num_microbatches=4, recompute=Recompute("full"))
    assert options_print("", plan) == options_print("", replace(plan))
    other = options_print("", replace(plan, num_microbatches=8))
    changed = {name for name, value in options_print("", plan).items() if other[name] != value}
    assert changed == {"num_microbatches"}


def test_what_costs_keep_of_earlier_questions_does_not_count():
    asked, fresh = (AnalyticCosts(STAGES, MACHINE) for _ in range(2))
    asked.table(compile_plan(Plan("1f1b", pp=len(STAGES), num_microbatches=4)).train)
    assert shared_print({"costs": asked}) == shared_print({"costs": fresh})


@pytest.mark.parametrize(
    ("one", "two"),
    [({3, 1, 2}, {1, 2, 3}), ({"b": 1, "a": 2}, {"a": 2, "b": 1}), (object(), object())],
)
def test_what_has_no_order_and_no_address_prints_alike(one, two):
    assert shared_print({"x": one}) == shared_print({"x": two})


def test_long_values_travel_as_hashes_that_still_differ():
    one, two = (shared_print({"x": list(range(n))})["x"] for n in (100, 101))
    assert len(one) < 40
    assert one != two


def test_shape_type_and_freezing_of_weights_count():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = weights_print(module)
    assert set(before) == {"weights of 0", "weights of 1"}
    module[1].weight.requires_grad_(False)
    frozen = weights_print(module)
    assert {name for name in before if before[name] != frozen[name]} == {"weights of 1"}
    assert weights_print(module.half())["weights of 0"] != before["weights of 0"]


def test_programs_print_alike_exactly_if_they_are_alike():
    train = compile_plan(Plan("1f1b", pp=2, num_microbatches=4)).train
    assert program_print(train) == program_print(replace(train))
    row = train.ranks[0]
    swapped = replace(train, ranks=((row[1], row[0], *row[2:]), *train.ranks[1:]))
    assert program_print(swapped) != program_print(train)
    forward = compile_plan(Plan("1f1b", pp=2, num_microbatches=4)).forward
    assert program_print(forward) != program_print(train)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_sums_over_bits_are_of_complex_numbers_too(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1 + 2j], [3 + 4j]], dtype=dtype)
    plain, turned, conjugate = (
        checksums({"a": value})["a"] for value in (rows, rows.flip(0), rows.conj().resolve_conj())
    )
    assert plain[0] == turned[0]
    assert len({plain, turned, conjugate}) == 3
