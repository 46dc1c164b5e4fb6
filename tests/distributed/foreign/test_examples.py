"""The examples that people start from, written as there: what they come to is stock Lightning's.

Their data is small and made here. GANs are in ``test_manual_optimization.py``, BYOL and DINO in
``test_parameter_hooks.py``, SimCLR in ``test_loss_over_batch.py``, the ten most used metrics in
``test_metrics.py``, diffusion models in ``test_diffusers.py``.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.demos import Transformer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import Accuracy

from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.ranks import comparison
from tests.ranks.comparison import (
    LAYOUTS,
    MICROBATCHES,
    TOLERANCE,
    equal_to_stock,
    spread,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

SIDE, ROWS = 8, 32


def images(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(ROWS, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(10, (ROWS,), generator=generator))


class Example(pl.LightningModule):
    """What the comparison asks for: data of this example, for training and validation."""

    replicas = 1

    def data(self, seed: int = 1) -> Any:
        return images(seed)

    def loaders(self, replicas: int = 1) -> DataLoader[Any]:
        self.replicas = replicas
        return DataLoader(self.data(), batch_size=8 * replicas)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data(2), batch_size=8 * self.replicas)


# -- autoencoder.py -------------------------------------------------------------------------------


class LitAutoEncoder(Example):
    def __init__(self, hidden_dim: int = 16, learning_rate: float = 10e-3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(SIDE * SIDE, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3)
        )
        self.decoder = nn.Sequential(
            nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, SIDE * SIDE)
        )

    def forward(self, x: Tensor) -> Any:
        z = self.encoder(x)
        return self.decoder(z)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._common_step(batch, batch_idx, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._common_step(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._common_step(batch, batch_idx, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
        x = self._prepare_batch(batch)
        return self(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)  # type: ignore[attr-defined]

    def _prepare_batch(self, batch: Any) -> Tensor:
        x, _ = batch
        return x.view(x.size(0), -1)  # type: ignore[no-any-return]

    def _common_step(self, batch: Any, batch_idx: int, stage: str) -> Tensor:
        x = self._prepare_batch(batch)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss


class ImageSampler(pl.Callback):
    """Looks at pictures on one rank, by the whole model."""

    sums: tuple[float, ...] = ()

    @rank_zero_only
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        shown, _ = next(iter(DataLoader(images(3), batch_size=3)))
        flat = shown.view(shown.size(0), -1)
        with torch.no_grad():
            pl_module.eval()
            generated = pl_module(flat.to(pl_module.device))
            pl_module.train()
        self.sums = (*self.sums, float(generated.reshape(shown.shape).sum()))


# -- backbone_image_classifier.py, and the image classifiers 3 to 5 that grow out of plain torch --


class Backbone(nn.Module):
    def __init__(self, hidden_dim: int = 16) -> None:
        super().__init__()
        self.l1 = nn.Linear(SIDE * SIDE, hidden_dim)
        self.l2 = nn.Linear(hidden_dim, hidden_dim)
        self.l3 = nn.Linear(hidden_dim, hidden_dim)
        self.l4 = nn.Linear(hidden_dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        x = torch.relu(self.l2(torch.relu(self.l1(x))))
        return torch.relu(self.l4(torch.relu(self.l3(x))))


class LitClassifier(Example):
    def __init__(self, backbone: Backbone | None = None, learning_rate: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters(ignore=["backbone"])
        if backbone is None:
            backbone = Backbone()
        self.backbone = backbone

    def forward(self, x: Tensor) -> Any:
        return self.backbone(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y), on_step=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
        x, _ = batch
        return self(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)  # type: ignore[attr-defined]


class ConvolutionalClassifier(Example):
    """The network of the image classifiers (`train_torch.py` and its kin), with their metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 6, 3, 1)
        self.fc1 = nn.Linear(24, 16)
        self.fc2 = nn.Linear(16, 10)
        self.val_acc = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.nll_loss(self.forward(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.forward(x)
        self.log("val_loss", F.nll_loss(logits, y.long()))
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


# -- transformer.py -------------------------------------------------------------------------------


class LanguageModel(Example):
    """The Transformer of Lightning's demos: masks and positions that are made in the step."""

    def __init__(self, vocab_size: int = 20) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Transformer(vocab_size, ninp=8, nhead=2, nhid=8, nlayers=2, dropout=0.0)

    def data(self, seed: int = 1) -> Any:
        tokens = torch.randint(20, (ROWS, 7), generator=torch.Generator().manual_seed(seed))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        output = self.model(inputs, target)
        loss = F.nll_loss(output, target.view(-1).contiguous())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        loss = F.nll_loss(self.model(inputs, target), target.reshape(-1))
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# -- computer_vision_fine_tuning.py ---------------------------------------------------------------


class MilestonesFinetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(modules=pl_module.feature_extractor, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        parts = {1: slice(-2, None), 2: slice(None, -2)}
        if epoch in parts:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[parts[epoch]],
                optimizer=optimizer,
                train_bn=False,
            )


def block(width_in: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width_in, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU()
    )


class TransferLearningModel(Example):
    def __init__(self, milestones: tuple[int, ...] = (1, 2), gamma: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.milestones, self.gamma = milestones, gamma
        self.__build_model()
        self.train_acc = Accuracy(task="binary")
        self.valid_acc = Accuracy(task="binary")
        self.save_hyperparameters()

    def __build_model(self) -> None:
        blocks = [block(1, 4), block(4, 4), block(4, 6), nn.AdaptiveAvgPool2d(1)]
        self.feature_extractor = nn.Sequential(*blocks)
        self.fc = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 1))
        self.loss_func = F.binary_cross_entropy_with_logits

    def forward(self, x: Tensor) -> Any:
        x = self.feature_extractor(x)
        x = x.squeeze(-1).squeeze(-1)
        return self.fc(x)

    def data(self, seed: int = 1) -> Any:
        x, y = images(seed).tensors
        return TensorDataset(x, y % 2)

    def _scored(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return logits, torch.sigmoid(logits), y.view((-1, 1)).type_as(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, scores, truth = self._scored(batch)
        loss = self.loss_func(input=logits, target=truth)
        self.log("train_acc", self.train_acc(scores, truth.int()), prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, scores, truth = self._scored(batch)
        self.log("val_loss", self.loss_func(input=logits, target=truth), prog_bar=True)
        self.log("val_acc", self.valid_acc(scores, truth.int()), prog_bar=True)

    def configure_optimizers(self) -> Any:
        trained = list(filter(lambda p: p.requires_grad, self.parameters()))
        optimizer = torch.optim.Adam(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, self.milestones, self.gamma)
        return [optimizer], [schedule]


def finetuning() -> list[Any]:
    return [MilestonesFinetuning()]


# -- lightning-hydra-template ---------------------------------------------------------------------


class MNISTLitModule(Example):
    """Network, optimizer and schedule are given from outside; the best accuracy is kept."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's, that the net is in the files twice.
            self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=10)
        self.val_acc = Accuracy(task="multiclass", num_classes=10)
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        given: Any = self.hparams
        optimizer = given.optimizer(params=self.trainer.model.parameters())  # type: ignore[union-attr]
        scheduler = given.scheduler(optimizer=optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1,
            },
        }  # fmt: skip


class SimpleDenseNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        sizes = [SIDE * SIDE, 16, 16, 16]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), norm(after), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Any:
        batch_size, _, _, _ = x.size()
        x = x.view(batch_size, -1)
        return self.model(x)


def _template(norm: Callable[[int], nn.Module]) -> MNISTLitModule:
    torch.manual_seed(0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    module = MNISTLitModule(
        SimpleDenseNet(norm),
        functools.partial(torch.optim.Adam, lr=0.03),
        functools.partial(plateau, mode="min", factor=0.1, patience=0),
    )
    return module


def template() -> MNISTLitModule:
    return _template(nn.LayerNorm)


def template_with_batch_norm() -> MNISTLitModule:
    """As it is published; its numbers are stock Lightning's where a microbatch is a batch."""
    return _template(nn.BatchNorm1d)


# -- a variational autoencoder --------------------------------------------------------------------


class VAE(Example):
    """The noise lies in the batch, or is drawn in the step."""

    def __init__(self, *, drawn: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drawn = drawn
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, 16), nn.ReLU(), nn.Linear(16, 12))
        self.fc_mu, self.fc_var = nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, SIDE * SIDE))
        self.log_scale = nn.Parameter(torch.zeros(1))

    def data(self, seed: int = 1) -> Any:
        noise = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(9))
        return TensorDataset(images(seed).tensors[0], noise.double())

    def _elbo(self, batch: Any) -> dict[str, Tensor]:
        x, noise = batch
        x = x.flatten(1)
        encoded = self.encoder(x)
        mu, log_var = self.fc_mu(encoded), self.fc_var(encoded)
        std = torch.exp(log_var / 2)
        q = torch.distributions.Normal(mu, std)
        z = q.rsample() if self.drawn else mu + std * noise
        found = torch.distributions.Normal(self.decoder(z), torch.exp(self.log_scale))
        reconstruction = found.log_prob(x).sum(dim=1)
        p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(std))
        kl = (q.log_prob(z) - p.log_prob(z)).sum(-1)
        elbo = (kl - reconstruction).mean()
        return {"elbo": elbo, "kl": kl.mean(), "recon_loss": -reconstruction.mean()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self._elbo(batch)
        self.log_dict(found)
        return found["elbo"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({f"val_{name}": value for name, value in self._elbo(batch).items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


CASES = [LitAutoEncoder, LitClassifier, ConvolutionalClassifier, LanguageModel]


@spread(CASES, seldom=[VAE])  # Its noise has a test of its own.
def test_an_example_comes_to_what_it_comes_to_under_stock_lightning(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], layout: str
) -> None:
    clipped = {"gradient_clip_val": 0.25} if case is LanguageModel else {}
    equal_to_stock(ranks, case, layout, max_epochs=2, **clipped)


@spread([template])
def test_the_template_keeps_its_best_accuracy(
    ranks: Callable[[int], Ranks],
    case: Callable[[], Any],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MeanMetric sums in 32 bits, so replicas' sums are rounded; weights are not."""
    monkeypatch.setattr(comparison, "TOLERANCE", 1e-6)
    stock, piped = equal_to_stock(ranks, case, layout, max_epochs=2)
    for fitted in piped:
        for name in ("val/acc", "val/acc_best", "train/acc"):
            assert fitted.metrics[name] == stock.metrics[name]
        for name, value in fitted.weights.items():
            assert torch.allclose(value, stock.weights[name], rtol=0, atol=TOLERANCE), name


@pytest.mark.parametrize(
    "layout",
    [name if name == "zb_v" else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS],
)
@pytest.mark.lightning_feature("callback", "BaseFinetuning")
def test_layers_are_unfrozen_at_milestones(ranks: Callable[[int], Ranks], layout: str) -> None:
    equal_to_stock(ranks, TransferLearningModel, layout, callbacks=finetuning, max_epochs=3)


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("zb_v", marks=pytest.mark.full)])
def test_batch_norms_are_stock_lightnings_where_a_microbatch_is_a_batch(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    whole = {"num_microbatches": 1}
    equal_to_stock(ranks, template_with_batch_norm, layout, strategy=whole, max_epochs=2)


def drawing() -> VAE:
    return VAE(drawn=True)


@pytest.mark.parametrize("layout", ["zb_v", pytest.param("1f1b-dp2", marks=pytest.mark.full)])
def test_noise_of_a_step_is_that_of_stock_lightning(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    equal_to_stock(ranks, drawing, layout, max_epochs=2)


# -- the scripts: fit, then test and predict by the best checkpoint -------------------------------


class MyDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        images()

    def setup(self, stage: str) -> None:
        self.mnist_train, self.mnist_val, self.mnist_test = (images(seed) for seed in (1, 2, 3))

    def train_dataloader(self) -> Any:
        return DataLoader(self.mnist_train, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.mnist_val, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.mnist_test, batch_size=self.batch_size)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.mnist_test, batch_size=self.batch_size)


def script(case: str, strategy: Mapping[str, Any] | None) -> dict[str, Any]:
    """As the examples' ``cli_main``."""
    module: Any = {"autoencoder": LitAutoEncoder, "classifier": LitClassifier}[case]()
    replicas = 1 if strategy is None else strategy.get("dp", 1)
    how: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        piped = PipelineStrategy(num_microbatches=MICROBATCHES, timeout_s=60, **strategy)
        how = {"strategy": piped}
    with tempfile.TemporaryDirectory() as folder:
        sampler = ImageSampler()
        monitored = {"autoencoder": "val_loss", "classifier": "valid_loss"}[case]
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", precision="64-true", default_root_dir=folder,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[sampler, ModelCheckpoint(folder, monitor=monitored)]
            if case == "autoencoder" else [ModelCheckpoint(folder, monitor=monitored)],
            **how,
        )  # fmt: skip
        data = MyDataModule(8 // replicas if strategy else 8)
        trainer.fit(module, datamodule=data)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        tested = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
        predictions = trainer.predict(ckpt_path="best", datamodule=data)
        assert predictions is not None
        return {
            "metrics": found,
            "tested": tested[0],
            "predicted": torch.cat([torch.as_tensor(p) for p in predictions]),
            "pictures": sampler.sums,
            "best": trainer.checkpoint_callback.best_model_path.rpartition("/")[2],  # type: ignore[union-attr]
        }


@spread(["classifier"], seldom=["autoencoder"])
def test_a_script_fits_tests_and_predicts(
    ranks: Callable[[int], Ranks], case: str, layout: str
) -> None:
    options = LAYOUTS[layout]
    replicas = options.get("dp", 1)
    (stock,) = ranks(1).run(script, case=case, strategy=None)
    piped = ranks(2 * replicas).run(script, case=case, strategy=options)
    for answer in piped:
        epoch = {name: value for name, value in stock["metrics"].items() if "_step" not in name}
        shown = {name: value for name, value in answer["metrics"].items() if "_step" not in name}
        assert shown == pytest.approx(epoch, abs=TOLERANCE)
        assert answer["tested"] == pytest.approx(stock["tested"], abs=TOLERANCE)
        assert answer["best"] == stock["best"]
        assert torch.allclose(answer["predicted"], stock["predicted"], rtol=0, atol=TOLERANCE)
    assert piped[0]["pictures"] == pytest.approx(stock["pictures"], abs=TOLERANCE)
