from dataclasses import replace

import pytest

from launcher.config import LaunchConfig
from launcher.config.launch import HardwareConfig
from launcher.config.pipeline import CostsConfig, ScheduleConfig
from launcher.config.workload import ModelConfig
from launcher.resolve import resolve
from strategies.errors import PlanError
from strategies.schedules import find_schedule
from strategies.schedules.schedule import refuse_late, refuse_training

ASKED = {
    "pp": 4, "num_microbatches": 4, "vertical_sync": False, "clip": None, "on_nan": "stop",
    "precision": "32-true",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("pipedream_2bw", {"precision": "16-mixed"}, "precision=16-mixed .*=bf16-mixed"),
        (
            "pipedream",
            {},
            "num_microbatches=4 with .*pipedream.* num_microbatches=1 with .*batches=4 makes",
        ),
        ("pipedream", {"num_microbatches": 1, "clip": 1.0}, "gradient_clip_val=1 .* 3 backwards"),
        ("pipedream", {"num_microbatches": 1, "on_nan": "skip"}, "on_nan=skip"),
        ("pipedream", {"num_microbatches": 1, "tied": True}, "tied embeddings .*sync=true"),
    ],
)
def test_what_contradicts_training_without_a_flush_is_refused(name, more, message):
    with pytest.raises(PlanError, match=message):
        refuse_training(find_schedule(name), **(ASKED | more))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("1f1b", {"precision": "16-mixed", "clip": 1.0}),
        ("pipedream_2bw", {"clip": 1.0, "on_nan": "skip"}),
        ("pipedream", {"num_microbatches": 1, "vertical_sync": True, "clip": 1.0}),
        ("pipedream", {"num_microbatches": 1, "pp": 1, "clip": 1.0, "on_nan": "skip"}),
    ],
)
def test_the_rest_is_not(name, more):
    refuse_training(find_schedule(name), **(ASKED | more))


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("1f1b", {"synchronous_steps": 5}, "synchronous_steps=5: 1f1b ends every step .*2bw"),
        ("zb_v", {"error_feedback": 0.5}, "error_feedback=0.5: zb_v ends every step .*2bw"),
        ("pipedream", {"post_validation": True}, "post_validation=true: .* no flush .*zb_v"),
        ("pipedream", {"error_feedback": 1.0}, "error_feedback=1: .* one update late.*2bw"),
    ],
)
def test_remedies_are_refused_where_there_is_nothing_to_remedy(name, asked, message):
    with pytest.raises(PlanError, match=message):
        refuse_late(find_schedule(name), **asked)
    refuse_late(find_schedule(name))
    refuse_late(find_schedule("pipedream_2bw"), synchronous_steps=5, error_feedback=1.0)


def test_tied_embeddings_are_refused_before_ranks_start():
    config = LaunchConfig(
        mode="validate", pp=2, schedule=ScheduleConfig(name="pipedream"),
        model=ModelConfig(tie_embeddings=True),
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"share a matrix.*Try schedule.vertical_sync=true"):
        resolve(config)
    resolve(replace(config, schedule=ScheduleConfig(name="pipedream", vertical_sync=True)))


def test_versions_that_do_not_fit_are_refused_with_their_bytes():
    config = LaunchConfig(
        mode="validate", pp=2, num_microbatches=2, schedule=ScheduleConfig(name="pipedream_2bw"),
        costs=CostsConfig(name="analytic"), hardware=HardwareConfig(memory_gb=0.003),
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"for 2 versions of its weights, and hardware.memory_gb="):
        resolve(config)
