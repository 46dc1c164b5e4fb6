"""The page that is made of the file: ``python -m tools.gpu_proof --page docs/evidence/gpu.md``.

It says what was seen, failures included, and rewrites the line in README that says whether
anything has run on a GPU.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu_proof.proof import ROOT, read

_README = ROOT / "README.md"
# From its first words to the end of its paragraph.
_STATUS = re.compile(r"\*\*(Nothing has run on a GPU yet|On one GPU)\*\*.*?\n\n", re.DOTALL)
Found = Mapping[str, Any]


def write_page(file: Path, page: Path) -> int:
    """Writes the page and README's line.

    Returns:
        0, or 2 if the file has nothing that ran on a GPU.
    """
    stages = {
        name: entry
        for name, entry in read(file)["stages"].items()
        if not entry.get("rehearsal", False)
    }
    if not stages:
        sys.stdout.write(f"{file}: nothing in it ran on a GPU. Try make gpu-proof on one.\n")
        return 2
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(rendered(stages))
    readme = _README.read_text()
    line = status_line(stages)
    _README.write_text(_STATUS.sub(lambda _: line + "\n\n", readme, count=1))
    sys.stdout.write(f"{page}: written; {line}\n")
    return 0


def status_line(stages: Mapping[str, Found]) -> str:
    """What README says, in one sentence."""
    passed = sum(entry["status"] == "passed" for entry in stages.values())
    newest = max(stages.values(), key=lambda entry: entry["began"])
    said = (
        f"**On one GPU** ({newest['card']}, {newest['began'][:10]}) {passed} of {len(stages)} "
        "stages of [the proof](docs/evidence/gpu.md) passed. Nothing has run on several GPUs; "
        "everything below was measured on CPUs, or predicted ([limits](docs/limits.md))."
    )
    return textwrap.fill(said, 118, break_long_words=False, break_on_hyphens=False)


def rendered(stages: Mapping[str, Found]) -> str:
    """The whole page."""
    newest = max(stages.values(), key=lambda entry: entry["began"])
    parts = [
        "# On one GPU",
        f"Measured by `make gpu-proof` on one {newest['card']}, torch {newest['torch']}, "
        f"{newest['began'][:10]}. The tool writes this page from its file, failures included. "
        "Nothing here is about several GPUs: ranks that are named share this one.",
        "## Stages",
        table(
            ("stage", "result", "seconds", "commit", "what was wrong"),
            (
                (
                    name,
                    entry["status"],
                    f"{entry.get('took_s', 0):.0f}",
                    entry["commit"],
                    short(entry.get("reason", "")),
                )
                for name, entry in stages.items()
            ),
        ),
    ]
    for name, render in _PARTS.items():
        found = stages.get(name, {}).get("found")
        if found:
            parts += render(found)
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def short(text: str, most: int = 160) -> str:
    """In one cell of a table."""
    flat = " ".join(text.replace("|", "/").split())
    flat = re.sub(r"(/[\w.+-]+){3,}/", ".../", flat)
    return flat if len(flat) <= most else flat[:most] + "..."


def signed(ratio: float) -> str:
    """A relative error."""
    return f"{ratio:+.1%}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _card(found: Found) -> list[str]:
    rows = [
        (name.replace("_", " "), found[name])
        for name in ("python", "torch", "cudnn", "nccl", "driver", "multiprocessors", "cores")
        if name in found
    ]
    if "context_bytes" in found:
        rows.append(("a process's context, MB", f"{found['context_bytes'] / 1e6:.0f}"))
    return ["## The machine", table(("what", "found"), rows)]


def _numerics(found: Found) -> list[str]:
    tests: Mapping[str, Found] = found.get("tests", {})
    counts = {
        outcome: sum(test["outcome"] == outcome for test in tests.values())
        for outcome in ("passed", "failed", "skipped")
    }
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    failed = [
        (f"`{name}`", short(_last_error(test.get("says", "")), 300))
        for name, test in tests.items()
        if test["outcome"] == "failed"
    ]
    parts = [
        "## Numerics",
        "Training in pipelines whose ranks share the card, against plain torch on the same card "
        f"(`pytest -m gpu`): {said}. Tolerances stand in the tests.",
    ]
    return [*parts, table(("failed", "with"), failed)] if failed else parts


def _last_error(text: str) -> str:
    """The last line that pytest marks as an error's; all of it where there is none."""
    marked = [line[1:] for line in text.splitlines() if line.startswith("E ") and line[1:].strip()]
    return marked[-1] if marked else text


def _launches(found: Found) -> list[str]:
    rows = (
        (
            name,
            row["exit"],
            f"{row['loss_last']:.6f}" if "loss_last" in row else short(row.get("says", "")),
        )
        for name, row in found["rows"].items()
    )
    return [
        "## The launcher",
        "The same training in several layouts, all at once on the card; losses agree to "
        f"{found['tolerance']:g}." if "tolerance" in found else "",
        table(("layout", "exit", "last loss"), rows),
    ]  # fmt: skip


def _links(name: str, title: str) -> Callable[[Found], list[str]]:
    def render(found: Found) -> list[str]:
        rows = (
            (key.removesuffix("_s").replace("_", " "), f"{value * 1e6:,.0f}")
            for key, value in found.items()
            if key.endswith("_s") and isinstance(value, float)
        )
        return [f"### {title}", table((name, "us"), rows)]

    return render


def _configurations(found: Found) -> list[str]:
    rows = []
    for name, row in found["rows"].items():
        if "step_s" not in row:
            rows.append((name, short(row.get("error", "")), "", "", "", "", ""))
            continue
        step, peak = row["predicted"]["step_s"], row["predicted"]["peak_bytes"]
        measured = row.get("peak_bytes", math.nan)
        rows.append(
            (
                name, ms(step), ms(row["step_s"]), signed(step / row["step_s"] - 1),
                f"{peak / 1e9:.2f}", f"{measured / 1e9:.2f}", signed(peak / measured - 1),
            )
        )  # fmt: skip
    parts = [
        "## Predicted and measured",
        "A model of 1.1e9 weights (16 layers, 2048 wide, 2048 tokens) on one rank, eager. The "
        f"predictions (`hardware={found['hardware']}`, `costs=analytic`) were committed before "
        "anything was measured, in `tools/gpu_proof/predicted.json`.",
        table(
            ("configuration", "predicted ms", "measured ms", "error", "predicted GB",
             "measured GB", "error"),
            rows,
        ),
    ]  # fmt: skip
    summary = found.get("summary")
    if summary:
        parts.append(_in_words(summary))
    if summary and "allocator_loss" in summary:
        parts.append(
            f"The allocator has reserved {summary['allocator_loss']:.1%} more than the peak "
            f"(median), and {summary['context_bytes'] / 1e9:.2f} GB of the card are taken beyond "
            "that: what the hardware file calls `allocator_loss` and `context_gb`."
        )
    return parts


def _in_words(summary: Found) -> str:
    said = (
        f"Median error of the step time {summary['median_size_of_time_error']:.1%}, the worst "
        f"{signed(summary['worst_time_error'])}; order by Kendall's tau "
        f"{summary['kendall_tau']:.2f}"
    )
    if "worst_memory_error" in summary:
        said += (
            f"; median error of the peak memory {summary['median_size_of_memory_error']:.1%}, "
            f"the worst {signed(summary['worst_memory_error'])}"
        )
    return said + "."


def _kernels(found: Found) -> list[str]:
    parts = [
        "## Kernels",
        "Large square products, TFLOP/s: "
        + ", ".join(f"{k} {v / 1e12:.0f}" for k, v in found["large_products"].items())
        + ".",
    ]
    if "summary" in found:
        parts += [
            "Products of layers (forward, input gradient, weight gradient, each a figure), "
            "predicted time over measured time less 1:",
            table(
                ("model", "products", "median", "median size", "90 % below"),
                (
                    (name, row["count"], signed(row["median"]), f"{row['median_size']:.1%}",
                     f"{row['p90_size']:.1%}")
                    for name, row in found["summary"].items()
                ),
            ),
        ]  # fmt: skip
    if "memory_bound" in found:
        parts += [
            "Bound by memory, of 8192 tokens x 4096:",
            table(
                ("kernel", "predicted us", "measured us"),
                (
                    (name, f"{row['predicted_s'] * 1e6:.0f}", f"{row['s'] * 1e6:.0f}")
                    for name, row in found["memory_bound"].items()
                    if "s" in row
                ),
            ),
        ]
    if "attention" in found:
        rows = []
        for name, row in found["attention"].items():
            default = row.get("default")
            if isinstance(default, list):
                rows.append(
                    (name, row.get("chosen", ""), ms(default[0]), ms(default[1]),
                     *(ms(value) for value in row.get("predicted_s", ())))
                )  # fmt: skip
        rows = [(*row, *("",) * (6 - len(row))) for row in rows]
        parts += [
            "Attention, causal:",
            table(("shape", "kernel", "forward ms", "backward ms", "predicted", "predicted"), rows),
        ]
    if "constants" in found:
        parts += [
            "What the constants of the hardware file would be, each from the kernels that it is "
            "about:",
            table(
                ("constant", "in the file", "measured"),
                (
                    (name, f"{values[0]:.3g}", f"{values[1]:.3g}")
                    for name, values in found["constants"].items()
                ),
            ),
        ]
    return parts


def _speed(found: Found) -> list[str]:
    parts = ["## Speed"]
    rows = []
    for name in ("launch_bound", "large", "small_microbatches"):
        if name in found:
            row = found[name]
            rows.append(
                (
                    name.replace("_", " "), ms(row["plain"]["step_s"]),
                    f"{row['engine_over_plain']:.3f}", f"{row['trainer_over_plain']:.3f}",
                    row["plain"]["host_waits"], row["engine"]["host_waits"],
                    row["trainer"]["host_waits"],
                )
            )  # fmt: skip
    if rows:
        parts += [
            "A step of one rank over that of a plain torch loop of the same model, with the "
            "optimizer of `conf/optimizer`, and how often the host waits for the device in a step.",
            table(
                ("model", "plain ms", "engine", "Trainer", "waits, plain", "engine", "Trainer"),
                rows,
            ),
        ]
    done = [
        (
            name, ms(found[name]["step_s"]), f"{found[name]['flops_per_s'] / 1e12:.0f}",
            f"{found[name]['of_matmul']:.2f}",
        )
        for name in ("eager", "compiled")
        if name in found
    ]  # fmt: skip
    if done:
        parts += [
            "1.1e9 weights in bf16, two microbatches of 8 sequences; a large product reaches "
            f"{found['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s here.",
            table(("model", "step ms", "TFLOP/s of the model", "of a large product's"), done),
        ]
    return parts


def _shared(found: Found) -> list[str]:
    over = found.get("over_one_rank", {})
    rows = (
        (name, ms(row["step_time_s"]) if "step_time_s" in row else short(row.get("says", "")),
         f"{over[name]:.3f}" if name in over else "")
        for name, row in found["rows"].items()
    )  # fmt: skip
    return [
        "## Two ranks on one card",
        "Kernels of two processes take turns, so a step is the sum of the ranks' work: what is "
        "above 1 is what messages and turns cost.",
        table(("layout", "step ms", "over one rank"), rows),
    ]


def _profile(found: Found) -> list[str]:
    if "rows" not in found:
        return []
    rows = (
        (name, ms(row["predicted"]["step_s"]), ms(row["step_s"]),
         signed(row["predicted"]["step_s"] / row["step_s"] - 1))
        for name, row in found["rows"].items()
    )  # fmt: skip
    parts = [
        "## With measured costs",
        "`mode=profile` on the card, then `costs=profiled`:",
        table(("configuration", "predicted ms", "measured ms", "error"), rows),
    ]
    return [*parts, _in_words(found["summary"])] if found.get("summary") else parts


def _nccl_one(found: Found) -> list[str]:
    said = (
        f"A first communicator of NCCL takes {found['first_bytes'] / 1e9:.2f} GB of the card, each "
        f"further one {found['another_bytes'] / 1e9:.2f} GB"
    )
    few = {key: value for key, value in found.items() if key.endswith("_channels")}
    for key, value in few.items():
        said += f"; of {key.split('_')[3]} channel(s) {value / 1e9:.3f} GB"
    return ["## Messages between two ranks of the card", said + "."]


_PARTS: dict[str, Callable[[Found], list[str]]] = {
    "card": _card,
    "launches": _launches,
    "numerics": _numerics,
    "configurations": _configurations,
    "profile": _profile,
    "kernels": _kernels,
    "speed": _speed,
    "shared_card": _shared,
    "nccl_one": _nccl_one,
    "nccl_two": _links("NCCL, two ranks", "By NCCL, which takes them for two machines (sockets)"),
    "staged": _links("gloo through pinned memory", "Through the host"),
    "ipc": _links("CUDA IPC", "Through device memory that both have mapped, announced by gloo"),
}
