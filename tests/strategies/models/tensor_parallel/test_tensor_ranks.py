"""Shares of a tensor, and how they make the whole again."""

import pytest
import torch

from strategies.models.tensor_parallel.tensor_ranks import Shard


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 5, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_shares_are_equally_large_and_make_the_whole(dim, size, parts):
    shape = [2, 2]
    shape[dim] = size
    whole = torch.arange(1.0, 2 * size + 1).reshape(shape)
    shard = Shard(dim, size, parts)
    shares = [shard.local(whole, rank) for rank in range(parts)]
    assert {share.shape[dim] for share in shares} == {shard.width}
    assert torch.equal(shard.whole(shares), whole)
    assert sum(shard.held(rank) for rank in range(parts)) == size
    # What is not the whole's is zero.
    assert sum(share.sum() for share in shares) == whole.sum()


def test_an_uneven_vocabulary_is_padded_at_its_end():
    shard = Shard(0, 5, 4)
    assert (shard.width, shard.padding) == (2, 3)
    assert [shard.start(rank) for rank in range(4)] == [0, 2, 4, 5]
    assert [shard.held(rank) for rank in range(4)] == [2, 2, 1, 0]


def test_a_share_has_memory_of_its_own():
    whole = torch.zeros(4, 2)
    share = Shard(0, 4, 2).local(whole, 1)
    share += 1
    assert whole.sum() == 0


def test_padding_comes_off_and_on_again():
    shard = Shard(1, 5, 3)
    whole = torch.arange(10.0).reshape(2, 5)
    for rank, held in enumerate((2, 2, 1)):
        share = shard.local(whole, rank)
        assert shard.unpadded(share, rank).shape == (2, held)
        assert torch.equal(shard.padded(shard.unpadded(share, rank).clone(), rank), share)
        assert shard.padded(share, rank) is share


@pytest.mark.parametrize("dim", [0, 1])
def test_of_parts_side_by_side_a_rank_has_a_share_of_each(dim):
    shape = [2, 2]
    shape[dim] = 12
    whole = torch.arange(24.0).reshape(shape)
    shard = Shard(dim, 12, 2, segments=3)
    shares = [shard.local(whole, rank) for rank in range(2)]
    assert torch.equal(shard.whole(shares), whole)
    parts = [part.chunk(2, dim)[1] for part in whole.chunk(3, dim)]
    assert torch.equal(shares[1], torch.cat(parts, dim))
    assert (shard.width, shard.held(1), shard.start(1)) == (6, 6, 2)
