"""python examples/experts.py: experts in a model of one's own; layers' losses travel to the end.

A step adds them up as in one process, whichever rank a layer is on.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import PipelineStrategy
from strategies.models.experts import Experts, Mixture, Router


def dialects(rows=512, words=12, kinds=4):  # each line's first word says what the others mean
    draw = torch.Generator().manual_seed(0)
    books = torch.rand(kinds, 32, generator=draw).argsort()
    kind = torch.randint(kinds, (rows, 1), generator=draw)
    words = torch.randint(kinds, 32, (rows, words), generator=draw)
    return TensorDataset(torch.cat((kind, words), 1), books[kind, words])


class Layer(nn.Module):
    def __init__(self, width, experts=8):
        super().__init__()
        self.norm, sizes = nn.RMSNorm(width), {"experts": experts, "hidden": width}
        self.mixture = Mixture(Router(per_token=2, **sizes), Experts(inner=width, **sizes))
        for parameter in self.mixture.parameters():
            nn.init.normal_(parameter, std=width**-0.5)

    def forward(self, x):
        mixed, routing = self.mixture(self.norm(x))
        return x + mixed, routing.losses[:, 0].mean()  # 1 when all experts get equally much


class Translator(pl.LightningModule):
    def __init__(self, width=32, layers=4):
        super().__init__()
        self.words, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def training_step(self, batch, batch_idx):
        x, balance = self.words(batch[0]), 0.0
        x = x[:, 1:] + x[:, :1]
        for layer in self.layers:
            x, own = layer(x)
            balance = balance + own / len(self.layers)
        loss = nn.functional.cross_entropy(self.head(x).mT, batch[1])
        self.log_dict({"loss": loss, "balance": balance}, prog_bar=True)
        return loss + 0.02 * balance

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    strategy = PipelineStrategy(pp=2, schedule="zb_h1", num_microbatches=4)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=2)
    trainer.fit(Translator(), DataLoader(dialects(), batch_size=32))
