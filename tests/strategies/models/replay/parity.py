"""A pipeline in one process: stages run one after the other, compared with the uncut step."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule

from strategies.models.replay.replay_model import ReplayModel
from strategies.models.snapshot import restoring


@dataclass
class Result:
    grads: dict[str, torch.Tensor]
    logs: list[tuple[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    num_boundaries: list[int] = field(default_factory=list)
    links: dict[tuple[int, int], int] = field(default_factory=dict)


def uncut(module: LightningModule, batches: list[Any]) -> Result:
    result = Result({})

    def log(name, value, **options):
        if isinstance(value, torch.nn.Module):
            value = value._forward_cache
        value = value.detach() if isinstance(value, torch.Tensor) else value
        result.logs.append((name, float(value)))

    module.__dict__["log"] = log
    module.__dict__["log_dict"] = lambda values, **options: [
        log(name, value) for name, value in values.items()
    ]
    for batch_idx, batch in enumerate(batches):
        loss = call(module, copy.deepcopy(batch), batch_idx)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        loss.backward()
        result.losses.append(loss.item())
    result.grads = gradients([module])
    result.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return result


def call(module, batch, batch_idx):
    parameters = module.training_step.__code__.co_argcount
    return module.training_step(*(batch, batch_idx)[: parameters - 1])


def gradients(modules) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found


def run_pipeline(
    owners: list[ReplayModel],
    modules: list[LightningModule],
    num_stages: int,
    batches: list[Any],
    seed: int | None = None,
    *,
    records: bool = True,
) -> Result:
    """All forwards first, microbatches interleaved by stage, then all backwards.

    Without ``records`` each forward runs the user's step.
    """
    result = Result({})
    saved: dict[tuple[int, int], tuple[Any, Any]] = {}
    # By (target, source, microbatch): what one stage gave to another, and its tensors' gradients.
    mail: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}
    logs: dict[int, list[tuple[str, float]]] = {m: [] for m in range(len(batches))}
    recordings: dict[tuple[int, int], Any] = {}
    for stage, m in itertools.product(range(num_stages), range(len(batches))):
        leaves = tuple(
            t.detach()
            .clone(memory_format=torch.contiguous_format)
            .requires_grad_(t.is_floating_point())
            for source in range(stage)
            for t in mail.get((stage, source, m), ())
        )
        owner = owners[stage % len(owners)]
        options = {"batch": batches[m], "batch_idx": m, "microbatch": m, "mode": "train"}
        if (id(owner), m) not in recordings:
            with restoring(owner.module, owner.layers()):
                recordings[id(owner), m] = owner.record(**options)
        output = owner.forward(
            stage,
            leaves,
            seed=None if seed is None else seed + m,
            recording=recordings[id(owner), m] if records else None,
            **options,
        )
        saved[stage, m] = (leaves, output)
        groups = output.groups
        assert groups is not None or stage == num_stages - 1
        rest = list(output.tensors)
        for target, count in groups or ():
            mail[target, stage, m] = tuple(rest[:count])
            rest = rest[count:]
            if m == 0:
                result.links[stage, target] = count
        assert not rest
        logs[m] += [(log.name, log.value) for log in output.logs]
        if m == 0 and stage < num_stages - 1:
            result.num_boundaries.append(len(output.tensors))
    for stage, m in itertools.product(reversed(range(num_stages)), range(len(batches))):
        leaves, output = saved[stage, m]
        if stage == num_stages - 1:
            assert output.loss is not None
            result.losses.append(output.loss.item())
            output.loss.backward()
            continue
        assert output.loss is None
        gradients_of = [
            leaf.grad
            for target, _ in output.groups or ()
            for leaf in _leaves_from(stage, saved[target, m][0], target, m, mail)
        ]
        pairs = [
            (tensor, grad)
            for tensor, grad in zip(output.tensors, gradients_of, strict=True)
            if tensor.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
    result.logs = [entry for m in range(len(batches)) for entry in logs[m]]
    result.grads = gradients(modules)
    for module in modules:
        result.buffers.update((n, b.clone()) for n, b in module.named_buffers())
    return result


def _leaves_from(source, leaves, target, m, mail):
    before = sum(len(mail.get((target, other, m), ())) for other in range(source))
    return leaves[before : before + len(mail[target, source, m])]


def assert_same(got: Result, expected: Result, tolerance: float = 1e-12) -> None:
    assert got.losses == close(expected.losses)
    assert [name for name, _ in got.logs] == [name for name, _ in expected.logs]
    assert [value for _, value in got.logs] == close([value for _, value in expected.logs])
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        error = (got.grads[name] - grad).abs().max().item()
        assert error <= tolerance * max(1.0, grad.abs().max().item()), (name, error)


def close(values):
    import pytest

    return pytest.approx(values, rel=1e-12, abs=1e-12)


def stage_ranges(cuts: tuple[int, ...], num_units: int) -> list[range]:
    ends = [*cuts, num_units]
    return [range(start, end) for start, end in zip([0, *cuts], ends, strict=True)]


def chosen_cuts(num_units: int) -> list[tuple[int, ...]]:
    """Every cut into two; into three and four the extreme and the even ones."""
    cuts = [(c,) for c in range(1, num_units)]
    for num_stages in (3, 4):
        every = list(itertools.combinations(range(1, num_units), num_stages - 1))
        if every:
            cuts += {every[0], every[-1], every[len(every) // 2]}
    return cuts
