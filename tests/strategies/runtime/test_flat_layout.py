import itertools

from hypothesis import given
from hypothesis import strategies as st

from strategies.runtime.flat_layout import FlatLayout

LAYOUTS = st.builds(
    FlatLayout,
    st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple),
    count=st.integers(1, 5),
    shares=st.integers(1, 4),
)


@given(LAYOUTS)
def test_buckets_divide_by_the_shares_and_little_is_padded(layout):
    bounds = layout.bounds
    assert len(bounds) == layout.count + 1
    assert all((high - low) % layout.shares == 0 for low, high in itertools.pairwise(bounds))
    assert 0 <= bounds[-1] - sum(layout.sizes) < layout.shares


@given(LAYOUTS)
def test_every_element_of_every_part_is_owned_once(layout):
    for part, size in enumerate(layout.sizes):
        start = layout.starts[part]
        owned = [
            element
            for member in range(layout.shares)
            for low, high in layout.pieces(part, member)
            for element in range(low, high)
        ]
        assert sorted(owned) == list(range(start, start + size))


@given(LAYOUTS)
def test_a_part_lies_in_the_buckets_that_it_meets(layout):
    for part, size in enumerate(layout.sizes):
        start = layout.starts[part]
        met = {
            bucket
            for bucket in range(layout.count)
            for element in range(start, start + size)
            if layout.bounds[bucket] <= element < layout.bounds[bucket + 1]
        }
        assert set(layout.buckets_of(start, start + size)) == met


def test_without_shares_nothing_is_padded():
    layout = FlatLayout((7, 4), count=3)
    assert layout.bounds == (0, 3, 7, 11)
    assert layout.owned(0) == ((0, 3), (3, 7), (7, 11))


def test_a_tail_lengthens_the_last_bucket_and_moves_no_other():
    layout = FlatLayout((4, 4), count=2, tail=2)
    assert layout.bounds == (0, 4, 10)
    assert layout.starts == (0, 4)
    assert layout.buckets_of(8, 10) == (1,)
    assert layout.pieces(1, 0) == ((4, 8),)
