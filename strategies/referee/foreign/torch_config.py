"""torchtitan's and NeMo AutoModel's configurations: which schedule of torch they ask for.

TOML, YAML, a module of configurations in Python, a script with flags: the keys of a pipeline are
found by their names, whatever stands around them; no file is run. Of flags the last one holds; a
file that gives a key of the pipeline two values is refused. Both frameworks name a schedule of
torch.distributed.pipelining or a CSV file of computations, and torch adds the messages itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strategies.errors import PlanError
from strategies.plan import ScheduleFile, read_schedule_file
from strategies.referee.foreign.their_words import Asked, Theirs, as_csv, shown, whole_number
from strategies.referee.foreign.torch_order import NAMES, named_order, torch_rows
from strategies.schedules.custom import read_order

_COMMENT = re.compile(r"(?m)(?:^|(?<=[ \t]))#.*$")
_KEY = re.compile(
    r"(?<![\w.-])(?:--)?[\w.]{0,200}?"
    r"\b(pipeline_parallel_\w+|pp_(?:size|schedule|schedule_csv|microbatch_size|batch_size)"
    r"|num_pp_microbatches|local_batch_size|layers_per_stage|module_fqns_per_model_part)"
    r"[\"']?[ \t]*(?:[=:][ \t]*|[ \t])"
    r"(\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\"[^\"\n]*\"|'[^'\n]*'|\$\{[\w.]+\}|[^\s\"',;#)\]}\\]+)"
)
_TITAN = "pipeline_parallel_"


def has_torch_keys(text: str) -> bool:
    """Whether a text speaks of a pipeline in torchtitan's or NeMo AutoModel's words."""
    return any(map(_is_of_pipelines, _values(text)))


def read_torch_config(
    text: str, asked: Asked, *, path: Path, name: str, chosen: str | None
) -> Theirs:
    """The order that torch makes of a configuration.

    Args:
        text: The configuration.
        asked: What is known beside it.
        path: Its file: a CSV that it names may lie beside it.
        name: What messages call it.
        chosen: Which function of a Python module; None if it has one configuration.

    Raises:
        PlanError: It says nothing of a pipeline, or asks for what torch does not have.
    """
    if path.suffix == ".py":
        text = _function(text, name, chosen)
    _refuse_several(text, name)
    values = _values(text)
    if not any(map(_is_of_pipelines, values)):
        raise PlanError(
            f"{name} says nothing of a pipeline: it has no pipeline_parallel_degree (torchtitan), "
            "no pp_size (NeMo AutoModel) and no flags of Megatron-LM."
        )
    titan = any(key.startswith(_TITAN) for key in values)
    return (_titan if titan else _automodel)(values, name).order(asked, path, name)


def _is_of_pipelines(key: str) -> bool:
    return key.startswith((_TITAN, "pp_"))


def _refuse_several(text: str, name: str) -> None:
    """Refuses a file with several configurations, of which nothing says which one is meant."""
    first: dict[str, str] = {}
    for match in _KEY.finditer(_COMMENT.sub("", text)):
        key, value = match[1], match[2].strip("\"'")
        flag = match[0].startswith("--") or not _is_of_pipelines(key)
        if not flag and first.setdefault(key, value) != value:
            raise PlanError(
                f"{name} sets {key} to {shown(first[key])} and to {shown(value)}, so it has "
                "several configurations. Leave one of them in a copy of it."
            )


def _values(text: str) -> dict[str, str]:
    """Every key with its last value; ``${section.key}`` is the value of that key."""
    found: dict[str, str] = {}
    for match in _KEY.finditer(_COMMENT.sub("", text)):
        value = match[2].strip("\"'")
        if value not in ("", "null", "None", "~"):
            found[match[1]] = value
    for key, value in found.items():
        if points := re.fullmatch(r"\$\{(?:\w+\.)*(\w+)\}", value):
            found[key] = found.get(points[1], value)
    return found


def _function(text: str, name: str, chosen: str | None) -> str:
    """The text of one function of a module, or the whole if one configuration is all it has."""
    parts = re.split(r"(?m)^(?=[ \t]*def )", text)
    named = {
        match[1]: part
        for part in parts
        if (match := re.match(r"[ \t]*def (\w+)", part)) and _TITAN in part
    }
    if chosen in named:
        return named[chosen]
    if chosen is None and len(named) < 2:
        return text
    if not named:
        raise PlanError(f"{name} says nothing of a pipeline: no function sets {_TITAN}degree.")
    raise PlanError(
        f"{name} has {len(named)} configurations with a pipeline ({', '.join(list(named)[:6])}). "
        f"Try {name.partition(':')[0]}:{next(iter(named))}."
    )


def _titan(values: Mapping[str, str], name: str) -> _Request:
    known = {key.removeprefix(_TITAN): value for key, value in values.items()}
    batch = whole_number(known.get("local_batch_size", 8), "local_batch_size", name)
    size = whole_number(known.get("microbatch_size", 1), f"{_TITAN}microbatch_size", name)
    count = known.get("num_pp_microbatches")
    less = [
        whole_number(known.get(f"{end}_stage_less_layers", 1), "less_layers", name, least=0)
        for end in ("first", "last")
    ]
    return _Request(
        framework="torchtitan",
        pp=whole_number(known.get("degree", 1), f"{_TITAN}degree", name),
        schedule=known.get("schedule", "1F1B"),
        csv=known.get("schedule_csv"),
        count=_count(batch, size, name, ("local_batch_size", f"{_TITAN}microbatch_size"))
        if count is None
        else whole_number(count, "num_pp_microbatches", name),
        per_stage=known.get("layers_per_stage"),
        less=sum(less),
        parts=known.get("module_fqns_per_model_part"),
    )


def _automodel(values: Mapping[str, str], name: str) -> _Request:
    batch = values.get("pp_batch_size") or values.get("local_batch_size") or 1
    size = whole_number(values.get("pp_microbatch_size", 1), "pp_microbatch_size", name)
    return _Request(
        framework="NeMo AutoModel",
        pp=whole_number(values.get("pp_size", 1), "pp_size", name),
        schedule=values.get("pp_schedule", "1f1b"),
        csv=values.get("pp_schedule_csv"),
        count=_count(
            whole_number(batch, "pp_batch_size", name),
            size,
            name,
            ("pp_batch_size", "pp_microbatch_size"),
        ),
        per_stage=values.get("layers_per_stage"),
        less=0,
        parts=values.get("module_fqns_per_model_part"),
    )


def _count(batch: int, size: int, name: str, keys: tuple[str, str]) -> int:
    if batch % size:
        raise PlanError(
            f"{name}: {keys[0]}={batch} is no multiple of {keys[1]}={size}, and torch wants equal "
            f"microbatches. Try {keys[0]}={-(-batch // size) * size}."
        )
    return batch // size


@dataclass(frozen=True, slots=True)
class _Request:
    """What a configuration asks torch for.

    Attributes:
        count: Microbatches.
        per_stage: Layers of a stage; None if nothing is said of them.
        less: Layers that the first and the last stage together have less.
        parts: Names of the modules of each stage, a list of lists as text; None likewise.
    """

    framework: str
    pp: int
    schedule: str
    csv: str | None
    count: int
    per_stage: str | None
    less: int
    parts: str | None

    def order(self, asked: Asked, path: Path, name: str) -> Theirs:
        if self.csv is not None:
            return self._of_csv(self.csv, asked, path, name)
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
        if self.parts is not None and self.parts.count("[") > 1:
            stages = self.parts.count("[") - 1
        elif self.per_stage is not None:
            each = whole_number(self.per_stage, "layers_per_stage", name)
            if asked.layers is None:
                raise PlanError(
                    f"{name}: layers_per_stage={each} makes as many stages as the model has "
                    "layers for, and the file only names the model. Try check.layers=32."
                )
            stages = -(-(asked.layers + self.less) // each)
        else:
            return None
        if stages % self.pp:
            raise PlanError(
                f"{name}: {stages} stages are no multiple of the pipeline's {self.pp} ranks."
            )
        return stages // self.pp

    def _of_csv(self, given: str, asked: Asked, path: Path, name: str) -> Theirs:
        """The computations of a CSV file; torch places the messages of its own accord."""
        beside = path.parent / given
        found = beside if beside.is_file() else Path(given)
        file = read_schedule_file(str(found), placement=asked.placement)
        program = read_order(file, messages=False)
        for has, wants, what in (
            (len(program.ranks), self.pp, "ranks"),
            (program.num_microbatches, self.count, "microbatches"),
        ):
            if has != wants:
                raise PlanError(
                    f"{name}: {shown(given)} has {has} {what}, and the configuration {wants}."
                )
        text = as_csv(torch_rows(program))
        note = f"{given}: its computations, with messages where torch puts them"
        return Theirs(ScheduleFile(file.name, text, asked.placement), self.framework, notes=(note,))
