"""What each way out of memory gives, predicted: docs/guides/out-of-memory.md."""

from __future__ import annotations

from typing import NamedTuple

from launcher.compose.session import compose_checked, hydra_session
from launcher.report.predicted import predict
from launcher.resolve import resolve
from tools.docs.pages import difference

_BASE = (
    "mode=simulate", "model=llama2_7b", "hardware=a100_80g", "pp=8", "data.global_batch_size=32",
    "trainer.precision=bf16-mixed",
)  # fmt: skip
_LEVERS = (
    ("`1f1b` on 8 ranks", ()),
    ("`schedule=v_half`", ("schedule=v_half",)),
    ("`schedule=v_min`", ("schedule=v_min",)),
    ("`recompute=selective`", ("recompute=selective",)),
    ("`recompute=mario`", ("recompute=mario",)),
    ("`recompute=full`", ("recompute=full",)),
    ("`recompute=layer`", ("recompute=layer",)),
    ("`tp=2 pp=4`: the same ranks", ("tp=2", "pp=4")),
    ("`dp=2 overlap=zero1`: twice the ranks", ("dp=2", "overlap=zero1")),
)


class _Figures(NamedTuple):
    step_s: float
    peak_gib: float


def lever_table() -> str:
    """A row per lever, beside the plain pipeline."""
    rows = ["| | memory | | step | |", "|---" * 5 + "|"]
    found = [_figures(words) for _, words in _LEVERS]
    for (label, _), figure in zip(_LEVERS, found, strict=True):
        rows.append(
            f"| {label} | {figure.peak_gib:.1f} GiB "
            f"| {difference(figure.peak_gib / found[0].peak_gib - 1)} "
            f"| {figure.step_s:.2f} s | {difference(figure.step_s / found[0].step_s - 1)} |"
        )
    return "\n".join(rows)


def _figures(words: tuple[str, ...]) -> _Figures:
    with hydra_session():
        config, _ = compose_checked([*_BASE, *words])
    _, metrics = predict(resolve(config))
    peaks = [peak for peak in metrics.peak_memory_bytes if peak is not None]
    return _Figures(metrics.makespan, max(peaks) / 2**30)
