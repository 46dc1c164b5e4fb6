"""A plan in another framework's words: flags or configuration, CSV and layout string.

What is written is read back by the readers of ``check`` and must be the plan's own order, to the
instruction; what a framework cannot say is refused with the reason. Cuts inside a layer are moved
to whole layers first, and what that costs is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.config import LaunchConfig
from launcher.config.pipeline import ExportTarget
from launcher.planning.report import ListedPlan
from launcher.report.predicted import compute_csv, predict
from launcher.report.result import write_atomically
from launcher.report.summary import format_duration
from launcher.resolve import Run, resolve
from launcher.workloads.model_share import model_costs, units_per_layer
from launcher.workloads.traced_shape import TracedShape
from strategies.errors import PlanError
from strategies.ir.program import Program
from strategies.plan import ScheduleFile
from strategies.planner.cut import balance
from strategies.referee.foreign import Asked, read_flags, read_their_file
from strategies.referee.foreign.torch_order import NAMES, named_order
from strategies.schedules.custom import read_order

_NAMED = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS", "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exported:
    """Files for another framework.

    Attributes:
        files: Name -> text, for a folder.
        notes: What people should know.
    """

    files: Mapping[str, str]
    notes: tuple[str, ...]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            write_atomically(folder / name, text)


def export_plan(target: ExportTarget, plan: ListedPlan) -> Exported:
    """The first plan for ``target``.

    Raises:
        PlanError: It cannot be said there; the message has the reason and what to pin.
    """
    run = plan.compiled.run if plan.compiled is not None else resolve(plan.config)
    _refuse(run, target)
    whole, notes = _whole_layers(run)
    rows = _rows(whole.programs.train)
    if target == "megatron":
        return Exported({"megatron.sh": _megatron(whole, rows)}, notes)
    if _shards(whole):
        notes += (
            f"overlap=zero1 shards the optimizer's state; {target} shards the weights with it "
            "(FSDP2), so that memory and messages of replicas are others than predicted",
        )
    csv = compute_csv(whole.programs.train)
    schedule = _torch_name(whole, rows)
    files = {} if schedule else {f"{target}.csv": csv}
    name = "torchtitan.toml" if target == "torchtitan" else "automodel.yaml"
    write = _torchtitan if target == "torchtitan" else _automodel
    files[name] = write(whole, schedule)
    with TemporaryDirectory() as folder:  # The reader finds the CSV beside it.
        Exported(files, ()).write(Path(folder))
        again = read_their_file(str(Path(folder) / name), Asked())
    _same(_order(again.file.text), rows, target)
    return Exported(files, notes)


def _shards(run: Run) -> bool:
    return run.config.overlap.name == "zero1" and run.dp > 1


def _refuse(run: Run, target: ExportTarget) -> None:
    """What no order of another framework can say."""
    config, program = run.config, run.programs.train
    asked = f"planner.export={target}"
    if program.placement.weight_copies > 1:
        raise PlanError(
            f"{asked}: {config.schedule.name} keeps every stage on two ranks, which {target} does "
            "not. Try schedule=1f1b, or planner.level=O2 without it."
        )
    if target != "megatron" and _class(program) is None:
        raise PlanError(
            f"{asked}: {config.schedule.name} has its stages on ranks in a way of its own, and "
            f"{target} knows loops and a V of two. Try schedule=interleaved_1f1b, or schedule=zb_v."
        )
    if config.recompute.name not in ("none", "full"):
        raise PlanError(
            f"{asked}: recompute={config.recompute.name} recomputes at places of its own, which "
            f"{target} cannot say. Try recompute=full, or recompute=none."
        )
    if getattr(config, "ep", 1) > 1:
        raise PlanError(f"{asked}: ep={config.ep} is not written yet. Try ep=1.")
    if run.own_model or isinstance(run.traced or run.shape, TracedShape):
        raise PlanError(
            f"{asked}: the layers of model={config.model.name} have names of their own, which "
            "nothing here knows. Try a built-in model of the same sizes."
        )


def _whole_layers(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run with stages of whole layers, and what has become of its time."""
    layers = run.layers_per_stage
    if all(float(number).is_integer() for number in layers):
        return run, ()
    before = predict(run)[0].makespan
    found: list[tuple[float, Run]] = []
    for counts in {_rounded(layers), _balanced(run)}:
        schedule = replace(run.config.schedule, layers_per_stage=counts, units_per_stage=None)
        whole = resolve(replace(run.config, schedule=schedule))
        found.append((predict(whole)[0].makespan, whole))
    after, whole = min(found, key=lambda entry: entry[0])
    counts = tuple(map(round, whole.layers_per_stage))
    return whole, (
        f"stages cut inside a layer were moved to whole layers: {list(counts)}, "
        f"{format_duration(after, 's')} per step instead of {format_duration(before, 's')}",
    )


def _rounded(layers: Sequence[float]) -> tuple[int, ...]:
    """Every cut at the next end of a layer."""
    ends = [round(sum(layers[: place + 1])) for place in range(len(layers))]
    return tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _balanced(run: Run) -> tuple[int, ...]:
    """Whole layers, the slowest stage as fast as possible; the head may stand alone."""
    costs, share = model_costs(run.shape), units_per_layer(run.shape)
    layers = [sum(costs[at : at + share]) for at in range(1, len(costs) - 1, share)]
    layers[0] += costs[0]
    cut = balance([*layers, costs[-1]], len(run.layers_per_stage))
    return tuple(sum(place < len(layers) for place in part) for part in cut)


def _class(program: Program) -> str | None:
    """The class beside a CSV, which decides where stages lie; None for no such place."""
    place = program.placement
    if place.name == "loop":
        return "PipelineScheduleMulti"
    return "ZBVZeroBubble" if place.name == "v" and place.stages_per_rank == 2 else None


def _rows(program: Program) -> list[list[str]]:
    return [
        [str(item) for item in row if item.microbatch is not None] for row in program.compute_rows()
    ]


def _order(text: str) -> list[list[str]]:
    return _rows(read_order(ScheduleFile("x.csv", text), messages=False))


def _same(theirs: Sequence[Sequence[str]], ours: Sequence[Sequence[str]], target: str) -> None:
    if [list(row) for row in theirs] != [list(row) for row in ours]:
        raise PlanError(
            f"planner.export={target}: {target} runs another order for these numbers than the "
            "plan's. Try schedule=1f1b, or a number of microbatches that is a multiple of pp."
        )


# -------------------------------------------------------------------------------------- torch's two


def _torch_name(run: Run, rows: Sequence[Sequence[str]]) -> str | None:
    """Torch's name for the order, if it makes just that; None if it takes a CSV."""
    stages = run.programs.train.placement.num_stages
    for name, (ours, usual) in NAMES.items():
        if ours != run.config.schedule.name:
            continue
        chunks = None if usual == 1 else stages // run.config.pp
        try:
            theirs, _ = named_order(name, run.config.pp, run.num_microbatches, chunks, where="x")
        except PlanError:
            return None
        bare = [[cell for cell in row if "SEND" not in cell and "RECV" not in cell]
                for row in theirs]  # fmt: skip
        return _NAMED[name] if bare == [list(row) for row in rows] else None
    return None


def _parts(run: Run, *, prefix: str, first: str, last: Sequence[str], every: Sequence[str]) -> str:
    """Module names of each stage, as both frameworks list them."""
    counts = [round(number) for number in run.layers_per_stage]
    lines, layer = [], 0
    for stage, count in enumerate(counts):
        names = [first] if stage == 0 else []
        names += [f"{prefix}layers.{number}" for number in range(layer, layer + count)]
        names += last if stage == len(counts) - 1 else []
        names += every
        layer += count
        lines.append("  [" + ", ".join(f'"{name}"' for name in names) + "],")
    return "[\n" + "\n".join(lines) + "\n]"


def _torchtitan(run: Run, schedule: str | None) -> str:
    config = run.config
    size = config.data.microbatch_size
    parts = _parts(run, prefix="", first="tok_embeddings", last=("norm", "output"), every=())
    lines = [
        "# For torchtitan: [parallelism] and what goes with it. Newer versions take the same keys",
        "# as flags, --parallelism.*",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if _shards(run) else run.dp}",
        f"data_parallel_shard_degree = {run.dp if _shards(run) else 1}",
        'fsdp_reshard_after_forward = "never"',
        f"tensor_parallel_degree = {config.tp}",
        f"pipeline_parallel_degree = {config.pp}",
        f'pipeline_parallel_schedule = "{schedule or _class(run.programs.train)}"',
        *([] if schedule else ['pipeline_parallel_schedule_csv = "torchtitan.csv"']),
        f"pipeline_parallel_microbatch_size = {size}",
        f"module_fqns_per_model_part = {parts}",
        "",
        "[training]",
        f"local_batch_size = {run.num_microbatches * size}",
        f"global_batch_size = {run.num_microbatches * size * run.dp}",
        *_sequence(run, "seq_len = "),
        "",
        "[activation_checkpoint]",
        f'mode = "{config.recompute.name}"',
    ]
    return "\n".join(lines) + "\n"


def _automodel(run: Run, schedule: str | None) -> str:
    config = run.config
    size = config.data.microbatch_size
    parts = _parts(
        run, prefix="model.", first="model.embed_tokens", last=("model.norm", "lm_head"),
        every=("model.rotary_emb",),
    )  # fmt: skip
    lines = [
        "# For NeMo AutoModel: what a recipe says of its pipeline.",
        "distributed:",
        f"  dp_size: {run.dp}",
        f"  dp_replicate_size: {1 if _shards(run) else run.dp}",
        f"  pp_size: {config.pp}",
        f"  tp_size: {config.tp}",
        f"  sequence_parallel: {str(config.sequence_parallel).lower()}",
        f"  activation_checkpointing: {str(config.recompute.name == 'full').lower()}",
        "  pipeline:",
        f"    pp_schedule: {(schedule or str(_class(run.programs.train))).lower()}",
        *([] if schedule else ["    pp_schedule_csv: automodel.csv"]),
        f"    pp_microbatch_size: {size}",
        f"    pp_batch_size: {run.num_microbatches * size}",
        "    module_fqns_per_model_part:",
        *(f"      - {line.strip().rstrip(',')}" for line in parts.splitlines()[1:-1]),
        "step_scheduler:",
        f"  local_batch_size: {run.num_microbatches * size}",
        f"  global_batch_size: {run.num_microbatches * size * run.dp}",
    ]
    return "\n".join(lines) + "\n"


def _sequence(run: Run, words: str) -> list[str]:
    length = run.shape.sequence
    return [f"{words}{length}"] if length > 1 else []


# -------------------------------------------------------------------------------------- Megatron-LM


def layout_string(layers: Sequence[int]) -> str:
    """Megatron-LM's layout of stages with that many layers, embedding first and loss last.

    >>> layout_string([1, 2, 2, 2, 1])
    'Et|(tt|)*3tL'
    """
    stages = ["t" * number for number in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    parts: list[tuple[str, int]] = []
    for stage in stages[:-1]:
        if parts and parts[-1][0] == stage:
            parts[-1] = stage, parts[-1][1] + 1
        else:
            parts.append((stage, 1))
    written = (
        f"{_short(stage)}|" if times == 1 else f"({stage}|)*{times}" for stage, times in parts
    )
    return "".join(written) + _short(stages[-1])


def _short(stage: str) -> str:
    """Many layers as a repetition: ``Et*20``."""
    count = stage.count("t")
    return stage if count < 5 else stage.replace("t" * count, f"t*{count}")


def _megatron(run: Run, rows: Sequence[Sequence[str]]) -> str:
    config, size = run.config, run.config.data.microbatch_size
    name = config.schedule.name
    if name not in ("1f1b", "interleaved_1f1b"):
        raise PlanError(
            f"planner.export=megatron: the plan runs {name}, and Megatron-LM has 1F1B and "
            "interleaved 1F1B. Try schedule=1f1b, or schedule=interleaved_1f1b."
        )
    layers = [round(number) for number in run.layers_per_stage]
    flags = [
        f"--pipeline-model-parallel-size {config.pp}",
        f"--tensor-model-parallel-size {config.tp}",
        *(["--sequence-parallel"] if config.sequence_parallel else []),
        f"--num-layers {sum(layers)}",
        *([f'--pipeline-model-parallel-layout "{layout_string(layers)}"'] if config.pp > 1 else []),
        *(
            [f"--microbatch-group-size-per-virtual-pipeline-stage {run.group or config.pp}"]
            if len(layers) > config.pp
            else []
        ),
        f"--micro-batch-size {size}",
        f"--global-batch-size {run.num_microbatches * size * run.dp}",
        *_sequence(run, "--seq-length "),
        *(
            ["--recompute-granularity full", "--recompute-method uniform",
             "--recompute-num-layers 1"]
            if config.recompute.name == "full"
            else []
        ),
        *(["--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce"]
          if config.overlap.name == "zero1" else []),
        *(["--overlap-grad-reduce"] if config.overlap.name == "grad_reduce" and run.dp > 1 else []),
        *_precision(config),
    ]  # fmt: skip
    text = "\n".join(
        [
            '# For Megatron-LM, behind torchrun ... pretrain_gpt.py: "${PLAN_ARGS[@]}"',
            f"WORLD_SIZE={config.pp * config.tp * run.dp}",
            "PLAN_ARGS=(",
            *(f"    {flag}" for flag in flags),
            ")",
        ]
    )
    theirs = read_flags(text + "\n", Asked(), name="planner.export=megatron")
    _same(_order(theirs.file.text), rows, "megatron")
    assert theirs.layers in (None, tuple(layers))
    return text + "\n"


def _precision(config: LaunchConfig) -> list[str]:
    known = {"bf16-mixed": ["--bf16"], "bf16-true": ["--bf16"], "16-mixed": ["--fp16"]}
    return known.get(config.trainer.precision, [])
