import math

import pytest
import torch

from launcher.workloads.transformer import Attention, Head, Mlp, derived_seed, initialise
from launcher.workloads.transformer_shape import TransformerShape

SHAPE = TransformerShape(
    layers=8, hidden=128, heads=4, kv_heads=4, ffn=256, vocab=512, sequence=16, norm="layernorm"
)


def test_weights_depend_on_the_seed_and_the_name_only():
    one, two, other_name, other_seed = (Attention(SHAPE) for _ in range(4))
    torch.manual_seed(7)
    initialise("net.layers.0.attention", one, 0)
    torch.manual_seed(8)
    initialise("net.layers.0.attention", two, 0)
    initialise("net.layers.1.attention", other_name, 0)
    initialise("net.layers.0.attention", other_seed, 1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.query.weight, one.key.weight)
    assert not torch.equal(one.query.weight, other_name.query.weight)
    assert not torch.equal(one.query.weight, other_seed.query.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_all_dtypes_start_from_the_same_numbers(dtype):
    one, two = Mlp(SHAPE), Mlp(SHAPE).to(dtype)
    initialise("net.layers.0.mlp", one, 0)
    initialise("net.layers.0.mlp", two, 0)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a.to(dtype), b)


def test_a_frozen_parameter_on_meta_becomes_real_and_stays_frozen():
    with torch.device("meta"):
        unit = Mlp(SHAPE)
    unit.up.weight.requires_grad_(False)
    initialise("net.layers.0.mlp", unit, 0)
    assert not any(parameter.is_meta for parameter in unit.parameters())
    assert [n for n, p in unit.named_parameters() if not p.requires_grad] == ["up.weight"]


def test_deviations_are_small_and_smaller_where_the_residual_stream_is_written():
    attention, head = Attention(SHAPE), Head(SHAPE)
    initialise("net.layers.0.attention", attention, 0)
    initialise("net.head", head, 0)
    small = math.sqrt(2 / (5 * 128))
    assert attention.query.weight.std().item() == pytest.approx(small, rel=0.02)
    assert attention.output.weight.std().item() == pytest.approx(small / 4, rel=0.02)
    assert head.projection.weight.std().item() == pytest.approx(small, rel=0.02)
    assert attention.query.bias.abs().max() == 0
    assert torch.equal(attention.norm.weight, torch.ones(128))


def test_seeds_are_the_same_in_every_process_and_on_every_machine():
    # sha256sum's first 8 bytes; Python's hash of a text is another one in every process
    assert derived_seed(0, "net.head.norm.weight") == 8639742503821432092
    assert derived_seed(3, "x") == -4756052488806732071
    assert derived_seed(4, "x") == 5569423936497967104
