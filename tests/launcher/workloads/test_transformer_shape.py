import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer import Transformer
from launcher.workloads.transformer_shape import (
    MoeShape,
    TransformerShape,
    unit_costs,
    unit_specs,
)
from strategies.errors import PlanError
from tests.launcher.workloads.presets import PRESETS, preset

LLAMA = TransformerShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, sequence=24)
GPT = TransformerShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=48,
    vocab=61,
    sequence=24,
    norm="layernorm",
    activation="gelu",
    position="learned",
    tie_embeddings=True,
)
SHAPES = {
    "llama": LLAMA,
    "llama without groups": replace(LLAMA, kv_heads=4),
    "llama with dropout": replace(LLAMA, dropout=0.1),
    "rmsnorm gelu learned": replace(LLAMA, activation="gelu", position="learned"),
    "gpt": GPT,
    "gpt untied with dropout": replace(GPT, tie_embeddings=False, dropout=0.1),
    "layernorm swiglu rope": replace(GPT, activation="swiglu", position="rope", kv_heads=1),
    "experts": replace(LLAMA, layers=3, moe=MoeShape(experts=6, per_token=2, ffn=20)),
    "shared experts by sigmoid": replace(
        GPT,
        layers=3,
        dropout=0.1,
        moe=MoeShape(6, 3, 20, shared=2, first_dense=1, scores="sigmoid", normalised=False),
    ),
}


def cpu_attention_flops(query, key, value, *args, out_val=None, out_shape=None, **kwargs):
    return sdpa_flop_count(query, key, value)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_torch_model(shape):
    with torch.device("meta"):
        network = Transformer(shape)
    counted, seen = {}, set()
    for name, unit in network.named_units():
        own = {id(p): p.numel() for p in unit.parameters() if id(p) not in seen}
        seen |= set(own)
        counted[f"net.{name}"] = sum(own.values())
    assert {unit.name: unit.parameters for unit in unit_specs(shape)} == counted
    assert shape.num_parameters == sum(p.numel() for p in network.parameters())
    held = sum(p.numel() for p in network.head.parameters())
    assert unit_specs(shape)[-1].parameters + unit_specs(shape)[-1].tied_parameters == held
    assert len(counted) == shape.num_units


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_flops_are_those_of_torchs_counter(shape, batch):
    # Dropout reaches only elementwise operations, and without it attention runs as one operation.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    model = LanguageModel(shape)
    tensor = torch.zeros(batch, shape.sequence, dtype=torch.int64)
    tensors = (tensor,)
    for (_, unit), spec in zip(model.pipeline_units(), unit_specs(shape), strict=True):
        counter = FlopCounterMode(display=False, custom_mapping={attention: cpu_attention_flops})
        with counter:
            made = unit(*tensors)
        tensors = made if isinstance(made, tuple) else (made,)
        assert counter.get_total_flops() == batch * spec.forward_flops, spec.name
        assert sum(t.numel() for t in tensors) == batch * spec.output_elements, spec.name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_saved_elements_are_those_that_autograd_keeps(shape):
    model = LanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    batch = {
        key: torch.zeros(1, shape.sequence, dtype=torch.int64) for key in ("tokens", "targets")
    }
    model.log = lambda *args, **options: None
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() > 1:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    tensors = model.pipeline_inputs(batch)
    units, specs = model.pipeline_units(), unit_specs(shape)
    alive = []  # a freed storage's address may come again
    for (_, unit), spec in zip(units, specs, strict=True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = unit(*tensors)
            tensors = made if isinstance(made, tuple) else (made,)
            alive.append(tensors)
            if unit is units[-1][1]:
                alive.append(model.pipeline_result(tensors, batch, 0, "train"))
        assert sum(kept.values()) == spec.saved_elements, spec.name


def test_a_fused_norm_keeps_one_boundary_less_per_rmsnorm():
    for composite, fused in zip(unit_specs(LLAMA), unit_specs(LLAMA, fused_norm=True), strict=True):
        norms = 0 if composite.name == "net.embedding" else 1
        saved = composite.saved_elements - norms * LLAMA.sequence * LLAMA.hidden
        assert fused == replace(composite, saved_elements=saved)
    assert unit_specs(GPT, fused_norm=True) == unit_specs(GPT)


def test_every_unit_costs_something():
    costs = unit_costs(LLAMA)
    assert costs[0] == LLAMA.sequence * LLAMA.hidden
    assert costs[1:] == tuple(unit.forward_flops for unit in unit_specs(LLAMA)[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 34}, "model.hidden=34 is not divisible by model.heads=4. Try model.hidden=32."),
        (
            {"kv_heads": 3},
            "model.heads=4 is not divisible by model.kv_heads=3. Try model.kv_heads=2.",
        ),
        (
            {"kv_heads": 8},
            "model.heads=4 is not divisible by model.kv_heads=8. Try model.kv_heads=4.",
        ),
        ({"hidden": 36}, "model.hidden / model.heads = 9 wide, which is odd. Try model.hidden=40."),
        ({"layers": 0}, "model.layers=0"),
        ({"vocab": True}, "model.vocab=True"),
        ({"norm": "batchnorm"}, "Try model.norm=rmsnorm or model.norm=layernorm."),
        ({"dropout": 1.0}, "model.dropout=1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(changes, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        replace(LLAMA, **changes)
    tried = re.fullmatch(r"(?s).*Try model\.(\w+)=(\d+)\.", message)
    if tried:
        replace(LLAMA, **{**changes, tried[1]: int(tried[2])})


def test_an_odd_head_is_fine_with_learned_positions():
    assert replace(LLAMA, hidden=36, position="learned").head_size == 9


# name -> (parameters, longest sequence). OpenLLaMA 3B stands in for the LLaMA 2 that has no 3B.
PUBLISHED = {
    "gpt2_124m": (124_439_808, 1024),  # transformers, openai-community/gpt2
    "gpt3_1_6b": (1.6e9, 2048),
    "gpt3_6_7b": (6.7e9, 2048),
    "gpt3_13b": (13.0e9, 2048),  # GPT-3's paper, table 2.1
    "gpt3_175b": (175e9, 2048),
    "llama2_3b": (3_426_473_600, 4096),  # openlm-research/open_llama_3b
    "llama2_7b": (6_738_415_616, 4096),  # meta-llama/Llama-2-7b-hf
    "llama2_13b": (13_015_864_320, 4096),  # meta-llama/Llama-2-13b-hf
}
# name -> (parameters, of them active for a token)
SPARSE = {
    "mixtral_8x7b": (46.7e9, 12.9e9),  # the paper's 47 and 13
    "deepseek_moe_16b": (15.7e9, None),  # of DeepSeek-V2-Lite
    "gpt_moe_380m": (380e6, None),
    "gpt_moe_1_3b": (1.3e9, None),
    "gpt_moe_2_4b": (2.4e9, None),
    "gpt_moe_10b": (10e9, None),
    "gpt_moe_27b": (27e9, None),
    "gpt_moe_70b": (70e9, None),
}


def test_every_model_file_is_looked_at():
    assert sorted([*PUBLISHED, *SPARSE, "fold_example", "small", "tiny", "tiny_moe"]) == PRESETS


@pytest.mark.parametrize("name", SPARSE)
def test_models_with_experts_have_their_published_number_of_parameters(name):
    shape, (published, active) = preset(name), SPARSE[name]
    assert shape.num_parameters == pytest.approx(published, rel=0.04)
    if active is not None:
        assert shape.active_parameters == pytest.approx(active, rel=0.02)
    if name.startswith("gpt"):
        assert (shape.ffn, shape.moe_layers[0]) == (8 * shape.hidden, 1)
        assert len(shape.moe_layers) == shape.layers // 2


def test_tokens_of_the_tiny_models_meet_equally_many_weights_with_experts_and_without():
    dense, sparse = preset("tiny"), preset("tiny_moe")
    routers = dense.layers * dense.hidden * 8
    assert sparse.active_parameters == dense.num_parameters + routers
    assert dense.active_parameters == dense.num_parameters
    assert sparse.num_parameters > 2.5 * dense.num_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name):
    published, sequence = PUBLISHED[name]
    tolerance = 0 if isinstance(published, int) else 0.015 if name == "gpt3_13b" else 0.035
    shape = preset(name)
    assert shape.num_parameters == pytest.approx(published, rel=tolerance)
    assert (shape.sequence, shape.kv_heads, shape.dropout) == (sequence, shape.heads, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_file_keeps_to_its_family(name):
    shape = preset(name)
    choices = (shape.norm, shape.activation, shape.position, shape.tie_embeddings)
    if shape.moe is not None:
        assert choices[3] == name.startswith("gpt")
    elif name.startswith("gpt"):
        assert choices == ("layernorm", "gelu", "learned", True)
        assert (shape.vocab, shape.ffn) == (50257, 4 * shape.hidden)
    else:
        assert choices == ("rmsnorm", "swiglu", "rope", False)
        assert shape.vocab == (256 if name in ("tiny", "small") else 32000)


def test_the_fold_example_has_the_shape_of_its_command_line():
    shape = preset("fold_example")
    assert (shape.layers, shape.hidden, shape.ffn, shape.heads) == (30, 6656, 17920, 52)
    assert shape.sequence == 2048


def test_the_laptop_models_can_be_cut_for_four_ranks():
    tiny, small = preset("tiny"), preset("small")
    assert (tiny.heads, tiny.kv_heads, tiny.sequence, small.sequence) == (4, 2, 128, 256)
    assert tiny.num_units >= 4 * 3
    assert tiny.num_parameters < 2_000_000 < small.num_parameters


def test_an_end_to_end_step_of_llama2_13b_is_near_six_times_parameters_times_tokens():
    shape = preset("llama2_13b")
    flops = 3 * sum(unit.forward_flops for unit in unit_specs(shape))
    assert flops / (6 * shape.num_parameters * shape.sequence) == pytest.approx(1.1, abs=0.06)


def test_a_token_goes_to_no_more_experts_than_there_are():
    with pytest.raises(PlanError, match=r"model.experts=2\). Try model.experts_per_token=2."):
        MoeShape(experts=2, per_token=3, ffn=8)


def test_some_layer_has_experts():
    with pytest.raises(PlanError, match=r"none of model.layers=2 .*first_dense_layers=1\.$"):
        replace(LLAMA, moe=MoeShape(4, 2, 8, first_dense=2))
    with pytest.raises(PlanError, match=r"first_dense_layers=0 model.expert_every=2\.$"):
        replace(LLAMA, moe=MoeShape(4, 2, 8, every=3))
    assert replace(LLAMA, layers=6, moe=MoeShape(4, 2, 8, 0, 1, 2)).moe_layers == (2, 4)
