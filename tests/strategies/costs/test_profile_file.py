import json
from dataclasses import replace

import pytest

from strategies.costs.profile_file import (
    Link,
    Machine,
    Profile,
    Seconds,
    SizeProfile,
    UnitProfile,
    dump_profile,
    parse_profile,
    unit_classes,
)
from strategies.errors import CostError


def seconds(value):
    return Seconds(value, 2 * value, value, value, value, value / 10)


def unit(value, size=100):
    return UnitProfile(seconds(value), size, size // 2, size // 4, size // 10, size // 5)


MACHINE = Machine("cpu", None, 2, 1, "2.13.0")
PROFILE = Profile(
    machine=MACHINE,
    model=(("hidden", "128"), ("precision", "32-true")),
    classes=("embedding", "layers.*", "head"),
    sizes=(
        (1, SizeProfile(seconds(0.5), (unit(0.0), unit(2.0), unit(1.0)))),
        (4, SizeProfile(seconds(0.5), (unit(0.0), unit(8.0, 400), unit(4.0, 400)))),
    ),
    rest_s=0.25,
    messages=Link(1e-4, 1e9),
    reductions=Link(2e-4, 2e9),
)


def test_a_file_says_all_of_it():
    assert parse_profile(dump_profile(PROFILE), label="p.json") == PROFILE
    alone = replace(PROFILE, messages=None, reductions=None)
    assert parse_profile(dump_profile(alone), label="p.json") == alone


def test_between_two_sizes_lies_a_straight_line():
    middle = PROFILE.at(2)
    assert middle.units[1].seconds.forward == pytest.approx(4.0)
    assert middle.units[1].saved_bytes == 200
    assert PROFILE.at(4) == PROFILE.sizes[1][1]


@pytest.mark.parametrize("size", [5, 100])
def test_beyond_what_was_measured_nothing_is_known(size):
    with pytest.raises(CostError, match=rf"has microbatch sizes \[1,4\].*\[1,4,{size}\]"):
        PROFILE.at(size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no profile"),
        ("[1]", "is no profile"),
        ('{"format": "other"}', "is no profile"),
        ('{"format": "foldpipe-profile", "version": 7}', "version 7, but version 1 is read"),
        ('{"format": "foldpipe-profile", "version": 1}', r"damaged profile \(KeyError"),
    ],
)
def test_other_files_are_refused(text, message):
    with pytest.raises(CostError, match=message):
        parse_profile(text, label="p.json")


def test_a_profile_without_figures_is_refused():
    content = json.loads(dump_profile(PROFILE))
    content["sizes"]["4"]["units"].pop()
    with pytest.raises(CostError, match="one entry per class"):
        parse_profile(json.dumps(content), label="p.json")


def test_units_of_one_name_and_size_are_one_class():
    units = [("e", 1), ("layers.0.a", 2), ("layers.1.a", 2), ("layers.2.a", 3)]
    assert unit_classes(units) == ("e", "layers.*.a", "layers.*.a", "layers.*.a#2")
