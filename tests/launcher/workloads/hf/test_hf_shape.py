"""What the parent process works out from config.json is what the library builds from it."""

from __future__ import annotations

import json
import re
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoConfig

from launcher.workloads.hf.export import library_name
from launcher.workloads.hf.families import FAMILIES, read_sizes
from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.hf.skeleton import build_skeleton
from launcher.workloads.hf.weights import expected_tensors
from launcher.workloads.model_share import (
    check_ep,
    check_tp,
    model_costs,
    model_shares,
    vocabulary_note,
)
from strategies.errors import ModelError, PlanError
from strategies.models.unit_model import UnitModel
from tests.strategies.models.tensor_parallel.fake_ranks import FakeRanks
from tests.tiny_models import SEQUENCE, shape_of, write_model

NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CASES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "gpt2": ("gpt2", NO_DROPOUT),
    "gpt2 with dropout": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": None}),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def folder(request, tmp_path):
    family, changes = CASES[request.param]
    write_model(tmp_path, family, **changes)
    return tmp_path


def test_tensors_are_those_of_the_library(folder):
    shape = shape_of(folder)
    ours = {name: size for unit in shape.tensors() for name, size in unit.items()}
    assert ours == expected_tensors(build_skeleton(shape))


def test_parameters_per_unit_are_those_of_the_module(folder):
    shape = shape_of(folder)
    with torch.device("meta"):
        module = HfLanguageModel(shape)
    seen: set[int] = set()
    for (name, unit), spec in zip(module.pipeline_units(), shape.unit_specs(), strict=True):
        own = {id(p): p.numel() for p in unit.parameters() if id(p) not in seen}
        seen |= set(own)
        assert (spec.name, spec.parameters) == (name, sum(own.values()))
        held = sum(p.numel() for p in unit.parameters())
        assert held == spec.parameters + spec.tied_parameters
    assert shape.num_parameters == sum(p.numel() for p in module.parameters())
    assert module.unit_costs() == list(model_costs(shape))


def cpu_attention_flops(query, key, value, *args, out_val=None, out_shape=None, **kwargs):
    return sdpa_flop_count(query, key, value)


def test_flops_and_saved_elements_are_those_of_torch(folder):
    shape = shape_of(folder)
    module = HfLanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    tensor = torch.arange(SEQUENCE)[None]
    sizes = shape.sizes
    assert sizes is not None
    # Rotary tables are saved once for all layers of a rank.
    shared = 2 * SEQUENCE * sizes.head_size if sizes.kind == "llama" else 0
    for (name, unit), spec in zip(module.pipeline_units(), shape.unit_specs(), strict=True):
        saved: dict[int, int] = {}

        def keep(value, saved=saved):
            storage = value.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes() // value.element_size()
            return value

        counter = FlopCounterMode(display=False, custom_mapping={attention: cpu_attention_flops})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), counter:
            tensor = unit(tensor)
        assert tensor.numel() == spec.output_elements, name
        if not sizes.attention_dropout:
            assert counter.get_total_flops() == spec.forward_flops, name
        expected = spec.saved_elements
        if name.endswith("head"):
            expected -= SEQUENCE * shape.vocab + SEQUENCE  # the loss
        elif "layers" in name:
            expected += shared
        assert sum(saved.values()) == expected, name
        tensor = tensor.detach().requires_grad_()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_the_library_takes(family, tmp_path):
    library = AutoConfig.for_model(family).to_dict()
    sizes = read_sizes({"model_type": family})
    assert sizes == read_sizes({**library, "model_type": family})
    assert sizes is not None
    assert sizes.vocab == library["vocab_size"]
    for name, default in FAMILIES[family].defaults.items():
        if name in library:
            assert library[name] == default, name


def test_an_unknown_family_has_no_numbers_but_a_vocabulary(tmp_path):
    write_model(tmp_path, "falcon")
    shape = shape_of(tmp_path)
    assert (shape.sizes, shape.num_parameters, shape.vocab, shape.layers) == (None, None, 64, 3)


def test_sizes_of_a_published_model_give_its_published_number_of_parameters(tmp_path):
    # Qwen3 0.6B, https://huggingface.co/Qwen/Qwen3-0.6B
    config = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "head_dim": 128,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(tmp_path, pretrained=False)
    assert shape.num_parameters == 596_049_920
    assert prod(shape.tensors()[0]["model.embed_tokens.weight"]) == 155_582_464


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: expected a whole number >= 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected at most 100000"),
        ({"hidden_size": 10**15}, "hidden_size=1000000000000000: expected at most"),
        ({"hidden_size": "wide"}, "hidden_size=wide"),
        ({"tie_word_embeddings": 3}, "tie_word_embeddings=3: expected true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads=32 is not divisible by"),
        ({"auto_map": {}}, "has auto_map: its network is Python code of its own"),
        ({"quantization_config": {}}, "quantised weights cannot be trained"),
        ({"model_type": 3}, "names no model_type"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(ModelError, match="Try") as caught:
        shape_of(tmp_path)
    assert expected in str(caught.value)


def test_a_sequence_longer_than_the_model_allows_is_refused(tmp_path):
    write_model(tmp_path, "gpt2")
    with pytest.raises(PlanError, match=r"model.sequence=33 is longer .* Try model.sequence=32\."):
        shape_of(tmp_path, sequence=33)


def test_names_in_the_library_follow_from_ours():
    assert library_name("network.layers.12.model.layers.12.mlp.up_proj.weight") == (
        "model.layers.12.mlp.up_proj.weight"
    )
    assert library_name("network.head.lm_head.weight") == "lm_head.weight"


# ------------------------------------------------------------------------------------------- share
#
# What a sharer holds of a library's model, and what it cannot be cut into.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "vocab_size": 65}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_parameters_per_unit_are_those_of_the_cut_module(family, changes, tmp_path):
    write_model(tmp_path, family, **changes)
    shape = shape_of(tmp_path)
    with torch.device("meta"):
        module = HfLanguageModel(shape)
    model = UnitModel(module)
    model.shard(FakeRanks(2), model.sharding_plan(2, None))
    model.cut([range(len(model.units))], [0])
    seen: set[int] = set()
    for (name, unit), share in zip(module.pipeline_units(), model_shares(shape, 2), strict=True):
        own = {id(p): p.numel() for p in unit.parameters() if id(p) not in seen}
        seen |= set(own)
        assert sum(own.values()) == share.parameters, name
    assert (vocabulary_note(shape, 2) is not None) == (shape.vocab == 65)


@pytest.mark.parametrize(
    ("family", "tp", "sequence_parallel", "message"),
    [
        ("llama", 4, False, "tp=4 does not divide num_key_value_heads=2. Try tp=2."),
        ("llama", 2, True, "sequence_parallel=true: layers of the transformers library"),
        ("gpt2", 3, False, "tp=3 does not divide n_head=4. Try tp=2 or tp=4."),
    ],
)
def test_what_cannot_be_cut_is_told_before_anything_starts(
    family, tp, sequence_parallel, message, tmp_path
):
    write_model(tmp_path, family)
    with pytest.raises(PlanError, match=re.escape(message)):
        check_tp(shape_of(tmp_path), tp, sequence_parallel=sequence_parallel)


def test_experts_that_do_not_come_out_even_are_refused(tmp_path):
    write_model(tmp_path, "mixtral")
    with pytest.raises(PlanError, match="Try ep="):
        check_ep(shape_of(tmp_path), 3)
    for tp in (1, 2):
        check_ep(shape_of(tmp_path), 4, tp)


def test_heads_stay_whole_where_the_parent_did_not_look(tmp_path):
    write_model(tmp_path, "llama")
    with torch.device("meta"):
        model = UnitModel(HfLanguageModel(shape_of(tmp_path)))
    with pytest.raises(ModelError, match=r"tp=4: .* even over 4 ranks in blocks of 8\. Try tp=2"):
        model.shard(FakeRanks(4), model.sharding_plan(4, None))
