"""What a rank does: builds Trainer, model and data from the resolved configuration, and runs them.

The launcher's only module that brings Lightning's Trainer and the workloads together.
"""

from __future__ import annotations

import json
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from launcher.checkpoints import check_data
from launcher.config import dump
from launcher.config.checkpoint_keys import RECORD, kept_keys, saved_keys
from launcher.config.decode import brings_own
from launcher.processes.local import wait_for_outcome, write_outcome
from launcher.processes.preempted import PreemptedError, StopRequest, installed_request
from launcher.processes.task import resolve_task
from launcher.processes.watchdog import own_heartbeat
from launcher.rank.callbacks import KeepSignal, MetricsFile, Progress, as_lost_loader, pipeline
from launcher.rank.checkpoint_callbacks import (
    DueValidation,
    LastCheckpoint,
    RegularCheckpoints,
    StopWhenAsked,
)
from launcher.rank.own_parts import build_own_callbacks, build_own_data, build_own_model
from launcher.rank.trackers import build_loggers, track
from launcher.report.predicted import ideal_step_s
from launcher.resolve import Run, text_source
from launcher.workloads.data.identity import data_identity
from launcher.workloads.data.module import TextDataModule
from launcher.workloads.hf.counterpart import export_format, export_target
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.model_share import described
from launcher.workloads.registry import MODELS, load
from strategies.analysis.timeline import Timeline
from strategies.errors import ModelError
from strategies.raised import raised_by
from strategies.runtime.lightning.checkpoints.rank_folder import load_state_dict
from strategies.runtime.lightning.checkpoints.stock_file import export_file
from strategies.runtime.lightning.strategy import PipelineStrategy
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.step.activation_bytes import MemoryUse


def run(task: dict[str, Any], run_dir: Path) -> None:
    """Runs one rank of a task.

    Args:
        task: As ``resolved.json`` has it, see ``launcher.processes.task``.
        run_dir: The run's folder; rank 0 leaves ``outcome.json`` there.

    Raises:
        PreemptedError: A signal asked for the end; the checkpoint is committed.
    """
    resolved = resolve_task(task)
    os.umask(resolved.config.output.umask)
    torch.set_float32_matmul_precision(resolved.config.trainer.float32_matmul_precision)
    heartbeat = own_heartbeat(os.environ)
    heartbeat.tell(str(run_dir), watch_s=resolved.config.trainer.watchdog_s)
    _quiet()
    jobs: dict[str, Callable[[Run, Path, str | None], dict[str, Any]]] = {
        "train": train,
        "eval": _evaluate,
        "predict": _predict,
        "generate": _generate,
        "export": _export,
        "profile": _profile,
    }
    outcome = jobs[resolved.config.mode](resolved, run_dir, task["checkpoint"])
    stopped_by = outcome.pop("stopped_by", None)
    if os.environ["RANK"] == "0":
        write_outcome(run_dir, outcome, stopped_by=stopped_by)
    elif stopped_by is not None and resolved.config.cluster.name == "slurm":
        # srun ends the others with the first that leaves, and rank 0 may have trackers to finish.
        wait_for_outcome(run_dir)
    if stopped_by is not None:
        raise PreemptedError(f"stopped by {stopped_by}", {})


def _quiet() -> None:
    import logging

    # The parent shows progress; a rank's log keeps what matters.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*num_workers.*", module="lightning")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists.*")


def _strategy(run: Run) -> PipelineStrategy:
    config = run.config
    return PipelineStrategy(
        # How large the stages of a user's own model are, the ranks find out.
        plan=replace(run.plan, buckets=None) if run.own_model else run.plan,
        options=run.options,
        configuration=_flat(dump(config)),
        heartbeat=own_heartbeat(os.environ),
        metadata={
            "model": described(run.shape) if run.describes_model else config.model.name,
            "config": kept_keys(config),
            "experiment_name": config.experiment_name,
            **({} if run.own_data or config.mode != "train" else _data(run)),
        },
    )


def _data(run: Run) -> dict[str, Any]:
    """Which data this training sees, for the manifests of its checkpoints; rank 0 writes them."""
    return {"data": data_identity(text_source(run.config))} if os.environ["RANK"] == "0" else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _trainer(run: Run, run_dir: Path, callbacks: list[Callback], **more: object) -> pl.Trainer:
    given = run.config.trainer
    gpus = torch.cuda.device_count()
    on_gpu = given.accelerator == "gpu" or (given.accelerator == "auto" and gpus > 0)
    logger: Any = build_loggers(run, run_dir) if run.config.mode == "train" else False
    arguments: dict[str, Any] = dict(more)
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=min(gpus, run.world_size // run.config.cluster.nodes) if on_gpu else "auto",
        num_nodes=run.config.cluster.nodes,
        strategy=_strategy(run),
        plugins=[_Places(run.world_size // run.config.cluster.nodes)],
        callbacks=[KeepSignal(), *callbacks],
        logger=logger or False,
        default_root_dir=run_dir,
        precision=given.precision,
        limit_train_batches=given.limit_train_batches,
        limit_val_batches=given.limit_val_batches,
        limit_test_batches=given.limit_test_batches,
        limit_predict_batches=given.limit_predict_batches,
        deterministic=given.deterministic,
        detect_anomaly=given.detect_anomaly,
        enable_model_summary=given.enable_model_summary,
        enable_progress_bar=False,
        **arguments,
    )


class _Places(LightningEnvironment):
    """Where ranks are, by their numbers alone, whatever NODE_RANK and GROUP_RANK say."""

    def __init__(self, per_node: int) -> None:
        super().__init__()
        self._per_node = per_node

    def node_rank(self) -> int:
        return int(os.environ["RANK"]) // self._per_node


def build_model(run: Run) -> pl.LightningModule:
    """The run's model; the built-in ones without weights, which each rank then makes."""
    if brings_own("model", run.config.model.name):
        return build_own_model(run)
    if isinstance(run.shape, HfShape):
        built = load(MODELS, run.config.model.name)(run.config)
        return cast(pl.LightningModule, built)
    # On the meta device: each rank then makes the weights of its own units only.
    with torch.device("meta"):
        return LanguageModel(run.shape, optimizer=run.config.optimizer, seed=run.config.seed)


def build_data(run: Run) -> pl.LightningDataModule:
    config = run.config
    if run.own_data:
        return build_own_data(run)
    return TextDataModule(
        text_source(config),
        sequence=run.shape.sequence,
        batch_size=run.batch_size,
        seed=config.seed,
        val_fraction=config.data.val_fraction,
        num_workers=config.data.num_workers,
        # A figure must not depend on the batch size: the rest of the text counts, too.
        full_batches=config.mode == "train",
        vocab=run.shape.vocab,
    )


_OF_LOADERS = (RuntimeError, OSError, EOFError)


def train(
    run: Run, run_dir: Path, checkpoint: str | None, more: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Trains; ``more`` callbacks come last. Returns what rank 0 reports."""
    config, given = run.config, run.config.trainer
    pl.seed_everything(config.seed, workers=True, verbose=False)
    folder = run_dir / "checkpoints"
    rank = int(os.environ["RANK"])
    rows = run.batch_size * run.dp * given.accumulate_grad_batches
    # Only the built-in text has a known number of tokens per row.
    tokens = None if run.own_data else rows * run.shape.sequence
    if checkpoint is not None:
        check_data(Path(checkpoint), run)  # A job that is requeued has no parent that does.
    model = build_model(run)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ideal = ideal_step_s(run)
    file = MetricsFile(run_dir / "metrics.csv") if rank == 0 else None
    progress = Progress(file, tokens, ideal)
    callbacks: list[Callback] = [progress, DueValidation()]
    regular = RegularCheckpoints(
        folder,
        every=given.checkpoint_every_n_steps,
        keep_last=given.keep_last,
        keep_best=given.keep_best,
        monitor=given.monitor,
        mode=given.monitor_mode,
    )
    callbacks.append(regular)
    last = LastCheckpoint(folder)
    if given.save_last:
        callbacks.append(last)
    closing = _Closing(run)
    request = installed_request() or StopRequest()
    minutes = given.checkpoint_every_minutes
    stopping = StopWhenAsked(
        folder,
        request,
        timeout_s=run.options.timeout_s,
        every_s=None if minutes is None else 60.0 * minutes,
        regular=regular,
    )
    callbacks += [closing, stopping]
    data = build_data(run)
    callbacks += [*build_own_callbacks(run), *more]
    trainer = _trainer(
        run,
        run_dir,
        callbacks,
        max_steps=given.max_steps,
        max_epochs=-1 if given.max_epochs is None else given.max_epochs,
        max_time=given.max_time,
        accumulate_grad_batches=given.accumulate_grad_batches,
        gradient_clip_val=given.gradient_clip_val,
        gradient_clip_algorithm=given.gradient_clip_algorithm,
        val_check_interval=given.val_check_interval,
        check_val_every_n_epoch=given.check_val_every_n_epoch,
        num_sanity_val_steps=given.num_sanity_val_steps,
        log_every_n_steps=given.log_every_n_steps,
        enable_checkpointing=True,  # StopWhenAsked may have to
    )
    tracked = track(run, trainer.loggers, progress, folder)
    tracked.start()
    try:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    except BaseException as error:
        tracked.fail(trainer.global_step)
        # Of another rank's loader that rank speaks.
        own = isinstance(error, _OF_LOADERS) and raised_by(error) is None
        lost = as_lost_loader(error, trainer) if own else None
        if lost is None:
            raise
        raise lost from error
    ran, shown = pipeline(trainer).plan, closing.timeline
    progress.note_undeleted(trainer)
    # The first step pays for connections and allocations.
    times = progress.step_times[1:] or progress.step_times
    step_time = statistics.median(times) if times else None
    outcome = {
        "world_size": run.world_size,
        "num_parameters": num_parameters,
        "steps": trainer.global_step,
        "skipped_steps": len(pipeline(trainer).skipped_steps),
        "flush_repairs": pipeline(trainer).flush_repairs,
        "loss_first": progress.losses[0] if progress.losses else None,
        "loss_last": progress.losses[-1] if progress.losses else None,
        "val_loss": progress.val_loss,
        "step_time_s": step_time,
        "tokens_per_s": tokens / step_time if step_time and tokens else None,
        "mfu": ideal / step_time if step_time and ideal else None,
        "peak_memory_bytes": closing.peaks,
        "measured_memory_kind": closing.memory_kind,
        "measured_norm_sync_s": closing.norm_sync_s,
        "checkpoint": str(written) if (written := last.path or stopping.path) else None,
        "stopped_by": stopping.stopped_by,
        # Of this machine's own launcher the parent knows.
        "restarts": int(
            os.environ.get("TORCHELASTIC_RESTART_COUNT")
            or os.environ.get("SLURM_RESTART_COUNT")
            or 0
        ),
    }
    tracked.end(outcome, shown)
    return outcome | {
        "timeline": None if shown is None else {"start": shown.start, "end": shown.end},
        "buckets": list(ran.stage_buckets(pipeline(trainer).engine.placement.num_stages)),
        "skips": [list(ends) for ends in ran.skips],
        "exchanges": list(ran.exchanges),
    }


class _Closing(Callback):
    """Collects what only all ranks together know, while they still talk."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # Of a rank on CPU: the model is made before the engine.
        self._memory = MemoryUse(torch.device("cpu"))
        self.timeline: Timeline | None = None
        self.peaks: list[int] = []
        self.memory_kind: str | None = None
        self.norm_sync_s: float | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective."""
        self.timeline = pipeline(trainer).measured_timeline()
        waits = pipeline(trainer).engine.norm_waits_s
        on_cpu = pipeline(trainer).root_device.type == "cpu"
        memory = self._memory if on_cpu else pipeline(trainer).engine.memory
        own = (memory.peak_bytes(), statistics.median(waits) if waits else None)
        gathered = everybody().everyone(own)
        # Per pipeline rank, the largest of its replicas and sharers.
        size = self._run.dp * self._run.config.tp
        self.memory_kind = memory.kind
        peaks = [peak for peak, _ in gathered]
        self.peaks = [max(peaks[i : i + size]) for i in range(0, len(peaks), size)]
        # The rank that is done first waits longest.
        self.norm_sync_s = max((wait for _, wait in gathered if wait is not None), default=None)


def _evaluate(run: Run, run_dir: Path, checkpoint: str | None) -> dict[str, Any]:
    trainer, model, data = _trainer(run, run_dir, []), build_model(run), build_data(run)
    # A module of the user's own may know validation alone.
    tests = is_overridden("test_step", model, pl.LightningModule) and is_overridden(
        "test_dataloader", data, pl.LightningDataModule
    )
    loop = trainer.test if tests else trainer.validate
    found = {
        name: float(value)
        for loader in loop(model, datamodule=data, ckpt_path=checkpoint, verbose=False)
        for name, value in loader.items()
    }
    return {
        "val_loss": found.get("test_loss", found.get("val_loss")),
        "metrics": found,
        "checkpoint": checkpoint,
        "world_size": run.world_size,
    }


def _predict(run: Run, run_dir: Path, checkpoint: str | None) -> dict[str, Any]:
    """What ``predict_step`` returns of every batch, joined; one file per replica.

    Of the built-in models the log-probabilities of the validation text.
    """
    from safetensors.torch import save_file

    trainer = _trainer(run, run_dir, [])
    batches = trainer.predict(build_model(run), datamodule=build_data(run), ckpt_path=checkpoint)
    where = pipeline(trainer).coordinates
    path = run_dir / f"predictions_{where.dp_rank:05d}.safetensors"
    own: tuple[str, int] | None = None
    alone = "predictions" if run.own_model else "log_probabilities"
    joined = _joined(batches or [], alone)
    if where.pp_rank == where.tp_rank == 0 and joined:
        save_file(joined, path)
        own = (str(path), max(tensor.shape[0] for tensor in joined.values()))
    written = [part for part in everybody().everyone(own) if part is not None]
    if not written:
        raise ModelError(
            "predict_step returned no tensors, so there is nothing to write.",
            fix="Return a tensor of the batch's rows, or a dict of them.",
        )
    return {
        "checkpoint": checkpoint,
        "world_size": run.world_size,
        "predictions": [name for name, _ in written],
        "num_predictions": sum(count for _, count in written),
    }


def _joined(batches: Sequence[Any], alone: str) -> dict[str, torch.Tensor]:
    """Tensors of all batches by name; ``alone`` is that of what stands outside a dict."""
    found: dict[str, list[torch.Tensor]] = {}
    for item in batches:
        if isinstance(item, list):  # of one loader among several
            for name, tensor in _joined(item, alone).items():
                found.setdefault(name, []).append(tensor)
            continue
        named = item.items() if isinstance(item, Mapping) else [(alone, item)]
        if isinstance(item, tuple):
            named = [(f"{alone}_{index}", part) for index, part in enumerate(item)]
        for name, part in named:
            if isinstance(part, torch.Tensor):
                found.setdefault(str(name), []).append(
                    part.reshape(-1) if part.dim() == 0 else part
                )
    return {name: torch.cat(parts).contiguous() for name, parts in found.items()}


def _generate(run: Run, run_dir: Path, checkpoint: str | None) -> dict[str, Any]:
    from launcher.workloads.data.tokens import decode, encode

    wanted = run.config.generate
    model = build_model(run)
    assert isinstance(model, LanguageModel)
    for name, _ in model.pipeline_units():
        model.initialise_unit(name)
    model.to("cpu")  # Lightning remembers the meta device otherwise.
    if checkpoint is not None:
        model.load_state_dict(load_state_dict(Path(checkpoint)))
    source = text_source(run.config)
    tokens = model.generate(
        encode(source, wanted.prompt),
        wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        seed=run.config.seed,
    )
    text = decode(source, tokens.tolist())
    (run_dir / "generated.txt").write_text(text)
    return {"checkpoint": checkpoint, "world_size": 1, "text": text}


def _export(run: Run, run_dir: Path, checkpoint: str | None) -> dict[str, Any]:
    assert checkpoint is not None
    kind = export_format(run.config, described=run.describes_model)
    target = export_target(run.config, run_dir, kind)
    if kind == "huggingface":
        from launcher.workloads.hf.export import export_checkpoint

        export_checkpoint(Path(checkpoint), run.shape, target)
    else:
        export_file(Path(checkpoint), target, kind, records=_records(Path(checkpoint)))
    return {"checkpoint": checkpoint, "world_size": 1, "export": str(target)}


def _records(checkpoint: Path) -> dict[str, str]:
    """What a file says of its model and data, as the checkpoint that it is made of does."""
    saved = saved_keys(checkpoint)
    return {} if saved is None else {RECORD: json.dumps(saved)}


def _profile(run: Run, run_dir: Path, checkpoint: str | None) -> dict[str, Any]:
    from launcher.rank.profile_job import measure

    return measure(run)
