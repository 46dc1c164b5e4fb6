"""Rules between keys that need no world size, so that a wrong request ends before anything starts.

Ranges come from the declarations themselves. What depends on the number of processes is decided
where that number is known.
"""

from __future__ import annotations

import re
from dataclasses import fields

from launcher.config.check_cluster import check_cluster
from launcher.config.check_code import check_code
from launcher.config.decode import CLASS, brings_own, did_you_mean, installed_names, nearest
from launcher.config.derived import asked_schedule, own_order, transformer_shape, uniform_costs
from launcher.config.key import Key, describe, keys_of, shorten, spell, value_at
from launcher.config.launch import LaunchConfig
from launcher.config.pipeline import CheckConfig, CostsConfig, PlannerConfig, recompute_policy
from launcher.config.workload import ModelConfig, OptimizerConfig
from launcher.workloads.model_share import check_ep
from launcher.workloads.transformer_shape import TransformerShape
from launcher.workloads.transformer_share import check_transformer_tp
from strategies.errors import PlanError
from strategies.plan import indivisible, refuse_own_order, refuse_selective

_PROFILED = ("costs.file", "costs.refine", "costs.any_machine")
_MAX_TIME = re.compile(r"\d{1,4}:\d{1,2}:\d{1,2}:\d{1,2}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check(config: LaunchConfig) -> None:
    """Raises on the first rule that the configuration breaks."""
    for entry in keys_of(LaunchConfig):
        _check_range(entry, value_at(config, entry.path))
    _check_names(config)
    check_code(config)
    if config.mode == "check":
        _check_order(config)  # The rest is checked when the file's degrees are known.
        return
    if config.mode == "explain":
        _check_trace(config)
        return
    if config.trace:
        raise PlanError(
            f"trace={spell(config.trace)[:80]} is read by mode=explain, not by mode={config.mode}. "
            "Try mode=explain."
        )
    if config.check != CheckConfig():
        given = " ".join(
            f"check.{entry.name}={spell(getattr(config.check, entry.name))}"
            for entry in fields(CheckConfig)
            if getattr(config.check, entry.name) != entry.default
        )
        raise PlanError(
            f"{given[:200]}: this is about mode=check, not mode={config.mode}. Try mode=check, or "
            "without it."
        )
    own_order(config)
    _check_planner(config)
    if not _leaves_open(config):
        _check_schedule(config)
    _check_sums(config)
    _check_recompute(config)
    shape = transformer_shape(config.model, vocab=256)  # Its checks raise; the data decide later.
    _check_sharing(config, shape)
    _check_unused(config)
    _check_trainer(config)
    _check_peak(config)
    check_cluster(config)


def _check_range(entry: Key, value: object) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if entry.low is not None and number < entry.low:
            rule = f"at least {entry.low}"
        elif entry.above is not None and number <= entry.above:
            rule = f"more than {entry.above}"
        elif entry.high is not None and number > entry.high:
            rule = f"at most {entry.high}"
        else:
            continue
        raise PlanError(
            f"{entry.path}={spell(value)}: expected {describe(entry.hint)}, {rule}. "
            f"Try {entry.path}={spell(entry.example)}."
        )


def _check_names(config: LaunchConfig) -> None:
    # The name becomes part of paths; letters only, so that it cannot leave the output folder.
    if not _NAME.fullmatch(config.experiment_name):
        raise PlanError(
            f"experiment_name={shorten(config.experiment_name)}: expected up to 100 letters, "
            "digits, '.', '_' or '-', beginning with a letter or digit. Try experiment_name=my_run."
        )


def _check_sharing(config: LaunchConfig, shape: TransformerShape) -> None:
    if config.sequence_parallel and config.tp == 1 and not _leaves_open(config):
        raise PlanError(
            "sequence_parallel=true cuts activations between the ranks of tp, and tp=1. "
            "Try tp=2, or sequence_parallel=false."
        )
    # With uniform costs the model plays no part; what a package's model allows, the ranks know, and
    # of a folder's model resolve().
    uniform = config.mode == "simulate" and config.costs.name == "uniform"
    if not uniform and config.model.name != "hf" and not brings_own("model", config.model.name):
        check_transformer_tp(shape, config.tp, sequence_parallel=config.sequence_parallel)
        check_ep(shape, config.ep)
    if config.overlap.exchange and config.ep == 1 and not _leaves_open(config):
        raise PlanError(
            "overlap.exchange=true runs the exchange of tokens under other compute, and ep=1 has "
            "none. Try ep=2 with a model that has experts, or overlap.exchange=false."
        )
    if config.dp != "auto" and int(config.dp) * config.tp % config.ep and not _leaves_open(config):
        raise PlanError(indivisible(config.ep, dp=int(config.dp), tp=config.tp))


def _check_order(config: LaunchConfig) -> None:
    """``mode=check`` takes everything from the file."""
    schedule = config.schedule
    if schedule.file is None and config.check.flags is None:
        raise PlanError(
            "mode=check needs the file whose order is looked at. Try schedule.file=theirs.csv."
        )
    if schedule.name not in ("custom", LaunchConfig().schedule.name):
        raise PlanError(
            f"schedule={schedule.name} has an order of its own, and mode=check looks at that of "
            f"schedule.file={shorten(schedule.file or 'theirs.csv')}. Try without "
            f"schedule={schedule.name}."
        )
    if config.pp != 1 or config.num_microbatches != "auto":
        given = (
            f"pp={config.pp}" if config.pp != 1 else f"num_microbatches={config.num_microbatches}"
        )
        raise PlanError(
            f"{given}: mode=check counts ranks and microbatches in schedule.file. Try without "
            f"{given}."
        )


def _check_trace(config: LaunchConfig) -> None:
    """``mode=explain`` takes everything from the traces."""
    if not config.trace:
        raise PlanError(
            "mode=explain needs the traces of a pipeline's ranks. "
            "Try trace=[rank0.json.gz,rank1.json.gz]."
        )
    asked = {
        f"pp={config.pp}": config.pp != 1,
        f"num_microbatches={config.num_microbatches}": config.num_microbatches != "auto",
        f"schedule={config.schedule.name}": config.schedule.name
        not in ("custom", LaunchConfig().schedule.name),
    }
    for given, wrong in asked.items():
        if wrong:
            raise PlanError(f"{given}: mode=explain finds it in the traces. Try without {given}.")


def _check_schedule(config: LaunchConfig) -> None:
    schedule = config.schedule
    if schedule.path is not None and schedule.file is not None:
        raise PlanError(
            f"schedule.path={schedule.path} and schedule.file={schedule.file} both say the order. "
            "Keep one of them."
        )
    if schedule.placement is not None and schedule.file is None:
        raise PlanError(
            f"schedule.placement={schedule.placement} says how to read schedule.file, and there is "
            "none. Try schedule=custom schedule.file=my.csv, or without schedule.placement."
        )
    asked = asked_schedule(config, None if config.dp == "auto" else int(config.dp))
    if schedule.split_backward and asked.schedule.splits_backward:
        raise PlanError(
            f"schedule.split_backward=true: {schedule.name} splits its backwards by itself. Remove "
            "schedule.split_backward."
        )
    if config.costs.name == "uniform":
        uniform_costs(config).check_sizes(asked.placement)
    counts = schedule.layers_per_stage
    _check_units_per_stage(config)
    stages = asked.placement.num_stages
    if counts is not None and len(counts) != stages:
        layers = config.model.layers
        even = [layers // stages + (index < layers % stages) for index in range(stages)]
        raise PlanError(
            f"schedule.layers_per_stage={spell(counts)} has {len(counts)} counts, but there are "
            f"{stages} stages ({schedule.name} on pp={config.pp}). "
            f"Try schedule.layers_per_stage={spell(even)}."
        )


def _check_sums(config: LaunchConfig) -> None:
    if config.overlap.sum_dtype == "bf16" and config.trainer.precision != "bf16-true":
        raise PlanError(
            f"overlap.sum_dtype=bf16 with trainer.precision={config.trainer.precision}: gradients "
            "are summed in 16 bits where weights have 16 bits. Try trainer.precision=bf16-true, or "
            "overlap.sum_dtype=fp32."
        )


def _check_recompute(config: LaunchConfig) -> None:
    asked = recompute_policy(config.recompute)
    if config.loss_over == "batch":
        refuse_own_order(asked.policy)
    if config.compile and config.mode in ("train", "validate"):
        refuse_selective(asked.policy)
    if asked.policy == "layer" and (config.mode == "profile" or config.costs.name == "profiled"):
        raise PlanError(
            "recompute=layer with a profile: it has the times of forwards and of backwards that "
            "run nothing again. Try costs=analytic, or recompute=full."
        )
    if asked.inside and config.mode == "simulate" and config.costs.name == "uniform":
        raise PlanError(
            f"recompute={asked.policy} recomputes inside the layers, of which costs=uniform knows "
            "nothing. Try costs=analytic, or recompute=full."
        )


def _check_unused(config: LaunchConfig) -> None:
    """Keys that the chosen option would ignore: asking for them is a mistake worth naming."""
    _check_model_keys(config.model)
    if config.costs.name != "uniform":
        for entry in keys_of(CostsConfig, "costs."):
            value = value_at(config, entry.path)
            if entry.path in ("costs.name", "costs.transport", *_PROFILED):
                continue
            owner = "analytic" if entry.path == "costs.attention" else "uniform"
            if value != entry.default and config.costs.name != owner:
                raise PlanError(
                    f"{entry.path}={spell(value)} belongs to costs={owner}, but "
                    f"costs={config.costs.name}. Try costs={owner} {entry.path}={spell(value)}."
                )
    elif config.costs.attention != "fused":
        asked = spell(config.costs.attention)
        raise PlanError(
            f"costs.attention={asked} belongs to costs=analytic, but costs=uniform. "
            f"Try costs=analytic costs.attention={asked}."
        )
    _check_profiled(config)
    if config.optimizer.name == CLASS:
        pass  # has been checked with its path
    elif config.optimizer.name == "sgd":
        _refuse_set(config, "optimizer.betas", "optimizer.eps", chosen="optimizer=sgd")
    elif config.optimizer.name != "muon":
        _refuse_set(config, "optimizer.momentum", chosen=f"optimizer={config.optimizer.name}")
    if config.optimizer.name not in ("muon", CLASS):
        for name in ("nesterov", "ns_steps", "adjust_lr", "adamw_lr"):
            default = getattr(OptimizerConfig(), name)
            if getattr(config.optimizer, name) != default:
                asked = f"optimizer.{name}={spell(getattr(config.optimizer, name))}"
                raise PlanError(
                    f"{asked} belongs to optimizer=muon, but optimizer={config.optimizer.name}. "
                    f"Try optimizer=muon {asked}."
                )
    elif config.optimizer.name == "muon":
        _refuse_parts(config)
    if config.data.name == "stdlib":
        _refuse_set(config, "data.path", chosen="data=stdlib", instead=" Try data=text.")
    elif config.data.name not in ("text", "tokens"):
        if not brings_own("data", config.data.name):
            known = ("stdlib", "text", "tokens", CLASS, *installed_names("data"))
            hint = did_you_mean(f"data={name}" for name in nearest(config.data.name, known))
            raise PlanError(
                f"data.name={shorten(config.data.name)} is unknown.{hint} "
                f"Try data={' or data='.join(known)}."
            )
    elif config.data.path is None and config.mode not in ("simulate", "validate"):
        raise PlanError(
            f"data={config.data.name} needs data.path. Try data={config.data.name} "
            "data.path=/path/to/file."
        )
    if config.data.name == "tokens":
        _refuse_set(config, "data.tokenizer", chosen="data=tokens", instead=" Try data=text.")
    _check_tracking(config)
    if config.checkpoint != "auto" and config.mode in ("train", "simulate", "validate", "profile"):
        raise PlanError(
            f"checkpoint={shorten(config.checkpoint)} is read by mode=eval, predict, generate and "
            f"export, not by mode={config.mode}. "
            f"Try trainer.resume={shorten(config.checkpoint)}, or mode=eval."
        )
    if config.mode != "export":
        unused = ("export.path", "export.format")
        _refuse_set(config, *unused, chosen=f"mode={config.mode}", instead=" Try mode=export.")


def _refuse_parts(config: LaunchConfig) -> None:
    """An update of Muon looks at a whole matrix."""
    if config.overlap.name == "zero1":
        raise PlanError(
            "optimizer=muon makes an update of a whole matrix, and overlap=zero1 gives each "
            "replica a part of it. Try overlap=grad_reduce, or optimizer=adamw overlap=zero1."
        )
    if config.tp > 1:
        raise PlanError(
            f"optimizer=muon makes an update of a whole matrix, and tp={config.tp} cuts matrices "
            f"into {config.tp}. Try tp=1 pp={config.pp * config.tp}, or optimizer=adamw."
        )


def _check_tracking(config: LaunchConfig) -> None:
    names, chosen = config.tracking.names, f"tracking={spell(config.tracking.name)}"
    twice = [name for name in names if names.count(name) > 1]
    if twice or not names or ("none" in names and len(names) > 1):
        kept = ",".join(dict.fromkeys(name for name in names if name != "none")) or "csv"
        raise PlanError(
            f"{chosen}: each tracker stands once, and none beside no other. Try tracking=[{kept}]."
        )
    if "wandb" not in names and config.mode != "dashboard":
        _refuse_set(config, "tracking.entity", "tracking.group", "tracking.tags", chosen=chosen)


def _check_profiled(config: LaunchConfig) -> None:
    if config.costs.name != "profiled":
        for path in _PROFILED:
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
        _refuse_set(
            config,
            "profile.file",
            "profile.microbatch_sizes",
            chosen=f"mode={config.mode}",
            instead=" Try mode=profile.",
        )


def _check_trainer(config: LaunchConfig) -> None:
    trainer = config.trainer
    if trainer.max_time is not None and not _MAX_TIME.fullmatch(trainer.max_time):
        raise PlanError(
            f"trainer.max_time={shorten(trainer.max_time)}: expected DD:HH:MM:SS. "
            "Try trainer.max_time='00:01:00:00'."
        )
    if trainer.max_steps < 0 and trainer.max_epochs is None and trainer.max_time is None:
        raise PlanError(
            "trainer.max_steps=-1 without trainer.max_epochs or trainer.max_time never ends. "
            "Try trainer.max_epochs=1."
        )
    if trainer.max_steps == 0:
        raise PlanError("trainer.max_steps=0 trains nothing. Try mode=validate.")
    if trainer.max_restarts and config.cluster.name != "local":
        does = {
            "slurm": "a failed job is submitted again with sbatch, and goes on where it was",
            "torchrun": "torchrun has --max-restarts, with trainer.resume=auto",
        }[config.cluster.name]
        raise PlanError(
            f"trainer.max_restarts={trainer.max_restarts} starts the processes of cluster=local "
            f"again, but cluster={config.cluster.name}: {does}. Try trainer.max_restarts=0."
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
    betas = config.optimizer.betas
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        raise PlanError(
            f"optimizer.betas={spell(betas)}: both must be at least 0 and below 1. "
            "Try optimizer.betas=[0.9,0.95]."
        )


# Whose predictions and reports read a peak; the others run whatever the hardware file says.
_WITH_PEAK = ("train", "simulate", "plan", "validate", "profile")


def _check_peak(config: LaunchConfig) -> None:
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


def _refuse_set(config: LaunchConfig, *paths: str, chosen: str, instead: str = "") -> None:
    for path in paths:
        value = value_at(config, path)
        if value not in (None, ()):
            raise PlanError(
                f"{path}={spell(value)} has no meaning with {chosen}. "
                f"{instead.strip() or f'Try without {path}.'}"
            )


# Which ``model.*`` keys go with which kind of model; the others would be ignored.

HUGGING_FACE = "hf"
_BOTH = ("name", "sequence", "args")
_HUGGING_FACE_ONLY = ("path", "pretrained", "layers_path")
_EXPERTS_ONLY = (
    "experts_per_token", "expert_ffn", "shared_experts", "first_dense_layers", "expert_every",
    "expert_imbalance", "router", "router_normalized", "router_scale", "aux_loss",
    "aux_loss_over", "z_loss", "bias_update_rate",
)  # fmt: skip


def _check_model_keys(model: ModelConfig) -> None:
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


# Rules of ``mode=plan`` and ``plan=auto`` that need no model.

# What ``planner.explain`` may fix.
EXPLAINED = (
    "tp", "pp", "dp", "num_microbatches", "microbatch_size", "schedule", "stages_per_rank",
    "group", "overlap", "recompute", "ep",
)  # fmt: skip
_AUTO_MODES = ("train", "simulate", "validate")


def _leaves_open(config: LaunchConfig) -> bool:
    """Whether degrees and schedule are still to be chosen, so that they need not fit together."""
    return config.mode == "plan" or config.plan == "auto"


def _check_planner(config: LaunchConfig) -> None:
    """Refuses keys that would be ignored, and entries that say nothing."""
    if config.plan == "auto" and config.mode not in (*_AUTO_MODES, "plan"):
        raise PlanError(
            f"plan=auto chooses how to train; mode={config.mode} runs a checkpoint on degrees of "
            "your own. Try plan=manual, or mode=plan."
        )
    if not _leaves_open(config):
        for entry in keys_of(PlannerConfig, "planner."):
            value = getattr(config.planner, entry.path.removeprefix("planner."))
            if value != entry.default:
                raise PlanError(
                    f"{entry.path}={spell(value)} has no meaning without a planner. "
                    "Try plan=auto, or mode=plan."
                )
    elif config.loss_over == "batch":
        raise PlanError(
            "loss_over=batch puts all forwards before the first backward, which the planner's "
            "orders do not. Try plan=manual with a schedule of your own, or loss_over=microbatch."
        )
    planner = config.planner
    if planner.export is not None and config.mode != "plan":
        raise PlanError(
            f"planner.export={planner.export} writes what mode=plan has found, and mode="
            f"{config.mode} writes no plans. Try mode=plan."
        )
    if planner.partition != "ilp" and planner.balance_ratio != PlannerConfig().balance_ratio:
        raise PlanError(
            f"planner.balance_ratio={planner.balance_ratio:g} belongs to planner.partition=ilp. "
            f"Try planner.partition=ilp planner.balance_ratio={planner.balance_ratio:g}."
        )
    if planner.explain and config.mode != "plan":
        raise PlanError(
            f"planner.explain={spell(planner.explain)} is an answer of mode=plan. Try mode=plan."
        )
    if planner.explain and planner.maximize != "throughput":
        raise PlanError(
            f"planner.explain={spell(planner.explain)} shows one layout of a search over many, and "
            f"planner.maximize={planner.maximize} keeps to one. Try without planner.explain."
        )
    for word in planner.explain:
        name, _, value = word.replace(":", "=", 1).partition("=")
        if name not in EXPLAINED or not value:
            raise PlanError(
                f"planner.explain={shorten(list(planner.explain))}: {shorten(word)} fixes nothing "
                f"that is planned. Names: {', '.join(EXPLAINED)}. Try planner.explain=[tp=4,pp=8]."
            )


def _check_units_per_stage(config: LaunchConfig) -> None:
    schedule = config.schedule
    if schedule.units_per_stage is not None and schedule.layers_per_stage is not None:
        raise PlanError(
            f"schedule.units_per_stage={spell(schedule.units_per_stage)} and "
            f"schedule.layers_per_stage={spell(schedule.layers_per_stage)} both cut the model. "
            "Keep one of them."
        )
