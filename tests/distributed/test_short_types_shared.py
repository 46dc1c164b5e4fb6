"""Sixteen-bit weights whose matrices are shared: 32-bit sums and updates, one value everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed

SHAPE = small_shape(layers=2, hidden=16, heads=4, kv_heads=4, tie_embeddings=True)
CASE = Case(tp=2, steps=6, microbatches=2, rows=8, shape=SHAPE, clip=0.5)


class Mains(Callback):
    """Keeps what the optimizer updates, and the norm of each step's gradient; may save."""

    reads_weights = False

    def __init__(self, save: str | None = None) -> None:
        self._save = save
        self.found: dict[str, Any] = {}
        self.norms: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self._save is None:
            self._note(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self._save is not None and trainer.global_step == CASE.steps:
            trainer.save_checkpoint(self._save)
            self._note(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.norms.append(trainer.strategy.last_stats().gradient_norm)

    def _note(self, trainer: Any) -> None:
        engine = trainer.strategy.engine
        for name, parameter in engine.named_parameters().items():
            pieces = engine.mains.pieces_of(parameter)
            assert pieces is not None, f"{name} is updated in 16 bits"
            for piece in pieces:
                assert piece.main.dtype == torch.float32
                key = (name, piece.start, piece.stop)
                self.found[key] = (piece.main.detach().clone(), piece.weights.detach().clone())


def fit(case: Case, save: str | None = None, resume: str | None = None) -> dict[str, Any]:
    mains = Mains(save)
    steps = case.steps if resume is None else case.steps + 1
    result = train(
        replace(case, steps=steps), callbacks=[mains], precision="bf16-true", resume=resume
    )
    return {**result, "mains": mains.found, "norms": mains.norms}


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        pytest.param(replace(CASE, pp=2, sequence_parallel=True), marks=pytest.mark.full),
        pytest.param(replace(CASE, dp=2, rows=4, overlap="zero1"), marks=pytest.mark.full),
    ],
    ids=["tp", "pp-tp-sequence", "dp-tp-zero1"],
)
def test_training_follows_a_single_process(
    case: Case, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "shared.ckpt")
    (alone,) = ranks(1).run(fit, case=replace(CASE, tp=1), save=str(tmp_path / "alone.ckpt"))
    results = ranks(case.pp * case.dp * case.tp).run(fit, case=case, save=path)
    firsts = [r["losses"] for r in results if r["pp_rank"] == r["tp_rank"] == 0]
    for step, expected in enumerate(alone["losses"]):
        mean = sum(losses[step] for losses in firsts) / case.dp
        # Eight bits of mantissa in every layer, added up in another order.
        assert mean == pytest.approx(expected, rel=0.01), step
    for result in results:
        assert result["norms"] == pytest.approx(alone["norms"], rel=0.05)
        for (name, _, _), (main, weights) in result["mains"].items():
            # What computes is what is updated, rounded once.
            assert torch.equal(weights, main.to(torch.bfloat16)), name
    copies: dict[tuple[str, int], torch.Tensor] = {}
    for result in results:
        for name, value in result["parameters"].items():
            assert value.dtype == torch.bfloat16
            place = result["tp_rank"] if name in result["shards"] else -1
            assert torch.equal(value, copies.setdefault((name, place), value)), name


def test_the_32_bit_weights_go_to_another_layout_bit_for_bit(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "shared.ckpt")
    saved = ranks(4).run(fit, case=replace(CASE, pp=2), save=path)
    (alone,) = ranks(1).run(fit, case=replace(CASE, tp=1), resume=path)
    whole = {name: main for (name, _, _), (main, _) in alone["mains"].items()}
    seen = set()
    for result in saved:
        for (name, _, _), (main, _) in result["mains"].items():
            shard = result["shards"].get(name)
            own = whole[name] if shard is None else shard.local(whole[name], result["tp_rank"])
            assert torch.equal(main, own), name
            assert not torch.equal(main, main.to(torch.bfloat16).float()), name
            seen.add(name)
    assert seen == set(whole)
