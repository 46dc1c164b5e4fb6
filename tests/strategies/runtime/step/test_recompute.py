"""Checkpointed forwards and R: the same numbers, and nothing is done to the module twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torchmetrics import MeanMetric

from strategies.errors import ModelError
from strategies.models.split_backward.input_step import input_backward
from strategies.models.stage_model import StageOutput
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.recompute import Recomputation
from tests.strategies.models.split_backward.cases import CASES
from tests.strategies.models.split_backward.harness import FIFO, compare, flatten, full, start
from tests.strategies.models.split_backward.harness import wants as wants_gradient


def stage(module):
    return lambda inputs, data: StageOutput(tuple(flatten(module(*inputs))))


def gradients_of(outputs, microbatch):
    torch.manual_seed(200 + microbatch)
    return [torch.randn_like(output) for output in outputs]


def checkpointed(run, case):
    """F of three microbatches, then R of each with what its backward needs."""
    recomputation = Recomputation(run.module)
    kept = []
    for microbatch in range(3):
        torch.manual_seed(100 + microbatch)
        data = tuple(t.requires_grad_(wants_gradient(t, case)) for t in case.data())
        kept.append(recomputation.forward(0, data, None, stage(run.module)))
    for microbatch, (entry, output) in enumerate(kept):
        inputs, again = recomputation.again(entry, stage(run.module))
        run.inputs.append([leaf for leaf in inputs if leaf.requires_grad])
        for first, second in zip(output.tensors, again.tensors, strict=True):
            assert first.requires_grad == second.requires_grad
            assert torch.equal(first, second)
        outputs = [tensor for tensor in again.tensors if tensor.requires_grad]
        yield outputs, gradients_of(outputs, microbatch)


@pytest.mark.parametrize("name", CASES)
def test_recomputed_forwards_give_the_outputs_and_gradients_of_plain_ones(name):
    case = CASES[name]
    ours, theirs = start(case)
    full(theirs, case)
    for outputs, gradients in checkpointed(ours, case):
        if outputs:
            torch.autograd.backward(outputs, gradients)
    compare(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_recomputed_forwards_can_be_split(name):
    case = CASES[name]
    ours, theirs = start(case)
    full(theirs, case)
    names = {id(p): key for key, p in ours.module.named_parameters()}
    graphs = list(checkpointed(ours, case))
    pending = {}
    for step in FIFO:
        index = int(step[1])
        if step[0] == "I":
            pending[index] = input_backward(*graphs[index], ours.inputs[index])
            ours.deferred |= {names[id(p)] for p in pending[index].parameters}
        else:
            pending.pop(index).run()
    compare(ours, theirs)
    assert ours.deferred == case.waits


class Drawing(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.dropout(self.linear(x), 0.5, True)
        return x * random.random() + float(np.random.rand())


class Changing(nn.Module):
    """Has state of every kind, some of which decides what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = spectral_norm(nn.Linear(6, 6))
        self.metric = MeanMetric()
        self.calls = 0
        self.seen = []
        self.register_buffer("steps", torch.zeros(()))
        self.quiet = nn.Buffer(torch.ones(3))

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.steps = self.steps + 1
        self.latest = x.detach() * 2
        x = self.linear(self.norm(x)) * self.calls + self.steps
        self.metric.update(x.mean().detach())
        return x


def test_r_draws_what_its_forward_drew_and_disturbs_nobody():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    module = Drawing()
    recomputation = Recomputation(module)
    inputs = [torch.randn(4, 6).requires_grad_() for _ in range(3)]
    kept = [recomputation.forward(0, (x,), None, stage(module)) for x in inputs]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for entry, output in reversed(kept):
        _, again = recomputation.again(entry, stage(module))
        assert torch.equal(again.tensors[0], output.tensors[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_r_finds_the_module_as_its_forward_did_and_leaves_it_as_it_is():
    torch.manual_seed(1)
    module = Changing()
    recomputation = Recomputation(module)
    inputs = [torch.randn(4, 6).requires_grad_() for _ in range(4)]
    kept = [recomputation.forward(0, (x,), None, stage(module)) for x in inputs]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    latest, mean = module.latest, module.metric.compute()
    for entry, output in reversed(kept):
        _, again = recomputation.again(entry, stage(module))
        assert torch.equal(again.tensors[0], output.tensors[0])
    assert module.calls == 4
    assert module.seen == [1, 2, 3, 4]
    assert module.latest is latest
    assert module.metric.compute() == mean
    assert module.metric.update_count == 4
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_checkpointed_forward_holds_its_input_only():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    measured = ActivationBytes(module)
    measured.begin(3, ())
    x = torch.randn(4, 6, dtype=torch.float32).requires_grad_()
    kept, output = Recomputation(module).forward(0, (x,), None, stage(module))
    measured.graph(0, 0, (), output.tensors)
    measured.note("inputs", 0, 0, kept.inputs)
    measured.sample(0)
    assert measured.stages[0].full == 0
    assert measured.held[0] == measured.stages[0].inputs == x.nbytes


def test_inputs_and_batches_that_a_stage_changes_in_place_are_kept_as_they_came():
    module = nn.Linear(6, 6)

    def changes(inputs, data):
        mask, x = inputs
        mask.mul_(2)
        data["scale"].add_(1)
        return StageOutput((module(x) * mask * data["scale"],))

    recomputation = Recomputation(module)
    for _ in range(2):  # the first forward of a stage is looked at more closely
        inputs = (torch.full((6,), 3.0), torch.randn(4, 6).requires_grad_())
        data = {"scale": torch.ones(())}
        kept, output = recomputation.forward(0, inputs, data, changes)
        _, again = recomputation.again(kept, changes)
        assert torch.equal(output.tensors[0], again.tensors[0])
        assert inputs[0].tolist() == [3.0] * 6
        assert data["scale"] == 1


def test_a_buffer_that_changes_now_and_then_is_refused():
    module = nn.BatchNorm1d(6)
    recomputation = Recomputation(module)
    module.eval()
    recomputation.forward(0, (torch.randn(4, 6),), None, stage(module))
    module.train()
    with pytest.raises(ModelError, match=r"buffer num_batches_tracked .* use recompute=none"):
        recomputation.forward(0, (torch.randn(4, 6),), None, stage(module))


def test_a_forward_that_takes_gradients_itself_is_refused():
    module = nn.Linear(6, 6)

    def penalised(inputs, data):
        (found,) = torch.autograd.grad(module(*inputs).tanh().sum(), inputs, create_graph=True)
        return StageOutput((found,))

    with pytest.raises(ModelError, match="takes gradients itself"):
        Recomputation(module).forward(0, (torch.randn(4, 6).requires_grad_(),), None, penalised)


def test_r_computes_in_the_types_of_its_forward():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    inputs = [torch.randn(4, 6) for _ in range(3)]
    found = []
    for again in (False, True):
        module.zero_grad()
        recomputation = Recomputation(module)
        with torch.autocast("cpu", torch.bfloat16):
            leaves = [x.clone().requires_grad_() for x in inputs]
            if again:
                kept = [recomputation.forward(0, (x,), None, stage(module))[0] for x in leaves]
                graphs = [recomputation.again(entry, stage(module)) for entry in kept]
                outputs = [output.tensors[0] for _, output in graphs]
                leaves = [used[0] for used, _ in graphs]
            else:
                outputs = [module(x) for x in leaves]
        for output in outputs:
            output.backward(torch.ones_like(output))
        found.append([p.grad.clone() for p in (*module.parameters(), *leaves)])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_compiled_layers_give_the_same_outputs_again():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module.compile(backend="aot_eager")
    recomputation = Recomputation(module)
    for _ in range(2):
        x = torch.randn(4, 6).requires_grad_()
        kept, output = recomputation.forward(0, (x,), None, stage(module))
        (leaf,), again = recomputation.again(kept, stage(module))
        assert torch.equal(output.tensors[0], again.tensors[0])
        again.tensors[0].sum().backward()
        assert leaf.grad is not None


@pytest.mark.gpu
def test_r_draws_on_the_gpu_what_its_forward_drew():
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).cuda()
    recomputation = Recomputation(module)
    inputs = [torch.randn(4, 6, device="cuda").requires_grad_() for _ in range(2)]
    kept = [recomputation.forward(0, (x,), None, stage(module)) for x in inputs]
    state = torch.cuda.get_rng_state()
    for entry, output in reversed(kept):
        _, again = recomputation.again(entry, stage(module))
        assert torch.equal(again.tensors[0], output.tensors[0])
    assert torch.equal(torch.cuda.get_rng_state(), state)
