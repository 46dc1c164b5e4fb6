"""``optimizer=muon``: matrices by Muon, all else by AdamW, as one optimizer.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) makes the update of a matrix
nearly orthogonal, by five Newton-Schulz steps on its averaged gradient. It is meant for what lies
inside a network: embeddings, the head, norms and biases stay with AdamW. Both are torch's own; what
is here is which weight goes to which, and one object for them, because a LightningModule that is
optimized automatically has one optimizer, and a checkpoint one state.

``adjust_lr=match_rms_adamw`` scales an update by 0.2 * sqrt(max(rows, columns)), so that its root
mean square is that of AdamW's and one learning rate serves both (Liu et al., 2025,
https://arxiv.org/abs/2502.16982).

An update looks at all elements of its matrix: no part of one will do. That is why ranks that share
matrices (tensor parallelism) or their update (sharded weights) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from launcher.config.workload import OptimizerConfig
from strategies.models.unit_model import HasUnits

# What the last layer of a network is called where it declares nothing.
_HEADS = frozenset(("head", "lm_head", "classifier", "score", "embed_out", "unembed", "fc_out"))


class Muon(Optimizer):
    """Groups of matrices that torch's Muon updates, and groups that AdamW does.

    Args:
        matrices: Groups of two-dimensional parameters, with Muon's options.
        others: Groups of any parameters, with AdamW's.
    """

    repeatable = True  # from the same weights, gradients and state the same update

    def __init__(self, matrices: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
        self._muon = torch.optim.Muon(matrices)
        self._adamw = torch.optim.AdamW(others)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Both update; ``closure`` computes loss and gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Their groups and state are ours: loading a checkpoint replaces them, and so does whoever
        # lets an optimizer update something else than the model's own parameters.
        for inner, key in ((self._muon, "ns_steps"), (self._adamw, "betas")):
            inner.param_groups = [group for group in self.param_groups if key in group]
            inner.state = self.state
            inner.step()  # type: ignore[no-untyped-call]
        return loss


def build_muon(
    parameters: Iterable[nn.Parameter],
    options: OptimizerConfig,
    *,
    apart: Callable[[nn.Parameter], bool],
) -> Muon:
    """Three groups: matrices; embeddings, the head and tensors of other sizes; vectors.

    All of them exist, maybe empty, so that ranks of all stages have the same groups. ``apart`` says
    which matrices are not for Muon.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and not apart(p)]
    inside = {id(parameter) for parameter in matrices}
    rest = [p for p in trained if id(p) not in inside]
    muon = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "momentum": 0.95 if options.momentum is None else options.momentum,
        "nesterov": options.nesterov,
        "ns_steps": options.ns_steps,
        "adjust_lr_fn": options.adjust_lr,
    }
    adamw = {
        "lr": options.adamw_lr or options.lr,
        "betas": options.betas or (0.9, 0.95),
        "eps": options.eps or 1e-8,
    }
    wide = [parameter for parameter in rest if parameter.dim() >= 2]
    narrow = [parameter for parameter in rest if parameter.dim() < 2]
    return Muon(
        [{"params": matrices, **muon}],
        [
            {"params": wide, **adamw, "weight_decay": options.weight_decay},
            {"params": narrow, **adamw, "weight_decay": 0.0},
        ],
    )


def embeddings_and_head(module: nn.Module) -> Callable[[Tensor], bool]:
    """Whether a parameter of a module is a table of embeddings, or of its last layer.

    Tables are the weights of ``nn.Embedding``, and parameters with ``embed`` or ``position`` in
    their own name. The last layer is the last of ``pipeline_units`` where the module declares them,
    what ``get_output_embeddings()`` of a part of it returns (models
    of transformers), and what is called ``head``, ``lm_head`` or ``classifier``. A weight that is
    tied to one of them is one of them.
    """
    found = {id(parameter) for layer in _outer(module) for parameter in layer.parameters()}
    for name, parameter in module.named_parameters():
        own = name.split(".")[-1]
        if "embed" in own or "position" in own:
            found.add(id(parameter))

    def apart(parameter: Tensor) -> bool:
        return id(parameter) in found

    return apart


def _outer(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, HasUnits):
        *_, (_, last) = module.pipeline_units()
        yield last
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) or name.split(".")[-1] in _HEADS:
            yield layer
        outputs = getattr(layer, "get_output_embeddings", None)
        found = outputs() if callable(outputs) else None
        if isinstance(found, nn.Module):
            yield found
