"""Plain nested values to a typed ``LaunchConfig`` and back, exactly.

The one door through which configuration enters: Hydra's result goes through it, and so does the
JSON that worker processes read. Unknown keys cannot pass, however they were written (``+key=``, a
user's YAML), and a value is never bent into another type except where nothing is lost (4 for 4.0).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from launcher.config.key import (
    Args,
    describe,
    is_free,
    keys_of,
    nodes_of,
    shorten,
    spell,
    type_hints,
)
from launcher.config.launch import LaunchConfig
from strategies.errors import PlanError

_MISMATCH: object = object()
Schema = TypeVar("Schema")


class KeyPlaceError(PlanError):
    """An unknown key or a value of the wrong type, with the place in the tree.

    Attributes:
        path: Names from the top of the decoded tree to the key.
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = tuple(path.split("."))


def from_dict(values: Mapping[str, Any]) -> LaunchConfig:
    """Types a nested mapping; missing keys take their defaults.

    Raises:
        PlanError: A key that does not exist, or a value of another type.
    """
    return decode(values, LaunchConfig)


def dump(config: LaunchConfig) -> dict[str, Any]:
    """The configuration as JSON-ready values; ``from_dict(dump(c)) == c``."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def decode(values: Mapping[str, Any], schema: type[Schema], prefix: str = "") -> Schema:
    """Types the mapping of one node.

    ``prefix``: dotted path of the node with a trailing dot, empty at the top.

    Raises:
        PlanError: As ``from_dict``.
    """
    hints = type_hints(schema)
    for name in values:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", nested=isinstance(values[name], Mapping))
    nodes = nodes_of(schema)
    leaves = {entry.path: entry for entry in keys_of(schema, prefix)}
    typed: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name in nodes:
            if not isinstance(value, Mapping):
                first = keys_of(nodes[name], f"{path}.")[0]
                raise KeyPlaceError(
                    f"{path}={shorten(value)}: {path} holds keys, it is not a value itself. "
                    f"Try {first.path}={spell(first.example)}.",
                    path,
                )
            typed[name] = decode(value, nodes[name], f"{path}.")
            continue
        typed[name] = _typed_value(value, hints[name], path, leaves[path].example)
    return schema(**typed)


def _typed_value(value: object, hint: object, path: str, example: object) -> object:
    typed = _convert(value, hint)
    if typed is not _MISMATCH:
        return typed
    words = [word for word in _words(hint) if isinstance(word, str)]
    near = nearest(value, words) if isinstance(value, str) else ()
    hinted = _MEANT_VALUES.get(path, {}).get(str(value)) or (near[0] if near else spell(example))
    raise KeyPlaceError(
        f"{path}={shorten(value)}: expected {describe(hint)}. Try {path}={hinted}.", path
    )


def unknown_key(path: str, *, nested: bool = False) -> KeyPlaceError:
    assert not is_free(path, LaunchConfig)
    known = [entry.path for entry in keys_of(LaunchConfig)]
    candidates = [*known, *nodes_of(LaunchConfig), "experiment"]
    if nested:
        candidates = list(nodes_of(LaunchConfig))
    hint = _meant(path) or did_you_mean(nearest_keys(path, candidates))
    return KeyPlaceError(f"{shorten(path)} is not a key.{hint or ' --help lists all keys.'}", path)


def _convert(value: object, hint: object) -> object:
    origin = get_origin(hint)
    if isinstance(hint, UnionType) or origin is Union:
        # An exact type goes first: 1 stays a count and 1.0 a share in `int | float`.
        options = sorted(get_args(hint), key=lambda option: type(value) is not option)
        for option in options:
            typed = _convert(value, option)
            if typed is not _MISMATCH:
                return typed
        return _MISMATCH
    if origin is Literal:
        return value if isinstance(value, str) and value in get_args(hint) else _MISMATCH
    if origin is tuple:
        return _convert_list(value, get_args(hint))
    if hint is Args:
        return Args(value) if isinstance(value, Mapping) and _is_plain(value) else _MISMATCH
    if hint is NoneType:
        return None if value is None else _MISMATCH
    if hint is bool:
        return value if isinstance(value, bool) else _MISMATCH
    if isinstance(value, bool):
        return _MISMATCH
    if hint is int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)  # 1e6 is how people write a million.
        return value if isinstance(value, int) else _MISMATCH
    if hint is float:
        return _convert_float(value)
    if hint is str:
        if isinstance(value, int):
            return str(value)  # experiment_name=2024
        return value if isinstance(value, str) else _MISMATCH
    raise AssertionError(f"no conversion for {hint}")


def _convert_float(value: object) -> object:
    if not isinstance(value, int | float):
        return _MISMATCH
    try:
        number = float(value)
    except OverflowError:
        return _MISMATCH
    return number if math.isfinite(number) else _MISMATCH


def _convert_list(value: object, arguments: tuple[Any, ...]) -> object:
    if not isinstance(value, list | tuple):
        return _MISMATCH
    if arguments[1] is not Ellipsis and len(value) != len(arguments):
        return _MISMATCH
    typed = tuple(_convert(item, arguments[0]) for item in value)
    return _MISMATCH if any(item is _MISMATCH for item in typed) else typed


def _is_plain(value: object) -> bool:
    """Whether JSON can say it."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(child) for name, child in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _words(hint: object) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return tuple(word for option in get_args(hint) for word in _words(option))
    return ()


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.plain() if isinstance(value, Args) else value


# What somebody probably meant: the nearest valid keys and values.


def nearest(word: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The closest candidates, best first; empty where nothing is close."""
    listed = list(candidates)
    same = [one for one in listed if one.lower() == word.lower()]
    return tuple(same or get_close_matches(word[:200], listed, n=limit, cutoff=0.6))


def nearest_keys(word: str, candidates: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Like ``nearest`` for dotted keys: a wrong part may sit before or behind the dot.

    ``modle.hidden`` and plain ``hidden`` both lead to ``model.hidden``.
    """
    word = word[:200]
    scored = []
    for candidate in candidates:
        score = _ratio(word, candidate)
        head, _, leaf = candidate.rpartition(".")
        word_head, _, word_leaf = word.rpartition(".")
        if word_head:
            # Each part alone, so that a short wrong leaf is not lost beside a long right head.
            score = max(score, (_ratio(word_head, head) + _ratio(word_leaf, leaf)) / 2)
        elif head:
            score = max(score, 0.95 * _ratio(word, leaf))
        scored.append((score, candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    best = scored[0][0] if scored else 0.0
    return tuple(name for score, name in scored[:limit] if score >= max(0.65, best - 0.15))


# What is called otherwise elsewhere: Lightning, torchrun, Megatron, Hugging Face, SLURM.
_PROCESSES = "pp=, dp= and tp=, whose product is the number of processes"
_SBATCH = "cluster.extra=['--{name}=VALUE'], which goes to sbatch as it is"
_MEANT = {
    "devices gpus num_gpus ngpus num_devices nproc nproc_per_node world_size num_processes ntasks":
        _PROCESSES,
    "strategy accelerator_strategy parallelism": "schedule=, pp=, dp=, tp= and overlap=zero1",
    "learning_rate base_lr max_lr": "optimizer.lr=3e-4",
    "min_learning_rate min_lr": "optimizer.min_lr_ratio=0.1",
    "warmup warmup_iters lr_warmup_steps": "optimizer.warmup_steps=100",
    "num_nodes nnodes": "cluster.nodes=2",
    "reservation nodelist exclude dependency nice": _SBATCH,
    "cpus_per_task cpus ncpus": "cluster.cpus_per_task=8",
    "modules module_load prologue prolog pre_commands": "cluster.setup=['module load cuda']",
    "container container_image image singularity apptainer pyxis docker":
        "cluster.container.image=IMAGE",
    "container_mounts mounts binds": "cluster.container.mounts=['/data:/data:ro']",
    "array array_parallelism max_concurrent": "cluster.throttle=4",
    "time_limit walltime": "cluster.time=02:00:00",
    "batch_size train_batch_size per_device_train_batch_size":
        "data.global_batch_size=64 (sequences per step) or data.microbatch_size=2",
    "micro_batch_size": "data.microbatch_size=2",
    "gradient_accumulation_steps grad_accum accumulation_steps":
        "trainer.accumulate_grad_batches=2, or num_microbatches=8 for more microbatches per step",
    "seed_everything random_seed": "seed=1",
    "logger loggers wandb tensorboard report_to": "tracking=csv, wandb, tensorboard or none",
    "ckpt_path resume_from_checkpoint resume_from": "trainer.resume=auto, or a checkpoint's folder",
    "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size": "pp=4",
    "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size": "tp=2",
    "expert_parallel expert_parallel_size expert_model_parallel_size ep_size": "ep=2",
    "data_parallel data_parallel_size dp_size replicas": "dp=2",
    "gradient_checkpointing activation_checkpointing activation_checkpoint": "recompute=full",
    "zero zero_stage fsdp deepspeed": "overlap=zero1",
    "num_layers n_layer n_layers depth": "model.layers=8",
    "hidden_size d_model n_embd hidden_dim embed_dim dim": "model.hidden=256",
    "num_heads n_head n_heads num_attention_heads": "model.heads=8",
    "seq_len seq_length sequence_length block_size context_length max_seq_len":
        "model.sequence=1024",
    "steps max_iters train_iters num_steps": "trainer.max_steps=1000",
    "epochs num_epochs num_train_epochs": "trainer.max_epochs=3",
    "grad_clip clip_grad max_grad_norm clip": "trainer.gradient_clip_val=1.0",
    "amp fp16 bf16 dtype mixed_precision": "trainer.precision=bf16-mixed",
    "output_dir save_dir log_dir run_dir": "hydra.run.dir=FOLDER",
    "workers": "data.num_workers=2",
    "torch_compile": "compile=true",
    "callbacks callback": "callbacks.stop.path=lightning.pytorch.callbacks:EarlyStopping "
        "callbacks.stop.args.monitor=val_loss",
}  # fmt: skip
_MEANT_VALUES = {
    # Lightning's own short names, and what others call the same.
    "mode": {
        "fit": "train", "training": "train", "test": "eval", "evaluate": "eval", "val": "eval",
        "sample": "generate", "infer": "predict", "sim": "simulate", "check": "validate",
    },
    "compile": {"yes": "true", "on": "true", "1": "true"},
    "trainer.precision": {
        "bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true",
        "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true", "bfloat16": "bf16-mixed",
    },
}  # fmt: skip


def _meant(path: str) -> str:
    """`` Try ...`` for a key that others have; empty for one that nobody has."""
    name = path.rpartition(".")[2].replace("-", "_")
    for names, ours in _MEANT.items():
        if name in names.split():
            return f" Try {ours.format(name=name)}."
    return ""


def did_you_mean(matches: Iterable[str]) -> str:
    """`` Did you mean a or b?``, or nothing."""
    listed = " or ".join(matches)
    return f" Did you mean {listed}?" if listed else ""


def _ratio(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()


# Names that other installed distributions offer; nothing of theirs is imported here.

# Option on the command line -> entry point group.
ENTRY_POINTS = {
    "model": "foldpipe.models",
    "data": "foldpipe.data",
    "schedule": "foldpipe.schedules",
}


# ``model=class`` and the like: code of the user's own, by the path that he types.
CLASS = "class"


def brings_own(option: str, name: str) -> bool:
    """Whether what ``model=`` or ``data=`` names is code of the user's own, or of a package."""
    return name == CLASS or name in installed_names(option)


def installed_names(option: str) -> tuple[str, ...]:
    """Names for ``model=``, ``data=`` or ``schedule=`` beyond our own, sorted."""
    return _names_on(ENTRY_POINTS[option], tuple(sys.path))


@functools.cache
def _names_on(group: str, _path: tuple[str, ...]) -> tuple[str, ...]:
    # Every installed distribution is looked at, which takes as long as reading all of conf/.
    return tuple(sorted({point.name for point in entry_points(group=group)}))
