"""What microbatches draw, put together, is what one run draws for all rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.models.replay.rows.draws import BatchDraws, RunDraws
from strategies.models.state import Generators

SIZES = (3, 2, 2)
ROWS = sum(SIZES)


class Between(TorchFunctionMode):
    """A step between its layers."""

    def __init__(self, draws: RunDraws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.draws.draw(func, args, kwargs or {})


def batch_draws(seed: int = 5, **more: Any) -> BatchDraws:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return BatchDraws(nn.Identity(), Generators.now(), SIZES, **more)


def run(draws: BatchDraws, microbatch: int | None, step: Callable[[Tensor], Any]) -> Any:
    x = torch.arange(4.0 * ROWS).reshape(ROWS, 4)
    x = x if microbatch is None else x.split(SIZES)[microbatch]
    one = draws.run(microbatch)
    with one.seeding(), Between(one):
        result = step(x)
    one.end()
    return result


def of_stock(step: Callable[[Tensor], Any]) -> Any:
    batch_draws()
    return step(torch.arange(4.0 * ROWS).reshape(ROWS, 4))


def twice(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What is drawn behind a draw shows that as many numbers were taken."""
    return lambda x: torch.cat([step(x).reshape(len(x), -1).double(), torch.rand(len(x), 1)], 1)


def in_place(x: Tensor) -> Tensor:
    made = torch.zeros(len(x), 3)
    made.uniform_()
    return made


BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(len(x), 2),
    "randn": lambda x: torch.randn((len(x), 2)),
    "randn size": lambda x: torch.randn(size=(len(x),)),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(0, 50, (len(x),)),
    "randint high": lambda x: torch.randint(len(x), (len(x),)) * 0,
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, (len(x), 2)),
    "broadcast": lambda x: torch.distributions.Normal(x[0] * 0, torch.ones_like(x)).rsample(),
    "in place": in_place,
    "init": lambda x: nn.init.normal_(torch.empty(len(x), 3)),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(torch.full((len(x), 1), 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones(len(x), 9), 2),
    "beta": lambda x: torch.distributions.Beta(0.4, 0.4).sample((len(x),)),
    "gamma": lambda x: torch.distributions.Gamma(torch.ones(len(x)), 1.0).sample(),
    "poisson": lambda x: torch.poisson(torch.ones_like(x)),
    "gumbel": lambda x: functional.gumbel_softmax(torch.zeros_like(x)),
    "second dimension": lambda x: torch.randn(1, len(x), 5).transpose(0, 1),
    "own generator": lambda x: torch.rand(
        len(x), 2, generator=torch.Generator().manual_seed(len("x"))
    ),
}


@pytest.mark.parametrize("kind", BY_ROW)
def test_microbatches_have_their_rows_of_what_is_drawn_for_all(kind: str) -> None:
    step = twice(BY_ROW[kind])
    draws = batch_draws()
    parts = [run(draws, number, step) for number in range(len(SIZES))]
    assert torch.equal(torch.cat(parts), of_stock(step))
    assert draws.after is not None and torch.equal(draws.after[0].cpu, Generators.now().cpu)


def test_rows_go_round_among_replicas() -> None:
    torch.manual_seed(5)
    every = torch.rand(2 * ROWS, 2)
    for replica in range(2):
        draws = batch_draws(replicas=2, replica=replica)
        parts = [run(draws, number, BY_ROW["rand"]) for number in range(len(SIZES))]
        assert torch.equal(torch.cat(parts), every[replica::2])


def test_single_numbers_are_the_batchs() -> None:
    def step(x: Tensor) -> Any:
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return [float(share), float(torch.rand(1)), *torch.randperm(9).tolist()]

    draws = batch_draws()
    assert [run(draws, number, step) for number in range(3)] == 3 * [of_stock(step)]
    assert not draws.own_drawn


@pytest.mark.parametrize(
    "step",
    [lambda x: torch.randn(2 * len(x), 5)[:4], lambda x: torch.randperm(len(x)).double()[:2]],
    ids=["views", "permutation"],
)
def test_what_belongs_to_no_row_for_sure_is_each_microbatchs_own(
    step: Callable[[Tensor], Tensor],
) -> None:
    seeds = range(6)
    drawn = [[run(batch_draws(seed), number, step) for number in (0, 1)] for seed in seeds]
    assert any(not torch.equal(first, second) for first, second in drawn)
    again = [[run(batch_draws(seed), number, step) for number in (0, 1)] for seed in seeds]
    assert all(torch.equal(a, b) for x, y in zip(drawn, again, strict=True) for a, b in zip(x, y))  # noqa: B905
    # What is drawn behind it is the batch's again.
    draws = batch_draws()
    behind = [run(draws, m, lambda x: (step(x), torch.rand(len(x)))[1]) for m in range(3)]
    assert torch.equal(torch.cat(behind), of_stock(lambda x: (step(x), torch.rand(len(x)))[1]))
    assert draws.own_drawn


def test_python_and_numpy_begin_each_microbatch_where_the_batch_began() -> None:
    def step(x: Tensor) -> Any:
        return random.random(), np.random.rand()

    draws = batch_draws()
    assert {run(draws, number, step) for number in range(3)} == {of_stock(step)}
    assert draws.after is not None and draws.after[0].are_now(host_only=True)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.rand(len(x), 2)


def forked(x: Tensor) -> Tensor:
    before = torch.rand(len(x), 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        inside = torch.rand(len(x), 2)
    return before + inside + torch.rand(len(x), 2)


@pytest.mark.parametrize("step", [seeded, forked])
def test_seeds_that_a_step_sets_are_those_of_its_draws(step: Callable[[Tensor], Tensor]) -> None:
    draws = batch_draws()
    parts = [run(draws, number, twice(step)) for number in range(3)]
    assert torch.equal(torch.cat(parts), of_stock(twice(step)))
    assert draws.after is not None and torch.equal(draws.after[0].cpu, Generators.now().cpu)
    assert torch.manual_seed.__module__ == "torch.random"


def test_layers_do_not_draw_from_it() -> None:
    draws = batch_draws()
    one = draws.run(0)
    state = torch.get_rng_state()
    one.draw(torch.rand, (SIZES[0],), {})
    assert torch.equal(torch.get_rng_state(), state)


def test_where_generators_stand_is_read_as_it_was_written() -> None:
    batch_draws()
    there = Generators.now()
    for host in (False, True):
        batch_draws(seed=6)
        here = Generators.now()
        read = Generators.read(there.written(host=host))
        assert torch.equal(read.cpu, there.cpu)
        expected = there if host else here
        assert read.marks()[1:] == expected.marks()[1:]
        read.put_back()
        assert (random.random() == random.Random(5).random()) == host
