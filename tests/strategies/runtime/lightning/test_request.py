"""A request in keywords, and as a plan with its options."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from strategies import PipelineStrategy
from strategies.errors import PlanError
from strategies.plan import Options, Plan, Recompute, ScheduleFile
from strategies.runtime.lightning.request import Keywords, check_request

CSV = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"


def request(strategy):
    return strategy._plan, strategy._options


def test_every_field_of_plan_and_options_has_its_keyword():
    wanted = [entry.name for kind in (Plan, Options) for entry in fields(kind)]
    # The model says which stages it skips and which exchange tokens, the Trainer how many batches
    # make an update.
    others = ["skips", "exchanges", "accumulation"]
    assert sorted(["pp", *Keywords.__annotations__, *others]) == sorted(wanted)


def test_keywords_and_a_plan_with_options_ask_for_the_same():
    keywords = PipelineStrategy(
        3,
        schedule="interleaved_1f1b",
        stages_per_rank=2,
        recompute="full",
        buckets=(1, 2, 3, 4, 5, 6),
        tp=2,
        bucket_mb=1.5,
        grad_dtype="bf16",
        seed=3,
        on_nan="skip",
    )
    plan = Plan(
        "interleaved_1f1b",
        pp=3,
        num_microbatches=6,
        stages_per_rank=2,
        buckets=(1, 2, 3, 4, 5, 6),
        recompute=Recompute("full"),
    )
    options = Options(tp=2, bucket_mb=1.5, grad_dtype="bf16", seed=3, on_nan="skip")
    assert request(keywords) == (plan, options)
    assert request(PipelineStrategy(plan=plan, options=options)) == (plan, options)
    assert request(PipelineStrategy(plan=plan)) == (plan, Options())
    assert request(PipelineStrategy()) == (Plan(num_microbatches=2), Options())
    late = request(PipelineStrategy(4, schedule="pipedream"))
    assert late == (Plan("pipedream", 4, num_microbatches=1), Options())


def test_keywords_may_leave_to_us_what_a_plan_has_to_say(tmp_path):
    (tmp_path / "my.csv").write_text(CSV)
    path = str(tmp_path / "my.csv")
    plan, _ = request(PipelineStrategy(2, schedule="custom", file=path))
    assert plan == Plan("custom", 2, 2, file=ScheduleFile(path, CSV))
    assert request(PipelineStrategy(2, schedule="foldx", group="auto"))[0].group is None
    with pytest.raises(PlanError, match="does not choose its group"):
        PipelineStrategy(2, group="auto")
    with pytest.raises(PlanError, match=r"recompute=some is unknown"):
        PipelineStrategy(recompute="some")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"plan": Plan(), "pp": 2}, "pp=..."),
        ({"plan": Plan(), "options": Options(), "tp": 2, "seed": 0}, "tp=..., seed=..."),
        ({"options": Options(), "schedule": "gpipe"}, "schedule=..."),
        ({"options": Options()}, "options=... alone"),
    ],
)
def test_a_request_is_not_said_in_two_ways(given, named):
    message = f"PipelineStrategy({named}): a request is either keywords, or a plan"
    with pytest.raises(PlanError, match=re.escape(message)):
        PipelineStrategy(**given)


def test_a_keyword_that_does_not_exist_is_a_type_error_as_everywhere():
    for word, fix in {
        "num_micro_batches": "Try num_microbatches=8.", "chunks": "Try num_microbatches=8.",
        "num_microbatch": "Did you mean num_microbatches?", "stages": "Try pp=4.",
        "devices": "Try Trainer(devices=...), which takes it.", "zzz": "It takes pp, plan,",
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{word}'") as told:
            PipelineStrategy(**{word: 2})
        assert isinstance(told.value, PlanError)
        assert fix in str(told.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"plan": 3}, "PipelineStrategy(plan=3): expected a Plan."),
        ({"plan": Plan(), "options": "x"}, "expected a Options."),
        ({"plan": Plan(pp=0)}, "PipelineStrategy(pp=0): pp is at least 1."),
        ({"plan": Plan(), "options": Options(tp=0)}, "tp is at least 1"),
        ({"plan": Plan("chimera", pp=3)}, "pp=3 is odd"),
        ({"metadata": 3}, "expected names and values"),
        ({"configuration": [1]}, "expected names and values"),
        ({"pp": 10**30}, "pp is at most 65536. Try pp=2."),
        ({"num_microbatches": 10**12}, "at most 1000000"),
        ({"seed": 2**80}, "at most 4294967295"),
        ({"pipeline_layers": ""}, "is empty. Try pipeline_layers='net.layers'."),
        ({"memory_bytes": "4GB"}, "Try memory_bytes=4000000000."),
        ({"pairs": True}, "ep=1 has none. Try ep=2 with a model"),
        ({"pp": 2, "buckets": (1,)}, "has 1 numbers, but there are 2 stages"),
        ({"pp": 2, "schedule": "zb_h1", "split_backward": True}, "splits its backwards by itself"),
        ({"schedule": "qqqqqq"}, "Try schedule=1f1b, or another of"),
    ],
)
def test_what_could_only_fail_in_the_midst_of_a_fit_is_refused_at_once(words, message):
    with pytest.raises(PlanError) as refused:
        PipelineStrategy(**words)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"pp": 0}, "PipelineStrategy(pp=0): pp is at least 1. Try pp=2."),
        ({"pp": "2"}, "PipelineStrategy(pp='2'): expected a whole number. Try pp=2."),
        ({"pp": True}, "expected a whole number"),
        ({"pp": 2.0}, "expected a whole number"),
        ({"dp": "all"}, "expected a whole number or auto. Try dp='auto'."),
        ({"tp": 0}, "tp is at least 1"),
        ({"num_microbatches": 0}, "num_microbatches is at least 1"),
        ({"num_microbatches": 2.5}, "expected a whole number or None"),
        ({"pp": 3, "schedule": "chimera"}, "pp=3 is odd: chimera"),
        ({"schedule": "zb_v", "stages_per_rank": 3}, "zb_v runs 2 per rank"),
        ({"bucket_mb": 0}, "bucket_mb is above 0"),
        ({"timeout_s": float("nan")}, "expected a number. Try timeout_s=1800.0."),
        ({"backend": "mpi"}, "expected auto or shared or gloo"),
        ({"grad_dtype": "fp16"}, "expected fp32 or bf16"),
        ({"check_batches": "no"}, "expected True or False"),
        ({"costs": 3}, "expected costs such as UniformCosts() or None"),
        ({"recompute": 1}, "expected a Recompute or none or full"),
        ({"pp": 2, "units_per_stage": (1, 2, 3)}, "has 3 counts, but there are 2 stages"),
        ({"pp": 2, "units_per_stage": [1, -2]}, "units_per_stage is at least 0"),
        ({"sequence_parallel": True}, "Try tp=2"),
        ({"dp": 6, "ep": 4}, "ep=4 does not divide dp=6 times tp=1, the 6 ranks"),
        ({"dp": 3, "tp": 2, "ep": 4}, "Try ep=3, or dp=2."),
        ({"dp": 3, "tp": 2, "ep": 2, "expert_tp": True}, "Try ep=1, or dp=2."),
        ({"tp": 2, "sequence_parallel": True, "expert_tp": True}, "need the same tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_told_where_it_stands(words, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        PipelineStrategy(**words)


def test_a_list_is_as_good_as_a_tuple():
    assert PipelineStrategy(2, units_per_stage=[1, 2])._options.units_per_stage == (1, 2)


@pytest.mark.parametrize(("schedule", "stages"), [("chimera", 2), ("dualpipe", 2), ("zb_v", 4)])
def test_stages_with_two_owners_are_counted_once(schedule, stages):
    made = PipelineStrategy(2, schedule=schedule, num_microbatches=8, units_per_stage=[3] * stages)
    again = PipelineStrategy(plan=made._plan, options=made._options)
    assert again._options.units_per_stage == (3,) * stages
    with pytest.raises(PlanError, match=f"has 3 counts, but there are {stages} stages"):
        PipelineStrategy(2, schedule=schedule, num_microbatches=8, units_per_stage=[3] * 3)


def test_stages_of_a_file_are_counted_as_it_places_them():
    text = "0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    words = {"schedule": "custom", "file": ScheduleFile("my.csv", text), "num_microbatches": 2}
    made = PipelineStrategy(2, **words, units_per_stage=(3, 2, 1), buckets=(1, 2, 1))
    assert made._options.units_per_stage == (3, 2, 1)
    with pytest.raises(PlanError, match="has 2 counts, but there are 3 stages"):
        PipelineStrategy(2, **words, units_per_stage=(3, 3))


@pytest.mark.parametrize("buckets", [0, 3, (1, 2), None])
def test_a_plan_may_have_one_number_of_buckets_for_all_stages(buckets):
    """As the launcher's own plans have, none where there is nobody to reduce with."""
    plan = Plan("1f1b", 2, 4, buckets=buckets)
    assert check_request(plan, Options()) == (plan, Options())
