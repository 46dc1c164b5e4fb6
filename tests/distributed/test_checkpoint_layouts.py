"""Saved at one layout, resumed at another: the same state bit for bit, the same losses after."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from strategies.runtime.storage import tensor_files
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed

AFTER = 3  # steps
SAVED = Case("1f1b", pp=4, dp=1, steps=4 + AFTER, clip=0.5, shape=small_shape(dropout=0.1))
PATH = "step-4.ckpt"


class Watch(Callback):
    """Notes this rank's whole state: before the first step, or after the one that it saves."""

    reads_weights = False  # Looks at what the rank has, shares of weights and their moments.

    def __init__(self, save: str | None, *, at: int = 4) -> None:
        self._save = save
        self._at = at
        self.state: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self._save is None and not self.state:
            self._note(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self._save is not None and trainer.global_step == self._at:
            self._note(trainer, module)
            trainer.save_checkpoint(self._save)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._save is not None and trainer.global_step == self._at:
            trainer.save_checkpoint(self._save + ".validated")

    def _note(self, trainer: Any, module: Any) -> None:
        named = trainer.strategy.engine.named_parameters()
        state = trainer.optimizers[0].state
        self.state = {
            "model": {name: p.detach().clone() for name, p in named.items()},
            "optimizer": {
                name: {key: value.clone() for key, value in state[p].items()}
                for name, p in named.items()
            },
            "groups": [{**group, "params": 0} for group in trainer.optimizers[0].param_groups],
            "random": (
                torch.get_rng_state(),
                random.getstate(),
                [str(part) for part in np.random.get_state(legacy=True)],
            ),
            "step": trainer.global_step,
            "batch": trainer.fit_loop.epoch_loop.batch_progress.current.processed,
        }


def train_and_save(case: Case, path: str) -> dict[str, Any]:
    torch.manual_seed(7)
    random.seed(8)
    np.random.seed(9)
    watch = Watch(path)
    result = train(case, callbacks=[watch])
    return {**result, "state": watch.state}


def train_resumed(case: Case, path: str) -> dict[str, Any]:
    torch.manual_seed(99)  # Whatever the generators were before must not matter.
    watch = Watch(None)
    result = train(case, callbacks=[watch], resume=path)
    return {**result, "state": watch.state}


@pytest.fixture(scope="module")
def saved(ranks: Callable[[int], Ranks], tmp_path_factory: Any) -> tuple[Path, list[Any]]:
    path = tmp_path_factory.mktemp("layouts") / PATH
    return path, ranks(4).run(train_and_save, case=SAVED, path=str(path))


@pytest.mark.parametrize(
    ("schedule", "pp", "dp"),
    [
        ("1f1b", 2, 2),
        pytest.param("zb_v", 2, 2, marks=pytest.mark.full),
        pytest.param("gpipe", 1, 2, marks=pytest.mark.full),
        ("1f1b", 1, 1),
        pytest.param("foldx_fifo", 4, 1, marks=pytest.mark.full),
    ],
    ids=lambda value: str(value),
)
def test_state_and_losses_are_the_same(
    schedule: str,
    pp: int,
    dp: int,
    saved: tuple[Path, list[Any]],
    ranks: Callable[[int], Ranks],
) -> None:
    path, whole = saved
    case = replace(SAVED, schedule=schedule, pp=pp, dp=dp, rows=SAVED.rows // dp)
    # A replica's dropout is its own, so with another number of replicas it is another training.
    dropout = dp == 1
    resumed = ranks(pp * dp).run(train_resumed, case=case, path=str(path))
    model = {name: p for rank in whole for name, p in rank["state"]["model"].items()}
    moments = {name: m for rank in whole for name, m in rank["state"]["optimizer"].items()}
    seen = set()
    for rank in resumed:
        state = rank["state"]
        assert (state["step"], state["batch"]) == (4, 4)
        assert state["groups"] == whole[0]["state"]["groups"]
        for name, value in state["model"].items():
            seen.add(name)
            assert torch.equal(value, model[name]), name
            assert state["optimizer"][name].keys() == moments[name].keys()
            for key, moment in state["optimizer"][name].items():
                assert torch.equal(moment, moments[name][key]), (name, key)
        # The generators' state: that of the replica's first rank, or the rank's own.
        source = whole[rank["pp_rank"] if pp == 4 else 0]["state"]["random"]
        assert torch.equal(state["random"][0], source[0])
        assert state["random"][1:] == source[1:]
    assert seen == set(model)
    assert len(resumed[0]["losses"]) == AFTER
    # Each replica logs its own rows' loss; of all together it is the mean.
    last = [rank["losses"] for rank in resumed if rank["pp_rank"] == 0]
    for step in range(AFTER):
        mean = sum(losses[step] for losses in last) / dp
        expected = whole[0]["losses"][4 + step]
        # Dropout depends on how rows are dealt out to replicas.
        assert mean == pytest.approx(expected, rel=1e-5 if dropout else 0.1)


@pytest.mark.full
def test_without_dropout_the_number_of_replicas_and_sharers_does_not_matter(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / PATH)
    case = replace(SAVED, shape=small_shape(tie_embeddings=True, kv_heads=2))
    whole = ranks(4).run(train_and_save, case=case, path=path)
    model = {name: p for rank in whole for name, p in rank["state"]["model"].items()}
    moments = {name: m for rank in whole for name, m in rank["state"]["optimizer"].items()}
    for pp, dp, tp in ((2, 2, 1), (1, 2, 1), (1, 2, 2), (1, 1, 1)):
        other = replace(case, pp=pp, dp=dp, tp=tp, rows=case.rows // dp)
        resumed = ranks(pp * dp * tp).run(train_resumed, case=other, path=path)
        for rank in resumed:
            assert bool(rank["shards"]) == (tp > 1)
            for name, value in rank["state"]["model"].items():
                shard = rank["shards"].get(name)
                expected = (
                    model[name] if shard is None else shard.local(model[name], rank["tp_rank"])
                )
                assert torch.equal(value, expected), name
                for key, moment in rank["state"]["optimizer"][name].items():
                    expected = moments[name][key]
                    if shard is not None and expected.dim():
                        expected = shard.local(expected, rank["tp_rank"])
                    assert torch.equal(moment, expected), (name, key)
        firsts = [rank["losses"] for rank in resumed if rank["pp_rank"] == rank["tp_rank"] == 0]
        for step in range(AFTER):
            mean = sum(losses[step] for losses in firsts) / dp
            assert mean == pytest.approx(whole[0]["losses"][4 + step], rel=1e-5)


class FailsToWrite(Callback):
    """Saves in a thread whose disk is full, and lets no step begin before that has failed."""

    def __init__(self, path: str, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._plain = tensor_files._write
        self.began: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            if trainer.global_rank == self._rank:
                tensor_files._write = self._full  # type: ignore[assignment]
            trainer.save_checkpoint(self._path)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        thread = trainer.strategy.saver._thread
        if thread is not None:
            thread.join(30)
        self.began.append(trainer.global_step)

    def _full(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def restore(self) -> None:
        tensor_files._write = self._plain


def fail_to_save(case: Case, path: str, rank: int) -> dict[str, Any]:
    fails = FailsToWrite(path, rank)
    try:
        train(case, callbacks=[fails])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "began": fails.began}
    finally:
        fails.restore()
    return {"error": None, "began": fails.began}


def test_a_failed_save_ends_training_at_the_next_step(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = tmp_path / PATH
    found = ranks(2).run(fail_to_save, case=Case(pp=2), path=str(path), rank=1)
    assert [rank["began"] for rank in found] == [[0, 1, 2, 3]] * 2  # never a fifth
    assert found[1]["error"].startswith(f"CheckpointError: checkpoint {path} was not written: No")
    # By its own save, or with what rank 1 raises: whichever rank 0 comes to first.
    assert f"checkpoint {path} was not written: " in found[0]["error"]
    assert "No space left" in found[0]["error"]
    assert not list(tmp_path.iterdir())


def train_and_validate(case: Case, path: str, resume: str | None) -> dict[str, Any]:
    from torch.utils.data import DataLoader

    from tests.ranks.training import Sentences

    loader = DataLoader(Sentences(16), batch_size=case.rows)
    watch = Watch(None if resume else path)
    return train(
        case,
        callbacks=[watch],
        resume=resume,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        val_dataloaders=loader,
    )


def test_a_checkpoint_written_after_a_validation_resumes_as_well(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case("1f1b", pp=2, shape=small_shape(dropout=0.1))
    path = str(tmp_path / PATH)
    whole = ranks(2).run(train_and_validate, case=case, path=path, resume=None)
    validated = path + ".validated"
    resumed = ranks(2).run(train_and_validate, case=case, path=path, resume=validated)
    for one, other in zip(whole, resumed, strict=True):
        assert one["losses"][4:] == other["losses"]
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name
