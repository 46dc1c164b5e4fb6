import pytest
import torch

from launcher.workloads.language_model import sample_tokens
from strategies.errors import DataError, PlanError

VOCAB = 8


def successor(tokens):
    """Logits that make (last + 1) by far, and (last + 2) next to it, the most probable."""
    logits = torch.zeros(*tokens.shape, VOCAB)
    logits.scatter_(-1, ((tokens + 2) % VOCAB)[..., None], 4.0)
    return logits.scatter_(-1, ((tokens + 1) % VOCAB)[..., None], 5.0)


def test_greedy_follows_the_most_probable_token_for_each_row():
    prompt = torch.tensor([[0, 1], [5, 6]])
    out = sample_tokens(successor, prompt, max_new_tokens=3, context=4)
    assert out.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 0, 1]]
    assert sample_tokens(successor, prompt[0], max_new_tokens=1, context=4).tolist() == [0, 1, 2]
    assert torch.equal(sample_tokens(successor, prompt, max_new_tokens=0, context=4), prompt)


def test_the_network_never_sees_more_than_the_context():
    seen = []

    def logits_of(tokens):
        seen.append(tokens.shape[1])
        return successor(tokens)

    sample_tokens(logits_of, torch.tensor([0, 1]), max_new_tokens=4, context=3)
    assert seen == [2, 3, 3, 3]


def test_drawing_depends_on_the_seed_alone_and_top_k_bounds_the_choice():
    prompt = torch.zeros(200, 1, dtype=torch.int64)

    def draw(**options):
        return sample_tokens(successor, prompt, max_new_tokens=1, context=4, **options)[:, 1]

    torch.manual_seed(1)
    first = draw(temperature=1.0, seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, draw(temperature=1.0, seed=3))
    assert not torch.equal(first, draw(temperature=1.0, seed=4))
    assert set(draw(temperature=5.0).tolist()) == set(range(VOCAB))
    assert set(draw(temperature=5.0, top_k=2).tolist()) == {1, 2}
    assert set(draw(temperature=5.0, top_k=99).tolist()) == set(range(VOCAB))
    assert set(draw(temperature=1e-30).tolist()) == {1}
    share = (draw(temperature=1.0, top_k=2) == 1).float().mean().item()
    assert share == pytest.approx(torch.tensor([5.0, 4.0]).softmax(0)[0].item(), abs=0.08)


def test_wrong_requests_are_refused():
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(DataError, match=r"generate\.prompt is empty"):
        sample_tokens(successor, empty, max_new_tokens=1, context=4)
    prompt = torch.tensor([1])
    for key, value in (("temperature", -1.0), ("top_k", 0), ("max_new_tokens", -1)):
        options = {"max_new_tokens": 1, "context": 4, key: value}
        with pytest.raises(PlanError, match=f"generate.{key}={value}"):
            sample_tokens(successor, prompt, **options)
