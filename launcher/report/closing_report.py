"""What a training run ends with: one screen, 24 lines of 80 columns, for whoever waits for it.

What was done, how well it learnt, how fast, predicted beside measured, and what to type next. Every
figure, with its bounds, stands in ``report.txt``, which ``--verbose`` prints, and in result.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.checkpoints import ROOTS
from launcher.config.check_code import model_label
from launcher.config.key import typed
from launcher.report.result import REPORT, write_atomically
from launcher.report.summary import format_duration, format_peak, format_percent, summary
from launcher.report.typed_command import paste, typed_words
from launcher.resolve import Run
from strategies.errors import readable
from strategies.manifest import MANIFEST, NOT_FINITE, read_manifest

WIDTH, _LABEL, _FIGURE = 80, 26, 13
_INDENT = "           "
# Of a command that a line suggests; a longer one is left to whoever has typed it.
_MOST_LINES = 2


def write_report(run_dir: Path, result: Mapping[str, object]) -> None:
    """``report.txt``: every figure of result.json that a person reads."""
    write_atomically(run_dir / REPORT, summary(result) + "\n")


def print_closing(run: Run, run_dir: Path, result: Mapping[str, object]) -> None:
    """Prints the screen; its first line is bold on a terminal."""
    first, *rest = closing_lines(run, run_dir, result)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(readable(first), style="bold"))
    for line in rest:
        console.print(Text(readable(line)))


def closing_lines(run: Run, run_dir: Path, result: Mapping[str, object]) -> list[str]:
    """The screen line by line; none but those with a path of the user's is wider than 80 columns.

    ``result``: the mapping of result.json.
    """
    lines = [*_done(run, result), ""]
    lines += [*_learnt(run, result), *_speed(result), ""]
    if beside := list(_beside(result)):
        lines += ["  " + "".ljust(_LABEL) + "predicted".rjust(_FIGURE) + "measured".rjust(_FIGURE)]
        lines += [*beside, *_costs(run, result), ""]
    return [*lines, *_next(run, run_dir, result)]


def _done(run: Run, result: Mapping[str, object]) -> Iterator[str]:
    config = run.config
    count = result.get("num_parameters")
    active = run.num_active_parameters
    some = "" if active is None else f", {active:,} active"
    size = f" ({count:,} parameters{some})" if isinstance(count, int) else ""
    rows = run.batch_size * run.dp * config.trainer.accumulate_grad_batches
    # Only its own loaders know the batch of a data module of the user's.
    of = "" if run.own_data else f" of {rows} sequences of {run.shape.sequence} tokens"
    steps = result.get("steps")
    yield f"trained {model_label(config)}{size}: {steps} steps{of}"[:WIDTH]
    words = [f"{key}={result[key]}" for key in ("pp", "dp", "tp") if result.get(key) is not None]
    words += [f"ep={result['ep']}"] if result.get("ep", 1) != 1 else []
    words.append(f"{result.get('num_microbatches')} microbatches")
    words += [f"{key}={result[key]}" for key in ("recompute",) if result.get(key) != "none"]
    yield f"{result.get('schedule')}  {'  '.join(words)}  {config.trainer.precision}"[:WIDTH]


def _learnt(run: Run, result: Mapping[str, object]) -> Iterator[str]:
    first, last, val = (_number(result.get(k)) for k in ("loss_first", "loss_last", "val_loss"))
    if last is None:
        yield "  loss     none was logged as train_loss"
    else:
        text = f"  loss     {last:.4f}" + ("" if first is None else f", from {first:.4f}")
        yield text + ("" if val is None else f"; validation {val:.4f}")
    trainer = run.config.trainer
    if val is None and trainer.limit_val_batches != 0:
        every = f"trainer.val_check_interval={trainer.val_check_interval}"
        yield f"{_INDENT}no val_loss in {result.get('steps')} steps ({every})"
    if skipped := result.get("skipped_steps"):
        yield f"{_INDENT}{skipped} steps were left out: loss or gradients not finite"
    if restarts := result.get("restarts"):
        yield f"{_INDENT}ranks were started again {restarts} times, from the newest checkpoint"


def _speed(result: Mapping[str, object]) -> Iterator[str]:
    step, rate, mfu = (_number(result.get(key)) for key in ("step_time_s", "tokens_per_s", "mfu"))
    if step is None:
        return
    words = [f"{format_duration(step, 's')} per step (median)"]
    if rate is not None:
        words.insert(0, f"{rate:,.0f} tokens/s" if rate >= 1000 else f"{rate:.4g} tokens/s")
    yield f"  speed    {', '.join(words)}"
    peak = _number(result.get("peak_flops"))
    if mfu is not None and peak is not None:
        of = format_peak(peak, str(result.get("peak_format")))
        yield f"{_INDENT}MFU {format_percent(mfu)} of {of} per rank"


def _beside(result: Mapping[str, object]) -> Iterator[str]:
    """Pairs of which at least one is known."""
    seconds = result.get("time_unit") == "s"
    simulated = {key: result.get(key) for key in ("makespan", "bubble_ratio")}
    exposed = None
    if result.get("dp") != 1:
        exposed = result.get("exposed_grad_reduce") if seconds else None
    rows: tuple[tuple[str, object, object], ...] = (
        ("time per step", result.get("predicted_step_time_s"), result.get("step_time_s")),
        (
            "pipeline, first F to last",
            simulated["makespan"] if seconds else None,
            result.get("measured_makespan_s"),
        ),
        ("exposed reduction", exposed, result.get("measured_exposed_grad_reduce_s")),
    )
    for label, predicted, measured in rows:
        if label != "exposed reduction" or result.get("dp") != 1:
            yield from _pair(label, *map(_seconds, (predicted, measured)))
    ratios = (simulated["bubble_ratio"], result.get("measured_bubble_ratio"))
    yield from _pair("bubble (idle share)", *map(_percent, ratios))
    # A process on a CPU grows by what libraries take, too: no figure to put next to a prediction.
    comparable = result.get("measured_memory_kind") != "resident_growth"
    measured = result.get("measured_peak_memory_bytes") if comparable else None
    memory = (result.get("predicted_peak_memory_bytes"), measured)
    yield from _pair("memory, fullest rank", *map(_memory, memory))


def _pair(label: str, predicted: str, measured: str) -> Iterator[str]:
    if predicted or measured:
        yield (
            f"  {label.ljust(_LABEL)}{(predicted or '-').rjust(_FIGURE)}"
            f"{(measured or '-').rjust(_FIGURE)}"
        )


def _costs(run: Run, result: Mapping[str, object]) -> Iterator[str]:
    """What the predictions go by: figures of a data sheet, or of this machine."""
    config = run.config
    if config.costs.name == "profiled":
        yield f"  predicted from measurements: {config.costs.file}"
    elif result.get("time_unit") != "s":
        yield "  predicted with uniform costs; mode=profile measures the model here"
    elif config.costs.name == "analytic":
        more = "this machine" if config.hardware.measured_on is None else "more"
        yield f"  predicted for hardware={config.hardware.name}; mode=profile measures {more}"


def _next(run: Run, run_dir: Path, result: Mapping[str, object]) -> Iterator[str]:
    yield "look at    timeline.html: the step as predicted, above the step as measured"
    yield f"{_INDENT}metrics.csv: a row per step; {REPORT}: every figure"
    dropped = ("trainer.resume=", "hydra.")
    given = [w for w in typed_words(run_dir) if not w.startswith(dropped)]
    steps, trainer = result.get("steps"), run.config.trainer
    bounded = trainer.max_epochs is None and trainer.max_time is None and trainer.max_steps > 0
    last = Path(str(result.get("checkpoint") or ""))
    if (last / MANIFEST).is_file() and NOT_FINITE in read_manifest(last)["metadata"]:
        yield "go on".ljust(len(_INDENT)) + "not from the last checkpoint, which is not finite"
    elif last.name and bounded and isinstance(steps, int):
        words = [w for w in given if not w.startswith("trainer.max_steps=")]
        more = [f"trainer.max_steps={2 * trainer.max_steps}", _resume(str(last))]
        short = [w for w in more if w not in typed_words(run_dir)]
        yield from _command("go on", paste(run_dir, [*words, *more]), f"add {shlex.join(short)}")
    other = "1f1b" if run.plan.schedule != "1f1b" else "zb_h1"
    if _comparable(run, result):
        words = [w for w in given if not w.startswith("schedule")]
        names = f"schedule={run.config.schedule.name},{other}"
        yield from _command("compare", paste(run_dir, ["-m", *words, names]), f"add -m {names}")
    yield f"files: {run_dir}"


def _resume(checkpoint: str) -> str:
    """What the next run goes on with: ``auto`` looks below some folders only."""
    found = any(Path(checkpoint).is_relative_to(Path(root).absolute()) for root in ROOTS)
    return "trainer.resume=auto" if found else shlex.split(typed("trainer.resume", checkpoint))[0]


def _comparable(run: Run, result: Mapping[str, object]) -> bool:
    """Whether every other schedule with one stage per rank runs with the words of this one."""
    config = run.config
    return (
        config.cluster.name == "local"
        and config.pp > 1
        and config.plan == "manual"
        and result.get("stages_per_rank") == 1
        and config.schedule.name != "custom"
        and config.recompute.name == "none"
        and not config.compile
        and config.loss_over != "batch"
        and config.overlap.name != "zero1"
    )


def _command(word: str, command: str, short: str) -> Iterator[str]:
    """A line to be pasted, continued as shells continue it; ``short`` where it is too long."""
    lines = _folded(shlex.split(command), WIDTH - len(_INDENT) - 2)
    if len(lines) > _MOST_LINES or max(map(len, lines)) > WIDTH - len(_INDENT) - 2:
        lines = [short]
    head = word.ljust(len(_INDENT))
    for number, line in enumerate(lines):
        yield head + line + (" \\" if number + 1 < len(lines) else "")
        head = _INDENT + "  "


def _folded(words: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for word in map(shlex.quote, words):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _seconds(value: object) -> str:
    number = _number(value)
    return "" if number is None else format_duration(number, "s")


def _percent(value: object) -> str:
    number = _number(value)
    return "" if number is None else format_percent(number)


def _memory(value: object) -> str:
    """The fullest rank."""
    if not isinstance(value, list | tuple):
        value = [value]
    known = [number for each in value if (number := _number(each)) is not None]
    if not known:
        return ""
    scale, unit = (2**30, "GiB") if max(known) >= 2**30 else (2**20, "MiB")
    return f"{max(known) / scale:.3g} {unit}"
