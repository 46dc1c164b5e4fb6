"""The whole configuration: what people type at the top level, and one node per group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from launcher.config.key import Args, key
from launcher.config.pipeline import (
    CheckConfig,
    CostsConfig,
    HardwareConfig,
    OverlapConfig,
    PlannerConfig,
    ProfileConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from launcher.config.running import (
    ClusterConfig,
    OutputConfig,
    SweepConfig,
    TrackingConfig,
    TrainerConfig,
)
from launcher.config.workload import (
    DataConfig,
    ExportConfig,
    GenerateConfig,
    ModelConfig,
    OptimizerConfig,
)

Mode = Literal[
    "train", "simulate", "plan", "validate", "profile", "eval", "predict", "generate", "export",
    "collect", "dashboard", "check", "explain",
]  # fmt: skip
# What each does: of ``--help``, and of the key's own help.
MODES: dict[Mode, str] = {
    "train": "train the model",
    "simulate": "draw the timeline and start nothing",
    "plan": "find the best sizes, stages and schedule for a cluster",
    "validate": "check and print what would run; start nothing",
    "profile": "measure the layers and links of this machine",
    "eval": "compute the loss of a checkpoint",
    "predict": "write the predictions of a checkpoint",
    "generate": "continue a text with a checkpoint",
    "export": "write a checkpoint as one file, or for transformers",
    "collect": "compare the jobs of a sweep",
    "dashboard": "save a view in your W&B project",
    "check": "tell whether the schedule in schedule.file can run",
    "explain": "tell what took the time in traces of torch.profiler",
}


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Everything one run is told; equal configurations describe equal runs."""

    mode: Mode = key(
        "train",
        "; ".join(f"{name}: {text}" for name, text in MODES.items()) + ".",
    )
    pp: int = key(1, "Pipeline degree: ranks one model is cut over.", low=1, high=65536, example=4)
    tp: int = key(
        1, "Tensor degree: ranks that share the matrices of a stage.", low=1, high=65536, example=2
    )
    ep: int = key(
        1,
        "Expert degree: ranks of the dp * tp of a stage that its experts are spread over.",
        low=1,
        high=65536,
        example=2,
    )
    expert_tp: bool = key(
        False,
        "With tp > 1: cut each expert's matrices over these ranks, too; ep then divides dp. Else "
        "each of them has whole experts, and its share of the tokens.",
    )
    sequence_parallel: bool = key(
        False, "With tp > 1: cut activations between the matrices along the sequence, too."
    )
    dp: Literal["auto"] | int = key(
        1, "Data-parallel replicas; auto = fill the world.", low=1, high=65536
    )
    num_microbatches: Literal["auto"] | int = key(
        "auto",
        "Microbatches per step and replica; auto = 2 * pp (pipedream: 1), or what "
        "data.global_batch_size asks.",
        low=1,
        high=1_000_000,
        example=8,
    )
    loss_over: Literal["auto", "microbatch", "tokens", "batch"] = key(
        "auto",
        "How the losses of microbatches become one: by their rows (microbatch); by their targets, "
        "as a mean over tokens needs where some are masked (tokens; a class has loss_weight(batch) "
        "for it); or as one loss of all outputs, for losses that compare rows (batch; all forwards "
        "come first, and their activations are held). auto = tokens for built-in models and hf "
        "with a flush, else microbatch.",
    )
    plan: Literal["manual", "auto"] = key(
        "manual",
        "auto: mode=train, simulate and validate take what mode=plan lists first; keys that are "
        "set stay as they are.",
    )
    seed: int = key(0, "Seed of weights, data order and dropout.", low=0, high=2**32 - 1)
    compile: bool = key(
        False,
        "Run each unit of the model (attention, MLP, layer) through torch.compile; the first steps "
        "take minutes. Not with split backwards.",
    )
    experiment_name: str = key(
        "default",
        "Runs of one name share checkpoints for resume=auto; null = the chosen experiment=.",
    )
    checkpoint: str = key(
        "auto",
        "eval, predict, generate, export: a checkpoint's path; auto = newest of this "
        "experiment_name. Keys of model.* and data.* that are not set are the checkpoint's.",
    )
    allow_code: bool = key(
        False,
        "model=class, data=class: take path and args, where no path is given, from the checkpoint, "
        "and so run the code that it names.",
    )
    trace: tuple[str, ...] = key(
        (),
        "explain: torch.profiler's traces, one of each rank of a pipeline, or a folder of them.",
        example=["rank0.json.gz", "rank1.json.gz"],
    )
    callbacks: Args = key(
        Args(),
        "Lightning callbacks by names of yours: callbacks.stop.path=lightning.pytorch.callbacks:"
        "EarlyStopping callbacks.stop.args.monitor=val_loss; null leaves one out.",
        example={"stop": {"path": "lightning.pytorch.callbacks:EarlyStopping"}},
    )
    user: Args = key(
        Args(),
        "Keys of your own, user.note=first: for ${user.note} in other keys, for a class that asks "
        "for user, and for the trackers.",
        example={"note": "first"},
    )
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    costs: CostsConfig = field(default_factory=CostsConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
