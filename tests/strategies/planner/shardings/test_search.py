"""The search against every combination of choices."""

import random
from itertools import product

import pytest

from strategies.costs.hardware import Hardware
from strategies.planner.shardings.operators import (
    Choice,
    Message,
    Operator,
    OperatorGraph,
    Value,
    dump_graph,
    parse_graph,
)
from strategies.planner.shardings.prices import Prices
from strategies.planner.shardings.search import Search

MACHINE = Hardware("test", 1e9, 1.0, 1.0, 1e9, 1e8, 1e-5, 1e8, 1e-5, 8)
STATES = ("R", "S0", "S1")


def graph_of(seed: int, *, tied: bool = False, wide: bool = False) -> OperatorGraph:
    """A random graph of a few operators; nothing is cut in the first choice of each."""
    draw = random.Random(seed)
    count = draw.randint(5, 7)
    values: list[Value] = []
    operators: list[Operator] = []
    for number in range(count):
        most = min(len(values), 2)
        wanted = draw.randint(1, most) if most else 0
        near = range(len(values)) if wide else range(max(0, len(values) - 2), len(values))
        inputs = tuple(draw.sample(list(near), min(wanted, len(near))))
        choices = [Choice(("R",) * len(inputs), ("R",), "replicated")]
        for _ in range(draw.randint(1, 3)):
            choices.append(
                Choice(
                    tuple(draw.choice(("R", "E", "S0", "S1")) for _ in inputs),
                    (draw.choice(STATES),),
                    "column",
                    work=0.5,
                    weights=0.5,
                    split_dim=draw.randint(0, 1),
                    messages=(Message("sum", draw.randint(1, 50) * 1e3),),
                )
            )
        values.append(Value(draw.randint(1, 100) * 1e3))
        layer = number == 0 or draw.random() < 0.6
        own = (f"w{number}",) if layer else ()
        if tied and number == count - 1:
            own = ("w0",)
        operators.append(
            Operator(
                f"op{number}",
                "linear",
                "linear" if layer or own else None,
                inputs,
                (number,),
                tuple(dict.fromkeys(choices)),
                flops=draw.randint(1, 100) * 1e4,
                moved=1e3,
                parameters=own,
                weights=1e4 if own else 0.0,
            )
        )
    return OperatorGraph("test", 2, 1, tuple(values), tuple(operators))


def exhaustive(graph: OperatorGraph, prices: Prices) -> float:
    """The least seconds of all combinations of choices that fit together."""
    best = float("inf")
    for picks in product(*(range(len(o.choices)) for o in graph.operators)):
        chosen = [o.choices[p] for o, p in zip(graph.operators, picks, strict=True)]
        made = {o.outputs[0]: c.outputs[0] for o, c in zip(graph.operators, chosen, strict=True)}
        needs = [
            (value, state)
            for o, c in zip(graph.operators, chosen, strict=True)
            for value, state in zip(o.inputs, c.inputs, strict=True)
        ]
        fits = all(made[v] == ("R" if state == "E" else state) for v, state in needs)
        for group in graph.tied():
            fits = fits and len({(chosen[n].split_dim, chosen[n].segments) for n in group}) == 1
        if fits:
            pairs = zip(graph.operators, chosen, strict=True)
            seconds = sum(prices.of(o, c).seconds for o, c in pairs)
            entered = {value for value, state in needs if state == "E"}
            seconds += sum(prices.entrance(graph.values[value])[0] for value in entered)
            best = min(best, seconds)
    return best


@pytest.mark.parametrize("seed", range(16))
def test_the_search_finds_what_trying_everything_finds(seed):
    graph = graph_of(seed, wide=seed % 3 == 0)
    prices = Prices(MACHINE, 2)
    found = Search(graph, prices).best()
    assert found.seconds == pytest.approx(exhaustive(graph, prices), rel=1e-9)


@pytest.mark.parametrize("seed", range(20, 26))
def test_weights_that_two_operators_share_are_cut_alike(seed):
    graph = graph_of(seed, tied=True)
    prices = Prices(MACHINE, 2)
    found = Search(graph, prices).best()
    assert found.seconds == pytest.approx(exhaustive(graph, prices), rel=1e-9)


def test_a_banned_choice_is_not_taken():
    graph = graph_of(1)
    search = Search(graph, Prices(MACHINE, 2))
    taken = search.best().picks
    number = next(n for n, pick in enumerate(taken) if len(graph.operators[n].choices) > 1)
    assert search.best({(number, taken[number])}).picks[number] != taken[number]


def test_a_graph_survives_its_file():
    graph = graph_of(5)
    assert parse_graph(dump_graph(graph)) == graph
