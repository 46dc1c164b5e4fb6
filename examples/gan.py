"""python examples/gan.py: a GAN, whose step runs two backwards and two optimizers by hand.

A step with manual optimization is pipelined like any other.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from strategies import PipelineStrategy

NOISE = 8


def layers(first, last):
    relu = nn.LeakyReLU(0.2)
    return nn.Sequential(nn.Linear(first, 32), relu, nn.Linear(32, 32), relu, nn.Linear(32, last))


class GAN(pl.LightningModule):  # learns to draw points of a circle
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = layers(NOISE, 2), layers(2, 1)

    def training_step(self, batch, batch_idx):
        real, noise = batch
        draws, judges = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(draws)
        fooled = cross_entropy(self.critic(self.generator(noise)), ones)
        draws.zero_grad()
        self.manual_backward(fooled)
        draws.step()
        self.untoggle_optimizer(draws)

        self.toggle_optimizer(judges)
        right = cross_entropy(self.critic(real), ones)
        wrong = cross_entropy(self.critic(self.generator(noise).detach()), zeros)
        judges.zero_grad()
        self.manual_backward((right + wrong) / 2)
        judges.step()
        self.untoggle_optimizer(judges)
        self.log_dict({"fooled": fooled, "seen": (right + wrong) / 2}, prog_bar=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(n.parameters(), lr=2e-3) for n in (self.generator, self.critic)]


torch.manual_seed(0)
angle = 6.2832 * torch.rand(1024)
data = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), torch.randn(1024, NOISE))
strategy = PipelineStrategy(pp=2, num_microbatches=4)
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=2)
trainer.fit(GAN(), DataLoader(data, batch_size=32))
