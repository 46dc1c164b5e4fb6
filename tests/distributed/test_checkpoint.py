"""Checkpoints: resuming is bitwise the same as not having stopped; nothing else is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from launcher.workloads.data.module import TextDataModule
from launcher.workloads.data.source import TextSource
from strategies.errors import CheckpointError, DamagedCheckpointError
from tests.ranks.fit import SaveAt, fit
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, Learner, small_shape, train

pytestmark = pytest.mark.distributed


def train_and_save(case: Case, step: int, path: str) -> dict[str, Any]:
    return train(case, callbacks=[SaveAt(step, path)])


def train_resumed(case: Case, path: str) -> dict[str, Any]:
    torch.manual_seed(99)  # Whatever the generators were before must not matter.
    return train(case, resume=path)


def _equal(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", pp=2, dp=2, steps=6, shape=small_shape(dropout=0.2)),
        pytest.param(
            Case("foldx_fifo", pp=2, accumulation=2, shape=small_shape(dropout=0.2)),
            marks=pytest.mark.full,
        ),
        Case("gpipe", pp=1, shape=small_shape(tie_embeddings=True)),
    ],
    ids=["dp", "accumulation", "one-process"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    case: Case, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "step-4.ckpt")
    world = ranks(case.pp * case.dp)
    whole = world.run(train_and_save, case=case, step=4, path=path)
    resumed = world.run(train_resumed, case=case, path=path)
    _equal(whole, resumed)
    kept = (case.steps - 4) * case.accumulation
    for one, other in zip(whole, resumed, strict=True):
        assert one["losses"][-kept:] == other["losses"][-kept:]


def test_a_checkpoint_of_one_layout_is_read_by_another(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case("1f1b", pp=2, dp=2, steps=6)
    path = str(tmp_path / "step-4.ckpt")
    whole = ranks(4).run(train_and_save, case=case, step=4, path=path)
    # The same global batches on one process: the replicas' rows interleave in the data order.
    alone = replace(case, schedule="gpipe", pp=1, dp=1, rows=16)
    (resumed,) = ranks(1).run(train_resumed, case=alone, path=path)
    for result in whole:
        for name, value in result["parameters"].items():
            assert torch.allclose(value, resumed["parameters"][name], atol=1e-10, rtol=0)


def test_the_folder_is_committed_whole_and_replaced_only_by_a_complete_one(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case("1f1b", pp=2, steps=3)
    path = tmp_path / "step-2.ckpt"
    ranks(2).run(train_and_save, case=case, step=2, path=str(path))
    assert not path.with_name("step-2.ckpt.tmp").exists()
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {f.name for f in path.iterdir()} - {"manifest.json"}
    before = (path / "rank_00000.safetensors").read_bytes()
    ranks(2).run(train_and_save, case=replace(case, rows=6), step=2, path=str(path))
    assert (path / "rank_00000.safetensors").read_bytes() != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-2.ckpt"]


@pytest.mark.parametrize(
    "kind", ["flip", *(pytest.param(k, marks=pytest.mark.full) for k in ("truncate", "remove"))]
)
def test_a_damaged_checkpoint_is_refused(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case("1f1b", pp=2, steps=3)
    path = tmp_path / "step-2.ckpt"
    ranks(2).run(train_and_save, case=case, step=2, path=str(path))
    victim = path / "rank_00001.safetensors"
    data = bytearray(victim.read_bytes())
    if kind == "flip":
        data[len(data) // 2] ^= 1
    if kind == "truncate":
        del data[-8:]
    if kind == "remove":
        victim.unlink()
    else:
        victim.write_bytes(data)
    with pytest.raises(
        DamagedCheckpointError, match=r"rank_00001.safetensors is damaged: expected SHA"
    ):
        ranks(2).run(train_resumed, case=case, path=str(path))


def test_a_checkpoint_of_another_model_is_refused(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case("gpipe", pp=1, steps=3)
    path = tmp_path / "step-2.ckpt"
    ranks(1).run(train_and_save, case=case, step=2, path=str(path))
    deeper = replace(case, shape=small_shape(layers=5))
    with pytest.raises(CheckpointError, match="checkpoint of another model: it lacks"):
        ranks(1).run(train_resumed, case=deeper, path=str(path))


def test_a_checkpoint_of_a_deeper_model_is_refused(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case("gpipe", pp=1, steps=3, shape=small_shape(layers=5))
    path = tmp_path / "step-2.ckpt"
    ranks(1).run(train_and_save, case=case, step=2, path=str(path))
    with pytest.raises(CheckpointError, match="another model: it has 9 parameters that this one"):
        ranks(1).run(train_resumed, case=replace(case, shape=small_shape()), path=str(path))


def train_text(text: str, steps: int, save: str | None, resume: str | None) -> dict[str, Any]:
    """The data module's own position, over the end of an epoch."""

    class Rows(Callback):
        def __init__(self) -> None:
            self.rows: list[list[int]] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, _: int) -> None:
            self.rows.append(batch["tokens"][:, 0].tolist())

    shape = small_shape(vocab=256)
    rows = Rows()
    callbacks: list[Callback] = [rows]
    if save is not None:
        callbacks.append(SaveAt(5, save))
    data = TextDataModule(
        TextSource("text", path=text),
        sequence=shape.sequence,
        batch_size=4,
        seed=1,
        val_fraction=0.0,
    )
    model = Learner(shape)
    options = {"max_steps": steps, "limit_val_batches": 0, "precision": "32-true"}
    with fit(
        model,
        data,
        strategy={"pp": 2, "num_microbatches": 2, "seed": 0},
        resume=resume,
        callbacks=callbacks,
        **options,
    ) as run:
        return {"rows": rows.rows, "parameters": run.weights}


def test_the_data_continues_where_it_was(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + (i * i) % 90) for i in range(200)))  # 7 batches an epoch.
    path = str(tmp_path / "step-5.ckpt")
    world = ranks(2)
    whole = world.run(train_text, text=str(text), steps=12, save=path, resume=None)
    resumed = world.run(train_text, text=str(text), steps=12, save=None, resume=path)
    for one, other in zip(whole, resumed, strict=True):
        assert one["rows"][5:] == other["rows"]
    _equal(whole, resumed)
