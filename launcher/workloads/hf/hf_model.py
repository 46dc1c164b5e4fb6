"""``model=hf``: a causal language model of the transformers library as our own kind of module.

Its layers' experts go to ranks that share them (ep > 1). Nearly all of the library's mixtures end
in one kind of module: matrices of all experts one above the other, ``[experts, ...]`` each, and a
forward that is given tokens, the experts of each, and their weights. That module keeps its names
and its arithmetic. Only what it is given changes: tokens go to the ranks that have their experts,
the library's forward computes them there with weights of 1, and what comes back is weighted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

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
from strategies.errors import ModelError
from strategies.models.expert_parallel import ExpertRanks
from strategies.models.tensor_parallel.layer_plan import Style
from strategies.models.tensor_parallel.regions import as_written
from strategies.models.tensor_parallel.sharded_layers import ColumnLinear
from strategies.models.tensor_parallel.vocabulary import VocabularyShare


class HfLanguageModel(LanguageModel):
    """Steps, logging and optimizer of ``LanguageModel`` around a network of transformers.

    Batches may have an ``attention_mask`` ``[batch, sequence]`` besides ``tokens`` and ``targets``:
    1 for tokens, 0 for padding.

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
        """The library's plan for the layers, embedding and head by token ids; None: it is found."""
        return library_plan(self._skeleton, cast(HfShape, self.shape))

    def declare_experts(self) -> None:
        """Makes the library's mixtures ones that ranks can share.

        Raises:
            ModelError: There are none, or they are of a kind of their own.
        """
        declare_experts(self.network, type(self._skeleton.model).__name__)

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


# What the library's decorator of such modules (``use_experts_implementation``) leaves on them.
_MARKS = ("has_gate", "is_transposed", "num_experts")


def declare_experts(module: nn.Module, kind: str) -> None:
    """Makes all mixtures inside ``module`` ones that ranks can share (``HasExperts``).

    ``kind`` is the architecture's name, for messages.

    Raises:
        ModelError: It has none, or they are of another kind.
    """
    found = list(_banks(module))
    if not found:
        raise ModelError(
            f"ep spreads experts over ranks, and {kind} has no layer whose experts the "
            "transformers library keeps one above the other (its use_experts_implementation). "
            "Try ep=1."
        )
    for bank in found:
        own: Any = type(bank)
        bank.__class__ = _shared(own)
        shared = cast(_SharedExperts, bank)
        shared.expert_parameters = tuple(name for name, _ in _stacked(bank))
        shared.exchange = None


def _banks(module: nn.Module) -> Iterator[nn.Module]:
    for found in module.modules():
        if isinstance(found, _SharedExperts) or not all(hasattr(found, mark) for mark in _MARKS):
            continue
        sizes = [parameter.shape[0] for _, parameter in _stacked(found) if parameter.dim()]
        if sizes and set(sizes) == {found.num_experts}:
            yield found


def _stacked(bank: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Its own parameters; those of modules inside (a norm) are not per expert."""
    return list(bank.named_parameters(recurse=False))


class _SharedExperts(nn.Module):
    """Goes before the library's class: its forward around that one's."""

    num_experts: int
    expert_parameters: tuple[str, ...]
    exchange: ExpertRanks | None

    # A compiler would make code for every number of rows that it meets.
    @as_written
    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Tokens ``[tokens, hidden]``, their experts and weights ``[tokens, k]``; to sums.

        An expert beyond the last one is none: the library's word for a token that passes by.
        """
        if self.exchange is None:
            result: Tensor = super().forward(hidden_states, ids, weights)
            return result
        tokens, chosen = hidden_states.reshape(-1, hidden_states.shape[-1]), ids.flatten()
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen.clamp(max=self.num_experts), torch.ones_like(chosen))
        # Ties stay in the order of the tokens, so the same routing gives the same sums everywhere.
        order = chosen.argsort(stable=True)
        # Repeated first: the gradient of a plain lookup would add up rows in any order on a GPU.
        repeated = tokens[:, None].expand(-1, ids.shape[-1], -1).reshape(len(chosen), -1)
        sent = repeated.index_select(0, order)
        results = self.exchange.around(self._computed, sent, counts[:-1])
        # Those behind the last expert's have not been sent.
        own = order[: len(results)]
        picked = results.new_zeros(len(chosen), results.shape[-1]).index_copy(0, own, results)
        weighted = picked.view(*weights.shape, -1) * weights[..., None]
        return weighted.sum(dim=1).to(hidden_states.dtype).view_as(hidden_states)

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows ``[n, hidden]`` sorted by this rank's experts, of which each has ``counts``."""
        own = len(counts)
        ids = torch.repeat_interleave(
            torch.arange(own, device=counts.device), counts, output_size=len(rows)
        )[:, None]
        if not len(rows):
            # The library would not touch the matrices; all of them take part in the backward.
            for name in self.expert_parameters:
                rows = rows + getattr(self, name).flatten()[:0].sum().to(rows.dtype)
            return rows
        whole, self.num_experts = self.num_experts, own
        try:
            result: Tensor = super().forward(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
        finally:
            self.num_experts = whole
        return result


@cache
def _shared(kind: Any) -> Any:
    # The same name: some of the library's rules go by it.
    return type(kind.__name__, (_SharedExperts, kind), {"__module__": kind.__module__})
