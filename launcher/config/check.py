"""Rules between keys that need no world size, so that a wrong request ends before anything starts.

Ranges come from the declarations themselves. What depends on the number of processes is decided
where that number is known.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace

from launcher.config.check_cluster import check_cluster
from launcher.config.check_code import check_code
from launcher.config.check_training import (
    PROFILED,
    check_model_keys,
    check_peak,
    check_profiled,
    check_tracking,
    check_trainer,
    refuse_set,
)
from launcher.config.decode import CLASS, brings_own, did_you_mean, installed_names, nearest
from launcher.config.derived import asked_schedule, own_order, transformer_shape, uniform_costs
from launcher.config.key import (
    Key,
    describe,
    keys_of,
    require_name,
    shorten,
    spell,
    typed,
    value_at,
)
from launcher.config.launch import LaunchConfig
from launcher.config.pipeline import CheckConfig, CostsConfig, PlannerConfig, recompute_policy
from launcher.config.workload import OptimizerConfig
from launcher.workloads.model_share import check_ep, check_expert_tp
from launcher.workloads.transformer_shape import TransformerShape
from launcher.workloads.transformer_share import check_transformer_tp
from strategies.errors import PlanError

_MOST = 2**53  # beyond it JSON and floats lose digits
_MAY_BE_EMPTY = ("generate.prompt", "experiment_name")
_OF_FILES = (
    "data.path", "data.tokenizer", "model.path", "costs.file", "costs.refine", "schedule.file",
    "checkpoint", "trainer.resume", "profile.file", "profile.hardware", "export.path", "sweep.dir",
    "sweep.resume", "trace",
)  # fmt: skip
_OF_CODE = ("schedule.path", "optimizer.path")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NULL_IS_OFF = re.compile(r"null = (none|no limit|all)\b")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check(config: LaunchConfig) -> None:
    """Raises on the first rule that the configuration breaks."""
    for entry in keys_of(LaunchConfig):
        value = value_at(config, entry.path)
        check_range(entry, value)
        _check_text(entry, value)
    _check_names(config)
    check_code(config)
    if config.mode != "export":
        unused = ("export.path", "export.format")
        refuse_set(config, *unused, chosen=f"mode={config.mode}", instead=" Try mode=export.")
    if config.mode == "check":
        _check_order(config)
        _check_planner(config)
        _check_beside_order(replace(config, mode="simulate", check=CheckConfig()))
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
    _check_beside_order(config)
    if not _leaves_open(config):
        _check_schedule(config)


def _check_beside_order(config: LaunchConfig) -> None:
    """All that is the same whatever ranks and stages an order has."""
    _check_sums(config)
    _check_recompute(config)
    shape = transformer_shape(config.model, vocab=256)  # Its checks raise; the data decide later.
    _check_sharing(config, shape)
    _check_unused(config)
    check_trainer(config)
    check_peak(config)
    check_cluster(config)


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) and abs(bound) < 1e10 else f"{bound:g}"


def check_range(entry: Key, value: object) -> None:
    """Refuses numbers that a key cannot have.

    Raises:
        PlanError: With the range, and the number in the key's own unit where it has another one.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if entry.low is not None and number < entry.low:
            rule = f"at least {entry.low:g}"
        elif entry.above is not None and number <= entry.above:
            rule = f"more than {entry.above:g}"
        elif entry.high is not None and number > entry.high:
            rule = f"at most {_number(entry.high)}"
        elif abs(number) > _MOST and isinstance(number, int):
            rule = f"at most {_MOST}"
        else:
            continue
        said = f"{entry.path}={spell(value)}: expected {describe(entry.hint)}, {rule}."
        if entry.unit is not None and number > 0:
            name, size = entry.unit
            meant = number * size
            inside = entry.low is None or meant >= entry.low
            if inside and (entry.high is None or meant <= entry.high):
                raise PlanError(said, fix=f"If these are {name}, try {entry.path}={meant:g}.")
        if number in (0, -1) and _NULL_IS_OFF.search(entry.help_text):
            raise PlanError(said, fix=f"For none at all, try {entry.path}=null.")
        raise PlanError(f"{said} Try {entry.path}={spell(entry.example)}.")


def _check_text(entry: Key, value: object) -> None:
    """A text that says nothing, or an address where files of this machine are meant."""
    example = "null" if entry.example is None else spell(entry.example)
    if isinstance(value, str) and not value.strip() and entry.path not in _MAY_BE_EMPTY:
        raise PlanError(f"{entry.path}={spell(value)} is empty. Try {entry.path}={example}.")
    for text in value if isinstance(value, tuple) else (value,):
        if not isinstance(text, str) or entry.path not in (*_OF_FILES, *_OF_CODE):
            continue
        require_name(f"{entry.path}=", text)
        if entry.path in _OF_FILES and _ADDRESS.match(text):
            raise PlanError(
                f"{entry.path}={shorten(text)} is an address. Files are read where they lie, and "
                f"nothing is downloaded. Try {entry.path}=/path/to/it."
            )


def _check_names(config: LaunchConfig) -> None:
    # The name becomes part of paths; letters only, so that it cannot leave the output folder.
    if not _NAME.fullmatch(config.experiment_name):
        raise PlanError(
            f"experiment_name={shorten(config.experiment_name)}: expected up to 100 letters, "
            "digits, '.', '_' or '-', beginning with a letter or digit. Try experiment_name=my_run."
        )


def _check_sharing(config: LaunchConfig, shape: TransformerShape) -> None:
    # With uniform costs the model plays no part; what a package's model allows, the ranks know, and
    # of a folder's model resolve().
    uniform = config.mode == "simulate" and config.costs.name == "uniform"
    if not uniform and config.model.name != "hf" and not brings_own("model", config.model.name):
        check_transformer_tp(shape, config.tp, sequence_parallel=config.sequence_parallel)
        check_ep(shape, config.ep)
    if config.expert_tp:
        _check_expert_tp(config, shape)


def _check_expert_tp(config: LaunchConfig, shape: TransformerShape) -> None:
    """What cutting each expert's matrices asks of a model, and where it is not known."""
    if config.mode == "profile" or config.costs.name == "profiled":
        raise PlanError(
            "expert_tp=true with measured units: a profile measures whole experts. Try "
            "expert_tp=false, or costs=analytic."
        )
    if config.model.name == "hf":
        raise PlanError(
            "expert_tp=true with model=hf: families of transformers have an expert's gates and its "
            "inner values in one matrix, in an order of their own, so a part of it is not the same "
            f"part of both. Try expert_tp=false ep={config.tp}, which spreads whole experts."
        )
    if not brings_own("model", config.model.name):  # Else its ranks know.
        check_expert_tp(shape, config.tp)


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
    other = {"plan=auto": config.plan == "auto", "schedule.path": schedule.path is not None}
    for given, asked in other.items():
        if asked:
            raise PlanError(
                f"{given}: mode=check looks at the order of schedule.file. Try without {given}."
            )


def _check_trace(config: LaunchConfig) -> None:
    """``mode=explain`` takes everything from the traces."""
    if not config.trace:
        raise PlanError(
            "mode=explain needs the traces of a pipeline's ranks. "
            "Try trace=[rank0.json.gz,rank1.json.gz]."
        )
    asked = {
        **{
            f"{name}={getattr(config, name)}": getattr(config, name) != 1
            for name in ("pp", "tp", "ep", "dp")
        },
        f"num_microbatches={config.num_microbatches}": config.num_microbatches != "auto",
        f"schedule={config.schedule.name}": config.schedule.name != LaunchConfig().schedule.name,
        f"schedule.file={config.schedule.file}": config.schedule.file is not None,
        f"check.flags={config.check.flags}": config.check.flags is not None,
    }
    for given, wrong in asked.items():
        if wrong:
            raise PlanError(f"{given}: mode=explain finds it in the traces. Try without {given}.")


def _check_schedule(config: LaunchConfig) -> None:
    schedule = config.schedule
    if schedule.path is not None and schedule.file is not None:
        raise PlanError(
            f"schedule.path={schedule.path} and schedule.file={schedule.file} both say the order.",
            fix="Keep one of them.",
        )
    if schedule.placement is not None and schedule.file is None:
        raise PlanError(
            f"schedule.placement={schedule.placement} says how to read schedule.file, and there is "
            "none. Try schedule=custom schedule.file=my.csv, or without schedule.placement."
        )
    asked = asked_schedule(config, None if config.dp == "auto" else int(config.dp))
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
    check_model_keys(config.model)
    if config.costs.name != "uniform":
        for entry in keys_of(CostsConfig, "costs."):
            value = value_at(config, entry.path)
            if entry.path in ("costs.name", "costs.transport", *PROFILED):
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
    check_profiled(config)
    if config.optimizer.name == CLASS:
        pass  # has been checked with its path
    elif config.optimizer.name == "sgd":
        refuse_set(config, "optimizer.betas", "optimizer.eps", chosen="optimizer=sgd")
    elif config.optimizer.name != "muon":
        refuse_set(config, "optimizer.momentum", chosen=f"optimizer={config.optimizer.name}")
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
        refuse_set(config, "data.path", chosen="data=stdlib", instead=" Try data=text.")
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
        refuse_set(config, "data.tokenizer", chosen="data=tokens", instead=" Try data=text.")
    check_tracking(config)
    if config.checkpoint != "auto" and config.mode in ("train", "simulate", "validate", "profile"):
        raise PlanError(
            f"checkpoint={shorten(config.checkpoint)} is read by mode=eval, predict, generate and "
            f"export, not by mode={config.mode}. "
            f"Try {typed('trainer.resume', config.checkpoint)}, or mode=eval."
        )


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


# Rules of ``mode=plan`` and ``plan=auto`` that need no model.

# What ``planner.explain`` may fix.
EXPLAINED = (
    "tp", "pp", "dp", "num_microbatches", "microbatch_size", "schedule", "stages_per_rank",
    "group", "overlap", "recompute", "ep",
)  # fmt: skip
# And as plans print it.
_PRINTED = ("data.microbatch_size", "schedule.stages_per_rank", "schedule.group")
PRINTED = {key: key.partition(".")[2] for key in _PRINTED}
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
    elif config.loss_over == "tokens" and config.planner.asynchronous:
        reason = "loss_over=tokens needs a flush, and planner.asynchronous=true plans without one."
        raise PlanError(reason, fix="Try loss_over=auto.")
    planner = config.planner
    if planner.export is not None and config.mode != "plan":
        raise PlanError(
            f"planner.export={planner.export} writes what mode=plan has found, and mode="
            f"{config.mode} writes no plans. Try mode=plan."
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
        if PRINTED.get(name, name) not in EXPLAINED or not value:
            raise PlanError(
                f"planner.explain={shorten(list(planner.explain))}: {shorten(word)} fixes nothing "
                f"that is planned. Names: {', '.join(EXPLAINED)}. Try planner.explain=[tp=4,pp=8]."
            )


def _check_units_per_stage(config: LaunchConfig) -> None:
    schedule = config.schedule
    if schedule.units_per_stage is not None and schedule.layers_per_stage is not None:
        raise PlanError(
            f"schedule.units_per_stage={spell(schedule.units_per_stage)} and "
            f"schedule.layers_per_stage={spell(schedule.layers_per_stage)} both cut the model.",
            fix="Keep one of them.",
        )
