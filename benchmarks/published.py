"""Predicted against published: step time and memory of training runs that others have measured.

    python -m benchmarks.published [FILE.csv] [--rows] [--page docs/evidence/predictions.md]

Each row of the file (default: benchmarks/published.csv; its columns are in ``published_run``)
becomes a request, with ``hardware=`` of its card and nothing measured, and is predicted. Printed
are, per source and card, the mean absolute percentage error (MAPE) of the step time, the mean
signed one, Kendall's tau of FLOP/s per rank within each table, the error of memory, and how many
runs were rightly said to fit or not. Rows that cannot be asked for are named with what is missing.
Add a run as a row, and run it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.prediction import kendall_tau
from benchmarks.published_run import Prediction, predict_run, read_runs
from launcher.compose.session import hydra_session
from strategies.compiler import compile_plan

RUNS = Path(__file__).with_name("published.csv")
MARKER = "<!-- From here on written by `python -m benchmarks.published --page`. -->"


def predict_file(path: Path) -> list[Prediction]:
    found = []
    with hydra_session():
        for run in read_runs(path):
            found.append(predict_run(run))
            compile_plan.cache_clear()  # of programs of thousands of ranks
    return found


def report(predictions: Sequence[Prediction], *, rows: bool = False) -> str:
    """Markdown: the figures per card, per source and per table, and what could not be asked."""
    known = [p for p in predictions if p.missing is None]
    parts = [
        _errors(known, "card", lambda p: p.run.hardware),
        _errors(known, "source", lambda p: f"{p.run.source}, {p.run.hardware}"),
        _ranks(known),
        _verdicts(known),
    ]
    if rows:
        parts.append(_rows(known))
    missing = [p for p in predictions if p.missing is not None]
    if missing:
        lines = [f"- {p.run.name}: {p.missing}" for p in missing]
        parts.append("Cannot be asked for:\n\n" + "\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def mean_error(predictions: Iterable[Prediction]) -> float:
    """MAPE of the step times."""
    errors = [abs(p.error) for p in predictions if p.error is not None]
    return sum(errors) / len(errors)


def _errors(predictions: Sequence[Prediction], title: str, by: Callable[[Prediction], str]) -> str:
    lines = [
        f"| {title} | runs | step time MAPE | signed | worst | runs with memory | memory MAPE "
        "| signed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({by(p) for p in predictions}):
        group = [p for p in predictions if by(p) == name]
        times = [p.error for p in group if p.error is not None]
        held = [p.memory_error for p in group if p.memory_error is not None]
        lines.append(f"| {name} | {_summary(times, worst=True)} | {_summary(held)} |")
    return "\n".join(lines)


def _summary(errors: Sequence[float], *, worst: bool = False) -> str:
    if not errors:
        return "0 | | " + ("| " if worst else "")
    count = len(errors)
    text = f"{count} | {sum(map(abs, errors)) / count:.1%} | {sum(errors) / count:+.1%}"
    return f"{text} | {max(errors, key=abs):+.1%}" if worst else text


def _ranks(predictions: Sequence[Prediction]) -> str:
    """Tau of each table of three runs and more."""
    lines = ["| table | runs | Kendall tau |", "|---|---|---|"]
    found: dict[str, list[float]] = {}
    for name in sorted({p.run.group for p in predictions}):
        speeds = [p.speeds() for p in predictions if p.run.group == name and p.error is not None]
        if len(speeds) < 3:
            continue
        tau = kendall_tau([first for first, _ in speeds], [second for _, second in speeds])
        lines.append(f"| {name} | {len(speeds)} | {tau:+.2f} |")
        source = next(p.run.source for p in predictions if p.run.group == name)
        found.setdefault(source, []).append(tau)
    for source, taus in found.items():
        if len(taus) > 1:
            lines.append(
                f"| mean of {source} | {len(taus)} tables | {sum(taus) / len(taus):+.2f} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def _verdicts(predictions: Sequence[Prediction]) -> str:
    told = [p for p in predictions if p.run.fits is not None]
    if not told:
        return ""
    right = sum(p.fits == p.run.fits for p in told)
    wrong = [
        f"- {p.run.name}: {'ran' if p.run.fits else 'did not fit'}, predicted "
        f"{p.taken_bytes / 1e9:.1f} of {p.limit_bytes / 1e9:.1f} GB"
        for p in told
        if p.fits != p.run.fits
    ]
    return "\n".join([f"Fits or not: {right} of {len(told)} right.", "", *wrong]).rstrip()


def _rows(predictions: Sequence[Prediction]) -> str:
    lines = [
        "| run | card | measured s | predicted s | error | measured GB | predicted GB | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in predictions:
        measured = f"{p.run.step_s:.4g}" if p.run.step_s else ""
        error = "" if p.error is None else f"{p.error:+.1%}"
        held = f"{p.run.memory_bytes / 1e9:.1f}" if p.run.memory_bytes else ""
        held = "did not fit" if p.run.fits is False else held
        off = "" if p.memory_error is None else f"{p.memory_error:+.1%}"
        lines.append(
            f"| {p.run.name} | {p.run.hardware} | {measured} | {p.step_s:.4g} | {error} | {held} "
            f"| {p.memory_bytes / 1e9:.1f} | {off} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=RUNS)
    parser.add_argument("--rows", action="store_true", help="a line per run, too")
    parser.add_argument("--page", type=Path, help="document whose tables are replaced")
    arguments = parser.parse_args()
    page = arguments.page
    above = "" if page is None else _above(page)
    text = report(predict_file(arguments.file), rows=arguments.rows or page is not None)
    if page is None:
        sys.stdout.write(f"{text}\n")
    else:
        page.write_text(f"{above}{MARKER}\n\n{text}\n")
        sys.stdout.write(f"{page} written\n")


def _above(page: Path) -> str:
    """What stands on a page in front of its tables."""
    text = page.read_text() if page.is_file() else ""
    above, found, _ = text.partition(MARKER)
    if not found:
        raise SystemExit(f"{page} has no line {MARKER}. Try docs/evidence/predictions.md.")
    return above


if __name__ == "__main__":
    main()
