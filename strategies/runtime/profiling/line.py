"""What a stage takes as a sum: something fixed, and what each of its units adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def fit_line(
    counts: Sequence[Sequence[int]], measured: Sequence[float], *, fixed: bool = True
) -> tuple[float, tuple[float, ...]]:
    """Least squares of relative errors; nothing is negative.

    Args:
        counts: Per stage, how many units of each class it has.
        measured: Per stage, >= 0.
        fixed: Whether a stage takes something by itself; left out where there are too few stages
            to tell.

    Returns:
        (fixed, one figure per class).
    """
    rows = torch.tensor(counts, dtype=torch.float64)
    values = torch.tensor(measured, dtype=torch.float64)
    weights = 1.0 / values.clamp(min=max(float(values.max()) * 1e-3, 1e-12))
    columns = rows
    fixed = fixed and len(rows) > rows.shape[1]
    if fixed:
        columns = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
    solved = torch.linalg.lstsq(columns * weights[:, None], (values * weights)[:, None])
    found = [float(value) for value in solved.solution[:, 0]]
    if fixed and found[-1] < 0:
        return fit_line(counts, measured, fixed=False)
    each = tuple(max(0.0, value) for value in found[: rows.shape[1]])
    return (found[-1] if fixed else 0.0), each


def fit_error(
    counts: Sequence[Sequence[int]],
    measured: Iterable[tuple[Sequence[float], tuple[float, Sequence[float]]]],
) -> float | None:
    """How far sums are from what was measured, all stages together, as a share of that.

    Args:
        counts: As for ``fit_line``.
        measured: Per kind of instruction what stages took, and the line through it.

    Returns:
        None where nothing took any time.

    >>> fit_error([[1, 0], [1, 1]], [([2.0, 3.0], (1.0, [1.0, 1.5]))])
    0.1
    """
    missed = whole = 0.0
    for values, (fixed, each) in measured:
        for row, value in zip(counts, values, strict=True):
            found = fixed + sum(n * share for n, share in zip(row, each, strict=True))
            missed += abs(found - value)
            whole += value
    return missed / whole if whole > 0 else None
