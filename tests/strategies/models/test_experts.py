import pytest
import torch
from torch.nn import functional

from strategies.models.experts import SURPLUS, Experts, Mixture, Router


def mixture(*, experts=5, per_token=2, hidden=8, inner=6, gated=True, **router):
    made = Mixture(
        Router(experts=experts, per_token=per_token, hidden=hidden, **router),
        Experts(experts=experts, hidden=hidden, inner=inner, gated=gated),
    ).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        with torch.no_grad():
            parameter.normal_(generator=generator)
    return made


def tokens(batch=2, sequence=7, hidden=8):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, sequence, hidden, dtype=torch.float64, generator=generator)


def one_by_one(layer, inputs, routing):
    """Every token through each of its experts, without any sorting."""
    experts, rows = layer.experts, []
    for token, ids, weights in zip(inputs.flatten(0, 1), routing.ids, routing.weights, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            inner = experts.up[expert] @ token
            if experts.gate is None:
                inner = functional.gelu(inner, approximate="tanh")
            else:
                inner = functional.silu(experts.gate[expert] @ token) * inner
            total = total + weight * (experts.down[expert] @ inner)
        rows.append(total)
    return torch.stack(rows).view_as(inputs)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_sorted_tokens_give_what_each_gives_alone(gated, scores):
    layer = mixture(gated=gated, scores=scores, scale=1.5)
    inputs = tokens().requires_grad_()
    mixed, routing = layer(inputs)
    expected = one_by_one(layer, inputs, routing)
    assert torch.allclose(mixed, expected, atol=1e-12, rtol=0)
    wanted = [inputs, *layer.parameters()]
    ours = torch.autograd.grad(mixed.square().sum(), wanted, retain_graph=True)
    theirs = torch.autograd.grad(expected.square().sum(), wanted)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, theirs, strict=True))


def test_the_most_probable_experts_are_chosen_and_their_weights_sum_to_one():
    layer, inputs = mixture(), tokens()
    routing = layer.route(inputs)
    chances = (inputs.flatten(0, 1) @ layer.router.weight.T).softmax(-1)
    best = chances.topk(2)
    assert torch.equal(routing.ids, best.indices)
    assert torch.allclose(routing.weights, best.values / best.values.sum(-1, keepdim=True))
    plain = mixture(normalised=False).route(inputs)
    assert torch.allclose(plain.weights, best.values)


def test_no_token_is_dropped_when_all_want_one_expert():
    layer, inputs = mixture(per_token=1), tokens().abs()
    with torch.no_grad():
        layer.router.weight.zero_()[3] = 1.0
    mixed, routing = layer(inputs)
    assert layer.dispatch(inputs.flatten(0, 1), routing.ids).counts.tolist() == [0, 0, 0, 14, 0]
    assert torch.allclose(mixed, one_by_one(layer, inputs, routing))
    mixed.sum().backward()
    assert layer.experts.up.grad[3].abs().sum() > 0
    assert layer.experts.up.grad[[0, 1, 2, 4]].abs().sum() == 0


def test_scores_are_of_32_bits_whatever_the_model_computes_in():
    layer, inputs = mixture().to(torch.bfloat16), tokens().to(torch.bfloat16)
    wide = mixture().to(torch.bfloat16).float().route(inputs.float())
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            routing = layer.route(inputs)
        assert routing.weights.dtype == routing.losses.dtype == torch.float32
        assert torch.equal(routing.ids, wide.ids)
        assert torch.equal(routing.losses, wide.losses)


def test_a_balanced_router_has_a_balance_loss_of_one():
    layer, inputs = mixture(), tokens()
    with torch.no_grad():
        layer.router.weight.zero_()
    # Every expert has the same chance, so whoever is chosen, the loss is experts * 1 / experts.
    losses = layer.route(inputs).losses
    assert torch.allclose(losses[:, 0], torch.ones(2, dtype=torch.float64))
    assert torch.allclose(losses[:, 1], torch.tensor(5.0, dtype=torch.float64).log().square())


def test_the_balance_of_sequences_is_the_same_however_a_batch_is_cut():
    layer, inputs = mixture(), tokens(batch=4)
    whole = layer.route(inputs).losses
    parts = torch.cat([layer.route(part).losses for part in inputs.split([1, 3])])
    assert torch.equal(whole, parts)
    over = mixture(span="microbatch")
    together = over.route(inputs)
    got = together.load.sum(0) / together.load.sum()
    wanted = (inputs.flatten(0, 1) @ over.router.weight.T).softmax(-1).mean(0)
    assert torch.allclose(together.losses[:, 0], 5 * (got * wanted).sum().expand(4))


def test_a_bias_changes_who_is_chosen_and_not_the_weights():
    layer, inputs = mixture(steered=True, normalised=False, scores="sigmoid"), tokens()
    with torch.no_grad():
        layer.router.bias[2] = 10.0
    routing = layer.route(inputs)
    assert (routing.ids == 2).any(dim=-1).all()
    scores = (inputs.flatten(0, 1) @ layer.router.weight.T).sigmoid()
    assert torch.allclose(routing.weights, scores.gather(-1, routing.ids))


def test_the_gradient_of_a_bias_is_what_its_expert_got_too_much():
    layer, inputs = mixture(steered=True), tokens()
    mixed, routing = layer(inputs)
    (mixed.sum() + 0.3 * routing.losses.sum()).backward()
    load = routing.load.sum(0)
    assert load.sum() == 28
    surplus = layer.router.bias.grad / SURPLUS
    assert torch.equal(surplus, 5 * load - 28)  # exact, so that counts of any cut add up alike
    again = mixture(steered=True)
    for part in inputs.split(1):
        again(part)[0].sum().backward()
    assert torch.equal(again.router.bias.grad, layer.router.bias.grad)
