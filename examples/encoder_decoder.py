"""python examples/encoder_decoder.py: an encoder-decoder that learns to write a sequence backwards.

The encoder's output is used by every layer of the decoder: it travels along with the microbatch.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from strategies import PipelineStrategy

WORDS, LENGTH, WIDTH = 12, 8, 48
START = WORDS  # the decoder's first token


class Reverser(pl.LightningModule):
    def __init__(self, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        sizes = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 96, "batch_first": True}
        quiet = {"dropout": 0.0, "norm_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, **quiet) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(**sizes, **quiet) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source, target):
        memory = self.words(source) + self.place
        for layer in self.encoder:
            memory = layer(memory)
        x = self.words(target) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        (source,) = batch
        wanted = source.flip(1)
        given = torch.cat([torch.full_like(wanted[:, :1], START), wanted[:, :-1]], 1)
        loss = cross_entropy(self(source, given).flatten(0, 1), wanted.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


torch.manual_seed(0)
data = TensorDataset(torch.randint(WORDS, (1024, LENGTH)))
strategy = PipelineStrategy(pp=2, schedule="interleaved_1f1b", num_microbatches=4)
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=3)
trainer.fit(Reverser(), DataLoader(data, batch_size=32, shuffle=True))
