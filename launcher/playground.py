"""What the playground page asks: words of a command line in, figures and a picture out.

The page runs this in a browser, where there is neither Hydra nor a machine to train on. It goes the
way of ``mode=simulate`` all the same: words become a checked ``LaunchConfig`` and a resolved run,
which is compiled, simulated and drawn by the code of the command line. Only the composition is
different: the options of ``conf/`` come as data (``Options``) that the page's builder has composed.
Imports nothing but the standard library and the torch-free part of this project.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.compose.option_groups import Groups
from launcher.config import LaunchConfig, check, from_dict
from launcher.config.decode import unknown_key
from launcher.config.key import is_free, keys_of
from launcher.report.html import Panel, timeline_html
from launcher.report.predicted import (
    compute_csv,
    predict,
    predicted_mapping,
    run_title,
    with_memory,
)
from launcher.resolve import Run, resolve
from launcher.workloads.model_share import model_units, units_per_layer
from strategies.compiler import schedule_of
from strategies.errors import PipelineError, PlanError
from strategies.ir.kinds import Kind
from strategies.plan import read_schedule_file
from strategies.schedules import SCHEDULES

MAX_FORWARDS = 16_384
"""Stages x microbatches of one picture: what a browser compiles in half a minute."""
MAX_RANKS = 128
"""Rows of one picture; a browser's canvas ends at some 16,000 pixels."""

_FIXED = {"mode": "the page simulates", "plan": "the page draws the plan that it is given"}
_FORWARD = re.compile(r"[0-9]F[0-9]")
_LONGEST_WORD = 2_000
_MODES = ("simulate", "train")


@dataclass(frozen=True, slots=True)
class Options:
    """What Hydra would compose.

    Attributes:
        base: The configuration of an empty command line, as ``launcher.config.dump`` writes it.
        groups: Group -> option -> its node, as in the configuration that ``group=option`` makes.
    """

    base: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]]


def answer(words: Sequence[str], options: Options) -> dict[str, Any]:
    """One question of the page.

    Args:
        words: ``key=value`` as on a command line, without ``mode``. A value is a number, ``null``,
            ``true``, ``false``, a list in brackets, or text. ``schedule.file`` is read from the
            working directory.
        options: What ``group=option`` stands for.

    Returns:
        ``error``: the message of a wrong question, alone. Or ``result``: what result.json has of
        the run; ``page``: its timeline.html; ``csv``: its order as schedule.csv; ``simulate`` and
        ``train``: the command lines that make this picture, and that train in this order.
    """
    try:
        _check_size(configuration(words, options), words)
        config = configuration(words, options)
        check(config)
        run = resolve(config)
        timeline, metrics = predict(run)
        panel = Panel("predicted", timeline, metrics)
        return {
            "result": predicted_mapping(run, metrics),
            "page": timeline_html(with_memory([panel], run), title=run_title(run)),
            "csv": compute_csv(run.programs.train),
            "simulate": _command(["mode=simulate", *words]),
            "train": _command(training_words(words, run)),
        }
    except PipelineError as error:
        return {"error": str(error)}


def answer_json(question: str, options: Options) -> str:
    """The same for a worker, which exchanges text: ``["schedule=zb_v", "pp=4"]`` for instance."""
    return json.dumps(answer(json.loads(question), options), allow_nan=False)


def read_options(text: str) -> Options:
    """From JSON with the fields' names."""
    return Options(**json.loads(text))


def choices(options: Options) -> dict[str, list[str]]:
    """Per group what the page can offer: all but what needs files or a machine."""
    left_out = {"profiled", "hf", "class"}
    return {
        group: [name for name in names if name not in left_out]
        for group, names in options.groups.items()
    }


def configuration(words: Sequence[str], options: Options, mode: str = "simulate") -> LaunchConfig:
    """The typed configuration that Hydra would make of the same words.

    Raises:
        PlanError: A word is no ``key=value``, or names a key, an option or a value that is none.
    """
    assert mode in _MODES
    values: dict[str, Any] = {name: _copied(node) for name, node in options.base.items()}
    pairs = [_split(word) for word in words]
    keys = {entry.path for entry in keys_of(LaunchConfig)}
    known = Groups({group: tuple(names) for group, names in options.groups.items()}, {})
    for key, text in pairs:
        if key in options.groups:
            known.require(key, text)
            values[key] = dict(options.groups[key][text])
    for key, text in pairs:
        if key not in options.groups:
            if key not in keys and not is_free(key, LaunchConfig):
                raise unknown_key(key, value=text)
            _set(values, key, _value(text))
    return from_dict(values | {"mode": mode})


def training_words(words: Sequence[str], run: Run) -> list[str]:
    """What trains in the order of the picture.

    Uniform costs stay where the order was made for them; otherwise a run has better ones. A model
    with fewer units than there are stages is made longer, and what reduces gradients gets replicas.
    """
    keys = {word.partition("=")[0] for word in words}
    uniform = run.config.costs.name == "uniform"
    kept = [word for word in words if not uniform or _ordered_by_costs(run) or not _is_cost(word)]
    stages, units = run.programs.train.placement.num_stages, len(model_units(run.shape))
    if uniform and units < stages:
        kept = [word for word in kept if not word.startswith("model.layers=")]
        kept.append(f"model.layers={-(-(stages - 2) // units_per_layer(run.shape))}")
    reduced = run.config.costs.grad_reduce
    if uniform and reduced not in (0.0, ()) and "dp" not in keys:
        kept.append("dp=2")
    return kept


def _ordered_by_costs(run: Run) -> bool:
    schedule, plan = schedule_of(run.plan), run.plan
    chosen = schedule.chooses_group and run.config.schedule.group in (None, "auto")
    fused = any(item.kind is Kind.OVERLAP for row in run.programs.train.ranks for item in row)
    moved = plan.split_backward or plan.recompute.policy in ("mario", "optimal")
    return schedule.cost_aware or chosen or fused or moved


def _is_cost(word: str) -> bool:
    return word.startswith(("costs=", "costs."))


def _command(words: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "launcher", *words])


def _split(word: str) -> tuple[str, str]:
    if len(word) > _LONGEST_WORD:
        raise PlanError(
            f"{word[:40]}... has {len(word):,} characters, a word at most {_LONGEST_WORD:,}.",
            fix="Leave it out.",
        )
    key, equals, text = word.partition("=")
    if not equals or not key.strip():
        raise PlanError(f"{word[:80]}: expected key=value. Try pp=4.")
    if key.strip() in _FIXED:
        raise PlanError(f"{word[:80]}: {_FIXED[key.strip()]}.", fix=f"Leave {key.strip()} out.")
    if key.strip().endswith(".path"):
        raise PlanError(
            f"{word[:80]}: the page runs no code and reads no folder of yours.",
            fix=f"On a machine of yours: {_command(['mode=simulate', word])}",
        )
    return key.strip(), text.strip()


def _copied(node: object) -> object:
    return dict(node) if isinstance(node, Mapping) else node


def _set(values: dict[str, Any], key: str, value: object) -> None:
    *nodes, leaf = key.split(".")
    for name in nodes:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            child = values[name] = {}  # The decoder says that this is no node.
        values = child
    values[leaf] = value


def _value(text: str) -> object:
    try:
        return json.loads(text) if text else ""
    except RecursionError:
        return text
    except ValueError:
        pass
    try:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else float(text)
    except ValueError:
        return text


def _check_size(config: LaunchConfig, words: Sequence[str]) -> None:
    """Refuses what the browser would work at for minutes, before anything is computed.

    Raises:
        PlanError: Too many ranks, or stages x microbatches.
    """
    pp, count = config.pp, config.num_microbatches
    here = f"On a machine of yours: {_command(['mode=simulate', *words])}"
    if pp > MAX_RANKS:
        raise PlanError(f"pp={pp}: this page draws at most {MAX_RANKS} ranks. Try pp=64. {here}")
    if config.schedule.file is not None:
        text = read_schedule_file(config.schedule.file).text
        forwards = len(_FORWARD.findall(text))
        if forwards > MAX_FORWARDS:
            raise PlanError(
                f"schedule.file={config.schedule.file} has {forwards:,} forwards, and this page "
                f"takes at most {MAX_FORWARDS:,}. {here}"
            )
        return
    entry = SCHEDULES.get(config.schedule.name)
    stages = config.schedule.stages_per_rank or (entry.stages_per_rank if entry else 1)
    microbatches = 2 * pp if count == "auto" else int(count)
    forwards = pp * stages * microbatches
    if pp > 0 and microbatches > 0 and forwards > MAX_FORWARDS:
        each = "" if stages == 1 else f" * {stages} stages"
        room = max(1, MAX_FORWARDS // (pp * stages))
        raise PlanError(
            f"pp={pp}{each} * num_microbatches={microbatches} are {forwards:,} forwards, and this "
            f"page takes at most {MAX_FORWARDS:,}. Try num_microbatches={room}. {here}"
        )
