"""The parent's part of every mode that starts ranks: check, write the task, start, watch."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.checkpoints import (
    ROOTS,
    check_continues,
    check_data,
    check_model,
    check_whole,
    manifest_of,
    newest_checkpoint,
    newest_in,
)
from launcher.config import LaunchConfig
from launcher.config.check_code import CODE_MODES
from launcher.config.checkpoint_keys import USED_BY, compared
from launcher.config.derived import COMPILING_S, asked_schedule
from launcher.config.key import shorten
from launcher.planning.profile_check import rank_threads
from launcher.processes import torchrun
from launcher.processes.failure import RankFailedError, explained
from launcher.processes.local import Listener, LocalRanks, rank_environment, take_outcome
from launcher.processes.nodes import check_variables
from launcher.processes.preempted import INTERRUPTED, PreemptedError, PrunedError, Restarts
from launcher.processes.rank_server import RankServer, rank_server
from launcher.processes.task import JOB_FILE, rewrite_task, write_task
from launcher.report.result import write_result
from launcher.resolve import Run, num_gpus, text_source, uses_gpu
from launcher.secrets import check_wandb_key, mask
from launcher.terminal import complain, say, shortened
from launcher.workloads.data.identity import other_data
from launcher.workloads.data.source import check_file, check_source, vocab_size
from launcher.workloads.hf.counterpart import export_format
from launcher.workloads.hf.hf_shape import HfShape, check_folder, check_same_model, check_vocabulary
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import (
    CheckpointError,
    DataError,
    PipelineError,
    PlanError,
    RunError,
)
from strategies.plan import IDLE_RANK_BYTES
from strategies.rules import check_collectives

_SCANNED_BYTES = 1 << 26
_MOST_ERROR = 8_000  # characters, in result.json
_TOLD_FORWARDS = 8_000
_FORWARDS_PER_S = 1_500.0  # compiled, proven, simulated and drawn on a core of 2026
_OPENS_CHECKPOINT = ("train", *USED_BY)


def check_before_start(run: Run, checkpoint: Path | None) -> None:
    """Everything that can be known to fail before a process is started."""
    _check_machine(run)
    config = run.config
    hidden = config.mode in ("train", "validate") and run.plan.overlap != "none" and run.dp > 1
    if hidden:
        check_collectives(os.environ)
    if "wandb" in config.tracking.names and (config.mode, config.cluster.name) == (
        "train",
        "local",
    ):
        check_wandb_key(config.tracking.offline)
    # One file with the weights of whatever model it is.
    plain = (
        config.mode == "export"
        and export_format(config, described=run.describes_model) != "huggingface"
    )
    if not run.describes_model and config.mode in ("generate", "export") and not plain:
        does = "mode=generate continues text with"
        if config.mode == "export":
            does = "export.format=huggingface knows how to write"
        fix = "mode=predict" if config.mode == "generate" else "export.format=safetensors"
        raise PlanError(
            f"{does} the built-in transformer and model=hf, not model={config.model.name}. "
            f"Try {fix}."
        )
    if isinstance(run.shape, HfShape):
        # An export takes the weights from the checkpoint and the rest from config.json.
        check_folder(
            replace(run.shape, pretrained=run.shape.pretrained and config.mode != "export")
        )
    if config.mode not in ("generate", "export") and not run.own_data:
        check_source(
            text_source(config),
            sequence=run.shape.sequence,
            batch_size=run.batch_size,
            num_replicas=run.dp,
            val_fraction=config.data.val_fraction,
        )
        _check_vocabulary(run)
    if checkpoint is None or checkpoint.is_file() or plain:
        pass  # of a file the ranks see what it is of
    elif isinstance(run.shape, HfShape):
        check_same_model(checkpoint, manifest_of(checkpoint)["metadata"].get("model"), run.shape)
    elif not run.own_model:
        assert isinstance(run.shape, TransformerShape)
        check_model(checkpoint, run.shape)
    asked = config.trainer.resume if config.mode in ("train", "validate") else config.checkpoint
    if checkpoint is not None and config.mode in ("train", "validate"):
        check_continues(checkpoint, run)
        check_data(checkpoint, run)
    if checkpoint is not None and asked != "auto":  # the newest has been looked at
        check_whole(checkpoint)
    if config.mode not in ("generate", "export"):
        print_differences(run, checkpoint)


def print_differences(run: Run, checkpoint: Path | None) -> None:
    """What a run has from its checkpoint, and which keys differ.

    ``mode=generate`` prints its answer alone to the output, so these lines go beside it.
    """
    if checkpoint is None:
        return
    write = complain if run.config.mode == "generate" else say
    for line in compared(run.config, checkpoint):
        write(line)
    if run.config.mode not in ("eval", "predict") or run.own_data or checkpoint.is_file():
        return
    what = other_data(manifest_of(checkpoint)["metadata"].get("data"), text_source(run.config))
    if what is not None:
        say(f"note: other data than those of the checkpoint: {what}")


def check_world(config: LaunchConfig) -> None:
    """Refuses at once more ranks than this machine could start, doing nothing.

    To be called before ``resolve``: compiling for hundreds of ranks takes minutes.
    """
    tell_size(config)
    if config.cluster.name == "local" and not uses_gpu(config):
        dp = 1 if config.dp == "auto" else int(config.dp)
        _check_memory(config.pp, dp, config.tp, state=0)


def tell_size(config: LaunchConfig) -> None:
    """Says beforehand what will take long."""
    if config.mode == "plan" or config.plan == "auto":
        return
    asked = asked_schedule(config, None if config.dp == "auto" else int(config.dp))
    forwards = asked.placement.num_stages * asked.plan.num_microbatches
    if forwards > _TOLD_FORWARDS:
        say(
            f"compiling a step of {asked.plan.num_microbatches:,} microbatches on "
            f"{asked.placement.num_stages} stages, {forwards:,} forwards: about "
            f"{forwards / _FORWARDS_PER_S:.0f} s"
        )


def _check_vocabulary(run: Run) -> None:
    source, vocab = text_source(run.config), run.shape.vocab
    if run.config.model.vocab is None and not isinstance(run.shape, HfShape):
        return  # then it is the data's
    if source.kind == "tokens":
        # The beginning of a huge file; the ranks check each block as they read it.
        most = min(source.max_bytes or _SCANNED_BYTES, _SCANNED_BYTES)
        source = replace(source, max_bytes=most)
    needed = vocab_size(source)
    if isinstance(run.shape, HfShape):
        check_vocabulary(run.shape, needed, source.label)
    if needed > vocab:
        raise DataError(
            f"{source.label} has token ids up to {needed - 1}, but model.vocab={vocab} allows 0 to "
            f"{vocab - 1}. Try model.vocab={needed}, or model.vocab=null, which asks the data."
        )


def _check_machine(run: Run) -> None:
    """Refuses a world that this machine cannot hold."""
    check_devices(run)
    if not _elsewhere(run.config) and not uses_gpu(run.config):
        _check_memory(run.config.pp, run.dp, run.config.tp, state=state_bytes(run))


def check_devices(run: Run) -> None:
    """Refuses devices that this machine does not have."""
    config = run.config
    elsewhere = _elsewhere(config)
    if config.cluster.name == "torchrun":
        torchrun.check_world(run.world_size, mode=config.mode)
    if not elsewhere and config.trainer.accelerator == "gpu" and num_gpus() == 0:
        raise PlanError(
            "trainer.accelerator=gpu, but this machine has no GPU. Try trainer.accelerator=cpu."
        )
    if config.compile:
        _check_compiler(gpu=uses_gpu(config))
    if config.cluster.backend in ("nccl", "staged") and not uses_gpu(config):
        raise PlanError(
            f"cluster.backend={config.cluster.backend} moves GPU memory, but the ranks run on CPU. "
            "Try cluster.backend=gloo."
        )
    if elsewhere:
        return  # what those machines have is seen there
    check_variables(os.environ)
    nccl = uses_gpu(config) and config.cluster.backend == "nccl"
    if nccl and run.world_size > num_gpus():
        raise PlanError(
            f"{_product(config.pp, run.dp, config.tp)} ranks on {num_gpus()} GPUs: NCCL "
            "needs a GPU per rank. Try cluster.backend=shared, which shares GPUs."
        )


def _elsewhere(config: LaunchConfig) -> bool:
    return config.cluster.name == "slurm" or config.cluster.nodes > 1


def _product(pp: int, dp: int, tp: int) -> str:
    degrees = f"pp={pp} * dp={dp}" + (f" * tp={tp}" if tp > 1 else "")
    return f"{degrees} = {pp * dp * tp}"


def _check_memory(pp: int, dp: int, tp: int, *, state: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    needs = pp * dp * tp * IDLE_RANK_BYTES + state
    if needs > free:
        fits = int((free - state) // IDLE_RANK_BYTES)
        advice = (
            f"at most {fits} {'rank' if fits == 1 else 'ranks'}. Try a smaller pp, dp, tp or "
            "model=, or mode=simulate."
        )
        if fits < 1:
            advice = (
                "fewer ranks would not fit either. Try a smaller model=, a machine with more "
                "memory, or mode=simulate, which starts nothing."
            )
        raise PlanError(
            f"{_product(pp, dp, tp)} ranks need about "
            f"{needs / 1e9:.1f} GB on this machine ({IDLE_RANK_BYTES / 1e9:.2f} GB each, and "
            f"{state / 1e9:.1f} GB of weights, gradients and optimizer state), but "
            f"{free / 1e9:.1f} GB are free: {advice}"
        )


def state_bytes(run: Run) -> int:
    """Weights, gradients and optimizer state of all replicas together."""
    table = run.costs.table(run.programs.train)
    if table.state_bytes is None:
        return (run.num_parameters or 0) * 16 * run.dp
    return sum(table.state_bytes) * run.dp * run.config.tp


def has_weights(run: Run) -> bool:
    return isinstance(run.shape, HfShape) and run.shape.pretrained


def find_checkpoint(
    run: Run,
    asked: str | None,
    run_dir: Path,
    *,
    optional: bool,
    without: Collection[Path] = (),
) -> Path | None:
    """A checkpoint by path, or the newest of this experiment for ``auto``.

    SLURM jobs that were killed, in this folder or where ``auto`` looks, are told of on the way.
    """
    _settle({run_dir} if asked != "auto" else {run_dir, *_job_folders(run_dir)})
    if asked is None:
        return None
    if asked == "auto":
        name = run.config.experiment_name
        return newest_checkpoint(name, run_dir, optional=optional, without=without)
    return _named_checkpoint(asked)


def _named_checkpoint(asked: str) -> Path:
    try:
        path = Path(asked).expanduser().absolute()
        with suppress(FileNotFoundError, NotADirectoryError):  # told with what should be there
            path.stat()
        return path
    except OSError as error:  # a name that is too long, a folder that must not be entered
        raise CheckpointError(
            f"{shorten(asked)} cannot be read: {error.strerror}. Try another checkpoint."
        ) from None


def check_named_files(configs: Iterable[LaunchConfig]) -> None:
    """What the jobs of a sweep name is there, before a folder is made for any of them.

    Raises:
        PipelineError: As each job would.
    """
    for config in configs:
        asked = config.trainer.resume if config.mode == "train" else config.checkpoint
        begun = config.sweep.resume is not None  # its jobs go on from checkpoints of their own
        if config.mode in _OPENS_CHECKPOINT and asked not in (None, "auto") and not begun:
            path = _named_checkpoint(asked)
            if not path.is_file():
                manifest_of(path)
        data = config.data
        if config.mode in CODE_MODES and data.name in ("text", "tokens") and data.path is not None:
            for key, name in (("data.path", data.path), ("data.tokenizer", data.tokenizer)):
                if name is not None and not os.path.exists(Path(name).expanduser()):
                    check_file(key, name)


def _job_folders(run_dir: Path) -> set[Path]:
    """Run folders that were submitted to SLURM, where ``newest_checkpoint`` looks for others."""
    found = {path for root in ROOTS for path in Path(root).glob(f"**/{JOB_FILE}")}
    return {path.parent.absolute() for path in found | set(run_dir.parent.glob(f"*/{JOB_FILE}"))}


def _settle(folders: Collection[Path]) -> None:
    """Has jobs that were killed end in their folders, where nobody has said how."""
    for folder in sorted(folders):
        if not (folder / JOB_FILE).is_file():
            continue
        slurm_job = importlib.import_module("launcher.processes.slurm_job")
        with suppress(PipelineError, OSError, ValueError, KeyError):
            told = slurm_job.settle(folder)
            if told is not None:
                say(f"{folder}: {told}")


@contextmanager
def failure_recorded(result: Path, common: Mapping[str, object]) -> Iterator[None]:
    """Leaves a ``result.json`` also where the block ends early; ``common`` needs no ranks."""
    try:
        yield
    except PreemptedError as error:
        status = "interrupted" if error.exit_code == INTERRUPTED else "preempted"
        stopped = {"status": status, "error": str(error), **error.figures}
        _leave_result(result, {**common, **stopped})
        raise
    except PrunedError as error:
        _leave_result(result, {**common, "status": "pruned", "error": str(error), **error.figures})
        raise
    except RunError as error:
        failed = {"status": "failed", "error": str(error), **getattr(error, "figures", {})}
        _leave_result(result, {**common, **failed})
        raise
    except OSError as error:
        full = explained(error, result.parent)
        _leave_result(result, {**common, "status": "failed", "error": str(full or error)})
        raise
    except KeyboardInterrupt:
        _leave_result(result, {**common, "status": "interrupted", "error": "interrupted"})
        raise


def _leave_result(file: Path, content: Mapping[str, object]) -> None:
    """Writes it where that is possible: what went wrong before must still be told."""
    told = shortened(mask(str(content["error"])), _MOST_ERROR)
    try:
        write_result(file, {**content, "error": told})
    except OSError as error:
        complain(f"warning: {file} cannot be written: {error.strerror}")


def run_ranks(
    run: Run,
    run_dir: Path,
    checkpoint: Path | None,
    on_event: Listener,
    *,
    world: int | None = None,
) -> dict[str, Any]:
    """Starts the ranks, waits for them, and returns what rank 0 left.

    ``on_event``: gets rank 0's progress.
    ``world``: other than the run's own number; threads are those of its own ranks.

    Raises:
        RunError: A rank failed, or the run was preempted.
    """
    task = write_task(run, run_dir, checkpoint)
    if run.config.cluster.name == "torchrun":
        torchrun.lead(run_dir, task, on_event)
        return take_outcome(run_dir)
    threads = None if world is None else rank_threads(run.world_size)
    world = world or _world(run)
    environment = rank_environment(world, threads)
    config, trains = run.config, run.config.mode == "train"
    asked = config.trainer.resume if trains else config.checkpoint

    def newest(damaged: Collection[Path]) -> Path | None:
        found = newest_in(run_dir, without=damaged)
        if found is not None or checkpoint not in damaged:
            return found or checkpoint
        optional = trains or has_weights(run)
        return find_checkpoint(run, asked, run_dir, optional=optional, without=damaged)

    restarts = Restarts(
        config.trainer.max_restarts if trains else 0,
        newest,
        say,
        named=None if asked == "auto" else checkpoint,
    )

    def start(found: Path | None) -> None:
        again = restarts.count + restarts.pauses
        if found != checkpoint or again:
            rewrite_task(run_dir, {**task, "checkpoint": None if found is None else str(found)})
        LocalRanks(
            run_dir,
            world,
            on_event,
            environment,
            server=_server(run, environment),
            watch_s=config.trainer.watchdog_s,
            data_s=config.trainer.data_timeout_s,
            # On a GPU the host runs ahead, and one instruction may wait for a whole step.
            patience_s=COMPILING_S if config.compile or uses_gpu(config) else 0.0,
            saves=trains,
            timeout_s=run.options.timeout_s,
            restarted=again,
        ).run()

    try:
        restarts.run(start, checkpoint)
    except RankFailedError as error:
        error.figures = {"restarts": restarts.count} if trains else {}
        raise
    outcome = take_outcome(run_dir)
    return outcome | {"restarts": restarts.count} if trains else outcome


def begin_imports(run: Run) -> None:
    """Has what forks the ranks import what they need, while the launcher goes on; ends nothing."""
    if run.config.cluster.name == "local":
        _server(run, rank_environment(_world(run)))


def _world(run: Run) -> int:
    return 1 if run.config.mode in ("generate", "export") else run.world_size


def fork_server(config: LaunchConfig, environment: Mapping[str, str]) -> RankServer | None:
    """What forks the ranks of a run on this machine; None where each is started by itself."""
    start = config.cluster.start
    if start == "auto":
        start = "fork" if sys.platform == "linux" else "fresh"
    if start == "fresh" or config.cluster.name == "torchrun":
        return None
    return rank_server(environment)


def _server(run: Run, environment: Mapping[str, str]) -> RankServer | None:
    server = fork_server(run.config, environment)
    if server is not None:
        server.load(_imports(run))
    return server


def _imports(run: Run) -> list[str]:
    """What ranks import after they have read what to do, besides packages of the user's own."""
    found = ["launcher.rank.jobs", "omegaconf"]  # the second is Lightning's, for hyperparameters
    if isinstance(run.shape, HfShape):
        found.append("launcher.workloads.hf.hf_model")
    if run.config.mode == "profile":
        found.append("launcher.rank.profile_job")
    return found


# ``compile=true`` makes C++ or Triton code, for which the machine needs a compiler of its own.


def _check_compiler(*, gpu: bool) -> None:
    """Refuses where torch.compile would fail: Triton wants a C compiler, CPUs a C++ one."""
    variable, names = ("CC", ("gcc", "clang", "cc")) if gpu else ("CXX", ("g++",))
    given = os.environ.get(variable)
    if not any(shutil.which(name) for name in ((given,) if given else names)):
        wanted = f"{variable}={given}" if given else " or ".join(names)
        raise PlanError(
            f"compile=true: torch.compile needs {wanted} on this machine, and it is not in PATH.",
            fix=f"Install it (apt install g++), set {variable} to another one, or use "
            "compile=false.",
        )
