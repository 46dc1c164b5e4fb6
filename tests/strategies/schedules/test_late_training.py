import pytest

from strategies.errors import PlanError
from strategies.schedules import find_schedule
from strategies.schedules.schedule import refuse_training

ASKED = {
    "pp": 4, "num_microbatches": 4, "vertical_sync": False, "accumulation": 1, "clip": None,
    "on_nan": "stop", "precision": "32-true",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("pipedream_2bw", {"accumulation": 3}, "accumulate_grad_batches=3 .* num_microbatches=12"),
        ("pipedream", {"accumulation": 2}, "accumulate_grad_batches=2 .* schedule=pipedream_2bw"),
        ("pipedream_2bw", {"precision": "16-mixed"}, "precision=16-mixed .*=bf16-mixed"),
        ("pipedream", {}, "num_microbatches=4 with schedule=pipedream.* num_microbatches=1"),
        ("pipedream", {"num_microbatches": 1, "clip": 1.0}, "gradient_clip_val=1 .* 3 backwards"),
        ("pipedream", {"num_microbatches": 1, "on_nan": "skip"}, "on_nan=skip"),
    ],
)
def test_what_contradicts_training_without_a_flush_is_refused(name, more, message):
    with pytest.raises(PlanError, match=message):
        refuse_training(find_schedule(name), **(ASKED | more))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("1f1b", {"accumulation": 3, "precision": "16-mixed", "clip": 1.0}),
        ("pipedream_2bw", {"clip": 1.0, "on_nan": "skip"}),
        ("pipedream", {"num_microbatches": 1, "vertical_sync": True, "clip": 1.0}),
        ("pipedream", {"num_microbatches": 1, "pp": 1, "clip": 1.0, "on_nan": "skip"}),
    ],
)
def test_the_rest_is_not(name, more):
    refuse_training(find_schedule(name), **(ASKED | more))
