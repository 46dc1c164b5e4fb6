"""The figures of README.md, read from the pages of evidence that hold them.

Those pages are written by commands (`python -m benchmarks.published --page`, `make gpu-proof`);
so no figure of the front page is typed by hand, or older than its page.
"""

from __future__ import annotations

import json
import re

from tools.docs.pages import DOCS

_BADGE = "https://img.shields.io/badge"


def gpu_badge() -> str:
    """What has run on a GPU, as a badge that leads to its page."""
    stages = json.loads((DOCS / "evidence" / "gpu.json").read_text(encoding="utf-8"))["stages"]
    passed = sum(stage["status"] == "passed" for stage in stages.values())
    card = _card().removeprefix("NVIDIA ")
    said = f"one {card}: {passed} of {len(stages)} checks passed"
    label = f"several GPUs: untested; {said}"
    text = f"one_{card}_{passed}/{len(stages)},_several_untested".replace("/", "%2F")
    return f"[![{label}]({_BADGE}/GPU-{text}-orange)](docs/evidence/gpu.md)"


def prediction_errors() -> str:
    """Mean errors of predicted step times and memory, of published runs seen and kept back."""
    page = (DOCS / "evidence" / "predictions.md").read_text(encoding="utf-8")
    cells = _cells(page)
    rows = [
        "| predicted from a datasheet | runs used for fitting | held-out runs, 111 in all |",
        "|---" * 3 + "|",
    ]
    for name, card in (("A100", "a100_80g"), ("H100", "h100")):
        row = cells[card]
        rows.append(
            f"| step time on {name}, mean error | {_percent(row[1])} ({row[0]} runs) | "
            f"{cells[f'step time, {name}'][0]} |"
        )
    memory = cells["a100_80g"]
    rows.append(
        f"| peak memory, mean error | {_percent(memory[5])} ({memory[4]} runs) | "
        f"{cells['peak memory'][0]} |"
    )
    right = re.search(r"Fits or not: (\d+ of \d+) right", page)
    assert right is not None
    rows.append(f"| does it fit | {right[1]} right | {cells['does it fit'][0]} right |")
    return "\n".join([*rows, "", _gpu_errors()])


def _gpu_errors() -> str:
    """Errors of step times that were predicted for the GPU of the proof, and then measured."""
    page = (DOCS / "evidence" / "gpu.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| configuration \|.*\n\|-.*\n((?:\|.*\n)+)\n(Median error .*)", page)
    said = []
    for rows, summary in tables:
        errors = [float(row.split("|")[4].strip().rstrip("%")) for row in rows.splitlines()]
        found = re.match(r"Median error of the step time ([\d.]+)%, the worst (-?[\d.]+)%", summary)
        assert found is not None
        short = sum(error < 0 for error in errors)
        number = f"all {short}" if short == len(errors) else f"{short} of {len(errors)}"
        said.append((number, f"{found[1]} % in the median, {found[2].lstrip('-')} % at worst"))
    card = _card().removeprefix("NVIDIA ")
    return (
        f"On one {card} {said[0][0]} predictions of foldpipe's own steps were too short: by "
        f"{said[0][1]};\nafter `mode=profile`, which measures your model, {said[1][0]}: by "
        f"{said[1][1]}."
    )


def _card() -> str:
    stages = json.loads((DOCS / "evidence" / "gpu.json").read_text(encoding="utf-8"))["stages"]
    card: str = next(iter(stages.values()))["card"]
    return card


def _cells(text: str) -> dict[str, list[str]]:
    """Rows of all tables, by their first cell; of several the first."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault(first, rest)
    return found


def _percent(text: str) -> str:
    return text.replace("%", " %")
