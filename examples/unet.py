"""python examples/unet.py: a U-Net that removes noise.

Its long skips go straight from the stage that makes them to the one that uses them.
"""

from itertools import pairwise

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import interpolate, max_pool2d, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from strategies import PipelineStrategy

SIDE, WIDTHS = 32, (1, 8, 16, 32)


class UNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        pairs = list(pairwise(WIDTHS))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.middle = nn.Conv2d(WIDTHS[-1], WIDTHS[-1], 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(pairs))

    def forward(self, x):
        skips = []
        for conv in self.down:
            skips.append(conv(x).relu())
            x = max_pool2d(skips[-1], 2)
        x = self.middle(x).relu()
        for conv in self.up:
            joined = torch.cat([interpolate(x, scale_factor=2), skips.pop()], 1)
            x = conv(joined).relu() if skips else conv(joined)
        return x

    def training_step(self, batch, batch_idx):
        noisy, clean = batch
        loss = mse_loss(self(noisy), clean)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


torch.manual_seed(0)
clean = torch.zeros(256, 1, SIDE, SIDE)
for picture in clean:
    x, y = torch.randint(SIDE // 2, (2,)).tolist()
    picture[:, y : y + SIDE // 2, x : x + SIDE // 2] = 1.0  # a square somewhere
data = TensorDataset(clean + 0.5 * torch.randn_like(clean), clean)

strategy = PipelineStrategy(pp=2, schedule="1f1b", num_microbatches=4)
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=4)
trainer.fit(UNet(), DataLoader(data, batch_size=32, shuffle=True))
