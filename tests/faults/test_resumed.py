"""Rows 7 and 8: resuming, at another layout and at the same one.

The short versions are ``tests/distributed/test_checkpoint_layouts.py`` and ``test_checkpoint.py``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_checkpoint_layouts import AFTER, SAVED, train_and_save, train_resumed
from tests.faults.results import record
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape

pytestmark = [pytest.mark.faults, pytest.mark.distributed]

LAYOUTS = ((2, 2, 1), (1, 2, 2), (1, 1, 1))
LATER, TIMES = 50, 10


def test_at_another_layout(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    path = str(tmp_path / "step-4.ckpt")
    case = replace(SAVED, shape=small_shape(kv_heads=2))
    passed, worst = 0, 0.0
    whole = ranks(4).run(train_and_save, case=case, path=path)
    try:
        for pp, dp, tp in LAYOUTS:
            begun = time.monotonic()
            other = replace(case, pp=pp, dp=dp, tp=tp, rows=case.rows // dp)
            resumed = ranks(pp * dp * tp).run(train_resumed, case=other, path=path)
            _same_state(whole, resumed)
            firsts = [r["losses"] for r in resumed if r["pp_rank"] == r["tp_rank"] == 0]
            for step in range(AFTER):
                mean = sum(losses[step] for losses in firsts) / dp
                assert mean == pytest.approx(whole[0]["losses"][4 + step], rel=1e-5)
            worst = max(worst, time.monotonic() - begun)
            passed += 1
    finally:
        what = "resume (4,1,1) -> (2,2,1) (1,2,2) (1,1,1): state bitwise, loss 1e-5 at +20"
        record(7, what, passed, len(LAYOUTS), worst)


def _same_state(whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    model = {name: p for rank in whole for name, p in rank["state"]["model"].items()}
    moments = {name: m for rank in whole for name, m in rank["state"]["optimizer"].items()}
    for rank in resumed:
        state = rank["state"]
        assert (state["step"], state["batch"]) == (4, 4)
        # Generators are those of the replica's first rank.
        assert torch.equal(state["random"][0], whole[0]["state"]["random"][0])
        assert state["random"][1:] == whole[0]["state"]["random"][1:]
        for name, value in state["model"].items():
            shard = rank["shards"].get(name)

            def part(tensor: torch.Tensor, shard: Any = shard, rank: Any = rank) -> torch.Tensor:
                cut = shard is not None and tensor.dim() > 0
                return shard.local(tensor, rank["tp_rank"]) if cut else tensor

            assert torch.equal(value, part(model[name])), name
            for key, moment in state["optimizer"][name].items():
                assert torch.equal(moment, part(moments[name][key])), (name, key)


def digest(parameters: dict[str, torch.Tensor]) -> str:
    """SHA-256 over all weights of a rank, by name."""
    found = hashlib.sha256()
    for name in sorted(parameters):
        found.update(name.encode() + parameters[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def test_at_the_same_layout(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    passed, worst = 0, 0.0
    layouts = [
        Case("1f1b", pp=2, dp=2), Case("zb_v", pp=2), Case("1f1b", pp=2, dp=2, overlap="zero1"),
        Case("foldx_fifo", pp=2, accumulation=2), Case("gpipe", pp=1),
    ]  # fmt: skip
    try:
        for number in range(TIMES):
            begun = time.monotonic()
            shape = small_shape(dropout=0.1 * (number % 3))
            case = replace(layouts[number % len(layouts)], steps=4 + LATER, shape=shape)
            path = str(tmp_path / f"{number}" / "step-4.ckpt")
            world = ranks(case.pp * case.dp)
            whole = world.run(_saved, case=case, path=path)
            resumed = world.run(_resumed, case=case, path=path)
            assert whole == resumed
            worst = max(worst, time.monotonic() - begun)
            passed += 1
    finally:
        record(8, "resume, same layout: SHA-256 equal at +50 steps", passed, TIMES, worst)


def _saved(case: Case, path: str) -> str:
    from tests.distributed.test_checkpoint import train_and_save

    return digest(train_and_save(case, 4, path)["parameters"])


def _resumed(case: Case, path: str) -> str:
    from tests.distributed.test_checkpoint import train_resumed

    return digest(train_resumed(case, path)["parameters"])
