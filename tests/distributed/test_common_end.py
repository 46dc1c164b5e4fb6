"""One rank leaves a fit by an exception: all leave it, by the same one, and the next fit works."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import PipelineError, PlanError, RunError
from strategies.runtime.lightning import common_end
from tests.ranks.fit import trainer_of

pytestmark = pytest.mark.distributed
WIDTH = 8


class Pruned(Exception):  # noqa: N818 -- as Optuna's
    def __init__(self, trial: int, *, score: float) -> None:
        super().__init__(f"trial {trial} is worse than others")
        self.trial, self.score = trial, score


class Fails(Callback):
    """Raises on one rank, or on all."""

    reads_weights = False

    def __init__(self, trial: int, rank: int | None, batch: int, kind: str = "Pruned") -> None:
        self.trial, self.rank, self.batch, self.kind = trial, rank, batch, kind

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        here = self.rank in (None, int(os.environ["RANK"]))
        if not here or module.trial != self.trial or rest[-1] != self.batch:
            return
        if self.kind == "Pruned":
            raise Pruned(self.trial, score=0.5)
        if self.kind == "local":

            class LocalError(Exception):
                pass

            raise LocalError("nobody knows it")
        if self.kind == "hangs":
            module.layers[-1].sleeps = True
        if self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)


class Last(nn.Linear):
    fails = False
    sleeps = False
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.sleeps:
            time.sleep(3.0)
        if self.fails and self.training and not x.is_meta and torch.is_grad_enabled():
            self.calls += 1
            if self.calls > 5:
                raise Pruned(1, score=0.5)
        return super().forward(x)


class Net(pl.LightningModule):
    def __init__(self, trial: int, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trial, self.kind = trial, kind
        layers = [m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers, Last(WIDTH, WIDTH))
        self.layers[-1].fails = kind == "last" and trial == 1

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        if self.kind == "data" and self.trial == 1:
            raise Pruned(1, score=0.5)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "step" and self.trial == 1 and batch_idx == 2:
            raise Pruned(1, score=0.5)
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(size: int = 8) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(32, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(data), batch_size=size)


def strategy(**layout: Any) -> dict[str, Any]:
    return {"num_microbatches": 2, "timeout_s": 60, **layout}


def trials(kind: str, rank: int, layout: dict[str, Any] | None) -> list[Any]:
    """What each of three fits in a loop has come to; the one in the middle fails."""
    found: list[Any] = []
    for trial in range(3):
        callbacks = [Fails(1, rank, 1)] if kind == "callback" else []
        given = None if layout is None else strategy(**layout)
        trainer = trainer_of(given, max_epochs=1, callbacks=callbacks)
        try:
            trainer.fit(Net(trial, kind), rows())
            found.append(round(trainer.callback_metrics["loss"].item(), 12))
        except Pruned as pruned:
            found.append((str(pruned), pruned.trial, pruned.score))
    return found


@pytest.mark.parametrize(
    ("kind", "rank", "layout"),
    [
        pytest.param("callback", 0, {"pp": 2}, marks=pytest.mark.full),
        pytest.param("callback", 1, {"pp": 2}, marks=pytest.mark.full),
        ("step", 0, {"pp": 2}),
        ("last", 0, {"pp": 2}),
        ("data", 0, {"pp": 2}),
        ("callback", 1, {"pp": 1, "dp": 2}),
        pytest.param("callback", 1, {"pp": 1, "tp": 2}, marks=pytest.mark.full),
        pytest.param("callback", 1, {"pp": 2, "schedule": "pipedream_2bw"}, marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_exception_of_one_rank_ends_the_fit_of_all_and_the_next_one_works(
    ranks: Any, kind: str, rank: int, layout: dict[str, Any]
) -> None:
    first, second = ranks(2).run(trials, kind=kind, rank=rank, layout=layout)
    assert first == second
    assert first[1] == ("trial 1 is worse than others", 1, 0.5)
    assert first[0] == first[2]
    if layout == {"pp": 2}:
        (alone,) = ranks(1).run(trials, kind="", rank=0, layout=None)
        assert first[0] == pytest.approx(alone[0], abs=1e-12)


def halved(layout: dict[str, Any] | None) -> tuple[int, int, list[float]]:
    """The recipe for lack of memory: the same module, half of the batch."""
    module, size = Net(0), 16
    while True:
        given = None if layout is None else strategy(**layout)
        trainer = trainer_of(given, max_epochs=1, callbacks=[TooLarge(size)])
        try:
            trainer.fit(module, rows(size))
            break
        except RuntimeError:
            size //= 2
    return size, trainer.global_step, [float(p.detach().sum()) for p in module.parameters()]


class TooLarge(Callback):
    reads_weights = False

    def __init__(self, size: int) -> None:
        self.size = size

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if self.size > 8 and rest[-1] == 0 and trainer.global_rank == trainer.world_size - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_module_of_a_failed_fit_is_whole_again_in_the_next(ranks: Any) -> None:
    (stock,) = ranks(1).run(halved, layout=None)
    for found in ranks(2).run(halved, layout={"pp": 2}):
        assert found[:2] == stock[:2] == (8, 4)
        assert found[2] == pytest.approx(stock[2], abs=1e-10)


def fails(kind: str, rank: int | None, layout: dict[str, Any]) -> tuple[str, str]:
    trainer = trainer_of(strategy(**layout), max_epochs=1, callbacks=[Fails(0, rank, 1, kind)])
    try:
        trainer.fit(Net(0), rows())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_class_that_other_ranks_do_not_know_is_named(ranks: Any) -> None:
    first, second = ranks(2).run(fails, kind="local", rank=1, layout={"pp": 2})
    assert second == ("LocalError", "nobody knows it")
    assert first == ("RunError", "rank 1 at step 2 failed: LocalError: nobody knows it")


def test_a_wait_that_lasts_for_the_time_out_names_the_places_and_the_key(ranks: Any) -> None:
    layout = {"pp": 2, "timeout_s": 1}
    (kind, said), (_, other) = ranks(2).run(fails, kind="hangs", rank=1, layout=layout)
    assert kind == "RunError" and other.startswith("a rank has waited for another one for")
    assert "timeout_s=1 s" in said and "PipelineStrategy(timeout_s=...)" in said
    assert "rank 0 waits at step 3 in " in said
    assert "rank 1 waits" in said


def saved(rank: int | None, folder: str, callback: str, *others: Callback) -> list[str]:
    callbacks: list[Any] = [Fails(0, rank, 1), *others]
    if callback == "flag":
        callbacks.append(ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=9))
    else:
        callbacks.append(OnExceptionCheckpoint(folder))
    trainer = trainer_of(
        strategy(pp=2), max_epochs=1, callbacks=callbacks, enable_checkpointing=True
    )
    with pytest.raises(Pruned), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of such callbacks
        trainer.fit(Net(0), rows())
    return sorted(path.name for path in Path(folder).glob("*"))


@pytest.mark.parametrize("callback", ["callback", "flag"])
@pytest.mark.lightning_feature("callback", "OnExceptionCheckpoint")
@pytest.mark.lightning_feature("callback hook", "on_exception")
def test_a_callback_that_saves_then_does_so_if_all_ranks_have_failed(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], callback: str
) -> None:
    alone = ranks(2).run(saved, rank=1, folder=str(tmp_path / "alone"), callback=callback)
    assert alone == [[], []]
    together = ranks(2).run(saved, rank=None, folder=str(tmp_path / "all"), callback=callback)
    assert len(together[0]) == 1 and together[0][0].endswith(".ckpt")
    state = torch.load(tmp_path / "all" / together[0][0], weights_only=False)["state_dict"]
    assert set(state) == set(Net(0).state_dict())


class Slow(Callback):
    """Does not come to save in time."""

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(1.5)


def saved_late(folder: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_end, "_SAVING_S", 0.3)
        return saved(None, folder, "callback", Slow())


def test_a_rank_that_does_not_come_to_save_is_not_waited_for(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(saved_late, folder=str(tmp_path)) == [[], []]
    assert ranks(2).run(rank_of) == [0, 1]


def refused(folder: str) -> str:
    callbacks = [OnExceptionCheckpoint(folder)]
    trainer = trainer_of(
        strategy(pp=2), max_epochs=1, callbacks=callbacks, enable_checkpointing=True
    )
    with pytest.raises(PipelineError) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Forked(0), rows())
    return str(error.value)


class Forked(Net):
    """Its set-up fails on rank 1 alone."""

    def setup(self, stage: str) -> None:
        if os.environ["RANK"] == "1":
            raise PlanError("this rank is odd. Try another.")


def test_a_callback_that_saves_hides_no_refusal(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2).run(refused, folder=str(tmp_path))
    assert found == ["this rank is odd. Try another."] * 2
    assert not list(tmp_path.iterdir())


def later(folder: str) -> tuple[str, str]:
    """Saves and gathers once the ranks have no connections any more."""
    trainer = trainer_of(strategy(pp=2), max_epochs=1, callbacks=[Fails(0, 1, 1)])
    with pytest.raises(Pruned):
        trainer.fit(Net(0), rows())
    said = []
    for call in (
        lambda: trainer.save_checkpoint(f"{folder}/late.ckpt"),
        trainer.strategy.full_state_dict,
    ):
        with pytest.raises(PipelineError) as refused:
            call()
        said.append(str(refused.value))
    return said[0], said[1]


def test_what_needs_all_ranks_is_refused_after_a_fit_has_failed(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(later, folder=str(tmp_path))
    assert first[0] == first[1]
    assert first[0].startswith("no checkpoint was written: rank 1 has failed, and the ranks have ")
    assert second[0].startswith("no checkpoint was written: rank 1 alone has failed (Pruned: ")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_dies_while_others_wait_for_it_releases_them(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2 died"):
        ranks(2).run(fails, kind="dies", rank=1, layout={"pp": 2})
    assert ranks(2).run(rank_of) == [0, 1]


def ends(kind: str, folder: str) -> None:
    """Rank 1 fails, and a rank is killed by that; what the other one ends with lies in a file."""
    rank = os.environ["RANK"]

    def dies(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_end, "_ANSWER_S", 1.0)
        if kind == "while it is informed" and rank == "0":
            patch.setattr(common_end, "_first", dies)
        if kind == "while it informs" and rank == "1":
            patch.setattr(common_end, "_have_answered", dies)
        said = fails("Pruned", 1, {"pp": 2})
    Path(folder, rank).write_text("\n".join(said))


@pytest.mark.parametrize(
    ("kind", "lost"), [("while it is informed", "0"), ("while it informs", "1")]
)
def test_a_rank_that_dies_in_the_midst_of_an_end_leaves_the_other_the_reason(
    ranks: Any, tmp_path: Path, kind: str, lost: str
) -> None:
    """Rank 0 keeps the store, too: it is gone with it."""
    with pytest.raises(AssertionError, match=f"rank {lost} of 2 died"):
        ranks(2).run(ends, kind=kind, folder=str(tmp_path))
    (found,) = tmp_path.iterdir()
    assert found.name != lost
    assert found.read_text().startswith("Pruned\ntrial 0 is worse than others")
    assert ranks(2).run(rank_of) == [0, 1]


def rank_of() -> int:
    assert isinstance(RunError(""), PipelineError)
    return dist.get_rank()
