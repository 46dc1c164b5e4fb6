"""A declared plan on code that was written for shares, and on the same code under whole shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.language_model import LanguageModel
from strategies.models.tensor_parallel.layer_plan import declared_plan
from strategies.models.tensor_parallel.tensor_ranks import TensorRanks
from strategies.models.unit_model import UnitModel
from tests.distributed.test_tensor_parallel import GROUPED, TIED, WORDS, Words
from tests.ranks.pool import Ranks
from tests.ranks.training import Sentences
from tests.tiny_models import batch_of, shape_of, write_model

pytestmark = pytest.mark.distributed


def build(name: str, folder: str) -> tuple[pl.LightningModule, dict[str, Tensor]]:
    data = Sentences(2)
    batch = {key: torch.stack([data[row][key] for row in range(2)]) for key in data[0]}
    if name == "words":
        return Words(WORDS).double(), batch
    if name in ("grouped", "tied"):
        return LanguageModel(GROUPED if name == "grouped" else TIED).double(), batch
    return HfLanguageModel(shape_of(Path(folder))).double(), batch_of(2)


def gradients(
    name: str, folder: str, written_for_shares: bool | None
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the whole gradients; None runs the module uncut."""
    module, batch = build(name, folder)
    model, ranks = UnitModel(module), None
    if written_for_shares is not None:
        group = torch.distributed.group.WORLD
        assert group is not None
        ranks = TensorRanks(group)
        plan = declared_plan(module, ranks.size)
        assert plan is not None
        model.shard(ranks, replace(plan, written_for_shares=written_for_shares))
    model.cut([range(len(model.units))], [0])
    output = model.forward(0, (), batch=batch, batch_idx=0, microbatch=0, mode="train", seed=None)
    assert output.loss is not None
    output.loss.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Tensor] = {}
    for parameter_name, parameter in model.stage_parameters(0):
        assert parameter.grad is not None
        found[parameter_name] = gradient = parameter.grad
        shard = model.shards.get(parameter_name)
        if shard is not None:
            assert ranks is not None
            found[parameter_name] = shard.whole(ranks.gather(gradient).unbind(0))
    assert bool(model.shards) == (ranks is not None)
    return output.loss.item(), found


@pytest.mark.parametrize("name", ["grouped", "tied", "words", "llama"])
def test_declared_layers_compute_the_same_whoever_the_code_is_written_for(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    if name == "llama":
        write_model(tmp_path, name)
    arguments: dict[str, Any] = {"name": name, "folder": str(tmp_path)}
    ((loss, expected),) = ranks(1).run(gradients, written_for_shares=None, **arguments)
    for written_for_shares in (True, False):
        for other, found in ranks(2).run(
            gradients, written_for_shares=written_for_shares, **arguments
        ):
            assert other == pytest.approx(loss, rel=1e-12)
            assert found.keys() == expected.keys()
            for parameter, gradient in found.items():
                scale = expected[parameter].abs().max().item()
                error = (gradient - expected[parameter]).abs().max().item()
                assert error <= 1e-12 * max(scale, 1e-3), parameter
