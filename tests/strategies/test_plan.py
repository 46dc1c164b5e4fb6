import pytest

from strategies.errors import PlanError
from strategies.plan import Plan, num_buckets


def test_the_smallest_plan_is_one_rank_and_one_microbatch():
    assert Plan() == Plan("1f1b", 1, 1, None, None, "grad_reduce", 1)


def test_an_unknown_overlap_names_those_there_are():
    with pytest.raises(PlanError) as error:
        Plan(overlap="sometimes")
    assert str(error.value) == (
        "overlap=sometimes is unknown. Try overlap=grad_reduce or overlap=none or overlap=zero1."
    )


@pytest.mark.parametrize(
    ("num_bytes", "bucket_mb", "expected"),
    [
        (0, 25, 1),
        (1, 25, 1),
        (25 * 2**20, 25, 1),
        (25 * 2**20 + 1, 25, 2),
        (100 * 2**20, 25, 4),
        (3 * 2**20, 0.5, 6),
    ],
)
def test_a_bucket_holds_at_most_its_size(num_bytes, bucket_mb, expected):
    assert num_buckets(num_bytes, bucket_mb) == expected
