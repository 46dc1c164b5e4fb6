"""``python -m launcher check theirs.csv``: whether somebody's schedule can run, and how good it is.

The file has torch's notation, a line per rank; SENDs and RECVs are kept if it has any, and judged
under what the transport promises of messages (check.semantics=, check.grouped=). A configuration of
torchtitan (.toml, .py) or NeMo AutoModel (.yaml), a script of Megatron-LM or its flags do as well.
Keys may follow: costs, as in ``costs=uniform costs.forward=2``, or hydra.run.dir=PATH for files.

Exit codes, for a CI: 0 it runs, 1 it does not (with its messages elsewhere it is written, where
that helps), 2 it is no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.config import LaunchConfig, check
from launcher.config.pipeline import CheckConfig
from launcher.report.ascii import draw
from launcher.report.html import Panel
from launcher.report.predicted import predict, predicted_mapping, write_pictures
from launcher.report.result import write_atomically, write_result
from launcher.report.summary import print_summary
from launcher.resolve import Run, resolve
from launcher.terminal import say, terminal_width
from strategies.errors import PipelineError, PlanError
from strategies.lowering.send_recv import add_messages
from strategies.referee import (
    Opinion,
    Ours,
    Repair,
    Verdict,
    alternatives,
    examine,
    notation,
    time_messages,
)
from strategies.referee.foreign import Asked, Theirs, read_flags, read_their_file

REPAIRED = "repaired.csv"
_ORDER = "order.csv"
_READ = "read.csv"  # another framework's words in torch's notation
_FAILED = 1
_LISTED = 3  # schedules of ours
_CYCLE = 12  # lines of it


def run(config: LaunchConfig, run_dir: Path) -> int:
    """Reads, judges, repairs, simulates and compares; returns the exit code."""
    theirs = _read(config)
    asked = config.check
    opinion = examine(
        theirs.file.text,
        name=theirs.file.name,
        semantics=theirs.semantics if asked.semantics == "auto" else asked.semantics,
        grouped=theirs.grouped if asked.grouped == "auto" else asked.grouped,
        placement=theirs.file.placement,
    )
    can_run = opinion.runs or opinion.repaired is not None
    resolved = _simulated(config, opinion, run_dir, layers=theirs.layers) if can_run else None
    if theirs.framework != "torch":
        say("\n  ".join([f"{theirs.framework}'s words:", *theirs.notes]))
        write_atomically(run_dir / _READ, theirs.file.text)
    say("\n".join(_judged(opinion)))
    if opinion.repaired is not None:
        write_atomically(run_dir / REPAIRED, notation(opinion.repaired.program))
        say(_repaired(opinion.repaired, run_dir / REPAIRED))
    known: dict[str, object] = {
        "framework": theirs.framework,
        "notes": list(theirs.notes),
        "layers_per_stage": None if theirs.layers is None else list(theirs.layers),
    }
    if resolved is None:
        write_result(run_dir / "result.json", {"mode": "check"} | _mapping(opinion, []) | known)
        say(f"files: {run_dir}")
        return _FAILED
    timeline, metrics = predict(resolved)
    write_pictures(run_dir, [Panel("predicted", timeline, metrics)], resolved)
    ours = alternatives(opinion.whole, resolved.costs)
    cost = _message_cost(opinion, resolved)
    result = predicted_mapping(resolved, metrics) | {"mode": "check"} | _mapping(opinion, ours)
    result |= known | {"message_cost": cost}
    write_result(run_dir / "result.json", result)
    say(draw(timeline, width=terminal_width()))
    print_summary(result)
    if cost is not None:
        say(
            f"its messages where they stand, under {opinion.asked.semantics}: {cost:+.1%} time "
            "over the same computations with messages where our lowering has them"
        )
    say("\n".join(_compared(ours, timeline.makespan)))
    say(f"files: {run_dir}")
    return 0 if opinion.runs else _FAILED


def _read(config: LaunchConfig) -> Theirs:
    """The order, out of whatever file or flags have it."""
    check, path = config.check, config.schedule.file
    asked = Asked(check.num_gpus, check.layers, config.schedule.placement)
    if path is not None:
        return read_their_file(path, asked, flags=check.flags)
    assert check.flags is not None
    return read_flags(check.flags, asked, name="check.flags")


def _simulated(
    config: LaunchConfig, opinion: Opinion, run_dir: Path, *, layers: tuple[int, ...] | None
) -> Run:
    """The order that runs, as ``mode=simulate`` has it: its computations, in a file of its own.

    Raises:
        PlanError: Keys beside the file do not fit its order; nothing has been written then.
    """
    order, theirs = opinion.compute_file, config.schedule.file or "check.flags"
    path = run_dir / _ORDER
    write_atomically(path, order.text)
    schedule = replace(
        config.schedule,
        name="custom",
        file=str(path),
        stages_per_rank=None,
        group=None,
        layers_per_stage=layers or config.schedule.layers_per_stage,
    )
    if layers:
        config = replace(config, model=replace(config.model, layers=sum(layers)))
    pp = len(opinion.program.ranks)
    config = replace(config, mode="simulate", pp=pp, schedule=schedule, check=CheckConfig())
    try:
        check(config)
        return resolve(config)
    except PipelineError as error:
        path.unlink()
        raise PlanError(str(error).replace(str(path), theirs)) from error


def _message_cost(opinion: Opinion, run: Run) -> float | None:
    """What the places of the messages cost, as a share of the step."""
    if not opinion.program.lowered:
        return None
    whole = opinion.whole
    grouped = opinion.grouped and not (opinion.repaired and opinion.repaired.ungrouped)
    semantics = opinion.asked.semantics
    took = time_messages(whole, run.costs, semantics, grouped=grouped)
    anew = add_messages(replace(whole, ranks=whole.compute_rows(), lowered=False))
    best = time_messages(anew, run.costs, semantics)
    return None if took is None or not best else took / best - 1.0


def _judged(opinion: Opinion) -> list[str]:
    program = opinion.program
    messages = "with its messages" if program.lowered else "without messages: computations alone"
    lines = [
        f"{program.schedule}: {len(program.ranks)} ranks, {program.placement.num_stages} stages, "
        f"{program.num_microbatches} microbatches, {messages}"
    ]
    if program.lowered:
        for verdict in opinion.verdicts:
            mark = ">" if verdict is opinion.asked else " "
            lines.append(f"{mark} {verdict.semantics:<10}  {_word(verdict)}")
    if opinion.runs:
        proven = "every instruction and message ends" if program.lowered else "no value is missing"
        return [*lines, f"it runs: {proven}, whatever the durations"]
    asked = opinion.asked
    lines.append(
        f"it does not run under {asked.semantics}:" if program.lowered else "it deadlocks:"
    )
    if asked.crossing is not None:
        lines.append(str(asked.crossing))
    else:
        lines += asked.grid.splitlines()
        lines.append("the ring of those that wait for each other:")
        shown = asked.cycle[:_CYCLE]
        lines += [f"  {line}" for line in shown]
        if len(shown) < len(asked.cycle):
            lines.append(f"  ... and {len(asked.cycle) - len(shown)} more")
    if program.lowered and opinion.repaired is None:
        lines.append("its computations wait for each other: no place of its messages helps")
    return lines


def _word(verdict: Verdict) -> str:
    if verdict.runs:
        return "runs"
    return "messages cross" if verdict.crossing is not None else "deadlocks"


def _repaired(found: Repair, path: Path) -> str:
    places = "with messages placed by our lowering" if found.placed else "as it stands"
    alone = ", with every message in a call of its own" if found.ungrouped else ""
    return f"it runs {places}{alone}: {path}"


def _compared(ours: Sequence[Ours], makespan: float) -> list[str]:
    if not ours:
        return ["no schedule of ours has these stages on these ranks"]
    lines = ["schedules of ours for the same stages, the most alike first:"]
    listed = list(ours[:_LISTED])
    fastest = min(ours, key=lambda entry: entry.makespan)
    if fastest not in listed:
        listed.append(fastest)
    for entry in listed:
        gain = entry.makespan / makespan - 1.0
        change = "the same time" if abs(gain) < 5e-4 else f"{gain:+.1%} time"
        lines.append(
            f"  {entry.name:<17} {entry.likeness:>4.0%} alike   {change:<14} "
            f"holds {entry.peak:g} microbatches' activations"
        )
    return lines


def _mapping(opinion: Opinion, ours: Sequence[Ours]) -> dict[str, object]:
    """What result.json has beyond that of ``mode=simulate``."""
    found = opinion.repaired
    return {
        "runs": opinion.runs,
        "semantics": opinion.asked.semantics,
        "verdicts": {verdict.semantics: _word(verdict) for verdict in opinion.verdicts},
        "cycle": list(opinion.asked.cycle),
        "crossing": None if opinion.asked.crossing is None else str(opinion.asked.crossing),
        "repair_placed": None if found is None else found.placed,
        "repair_ungrouped": None if found is None else found.ungrouped,
        "alternatives": [
            {
                "schedule": entry.name,
                "likeness": entry.likeness,
                "step_time": entry.makespan,
                "peak_activations": entry.peak,
            }
            for entry in ours
        ],
    }
