"""Training without a flush, against one process that is written from the definition alone.

Weights have a history: version v is there when v updates have been made. A parameter whose stage
is late by k updates takes the gradient of a batch of update u at version max(u - k, d), where d
updates had been made when the pipeline was last empty; the gradients are applied to version u and
make u + 1. An update takes one batch, or several, and what is left of them at the end of an epoch.
While steps are synchronous every batch finds an empty pipeline. With error feedback an update is
made longer by what it differs from the one before, if the gradient of that one was late.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from launcher.workloads.optimizer import Muon
from strategies.analysis.timeline import Event
from strategies.errors import ModelError
from strategies.plan import Recompute
from tests.ranks import training
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

WIDTH, UPDATES = 6, 20


class Net(pl.LightningModule):
    """Ordinary layers in 64 bits; one loss per row, so that microbatches and batches agree."""

    def __init__(
        self, optimizer: str, *, tied: bool = False, bare: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
        with torch.no_grad():
            for parameter in (p for layer in layers for p in layer.parameters()):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        self.layers = nn.ModuleList(layers)
        if tied:
            layers[-1].weight = layers[0].weight
        if bare:
            layers[-1].requires_grad_(False)
        self.name = optimizer
        self.norm = nn.BatchNorm1d(WIDTH) if frozen else None
        if self.norm is not None:
            self.norm.running_mean += 0.2

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1 and self.norm is not None:
                x = self.norm(x)
        return x

    def on_train_start(self) -> None:
        if self.norm is not None:
            self.norm.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        made = optimizer_of(self.name, self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1 + step))
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "Muon":
        trained = list(parameters)
        return Muon(
            [{"params": [p for p in trained if p.dim() == 2], "lr": 0.05, "weight_decay": 0.1}],
            [{"params": [p for p in trained if p.dim() < 2], "lr": 0.05, "weight_decay": 0.1}],
        )
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    schedule: str
    pp: int
    dp: int = 1
    optimizer: str = "AdamW"
    microbatches: int = 4
    clip: float | None = None
    vertical_sync: bool = False
    overlap: str = "grad_reduce"
    recompute: str = "none"
    check_every: int | None = None  # batches between validations
    rows: int = 8  # of a replica's batch
    updates: int = UPDATES  # batches, and updates of one batch each
    accumulation: int = 1
    by_value: bool = False  # what is clipped
    tp: int = 1
    short_last: int = 0  # rows of a replica's last batch, if others
    tied: bool = False  # whether the first and the last layer share a weight
    bare: bool = False  # whether the last stage trains no weights
    frozen: bool = False  # whether there is a batch norm that keeps its statistics
    nan_at: int | None = None  # the batch whose loss is not finite
    looks_at: int | None = None  # the batch behind which a hook looks at weights and gradients
    alone: bool = False  # whether it does so on one rank
    looks_before: bool = False  # whether a hook looks at gradients before each update
    synchronous: int = 0  # steps in the beginning that end with a flush
    feedback: float = 0.0

    @property
    def late(self) -> list[int]:
        """Per stage, by how many updates."""
        if self.schedule == "pipedream_2bw":
            return [1] * self.pp
        last = self.pp - 1
        behind = [last if self.vertical_sync else last - stage for stage in range(self.pp)]
        return [-(-count // self.accumulation) for count in behind]


def rows_of(case: Case) -> tuple[Tensor, Tensor]:
    count = case.dp * case.rows * case.updates
    if case.short_last:
        count -= case.dp * (case.rows - case.short_last)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.tanh(2 * torch.randn(count, WIDTH, generator=generator, dtype=torch.float64))
    if case.nan_at is not None:
        y[case.nan_at * case.dp * case.rows] = torch.nan
    return x, y


def oracle(case: Case, stage_of: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by batch, and the weights in the end; ``stage_of`` says where each of them was."""
    net = Net(case.optimizer, tied=case.tied, bare=case.bare, frozen=case.frozen).double()
    net.on_train_start()
    named = dict(net.named_parameters())
    made = net.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    versions = [{name: p.detach().clone() for name, p in named.items()}]
    x, y = rows_of(case)
    size = case.dp * case.rows
    losses, empty, update = [], 0, 0
    before: dict[str, Tensor] | None = None  # the update before, if its gradient was late
    for number in range(case.updates):
        rows = slice(number * size, (number + 1) * size)
        if len(x[rows]) < size or update <= case.synchronous:
            empty = update  # It finds an empty pipeline.
        if empty == update:
            before = None
        for name, parameter in named.items():
            version = max(update - case.late[stage_of[name]], empty)
            parameter.data = versions[version][name].clone()
        if number % case.accumulation == 0:
            optimizer.zero_grad()
        loss = functional.mse_loss(net(x[rows]), y[rows])
        (loss / case.accumulation).backward()
        losses.append(float(loss.detach()))
        if (number + 1) % case.accumulation == 0 or number + 1 == case.updates:
            for name, parameter in named.items():
                parameter.data = versions[update][name].clone()
            if number != case.nan_at:
                if case.clip is not None and case.by_value:
                    nn.utils.clip_grad_value_(net.parameters(), case.clip)
                elif case.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), case.clip)
                optimizer.step()
            schedule.step()
            if case.feedback:
                made_now = {n: p.detach() - versions[update][n] for n, p in named.items()}
                with torch.no_grad():
                    for name, p in named.items() if before is not None else ():
                        if number != case.nan_at:
                            p.add_(case.feedback * (made_now[name] - before[name]))
                late = update > empty and number != case.nan_at
                before = made_now if late else None
            versions.append({name: p.detach().clone() for name, p in named.items()})
            update += 1
        checked = case.check_every is not None and (number + 1) % case.check_every == 0
        if checked or number == case.looks_at:
            empty = update
    return losses, versions[-1]


class _Losses(Callback):
    """What each call has returned, looked at only in the end or at once."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self.kept: list[Tensor] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if self._at_once:
            self.losses.append(float(outputs["loss"]))


def train(
    case: Case,
    *,
    at_once: bool = False,
    folder: str = "",
    save_after: int = 0,
    resume: str | None = None,
) -> dict[str, Any]:
    losses = _Losses(at_once=at_once)
    saver: list[Callback] = [_Saves(folder, save_after)] if save_after else []
    if case.looks_at is not None:
        saver.append(_Looks(case.looks_at, alone=case.alone))
    if case.looks_before:
        saver.append(_LooksBefore())
    strategy = {
        "pp": case.pp, "dp": case.dp, "tp": case.tp, "schedule": case.schedule,
        "num_microbatches": case.microbatches, "overlap": case.overlap,
        "recompute": Recompute("optimal", max_full_activations=2.0)
        if case.recompute == "optimal"
        else case.recompute,
        "vertical_sync": case.vertical_sync, "units_per_stage": [4, 1] if case.bare else None,
        "synchronous_steps": case.synchronous, "error_feedback": case.feedback,
        "on_nan": "skip" if case.nan_at is not None else "stop", "seed": 0, "whole_after": False,
    }  # fmt: skip
    trainer: Any = trainer_of(
        strategy,
        devices=case.pp * case.dp * case.tp,
        max_epochs=1,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm="value" if case.by_value else "norm",
        accumulate_grad_batches=case.accumulation,
        val_check_interval=case.check_every,
        limit_val_batches=1 if case.check_every else 0,
        log_every_n_steps=1000,
        callbacks=[losses, *saver],
    )
    module = Net(case.optimizer, tied=case.tied, bare=case.bare, frozen=case.frozen)
    x, y = rows_of(case)
    loader = DataLoader(TensorDataset(x, y), batch_size=case.rows, shuffle=False)
    trainer.fit(module, loader, loader if case.check_every else None, ckpt_path=resume)
    strategy = trainer.strategy
    versions = strategy.engine._parts.versions
    timeline = strategy.measured_timeline()
    return {
        "ran": timeline and [list(map(_told, timeline.events(r))) for r in range(case.pp)],
        "period": timeline and timeline.period,
        "stages": {
            name: stage
            for stage, named in strategy.engine._weights.by_stage.items()
            for name in named
        },
        "weights": {n: p.detach().clone() for n, p in strategy.engine.named_parameters().items()},
        "losses": losses.losses,
        "steps": trainer.global_step,
        "epoch": float(trainer.callback_metrics["train_loss_epoch"]),
        "norms": [looks.norms for looks in saver if isinstance(looks, _Looks)],
        "memory": None if versions is None else versions.most,
        "asks_early": strategy.engine.stream is not None and strategy.engine.stream.ask is not None,
    }


def _told(event: Event) -> tuple[str, int, int | None, float, float]:
    item = event.instruction
    return item.kind.value, item.stage, item.microbatch, event.start, event.end


def _assert_one_stream(found: list[dict[str, Any]], pp: int) -> None:
    """What is said to have been measured is all ranks' same batches, each behind what it needs."""
    (rows,) = {str(rank["ran"]): rank["ran"] for rank in found}.values()
    ends = {told[:3]: told[4] for row in rows for told in row}
    for row in rows:
        computed = [told for told in row if told[0] in "FB"]
        assert all(0 <= start < end for *_, start, end in computed)
        assert all(first[4] <= second[3] for first, second in pairwise(computed))
        for kind, stage, microbatch, start, _ in computed:
            before = stage - 1 if kind == "F" else stage + 1
            if 0 <= before < pp:
                assert ends[kind, before, microbatch] <= start
    assert all(rank["period"] > 0 for rank in found)


def compare(case: Case, ranks: Callable[[int], Ranks], *, at_once: bool = False) -> list[Any]:
    found = ranks(case.pp * case.dp).run(train, case=case, at_once=at_once)
    stage_of = {name: stage for rank in found for name, stage in rank["stages"].items()}
    losses, weights = oracle(case, stage_of)
    for rank in found:
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10)
        assert rank["steps"] == -(-case.updates // case.accumulation)
        if at_once:
            assert rank["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
    assert len(stage_of) == len(weights)
    return found


EVERY_DAY = [
    Case("pipedream_2bw", 2, clip=0.02, optimizer="Muon"),
    Case("pipedream_2bw", 4, recompute="optimal", overlap="none", synchronous=4, feedback=1.0),
    Case("pipedream", 2, 2, microbatches=1, vertical_sync=True, clip=0.02, overlap="zero1"),
]
SELDOM = [
    Case("pipedream", 4, microbatches=1, accumulation=2, check_every=5, frozen=True),
    Case("pipedream_2bw", 2, 2, "SGD", 1, overlap="zero1", rows=6, accumulation=3, check_every=4),
    Case("pipedream", 4, microbatches=1, clip=0.003, by_value=True, synchronous=5),
    Case("pipedream_2bw", 2, 2, "SGD", 2, overlap="none", clip=0.02, accumulation=2),
]


@pytest.mark.parametrize(
    "case", [*EVERY_DAY, *(pytest.param(case, marks=pytest.mark.full) for case in SELDOM)], ids=str
)
def test_twenty_updates_are_those_of_one_process_with_late_gradients(case, ranks):
    found = compare(case, ranks)
    if case.accumulation == 1:  # else no four batches of an update each are without a drain
        for replica in range(case.dp):
            _assert_one_stream(found[replica :: case.dp], case.pp)


@pytest.mark.full
@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Muon"])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "microbatches", "sync"),
    [("pipedream_2bw", 4, False), ("pipedream", 1, False), ("pipedream", 1, True)],
)
def test_all_degrees_and_optimizers(schedule, microbatches, sync, pp, dp, optimizer, clip, ranks):
    case = Case(schedule, pp, dp, optimizer, microbatches, clip, sync, check_every=7)
    if clip is not None and schedule == "pipedream" and not sync:
        # By norm is refused: a rank would apply its gradient before the norm is known.
        case = replace(case, clip=0.003, by_value=True)
    compare(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize("short", [0, 3])
@pytest.mark.parametrize("check_every", [None, 5])
@pytest.mark.parametrize(("accumulation", "microbatches"), [(2, 2), (3, 4), (4, 1), (7, 2)])
@pytest.mark.parametrize(("pp", "dp", "overlap"), [(2, 2, "none"), (4, 1, "none"), (2, 2, "zero1")])
def test_updates_of_several_batches(
    pp, dp, overlap, accumulation, microbatches, check_every, short, ranks
):
    """Also where a validation or a batch of another size comes before an update is complete."""
    compare(
        Case(
            "pipedream_2bw", pp, dp, "AdamW", microbatches, clip=0.02, overlap=overlap,
            accumulation=accumulation, check_every=check_every, short_last=short,
        ),
        ranks,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("short", [0, 3])
@pytest.mark.parametrize("check_every", [None, 5])
@pytest.mark.parametrize("accumulation", [2, 3, 4])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(("pp", "dp", "overlap"), [(2, 2, "none"), (4, 1, "none"), (2, 2, "zero1")])
def test_updates_of_several_microbatches_by_stage(
    pp, dp, overlap, sync, accumulation, check_every, short, ranks
):
    """A stage uses the newest weights that there are when an update's first microbatch comes."""
    case = Case(
        "pipedream", pp, dp, "AdamW", 1, clip=0.02 if sync else 0.003, by_value=not sync,
        vertical_sync=sync, overlap=overlap, accumulation=accumulation, check_every=check_every,
        short_last=short, tied=sync,
    )  # fmt: skip
    compare(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize("synchronous", [0, 5])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("dp", "overlap"), [(1, "grad_reduce"), (2, "zero1")])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_remedies(optimizer, dp, overlap, accumulation, synchronous, ranks):
    case = Case(
        "pipedream_2bw", 2, dp, optimizer, 2, clip=0.02, overlap=overlap, check_every=9,
        accumulation=accumulation, synchronous=synchronous, feedback=1.0,
    )  # fmt: skip
    compare(case, ranks)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full", "layer", "optimal"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("overlap", ["grad_reduce", "none", "zero1"])
@pytest.mark.parametrize(
    ("schedule", "microbatches", "sync"),
    [("pipedream_2bw", 4, False), ("pipedream", 1, False), ("pipedream", 1, True)],
)
def test_shares_shared_weights_and_recomputation(
    schedule, microbatches, sync, overlap, tied, recompute, ranks
):
    tied = tied and (sync or microbatches > 1)  # else refused
    case = Case(schedule, 2, 2, "AdamW", microbatches, vertical_sync=sync, check_every=6)
    compare(replace(case, overlap=overlap, tied=tied, recompute=recompute), ranks)


@pytest.mark.parametrize(
    "case",
    [
        Case("pipedream_2bw", 2, check_every=4, updates=10, short_last=3, feedback=0.5),
        Case("pipedream", 2, microbatches=1, check_every=4, updates=10),
    ],
    ids=str,
)
def test_validation_and_a_short_batch_drain_and_each_loss_is_its_batchs(case, ranks):
    found = compare(case, ranks, at_once=True)
    losses, _ = oracle(case, {name: s for rank in found for name, s in rank["stages"].items()})
    sizes = [case.rows] * (case.updates - 1) + [case.short_last or case.rows]
    mean = sum(a * b for a, b in zip(losses, sizes, strict=True)) / sum(sizes)
    assert [rank["epoch"] for rank in found] == pytest.approx([mean] * len(found), abs=1e-10)


@pytest.mark.parametrize(
    "case",
    [
        Case("pipedream_2bw", 2, updates=8, nan_at=4, feedback=1.0),
        Case("pipedream_2bw", 2, updates=8, nan_at=4, bare=True),
        Case("pipedream_2bw", 2, updates=8, looks_at=4),
        Case("pipedream_2bw", 1, microbatches=2, updates=8, looks_at=4),
        Case("pipedream_2bw", 2, 2, microbatches=2, updates=8, looks_at=4, alone=True),
        Case("pipedream_2bw", 2, updates=8, looks_at=4, accumulation=2, looks_before=True),
        Case("pipedream_2bw", 2, updates=8, tied=True, clip=0.02),
    ],
    ids=[
        "a loss that is not finite",
        "the same where nothing is trained",
        "a hook that looks at weights",
        "the same on a single stage",
        "the same on one rank alone",
        "hooks that look at gradients",
        "tied weights",
    ],
)
def test_an_update_is_left_out_a_hook_drains_and_shared_weights_stay_shared(case, ranks):
    found = compare(case, ranks)
    # With its verdict under way beside later microbatches; a hook that could change it may wait.
    assert all(rank["asks_early"] != case.looks_before for rank in found)
    assert all(rank["norms"] == ([[]] if case.alone else found[0]["norms"]) for rank in found[1:])
    assert all(norm > 0 for seen in found[0]["norms"] for norm in seen)


def _refused(case: Case) -> str:
    try:
        train(case)
    except ModelError as error:
        return str(error)
    return ""


def test_stages_that_apply_different_updates_show_no_gradient_of_a_whole_model(ranks):
    case = Case("pipedream", 2, microbatches=1, updates=4, looks_before=True)
    for said in ranks(2).run(_refused, case=case):
        assert "on_before_optimizer_step looks at gradients around an update" in said
        assert "schedule.vertical_sync=true" in said


class _Shrinks(Callback):
    """Writes to all weights behind each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.99)


def _train_shrinking(case: training.Case) -> dict[str, Any]:
    with warnings.catch_warnings():
        # Said where it drains after each batch.
        warnings.filterwarnings("ignore", message=".*_Shrinks may look at weights")
        return training.train(case=case, callbacks=[_Shrinks()])


def test_around_a_module_that_declares_units_a_hook_finds_every_update_made(ranks):
    """What it touches is not seen there, so nothing is under way when it runs."""
    late = training.Case("pipedream_2bw", 2, steps=4, clip=0.05)
    found = [
        ranks(2).run(_train_shrinking, case=case) for case in (late, replace(late, schedule="1f1b"))
    ]
    for first, second in zip(*found, strict=True):
        assert first["losses"] == pytest.approx(second["losses"], rel=0, abs=1e-10)
        for name, value in first["parameters"].items():
            torch.testing.assert_close(value, second["parameters"][name], rtol=0, atol=1e-10)


def test_memory_has_as_many_versions_as_the_program_says(ranks):
    found = ranks(4).run(train, case=Case("pipedream", 4, microbatches=1, updates=9))
    assert [rank["memory"] for rank in found] == [4, 3, 2, 1]
    found = ranks(4).run(train, case=Case("pipedream_2bw", 4, updates=5))
    assert [rank["memory"] for rank in found] == [2, 2, 2, 1]


class _Looks(Callback):
    """Looks at the whole model behind one batch, on all ranks or on the first one alone."""

    def __init__(self, after: int, *, alone: bool) -> None:
        self._after = after
        self._alone = alone
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, n: int):
        if n == self._after and (trainer.is_global_zero or not self._alone):
            self.norms.append(float(sum(p.detach().square().sum() for p in module.parameters())))
            self.norms.append(_of_gradients(module))


def _of_gradients(module: nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None))


class _LooksBefore(Callback):
    """Looks at the whole gradient before each update."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        assert _of_gradients(module) > 0


class _Saves(Callback):
    """Saves in the midst of training, with microbatches under way."""

    def __init__(self, folder: str, after: int) -> None:
        self._folder = folder
        self._after = after

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._after:
            trainer.save_checkpoint(f"{self._folder}/half.ckpt")


def test_a_checkpoint_is_a_plain_one_and_training_goes_on_bit_for_bit(ranks, tmp_path):
    """It goes on from an empty pipeline, as the run does that has saved it."""
    for case in (
        Case("pipedream_2bw", 2, updates=9, synchronous=6),
        Case("pipedream", 2, 1, "SGD", 1, updates=9),
    ):
        folder = tmp_path / case.schedule
        whole = ranks(2).run(train, case=case, folder=str(folder), save_after=4)
        path = str(folder / "half.ckpt")
        again = ranks(2).run(train, case=case, resume=path)
        plain = replace(case, schedule="1f1b", synchronous=0)
        other = ranks(2).run(train, case=plain, resume=path)
        for first, second in zip(whole, again, strict=True):
            for name, value in first["weights"].items():
                assert torch.equal(value, second["weights"][name])
        assert all(rank["steps"] == case.updates for rank in other)


@pytest.mark.parametrize(
    ("precision", "schedule", "microbatches"),
    [
        ("bf16-true", "pipedream_2bw", 4),
        pytest.param("bf16-true", "pipedream", 1, marks=pytest.mark.full),
        pytest.param("bf16-mixed", "pipedream_2bw", 4, marks=pytest.mark.full),
        pytest.param("32-true", "pipedream", 1, marks=pytest.mark.full),
    ],
)
def test_shares_of_short_weights_are_updated_as_whole_ones_are(
    precision, schedule, microbatches, ranks
):
    whole = training.Case(schedule, 2, 2, microbatches=microbatches, steps=4)
    shares = replace(whole, overlap="zero1")
    found = [
        ranks(4).run(training.train, case=case, precision=precision) for case in (whole, shares)
    ]
    for first, second in zip(*found, strict=True):
        assert first["losses"] == second["losses"]
        for name, value in first["parameters"].items():
            assert torch.equal(value, second["parameters"][name]), name


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "microbatches"), [("pipedream_2bw", 4), ("pipedream", 1)])
def test_ranks_that_share_matrices_are_late_alike(schedule, microbatches, ranks):
    shape = training.small_shape(layers=2, hidden=16, heads=4, kv_heads=4, ffn=12)
    clip = 0.05 if microbatches > 1 else None
    one = training.Case(schedule, 2, microbatches=microbatches, clip=clip, shape=shape)
    first, *_ = ranks(2).run(training.train, case=one)
    second, *_ = ranks(4).run(training.train, case=replace(one, tp=2))
    assert first["losses"] == pytest.approx(second["losses"], rel=0, abs=1e-10)
