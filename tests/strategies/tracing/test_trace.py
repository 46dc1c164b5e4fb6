"""A trace's figures: the formulas' for the built-in transformer, the real step's for any other."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from launcher.workloads.language_model import LanguageModel
from launcher.workloads.loads import selective_shares
from launcher.workloads.transformer_shape import MoeShape, TransformerShape, unit_specs
from launcher.workloads.transformer_share import expert_part
from strategies import PipelineStrategy
from strategies.costs.trace_file import dump_trace, parse_trace
from strategies.errors import ModelError
from strategies.models.flops import FlopCount, formula_of
from strategies.models.replay.gate import call_step
from strategies.models.replay.hole import Spec
from strategies.models.replay.replay_model import ReplayModel
from strategies.planner.cut import Tensor, balance, handed_on, skips
from strategies.planner.stage_layers import spans
from strategies.runtime.step.microbatch import count_rows
from strategies.tracing.equal_calls import Slot
from strategies.tracing.figures import Tracer
from strategies.tracing.trace import empty_weights, trace_model
from tests.strategies.models.replay.parity import chosen_cuts, stage_ranges
from tests.strategies.models.replay.zoo import build

SIZES = {"layers": 3, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 90, "sequence": 24}
SHAPES = [
    TransformerShape(**SIZES, kv_heads=2),
    TransformerShape(
        **SIZES, kv_heads=4, norm="layernorm", activation="gelu", position="learned",
        tie_embeddings=True, dropout=0.1,
    ),
]  # fmt: skip


def tokens(shape: TransformerShape, rows: int) -> dict[str, torch.Tensor]:
    found = torch.randint(shape.vocab, (rows, shape.sequence + 1))
    return {"tokens": found[:, :-1], "targets": found[:, 1:]}


def trace_of(shape: TransformerShape):
    with torch.device("meta"):
        module = LanguageModel(shape)
    return trace_model(module, [(rows, tokens(shape, rows)) for rows in (2, 4)])


@pytest.mark.parametrize("shape", SHAPES, ids=["llama", "gpt"])
def test_the_built_in_transformer_is_what_its_formulas_say(shape):
    trace = trace_of(shape)
    specs = unit_specs(shape)
    for unit, share in zip(trace.units[1:-1], selective_shares(shape, 1)[1:-1], strict=True):
        assert unit.again is not None
        assert unit.again.flops.per_row == share.again_flops
        assert unit.again.saved_bytes.per_row == 4 * share.saved_elements
    assert trace.declared
    assert trace.unknown == ()
    assert trace.num_parameters == shape.num_parameters
    scores = 4 * shape.sequence**2 * shape.hidden
    for number, (unit, spec) in enumerate(zip(trace.units, specs, strict=True)):
        assert unit.name == spec.name
        assert (unit.parameters, unit.tied_parameters) == (spec.parameters, spec.tied_parameters)
        assert (unit.forward_flops.fixed, unit.forward_flops.per_row) == (0, spec.forward_flops)
        attention = scores if unit.name.endswith("attention") else 0
        # Scores have no weights; the kernel computes them once more for the backward.
        assert unit.weight_flops.per_row == spec.forward_flops - attention
        assert unit.input_flops.per_row == spec.forward_flops + 1.5 * attention
        if number + 1 < len(specs):
            assert trace.crossing_bytes(number, 1) == 4 * spec.output_elements
        kept = unit.saved_bytes.at(1) / 4
        # What the unit before keeps as well is one tensor; token ids count for two elements.
        assert kept <= spec.saved_elements + 2 * shape.sequence
    assert sum(unit.saved_bytes.at(1) for unit in trace.units) / 4 == pytest.approx(
        sum(spec.saved_elements for spec in specs), rel=0.05
    )


def test_experts_that_ranks_can_share_are_what_their_formulas_say():
    moe = MoeShape(experts=6, per_token=2, ffn=32, shared=1, first_dense=1)
    shape = TransformerShape(**SIZES, kv_heads=2, moe=moe)
    trace, part = trace_of(shape), expert_part(shape)
    assert parse_trace(dump_trace(trace)) == trace
    mixed = [unit for unit in trace.units if unit.experts is not None]
    assert [unit.name for unit in mixed] == [unit_specs(shape)[n].name for n in (4, 6)]
    for found in (unit.experts for unit in mixed):
        assert found is not None
        assert (found.layers, found.experts, found.parameters) == (1, 6, part.parameters)
        assert (found.flops.fixed, found.flops.per_row) == (0, part.forward_flops)
        assert found.sent_bytes.at(3) == 4 * 3 * part.exchanged
        assert found.saved_bytes.at(3) == pytest.approx(4 * 3 * part.saved_elements, rel=0.05)


def test_a_13b_model_is_traced_without_its_weights():
    shape = TransformerShape(
        layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000, sequence=256
    )
    trace = trace_of(shape)
    assert len(trace.units) == 82
    assert trace.num_parameters == shape.num_parameters > 13e9


# Those whose forward draws nothing and whose layers need no values.
STEPS = [
    "nanogpt_tied", "resnet", "unet", "diffusion", "moe_aux_returned", "side_inputs_mask_rotary",
    "two_towers", "siamese_shared_encoder", "recurrent_cell", "vit", "frozen_backbone", "densenet",
    "deep_supervision",
]  # fmt: skip


# Every day without the two that take longest: their kinds of layers are in others, too.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n in ("unet", "vit") else ()) for n in STEPS],
)
def test_units_add_up_to_what_a_real_step_takes(name):
    module, batches = build(name)
    rows = count_rows(batches[0])
    trace = trace_model(module, [(rows, batches[0])])
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    module.log = module.log_dict = lambda *_, **__: None
    with FlopCount() as count:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = call_step(module, "train", batches[0], 0)
        forward = count.flops
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        backward = count.flops - forward
    assert trace.unknown == ()
    assert count.unknown == set()
    assert sum(unit.parameters for unit in trace.units) == sum(
        p.numel() for p in module.parameters()
    )
    assert sum(unit.forward_flops.at(rows) for unit in trace.units) == forward
    both = sum(unit.input_flops.at(rows) + unit.weight_flops.at(rows) for unit in trace.units)
    assert both == pytest.approx(backward, rel=0.02)
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    own |= {t.untyped_storage()._cdata for t in batches[0] if isinstance(t, torch.Tensor)}
    kept = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own)
    assert sum(unit.saved_bytes.at(rows) for unit in trace.units) == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize(
    "name",
    ["unet", *(pytest.param(n, marks=pytest.mark.full) for n in ("resnet", "two_towers", "vit"))],
)
def test_the_operator_graph_of_an_export_has_as_many_operations(name):
    module, batches = build(name)
    rows = count_rows(batches[0])
    module.log = module.log_dict = lambda *_, **__: None

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch):
            return self.module.training_step(batch, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(Whole(), (batches[0],), strict=False).run_decompositions()
    flops = 0
    for node in exported.graph.nodes:
        formula = formula_of(getattr(node.target, "_overloadpacket", None))
        if node.op == "call_function" and formula is not None:
            value = lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a  # noqa: E731
            args, kwargs = torch.utils._pytree.tree_map(value, (node.args, node.kwargs))
            flops += formula(*args, **kwargs, out_val=node.meta["val"])
    trace = trace_model(module, [(rows, batches[0])])
    assert sum(unit.forward_flops.at(rows) for unit in trace.units) == flops


@pytest.mark.parametrize("name", ["unet", "diffusion", "densenet", "two_towers", "nanogpt_tied"])
def test_what_stages_hand_on_is_what_the_runtime_sends(name):
    module, batches = build(name)
    rows = count_rows(batches[0])
    trace = trace_model(module, [(rows, batches[0])])
    tensors = [Tensor(t.producer, t.consumers, t.num_bytes.at(rows)) for t in trace.tensors]
    model = ReplayModel.probe(module, batches[0])
    assert tuple(unit.name for unit in trace.units) == tuple(unit.name for unit in model.units)
    for cuts in chosen_cuts(len(model.units)):
        ranges = [r for r in stage_ranges(cuts, len(model.units)) if r]
        model.cut(ranges, range(len(ranges)))
        layout = model._layouts[model._first]
        handed = handed_on(tensors, tuple(map(len, ranges)))
        assert skips(handed) == model.skips
        for stage, (_, leave) in enumerate(layout.cuts[:-1]):
            sent = sum(boundary.spec.num_bytes for boundary in leave.tensors)
            assert sent == sum(size for source, _, size in handed if source == stage)


def test_weights_take_no_memory_and_constants_have_values():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = torch.linspace(0, 0.1, 3)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.rates = [rate.item() for rate in rates]
            self.register_buffer("table", torch.arange(3.0))
            self.tied = self.layers[0].weight
            self.tied_twice = nn.Parameter(torch.randn(2))
            self.again = self.tied_twice

    with empty_weights():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.rates[2] == pytest.approx(0.1)
    assert net.table.tolist() == [0, 1, 2]
    assert net.tied is net.layers[0].weight
    assert net.again is net.tied_twice
    assert not nn.Linear(2, 2).weight.is_meta


class Step(LightningModule):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), layer, nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.last(self.middle(self.first(batch))).mean()


@torch.library.custom_op("foldpipe_tests::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


mix.register_fake(lambda x, weight: torch.empty_like(x))
mix.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Mixing(nn.Linear):
    def forward(self, x):
        return mix(x, self.weight)


def test_an_operation_without_a_formula_is_reported_and_one_with_a_users_own_is_counted():
    batch = torch.zeros(4, 8)
    trace = trace_model(Step(Mixing(8, 8)), [(4, batch)])
    assert trace.unknown == (("foldpipe_tests::mix", "middle"),)
    assert trace.units[1].forward_flops.at(4) == 4 * 8

    @register_flop_formula(torch.ops.foldpipe_tests.mix)
    def formula(x, weight, *_, out_shape=None, **__):
        return 2 * x[0] * x[1] * weight[1]

    trace = trace_model(Step(Mixing(8, 8)), [(4, batch)])
    assert trace.unknown == ()
    assert trace.units[1].forward_flops.at(4) == 2 * 4 * 8 * 8


class Looking(nn.Linear):
    def forward(self, x):
        if x.abs().sum().item() < 1e9:
            raise ValueError("too small")
        return super().forward(x)


def test_a_layer_that_cannot_be_traced_is_named_with_its_operation():
    class Declared(Step):
        def pipeline_units(self):
            return list(self.named_children())

        def pipeline_inputs(self, batch):
            return (batch,)

        def pipeline_result(self, tensors, batch, batch_idx, mode):
            return tensors[0].mean()

    with pytest.raises(ModelError, match=r"middle: aten::_local_scalar_dense cannot be traced"):
        trace_model(Declared(Looking(8, 8)), [(4, torch.zeros(4, 8))])
    # A replayed step meets it while it is probed.
    with pytest.raises(ModelError, match=r"test_trace\.py:\d+: .*item"):
        trace_model(Step(Looking(8, 8)), [(4, torch.zeros(4, 8))])


class Windowed(nn.Module):
    """Its layers differ by what an attribute of a container or a function says."""

    def __init__(self, window: dict[str, int], by: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.window, self.by = window, by

    def forward(self, x):
        return self.by(x[:, : self.window["size"]] @ self.weight[: self.window["size"]])


@pytest.mark.parametrize(
    "pair",
    [
        (nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)),
        (nn.Conv2d(8, 8, 3, padding=2), nn.Conv2d(8, 8, 3, padding=2, dilation=2)),
        (Windowed({"size": 8}, torch.tanh), Windowed({"size": 4}, torch.tanh)),
        (Windowed({"size": 8}, torch.tanh), Windowed({"size": 8}, torch.matrix_exp)),
    ],
    ids=["stride", "dilation", "window", "function"],
)
def test_layers_of_one_type_with_other_settings_are_traced_each(pair):
    of_images = isinstance(pair[0], nn.Conv2d)
    rows = (Slot(Spec.of(torch.zeros((2, 8, 8, 8) if of_images else (8, 8))), 0),)
    together = Tracer()
    one, other = (together.layer("", layer, rows, {}) for layer in pair)
    assert one != other
    assert [one, other] == [Tracer().layer("", layer, rows, {}) for layer in pair]


def test_figures_are_lines_in_the_rows():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.table = torch.ones(5, 8)

        def forward(self, x):
            constants = self.table.exp().sum(0) * self.scale
            return (x * constants).tanh()

    trace = trace_model(Step(Norm()), [(rows, torch.zeros(rows, 8)) for rows in (2, 4)])
    saved = trace.units[1].saved_bytes
    assert saved.per_row > 0
    assert saved.fixed >= 8 * 4
    assert trace.units[0].forward_flops.fixed == 0


def test_operations_without_a_formula_do_no_products_unless_they_decompose():
    square = torch.eye(3)
    with FlopCount() as count:
        square.cumsum(0).sort()
        torch.linalg.vector_norm(square)
    assert (count.unknown, count.flops) == (set(), 0)
    with FlopCount() as count:
        torch.linalg.inv(square)
        torch.linalg.cholesky(square)
    assert {name.split("::")[1].split("_")[1] for name in count.unknown} == {"inv", "cholesky"}
    assert count.flops > 0


@pytest.mark.parametrize("name", ["unet", "nanogpt_tied", "two_towers"])
def test_described_stages_are_those_that_ranks_cut(name):
    module, batches = build(name)
    said = PipelineStrategy(pp=3).describe(module, batches[0]).splitlines()
    model = ReplayModel.probe(module, batches[0])
    model.cut(stages := balance([unit.cost for unit in model.units], 3), range(3))
    layout = model._layouts[model._first]
    for stage, (line, units) in enumerate(zip(said, stages, strict=True)):
        names = spans([model.units[unit].name for unit in units])
        assert line.startswith(f"rank {stage}: stage {stage}: {names}, ")
        sent = {int(to): int(n) for to, n in re.findall(r"to stage (\d+): (\d+) tensor", line)}
        assert sent == dict(layout.groups[stage])


def test_the_page_on_recordings_shows_what_describe_lists(capsys):
    page = (Path(__file__).parents[3] / "docs/how/recording.md").read_text()
    (code,) = re.findall(r'```python title="record.py"\n(.*?)```', page, re.DOTALL)
    (shown,) = re.findall(r"```output\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "record.py", "exec"), {"__name__": "record"})
    assert capsys.readouterr().out == shown
