"""How tensors find their way from the stage that makes them to those that use them."""

from __future__ import annotations

from itertools import pairwise

from strategies.models.replay.layout import make_routes
from strategies.models.replay.path import Boundary, Cut

SPEC = None  # Routes do not look at it.


def cuts(num_stages, values, *, empty=()):
    """Stages of ten clock ticks; ``values``: name -> (made at, used at, changed)."""
    clocks = [10 * stage for stage in range(num_stages + 1)]
    for stage in empty:
        clocks[stage + 1 :] = [clock - 10 for clock in clocks[stage + 1 :]]
    ends = []
    for stage, clock in enumerate(clocks):
        alive = tuple(
            Boundary((born, 0, name), SPEC, None, False, tuple(uses), changed)
            for name, (born, uses, changed) in enumerate(values)
            if born <= clock < max(uses)
        )
        ends.append(Cut((clock, 0), alive if 0 < stage < num_stages else (), clock))
    return [
        (first, last if index < num_stages - 1 else None)
        for index, (first, last) in enumerate(pairwise(ends))
    ]


def ways(routes):
    """(source, target) -> names, as both ends see them."""
    given = {}
    for stage, (groups, (_, leave)) in enumerate(zip(routes.groups, routes.cuts, strict=True)):
        names = [boundary.key[2] for boundary in leave.tensors] if leave else []
        for target, count in groups:
            given[stage, target] = names[:count]
            names = names[count:]
        assert names == []
    for stage, (entry, _) in enumerate(routes.cuts):
        expected = [name for (_, target), names in sorted(given.items()) if target == stage
                    for name in names]  # fmt: skip
        assert [boundary.key[2] for boundary in entry.tensors] == expected
    return given


def test_a_tensor_goes_from_user_to_user_past_the_others():
    routes = make_routes(cuts(5, [(5, (15, 45), False), (15, (25,), False), (25, (35,), False),
                                  (35, (45,), False)]))  # fmt: skip
    assert ways(routes) == {(0, 1): [0], (1, 2): [1], (1, 4): [0], (2, 3): [2], (3, 4): [3]}
    assert routes.skips == ((1, 4),)


def test_two_tensors_of_one_way_keep_their_order_and_others_stand_behind():
    routes = make_routes(cuts(4, [(5, (35,), False), (6, (15,), False), (7, (36,), False)]))
    assert ways(routes) == {(0, 1): [1], (0, 3): [0, 2]}


def test_a_use_at_the_very_end_of_a_stage_is_its_own():
    # The cut lies right behind the operation at tick 20, which stage 1 runs.
    assert ways(make_routes(cuts(3, [(5, (20, 25), False)]))) == {(0, 1): [0], (1, 2): [0]}


def test_what_is_written_to_has_one_way_through_all():
    assert ways(make_routes(cuts(3, [(5, (25,), True)]))) == {(0, 1): [0], (1, 2): [0]}


def test_a_stage_without_layers_hands_on_what_it_gets():
    routes = make_routes(cuts(4, [(5, (25,), False)], empty=(1,)))
    assert ways(routes) == {(0, 1): [0], (1, 3): [0]}


def test_other_modes_use_the_given_links_only():
    values = [(5, (45,), False), (6, (35,), False)]
    assert ways(make_routes(cuts(5, values), allowed=((0, 4),))) == {
        (0, 1): [1], (0, 4): [0], (1, 2): [1], (2, 3): [1],
    }  # fmt: skip
    assert make_routes(cuts(5, values), allowed=()).skips == ()
