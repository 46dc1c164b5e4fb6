import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.workloads.data.split import Split, split_blocks
from strategies.errors import DataError, PlanError


def test_validation_is_the_end_and_one_token_is_only_a_target():
    assert split_blocks(101, sequence=10) == Split(range(9), range(9, 10))
    assert split_blocks(100, sequence=10, val_fraction=0.3) == Split(range(6), range(6, 9))
    assert split_blocks(101, sequence=10, val_fraction=0) == Split(range(10), range(10, 10))


@pytest.mark.parametrize(
    ("num_tokens", "options", "message"),
    [
        (
            0,
            {},
            "corpus has 0 tokens, but one sequence with its targets takes model.sequence + 1 "
            "= 33. Try a longer text, or data=stdlib.",
        ),
        (
            32,
            {},
            "corpus has 32 tokens, but one sequence with its targets takes model.sequence + 1 "
            "= 33. Try model.sequence=15,",
        ),
        (
            97,
            {"batch_size": 4},
            "corpus has 2 training sequences of 32 tokens, but one step takes 4 "
            "(4 per replica * dp=1). Try model.sequence=2,",
        ),
        (
            641,
            {"batch_size": 2, "num_replicas": 2},
            "corpus has 2 validation sequences of 32 tokens (data.val_fraction=0.1 of 20), but one "
            "batch takes 4 (2 per replica * dp=2). Try data.val_fraction=0.2.",
        ),
        (257, {"batch_size": 6}, "Try model.sequence=4,"),
        (257, {"batch_size": 6, "val_fraction": 0}, None),
    ],
)
def test_too_little_data_is_refused_with_what_would_work(num_tokens, options, message):
    if message is None:
        assert len(split_blocks(num_tokens, sequence=32, **options).train) == 8
        return
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        split_blocks(num_tokens, sequence=32, label="corpus", **options)
    tried = re.search(r"Try (?:model|data)[.](\w+)=([0-9.]*[0-9])", str(caught.value))
    if tried:
        value = float(tried[2]) if "." in tried[2] else int(tried[2])
        split_blocks(num_tokens, **{"sequence": 32, **options, tried[1]: value})


def test_an_incomplete_validation_batch_is_fine_when_asked_for():
    options = {"sequence": 32, "batch_size": 4}
    with pytest.raises(DataError):
        split_blocks(641, **options)
    assert len(split_blocks(641, full_batches=False, **options).validation) == 2


def test_numbers_out_of_range_are_refused():
    for options in ({"val_fraction": 1.0}, {"val_fraction": -0.1}, {"batch_size": 0}):
        with pytest.raises(PlanError):
            split_blocks(1000, sequence=10, **options)
    with pytest.raises(PlanError, match=r"model\.sequence=0"):
        split_blocks(1000, sequence=0)


@given(
    st.integers(0, 5000),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(1, 4),
    st.floats(0, 0.9),
)
def test_both_parts_are_disjoint_and_fill_a_batch_or_it_is_refused(
    n, sequence, batch, dp, fraction
):
    try:
        split = split_blocks(
            n, sequence=sequence, batch_size=batch, num_replicas=dp, val_fraction=fraction
        )
    except DataError:
        return
    assert split.train.start == 0
    assert split.train.stop == split.validation.start
    assert split.validation.stop * sequence + 1 <= n
    assert len(split.train) >= batch * dp
    assert len(split.validation) >= batch * dp or not fraction
