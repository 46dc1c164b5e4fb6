"""Rules between keys of one group of a request: trainer, tracker, model, measured costs."""

from __future__ import annotations

import re

from launcher.config.decode import CLASS, brings_own
from launcher.config.key import keys_of, shorten, spell, typed, value_at
from launcher.config.launch import LaunchConfig
from launcher.config.workload import ModelConfig, OptimizerConfig
from strategies.errors import PlanError

PROFILED = ("costs.file", "costs.refine", "costs.any_machine")


_MAX_TIME = re.compile(r"\d{1,4}:\d{1,2}:\d{1,2}:\d{1,2}")


def check_tracking(config: LaunchConfig) -> None:
    names, chosen = config.tracking.names, f"tracking={spell(config.tracking.name)}"
    twice = [name for name in names if names.count(name) > 1]
    if twice or not names or ("none" in names and len(names) > 1):
        kept = ",".join(dict.fromkeys(name for name in names if name != "none")) or "csv"
        raise PlanError(
            f"{chosen}: each tracker stands once, and none beside no other. Try tracking=[{kept}]."
        )
    if "wandb" not in names and config.mode != "dashboard":
        refuse_set(config, "tracking.entity", "tracking.group", "tracking.tags", chosen=chosen)


def check_profiled(config: LaunchConfig) -> None:
    if config.costs.name != "profiled":
        for path in PROFILED:
            if value := value_at(config, path):
                raise PlanError(
                    f"{path}={spell(value)} belongs to costs=profiled, but costs="
                    f"{config.costs.name}. Try costs=profiled {path}={spell(value)}."
                )
    elif config.costs.refine is not None and config.mode != "train":
        raise PlanError(
            f"costs.refine={shorten(config.costs.refine)} corrects the profile by a training run, "
            f"but mode={config.mode}. Try mode=train."
        )
    elif config.mode == "profile":
        raise PlanError("mode=profile measures costs, it reads none. Try without costs=profiled.")
    if config.mode != "profile":
        refuse_set(
            config,
            "profile.file",
            "profile.microbatch_sizes",
            chosen=f"mode={config.mode}",
            instead=" Try mode=profile.",
        )


def check_trainer(config: LaunchConfig) -> None:
    trainer = config.trainer
    if trainer.max_time is not None and not _MAX_TIME.fullmatch(trainer.max_time):
        raise PlanError(
            f"trainer.max_time={shorten(trainer.max_time)}: expected DD:HH:MM:SS. "
            "Try trainer.max_time='00:01:00:00'."
        )
    if trainer.max_time is not None and not re.search("[1-9]", trainer.max_time):
        raise PlanError(
            f"trainer.max_time={trainer.max_time} trains nothing. "
            "Try trainer.max_time='00:01:00:00' for an hour, or mode=validate."
        )
    if trainer.max_steps < 0 and trainer.max_epochs is None and trainer.max_time is None:
        raise PlanError(
            "trainer.max_steps=-1 without trainer.max_epochs or trainer.max_time never ends. "
            "Try trainer.max_epochs=1."
        )
    if trainer.max_steps == 0:
        raise PlanError("trainer.max_steps=0 trains nothing. Try mode=validate.")
    if trainer.limit_train_batches == 0 and config.mode == "train":
        raise PlanError(
            "trainer.limit_train_batches=0 trains nothing. Try trainer.limit_train_batches=10, or "
            "mode=eval."
        )
    if trainer.max_restarts and config.cluster.name != "local":
        does = {
            "slurm": "a failed job is submitted again with sbatch, and goes on where it was",
            "torchrun": "torchrun has --max-restarts, with trainer.resume=auto",
        }[config.cluster.name]
        raise PlanError(
            f"trainer.max_restarts={trainer.max_restarts} starts the processes of cluster=local "
            f"again, but cluster={config.cluster.name}: {does}. Try trainer.max_restarts=0."
        )
    opens = config.mode in ("eval", "predict", "generate", "export")
    if opens and trainer.resume not in (None, "auto"):
        raise PlanError(
            f"trainer.resume={shorten(trainer.resume)} is where mode=train goes on, and "
            f"mode={config.mode} opens checkpoint={shorten(config.checkpoint)}. "
            f"Try {typed('checkpoint', trainer.resume)}."
        )
    for name in ("train", "val", "test", "predict"):
        _check_share(f"trainer.limit_{name}_batches", getattr(trainer, f"limit_{name}_batches"))
    _check_share("trainer.val_check_interval", trainer.val_check_interval)
    share = isinstance(trainer.val_check_interval, float)
    if trainer.check_val_every_n_epoch is None and share:
        raise PlanError(
            f"trainer.val_check_interval={trainer.val_check_interval} is a part of an epoch, which "
            "needs trainer.check_val_every_n_epoch. Try trainer.check_val_every_n_epoch=1."
        )
    if trainer.keep_best == 0 and (trainer.monitor, trainer.monitor_mode) != ("val_loss", "min"):
        raise PlanError(
            f"trainer.monitor={shorten(trainer.monitor)} trainer.monitor_mode="
            f"{trainer.monitor_mode} are what trainer.keep_best goes by, which is 0. "
            "Try trainer.keep_best=1."
        )
    if trainer.keep_best and (trainer.limit_val_batches == 0 or config.data.val_fraction == 0):
        raise PlanError(
            f"trainer.keep_best={trainer.keep_best} goes by validations, and "
            f"trainer.limit_val_batches={trainer.limit_val_batches} data.val_fraction="
            f"{config.data.val_fraction} allow none. Try trainer.keep_best=0."
        )
    if trainer.keep_best and trainer.monitor not in _LOGGED and _logs_nothing_else(config):
        raise PlanError(
            f"trainer.monitor={shorten(trainer.monitor)} is not logged by model="
            f"{config.model.name}; {', '.join(_LOGGED)} are. Try trainer.monitor=val_loss."
        )
    betas = config.optimizer.betas
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        raise PlanError(
            f"optimizer.betas={spell(betas)}: both must be at least 0 and below 1. "
            "Try optimizer.betas=[0.9,0.95]."
        )


_LOGGED = ("train_loss", "val_loss", "val_perplexity")  # of models of ours, without experts


def _logs_nothing_else(config: LaunchConfig) -> bool:
    own = brings_own("model", config.model.name) or config.callbacks.plain()
    return not own and config.model.name != HUGGING_FACE and not config.model.experts


def warmup_note(config: LaunchConfig) -> str | None:
    """What is to be said where a run ends before its learning rate has come up.

    The default goes without: of ten steps everybody sees that they are a try.
    """
    steps, ends = config.optimizer.warmup_steps, config.trainer.max_steps
    if config.mode not in ("train", "validate") or not 0 < ends < steps:
        return None
    if steps == OptimizerConfig().warmup_steps:
        return None
    return (
        f"optimizer.warmup_steps={steps} with trainer.max_steps={ends}: the rate only comes up, to "
        f"{ends / steps:.0%} of optimizer.lr. Try optimizer.warmup_steps={max(1, ends // 10)}."
    )


# Whose predictions and reports read a peak; the others run whatever the hardware file says.
_WITH_PEAK = ("train", "simulate", "plan", "validate", "profile")


def check_peak(config: LaunchConfig) -> None:
    hardware, trainer, wanted = config.hardware, config.trainer, config.trainer.number_format
    known = hardware.named_peaks()
    uniform = config.mode == "simulate" and config.costs.name == "uniform"
    if hardware.peak_flops is not None or wanted in known or uniform:
        return
    if config.mode not in _WITH_PEAK:
        return
    asked = f"trainer.precision={trainer.precision}"
    if wanted == "tf32":
        asked = f"trainer.float32_matmul_precision={trainer.float32_matmul_precision}"
    ways = {
        "tf32": ("trainer.float32_matmul_precision=highest", "fp32"),
        "bf16": ("trainer.precision=16-mixed", "fp16"),
        "fp16": ("trainer.precision=bf16-mixed", "bf16"),
    }
    way, needs = ways.get(wanted, ("trainer.precision=32-true", "fp32"))
    if wanted == "fp32":
        needs = next((kind for kind in ("bf16", "fp16") if kind in known), needs)
        way = {"bf16": "trainer.precision=bf16-mixed", "fp16": "trainer.precision=16-mixed"}.get(
            needs, way
        )
    if needs not in known:
        way = f"hardware.peak_{wanted}_flops=1e13"
    raise PlanError(
        f"{asked} computes in {wanted}, and hardware={hardware.name} has no peak for {wanted}, "
        f"only for {', '.join(known) or 'nothing'}. Try {way}, or give the peak of one rank in "
        f"FLOP/s (hardware.peak_{wanted}_flops)."
    )


def _check_share(path: str, value: int | float | None) -> None:
    if isinstance(value, float) and value > 1:
        raise PlanError(
            f"{path}={value}: a number with a point is a share, at most 1.0. "
            f"Try {path}={max(1, round(value))}."
        )


def refuse_set(config: LaunchConfig, *paths: str, chosen: str, instead: str = "") -> None:
    for path in paths:
        value = value_at(config, path)
        if value not in (None, ()):
            raise PlanError(
                f"{path}={spell(value)} has no meaning with {chosen}. "
                f"{instead.strip() or f'Try without {path}.'}"
            )


HUGGING_FACE = "hf"


_BOTH = ("name", "sequence", "args")


_HUGGING_FACE_ONLY = ("path", "pretrained", "layers_path")


_EXPERTS_ONLY = (
    "experts_per_token", "expert_ffn", "shared_experts", "first_dense_layers", "expert_every",
    "expert_imbalance", "router", "router_normalized", "router_scale", "aux_loss",
    "aux_loss_over", "z_loss", "bias_update_rate",
)  # fmt: skip


def check_model_keys(model: ModelConfig) -> None:
    folder = model.name == HUGGING_FACE
    if model.name == CLASS:
        return  # has been checked with its path
    for entry in keys_of(ModelConfig, "model."):
        name = entry.path.removeprefix("model.")
        value = getattr(model, name)
        if name in _BOTH or value == entry.default:
            continue
        if name in _EXPERTS_ONLY and not folder and model.experts is None:
            raise PlanError(
                f"{entry.path}={spell(value)} is about experts, and model={shorten(model.name)} "
                f"has none. Try model.experts=8 {entry.path}={spell(value)}, or without "
                f"{entry.path}."
            )
        if (name in _HUGGING_FACE_ONLY) == folder:
            continue
        given = f"{entry.path}={shorten(value)}"
        if folder:
            raise PlanError(
                f"{given} has no meaning with model=hf, whose sizes are those of config.json in "
                f"model.path. Try without {entry.path}."
            )
        other = CLASS if name == "path" and ":" in str(value) else HUGGING_FACE
        raise PlanError(
            f"{given} belongs to model={other}, but model={shorten(model.name)}. "
            f"Try model={other} {entry.path}={spell(value)}."
        )
