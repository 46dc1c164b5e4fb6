"""``model=hf``: a causal language model of the transformers library as our own kind of module."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from launcher.config import LaunchConfig
from launcher.config.workload import OptimizerConfig
from launcher.resolve import model_shape
from launcher.workloads.hf.hf_shape import NETWORK, HfShape
from launcher.workloads.hf.parts import HfNetwork, Part, library_plan
from launcher.workloads.hf.skeleton import build_skeleton
from launcher.workloads.hf.weights import FreshWeights, StoredWeights, Weights
from launcher.workloads.language_model import Batch, LanguageModel, Mode
from strategies.models.tensor_parallel.sharded_layers import ColumnLinear, VocabularyShare
from strategies.models.tensor_parallel.sharding import Style


class HfLanguageModel(LanguageModel):
    """Steps, logging and optimizer of ``LanguageModel`` around a network of transformers.

    Batches may have an ``attention_mask`` ``[batch, sequence]`` besides ``tokens`` and ``targets``:
    1 for tokens, 0 for padding. The loss is the mean over all targets; those of -100 count as 0.

    With ``output_router_logits`` in config.json the loss has the library's balance loss in it,
    taken over all tokens of a microbatch, as with accumulated gradients.

    Fresh weights are drawn from ``seed``; those of a folder are what they are.

    Inside ``with torch.device("meta")`` nothing is allocated: whoever cuts the model calls
    ``initialise_unit`` for the units it keeps.

    Raises:
        ModelError: transformers is missing, the model cannot be cut, or its files do not fit.
    """

    def __init__(
        self, shape: HfShape, *, optimizer: OptimizerConfig | None = None, seed: int = 0
    ) -> None:
        # Not the parent's: it builds the built-in network.
        pl.LightningModule.__init__(self)
        self.shape = shape  # type: ignore[assignment]
        self.optimizer_options = optimizer or OptimizerConfig()
        self.seed = seed
        device = torch.get_default_device()
        # Weights are left out anyhow; the constants around them are needed everywhere.
        with torch.device("cpu"):
            skeleton = build_skeleton(shape)
            self.network = HfNetwork(skeleton)
            self._weights: Weights = (
                StoredWeights(skeleton, Path(shape.folder))
                if shape.pretrained
                else FreshWeights(skeleton, seed)
            )
        self._skeleton = skeleton
        self._costs = _costs(shape, self.network)
        if device.type != "meta":
            for name, _ in self.pipeline_units():
                self.initialise_unit(name, device=device)

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(NETWORK + name, unit) for name, unit in self.network.named_units()]

    def pipeline_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The token ids, and the attention mask if the batch has one; it travels along."""
        mask = batch.get("attention_mask")
        return (batch["tokens"],) if mask is None else (batch["tokens"], mask)

    def tensor_parallel_plan(self) -> dict[str, Style] | None:  # type: ignore[override]
        """The library's own plan for the layers, embedding and head by token ids; or it is found.

        Found, it is run as the plan of any module (``unit_sharding.py``).
        """
        return library_plan(self._skeleton, cast(HfShape, self.shape))

    def _routing_loss(self, *along: Tensor, tokens: int) -> Tensor:
        """The library's balance loss, of all tokens of the microbatch; logs it, 1 when balanced."""
        (sums,), balance = along, self._skeleton.balance
        assert balance is not None
        loss = balance.loss(sums)
        self.log("balance_loss", loss.detach() / balance.per_token, batch_size=sums.shape[0])
        return balance.factor * loss

    def _steering(self) -> None:
        """Biases of routers are the library's: buffers that nothing moves."""

    @property
    def _vocabulary(self) -> VocabularyShare | None:
        head = self.network.head
        if isinstance(head, Part):
            for module in head.modules():
                if isinstance(module, ColumnLinear) and module.vocabulary is not None:
                    return module.vocabulary
        return None

    def unit_costs(self) -> list[float]:
        """Relative forward cost of each unit: FLOPs, or parameters for an unknown family."""
        return list(self._costs)

    def initialise_unit(self, name: str, *, device: torch.device | str = "cpu") -> None:
        """Gives one of ``pipeline_units`` its weights, from the folder or fresh."""
        unit = self.get_submodule(name)
        assert isinstance(unit, Part)
        self._weights.fill(unit, device=device)
        self.network.tie()  # creating real weights for one unit takes the tie apart

    def check_weights(self) -> None:
        """Looks for what only their values say, without giving any unit its weights.

        Raises:
            ModelError: Tied ones that are stored differ, or the library cannot draw some.
        """
        self._weights.check()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens)
        return logits

    def _step(self, batch: Batch, batch_idx: int, mode: Mode) -> Tensor:
        tensors = self.network.run(*self.pipeline_inputs(batch))
        return self.pipeline_result(tensors, batch, batch_idx, mode)


def build(config: LaunchConfig) -> HfLanguageModel:
    """What the registry knows as ``hf``: the model of a resolved configuration, on meta."""
    shape = model_shape(config)
    assert isinstance(shape, HfShape)
    with torch.device("meta"):
        return HfLanguageModel(shape, optimizer=config.optimizer, seed=config.seed)


def _costs(shape: HfShape, network: HfNetwork) -> tuple[float, ...]:
    if shape.sizes is not None:
        specs = shape.unit_specs()
        return tuple(float(max(unit.forward_flops, unit.output_elements)) for unit in specs)
    sizes = [sum(p.numel() for p in unit.parameters()) for _, unit in network.named_units()]
    # An embedding's table is looked up, not multiplied: it costs what it hands on.
    return (float(shape.hidden), *(float(size) for size in sizes[1:]))
