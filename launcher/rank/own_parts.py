"""Model, data module, callbacks and optimizer of the user's own, built inside a rank.

``run`` checks them in a process of its own, before a rank or a folder is made: the launcher's
process imports neither torch nor anybody's module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

from launcher.config import LaunchConfig, from_dict
from launcher.config.check_code import Code, named_callbacks, own_code, void_keys
from launcher.config.decode import CLASS, brings_own
from launcher.config.derived import asked_schedule
from launcher.config.key import shorten, value_at
from launcher.config.workload import OptimizerConfig
from launcher.resolve import Run, model_shape, num_replicas
from launcher.workloads.optimizer import configured, own_optimizer
from launcher.workloads.own_code import (
    Offer,
    Offers,
    bound,
    build,
    described,
    load_object,
    one_line,
)
from launcher.workloads.registry import DATA, MODELS, find, load
from strategies.errors import DataError, ModelError, PipelineError, PlanError

_BASES: dict[str, type] = {
    "model": pl.LightningModule,
    "data": pl.LightningDataModule,
    "optimizer": torch.optim.Optimizer,
}
# What the defaults of the file conf/optimizer/adamw.yaml spell out.
_SPELT = {"betas": (0.9, 0.95), "eps": 1e-8}


def build_own_model(run: Run) -> pl.LightningModule:
    """The user's LightningModule; one without ``configure_optimizers`` gets ``optimizer=``'s.

    Raises:
        ModelError: It cannot be built.
    """
    config = run.config
    model = _build_model(config, _offers(run))
    if not is_overridden("configure_optimizers", model, pl.LightningModule):
        _give_optimizer(model, config.optimizer)
    return model


def _build_model(config: LaunchConfig, offers: Offers) -> pl.LightningModule:
    code, target = _code(config, "model")
    if _takes_configuration(config, code, target, offers):
        try:
            model = target(config)  # a package's builder
        except (PipelineError, MemoryError):
            raise
        except Exception as reason:
            raise ModelError(
                f"model={config.model.name}: {described(target)} fails with {one_line(reason)}.",
                fix="Correct it there, or try another model=.",
            ) from reason
    else:
        model = build(code, target, offers)
    _require(code, model)
    if "_parameters" not in vars(model):
        raise ModelError(
            f"model.path={code.path}: __init__ of {described(type(model))} does not call "
            "super().__init__().",
            fix="Write that into its first line.",
        )
    return cast(pl.LightningModule, model)


def build_own_data(run: Run) -> pl.LightningDataModule:
    """The user's LightningDataModule.

    Raises:
        DataError: It cannot be built.
    """
    code, target = _code(run.config, "data")
    if _takes_configuration(run.config, code, target, _offers(run)):
        data = target(run.config, run.batch_size)
    else:
        data = build(code, target, _offers(run))
    _require(code, data)
    return cast(pl.LightningDataModule, data)


def build_own_callbacks(run: Run) -> list[Callback]:
    """``callbacks.*``, in their order.

    Raises:
        PlanError: One cannot be built.
    """
    found = []
    for code in named_callbacks(run.config):
        callback = build(code, load_object(code.key, code.path, base=Callback), _offers(run))
        _require(code, callback)
        found.append(callback)
    return found


def run(task: Mapping[str, Any], run_dir: Path) -> None:
    """Imports what configurations name, and holds their arguments against its signatures.

    ``task``: ``configs`` as ``dump`` has them.

    Raises:
        PipelineError: The first thing that is wrong.
    """
    for values in task["configs"]:
        config = from_dict(values)
        _check(config)
        model = config.model
        named = brings_own("model", model.name) and (model.name != CLASS or model.path is not None)
        if config.mode == "validate" and named:
            _try_model(config)


def _check(config: LaunchConfig) -> None:
    offers = _offered(config, batch_size=0, num_microbatches=0, sequence=0, vocab=0)
    for group in ("model", "data"):
        if brings_own(group, value_at(config, group).name):
            _check_group(config, group, offers)
    for code in own_code(config):
        if code.key in ("model", "data"):
            continue
        target = load_object(code.key, code.path, base=_BASES.get(code.key, Callback))
        _require_class(code, target)
        if code.key == "optimizer":
            own_optimizer(target, config.optimizer)
        else:
            bound(code, target, offers)


def _try_model(config: LaunchConfig) -> None:
    """Makes the model as its ranks will, without weights where it can be made so.

    Raises:
        PipelineError: What they would say.
    """
    from strategies.tracing.trace import empty_weights  # Ranks do without it.

    asked, shape = asked_schedule(config, num_replicas(config)), model_shape(config)
    offers = _offered(
        config,
        batch_size=asked.batch_size,
        num_microbatches=asked.plan.num_microbatches,
        sequence=shape.sequence,
        vocab=shape.vocab,
    )
    try:
        with empty_weights():
            _build_model(config, offers)
    except Exception:  # Some look at their weights while they are made.
        _build_model(config, offers)


def _check_group(config: LaunchConfig, group: str, offers: Offers) -> None:
    if value_at(config, group).name == CLASS and value_at(config, group).path is None:
        return  # a checkpoint will say it
    code, target = _code(config, group)
    if _takes_configuration(config, code, target, offers):
        return
    _require_class(code, target)
    call = bound(code, target, offers)
    for path in void_keys(config, group):
        name = path.partition(".")[2]
        raise _error(group)(
            f"{path}={shorten(value_at(config, path))} has no meaning with {described(target)}, "
            f"which gets its arguments under {group}.args. Try {group}.args.{name}=VALUE, if it "
            "has one of that kind."
        )
    if group == "data":
        _check_batch(config, code, target, call)
    if isinstance(target, type):
        _check_methods(config, group, target)


def _check_batch(
    config: LaunchConfig,
    code: Code,
    target: Callable[..., Any],
    call: inspect.BoundArguments | None,
) -> None:
    """Rows per step that the loader would never hear of."""
    given = _set(config, "data.global_batch_size", "data.microbatch_size")
    if call is None or not given or "batch_size" in call.arguments:
        return
    if any(p.kind == p.VAR_KEYWORD for p in call.signature.parameters.values()):
        return
    raise DataError(
        f"{given[0]}={value_at(config, given[0])}: {described(target)} has no argument batch_size, "
        "by which its loader would hear of it.",
        fix="Give it one, or say the number of microbatches "
        f"(num_microbatches=) and its own size under data.args ({code.path}).",
    )


def _check_methods(config: LaunchConfig, group: str, target: type) -> None:
    own: Any = target
    name, trains = described(target), config.mode in ("train", "validate")
    if group == "data":
        if trains and own.train_dataloader is pl.LightningDataModule.train_dataloader:
            raise DataError(
                f"{name} has no train_dataloader.", fix="Write one that returns a DataLoader."
            )
        return
    if trains and own.training_step is pl.LightningModule.training_step:
        raise ModelError(f"{name} has no training_step.", fix="Write one that returns the loss.")
    if own.train_dataloader is not pl.LightningModule.train_dataloader:
        raise ModelError(
            f"{name} has a train_dataloader of its own, which data={config.data.name} would "
            "replace.",
            fix="Move its loaders into a LightningDataModule: data=class data.path=MODULE:NAME.",
        )
    asked = _set_optimizer(config.optimizer)
    if asked and own.configure_optimizers is not pl.LightningModule.configure_optimizers:
        raise ModelError(
            f"optimizer={config.optimizer.name} ({asked}) has no meaning with {name}, which has "
            "configure_optimizers of its own. Try without it, give the figure to the class "
            "(model.args.lr=...), or remove configure_optimizers."
        )


def _set_optimizer(options: OptimizerConfig) -> str | None:
    """The first key of ``optimizer.*`` that differs from the default choice."""
    default = OptimizerConfig()
    for entry in fields(OptimizerConfig):
        value = getattr(options, entry.name)
        if value != getattr(default, entry.name) and value != _SPELT.get(entry.name):
            return f"optimizer.{entry.name}={shorten(value)}"
    return None


def _give_optimizer(model: pl.LightningModule, options: OptimizerConfig) -> None:
    """A class of the same name in between: an attribute would be part of the module's state."""

    def configure_optimizers(self: pl.LightningModule) -> OptimizerLRSchedulerConfig:
        return configured(self, options)

    own = type(model)
    names = {"configure_optimizers": configure_optimizers, "__module__": own.__module__}
    model.__class__ = type(own.__name__, (own,), names)


# ----------------------------------------------------------------------------------- what is called


def _code(config: LaunchConfig, group: str) -> tuple[Code, Callable[..., Any]]:
    """What ``model=`` or ``data=`` names, loaded."""
    chosen = value_at(config, group)
    if chosen.name == CLASS:
        assert chosen.path is not None
        code = Code(group, chosen.path, chosen.args)
        return code, load_object(group, code.path, base=_BASES[group])
    registry = MODELS if group == "model" else DATA
    target = load(registry, chosen.name)
    return Code(group, find(registry, chosen.name).value, chosen.args), target


def _takes_configuration(
    config: LaunchConfig, code: Code, target: Callable[..., Any], offers: Offers
) -> bool:
    """Whether it is a package's builder of the older kind: ``build(config)``.

    That is a function whose first argument is nothing that the run offers by name.
    """
    if value_at(config, code.key).name == CLASS or code.args:
        return False
    if isinstance(target, type) and issubclass(target, _BASES[code.key]):
        return False
    try:
        parameters = [*inspect.signature(target).parameters.values()]
    except (TypeError, ValueError):
        return True
    if not parameters:
        return False
    first = parameters[0]
    if first.kind in (first.VAR_KEYWORD, first.KEYWORD_ONLY):
        return False
    return first.name not in offers and (first.default is first.empty or first.name == "config")


def _require_class(code: Code, target: object) -> None:
    """Refuses a class of another kind; what a function returns is seen when it has."""
    base = _BASES.get(code.key, Callback)
    if not callable(target):
        raise _error(code.key)(
            f"{code.key}.path={code.path} is {shorten(target)}, but must be a class or a function "
            f"that makes a {base.__name__}. Try the name of a class there."
        )
    if isinstance(target, type) and not issubclass(target, base):
        raise _wrong_kind(code, described(target), target, base)


def _require(code: Code, made: object) -> None:
    base = _BASES.get(code.key, Callback)
    if not isinstance(made, base):
        raise _wrong_kind(code, f"what it makes ({type(made).__name__})", type(made), base)


def _wrong_kind(code: Code, what: str, kind: type, base: type) -> PipelineError:
    bases = [
        one.__module__.partition(".")[0] for one in kind.__mro__ if one.__name__ == base.__name__
    ]
    hint = f"Derive it from {base.__module__.rpartition('.')[0]}.{base.__name__}."
    if bases:
        hint = f"It is one of {bases[0]}; import lightning.pytorch as pl in its place."
    elif code.key == "model" and issubclass(kind, torch.nn.Module):
        hint = (
            "It is a plain torch.nn.Module: wrap it in a LightningModule with training_step and "
            "configure_optimizers."
        )
    return _error(code.key)(f"{code.key}.path={code.path}: {what} is no {base.__name__}. {hint}")


def _error(key: str) -> type[PipelineError]:
    return {"model": ModelError, "data": DataError}.get(key, PlanError)


def _offers(run: Run) -> Offers:
    return _offered(
        run.config,
        batch_size=run.batch_size,
        num_microbatches=run.num_microbatches,
        sequence=run.shape.sequence,
        vocab=run.shape.vocab,
    )


def _offered(
    config: LaunchConfig, *, batch_size: int, num_microbatches: int, sequence: int, vocab: int
) -> Offers:
    """What a class may ask for by name; docs/guides/your-lightning-module.md has the list."""
    rows = _set(config, "data.global_batch_size", "data.microbatch_size")
    found = {
        "seed": Offer(config.seed, _set(config, "seed")),
        "batch_size": Offer(batch_size, rows),
        "microbatch_size": Offer(config.data.microbatch_size, _set(config, "data.microbatch_size")),
        "num_microbatches": Offer(num_microbatches, _set(config, "num_microbatches")),
        "num_workers": Offer(config.data.num_workers, _set(config, "data.num_workers")),
        "user": Offer(config.user.plain(), _set(config, "user")),
    }
    if not brings_own("data", config.data.name):  # the built-in texts
        found |= {
            "sequence": Offer(sequence, _set(config, "model.sequence")),
            "vocab": Offer(vocab, _set(config, "model.vocab")),
        }
    return found


def _set(config: LaunchConfig, *paths: str) -> tuple[str, ...]:
    default = LaunchConfig()
    return tuple(path for path in paths if value_at(config, path) != value_at(default, path))
