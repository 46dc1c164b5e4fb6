"""The built-in language model: an ordinary LightningModule that also declares its units.

``training_step`` and its siblings work under any Lightning strategy. A pipeline does not call them:
it runs ``pipeline_units`` stage by stage between ``pipeline_inputs`` and ``pipeline_result``. The
steps are written with these same three methods, so both ways compute the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from launcher.config.workload import OptimizerConfig
from launcher.workloads.optimizer import Steering, configured
from launcher.workloads.transformer import Head, SeededUnit, Transformer, initialise
from launcher.workloads.transformer_shape import UNIT_PREFIX, TransformerShape, unit_costs
from strategies.errors import DataError, PlanError
from strategies.models.experts import Mixture
from strategies.models.tensor_parallel import Column, Row, Split, Stream, Vocabulary
from strategies.models.tensor_parallel.layer_plan import Style
from strategies.models.tensor_parallel.sharded_layers import ColumnLinear
from strategies.models.tensor_parallel.vocabulary import (
    VocabularyShare,
    most_probable,
    token_losses,
)

_NO_TARGET = -100  # where the text goes on, and the loss takes nothing
_LOGGED_EXPERTS = 256  # of all layers: more columns than these nobody reads

Mode = Literal["train", "validate", "test", "predict"]
Batch = Mapping[str, Tensor]


class LanguageModel(pl.LightningModule):
    """A decoder-only transformer that learns to predict the next token.

    Batches are dicts of int64 tensors ``[batch, sequence]``: ``tokens``, and ``targets`` (the same
    text one token later, -100 where none counts), which only prediction can do without. The loss is
    the mean over the targets that count.

    The initial weights, drawn from ``seed``, are the same whatever the layout, and building the
    model leaves the global generators alone.

    Inside ``with torch.device("meta")`` nothing is allocated: whoever cuts the model calls
    ``initialise_unit`` for the units it keeps.
    """

    def __init__(
        self, shape: TransformerShape, *, optimizer: OptimizerConfig | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.shape = shape
        self.optimizer_options = optimizer or OptimizerConfig()
        self.seed = seed
        # The factories of torch.nn would fill every weight once for nothing.
        with torch.device("meta"):
            self.net = Transformer(shape)
        device = torch.get_default_device()
        if device.type != "meta":
            for name, _ in self.pipeline_units():
                self.initialise_unit(name, device=device)

    # What a pipeline calls.

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        """The units in execution order with their global names; ``unit(*inputs)`` is a Tensor."""
        return [(UNIT_PREFIX + name, unit) for name, unit in self.net.named_units()]

    def pipeline_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the first unit is called with: the token ids ``[batch, sequence]``."""
        return (batch["tokens"],)

    def pipeline_result(
        self, tensors: tuple[Tensor, ...], batch: Batch, batch_idx: int, mode: Mode
    ) -> Tensor:
        """What a step returns, from the last unit's output; logs the loss.

        The logits ``[batch, sequence, vocab]`` are alone in a tuple, and this rank's share of them
        under tensor parallelism. Returned is the mean loss per target in nats; for ``predict`` the
        log-probability of each target ``[batch, sequence]``, or, for a batch without targets, the
        most probable next token after each position ``[batch, sequence]``.
        """
        logits, *along = tensors
        if mode == "predict":
            if batch.get("targets") is None:
                return most_probable(logits, self._vocabulary)
            return -token_losses(logits, batch["targets"], self._vocabulary)
        targets = batch["targets"]
        losses = token_losses(logits, targets, self._vocabulary)
        loss: Tensor = losses.sum() / self.loss_weight(batch).clamp(min=1)
        size = targets.shape[0]
        if mode == "train":
            self.log("train_loss", loss.detach(), prog_bar=True, batch_size=size)
            if along:
                loss = loss + self._routing_loss(*along, tokens=targets.numel())
        else:
            name = "val_loss" if mode == "validate" else "test_loss"
            self.log(name, loss.detach(), prog_bar=True, sync_dist=True, batch_size=size)
        return loss

    def loss_weight(self, batch: Batch) -> Tensor:
        """Over how many targets the loss of a batch is a mean: those that are not -100."""
        return (batch["targets"] != _NO_TARGET).sum()

    def _routing_loss(self, *along: Tensor, tokens: int) -> Tensor:
        """What the layers' losses ``[batch, 2]`` add to the loss; logs them and the load.

        Logged are means over the layers: ``balance_loss`` (1 when balanced) and ``z_loss``, and of
        the worst layer ``expert_imbalance``, the fullest expert's load over the mean; how many
        choices of tokens no expert has computed, ``dropped_tokens``, which is 0; and of models with
        up to 256 experts the load over the mean of each, ``expert_load/LAYER/EXPERT``.
        """
        losses, load = along
        moe, layers, size = self.shape.moe, len(self.shape.moe_layers), losses.shape[0]
        assert moe is not None
        balance, spread = losses.mean(dim=0)
        total = load.sum(dim=0)
        shares = total / total.mean(dim=-1, keepdim=True)
        for name, value in (
            ("balance_loss", balance.detach() / layers),
            ("z_loss", spread.detach() / layers),
            ("expert_imbalance", shares.amax()),
        ):
            self.log(name, value, batch_size=size)
        routed = layers * moe.per_token * tokens
        self.log("dropped_tokens", routed - total.sum(), reduce_fx="sum", batch_size=size)
        if shares.numel() <= _LOGGED_EXPERTS:
            for layer, row in zip(self.shape.moe_layers, shares, strict=True):
                for expert, share in enumerate(row):
                    self.log(f"expert_load/{layer}/{expert}", share, batch_size=size)
        added: Tensor = moe.balance_loss * balance + moe.z_loss * spread
        return added

    def tensor_parallel_plan(self) -> dict[str, Style]:
        """How layers are cut over tensor-parallel ranks: by heads, inner width, and token ids."""
        head = self.shape.head_size
        attention = UNIT_PREFIX + "layers.*.attention"
        mlp = UNIT_PREFIX + "layers.*.mlp"
        plan: dict[str, Style] = {
            f"{UNIT_PREFIX}embedding.tokens": Vocabulary(),
            f"{UNIT_PREFIX}embedding": Split(),
            **{f"{attention}.{name}": Column(block=head) for name in ("query", "key", "value")},
            f"{attention}.output": Row(block=head),
            f"{UNIT_PREFIX}layers.*.*.norm": Stream(),
            f"{UNIT_PREFIX}layers.*.*.dropout": Stream(),
            f"{UNIT_PREFIX}head.norm": Stream(),
            f"{UNIT_PREFIX}head.projection": Vocabulary(),
        }
        moe = self.shape.moe
        branches = [f"{mlp}.shared"] if moe is not None and moe.shared else []
        if len(self.shape.moe_layers) < self.shape.layers:
            branches.append(mlp)
        for branch in branches:
            plan |= {f"{branch}.up": Column(), f"{branch}.down": Row()}
            if self.shape.activation == "swiglu":
                plan[f"{branch}.gate"] = Column()
        return plan

    @property
    def _vocabulary(self) -> VocabularyShare | None:
        """Which token ids this rank's logits are for; None if for all."""
        head = self.net.head
        projection = head.projection if isinstance(head, Head) else None
        return projection.vocabulary if isinstance(projection, ColumnLinear) else None

    def unit_costs(self) -> list[float]:
        """Relative forward cost of each unit, > 0, in the order of ``pipeline_units``."""
        return list(unit_costs(self.shape))

    def initialise_unit(self, name: str, *, device: torch.device | str = "cpu") -> None:
        """Gives one of ``pipeline_units`` its initial weights; on ``device`` if it is on meta."""
        unit = self.get_submodule(name)
        assert isinstance(unit, SeededUnit)
        initialise(name, unit, self.seed, device=device)
        self.net.tie()  # creating real weights for one unit takes the tie apart

    # What Lightning calls.

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``."""
        logits: Tensor = self.net(tokens)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._step(batch, batch_idx, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._step(batch, batch_idx, "validate")

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._step(batch, batch_idx, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log-probabilities of the targets, or the most probable tokens."""
        return self._step(batch, batch_idx, "predict")

    def on_validation_epoch_end(self) -> None:
        """Logs ``val_perplexity``, the exponential of the mean loss.

        The mean of each batch's exponential would be larger, and depend on the batch size.
        """
        loss = self.trainer.callback_metrics.get("val_loss")
        if loss is not None:
            self.log("val_perplexity", loss.exp(), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return configured(self, self.optimizer_options, steering=self._steering())

    def _steering(self) -> Steering | None:
        """The biases of the routers that are here, where the shape asks for them."""
        moe = self.shape.moe
        if moe is None or not moe.steering:
            return None
        routers = [unit.router for unit in self.modules() if isinstance(unit, Mixture)]
        return Steering([r.bias for r in routers if r.bias is not None], moe.steering)

    def generate(
        self,
        prompt_tokens: Tensor | Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Continues a prompt; see ``sample_tokens``."""
        training = self.training
        self.eval()  # no dropout
        try:
            prompt = torch.as_tensor(prompt_tokens, dtype=torch.int64, device=self.device)
            return sample_tokens(
                self,
                prompt,
                max_new_tokens=max_new_tokens,
                context=self.shape.sequence,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
            )
        finally:
            self.train(training)

    def _step(self, batch: Batch, batch_idx: int, mode: Mode) -> Tensor:
        tensors = self.pipeline_inputs(batch)
        for _, unit in self.pipeline_units():
            made = unit(*tensors)
            tensors = made if isinstance(made, tuple) else (made,)
        return self.pipeline_result(tensors, batch, batch_idx, mode)


@torch.no_grad()
def sample_tokens(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Tensor,
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The prompt and its continuation.

    Args:
        logits_of: Maps token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocab]``.
        prompt: Token ids ``[sequence]`` or ``[batch, sequence]``, at least one.
        max_new_tokens: How many to append.
        context: How many of the last tokens the network is shown at most.
        temperature: 0 takes the most probable token; else logits are divided by it.
        top_k: Draw among the k most probable tokens only.
        seed: Of the draws; the same seed gives the same text, on one kind of device.

    Raises:
        DataError: An empty prompt.
        PlanError: A negative count or temperature, or ``top_k`` below 1.
    """
    if prompt.numel() == 0:
        raise DataError(
            "generate.prompt is empty, there is nothing to continue. Try generate.prompt='def '."
        )
    for key, value, low in (
        ("max_new_tokens", max_new_tokens, 0),
        ("temperature", temperature, 0),
        ("top_k", top_k if top_k is not None else 1, 1),
    ):
        if value < low:
            raise PlanError(f"generate.{key}={value} is below {low}. Try generate.{key}={low}.")
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    tokens = prompt if prompt.dim() == 2 else prompt[None]
    for _ in range(max_new_tokens):
        logits = logits_of(tokens[:, -context:])[:, -1]
        following = _choose(logits, temperature=temperature, top_k=top_k, generator=generator)
        tokens = torch.cat((tokens, following), dim=-1)
    return tokens if prompt.dim() == 2 else tokens[0]


def _choose(
    logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """One id per row of ``logits`` ``[batch, vocab]``, as ``[batch, 1]``."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        values, ids = logits.topk(top_k, dim=-1)
    else:
        values, ids = logits, None
    # Shifted first: a very small temperature would otherwise overflow.
    shifted = (values - values.amax(dim=-1, keepdim=True)).double() / temperature
    drawn = torch.multinomial(shifted.softmax(dim=-1), 1, generator=generator)
    return drawn if ids is None else ids.gather(-1, drawn)
