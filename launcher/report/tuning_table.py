"""The tuner's answer for people: settings that are not listed and why, and how far policies get."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.planning.stretched import Reach
from launcher.report.units import format_duration, format_percent
from strategies.planner.tuner import Refusal
from strategies.recompute import NUM_PASSES, Recompute

_MOST = 24


def refusals_text(refusals: Sequence[Refusal], fastest_s: float, limit_bytes: int) -> str:
    """A line per setting that is not listed.

    Args:
        refusals: As the tuner sorts them.
        fastest_s: The step time of plan 1.
        limit_bytes: Of a rank.
    """
    if not refusals:
        return "not listed: nothing, every setting is above"
    lines = ["not listed:"]
    names = [(_name(r.setting.recompute), _batch(r)) for r in refusals]
    widths = [max(len(name[column]) for name in names) for column in range(2)]
    for (policy, batch), refusal in list(zip(names, refusals, strict=True))[:_MOST]:
        reason = _reason(refusal, fastest_s, limit_bytes)
        lines.append(f"  {policy.ljust(widths[0])}  {batch.rjust(widths[1])}  {reason}")
    if len(refusals) > _MOST:
        lines.append(f"  and {len(refusals) - _MOST} more (rejected.settings in result.json)")
    return "\n".join(lines)


def refusal_mapping(refusal: Refusal) -> dict[str, object]:
    """One of ``rejected.settings`` in result.json."""
    setting = refusal.setting
    return {
        "recompute": setting.recompute.policy,
        "microbatch_size": setting.microbatch_size,
        "num_microbatches": setting.num_microbatches,
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
    """One of ``reaches`` in result.json."""
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


def _batch(refusal: Refusal) -> str:
    setting = refusal.setting
    return f"{setting.num_microbatches} x {setting.microbatch_size}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4g}"
