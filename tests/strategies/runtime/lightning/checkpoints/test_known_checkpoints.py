"""Which checkpoint is named and kept where later ones are not finite, and what counts as such."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from strategies.runtime.lightning.checkpoints.known_checkpoints import (
    KnownCheckpoints,
    LastingState,
)
from strategies.runtime.update.main_weights import AllMainWeights


def files(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).write_bytes(b"")
    return [folder / name for name in names]


def test_the_last_finite_checkpoint_is_named_and_kept(tmp_path: Path) -> None:
    known = KnownCheckpoints()
    one, two, three = files(tmp_path, "1", "2", "3")
    known.add(one)
    known.add(two)
    assert not known.keeps(two)  # Nothing is wrong with the others.
    known.add(three, "the weight a is inf")
    assert known.last_finite() == two
    assert [known.keeps(path) for path in (one, two, three)] == [False, False, False]
    known.discard(one)
    assert [known.keeps(path) for path in (two, three)] == [True, False]
    two.unlink()
    assert known.last_finite() is None


def test_one_of_an_earlier_run_is_kept_too(tmp_path: Path) -> None:
    known = KnownCheckpoints()
    earlier, bad = files(tmp_path, "earlier", "bad")
    assert not known.keeps(earlier)
    known.add(bad, "the weight a is nan")
    assert known.keeps(earlier)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.fixed = nn.Parameter(torch.tensor([torch.inf]), requires_grad=False)


def problem(
    state: LastingState, module: nn.Module, *optimizers: Any, moments: bool = True
) -> str | None:
    engine: Any = SimpleNamespace(
        named_parameters=lambda: dict(module.named_parameters()), mains=AllMainWeights()
    )
    return state.problem(engine, optimizers, moments=moments)


def test_weights_buffers_and_moments_count_and_what_is_meant_to_be_infinite_does_not() -> None:
    module = Masked()
    state = LastingState(module)
    optimizer = torch.optim.Adam(module.layer.parameters())
    module.layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert problem(state, module, optimizer) is None
    moments = optimizer.state[module.layer.bias]
    moments["exp_avg_sq"][0] = torch.inf
    said = "the optimizer's exp_avg_sq of layer.bias is inf"
    assert problem(state, module, optimizer) == said
    assert problem(state, module, optimizer, moments=False) is None
    assert module.norm.running_mean is not None
    module.norm.running_mean[1] = torch.nan
    assert problem(state, module, optimizer) == "the buffer norm.running_mean is nan"
    module.layer.weight.data[0, 0] = -torch.inf
    assert problem(state, module) == "the weight layer.weight is inf"
