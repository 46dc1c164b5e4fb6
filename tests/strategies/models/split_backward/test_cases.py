"""The gradients of split backwards are those of full ones, for stages of many kinds."""

from __future__ import annotations

import pytest

from tests.strategies.models.split_backward.cases import CASES
from tests.strategies.models.split_backward.harness import (
    FIFO,
    SHUFFLED,
    compare,
    full,
    split,
    start,
)


@pytest.mark.parametrize(
    "order",
    [pytest.param(FIFO, marks=pytest.mark.full, id="fifo"), pytest.param(SHUFFLED, id="shuffled")],
)
@pytest.mark.parametrize("name", CASES)
def test_split_backward_gives_the_gradients_of_a_full_one(name, order):
    case = CASES[name]
    ours, theirs = start(case)
    full(theirs, case)
    split(ours, case, order)
    compare(ours, theirs)
    assert ours.deferred == case.waits


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_ready_once_per_microbatch_and_complete(name):
    case = CASES[name]
    ours, theirs = start(case)
    counts: dict[str, int] = {}
    expected: dict[str, int] = {}

    def count(run, into):
        for key in run.views:
            p = run.module.get_parameter(key)
            p.register_post_accumulate_grad_hook(lambda _, key=key: tally(into, key))

    def tally(into, key):
        into[key] = into.get(key, 0) + 1

    count(ours, counts)
    count(theirs, expected)
    full(theirs, case)
    names = {id(p): key for key, p in ours.module.named_parameters()}
    split(ours, case, FIFO, ready=lambda p: tally(counts, names[id(p)]))
    compare(ours, theirs)
    assert counts == expected


@pytest.mark.parametrize("name", CASES)
def test_hooks_of_parameters_run_once_per_microbatch_when_nobody_waits_for_them(name):
    case = CASES[name]
    ours, theirs = start(case)
    seen = []
    for run in (ours, theirs):
        counts: dict[str, int] = {}
        seen.append(counts)
        for key in run.views:

            def hook(p, key=key, counts=counts):
                counts[key] = counts.get(key, 0) + 1

            run.module.get_parameter(key).register_post_accumulate_grad_hook(hook)
    full(theirs, case)
    split(ours, case, SHUFFLED)
    compare(ours, theirs)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", CASES)
def test_gradients_pass_hooks_and_the_engine_where_asked(name):
    case = CASES[name]
    ours, theirs = start(case)
    for run in (ours, theirs):
        for key in run.views:
            run.module.get_parameter(key).register_hook(lambda grad: grad * 3)
    full(theirs, case)
    split(ours, case, FIFO)
    compare(ours, theirs)
