"""Whatever bit of a weight differs shows, and is told by rank, replica and name."""

from __future__ import annotations

import doctest

import pytest
import torch

from strategies.runtime.messages import fingerprint
from strategies.runtime.messages.fingerprint import checksums, digest, tell_odd_ones


def test_the_examples_hold() -> None:
    assert doctest.testmod(fingerprint).failed == 0


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool,
     torch.complex64, torch.complex128, torch.int64],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 3, 2)], ids=str)
def test_every_type_and_shape_has_a_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape).to(dtype)
    same = checksums({"a": value})
    assert same == checksums({"a": value.clone()})
    if value.numel():
        value.view(-1).view(torch.uint8)[-1] ^= 1
        assert checksums({"a": value}) != same


def test_a_permutation_of_rows_shows() -> None:
    value = torch.randn(4, 3)
    assert checksums({"a": value}) != checksums({"a": value.flip(0)})


def test_the_odd_one_is_named() -> None:
    sums = [checksums({"w": torch.full((2,), float(x)), "v": torch.ones(1)}) for x in (1, 1, 2)]
    found = [("pipeline rank 0, tp rank 0", n, digest(each)) for n, each in enumerate(sums)]
    assert tell_odd_ones(found, sums).startswith(
        "replicas differ: rank 2 (replica 2, pipeline rank 0, tp rank 0) has other weights than "
        "rank 0 (replica 0): w. Something has changed one replica alone"
    )
