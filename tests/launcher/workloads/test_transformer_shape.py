import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer import Transformer
from launcher.workloads.transformer_shape import TransformerShape, unit_costs, unit_specs
from strategies.errors import PlanError

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
    for (_, unit), spec in zip(model.pipeline_units(), unit_specs(shape), strict=True):
        counter = FlopCounterMode(display=False, custom_mapping={attention: cpu_attention_flops})
        with counter:
            tensor = unit(tensor)
        assert counter.get_total_flops() == batch * spec.forward_flops, spec.name
        assert tensor.numel() == batch * spec.output_elements, spec.name


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
            tensors = (unit(*tensors),)
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
