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
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.published_run import Prediction, predict_run, read_runs
from benchmarks.table import Table, furthest, kendall_tau
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
        _errors(known, "card", _card),
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


def _card(prediction: Prediction) -> str:
    """Models with experts apart."""
    run = prediction.run
    return f"{run.hardware}, experts" if run.row.get("experts") else run.hardware


def _errors(predictions: Sequence[Prediction], title: str, by: Callable[[Prediction], str]) -> str:
    table = Table(
        title, "runs", "step time MAPE", "signed", "worst", "runs with memory", "memory MAPE",
        "signed",
    )  # fmt: skip
    for name in sorted({by(p) for p in predictions}):
        group = [p for p in predictions if by(p) == name]
        times = [p.error for p in group if p.error is not None]
        held = [p.memory_error for p in group if p.memory_error is not None]
        table.add(name, *_summary(times), *_summary(held)[:3])
    return str(table)


def _summary(errors: Sequence[float]) -> tuple[str, str, str, str]:
    """Their number, MAPE, the signed mean, and the worst one."""
    if not errors:
        return "0", "", "", ""
    count, worst = len(errors), furthest(errors)
    mape, mean = sum(map(abs, errors)) / count, sum(errors) / count
    return str(count), f"{mape:.1%}", f"{mean:+.1%}", f"{worst:+.1%}"


def _ranks(predictions: Sequence[Prediction]) -> str:
    """Tau of each table of three runs and more."""
    table = Table("table", "runs", "Kendall tau")
    found: dict[str, list[float]] = {}
    for name in sorted({p.run.group for p in predictions}):
        group = [p for p in predictions if p.run.group == name and p.error is not None]
        if len(group) < 3:
            continue
        tau = kendall_tau(*zip(*(p.speeds() for p in group), strict=True))
        table.add(name, len(group), f"{tau:+.2f}")
        found.setdefault(group[0].run.source, []).append(tau)
    for source, taus in found.items():
        if len(taus) > 1:
            mean = sum(taus) / len(taus)
            table.add(f"mean of {source}", f"{len(taus)} tables", f"{mean:+.2f}")
    return str(table) if len(table) else ""


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
    table = Table(
        "run", "card", "measured s", "predicted s", "error", "measured GB", "predicted GB", "error"
    )
    for p in predictions:
        held = f"{p.run.memory_bytes / 1e9:.1f}" if p.run.memory_bytes else ""
        table.add(
            p.run.name,
            p.run.hardware,
            f"{p.run.step_s:.4g}" if p.run.step_s else "",
            f"{p.step_s:.4g}",
            "" if p.error is None else f"{p.error:+.1%}",
            "did not fit" if p.run.fits is False else held,
            f"{p.memory_bytes / 1e9:.1f}",
            "" if p.memory_error is None else f"{p.memory_error:+.1%}",
        )
    return str(table)


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
