"""Models of diffusers: objects between layers, configurations that cannot be changed.

diffusers itself is tried where it is installed; stand-ins of its classes always are.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from tests.distributed.foreign.test_examples import ROWS, SIDE, Example, block, images
from tests.ranks.comparison import equal_to_stock, spread
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class FrozenDict(OrderedDict[str, Any]):
    """As diffusers' ``config``: keys are attributes, and nothing can be set again."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for key, value in values.items():
            setattr(self, key, value)
        self.__frozen = True

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the configuration is frozen")

    __delitem__ = setdefault = pop = update = _refuse  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen") and self.__frozen:
            self._refuse()
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "_FrozenDict__frozen") and self.__frozen:
            self._refuse()
        super().__setitem__(name, value)


class BaseOutput(OrderedDict[str, Any]):
    """As diffusers' outputs: a dataclass that is a dict, and a tuple where it is indexed."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclass
class SampleOutput(BaseOutput):
    sample: Tensor


@dataclass
class EncoderOutput(BaseOutput):
    latent_dist: Any


class Gaussian:
    """As diffusers' ``DiagonalGaussianDistribution``."""

    def __init__(self, parameters: Tensor) -> None:
        self.parameters = parameters
        self.mean, self.logvar = torch.chunk(parameters, 2, dim=1)
        self.logvar = torch.clamp(self.logvar, -30.0, 20.0)
        self.var = torch.exp(self.logvar)

    def mode(self) -> Tensor:
        return self.mean

    def kl(self) -> Tensor:
        return 0.5 * torch.sum(self.mean**2 + self.var - 1.0 - self.logvar, dim=[1, 2, 3])


class Autoencoder(nn.Module):
    """As ``AutoencoderKL``: configuration, outputs and a distribution between two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.config = FrozenDict(latent_channels=2, scaling_factor=0.5, blocks=("a", "b"))
        self.encoder = nn.Sequential(block(1, 4), block(4, 4))
        self.quant_conv = nn.Conv2d(4, 2 * self.config["latent_channels"], 1)
        self.decoder = nn.Sequential(block(2, 4), block(4, 4), nn.Conv2d(4, 1, 1))

    def encode(self, x: Tensor) -> EncoderOutput:
        return EncoderOutput(latent_dist=Gaussian(self.quant_conv(self.encoder(x))))

    def decode(self, z: Tensor) -> SampleOutput:
        return SampleOutput(sample=self.decoder(z * self.config.scaling_factor))  # type: ignore[attr-defined]


class Diffusing(Example):
    """A model of diffusers, or of its kind, that learns to take noise away."""

    def __init__(self, net: nn.Module, **arguments: str) -> None:
        super().__init__()
        self.net = net
        self.arguments = arguments

    def data(self, seed: int = 1) -> Any:
        x, _ = images(seed).tensors
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).double()
        return TensorDataset(x, noise, 7 * torch.arange(ROWS), x.flatten(1)[:, :32].view(-1, 4, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, noise, steps, text = batch
        given = {"steps": steps, "text": text, "labels": steps % 4}
        more = {name: given[what] for name, what in self.arguments.items()}
        out = self.net(x + noise, **more).sample
        loss = F.mse_loss(out[:, :1], noise)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _, steps, text = batch
        given = {"steps": steps, "text": text, "labels": steps % 4}
        more = {name: given[what] for name, what in self.arguments.items()}
        self.log("val", self.net(x, **more)[0].abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Compressing(Diffusing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net.encode(batch[0]).latent_dist
        out = self.net.decode(found.mode()).sample
        loss = F.mse_loss(out, batch[0]) + 1e-3 * found.kl().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net.decode(self.net.encode(batch[0]).latent_dist.mode()).sample
        self.log("val", F.mse_loss(out, batch[0]))


def stand_in() -> Diffusing:
    torch.manual_seed(0)
    return Compressing(Autoencoder())


SMALL = {"sample_size": SIDE, "in_channels": 1, "out_channels": 1, "norm_num_groups": 4}
BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 16), "attention_head_dim": 4}


def unet() -> Diffusing:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    net = UNet2DModel(down_block_types=down, up_block_types=up, **SMALL, **BLOCKS)
    return Diffusing(net, timestep="steps")


def unet_with_text() -> Diffusing:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    blocks = {"down_block_types": down, "up_block_types": up, "cross_attention_dim": 8}
    net = UNet2DConditionModel(**blocks, **SMALL, **BLOCKS)
    return Diffusing(net, timestep="steps", encoder_hidden_states="text")


def autoencoder_kl() -> Diffusing:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    blocks = {"down_block_types": down, "up_block_types": up, "block_out_channels": (8, 8)}
    return Compressing(AutoencoderKL(latent_channels=2, **blocks, **SMALL))


def diffusion_transformer() -> Diffusing:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    net = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=1, out_channels=2, num_layers=3,
        sample_size=SIDE, patch_size=2, num_embeds_ada_norm=4, dropout=0.0,
    )  # fmt: skip
    for layer in net.modules():
        if hasattr(layer, "dropout_prob"):  # of the labels, for guidance: random numbers
            layer.dropout_prob = 0.0
    return Diffusing(net, timestep="steps", class_labels="labels")


REAL = [unet, unet_with_text, autoencoder_kl, diffusion_transformer]


@spread([stand_in])
def test_outputs_and_configurations_as_in_diffusers(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], layout: str
) -> None:
    equal_to_stock(ranks, case, layout)


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not here")
@spread(REAL)
def test_models_of_diffusers(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], layout: str
) -> None:
    equal_to_stock(ranks, case, layout)
