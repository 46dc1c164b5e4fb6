"""A user's own folder: a small ResNet, its data and a callback, in plain torch and Lightning."""

from __future__ import annotations

from pathlib import Path

NETS = '''
import lightning.pytorch as pl
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class ResNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class LitResNet(pl.LightningModule):
    def __init__(self, width: int = 8, depth: int = 2, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = ResNet(width, depth)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Plain(LitResNet):
    """Leaves the optimizer to the launcher."""

    configure_optimizers = pl.LightningModule.configure_optimizers
'''

IMAGES = '''
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Images(pl.LightningDataModule):
    """Random pictures of four kinds, told apart by how bright they are."""

    def __init__(self, batch_size: int, seed: int, count: int = 64):
        super().__init__()
        self.batch_size, self.seed, self.count = batch_size, seed, count

    def setup(self, stage):
        made = torch.Generator().manual_seed(self.seed)
        y = torch.randint(4, (self.count,), generator=made)
        x = torch.randn(self.count, 3, 6, 6, generator=made) + y[:, None, None, None]
        rows, part = TensorDataset(x, y), self.count // 4
        self.train, self.val = torch.utils.data.random_split(
            rows, [self.count - part, part], generator=made
        )

    def train_dataloader(self):
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train, self.batch_size, shuffle=True, generator=order)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def predict_dataloader(self):
        return self.val_dataloader()
'''

COUNTER = '''
from pathlib import Path

from lightning.pytorch.callbacks import Callback


class Counter(Callback):
    """Counts batches, over all the runs of one training."""

    def __init__(self, file: str, user: dict):
        self.file, self.note, self.batches = Path(file), user.get("note"), 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.file.write_text(f"{self.note} {self.batches}")

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]
'''

OWN = (
    "model=class", "model.path=nets:LitResNet", "data=class", "data.path=my_data.images:Images",
    "data.global_batch_size=16", "data.microbatch_size=4", "pp=2",
)  # fmt: skip


def write_project(folder: Path) -> Path:
    """``nets.py``, ``counter.py`` and a package ``my_data`` in a folder."""
    (folder / "my_data").mkdir(parents=True)
    (folder / "nets.py").write_text(NETS)
    (folder / "counter.py").write_text(COUNTER)
    (folder / "my_data" / "__init__.py").write_text("")
    (folder / "my_data" / "images.py").write_text(IMAGES)
    return folder
