"""What one of several sharers holds, against the torch model that is cut."""

import pytest
import torch

from launcher.workloads.language_model import LanguageModel
from launcher.workloads.model_share import model_shares
from launcher.workloads.transformer_shape import TransformerShape, unit_specs
from launcher.workloads.transformer_share import padded_vocab, unit_shares
from strategies.models.unit_model import UnitModel
from tests.strategies.models.tensor_parallel.fake_ranks import FakeRanks

LLAMA = TransformerShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, sequence=24)
GPT = TransformerShape(
    layers=1,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=48,
    vocab=64,
    sequence=24,
    norm="layernorm",
    activation="gelu",
    position="learned",
    tie_embeddings=True,
    dropout=0.1,
)
SHAPES = pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
MODES = pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])


def cut(shape, sequence):
    module = LanguageModel(shape)
    model = UnitModel(module)
    model.shard(FakeRanks(2, sequence=sequence), model.sharding_plan(2, None))
    model.cut([range(shape.num_units)], [0])
    return module


def test_one_sharer_has_the_whole_unit():
    for spec, share in zip(unit_specs(LLAMA), model_shares(LLAMA, 1), strict=True):
        assert (spec.parameters, spec.forward_flops) == (share.parameters, share.forward_flops)
        assert (spec.saved_elements, spec.output_elements) == (
            share.saved_elements,
            share.output_elements,
        )
        assert share.forward_sums == share.backward_sums == 0


@SHAPES
def test_parameters_are_those_of_the_cut_model(shape):
    seen = set()
    for (_, unit), share in zip(
        cut(shape, False).pipeline_units(), unit_shares(shape, 2), strict=True
    ):
        own = {id(p): p.numel() for p in unit.parameters() if id(p) not in seen}
        seen |= set(own)
        assert sum(own.values()) == share.parameters


@SHAPES
@MODES
def test_half_blocks_save_what_autograd_saves(shape, sequence):
    module = cut(shape, sequence)
    stream = torch.randn(1, shape.sequence // (2 if sequence else 1), shape.hidden)
    shares = unit_shares(shape, 2, sequence_parallel=sequence)
    for (_, unit), share in list(zip(module.pipeline_units(), shares, strict=True))[1:-1]:
        found = {}

        def keep(tensor, found=found):
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            unit.train()
            unit(stream.clone().requires_grad_())
        saved = sum(
            tensor.untyped_storage().nbytes() // 4
            for place, tensor in found.items()
            if place not in parameters
        )
        assert saved == share.saved_elements


def test_padding_makes_shares_even():
    assert padded_vocab(61, 2) == 62
    assert padded_vocab(64, 4) == 64


@SHAPES
def test_each_sharer_of_four_holds_less(shape):
    two, four = (unit_shares(shape, tp) for tp in (2, 4))
    for less, more in zip(four, two, strict=True):
        assert less.parameters <= more.parameters
        assert less.saved_elements <= more.saved_elements
        assert less.output_elements == more.output_elements
