"""A model's operators, from the user's cache or from the child process, and what is found for them.

The planner's own process never imports torch: a child runs the step on shapes, for all numbers of
ranks at once, and leaves a file for each, the plan that the model brings, or why there is none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config import LaunchConfig
from launcher.planning.model_trace import LOG, ask_child, fingerprint, traced_shape
from launcher.processes.local import user_cache
from launcher.report.result import write_atomically
from launcher.resolve import element_sizes, model_shape, num_places
from launcher.terminal import say
from launcher.workloads.traced_shape import TracedShape
from strategies.errors import ModelError, PipelineError, PlanError
from strategies.planner.shardings.operators import OperatorGraph, parse_graph
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.planner.shardings.unit_cuts import UnitCut, unit_cuts
from strategies.small_file import parse_json

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
    for file in _files(made):
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
    for file in _files(folder):
        file.unlink()


def _files(folder: Path) -> list[Path]:
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
            solved = Planner(graph, prices, level=config.planner.level).solved()
        except PipelineError as error:
            return str(error)
        if not solved.plan.worth:
            return f"nothing is worth cutting over {tp} ranks. Try tp=1, which is as good."
        return unit_cuts(graph, solved.picks, self.units, prices)
