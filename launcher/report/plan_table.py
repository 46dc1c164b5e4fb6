"""The answer of the planner for people: a table of plans, bars of memory, and what was refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from launcher.report.summary import format_duration, format_percent
from strategies.costs.profile_file import Profile, Seconds
from strategies.plan import NUM_PASSES, Recompute
from strategies.planner.outcome import Refusal

if TYPE_CHECKING:
    from launcher.planning.largest_model import Reach

_BAR = 32
_MOST_RANKS = 16
_SIZES = ("sequence", "layers")
HEAD = (
    "", "tp", "pp", "dp", "batch", "schedule", "overlap", "recompute", "step", "tokens/s",
    "MFU", "bubble", "exposed", "GiB per rank", "over bound", "layers per stage",
)  # fmt: skip


# What a narrow terminal goes without, in this order.
_SPARED = ("exposed", "over bound", "bubble", "layers per stage", "MFU", "recompute", "overlap")


def head_of(rows: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """``HEAD``; images and the like have no tokens."""
    images = any(row["tokens_per_s"] is None for row in rows)
    return tuple("samples/s" if images and name == "tokens/s" else name for name in HEAD)


def plan_table(rows: Sequence[Mapping[str, object]], *, room: int | None = None) -> str:
    """A line per plan of ``plans`` in result.json.

    Where rows are of models of different sizes (``planner.maximize``), each shows its own.

    ``room``: columns of the terminal, if there is one: what has no place there is named below.
    """
    own = own_sizes(rows)
    head = head_of(rows)
    lines = [(*head[:1], *own, *head[1:]), *plan_cells(rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = {0, *(column + len(own) for column in (4, 5, 6, 7, 15))}
    shown, spared = list(range(len(widths))), []
    for name in _SPARED:
        if room is None or sum(widths[column] + 2 for column in shown) - 2 <= room:
            break
        spared.append(name)
        shown.remove(HEAD.index(name) + len(own))
    text = "\n".join(
        "  ".join(
            line[column].ljust(widths[column])
            if column in left
            else line[column].rjust(widths[column])
            for column in shown
        ).rstrip()
        for line in lines
    )
    return text + (f"\nin timeline.html: {', '.join(spared)}" if spared else "")


def own_sizes(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Which sizes of the model differ between plans."""
    return [name for name in _SIZES if len({row.get(name) for row in rows}) > 1]


def plan_cells(rows: Sequence[Mapping[str, object]]) -> list[tuple[str, ...]]:
    """The cells of each plan's line: its number, sizes of its own, and what ``HEAD`` names."""
    own = own_sizes(rows)
    lines = [(row, _row(number, row)) for number, row in enumerate(rows, 1)]
    return [(*line[:1], *(f"{row[name]}" for name in own), *line[1:]) for row, line in lines]


def memory_bars(state: Sequence[float], activations: Sequence[float], limit: float) -> str:
    """A bar per rank: ``#`` weights, gradients, optimizer; ``=`` all that moves; ``|`` the limit.

    ``activations``: bytes per rank at the worst moment, buffers included.
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
    rate = plan["tokens_per_s"]
    assert isinstance(memory, Sequence)
    assert isinstance(layers, Sequence)
    stages = plan["stages_per_rank"]
    schedule = f"{plan['schedule']}" + (f" x{stages}" if stages != 1 else "")
    ep = "" if plan.get("ep", 1) == 1 else f" ep={plan['ep']}"
    return (
        f"{number}",
        *(f"{plan[name]}" for name in ("tp", "pp")),
        f"{plan['dp']}{ep}",
        f"{plan['num_microbatches']} x {plan['microbatch_size']}",
        schedule,
        f"{plan['overlap']}",
        f"{plan['recompute']}",
        format_duration(_float(plan["predicted_step_time_s"]), "s"),
        f"{_float(plan['samples_per_s' if rate is None else 'tokens_per_s']):,.0f}",
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


# A profile as a table for the terminal.

_HEAD = ("", "F", "B", "I", "W", "R", "step", "saved", "temporary")


def profile_table(profile: Profile) -> str:
    """One block per microbatch size, one line per class of units; ms and MiB."""
    machine = profile.machine
    where = machine.accelerator or machine.processor
    lines = [
        f"{where}, {machine.cores} cores, {machine.threads} threads per rank, torch {machine.torch}"
    ]
    width = max(len(name) for name in (*profile.classes, "any stage"))
    for size, figures in profile.sizes:
        error = "" if figures.error is None else f", to {100 * figures.error:.1f} %"
        lines.append(f"microbatches of {size}: ms per unit{error}, MiB per microbatch")
        lines.append(_profile_row(_HEAD, width))
        lines.append(_profile_row(("any stage", *_times(figures.fixed), "", ""), width))
        for name, unit in zip(profile.classes, figures.units, strict=True):
            temporary = max(unit.forward_temporaries, unit.backward_temporaries)
            held = (f"{unit.saved_bytes / 2**20:.2f}", f"{temporary / 2**20:.2f}")
            lines.append(_profile_row((name, *_times(unit.seconds), *held), width))
    lines.append(f"rest of a step: {profile.rest_s * 1e3:.3f} ms")
    for label, link in (("messages", profile.messages), ("reductions", profile.reductions)):
        if link is not None:
            lines.append(f"{label}: {link.latency_s * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s")
    return "\n".join(lines)


def _times(seconds: Seconds) -> tuple[str, ...]:
    names = ("forward", "backward", "backward_input", "backward_weight", "recompute", "step")
    return tuple(f"{getattr(seconds, name) * 1e3:.3f}" for name in names)


def _profile_row(cells: tuple[str, ...], width: int) -> str:
    return (f"  {cells[0]:{width}}" + "".join(f"{cell:>10}" for cell in cells[1:])).rstrip()


# The tuner's answer for people: what is not listed and why, and how far policies get.

_MOST = 24


def refusals_text(refusals: Sequence[Refusal], fastest_s: float, limit_bytes: int) -> str:
    """A line per refusal, in the tuner's order; ``fastest_s`` is the step time of plan 1."""
    if not refusals:
        return "not listed: nothing, every setting is above"
    lines = ["not listed:"]
    names = [
        (_name(r.recompute), f"{r.layout.num_microbatches} x {r.layout.microbatch_size}")
        for r in refusals
    ]
    widths = [max(len(name[column]) for name in names) for column in range(2)]
    for (policy, batch), refusal in list(zip(names, refusals, strict=True))[:_MOST]:
        reason = _reason(refusal, fastest_s, limit_bytes)
        lines.append(f"  {policy.ljust(widths[0])}  {batch.rjust(widths[1])}  {reason}")
    if len(refusals) > _MOST:
        lines.append(f"  and {len(refusals) - _MOST} more (rejected.settings in result.json)")
    return "\n".join(lines)


def refusal_mapping(refusal: Refusal) -> dict[str, object]:
    return {
        "recompute": refusal.recompute.policy,
        "microbatch_size": refusal.layout.microbatch_size,
        "num_microbatches": refusal.layout.num_microbatches,
        "reason": refusal.reason,
        "bytes": refusal.needed_bytes,
        "step_time_s": refusal.step_time_s,
        "exact": refusal.exact,
    }


def reaches_text(reaches: Sequence[Reach], key: str, limit_bytes: int) -> str:
    """A line per policy: the largest value that fits, and what stops it there."""
    plain = next((r.value for r in reaches if r.recompute.policy == "none"), None)
    lines = [f"longest {key} per policy:" if key == "model.sequence" else f"most {key} per policy:"]
    width = max(len(_name(reach.recompute)) for reach in reaches)
    for reach in reaches:
        text = f"  {_name(reach.recompute).ljust(width)}  "
        if reach.value is None:
            lines.append(text + f"none fits{_stop(reach, limit_bytes)}")
            continue
        assert reach.outcome is not None
        text += f"{key}={reach.value}"
        if plain:
            text += f" ({reach.value / plain:.2f} x)"
        text += f", {format_duration(reach.outcome.step_time_s, 's')} per step"
        lines.append(text + _stop(reach, limit_bytes))
    return "\n".join(lines)


def reach_mapping(reach: Reach) -> dict[str, object]:
    return {
        "recompute": reach.recompute.policy,
        "value": reach.value,
        "step": reach.step,
        "step_time_s": None if reach.outcome is None else reach.outcome.step_time_s,
        "bytes": None if reach.outcome is None else reach.outcome.peak_bytes,
        "beyond_bytes": reach.beyond_bytes,
    }


def _stop(reach: Reach, limit_bytes: int) -> str:
    if reach.value is None:
        if reach.beyond_bytes is None:
            return ""
        return f": at least {_gb(reach.beyond_bytes)} GB of {_gb(limit_bytes)} are needed"
    if reach.beyond_bytes is None:
        return f"; {reach.value + reach.step} cannot run"
    beyond = f"{reach.value + reach.step} needs {_gb(reach.beyond_bytes)} GB"
    return f"; {beyond} of {_gb(limit_bytes)}"


def _reason(refusal: Refusal, fastest_s: float, limit_bytes: int) -> str:
    if refusal.reason == "same":
        return "recomputes nothing: the same as recompute=none"
    if refusal.reason == "memory":
        if refusal.needed_bytes is None:
            return f"no order of it keeps to {_gb(limit_bytes)} GB"
        at_least = "" if refusal.exact else "at least "
        return f"needs {at_least}{_gb(refusal.needed_bytes)} GB of {_gb(limit_bytes)}"
    assert refusal.step_time_s is not None
    took = format_duration(refusal.step_time_s, "s")
    slower = format_percent(refusal.step_time_s / fastest_s - 1.0)
    if refusal.exact:
        return f"{took} per step, {slower} slower than plan 1"
    return f"at least {took} per step by its bound, {slower} slower than plan 1"


def _name(recompute: Recompute) -> str:
    passes = f" passes={recompute.passes}" if recompute.passes != NUM_PASSES else ""
    return f"recompute={recompute.policy}{passes}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4g}"
