"""Cross entropy over a cut vocabulary, all shares in one process."""

import pytest
import torch
from torch.nn import functional

from strategies.models.tensor_parallel.tensor_ranks import Shard
from strategies.models.tensor_parallel.vocabulary import (
    VocabularyShare,
    most_probable,
    token_losses,
)


class Recorded:
    """A rank whose collectives return what all ranks together have been found to hold.

    The ranks run one after the other, so each pass collects the operands of the next collective;
    a collective whose operands are all there gives its result.
    """

    def __init__(self, rank, size, known):
        self.rank, self.size, self._known, self._place = rank, size, known, 0

    def _all(self, tensor):
        operands = self._known.setdefault(self._place, {})
        operands[self.rank] = tensor.detach().clone()
        self._place += 1
        return operands if len(operands) == self.size else None

    def max_(self, tensor):
        found = self._all(tensor)
        return tensor if found is None else tensor.copy_(torch.stack([*found.values()]).amax(0))

    def sum_(self, tensor):
        found = self._all(tensor)
        return tensor if found is None else tensor.copy_(sum(found.values()))

    def gather(self, tensor):
        found = self._all(tensor)
        own = [tensor] * self.size
        return torch.stack(own if found is None else [found[rank] for rank in range(self.size)])


def on_all(shard, operation):
    """``operation(share)`` of each rank, once all operands are known."""
    known = {}
    for _ in range(3):  # as many rounds as collectives depend on each other
        results = [
            operation(VocabularyShare(shard, Recorded(rank, shard.parts, known)))
            for rank in range(shard.parts)
        ]
    return results


SIZES = pytest.mark.parametrize(("vocab", "parts"), [(8, 2), (7, 2), (5, 4), (3, 4), (9, 1)])


def shares(whole, shard):
    """Each rank's logits; padding is as large as it gets, and must not count."""
    found = []
    for rank in range(shard.parts):
        share = shard.local(whole, rank)
        share[..., shard.held(rank) :] = 1e4
        found.append(share)
    return found


@SIZES
def test_losses_and_gradients_are_those_of_torch(vocab, parts):
    torch.manual_seed(0)
    whole = (5 * torch.randn(2, 6, vocab, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(vocab, (2, 6))
    targets[0, 1] = -100
    weights = torch.randn(2, 6, dtype=torch.float64)
    expected = functional.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(2, 6)
    (expected * weights).sum().backward()
    shard = Shard(2, vocab, parts)
    leaves = [share.requires_grad_() for share in shares(whole.detach(), shard)]

    def losses(share):
        return token_losses(leaves[share.ranks.rank], targets, share)

    for rank, found in enumerate(on_all(shard, losses)):
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)
        (found * weights).sum().backward()
        wanted = shard.local(whole.grad, rank)
        assert torch.allclose(leaves[rank].grad, wanted, rtol=1e-13, atol=1e-13)


@SIZES
def test_the_most_probable_id_is_never_padding(vocab, parts):
    torch.manual_seed(1)
    whole = torch.randn(4, 6, vocab)
    whole[0, :, :] = 0.5  # equals: the lowest id wins
    shard = Shard(2, vocab, parts)
    parts_of = shares(whole, shard)

    def choose(share):
        return most_probable(parts_of[share.ranks.rank], share)

    for found in on_all(shard, choose):
        assert torch.equal(found, whole.argmax(-1))


def test_half_precision_logits_lose_in_float32():
    logits = torch.randn(3, 5).bfloat16()
    shard = Shard(1, 5, 1)
    share = VocabularyShare(shard, Recorded(0, 1, {}))
    targets = torch.tensor([0, 4, 2])
    assert token_losses(logits, targets, share).dtype == torch.float32
    assert torch.allclose(
        token_losses(logits, targets, VocabularyShare(shard, Recorded(0, 1, {}))),
        token_losses(logits, targets, None),
    )
