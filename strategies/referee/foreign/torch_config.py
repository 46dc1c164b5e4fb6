"""torchtitan's and NeMo AutoModel's configurations: which schedule of torch they ask for.

torchtitan: TOML, or a Python module of configurations, which is parsed and never run
(``config_registry.py:name`` where it has several). AutoModel: YAML. Both name a schedule of
torch.distributed.pipelining or a CSV file of computations, and torch adds the messages itself.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from strategies.errors import PlanError, ProgramError
from strategies.plan import ScheduleFile, read_schedule_file
from strategies.referee.foreign.their_words import Asked, Theirs, as_csv, shown, whole_number
from strategies.referee.foreign.torch_order import NAMES, named_order, torch_rows
from strategies.schedules.custom import read_order

Values = Mapping[str, object]
_DEEPEST = 60


def read_torchtitan(
    text: str, asked: Asked, *, path: Path, name: str, chosen: str | None
) -> Theirs:
    """A TOML file of torchtitan, or a configuration out of a Python module.

    ``chosen``: which configuration of the module; None if it has one.

    Raises:
        PlanError: It asks for what torch does not have.
        ProgramError: It is no TOML and no Python; the message has line and column.
    """
    _check_length(text, name)
    values = _python(text, name, chosen) if path.suffix == ".py" else _toml(text, name)
    return _asked_of_torchtitan(values, asked, path, name)


def has_titan_flags(text: str) -> bool:
    """Whether a script or a command line speaks of a pipeline in torchtitan's words."""
    text = _COMMENT.sub("", text)
    return "--parallelism.pipeline_parallel" in text or "--experimental.pipeline_par" in text


def read_titan_flags(text: str, asked: Asked, *, path: Path, name: str) -> Theirs:
    """Torchtitan's flags, from a script or a command line: ``--parallelism.pipeline_... 4``.

    Raises:
        PlanError: They ask for what torch does not have.
    """
    values = {
        match[1]: (match[2] or "").strip("\"'")
        for match in _TITAN_FLAG.finditer(_COMMENT.sub("", text))
    }
    return _asked_of_torchtitan(values, asked, path, name)


_COMMENT = re.compile(r"(?m)^[ \t]*#.*$")
_TITAN_FLAG = re.compile(r"--[a-z_]+\.([a-z_]+)(?:=|[ \t]+)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)")
# A configuration; what is longer takes parsers minutes and says no more of a pipeline.
_MOST_CHARACTERS = 1 << 20
_LONGEST_LINE = 20_000


def _check_length(text: str, name: str) -> None:
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(
            f"{name} has {len(text):,} characters, a configuration at most {_MOST_CHARACTERS:,}."
        )
    longest = max(map(len, text.splitlines()), default=0)
    if longest > _LONGEST_LINE:
        raise PlanError(
            f"{name} has a line of {longest:,} characters, a configuration at most "
            f"{_LONGEST_LINE:,}."
        )


def _asked_of_torchtitan(values: Values, asked: Asked, path: Path, name: str) -> Theirs:
    prefix = "pipeline_parallel_"
    known = {key.removeprefix(prefix): value for key, value in values.items()}
    batch = whole_number(known.get("local_batch_size", 8), "local_batch_size", name)
    size = whole_number(known.get("microbatch_size", 1), f"{prefix}microbatch_size", name)
    count = known.get("num_pp_microbatches", known.get("microbatches"))
    request = _Request(
        "torchtitan",
        whole_number(known.get("degree", 1), f"{prefix}degree", name),
        str(known.get("schedule") or "1F1B"),
        known.get("schedule_csv"),
        _count(batch, size, name, ("local_batch_size", f"{prefix}microbatch_size"))
        if count is None
        else whole_number(count, "num_pp_microbatches", name),
        known.get("layers_per_stage"),
        (known.get("first_stage_less_layers", 1), known.get("last_stage_less_layers", 1)),
        known.get("module_fqns_per_model_part"),
    )
    return request.order(asked, path, name)


def read_automodel(text: str, asked: Asked, *, path: Path, name: str) -> Theirs:
    """A YAML recipe of NeMo AutoModel.

    Raises:
        PlanError: It asks for what torch does not have.
        ProgramError: It is no YAML; the message has line and column.
    """
    _check_length(text, name)
    values = _yaml(text, name)
    if not any(key in values for key in ("pp_size", "pp_schedule", "pp_schedule_csv")):
        raise PlanError(
            f"{name} says nothing of a pipeline: it has no pp_size, pp_schedule and "
            "pp_schedule_csv (NeMo AutoModel), and no flags of Megatron-LM."
        )
    batch = values.get("pp_batch_size") or values.get("local_batch_size") or 1
    request = _Request(
        "NeMo AutoModel",
        whole_number(values.get("pp_size", 1), "pp_size", name),
        str(values.get("pp_schedule") or "1f1b"),
        values.get("pp_schedule_csv"),
        _count(
            whole_number(batch, "pp_batch_size", name),
            whole_number(values.get("pp_microbatch_size", 1), "pp_microbatch_size", name),
            name,
            ("pp_batch_size", "pp_microbatch_size"),
        ),
        values.get("layers_per_stage"),
        (0, 0),
        values.get("module_fqns_per_model_part"),
    )
    return request.order(asked, path, name)


def _count(batch: int, size: int, name: str, keys: tuple[str, str]) -> int:
    if batch % size:
        raise PlanError(
            f"{name}: {keys[0]}={batch} is no multiple of {keys[1]}={size}, and torch wants equal "
            f"microbatches. Try {keys[0]}={-(-batch // size) * size}."
        )
    return batch // size


class _Request:
    """What a configuration asks torch for."""

    def __init__(
        self, framework: str, pp: int, schedule: str, csv: object, count: int, per_stage: object,
        less: tuple[object, object], parts: object,
    ) -> None:  # fmt: skip
        self.framework, self.pp, self.schedule, self.csv = framework, pp, schedule, csv
        self.count, self.per_stage, self.less, self.parts = count, per_stage, less, parts

    def order(self, asked: Asked, path: Path, name: str) -> Theirs:
        if self.csv:
            return self._of_csv(asked, path, name)
        chunks = self._chunks(asked, name)
        rows, grouped = named_order(self.schedule, self.pp, self.count, chunks, where=name)
        notes: tuple[str, ...] = (f"{self.schedule}, pp={self.pp}, {self.count} microbatches",)
        if chunks is None:
            per_rank = NAMES[self.schedule.lower()][1]
            notes += (f"{per_rank} stage{'s' if per_rank > 1 else ''} per rank, as it is unless "
                      "told otherwise",)  # fmt: skip
        file = ScheduleFile(name, as_csv(rows))
        return Theirs(file, self.framework, grouped=grouped, notes=notes)

    def _chunks(self, asked: Asked, name: str) -> int | None:
        """Stages per rank; None for as many as torch's schedule usually has."""
        if isinstance(self.parts, list | tuple) and self.parts:
            stages = len(self.parts)
        elif self.per_stage is not None:
            each = whole_number(self.per_stage, "layers_per_stage", name)
            if asked.layers is None:
                raise PlanError(
                    f"{name}: layers_per_stage={each} makes as many stages as the model has "
                    "layers for, and the file only names the model. Try check.layers=32."
                )
            less = sum(whole_number(number, "less_layers", name, least=0) for number in self.less)
            stages = -(-(asked.layers + less) // each)
        else:
            return None
        if stages % self.pp:
            raise PlanError(
                f"{name}: {stages} stages are no multiple of the pipeline's {self.pp} ranks."
            )
        return stages // self.pp

    def _of_csv(self, asked: Asked, path: Path, name: str) -> Theirs:
        """The computations of a CSV file; torch places the messages of its own accord."""
        given = Path(str(self.csv))
        beside = path.parent / given
        found = beside if not given.is_absolute() and beside.is_file() else given
        file = read_schedule_file(str(found), placement=asked.placement)
        program = read_order(file, messages=False)
        lines = len(program.ranks)
        if lines != self.pp:
            raise PlanError(
                f"{name}: {self.csv} has {lines} lines, and the pipeline {self.pp} ranks."
            )
        if program.num_microbatches != self.count:
            raise PlanError(
                f"{name}: {self.csv} has {program.num_microbatches} microbatches, and the batch "
                f"makes {self.count}."
            )
        text = as_csv(torch_rows(program))
        note = f"{self.csv}: its computations, with messages where torch puts them"
        return Theirs(ScheduleFile(file.name, text, asked.placement), self.framework, notes=(note,))


# --------------------------------------------------------------------------------------- the files


def _toml(text: str, name: str) -> Values:
    """Every key of every table, the last of a name."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProgramError(f"{name} is no TOML: {_plain(str(error))}") from None
    except RecursionError:
        raise ProgramError(f"{name} is no TOML: nested too deep.") from None
    values = dict(_leaves(found))
    if not any(key.startswith("pipeline_parallel_") for key in values):
        raise PlanError(
            f"{name} says nothing of a pipeline: it has no pipeline_parallel_degree and "
            "pipeline_parallel_schedule in [parallelism] (torchtitan)."
        )
    return values


def _yaml(text: str, name: str) -> Values:
    if text.count("&") and text.count("*") > 50:
        raise ProgramError(f"{name}: a recipe has no use for so many aliases, and none is read.")
    try:
        found = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ProgramError(f"{name}{at}: this is no YAML: {_plain(error.problem or '')}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ProgramError(f"{name} is no YAML: {_plain(str(error))}") from None
    if not isinstance(found, dict):
        raise ProgramError(f"{name}, line 1, column 1: this is no mapping of keys to values.")
    values = dict(_leaves(found))
    return {key: _followed(value, found, name) for key, value in values.items()}


def _followed(value: object, tree: object, name: str) -> object:
    """``${step_scheduler.local_batch_size}`` as the value that it points to."""
    for _ in range(10):
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if match is None:
            return value
        found = tree
        for part in match[1].split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            raise PlanError(f"{name}: {shown(str(value))} points to nothing in the file.")
        value = found
    raise PlanError(f"{name}: {shown(str(value))} points in a ring.")


def _leaves(tree: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    if not isinstance(tree, dict) or depth > _DEEPEST:
        return
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, depth + 1)
        else:
            yield str(key), value


def _python(text: str, name: str, chosen: str | None) -> Values:
    """Keywords with plain values in the one function that speaks of a pipeline."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = ""
        if isinstance(error, SyntaxError):
            at = f", line {error.lineno}, column {error.offset}"
        raise ProgramError(f"{name}{at}: this is no Python: {_plain(str(error))}") from None
    found: dict[str, Values] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            values = dict(_keywords(node))
            if any(key.startswith("pipeline_parallel_") for key in values):
                found[node.name] = values
    if chosen is None and len(found) == 1:
        return next(iter(found.values()))
    if chosen in found and chosen is not None:
        return found[chosen]
    if not found:
        values = dict(_keywords(tree))
        if chosen is None and any(key.startswith("pipeline_parallel_") for key in values):
            return values
        raise PlanError(
            f"{name} says nothing of a pipeline: no function of it sets "
            "pipeline_parallel_degree=... (torchtitan)."
        )
    listed = ", ".join(list(found)[:6])
    raise PlanError(
        f"{name} has {len(found)} configurations with a pipeline ({listed}). Try "
        f"{name.partition(':')[0]}:{next(iter(found))}."
    )


def _keywords(tree: ast.AST) -> Iterator[tuple[str, object]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            key: str | None = node.arg
            value: ast.expr | None = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            key, value = node.targets[0].attr, node.value
        else:
            continue
        if key is None or value is None:
            continue
        try:
            yield key, ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue  # It is computed; only running the file would tell.


def _plain(text: str) -> str:
    return " ".join(text.split())[:160]
