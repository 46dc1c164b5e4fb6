"""python examples/resnet.py: a ResNet; its data, metric and callbacks know nothing of ranks."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from strategies import PipelineStrategy


class Stripes(pl.LightningDataModule):
    def setup(self, stage):  # noisy pictures of stripes in one of four directions
        y, x = torch.meshgrid(torch.linspace(0, 9, 16), torch.linspace(0, 9, 16), indexing="ij")
        noise, waves = torch.Generator().manual_seed(0), torch.stack([x, y, x + y, x - y]).sin()
        label = torch.randint(4, (512,), generator=noise)
        picture = waves[label, None] + torch.randn(512, 1, 16, 16, generator=noise)
        self.parts = random_split(TensorDataset(picture, label), (384, 128), noise)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=32)


class Block(nn.Sequential):
    def forward(self, x):
        return (x + super().forward(x)).relu()


class ResNet(pl.LightningModule):
    def __init__(self, width=16, blocks=4):
        super().__init__()
        self.accuracy, self.net = MulticlassAccuracy(4), nn.Sequential(nn.Conv2d(1, width, 3, 2))
        for _ in range(blocks):
            conv = nn.Conv2d(width, width, 3, padding=1)
            # BatchNorm would see a microbatch at a time.
            self.net.append(Block(conv, nn.GroupNorm(4, width), nn.ReLU()))
        self.net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", self.accuracy(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    calls = [EarlyStopping("accuracy", mode="max"), ModelCheckpoint()]
    strategy = PipelineStrategy(pp=2, schedule="zb_h1", num_microbatches=4)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=4, callbacks=calls)
    trainer.fit(ResNet(), datamodule=Stripes())
