"""The answer of the planner for people: a table of plans, bars of memory, and what was refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from launcher.report.units import format_duration, format_percent

_BAR = 32
_MOST_RANKS = 16


def plan_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line per plan.

    Args:
        rows: As ``plans`` in result.json.
    """
    head = (
        "", "tp", "pp", "dp", "batch", "schedule", "overlap", "recompute", "step", "tokens/s",
        "MFU", "bubble", "exposed", "GiB per rank", "over bound", "layers per stage",
    )  # fmt: skip
    lines = [head, *(_row(number, row) for number, row in enumerate(rows, 1))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = (0, 4, 5, 6, 7, 15)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def memory_bars(state: Sequence[float], activations: Sequence[float], limit: float) -> str:
    """A bar per rank: ``#`` weights, gradients, optimizer; ``=`` all that moves; ``|`` the limit.

    Args:
        state: Bytes per rank.
        activations: Bytes per rank at the worst moment, buffers included.
        limit: Bytes that a rank may use.
    """
    lines = [
        "memory per rank: # weights, gradients, optimizer; = activations, buffers; "
        f"| {_gib(limit)} GiB"
    ]
    whole = max([limit, *map(float.__add__, map(float, state), map(float, activations))])
    for rank, (fixed, moving) in enumerate(zip(state, activations, strict=True)):
        if rank == _MOST_RANKS:
            lines.append(f"  and {len(state) - rank} more ranks, of {len(state)}")
            break
        first = round(_BAR * fixed / whole)
        second = round(_BAR * (fixed + moving) / whole) - first
        room = max(0, round(_BAR * limit / whole) - first - second)
        bar = "#" * first + "=" * second + " " * room + "|"
        lines.append(f"  rank {rank:<3} {bar} {_gib(fixed)} + {_gib(moving)} GiB")
    return "\n".join(lines)


def refused(rejected: Mapping[str, object]) -> str:
    """How many candidates are not listed, by reason, and what was nearest to fitting."""
    parts = [
        f"{rejected['slower']} slower",
        f"{rejected['memory']} too large for memory",
        f"{rejected['dominated']} no faster than one that holds more and fits",
    ]
    text = "not listed: " + ", ".join(parts)
    degrees = rejected["tp"]
    assert isinstance(degrees, Mapping)
    for tp, reason in degrees.items():
        text += f"\n  tp={tp}: {reason}"
    batch = rejected["batch"]
    if batch:
        assert isinstance(batch, Iterable)
        text += f"\n  dp={','.join(map(str, batch))}: does not divide the global batch"
    nearest = rejected["nearest"]
    if isinstance(nearest, Mapping):
        limit = rejected["memory_limit_bytes"]
        assert isinstance(limit, int)
        text += (
            f"\n  nearest to fitting: {nearest['plan']} needs {_gib(nearest['bytes'])} GiB of "
            f"{_gib(limit)}"
        )
    return text


def short_layers(layers: Sequence[float]) -> str:
    """Layers per stage, equal neighbours counted.

    >>> short_layers([3.5, 4, 4, 4, 3])
    '3.5 3x4 3'
    """
    runs = [(value, len(list(run))) for value, run in groupby(layers)]
    return " ".join(f"{value:g}" if count == 1 else f"{count}x{value:g}" for value, count in runs)


def _row(number: int, plan: Mapping[str, object]) -> tuple[str, ...]:
    memory, layers = plan["peak_memory_bytes"], plan["layers_per_stage"]
    assert isinstance(memory, Sequence)
    assert isinstance(layers, Sequence)
    stages = plan["stages_per_rank"]
    schedule = f"{plan['schedule']}" + (f" x{stages}" if stages != 1 else "")
    return (
        f"{number}",
        f"{plan['tp']}",
        f"{plan['pp']}",
        f"{plan['dp']}",
        f"{plan['num_microbatches']} x {plan['microbatch_size']}",
        schedule,
        f"{plan['overlap']}",
        f"{plan['recompute']}",
        format_duration(_float(plan["predicted_step_time_s"]), "s"),
        f"{_float(plan['tokens_per_s']):,.0f}",
        format_percent(_float(plan["mfu"])),
        format_percent(_float(plan["bubble_ratio"])),
        format_duration(_float(plan["exposed_grad_reduce"]), "s"),
        f"{_gib(min(memory))}-{_gib(max(memory))}",
        format_percent(_float(plan["bound_gap"])),
        short_layers(layers),
    )


def _gib(value: object) -> str:
    return f"{_float(value) / 2**30:.3g}"


def _float(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)
