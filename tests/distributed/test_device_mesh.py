"""The ranks as torch's DeviceMesh, over the groups that are there anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed


class Meshed(Callback):
    """Adds up ranks along each dimension, and counts the groups before and after."""

    reads_weights = False

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        groups = trainer.strategy.engine.communicators._groups
        before = {key for key in groups if len(key[1]) > 1}
        mesh = trainer.strategy.device_mesh
        assert trainer.strategy.device_mesh is mesh
        sums = {}
        for name in mesh.mesh_dim_names:
            total = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(total, group=mesh.get_group(name))
            sums[name] = int(total)
        self.seen = {
            "names": mesh.mesh_dim_names,
            "shape": tuple(mesh.shape),
            "coordinate": mesh.get_coordinate(),
            "sums": sums,
            "new": len({key for key in groups if len(key[1]) > 1} - before),
        }


def fit(case: Case) -> dict[str, Any]:
    meshed = Meshed()
    result = train(case, callbacks=[meshed])
    return {**result, **meshed.seen}


@pytest.mark.parametrize(
    "case",
    [Case(pp=2, tp=2), Case("chimera", pp=2, dp=2), Case(dp=2, tp=2, overlap="zero1")],
    ids=["pp-tp", "two-copies", "dp-tp"],
)
def test_each_dimension_has_the_ranks_of_its_axis(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    shape = small_shape(layers=1, kv_heads=2)
    results = ranks(4).run(fit, case=Case(**{**vars(case), "shape": shape, "steps": 1}))
    grid = torch.arange(4).view(case.pp, case.dp, case.tp)
    for rank, result in enumerate(results):
        assert result["names"] == ("pp", "dp", "tp")
        assert result["shape"] == (case.pp, case.dp, case.tp)
        assert result["new"] == 0
        place = [result["pp_rank"], result["dp_rank"], result["tp_rank"]]
        assert list(result["coordinate"]) == place
        for axis, name in enumerate(result["names"]):
            index: list[Any] = list(place)
            index[axis] = slice(None)
            assert result["sums"][name] == int((grid[tuple(index)] + 1).sum()), (rank, name)
