"""Where traces are kept between commands: one small JSON file per model, in the user's cache.

A trace is of one model as its package builds it, so its name comes from everything that may change
that: the keys that a builder reads, the versions of the libraries, and the package's own files.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.config import LaunchConfig, dump
from launcher.config.decode import CLASS, brings_own
from launcher.config.key import value_at
from launcher.processes.local import our_path, our_python, user_cache
from launcher.report.result import write_atomically
from launcher.resolve import Run, element_sizes, model_shape
from launcher.terminal import say
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.model_share import ModelShape, described
from launcher.workloads.own_code import source_files
from launcher.workloads.registry import DATA, MODELS, find
from launcher.workloads.traced_shape import TracedShape
from strategies import errors
from strategies.costs.trace_file import VERSION, TracedModel, dump_trace, parse_trace
from strategies.errors import ModelError, PipelineError

_LIBRARIES = ("torch", "lightning", "transformers", "foldpipe")
_MOST_FILES = 5000
# Of data.*: what the batches' size is planned by, and does not change a row.
_FREE = ("global_batch_size", "microbatch_size", "num_workers")


def read_cached_trace(config: LaunchConfig, shape: ModelShape) -> TracedModel | None:
    """The trace of a model as it is now; None where there is none, or a damaged one."""
    try:
        return parse_trace(_file(config, shape).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        return None


def write_cached_trace(config: LaunchConfig, shape: ModelShape, trace: TracedModel) -> None:
    """Keeps a trace; a cache that cannot be written to is none."""
    with suppress(OSError):
        write_atomically(_file(config, shape), dump_trace(trace))


def fingerprint(config: LaunchConfig, shape: ModelShape) -> str:
    """A word that differs where anything does that the model may depend on."""
    data = {key: value for key, value in asdict(config.data).items() if key not in _FREE}
    facts = {
        "version": VERSION,
        "model": asdict(config.model),
        "shape": described(shape),
        "data": data,
        "seed": config.seed,
        "precision": config.trainer.precision,
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "files": [list(_files(path)) for path in _sources(config)],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _file(config: LaunchConfig, shape: ModelShape) -> Path:
    return user_cache() / "traces" / f"{fingerprint(config, shape)}.json"


def _sources(config: LaunchConfig) -> Iterator[str]:
    """Paths of other packages' and of the user's own code that a trace would run."""
    for group, registry in (("model", MODELS), ("data", DATA)):
        chosen = value_at(config, group)
        if chosen.name == CLASS:
            yield chosen.path
        elif brings_own(group, chosen.name):
            yield find(registry, chosen.name).value


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of every source file of a path's package."""
    yield path, 0, 0
    for file in source_files(path)[:_MOST_FILES]:
        with suppress(OSError):
            facts = file.stat()
            yield str(file), facts.st_size, facts.st_mtime_ns


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# The trace of a model that only its ranks can build: from the cache, or from a child process.
#
# The planner's own process never imports torch; tracing needs it, and the user's package.

TASK, TRACE, PROBLEM = "trace_task.json", "model_trace.json", "trace_problem.json"
LOG = "trace.log"


def needs_trace(config: LaunchConfig, shape: ModelShape) -> bool:
    """Whether only the ranks know the sizes of a model's units."""
    own = brings_own("model", config.model.name)
    return own or (isinstance(shape, HfShape) and shape.sizes is None)


def traced_shape(
    config: LaunchConfig,
    run_dir: Path,
    *,
    degrees: Sequence[int] = (),
    keep: Callable[[Path], None] = lambda folder: None,
) -> TracedShape | None:
    """The model's trace; None for one whose sizes are known. ``run_dir`` gets the child's log.

    Where a child process has to make it, that looks at operators, too, for ``degrees``: ``keep``
    gets the folder with both.
    """
    shape = model_shape(config)
    if not needs_trace(config, shape):
        return None
    trace = read_cached_trace(config, shape)
    if trace is None:
        trace = _trace(config, run_dir, degrees, keep)
        write_cached_trace(config, shape, trace)
    for operation, unit in trace.unknown:
        say(
            f"warning: no FLOP formula for {operation} in {unit}: counted as one operation per "
            "element that it writes. Give it one with torch.utils.flop_counter."
            "register_flop_formula where the model is defined."
        )
    text = not brings_own("data", config.data.name)
    return TracedShape(
        trace,
        config.model.name,
        sequence=shape.sequence if text else 1,
        activation_bytes=element_sizes(config).activation,
    )


def check_buildable(run: Run) -> None:
    """Has a child process build and cut a ``model=hf`` as its ranks will, without weights.

    Raises:
        ModelError: What the ranks would say.
        PlanError: There are not as many units as are asked for.
    """
    config, counts = run.config, run.options.units_per_stage
    stages = {
        "num_stages": run.programs.train.placement.num_stages,
        "units_per_stage": None if counts is None else list(counts),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = ask_child(config, folder, stages=stages)
        if code:
            told = (folder / LOG).read_text(errors="replace").strip().splitlines()
            raise ModelError(
                f"model={config.model.name} could not be built: the process that tried ended with "
                f"code {code} ({told[-1] if told else 'it said nothing'}). Try mode=train, which "
                "leaves the output of every rank."
            )


def _trace(
    config: LaunchConfig, run_dir: Path, degrees: Sequence[int], keep: Callable[[Path], None]
) -> TracedModel:
    run_dir.mkdir(parents=True, exist_ok=True)
    say(f"tracing model={config.model.name} (once; kept in the user's cache)")
    code = ask_child(config, run_dir, trace=True, degrees=degrees)
    if code or not (run_dir / TRACE).is_file():
        raise ModelError(
            f"model={config.model.name} could not be traced: the tracing process ended with code "
            f"{code}; the end of {run_dir / LOG} says why. Try mode=train with pp= and schedule= "
            "by hand."
        )
    trace = parse_trace((run_dir / TRACE).read_text())
    (run_dir / TRACE).unlink()
    keep(run_dir)
    return trace


def ask_child(
    config: LaunchConfig,
    folder: Path,
    *,
    stages: Mapping[str, object] | None = None,
    trace: bool = False,
    degrees: Sequence[int] = (),
) -> int:
    """Runs the child in a folder: for a cut into ``stages``, for a trace, for operators.

    It leaves what it found, or what is wrong, which is raised.
    """
    task = {"config": dump(config), "stages": stages, "trace": trace, "degrees": list(degrees)}
    (folder / TASK).write_text(json.dumps(task))
    with (folder / LOG).open("w") as output:
        code = subprocess.run(
            our_python("launcher.rank.trace_job", str(folder)),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            # A GPU would be taken for a trace that runs on shapes.
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": "", "FOLDPIPE_PARENT": str(os.getpid())}
            | {"PYTHONPATH": our_path(os.environ)},
        ).returncode
    (folder / TASK).unlink(missing_ok=True)
    problem = folder / PROBLEM
    if problem.is_file():
        found = json.loads(problem.read_text())
        problem.unlink()
        raise _error(found["kind"])(found["message"])
    return code


def _error(kind: str) -> type[PipelineError]:
    found = getattr(errors, kind, ModelError)
    return found if isinstance(found, type) and issubclass(found, PipelineError) else ModelError
