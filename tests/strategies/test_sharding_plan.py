"""Found plans as data: which layer a row means, and what survives a file."""

import json

import pytest

from strategies.errors import ModelError
from strategies.sharding_plan import LayerSharding, ShardingPlan, plan_from_json

PLAN = ShardingPlan(
    tp=2,
    layers=(
        LayerSharding(
            "layers.*.query", "column", "linear", 0, block=64, whole_output=False, count=4
        ),
        LayerSharding("head", "vocabulary", "linear", 0),
    ),
    unknown=(("aten.sort", "layers.0", 1e-3),),
)


def test_a_pattern_names_one_part_for_each_star():
    assert PLAN.layer("layers.11.query") == PLAN.layers[0]
    assert PLAN.layer("layers.1.more.query") is None


def test_a_plan_survives_json():
    assert plan_from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_a_plan_of_other_fields_is_refused():
    with pytest.raises(ModelError, match="a damaged sharding plan"):
        plan_from_json({**PLAN.to_json(), "more": 1})


def test_a_plan_without_a_cut_is_not_worth_it():
    assert PLAN.worth
    assert not ShardingPlan(2, (LayerSharding("a", "replicated"),)).worth
