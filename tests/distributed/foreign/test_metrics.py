"""torchmetrics objects in steps and hooks: the numbers of stock Lightning on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchmetrics as tm
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy

from strategies.errors import ModelError
from strategies.models.logs import Replicas, share_metrics
from tests.ranks.comparison import (
    CLASSES,
    TOLERANCE,
    Net,
    equal_to_stock,
    examples,
    spread,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
KIND: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}


class Updated(Net):
    """torchmetrics_update_and_log."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = tm.Accuracy(**KIND)
        self.auroc = tm.AUROC(**KIND)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        self.acc.update(z, batch[1])
        self.auroc.update(z, batch[1])
        self.log("acc", self.acc)
        self.log("auroc", self.auroc)


class Called(Net):
    """metric_object_forward_and_log."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score(average="macro", **KIND)
        self.train_f1 = tm.F1Score(average="macro", **KIND)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.train_f1(z, batch[1])
        self.log("train_f1", self.train_f1, on_step=True, on_epoch=True)
        return cross_entropy(z, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.f1(self(batch[0]), batch[1])
        self.log("f1", self.f1)


class Template(Net):
    """The pattern of lightning-hydra-template."""

    def __init__(self) -> None:
        super().__init__()
        self.train_acc = tm.Accuracy(**KIND)
        self.val_acc = tm.Accuracy(**KIND)
        self.train_loss = tm.MeanMetric()
        self.val_loss = tm.MeanMetric()
        self.best = tm.MaxMetric()

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        loss = cross_entropy(z, batch[1])
        self.train_loss(loss)
        self.train_acc(z.argmax(1), batch[1])
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        self.val_loss(cross_entropy(z, batch[1]))
        self.val_acc(z.argmax(1), batch[1])
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.best(self.val_acc.compute())
        self.log("val/best", self.best.compute(), sync_dist=True, prog_bar=True)


class Many(Net):
    """The ten metrics that are used most: called, updated, in containers, kept for hooks."""

    def __init__(self) -> None:
        super().__init__()
        macro = KIND | {"average": "macro"}
        self.kinds = torch.nn.ModuleDict(
            {
                "acc": tm.Accuracy(**KIND),
                "f1": tm.F1Score(**macro),
                "precision": tm.Precision(**macro),
                "recall": tm.Recall(**macro),
                "auroc": tm.AUROC(**KIND),
            }
        )
        self.errors = torch.nn.ModuleList(
            [
                tm.MeanSquaredError(),
                tm.MeanAbsoluteError(),
                tm.R2Score(),
                tm.MeanSquaredError(squared=False),
            ]
        )
        self.loss = tm.MeanMetric()
        self.confusion = tm.ConfusionMatrix(**KIND)
        self.group = tm.MetricCollection(
            {"a": tm.Accuracy(**KIND), "f": tm.F1Score(**macro), "s": tm.Specificity(**KIND)},
            prefix="group_",
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        for name, metric in self.kinds.items():
            metric(z, batch[1])
            self.log(name, metric)
        for number, metric in enumerate(self.errors):
            metric(z.sum(1), batch[0].sum(1))
            self.log(f"error{number}", metric)
        self.loss.update(cross_entropy(z, batch[1]))
        self.log("loss", self.loss)
        self.group.update(z, batch[1])
        self.log_dict(self.group)
        self.confusion.update(z, batch[1])

    def on_validation_epoch_end(self) -> None:
        table = self.confusion.compute().double()
        for row in range(CLASSES):
            self.log(f"confused{row}", table[row].max(), sync_dist=True)
        self.confusion.reset()


class Trained(Net):
    """Metrics of training batches, one of them smaller than the others."""

    loaders = staticmethod(lambda replicas=1: examples(rows=40, replicas=replicas))

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score(average="macro", **KIND)
        self.auroc = tm.AUROC(**KIND)
        self.group = tm.MetricCollection([tm.Accuracy(**KIND), tm.Specificity(**KIND)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        loss = cross_entropy(z, batch[1])
        self.f1(z, batch[1])
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.auroc.update(z, batch[1])
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.log_dict(self.group(z, batch[1]), on_step=True, on_epoch=False)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Values(Net):
    """What a metric returns is logged, not the object."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score(average="macro", **KIND)
        self.acc = tm.Accuracy(**KIND)
        self.group = tm.MetricCollection(
            [tm.Accuracy(**KIND), tm.Precision(average="macro", **KIND)]
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.log("f1", self.f1(z, batch[1]))
        return cross_entropy(z, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        self.log("percent", self.f1(z, batch[1]) * 100)
        self.log_dict(self.group(z, batch[1]))
        self.acc.update(z, batch[1])
        self.log("until_now", self.acc.compute())


class Quantile(tm.Metric):
    """Somebody's own metric: a maximum and a list."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("best", torch.tensor(0.0), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, z: Tensor, y: Tensor) -> None:
        self.best = torch.maximum(self.best, (z.argmax(1) == y).float().mean())
        self.seen.append(z.amax(1))

    def compute(self) -> Tensor:
        seen = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
        return self.best + seen.median()


class Tracked(Net):
    """Metrics that are made while training goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Quantile()
        self.tracker = tm.MetricTracker(tm.Accuracy(**KIND))

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = self(batch[0])
        self.tracker.update(z, batch[1])
        self.own(z, batch[1])
        self.log("own", self.own)

    def on_validation_epoch_end(self) -> None:
        self.log("best", float(self.tracker.best_metric()), sync_dist=True)


class Loss(torch.nn.Module):
    """A part of the module that keeps a metric and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score(average="macro", **KIND)
        self.calls = 0

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.f1.update(z, y)
        return cross_entropy(z, y)


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("f1", self.loss.f1, on_step=False, on_epoch=True)
        assert isinstance(loss, Tensor)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("calls", float(self.loss.calls), sync_dist=True)


class Units(Net):
    """A module that declares its units."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score(average="macro", **KIND)
        self.n = 0

    def pipeline_units(self) -> list[tuple[str, torch.nn.Module]]:
        return [(f"net.{i}", self.net[i]) for i in (0, 2, 4, 6)] + [("head", self.head)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: str) -> Tensor:
        self.f1(tensors[0], batch[1])
        self.log("f1", self.f1, on_step=False, on_epoch=True)
        self.n += 1
        return cross_entropy(tensors[0], batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = batch[0]
        for _, unit in self.pipeline_units():
            z = unit(z)
        return self.pipeline_result((z,), batch, batch_idx, "train")

    def on_train_epoch_end(self) -> None:
        self.log("n", float(self.n), sync_dist=True)


class Loaders(Net):
    """A metric per evaluation loader, the first one's states too large to go with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.aurocs = torch.nn.ModuleList([tm.AUROC(**KIND), tm.AUROC(**KIND)])
        self.all = tm.MeanMetric()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        z = self(batch[0])
        self.aurocs[dataloader_idx].update(z, batch[1])
        self.log("auroc", self.aurocs[dataloader_idx])
        self.log("loss", cross_entropy(z, batch[1]))
        self.all.update(cross_entropy(z, batch[1]))

    def on_test_epoch_end(self) -> None:
        self.log("all", self.all.compute(), sync_dist=True)


def told_test(module: Any, trainer: Any) -> Any:
    loaders = [examples(rows=160, seed=3), examples(rows=12, seed=4)]
    return trainer.test(module, loaders, verbose=False)


class Noisy(Net):
    """The loss of a batch depends on what the step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = tm.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn(2 * len(batch[0]), *batch[0].shape[1:], dtype=torch.float64)
        loss = (self(noise) - noise[:, :CLASSES]).pow(2).mean()
        self.loss(loss)
        self.log("loss", self.loss)
        return loss


class Bootstrapped(Net):
    """Metrics that draw which rows they count, a step that draws noise, a hook that draws."""

    def __init__(self) -> None:
        super().__init__()
        own = tm.MeanSquaredError()
        self.train_boot = tm.BootStrapper(own, num_bootstraps=3, sampling_strategy="multinomial")
        self.boot = tm.BootStrapper(tm.Accuracy(**KIND), num_bootstraps=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0] + torch.randn_like(batch[0]) / 8)
        self.train_boot.update(z.detach().sum(1), batch[0].sum(1))
        return cross_entropy(z, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.boot.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.boot.compute(), sync_dist=True)
        self.log("drawn", torch.rand(()).double(), sync_dist=True)
        self.boot.reset()

    def on_train_epoch_end(self) -> None:
        mean = self.train_boot.compute()["mean"]
        self.log("train_mean", mean, sync_dist=True)
        self.train_boot.reset()


def bootstrapped() -> Net:
    module = Bootstrapped()
    torch.manual_seed(5)
    return module


class Hidden(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"acc": tm.Accuracy(**KIND)}


class Box:
    def __init__(self) -> None:
        self.metric = tm.Accuracy(**KIND)


def test_a_metric_in_a_plain_object_is_refused_unless_the_module_has_it_as_well() -> None:
    module: Any = Net()
    module.box = Box()
    with pytest.raises(ModelError, match="box is a plain Box of torchmetrics objects"):
        share_metrics(module, Replicas(None))
    module.metric = module.box.metric
    assert share_metrics(module, Replicas(None))


@spread([Many, Template, Updated], seldom=[Called])
def test_a_metric_has_the_number_of_stock_lightning(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, _ = equal_to_stock(ranks, case, layout, max_epochs=2, num_sanity_val_steps=2)
    assert stock.metrics


@spread([bootstrapped])
def test_what_a_metric_draws_is_drawn_once_for_the_batch(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    layout = layout.removesuffix("-dp2")  # Each replica counts rows of its own.
    stock, _ = equal_to_stock(ranks, case, layout, max_epochs=2)
    assert stock.metrics.keys() == {"mean", "std", "drawn", "train_mean"}


@spread([Trained, Values])
def test_the_value_of_a_batch_is_that_of_all_its_rows(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(ranks, case, layout)
    assert piped[0].logged == [pytest.approx(row, abs=TOLERANCE) for row in stock.logged]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (Tracked, "1f1b-dp2"),
        (Nested, "zb_v"),
        (Units, "1f1b"),
        *(
            pytest.param(case, layout, marks=pytest.mark.full)
            for case in (Tracked, Nested, Units)
            for layout in ("1f1b", "zb_v", "1f1b-dp2", "zb_v-dp2")
        ),
    ],
)
def test_metrics_may_lie_anywhere_in_the_module(
    case: Any, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])
def test_each_loader_has_its_metric(layout: str, ranks: Callable[[int], Ranks]) -> None:
    stock, piped = equal_to_stock(ranks, Loaders, layout, told=told_test)
    wanted = [pytest.approx(result, abs=TOLERANCE) for result in stock.told]
    assert len(wanted) == 2
    assert [fitted.told for fitted in piped] == [wanted] * len(piped)


def test_a_forward_that_runs_again_does_not_count_again(ranks: Callable[[int], Ranks]) -> None:
    strategy = {"recompute": "full"}
    equal_to_stock(ranks, Nested, "1f1b", strategy=strategy, max_epochs=2)


def test_batches_of_an_accumulation_count_each(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Nested, "1f1b-dp2", accumulate_grad_batches=2)


def decides() -> Sequence[Any]:
    return [
        EarlyStopping("val/acc", mode="max", patience=1),
        ModelCheckpoint(monitor="val/acc", mode="max", save_top_k=1, filename="{epoch}"),
    ]


def told_decisions(module: Any, trainer: Any) -> Any:
    stopping, kept = trainer.early_stopping_callback, trainer.checkpoint_callback
    return trainer.current_epoch, stopping.stopped_epoch, kept.best_model_path.rpartition("/")[2]


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v-dp2", marks=pytest.mark.full)])
@pytest.mark.lightning_feature("callback", "EarlyStopping", "ModelCheckpoint", "Checkpoint")
def test_callbacks_decide_by_a_metric_as_under_stock_lightning(
    layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(
        ranks, Template, layout, callbacks=decides, told=told_decisions, max_epochs=4,
        enable_checkpointing=True,
    )  # fmt: skip
    assert [fitted.told for fitted in piped] == [stock.told] * len(piped)


@pytest.mark.parametrize(
    ("case", "strategy", "words"),
    [
        (Hidden, {}, "metrics is a plain dict of torchmetrics objects"),
        (Noisy, {}, "draws random numbers"),
        (Called, {"schedule": "chimera"}, "holds the last stage twice"),
    ],
)
def test_what_ranks_cannot_agree_on_is_refused(
    case: Any, strategy: Any, words: str, ranks: Callable[[int], Ranks]
) -> None:
    name = f"{__name__}:{case.__qualname__}"
    for refusal in ranks(2).refusals(train, case=name, strategy={"pp": 2, **strategy}):
        assert isinstance(refusal, ModelError)
        assert words in str(refusal)
