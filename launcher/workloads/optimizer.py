"""Builds the optimizer and its learning-rate schedule for whatever parameters a rank holds.

``optimizer=muon``: matrices by Muon, all else by AdamW, as one optimizer. Muon (Jordan et al.,
2024, https://kellerjordan.github.io/posts/muon/) makes the update of a matrix nearly orthogonal, by
five Newton-Schulz steps on its averaged gradient. It is meant for what lies inside a network:
embeddings, the head, norms and biases stay with AdamW. Both are torch's own; what is here is which
weight goes to which, and one object for them, because a LightningModule that is optimized
automatically has one optimizer, and a checkpoint one state.

``adjust_lr=match_rms_adamw`` scales an update by 0.2 * sqrt(max(rows, columns)), so that its root
mean square is that of AdamW's and one learning rate serves both (Liu et al., 2025,
https://arxiv.org/abs/2502.16982).

An update of Muon looks at all elements of its matrix: no part of one will do. That is why ranks
that share matrices (tensor parallelism) or their update (sharded weights) are refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from launcher.config.check_code import Code
from launcher.config.decode import CLASS
from launcher.config.key import Args
from launcher.config.workload import OptimizerConfig
from launcher.workloads.own_code import Offer, bound, build, described, load_object
from strategies.errors import PlanError
from strategies.models.unit_model import HasUnits


class Steering(NamedTuple):
    """Parameters that each step moves by ``rate``, against the sign of their gradient."""

    parameters: Sequence[nn.Parameter]
    rate: float


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    options: OptimizerConfig,
    *,
    apart: Callable[[nn.Parameter], bool] | None = None,
    steering: Steering | None = None,
) -> Optimizer:
    """An optimizer with two groups: with weight decay (two or more dimensions) and without.

    What is ``steering`` is one more, which the optimizer itself leaves alone.

    Both groups always exist, maybe empty: ranks whose stage lacks a kind, or has no parameter at
    all, then keep the same group indices as the others, and torch accepts an optimizer of empty
    groups but not of none. ``muon`` has three, and ``apart`` says which matrices are not for it;
    None for none.
    """
    steered = set() if steering is None else {id(p) for p in steering.parameters}
    trained = [p for p in parameters if p.requires_grad and id(p) not in steered]
    if options.name == "muon":
        optimizer: Optimizer = build_muon(trained, options, apart=apart or (lambda _: False))
    else:
        optimizer = _made(trained, options)
    if steering is not None:
        _add_steered(optimizer, steering, options)
    return optimizer


_STEERED = "steered_by"


def _add_steered(optimizer: Optimizer, steering: Steering, options: OptimizerConfig) -> None:
    """A group at a rate of 0, where every rule of torch's stands still; what moves it comes behind.

    Raises:
        PlanError: The optimizer has no rate.
    """
    usual = {key: value for key, value in optimizer.param_groups[-1].items() if key != "params"}
    if "lr" not in usual:
        raise PlanError(
            f"optimizer.path={options.path}: {type(optimizer).__name__} has no lr, by which it "
            "would leave the biases of routers alone. Try model.bias_update_rate=0."
        )
    members = [parameter for parameter in steering.parameters if parameter.requires_grad]
    still = {"lr": 0.0, "weight_decay": 0.0, _STEERED: steering.rate}
    optimizer.add_param_group({**usual, **still, "params": members})
    # Not the group's own, which is a checkpoint's where a run goes on.
    optimizer.register_step_post_hook(partial(_steer, steering.rate))


@torch.no_grad()
def _steer(rate: float, optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if _STEERED in group else ():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=rate)


def _made(trained: list[nn.Parameter], options: OptimizerConfig) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if options.name == CLASS:
        return _of_own_class(groups, options)
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum or 0.0)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    betas, eps = options.betas or (0.9, 0.95), options.eps or 1e-8
    # On CUDA the default has temporaries as large as all weights and doubles the memory traffic.
    fused = any(parameter.is_cuda for parameter in trained) or None
    made: Any = kind(groups, lr=options.lr, betas=betas, eps=eps, fused=fused)
    # Gradients are unscaled before they are clipped, for which Lightning asks by this attribute.
    made._step_supports_amp_scaling = False
    return cast(Optimizer, made)


def own_optimizer(
    target: Callable[..., Any], options: OptimizerConfig
) -> tuple[Code, inspect.BoundArguments | None]:
    """The call by which ``optimizer=class`` is made, its parameters left empty.

    It gets ``optimizer.args``, and ``optimizer.lr`` where it has an argument ``lr``.

    Raises:
        PlanError: Arguments that it does not take, or misses.
    """
    assert options.path is not None
    set_lr = ("optimizer.lr",) if options.lr != OptimizerConfig().lr else ()
    code = Code("optimizer", options.path, options.args)
    offers = {"params": Offer((), ("the model",)), "lr": Offer(options.lr, ("optimizer.lr",))}
    if "lr" in options.args and not set_lr:
        del offers["lr"]
    call = bound(code, target, offers)
    if call is not None and "params" not in call.arguments:
        raise PlanError(
            f"optimizer.path={options.path}: {described(target)} has no argument params, which are "
            "the weights that it trains. Try torch.optim:RAdam."
        )
    if set_lr and call is not None and "lr" not in call.arguments:
        raise PlanError(
            f"optimizer.lr={options.lr:g}: {described(target)} has no argument lr. Try "
            "optimizer.args with the name that it gives its rate."
        )
    return code, call


def _of_own_class(groups: list[dict[str, Any]], options: OptimizerConfig) -> Optimizer:
    assert options.path is not None
    target = load_object("optimizer", options.path, base=Optimizer)
    code, call = own_optimizer(target, options)
    # Its own decay, or none: that of optimizer.weight_decay is for the built-in ones.
    decays = call is not None and "weight_decay" in call.signature.parameters
    first, second = groups
    del first["weight_decay"]
    if not decays:
        del second["weight_decay"]
    lr = {} if call is None or "lr" not in call.arguments else {"lr": call.arguments["lr"]}
    given = code.args.plain() | lr
    made = build(Code("optimizer", options.path, Args(given)), target, {"params": Offer(groups)})
    if not isinstance(made, Optimizer):
        raise PlanError(
            f"optimizer.path={options.path} makes a {type(made).__name__} and no optimizer of "
            "torch.optim. Try torch.optim:RAdam."
        )
    return made


def configured(
    module: pl.LightningModule, options: OptimizerConfig, *, steering: Steering | None = None
) -> OptimizerLRSchedulerConfig:
    """What ``configure_optimizers`` returns for ``optimizer=``."""
    apart = embeddings_and_head(module) if options.name == "muon" else None
    optimizer = build_optimizer(module.parameters(), options, apart=apart, steering=steering)
    total = module.trainer.estimated_stepping_batches
    scheduler = build_scheduler(optimizer, options, total_steps=total)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


def build_scheduler(
    optimizer: Optimizer, options: OptimizerConfig, *, total_steps: float
) -> LambdaLR:
    """Linear warm-up, then cosine or constant; to be stepped once per optimizer step."""
    return LambdaLR(optimizer, partial(lr_factor, options=options, total_steps=total_steps))


def lr_factor(step: int, *, options: OptimizerConfig, total_steps: float) -> float:
    """The learning rate of ``step`` (from 0) over ``options.lr``.

    Step 0 already moves, by ``lr / warmup_steps``. In a run without end (``total_steps=inf``) the
    cosine never begins to fall.
    """
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "constant" or math.isinf(total_steps):
        return 1.0
    falling = max(1.0, total_steps - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / falling)
    low = options.min_lr_ratio
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


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
        "nesterov": options.nesterov is not False,
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
