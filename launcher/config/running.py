"""Keys of how a run proceeds: Lightning's Trainer, tracking, and the processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from launcher.config.key import key
from strategies.costs.hardware import NumberFormat


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """``trainer.*``: Lightning's own flags under their own names, and resuming."""

    max_steps: int = key(60, "Optimizer steps; -1 = no limit.", low=-1)
    max_epochs: int | None = key(None, "Passes over the data; null = no limit.", low=1, example=1)
    max_time: str | None = key(
        None, "Wall-clock limit DD:HH:MM:SS; null = none.", example="00:01:00:00"
    )
    accumulate_grad_batches: int = key(1, "Batches per optimizer step.", low=1)
    gradient_clip_val: float | None = key(
        None, "Limit of the gradient over the whole model; null = none.", above=0, example=1.0
    )
    gradient_clip_algorithm: Literal["norm", "value"] = key("norm", "What the limit applies to.")
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed"] = key(
        "32-true",
        "Type of weights and compute; mixed = weights in 32 bits; bf16-true = gradients summed and "
        "weights updated in 32 bits.",
    )
    float32_matmul_precision: Literal["highest", "high", "medium"] = key(
        "highest",
        "torch.set_float32_matmul_precision on every rank: high and medium compute products of "
        "fp32 matrices in tf32 (on CPUs that can, bf16), which 32-true is then planned with.",
    )
    accelerator: Literal["auto", "cpu", "gpu"] = key("auto", "Device of the ranks.")
    limit_train_batches: int | float | None = key(
        None, "Per epoch: 10 = batches, 0.1 = share, null = all.", low=0, example=10
    )
    limit_val_batches: int | float | None = key(
        8, "Batches per validation, as limit_train_batches.", low=0
    )
    limit_test_batches: int | float | None = key(
        None, "Batches per evaluation, as limit_train_batches.", low=0, example=10
    )
    limit_predict_batches: int | float | None = key(
        None, "Batches per prediction, as limit_train_batches.", low=0, example=10
    )
    val_check_interval: int | float | None = key(
        30, "Validate every so many batches (10) or parts of an epoch (0.5).", above=0
    )
    check_val_every_n_epoch: int | None = key(
        None,
        "Validate every n epochs; null = val_check_interval counts across epochs.",
        low=1,
        example=1,
    )
    num_sanity_val_steps: int = key(0, "Validation batches before the first step.", low=0)
    log_every_n_steps: int = key(1, "Steps between logged rows.", low=1)
    checkpoint_every_n_steps: int | None = key(
        None, "Steps between checkpoints; null = none between.", low=1, example=100
    )
    checkpoint_every_minutes: float | None = key(
        10.0,
        "Minutes of training after which a checkpoint is written, if none was; null = never.",
        above=0,
    )
    save_last: bool = key(True, "Whether to write a checkpoint at the end.")
    keep_last: int | None = key(3, "Newest checkpoints that are kept; null = all.", low=1)
    keep_best: int = key(
        0, "Checkpoints with the best monitor kept besides, written after its validation.", low=0
    )
    monitor: str = key("val_loss", "What keep_best goes by: a figure that validation logs.")
    monitor_mode: Literal["min", "max"] = key("min", "Whether keep_best wants it small or large.")
    async_save: bool = key(
        True, "Write checkpoints in a thread, from a copy in host memory; false = training waits."
    )
    resume: str | None = key(
        None,
        "auto = newest checkpoint of this experiment_name, PATH = that one, null = start anew.",
        example="auto",
    )
    accept_other_data: bool = key(
        False, "With resume: go on although data.* is not what the checkpoint was trained on."
    )
    max_restarts: int = key(
        0,
        "cluster=local: times that failed ranks are started again from the newest checkpoint; "
        "0 = never.",
        low=0,
        high=1000,
        example=3,
    )
    watchdog_s: float = key(
        60.0,
        "Seconds until a rank whose process is stopped, or (cluster=local) that others wait for "
        "inside a step, ends the run and is named; 0 = never.",
        low=0,
        high=86400,
    )
    data_timeout_s: float = key(
        600.0,
        "Seconds until ranks that all stand between two steps, in a loader or a callback, end the "
        "run (cluster=local); 0 = never.",
        low=0,
        high=86400,
    )
    deterministic: Literal["warn"] | bool = key(
        False, "Deterministic kernels only; warn = warn where there is none."
    )
    detect_anomaly: bool = key(False, "Autograd's check for NaN in backward; slow.")
    on_nan: Literal["stop", "skip", "ignore"] = key(
        "stop",
        "NaN or infinity in the loss or a gradient of any rank: no rank applies the step, and the "
        "run stops or goes on; ignore = not looked for. With stop and skip no checkpoint that is "
        "not finite is written, and the run ends there.",
    )
    post_validation: Literal["auto"] | bool = key(
        "auto",
        "Update before clipping's norm, or the word that all is finite, is in, and undo that bit "
        "for bit where it says otherwise; weights and optimizer state are kept twice. auto = where "
        "steps get shorter (zb_h2, zb_v) and the memory is there.",
    )
    enable_progress_bar: bool = key(True, "Show a progress bar.")
    enable_model_summary: bool = key(False, "Print the layers before training.")

    @property
    def number_format(self) -> NumberFormat:
        """What matrix products are computed in: the peak that a run can have is that of it."""
        if self.precision == "32-true":
            return "fp32" if self.float32_matmul_precision == "highest" else "tf32"
        formats: dict[str, NumberFormat] = {
            "64-true": "fp64", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16",
        }  # fmt: skip
        return formats[self.precision]

    @property
    def waits_at_flush(self) -> bool:
        """Whether ranks wait for each other before they update: for the norm, or for a NaN."""
        return self.gradient_clip_val is not None or self.on_nan != "ignore"


LONGEST_TAG = 64  # characters, of W&B
TrackerName = Literal["csv", "wandb", "tensorboard", "none"]


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """``tracking=``: where metrics go besides metrics.csv, which is always written."""

    name: TrackerName | tuple[TrackerName, ...] = key(
        "csv",
        "csv: metrics.csv only; none: not even a logger in Lightning; several at once: "
        "tracking=[wandb,tensorboard].",
    )
    project: str = key("foldpipe", "wandb: project, also of the view that mode=dashboard saves.")
    entity: str | None = key(None, "wandb: team or user; null = your default.", example="my-team")
    group: str | None = key(
        None,
        "wandb: group of runs; null = schedule and sizes, zb_v pp=4 dp=2 tp=1.",
        example="mine",
    )
    tags: tuple[str, ...] = key(
        (),
        "wandb: tags besides schedule, sizes, experiment_name and the sweep's folder.",
        example=["baseline"],
    )
    offline: Literal["auto"] | bool = key(
        "auto", "wandb: write locally only, for `wandb sync`; auto = without a login."
    )

    @property
    def names(self) -> tuple[TrackerName, ...]:
        """All trackers, in the order in which they were named."""
        return self.name if isinstance(self.name, tuple) else (self.name,)


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """``cluster.container.*``: the image that ranks of a SLURM job run in."""

    image: str | None = key(
        None,
        "slurm: image of the ranks; null = none, the node's own system.",
        example="/images/torch.sif",
    )
    tool: Literal["auto", "pyxis", "apptainer"] = key(
        "auto",
        "What starts it: pyxis, as options of srun, or apptainer; auto = apptainer for NAME.sif "
        "and docker://, oras:// and library:// addresses, pyxis for others.",
    )
    mounts: tuple[str, ...] = key(
        (),
        "Folders inside it, as SOURCE:TARGET or SOURCE:TARGET:ro; the run folder, the working "
        "directory and a checkout of foldpipe are there in any case.",
        example=["/data:/data:ro"],
    )
    python: str = key("python", "The image's interpreter, which has torch and foldpipe.")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """``cluster=``: where ranks run and how they talk."""

    name: Literal["local", "slurm", "torchrun"] = key(
        "local",
        "local: processes on this machine; slurm: a job of its own; torchrun: join the processes "
        "that torchrun has started.",
    )
    timeout_s: float = key(
        120.0, "Seconds until a rendezvous or a message counts as lost.", above=0, high=86400
    )
    backend: Literal["auto", "shared", "gloo", "nccl", "staged"] = key(
        "auto",
        "Transport: shared memory (of a GPU that ranks share, too) within a machine and gloo "
        "between machines, or gloo alone; nccl between GPUs; staged = gloo through host memory.",
    )
    start: Literal["auto", "fork", "fresh"] = key(
        "auto",
        "local: fork ranks from one process that has imported what they need, or start each "
        "afresh; auto = fork on Linux, fresh elsewhere.",
    )
    nodes: int = key(
        1, "Machines; mode=validate prints the command for each.", low=1, high=65536, example=2
    )
    gpus_per_node: int | None = key(
        None, "slurm: GPUs and ranks per node; null = ranks on CPU.", low=1, high=64, example=8
    )
    partition: str | None = key(None, "slurm: partition.", example="gpu")
    time: str | None = key(
        None,
        "slurm: limit as D-HH:MM:SS, HH:MM:SS or minutes; a job that has not ended is requeued.",
        example="24:00:00",
    )
    account: str | None = key(None, "slurm: account that pays.", example="my_project")
    qos: str | None = key(None, "slurm: quality of service.", example="high")
    constraint: str | None = key(
        None, "slurm: features that the nodes must have.", example="a100&ib"
    )
    exclusive: bool = key(False, "slurm: nodes that run no other job meanwhile.")
    mem: str | None = key(
        None, "slurm: memory per node, as 64G; 0 = all that a node has.", example="0"
    )
    gres: str | None = key(
        None,
        "slurm: generic resources per node; GPUs in it are as many as gpus_per_node, whose option "
        "it replaces.",
        example="gpu:a100:8",
    )
    cpus_per_task: int | None = key(
        None,
        "slurm: cores of each rank, for sbatch and srun; null = the cluster's default, mostly 1.",
        low=1,
        high=4096,
        example=8,
    )
    setup: tuple[str, ...] = key(
        (),
        "slurm: lines of bash before the ranks: modules, environments, exports. The first that "
        "fails ends the job.",
        example=["'module load cuda'"],
    )
    python: str | None = key(
        None,
        "slurm: the nodes' interpreter; null = the one that submits, which they must see, too.",
        example="/opt/env/bin/python",
    )
    container: ContainerConfig = field(default_factory=ContainerConfig)
    srun: tuple[str, ...] = key(
        (), "slurm: further options of srun.", example=["'--cpu-bind=cores'"]
    )
    extra: tuple[str, ...] = key(
        (), "slurm: further options of sbatch.", example=["'--nice=100'", "'--comment=try'"]
    )
    throttle: int | None = key(
        None,
        "slurm: jobs of a sweep, which are one job array, that run at a time; null = as many as "
        "SLURM starts.",
        low=1,
        high=100_000,
        example=4,
    )
    signal_s: int = key(
        120,
        "slurm: seconds before the limit at which the checkpoint is written.",
        low=1,
        high=65535,
    )
    submit: bool = key(True, "slurm: submit the script; false = only write it.")
    master: str | None = key(
        None,
        "mode=validate cluster.nodes=2: HOST:PORT of the first node; null = this machine.",
        example="node0:29500",
    )


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """``output.*``: who may read what a run writes."""

    group_readable: bool = key(
        False,
        "Your group may read the run folder, logs and checkpoints included; false = you alone.",
    )

    @property
    def umask(self) -> int:
        return 0o027 if self.group_readable else 0o077


# Keys of sweeps: what ``-m`` does with its jobs.


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """``sweep.*``: how the jobs of ``-m`` end, and which of them is the best."""

    fail_fast: bool = key(False, "Stop a sweep at its first failing job.")
    metric: str = key(
        "auto",
        "Figure by which the best job is named, a column of sweep.csv; auto = validation loss "
        "where learning varies, else the step time.",
        example="val_loss",
    )
    parallel: int = key(
        1,
        "Jobs that run side by side on this machine, its cores and GPUs shared out among them.",
        low=1,
        high=1000,
        example=2,
    )
    prune_at: tuple[int, ...] = key(
        (),
        "Steps at which a job ends whose train_loss is above the median of the others'; empty = "
        "none is ended.",
        low=1,
        example=[20, 40],
    )
    prune_after: int = key(
        3, "Other jobs that must have come to that step before one is ended.", low=1, high=1000
    )
    resume: str | None = key(
        None,
        "Go on with a sweep that was typed with the same words: its folder, or auto = the newest "
        "below multirun/. Jobs that are done stay, others go on from their checkpoints.",
        example="auto",
    )
    trials: int | None = key(
        None,
        "Search: so many jobs, chosen by Optuna among the values and interval()s of -m; null = "
        "every combination.",
        low=1,
        high=1000,
        example=20,
    )
    dir: str | None = key(
        None,
        "mode=collect: the sweep's folder; null = that which began last below multirun/.",
        example="multirun/2030-01-31/12-00-00",
    )
