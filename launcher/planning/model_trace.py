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
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.config import LaunchConfig, dump
from launcher.config.decode import CLASS, brings_own
from launcher.config.key import value_at
from launcher.processes.local import our_path, our_python, user_cache
from launcher.report.result import write_atomically
from launcher.resolve import Run, element_sizes, model_shape, num_places
from launcher.terminal import say
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.model_share import ModelShape, described
from launcher.workloads.own_code import source_files
from launcher.workloads.registry import DATA, MODELS, find
from launcher.workloads.traced_shape import TracedShape
from strategies import errors
from strategies.costs.trace_file import VERSION, TracedModel, dump_trace, parse_trace
from strategies.errors import ModelError, PipelineError, PlanError
from strategies.planner.shardings.operators import OperatorGraph, parse_graph
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.planner.shardings.unit_cuts import UnitCut, unit_cuts
from strategies.small_file import parse_json

_LIBRARIES = ("torch", "lightning", "transformers", "foldpipe-launcher")
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


# --------------------------------------------------------------------------------------------------
# A model's operators, from the user's cache or from the child process, and what is found for them.
#
# The planner's own process never imports torch: a child runs the step on shapes, for all numbers of
# ranks at once, and leaves a file for each, the plan that the model brings, or why there is none.
BY_HAND, WRONG = "plan_by_hand.json", "operators_problem.json"
# More ranks that share matrices are looked at only where they are asked for.
_MOST_TP = 8


@dataclass(frozen=True, slots=True)
class TracedOperators:
    """A model's operators for one number of ranks, and its own plan: style by layer, or None."""

    graph: OperatorGraph
    by_hand: dict[str, str] | None


Traced = dict[int, TracedOperators]


def operators_file(tp: int) -> str:
    return f"operators_tp{tp}.json"


def traced_operators(config: LaunchConfig, run_dir: Path, degrees: Sequence[int]) -> Traced:
    """By number of ranks; what is not in the cache comes from one child process.

    Raises:
        ModelError: The step cannot run on shapes, or the model cannot be built.
    """
    folder = _folder(config)
    found = _read(folder, degrees)
    missing = [tp for tp in degrees if tp not in found]
    if not missing:
        return found
    say(f"looking at the operators of model={config.model.name} (once; kept in the user's cache)")
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        code = ask_child(config, made, degrees=missing)
        if code:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / LOG).write_text((made / LOG).read_text(errors="replace"))
            raise ModelError(
                f"the operators of model={config.model.name} could not be found: the process that "
                f"tried ended with code {code}; the end of {run_dir / LOG} says why. Try tp=1."
            )
        keep(config, made)
        return found | _read(made, missing)


def keep(config: LaunchConfig, made: Path) -> None:
    """Moves what a child has left into the cache; one that cannot be written to is none."""
    folder = _folder(config)
    for file in _operator_files(made):
        with suppress(OSError):
            write_atomically(folder / file.name, file.read_text())


def planned_shape(config: LaunchConfig, run_dir: Path) -> TracedShape | None:
    """The model's trace, which knows its shares for all numbers of ranks; None without a trace."""
    degrees = _degrees(config)
    shape = traced_shape(
        config,
        run_dir,
        degrees=degrees,
        keep=lambda folder: _kept_and_gone(config, folder),
    )
    if shape is None:
        return None
    units = tuple(unit.name for unit in shape.trace.units)
    return replace(shape, cuts=_FoundCuts(config, run_dir, units))


def _kept_and_gone(config: LaunchConfig, folder: Path) -> None:
    keep(config, folder)
    for file in _operator_files(folder):
        file.unlink()


def _operator_files(folder: Path) -> list[Path]:
    """What a child leaves about operators."""
    other = (file for file in (folder / BY_HAND, folder / WRONG) if file.is_file())
    return [*other, *folder.glob("operators_tp*.json")]


def _folder(config: LaunchConfig) -> Path:
    return user_cache() / "operators" / fingerprint(config, model_shape(config))


def _read(folder: Path, degrees: Sequence[int]) -> Traced:
    """What a folder has.

    Raises:
        ModelError: It says that there is nothing to be had.
    """
    try:
        wrong = parse_json((folder / WRONG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        wrong = None
    if isinstance(wrong, str):
        raise ModelError(wrong)
    found = {}
    for tp in degrees:
        try:
            graph = parse_graph((folder / operators_file(tp)).read_text(encoding="utf-8"))
            own = parse_json((folder / BY_HAND).read_text(encoding="utf-8"))
        except (OSError, ValueError, ModelError):
            continue
        by_hand = None if own is None else {str(name): str(how) for name, how in own.items()}
        if graph.tp == tp:
            found[tp] = TracedOperators(graph, by_hand)
    return found


def dump_wrong(message: str) -> str:
    return json.dumps(message)


def _degrees(config: LaunchConfig) -> tuple[int, ...]:
    """Numbers of ranks that may be asked for: what divides those that there are; 2 if nothing."""
    places = config.planner.num_gpus or num_places(config)
    most = min(config.hardware.gpus_per_node, places, _MOST_TP)
    return tuple(n for n in range(2, most + 1) if places % n == 0) or (2,)


@dataclass
class _FoundCuts:
    """Shardings of a traced model, found when they are asked for; what is known is kept."""

    config: LaunchConfig
    run_dir: Path
    units: tuple[str, ...]
    graphs: dict[int, OperatorGraph | str] = field(default_factory=dict)
    known: dict[tuple[int, int], tuple[UnitCut, ...] | str] = field(default_factory=dict)

    def __call__(self, tp: int, rows: int) -> tuple[UnitCut, ...]:
        if (tp, rows) not in self.known:
            self.known[tp, rows] = self._find(tp, rows)
        found = self.known[tp, rows]
        if isinstance(found, str):
            asked = "" if tp == 1 else f"tp={tp} with model={self.config.model.name}: "
            raise PlanError(f"{asked}{found}")
        return found

    def _graph(self, tp: int) -> OperatorGraph | str:
        if tp == 1:  # What nothing is cut in is the same for all numbers of ranks.
            return self._graph(next(iter(self.graphs), _degrees(self.config)[0]))
        if tp not in self.graphs:
            degrees = sorted({tp, *_degrees(self.config)})
            try:
                found = traced_operators(self.config, self.run_dir, degrees)
                self.graphs.update({n: traced.graph for n, traced in found.items()})
            except ModelError as error:
                self.graphs.update(dict.fromkeys(degrees, str(error)))
        return self.graphs[tp]

    def _find(self, tp: int, rows: int) -> tuple[UnitCut, ...] | str:
        graph = self._graph(tp)
        if isinstance(graph, str):
            return graph
        config = self.config
        prices = Prices(
            config.hardware,
            tp,
            rows=rows / graph.rows,
            sizes=element_sizes(config),
            number_format=config.trainer.number_format,
        )
        if tp == 1:
            return unit_cuts(graph, [0] * len(graph.operators), self.units, prices)
        try:
            solved = Planner(graph, prices).solved()
        except PipelineError as error:
            return str(error)
        if not solved.plan.worth:
            return f"nothing is worth cutting over {tp} ranks. Try tp=1, which is as good."
        return unit_cuts(graph, solved.picks, self.units, prices)
