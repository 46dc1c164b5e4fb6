"""What units take on one rank, put together to stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from launcher.config import from_dict
from launcher.resolve import resolve
from launcher.workloads.hf.hf_layer_steps import type_names
from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.loads import selective_shares, unit_loads
from launcher.workloads.transformer_shape import MoeShape, unit_specs
from strategies.compiler import compile_program
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware
from strategies.costs.load import sum_loads
from strategies.errors import PlanError
from strategies.models.nested import tensors as tensors_in
from strategies.models.selective.policy import Selection
from strategies.models.selective.region import Computed, Kept, Region, SelectiveLayer
from strategies.models.unit_model import UnitModel
from strategies.plan import FAMILIES, Recompute
from tests.launcher.workloads.hf.test_hf_shape import CASES, cpu_attention_flops
from tests.launcher.workloads.presets import preset
from tests.launcher.workloads.test_transformer_shape import LLAMA, SHAPES
from tests.tiny_models import shape_of, write_model


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_matrix_lies_on_both_stages_that_a_cut_separates(tp):
    shape = replace(preset("gpt2_124m"), vocab=50258, layers=2)
    loads = unit_loads(shape, tp, 1)
    whole = sum_loads(list(loads))
    first, last = sum_loads(list(loads[:3])), sum_loads(list(loads[3:]))
    tied = unit_specs(shape)[-1].tied_parameters
    assert tied == 50258 * 768
    assert first.parameters + last.parameters == whole.parameters + tied // tp
    if tp == 1:
        assert whole.parameters == shape.num_parameters


def test_nothing_is_added_where_nothing_is_tied():
    loads = unit_loads(preset("tiny"), 1, 1)
    cut = sum_loads(list(loads[:3])).parameters + sum_loads(list(loads[3:])).parameters
    assert cut == sum_loads(list(loads)).parameters


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.fixture
def regions(monkeypatch):
    """What selective layers keep while they run: regions, and what they hand to autograd."""
    made = []

    class Watched(Region):
        def __init__(self, *args):
            super().__init__(*args)
            self.packed = []
            made.append(self)

        def pack(self, tensor):
            self.packed.append(super().pack(tensor))
            return self.packed[-1]

    monkeypatch.setattr("strategies.models.selective.region.Region", Watched)
    return made


def held_by(region):
    """Tensors that are there for the backward."""
    for item in region.packed:
        if isinstance(item, Kept):
            yield from item.held_tensors()
    for given in region._results.values():
        yield from tensors_in(given.result)


def storages(region, parameters):
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        // tensor.element_size()
        for tensor in held_by(region)
        if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in parameters
    }


SUBSETS = [
    frozenset(chosen) for size in range(5) for chosen in itertools.combinations(FAMILIES, size)
]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[] if name == "llama with dropout" else pytest.mark.full)
        for name, shape in SHAPES.items()
    ],
)
def test_units_keep_what_the_runtime_keeps_whatever_is_recomputed(shape, regions):
    model = LanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tensors = model.pipeline_inputs(
        {name: torch.zeros(1, shape.sequence, dtype=torch.int64) for name in ("tokens", "targets")}
    )
    loss = shape.sequence * (shape.vocab + 1)
    units = [unit for _, unit in model.pipeline_units()]
    for index, unit in enumerate(units):
        for families in SUBSETS:
            names = ((type(unit).__name__, tuple(families)),)
            share = selective_shares(shape, 1, layers=names)[index]
            result = SelectiveLayer(unit, families).run(unit, tensors, {})
            found = storages(regions[-1], parameters)
            wanted = share.saved_elements - (loss if index == len(units) - 1 else 0)
            assert sum(found.values()) == wanted, (type(unit).__name__, sorted(families))
        tensors = result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.full)
        for name in ("qwen3", "llama", "llama with biases", "gpt2", "gpt2 with dropout")
    ],
)
def test_layers_of_the_library_keep_what_the_runtime_keeps(case, regions, tmp_path):
    family, changes = CASES[case]
    write_model(tmp_path, family, **changes)
    shape = shape_of(tmp_path)
    model = HfLanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.zeros(1, shape.sequence, dtype=torch.int64)
    tensors = model.pipeline_inputs({"tokens": tokens, "targets": tokens})
    units = [unit for _, unit in model.pipeline_units()]
    for unit in units[:2]:  # what does not depend on a layer is made by then
        tensors = (unit(*tensors),)
    # Rotary tables belong to all layers of a rank.
    shared = 2 * shape.sequence * shape.sizes.head_size if family != "gpt2" else 0
    (name,) = type_names(shape)[1][1:]
    for families in SUBSETS:
        share = selective_shares(shape, 1, layers=((name, tuple(families)),))[1]
        SelectiveLayer(units[2], families).run(units[2], tensors, {})
        found = storages(regions[-1], parameters)
        assert sum(found.values()) - shared == share.saved_elements, sorted(families)


def test_products_that_run_again_are_those_of_the_runtime(regions):
    """Counted by torch, up to the last tensor that is missing."""
    shape = LLAMA
    model = LanguageModel(shape).train()
    tensors = (torch.randn(1, shape.sequence, shape.hidden, requires_grad=True),)
    for name, unit in (("Attention", model.net.layers[0]["attention"]),
                       ("Mlp", model.net.layers[0]["mlp"])):  # fmt: skip
        for families in SUBSETS:
            share = selective_shares(shape, 1, layers=((name, tuple(families)),))[
                1 if name == "Attention" else 2
            ]
            SelectiveLayer(unit, families).run(unit, tensors, {})
            region = regions[-1]
            if not any(isinstance(item, Computed) for item in region.packed):
                assert share.again_flops == 0
                continue
            with FlopCounterMode(
                display=False, custom_mapping={CPU_ATTENTION: cpu_attention_flops}
            ) as counter:
                region.run_again()
            assert counter.get_total_flops() == share.again_flops, (name, sorted(families))


@pytest.mark.parametrize("name", ["llama with dropout", "gpt"])
def test_whole_layers_keep_and_run_again_what_the_runtime_does(name, regions):
    shape = SHAPES[name]
    module = LanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    model = UnitModel(module)
    model.select(Selection.asked(Recompute("layer")))
    rows = {n: torch.zeros(1, shape.sequence, dtype=torch.int64) for n in ("tokens", "targets")}
    model.forward(0, (), batch=rows, batch_idx=0, microbatch=0, mode="train", seed=1)
    # The embedding, the layers, the head.
    assert len(regions) == 2 + shape.layers
    loads = unit_loads(shape, 1, 1, selective=True, whole_layers=True)
    plain = unit_loads(shape, 1, 1)
    loss = shape.sequence * (shape.vocab + 1)
    kept = [sum(storages(region, parameters).values()) for region in regions]
    stream = shape.sequence * shape.hidden
    # The embedding's ids are its input; of layers and head that is the residual stream.
    assert [sum(t.numel() for t in held_given(region)) for region in regions[1:]] == [
        stream for _ in regions[1:]
    ]
    assert loads[1].saved_elements + loads[2].saved_elements == stream
    assert loads[-1].saved_elements - loss == stream
    assert all(n <= stream for n in kept)
    assert loads[2].first_saved_elements == stream
    whole = plain[1].saved_elements + plain[2].saved_elements
    assert loads[1].rebuilt_elements == loads[2].rebuilt_elements == whole - stream
    counting = {CPU_ATTENTION: cpu_attention_flops}
    with FlopCounterMode(display=False, custom_mapping=counting) as counter:
        regions[1].run_again()
    assert counter.get_total_flops() == loads[1].again_flops + loads[2].again_flops


def test_a_stage_that_begins_inside_a_layer_keeps_its_input_too():
    loads = list(unit_loads(LLAMA, 1, 1, selective=True, whole_layers=True))
    stream = LLAMA.sequence * LLAMA.hidden
    assert sum_loads(loads[2:4]).saved_elements == 2 * stream
    assert sum_loads(loads[1:3]).saved_elements == stream


def held_given(region):
    return [t for t in tensors_in(region._given) if not isinstance(t, torch.nn.Parameter)]


def test_ranks_share_what_their_matrices_give():
    whole, shared = selective_shares(LLAMA, 1), selective_shares(LLAMA, 2)
    stream = LLAMA.sequence * LLAMA.hidden
    for one, two in zip(whole[1:-1], shared[1:-1], strict=True):
        assert two.saved_elements - stream == (one.saved_elements - stream) // 2
        assert two.again_flops == one.again_flops / 2
    cut = selective_shares(LLAMA, 2, sequence_parallel=True)
    assert cut[1].saved_elements == shared[1].saved_elements - stream // 2


def test_a_prediction_trades_memory_for_the_attention_core():
    def predicted(name):
        config = {
            "mode": "simulate", "pp": 2, "num_microbatches": 4,
            "recompute": {"name": name}, "trainer": {"accelerator": "cpu"},
        }  # fmt: skip
        run = resolve(from_dict(config))
        return run.costs.table(run.programs.train)

    plain, selective = predicted("none"), predicted("selective")
    assert plain.forward == selective.forward
    assert plain.backward_weight == selective.backward_weight
    for stage in range(2):
        assert selective.activation_bytes[stage] < plain.activation_bytes[stage]
        more = selective.backward[stage] - plain.backward[stage]
        assert more == pytest.approx(selective.backward_input[stage] - plain.backward_input[stage])
        assert 0 < more < plain.forward[stage]


@pytest.mark.parametrize(
    ("layers", "direction"),
    [
        (["Attention:none", "Mlp:none", "Head:none", "Embedding:none"], "nothing"),
        (["Mlp:activation"], "more memory"),
        (["Mlp:matmul+activation+norm"], "less memory"),
    ],
)
def test_a_prediction_follows_what_is_recomputed(layers, direction):
    def predicted(recompute):
        config = {
            "mode": "simulate", "pp": 2, "num_microbatches": 4, "recompute": recompute,
            "trainer": {"accelerator": "cpu"},
        }  # fmt: skip
        run = resolve(from_dict(config))
        return run.costs.table(run.programs.train)

    default = predicted({"name": "selective"})
    plain = predicted({"name": "none"})
    asked = predicted({"name": "selective", "layers": layers})
    if direction == "nothing":
        assert asked.activation_bytes == plain.activation_bytes
        assert asked.backward == plain.backward
    elif direction == "more memory":
        assert sum(asked.activation_bytes) > sum(default.activation_bytes)
        assert asked.backward == default.backward  # norms are no products
    else:
        assert sum(asked.activation_bytes) < sum(default.activation_bytes)
        assert sum(asked.backward) > sum(default.backward)
        assert sum(asked.backward_input) > sum(default.backward_input)


def test_a_type_that_the_model_lacks_is_refused_before_anything_starts():
    config = {"mode": "validate", "recompute": {"name": "selective", "layers": ["Mpl:norm"]}}
    with pytest.raises(PlanError, match=r"of the types Attention, Embedding, Head, Mlp\. Try"):
        resolve(from_dict(config))


def test_muon_keeps_one_moment_between_the_embedding_and_the_head():
    shape = preset("tiny")
    first, *middle, last = unit_loads(shape, 1, 1, ns_steps=5)
    assert (first.lean_parameters, last.lean_parameters) == (0, 0)
    assert all(load.lean_parameters == load.parameters > 0 for load in middle)
    stage = sum_loads([first, *middle])
    assert stage.lean_parameters == sum(load.parameters for load in middle)


def test_experts_are_a_part_of_their_layers_and_tensor_ranks_share_their_tokens():
    shape = replace(LLAMA, moe=MoeShape(experts=4, per_token=2, ffn=16, first_dense=1))
    whole, shared = (unit_loads(shape, tp, 3) for tp in (1, 2))
    sparse = 2 * shape.moe_layers[0] + 2
    assert [bool(load.experts) for load in whole].index(True) == sparse
    load = whole[sparse]
    matrices = 3 * shape.hidden * 16
    assert load.experts == 4 * matrices
    assert load.exchanged == (3 * shape.sequence * 2 * shape.hidden,)
    assert load.expert_flops == 2 * 3 * shape.sequence * 2 * matrices
    assert load.beside_flops == 0
    beside = replace(shape, moe=replace(shape.moe, shared=2))
    assert unit_loads(beside, 2, 3)[sparse].beside_flops == 2 * 3 * shape.sequence * matrices
    assert shared[sparse].experts == load.experts
    assert shared[sparse].expert_flops == load.expert_flops / 2
    assert shared[sparse].forward_flops == pytest.approx(load.forward_flops - load.expert_flops / 2)
    sliced = unit_loads(shape, 2, 3, expert_tp=True)[sparse]
    rows, stream = 3 * shape.sequence * 2, 3 * shape.sequence * shape.hidden
    # All rows at half of the inner width, and one sum more in either direction.
    assert sliced.expert_saved == rows * (shape.hidden + 4 * 8)
    assert sliced.saved_elements - shared[sparse].saved_elements == rows * shape.hidden // 2
    assert sliced.forward_sums == (*shared[sparse].forward_sums, stream)
    ((work, _),), ((other, _),) = sliced.works, shared[sparse].works
    assert work.products == other.products
    assert sum(p.flops for p in work.experts) == sum(p.flops for p in other.experts)
    # All choices are sorted on each rank, half of their gradients added up there.
    assert work.forward_elements - other.forward_elements == 9 * rows * shape.hidden // 2
    held = [sum(p.columns * p.inner * p.batch for p in each.experts) for each in (work, other)]
    assert held[0] == held[1] / 2


NODE = Hardware("node", 1e12, 0.5, 8.0, 1e11, 1e10, 1e-6, 1e9, 1e-5, 8)


@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_with_a_part_of_each_expert_hold_as_much_as_with_fewer_whole_ones(ep: int):
    shape = replace(LLAMA, moe=MoeShape(experts=4, per_token=2, ffn=16))
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=1)
    sliced, whole = (
        AnalyticCosts(
            (sum_loads(list(unit_loads(shape, 2, 3, expert_tp=cut))),),
            NODE, dp=2, tp=2, ep=ep * (1 if cut else 2), expert_tp=cut,
        )
        for cut in (True, False)
    )  # fmt: skip
    assert sliced.held(sliced.stages[0]) == whole.held(whole.stages[0])
    states = [costs.table(program).state_bytes for costs in (sliced, whole)]
    assert states[0] == states[1]
    travels = [costs.table(program).exchange for costs in (sliced, whole)]
    assert travels[0] == () if ep == 1 else travels[0][0].away > 0


def test_gpus_keep_masks_of_bytes_and_norms_once():
    shape = replace(LLAMA, dropout=0.1)
    plain, lean = unit_loads(shape, 1, 2), unit_loads(shape, 1, 2, gpu_element=2)
    stream = 2 * shape.sequence * shape.hidden
    less = [one.saved_elements - two.saved_elements for one, two in zip(plain, lean, strict=True)]
    # The embedding has a mask, halves of layers a mask and a norm, the head a norm.
    assert less == [stream // 2, *[stream + stream // 2] * (2 * shape.layers), stream]
    gpt = replace(shape, norm="layernorm")
    saved = [load.saved_elements for load in unit_loads(gpt, 2, 2, sequence_parallel=True)]
    cut = unit_loads(gpt, 2, 2, sequence_parallel=True, gpu_element=2)
    assert [load.saved_elements for load in cut] == saved


def test_an_update_of_muon_computes_of_whole_matrices():
    """Of each matrix and step X X', its square, and that times X; embedding and head have none."""
    shape = replace(LLAMA, layers=1)
    loads = unit_loads(shape, 1, 1, ns_steps=3)
    hidden, keys, ffn = shape.hidden, shape.kv_hidden, shape.ffn

    def flops(few, many):
        return 3 * (4 * few * few * many + 2 * few**3)

    attention = 2 * flops(hidden, hidden) + 2 * flops(min(hidden, keys), max(hidden, keys))
    mlp = 3 * flops(min(hidden, ffn), max(hidden, ffn))
    found = [sum(n * product.flops for product, n in load.update_products) for load in loads]
    assert found == [0, attention, mlp, 0]
    stage = sum_loads(list(loads))
    assert sum(n * product.flops for product, n in stage.update_products) == attention + mlp
    machine = Hardware(
        name="mine", peak_flops=1e12, efficiency=0.5, memory_gb=1, memory_bandwidth=1e20,
        intra_bandwidth=1e9, intra_latency_s=0, inter_bandwidth=1e9, inter_latency_s=0,
        gpus_per_node=1,
    )  # fmt: skip
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=1)
    plain, turned = (
        AnalyticCosts((load,), machine).table(program).step[0]
        for load in (replace(stage, update_products=()), stage)
    )
    assert turned - plain == pytest.approx((attention + mlp) / 0.5e12)


def test_selective_layers_keep_a_ranks_share_of_their_experts():
    """The experts' products of all tokens were said to be kept on each tensor-parallel rank."""
    shape = replace(LLAMA, moe=MoeShape(experts=4, per_token=2, ffn=16, shared=2))
    whole, shared = (selective_shares(shape, tp)[2].saved_elements for tp in (1, 2))
    rows, ffn = shape.sequence * 2, 16
    # Two inputs of an activation, of experts and of two shared ones, and the experts' results.
    assert whole - shared == (2 * rows * ffn + 2 * rows * ffn + rows * shape.hidden) // 2
