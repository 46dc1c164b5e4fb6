"""What a pipeline cannot train as it should be: said before anything runs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from strategies.errors import ModelError, one_line
from strategies.models.contents import walk
from strategies.models.snapshot import restoring
from strategies.models.state import generator_words, is_generator, seed_all
from strategies.models.unit_model import HasUnits
from strategies.plan import OnNan, Plan
from strategies.runtime.lightning.manual_optimization import refuse_manual
from strategies.schedules import find_schedule


def refuse_module(
    trainer: pl.Trainer, module: pl.LightningModule, plan: Plan, *, shared: bool
) -> None:
    """Refuses modules and callbacks that decide what the program decides.

    ``shared``: ranks have shares of weights.
    """
    if not module.automatic_optimization:
        refuse_manual(trainer, module, plan)
    found = find_schedule(plan.schedule, file=plan.file, pp=plan.pp)
    running = [n for n, m in module.named_modules() if getattr(m, "track_running_stats", False)]
    if found.weight_copies > 1 and running:
        raise ModelError(
            f"{running[0]} keeps running statistics; schedule={found.name} holds every stage "
            "twice: each copy would see half of the microbatches, and the two would differ in "
            "evaluation. Try schedule=zb_v, or track_running_stats=False."
        )
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise ModelError(
            f"{type(module._orig_mod).__name__} is compiled as a whole, and a pipeline cuts it. "
            "Compile the layers inside the module, not the LightningModule."
        )
    if plan.pp > 1 or isinstance(module, HasUnits):
        refuse_uncuttable(module)
    strategy: Any = trainer.strategy
    replicas = strategy.dp if getattr(strategy, "_layer_sync", None) else 1
    if replicas > 1 and any(map(_is_norm, module.modules())):
        raise ModelError(
            "sync_batchnorm=True lets batch norms take their mean and variance over "
            f"dp={replicas} replicas, and a pipeline takes them over each replica's microbatches.",
            fix="Use GroupNorm or LayerNorm, or Trainer(strategy='ddp', sync_batchnorm=True).",
        )
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise ModelError(
                f"{name} is a sparse buffer, and gloo and NCCL bring dense ones from rank to rank. "
                f"Use a plain attribute, which each rank makes for itself, or {name}.to_dense()."
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"{name} gets its shape in the first forward (LazyLinear and its kin), and a "
                "pipeline cuts the module before that. Give the layer its sizes, or run one "
                "forward on a few rows in __init__ or setup."
            )
        refuse_post_hooks(name, parameter)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _refuse_callback(callback, module, plan, shared)


def refuse_post_hooks(name: str, parameter: nn.Parameter) -> None:
    """Refuses a user's hook that takes gradients of microbatches for those of batches."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        if not hook.__module__.startswith("strategies."):
            raise ModelError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which runs whenever "
                "a gradient has been added: in a pipeline for each microbatch, and before "
                "replicas have put theirs together. Do it in on_before_optimizer_step, or step "
                "by an optimizer of configure_optimizers()."
            )


def refuse_uncuttable(module: nn.Module) -> None:
    """Refuses layers that no microbatch may run, or no stage; with pp=1 they run whole."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ModelError(
                f"{name} is TorchScript (torch.jit.script, torch.jit.trace), which runs below "
                "Python: nobody can follow it, or take weights of other stages from it. Use the "
                "module that it was made of (torch.compile makes that faster), or pp=1."
            )
        if getattr(child, "max_norm", None) is not None and isinstance(
            child, nn.Embedding | nn.EmbeddingBag
        ):
            raise ModelError(
                f"{name} has max_norm={child.max_norm:g}: its forward changes its weight, and in a "
                "pipeline several forwards run before a backward that needs the weight as it was. "
                "Use max_norm=None and limit rows in on_train_batch_start (weight.data.renorm_), "
                "or use pp=1."
            )


def _refuse_callback(callback: Any, module: pl.LightningModule, plan: Plan, shared: bool) -> None:
    """Refuses what changes the model in a way that its stages cannot follow."""
    name = type(callback).__name__
    averages = isinstance(callback, StochasticWeightAveraging) or is_weight_averaging(callback)
    if averages and plan.pp > 1 and isinstance(module, HasUnits):
        raise ModelError(
            f"the callback {name} copies the whole model before it is cut into {plan.pp} ranks. "
            "Of a module that declares pipeline_units() each rank has its own units only, and "
            "the wrong weights would be averaged. Remove it, or use pp=1."
        )
    if isinstance(callback, StochasticWeightAveraging) and any(map(_is_norm, module.modules())):
        raise ModelError(
            f"the callback {name} ends with an epoch of forwards alone that computes the running "
            f"statistics of {type(module).__name__}'s batch norms anew; a pipeline's training "
            "step runs forwards and backwards together. Use WeightAveraging, or a norm without "
            "running statistics (GroupNorm, LayerNorm)."
        )
    if isinstance(callback, ModelPruning) and (plan.pp > 1 or shared):
        raise ModelError(
            f"the callback {name} replaces parameters by others during training; the stages and "
            "optimizers of a pipeline hold those that were there at the start. Prune the module "
            "before fit() (torch.nn.utils.prune), or use pp=1 tp=1 ep=1."
        )


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_weight_averaging(callback: Any) -> bool:
    return any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__)


def refuse_optimizers(
    optimizers: Iterable[Optimizer], *, world_size: int, pipeline: int, on_nan: OnNan
) -> None:
    """Refuses optimizers that run a step as often as each rank likes, or look across parameters."""
    for optimizer in optimizers:
        if pipeline > 1:
            _refuse_mixing(optimizer)
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        if world_size > 1:
            raise ModelError(
                "LBFGS decides on each rank by itself how often it runs the step, so the ranks "
                "would wait for each other for ever. Use another optimizer, or pp=1 dp=1."
            )
        if on_nan == "skip":
            raise ModelError(
                "LBFGS moves the weights several times in a step, so none can be left out as a "
                "whole. Use on_nan=stop, or another optimizer."
            )


def _refuse_mixing(optimizer: Optimizer) -> None:
    """Refuses an optimizer of somebody's own that needs more than a parameter and its gradient.

    Each rank updates its own parameters with what it has; torch's own optimizers are like that.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] in ("torch", "strategies", "launcher"):
        return
    beside = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    if any(isinstance(found, Tensor) and found.dim() for found, _ in walk(beside)):
        raise ModelError(
            f"the optimizer {kind.__name__} keeps tensors of the whole model beside its groups and "
            "its state, and each rank of a pipeline updates its own parameters. Keep them in "
            "self.state[parameter], made in the first step, or use an optimizer of torch.optim."
        )
    try:
        found = _compared(optimizer)
    except Exception as error:
        rank_zero_warn(
            f"the optimizer {kind.__name__} could not be tried on small parameters "
            f"({one_line(error)}). Each rank of a pipeline updates its own "
            "parameters, so it must treat each of them by itself."
        )
        return
    if found is _Found.DRAWS:
        raise ModelError(
            f"the optimizer {kind.__name__} draws random numbers: two runs of {_STEPS} steps from "
            "the same weights end at different ones, and ranks of a pipeline would not draw what "
            "one process draws. Use an optimizer of torch.optim and add the noise to the "
            "gradients in on_before_optimizer_step, which sees them all, or use pp=1."
        )
    if found is _Found.MIXES:
        raise ModelError(
            f"the optimizer {kind.__name__} updates a parameter by the gradients of others, too (a "
            "norm over all of them, as SAM takes, or one step size for all, as Prodigy has): "
            f"{_STEPS} steps of two small layers differ from those of each layer alone, and each "
            "rank of a pipeline has its own layers only. Use an optimizer that treats each "
            "parameter by itself (torch.optim), change gradients in on_before_optimizer_step, "
            "which sees them all, or use pp=1."
        )


_STEPS = 12  # what grows from a first guess, or begins after a warm-up, shows in so many
_GROUPS = 3  # so many groups are tried


class _Found(Enum):
    """What steps on small parameters show."""

    SEPARATE = "separate"
    DRAWS = "draws"
    MIXES = "mixes"


def _compared(optimizer: Optimizer) -> _Found:
    """Whether layers are updated together as each is alone, as on a rank of its own."""
    held = [optimizer, *(v for v in vars(optimizer).values() if isinstance(v, Optimizer))]
    own = [v for v, _ in walk([vars(one) for one in held]) if is_generator(v)]
    before = [generator_words(generator) for generator in own]
    for dtype in (torch.float64, torch.float32):
        try:
            both, again = (_moves(held, (0, 1), dtype, seed) for seed in (0, 1))
            first, second = (_moves(held, (layer,), dtype, 0) for layer in (0, 1))
        except Exception:
            if dtype is torch.float32:
                raise
            continue
        if not _same(both, again) or [generator_words(generator) for generator in own] != before:
            return _Found.DRAWS
        return _Found.SEPARATE if _same(first, both) and _same(second, both) else _Found.MIXES
    raise AssertionError


def _moves(
    held: Sequence[Optimizer], layers: Sequence[int], dtype: torch.dtype, seed: int
) -> dict[Any, Tensor]:
    """How far steps with growing gradients move small ``layers``, each with a part in every group.

    With it what they leave in numbers beside the parameters, in groups and attributes.
    ``held`` are the optimizer and those inside of it; they are as before then.
    """
    optimizer = held[0]
    holder = nn.Module()
    vars(holder)["held"] = [vars(one) for one in held]
    with restoring(holder), torch.enable_grad():
        seed_all(seed)
        for found, _ in walk(vars(holder)["held"]):
            if isinstance(found, torch.Generator):
                found.manual_seed(seed)
        starts: dict[tuple[int, int, int], Tensor] = {}
        parameters: dict[tuple[int, int, int], nn.Parameter] = {}
        for one in held:
            one.state.clear()
            one._optimizer_step_pre_hooks = OrderedDict()
            one._optimizer_step_post_hooks = OrderedDict()
            groups = one.param_groups
            groups[_GROUPS - 1 :] = groups[-1:] if len(groups) >= _GROUPS else []
            for number, group in enumerate(groups):
                matrices = {parameter.dim() > 1 for parameter in group["params"]} or {True, False}
                group["params"] = []
                sizes = [(4, 4) if matrix else (4,) for matrix in sorted(matrices)]
                for layer, (place, size) in product(layers, enumerate(sizes)):
                    key = (number, layer, place)
                    if key not in parameters:
                        starts[key] = _rising(size, 0.5 + layer, dtype)
                        parameters[key] = nn.Parameter(starts[key].clone())
                    group["params"].append(parameters[key])
        if callable(getattr(optimizer, "train", None)):  # Some have a mode, as modules do.
            optimizer.train()  # type: ignore[attr-defined]
        for step in range(_STEPS):
            optimizer.step(closure=partial(_give_gradients, parameters, step))
        moves = {key: parameters[key].detach() - start for key, start in starts.items()}
        return moves | _numbers(held)


def _numbers(held: Sequence[Optimizer]) -> dict[Any, Tensor]:
    """Numbers that are one for all parameters of a group, or of the optimizer."""
    tables = [table for one in held for table in (vars(one), *one.param_groups)]
    return {
        (name, place): torch.as_tensor(value, dtype=torch.float64)
        for place, table in enumerate(tables)
        for name, value in table.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _rising(size: tuple[int, ...], most: float, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.1, most, math.prod(size), dtype=dtype).reshape(size)


def _give_gradients(parameters: Mapping[tuple[int, int, int], nn.Parameter], step: int) -> Any:
    """A closure: gradients of one layer grow, those of the other change their sign, too.

    They depend on where the parameters are.
    """
    for (number, layer, _), parameter in parameters.items():
        slope = _rising(tuple(parameter.shape), 1.0 + 2 * layer + number, parameter.dtype)
        scale = 0.1 * (-1.3 if layer else 1.5) ** step
        parameter.grad = scale * (slope + 0.1 * parameter.detach())
    return torch.ones(())


def _same(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> bool:
    for key, number in one.items():
        near = 1e-4 * float(number.abs().nan_to_num(0.0, 0.0).max())
        if not torch.allclose(number, other[key], rtol=1e-4, atol=near, equal_nan=True):
            return False
    return True


# -------------------------------------------------------------------------------------- loss scale
# A gradient that is not finite on one rank means that no rank may update, or stages and replicas
# would part; and all must scale alike afterwards. So what the scaler has found on this rank is
# shared with all processes, at the one place where torch's scaler looks at gradients.


class SharedGradScaler(torch.amp.GradScaler):
    """A scaler that skips a step, and changes its scale, on all ranks or on none."""

    overflowed: Tensor | None = None  # whether the step before was skipped; the same on all ranks

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, *, device: torch.device) -> SharedGradScaler:
        made = cls(
            device.type,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
        if scaler.is_enabled():
            made.load_state_dict(scaler.state_dict())
        return made

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not found:
            # A rank without gradients has a say in nothing, but must hear of it.
            found[found_inf.device] = found_inf
        if dist.is_initialized() and dist.get_world_size() > 1:
            anywhere = torch.stack([flag.cpu() for flag in found.values()]).amax()
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            for flag in found.values():
                flag.copy_(anywhere)
        self.overflowed = torch.stack(list(found.values())).amax()
        return found

    @property
    def exhausted(self) -> bool:
        """Whether gradients are not finite although nothing is left to scale down.

        Waits for the device, as the scaler's own step does.
        """
        return self.overflowed is not None and bool(self.overflowed) and self.get_scale() < 1.0


# ---------------------------------------------------------------------------------- weight readers
# With sharded weights a rank holds old values of other replicas' shares from the optimizer's update
# until the next step's forwards. Lightning runs other people's hooks in between, so this callback
# stands before all others and makes the weights whole first. At the end of a batch, where that
# would put the gather into the open at every step, it does so only for callbacks and modules that
# may read weights there.


class WholeWeights(pl.Callback):
    """Completes the weights before other hooks; of no cost where they are whole."""

    def __init__(
        self,
        complete: Callable[[], None],
        readers: Callable[[], Sequence[str]],
        *,
        watched: bool = False,
        late: bool = False,
    ) -> None:
        self._complete = complete
        self._readers = readers  # names of hooks between two batches that may read weights
        self._late = late  # whether batches are under way then, whose updates come first
        self._watched = (
            watched  # whether hooks complete the weights themselves where they touch any
        )
        self._each_batch = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        readers = [] if self._watched else self._readers()
        self._each_batch = bool(readers)
        if readers:
            rank_zero_warn(
                f"{', '.join(readers)} may look at weights after each batch, so "
                + (
                    "what is under way is brought to its end before that, as a flush does. "
                    if self._late
                    else "with overlap=zero1 they are gathered before that, not under the next "
                    "step. "
                )
                + "Where no weight is read, say so with a class attribute reads_weights = False."
            )

    def on_train_batch_end(self, *_: Any) -> None:
        if self._each_batch:
            self._complete()

    def _now(self, *_: Any, **__: Any) -> None:
        self._complete()

    on_train_epoch_start = on_train_epoch_end = on_train_end = _now
    on_sanity_check_start = on_validation_start = _now
