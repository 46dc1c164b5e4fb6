"""Runs a stage's microbatches with split backwards and with full ones, and compares."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strategies.models.split_backward.input_step import input_backward
from strategies.models.split_backward.pending import PendingWeights
from tests.strategies.models.split_backward.cases import Case

MICROBATCHES = 3
# I and W of three microbatches, interleaved.
FIFO = ("I0", "I1", "W0", "I2", "W1", "W2")
SHUFFLED = ("I0", "I1", "W1", "I2", "W2", "W0")


@dataclass
class Run:
    module: nn.Module
    views: dict[str, Tensor]
    inputs: list[list[Tensor]] = field(default_factory=list)
    deferred: set[str] = field(default_factory=set)


def start(case: Case) -> tuple[Run, Run]:
    """Two equal stages whose gradients lie in one flat buffer each."""
    torch.manual_seed(0)
    module = case.build().double()
    return attach(module), attach(copy.deepcopy(module))


def attach(module: nn.Module) -> Run:
    parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for _, p in parameters), dtype=torch.float64)
    views, place = {}, 0
    for name, p in parameters:
        # Laid out as the parameter is: torch warns otherwise.
        p.grad = views[name] = flat.as_strided(p.shape, p.stride(), place)
        place += p.numel()
    return Run(module, views)


def forward(run: Run, case: Case, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that need a gradient, and gradients for them."""
    torch.manual_seed(100 + microbatch)
    data = [tensor.requires_grad_(wants(tensor, case)) for tensor in case.data()]
    run.inputs.append([tensor for tensor in data if tensor.requires_grad])
    found = run.module(*data)
    outputs = [o for o in flatten(found) if o.requires_grad]
    torch.manual_seed(200 + microbatch)
    return outputs, [torch.randn_like(output) for output in outputs]


def wants(tensor: Tensor, case: Case) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and not case.first


def flatten(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flatten(item)]


def full(run: Run, case: Case) -> None:
    for microbatch in range(MICROBATCHES):
        outputs, gradients = forward(run, case, microbatch)
        if outputs:
            torch.autograd.backward(outputs, gradients)


def split(run: Run, case: Case, order: Sequence[str], ready=None) -> None:
    graphs = [forward(run, case, microbatch) for microbatch in range(MICROBATCHES)]
    pending: dict[str, PendingWeights] = {}
    names = {id(p): name for name, p in run.module.named_parameters()}
    for step in order:
        if step[0] == "I":
            index = int(step[1])
            outputs, gradients = graphs[index]
            graphs[index] = ([], [])
            pending[step[1]] = input_backward(outputs, gradients, run.inputs[index])
            run.deferred |= {names[id(p)] for p in pending[step[1]].parameters}
        else:
            pending.pop(step[1]).run(ready)


def compare(ours: Run, theirs: Run, *, rtol: float = 1e-12) -> None:
    for name, view in theirs.views.items():
        assert ours.module.get_parameter(name).grad is ours.views[name], f"{name}.grad was replaced"
        same(ours.views[name], view, name, rtol)
    for ours_of, theirs_of in zip(ours.inputs, theirs.inputs, strict=True):
        for index, (a, b) in enumerate(zip(ours_of, theirs_of, strict=True)):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                same(a.grad, b.grad, f"input {index}", rtol)
    for (name, a), b in zip(ours.module.named_buffers(), theirs.module.buffers(), strict=True):
        assert torch.equal(a, b), name


def same(ours: Tensor, theirs: Tensor, name: str, rtol: float) -> None:
    scale = theirs.abs().max().item() if theirs.numel() else 0.0
    torch.testing.assert_close(
        ours, theirs, rtol=rtol, atol=rtol * scale, msg=lambda text: f"{name}: {text}"
    )
