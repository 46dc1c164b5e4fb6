"""What holds beyond one training step: other modes, steps in a row, seeds, shapes, states."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.models.replay.replay_model import ReplayModel
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.strategies.models.replay.parity import (
    assert_same,
    call,
    run_pipeline,
    stage_ranges,
    uncut,
)
from tests.strategies.models.replay.zoo import (
    DIM,
    GPT,
    Classifier,
    Expert,
    Language,
    build,
    classes,
    rand,
    tokens,
)


def test_the_probe_leaves_module_batch_and_random_states_alone():
    module, batches = build("resnet")
    module.net.layer1[0].counter = [1, 2]
    state = copy.deepcopy(module.state_dict())
    batch = copy.deepcopy(batches[0])
    cpu = torch.get_rng_state()
    ReplayModel.probe(module, batches[0])
    assert torch.equal(torch.get_rng_state(), cpu)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(batch, batches[0], strict=True))
    assert "forward" not in vars(module.net.layer1[0]) and "log" not in vars(module)


def test_a_module_on_meta_is_probed_without_memory():
    with torch.device("meta"):
        module = Language(GPT(depth=2))
    model = ReplayModel.probe(module, tokens()())
    assert [unit.name for unit in model.units][2:4] == [
        "model.transformer.h.0",
        "model.transformer.h.1",
    ]
    assert all(parameter.is_meta for parameter in module.parameters())


def test_two_steps_in_a_row_follow_the_uncut_training():
    reference, _ = build("nanogpt_tied")
    modules = [build("nanogpt_tied")[0] for _ in range(2)]
    steps = [[tokens()() for _ in range(2)] for _ in range(2)]
    owners = [ReplayModel.probe(m, steps[0][0]) for m in modules]
    for rank, owner in enumerate(owners):
        owner.cut(stage_ranges((2, 4, 5), 7), [rank, rank + 2])
    shared = owners[0].shared_parameters()
    assert shared == (("model.transformer.wte.weight", (0, 3)),)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in [reference, *modules]]
    for batches in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = uncut(reference, batches)
        assert_same(run_pipeline(owners, modules, 4, batches), expected)
        tied = [dict(m.named_parameters()) for m in modules]
        total = sum(t["model.transformer.wte.weight"].grad for t in tied)
        for t in tied:  # what the runtime does at the flush
            t["model.transformer.wte.weight"].grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()


class Dropouts(LightningModule):
    """Dropout inside layers, between layers, and noise drawn by every stage."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for _ in range(4)]
        )
        self.head = nn.Linear(DIM, 5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            noise = torch.rand_like(batch[0])
            x = F.dropout(block(x), 0.3) + noise
            x = x + 0.1 * torch.randn_like(x) + torch.rand(DIM, dtype=x.dtype)
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("name", ["between", "gpt", "checkpoint"])
def test_dropout_does_not_depend_on_the_cut(name):
    torch.manual_seed(0)
    if name == "between":
        module, batches = Dropouts().double(), [(rand(4, DIM), classes(4)) for _ in range(2)]
    else:
        module = Language(GPT(dropout=0.3, use_checkpoint=name == "checkpoint")).double()
        batches = [tokens()() for _ in range(2)]
    model = ReplayModel.probe(module, batches[0])
    num_units = len(model.units)
    model.cut([range(num_units)], [0])
    expected = run_pipeline([model], [module], 1, batches, seed=7)
    state = torch.get_rng_state()
    other = run_pipeline([model], [module], 1, batches, seed=8)
    assert other.losses != expected.losses
    assert torch.equal(torch.get_rng_state(), state), "a seeded step must not steer the data order"
    for cuts in [(1,), (2,), (3,), (num_units - 1,), (1, 2, 3)]:
        module.zero_grad(set_to_none=True)
        model.cut(stage_ranges(cuts, num_units), range(len(cuts) + 1))
        assert_same(run_pipeline([model], [module], len(cuts) + 1, batches, seed=7), expected)


def test_checkpointed_dropout_is_the_same_as_without_checkpoint():
    grads = []
    for use_checkpoint in (False, True):
        torch.manual_seed(0)
        module = Language(GPT(dropout=0.3, use_checkpoint=use_checkpoint)).double()
        batches = [tokens()()]
        model = ReplayModel.probe(module, batches[0])
        model.cut(stage_ranges((3,), 7), [0, 1])
        grads.append(run_pipeline([model], [module], 2, batches, seed=3))
    assert_same(grads[1], grads[0])


@pytest.mark.parametrize("mode", ["validate", "test", "predict"])
@pytest.mark.parametrize("inference", [True, False])
def test_other_modes_replay_their_own_step(mode, inference):
    class Modes(Classifier):
        def test_step(self, batch, batch_idx):
            return self.validation_step(batch, batch_idx)

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return self(batch[0]).argmax(-1)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU(), nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
    )
    module = Modes(net).double()
    batch = (rand(4, DIM), classes(4))
    model = ReplayModel.probe(module, batch)
    model.cut(stage_ranges((1, 3), 4), [0, 1, 2])
    module.eval()
    context = torch.inference_mode() if inference else torch.no_grad()
    with context:
        step = {
            "validate": module.validation_step,
            "test": module.test_step,
            "predict": module.predict_step,
        }[mode]
        logged = {}
        module.__dict__["log_dict"] = logged.update
        expected = step(batch, 0)
        del module.__dict__["log_dict"]
        tensors = ()
        for _ in range(2):
            tensors = ()
            for stage in range(3):
                output = model.forward(
                    stage, tensors, batch=batch, batch_idx=0, microbatch=0, mode=mode, seed=None
                )
                tensors = output.tensors
    torch.testing.assert_close(output.result, expected)
    assert output.loss is None
    assert {log.name: log.value for log in output.logs} == {k: float(v) for k, v in logged.items()}


def test_validation_may_leave_layers_out_and_add_others():
    class Heads(LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
            self.auxiliary, self.head = nn.Linear(DIM, 5), nn.Linear(DIM, 5)
            self.probe_head = nn.Linear(5, 2)

        def training_step(self, batch, batch_idx):
            x = self.body[1](self.body[0](batch[0]))
            auxiliary = F.cross_entropy(self.auxiliary(x), batch[1])
            return F.cross_entropy(self.head(self.body[2](x)), batch[1]) + auxiliary

        def validation_step(self, batch, batch_idx):
            x = batch[0]
            for layer in self.body:
                x = layer(x)
            return self.probe_head(self.head(x))

    torch.manual_seed(0)
    modules = [Heads().double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    batch = (rand(4, DIM), classes(4))
    with torch.no_grad():
        expected = modules[0].validation_step(batch, 0)
        owners = [ReplayModel.probe(m, batch) for m in modules]
        for rank, owner in enumerate(owners):
            owner.cut(stage_ranges((1, 3, 4), 5), [rank, rank + 2])
        owned = [{name for name, _ in m.named_parameters()} for m in modules]
        assert owned[0] | owned[1] == set(owners[0].parameter_names)
        tensors = ()
        for stage in range(4):
            output = owners[stage % 2].forward(
                stage, tensors, batch=batch, batch_idx=0, microbatch=0, mode="validate", seed=None
            )
            tensors = output.tensors
    torch.testing.assert_close(output.result, expected)


def test_microbatches_of_other_shapes_than_the_probe():
    expected_module, _ = build("side_inputs_mask_rotary")
    module, batches = build("side_inputs_mask_rotary")
    batches = [
        {"ids": classes(b, t, num=11), "lengths": torch.full((b,), t - 1)}
        for b, t in ((2, 6), (1, 5), (3, 9))
    ]
    expected = uncut(expected_module, batches)
    model = ReplayModel.probe(module, batches[0])
    model.cut(stage_ranges((1, 3), 5), [0, 1, 2])
    assert_same(run_pipeline([model], [module], 3, batches), expected)


def test_other_shapes_also_where_the_layers_are_on_another_rank():
    expected_module, _ = build("moe_aux_returned")
    modules = [build("moe_aux_returned")[0] for _ in range(2)]
    batches = [(rand(n, DIM), classes(n)) for n in (6, 4, 9)]
    expected = uncut(expected_module, batches)
    owners = [ReplayModel.probe(m, batches[0]) for m in modules]
    for rank, owner in enumerate(owners):
        owner.cut(stage_ranges((1, 2, 4), 5), [rank, rank + 2])
    assert_same(run_pipeline(owners, modules, 4, batches), expected)


def test_empty_stages_pass_everything_on():
    module, batches = build("unet")
    expected = uncut(build("unet")[0], batches)
    model = ReplayModel.probe(module, batches[0])
    stages = [range(0), range(3), range(3, 3), range(3, 6), range(6, 6)]
    model.cut(stages, range(5))
    assert list(model.stage_parameters(2)) == []
    assert_same(run_pipeline([model], [module], 5, batches), expected)


def test_long_skips_go_straight_from_the_stage_that_makes_them_to_the_one_that_uses_them():
    module, batches = build("unet")
    expected = uncut(copy.deepcopy(module), batches)
    model = ReplayModel.probe(module, batches[0])
    model.cut(stage_ranges((1, 2, 3, 4, 5), 6), range(6))
    result = run_pipeline([model], [module], 6, batches)
    assert_same(result, expected)
    # Stages 1 and 2 pool what they get, and keep the large tensor for the other arm.
    chain = {(0, 1): 1, (1, 2): 1, (2, 3): 2, (3, 4): 1, (4, 5): 1}
    assert result.links == chain | {(1, 4): 1}
    assert model.skips == ((1, 4),)
    # Stage 2 does not see the one that stage 1 gives to stage 4, nor does stage 3.
    shapes = [[tuple(b.spec.shape) for b in model.boundaries(stage)] for stage in range(6)]
    assert shapes[1] == [(2, 6, 4, 4), (2, 4, 8, 8)]
    assert (2, 4, 8, 8) not in shapes[2] + shapes[3]
    assert shapes[5] == []


def test_what_every_stage_uses_goes_along_the_chain():
    module, batches = build("side_inputs_mask_rotary")
    model = ReplayModel.probe(module, batches[0])
    model.cut(stage_ranges((1, 2, 3), len(model.units)), range(4))
    assert model.skips == ()


def test_other_modes_keep_to_the_links_that_training_has():
    module, batches = build("unet")
    whole = copy.deepcopy(module)
    model = ReplayModel.probe(module, batches[0])
    # The whole first arm is on one stage, the second on another: no skip in training.
    model.cut([range(3), range(3, 6)], range(2))
    assert model.skips == ()
    for owner in (whole, module):
        owner.eval()
        owner.__dict__["log_dict"] = lambda *_, **__: None
    batch = batches[0]
    first = model.forward(0, (), batch=batch, batch_idx=0, microbatch=0, mode="validate", seed=None)
    last = model.forward(
        1, first.tensors, batch=batch, batch_idx=0, microbatch=0, mode="validate", seed=None
    )
    assert torch.equal(last.result, whole.validation_step(batch, 0))
    assert first.groups == ((1, 3),)


def test_a_named_chain_makes_its_children_units():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([GPTBlock() for _ in range(2)])

        def forward(self, x):
            for step in self.steps:
                x = step(x)
            return x

    class GPTBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    module = Classifier(nn.Sequential(Inner(), Inner(), nn.Linear(DIM, 5))).double()
    batch = (rand(3, DIM), classes(3))
    names = [unit.name for unit in ReplayModel.probe(module, batch).units]
    assert names == ["net.0", "net.1", "net.2"]
    names = [u.name for u in ReplayModel.probe(module, batch, chain="net.0.steps").units]
    assert names == ["net.0.steps.0", "net.0.steps.1", "net.1", "net.2"]


def test_blocks_called_by_other_methods_than_forward_are_looked_into():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def encode(self, x):
            return self.b(torch.relu(self.a(x)))

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.coders = nn.ModuleList([Coder() for _ in range(2)])

        def training_step(self, batch, batch_idx):
            x = batch[0]
            for coder in self.coders:
                x = coder.encode(x)
            return F.cross_entropy(x, batch[1])

    model = ReplayModel.probe(Net().double(), (rand(3, DIM), classes(3)))
    assert [u.name for u in model.units] == ["coders.0.a", "coders.0.b", "coders.1.a", "coders.1.b"]


def test_parameters_of_other_stages_hold_no_memory_but_keep_their_names():
    module, batches = build("nanogpt_tied")
    kept = module.model.transformer.h[2].attn.qkv.weight
    names = [name for name, _ in module.named_parameters()]
    model = ReplayModel.probe(module, batches[0])
    model.cut(stage_ranges((4,), 7), [0])
    assert kept.numel() == 0
    assert "model.transformer.h.2.attn.qkv.weight" not in module.state_dict()
    assert module.model.transformer.h[2].attn.qkv.weight.shape == (3 * DIM, DIM)
    assert list(model.parameter_names) == names
    assert {n for n, _ in model.stage_parameters(0)} == {n for n, _ in module.named_parameters()}


def test_layers_run_outside_of_any_function_mode():
    from torch.overrides import _get_current_function_mode_stack

    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(len(_get_current_function_mode_stack()))
            return super().forward(x)

    module = Classifier(nn.Sequential(*[Spy(DIM, DIM) for _ in range(3)], nn.Linear(DIM, 5)))
    batch = (torch.randn(2, DIM), classes(2))
    model = ReplayModel.probe(module, batch)
    model.cut(stage_ranges((2,), 4), [0, 1])
    seen.clear()
    run_pipeline([model], [module], 2, [batch])
    assert seen == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it with hasattr
@pytest.mark.parametrize("wrap", [True, False])
def test_compiled_layers_keep_their_compiled_code(wrap):
    calls = []

    def backend(graph, inputs):
        calls.append(len(inputs))
        return graph.forward

    batches = [(rand(3, DIM), classes(3))]
    modules = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = [Expert().double() for _ in range(3)]
        if compiled and wrap:
            layers = [torch.compile(layer, backend=backend) for layer in layers]
        elif compiled:
            for layer in layers:
                layer.compile(backend=backend)
        modules.append(Classifier(nn.Sequential(*layers)))
    expected = uncut(modules[0], batches)
    expected.grads = {
        name.replace(".up", "._orig_mod.up").replace(".down", "._orig_mod.down")
        if wrap
        else name: grad
        for name, grad in expected.grads.items()
    }
    model = ReplayModel.probe(modules[1], batches[0])
    assert len(model.units) == 3 and not calls
    model.cut(stage_ranges((1, 2), 3), range(3))
    assert_same(run_pipeline([model], [modules[1]], 3, batches), expected)
    assert calls


class Remembers(nn.Linear):
    """Keeps its output on itself, for debugging."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("name", ["unet", "hf_llama", "remembers"])
def test_a_forward_keeps_nothing_alive(name):
    if name == "remembers":
        module = Classifier(nn.Sequential(*[Remembers(DIM, DIM) for _ in range(3)]))
        batches = [(torch.randn(3, DIM), classes(3))]
    else:
        module, batches = build(name)
    model = ReplayModel.probe(module, batches[0])
    model.cut(stage_ranges((2,), len(model.units)), [0, 1])
    gc.collect()
    gc.disable()  # reference cycles would hold activations until some later collection
    try:
        output = model.forward(
            0, (), batch=batches[0], batch_idx=0, microbatch=0, mode="train", seed=1
        )
        leaves = tuple(t.detach().requires_grad_() for t in output.tensors)
        last = model.forward(
            1, leaves, batch=batches[0], batch_idx=0, microbatch=0, mode="train", seed=1
        )
        watched = [weakref.ref(t) for t in (*output.tensors, *leaves, last.loss)]
        if name == "remembers":  # the user's own doing; the first is a hole by now
            assert module.net[0].last.shape == (3, DIM)
            module.net[1].last = module.net[2].last = None
        del output, leaves, last
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_no_cut_between_two_views_that_are_written_on_both_sides():
    class Views(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])

        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0]).clone()
            half = x[:, :4]
            y = self.layers[2](self.layers[1](batch[0]))
            half += 1  # changes x as well
            return F.cross_entropy(self.layers[3](x + y) + half.sum(), batch[1])

    module, batches = Views().double(), [(rand(3, DIM), classes(3))]
    expected = uncut(copy.deepcopy(module), batches)
    model = ReplayModel.probe(module, batches[0])
    assert [unit.name for unit in model.units] == ["layers.0", "layers.1", "layers.3"]
    for cuts in ((1,), (2,), (1, 2)):
        module.zero_grad()
        model.cut(stage_ranges(cuts, 3), range(len(cuts) + 1))
        assert_same(run_pipeline([model], [module], len(cuts) + 1, batches), expected)


def test_step_without_batch_idx_and_dict_results():
    module, batches = build("diffusion")
    model = ReplayModel.probe(module, batches[0])
    num_units = len(model.units)
    model.cut([range(num_units)], [0])
    output = model.forward(
        0, (), batch=batches[0], batch_idx=0, microbatch=0, mode="train", seed=None
    )
    assert output.loss.requires_grad and not output.result["pred"].requires_grad
    torch.testing.assert_close(output.loss, call(module_without_log(module), batches[0], 0)["loss"])
    assert output.logs[0].options == {"on_step": True}


def module_without_log(module):
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *args, **kwargs: None
    return module


def test_mixed_precision_crosses_cuts():
    module, batches = build("nanogpt_tied")
    module = module.float()
    batches = batches[:1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = uncut(build("nanogpt_tied")[0].float(), batches)
        model = ReplayModel.probe(module, batches[0])
        for cuts in ((2, 4), (3, 6)):
            module.zero_grad(set_to_none=True)
            model.cut(stage_ranges(cuts, 7), range(3))
            got = run_pipeline([model], [module], 3, batches)
            assert got.losses == pytest.approx(expected.losses)
            for name, grad in expected.grads.items():
                torch.testing.assert_close(got.grads[name], grad, rtol=1e-2, atol=1e-3)


def test_a_validation_run_needs_no_training_step():
    module, batches = build("mlp")
    with torch.inference_mode():
        model = ReplayModel.probe(module, batches[0], mode="validate")
        model.cut(stage_ranges((1,), 3), [0, 1])
        tensors = model.forward(
            0, (), batch=batches[0], batch_idx=0, microbatch=0, mode="validate", seed=None
        ).tensors
        output = model.forward(
            1, tensors, batch=batches[0], batch_idx=0, microbatch=0, mode="validate", seed=None
        )
        torch.testing.assert_close(output.result, module(batches[0][0]))
    assert [log.name for log in output.logs] == ["val_acc", "one"]


class Eased(LightningModule):
    """An operation between layers, in evaluation, where torch counts no versions of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


@pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|num_workers).*")
def test_one_process_evaluates_what_has_operations_between_its_layers():
    module, rows = Eased(), torch.ones(8, 4)
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", strategy=PipelineStrategy(pp=1, num_microbatches=2), logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (found,) = trainer.validate(module, loader, verbose=False)
    expected = module.net.eval()(rows)
    assert found["loss"] == pytest.approx(expected.mean().item())
    given = trainer.predict(module, loader)
    assert given is not None
    assert torch.allclose(torch.cat(given), expected)
