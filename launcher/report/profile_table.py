"""A profile as a table for the terminal."""

from __future__ import annotations

from strategies.costs.profile import Link, Profile, Seconds

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
        lines.append(_row(_HEAD, width))
        lines.append(_row(("any stage", *_times(figures.fixed), "", ""), width))
        for name, unit in zip(profile.classes, figures.units, strict=True):
            temporary = max(unit.forward_temporaries, unit.backward_temporaries)
            held = (f"{unit.saved_bytes / 2**20:.2f}", f"{temporary / 2**20:.2f}")
            lines.append(_row((name, *_times(unit.seconds), *held), width))
    lines.append(f"rest of a step: {profile.rest_s * 1e3:.3f} ms")
    for label, link in (("messages", profile.messages), ("reductions", profile.reductions)):
        if link is not None:
            lines.append(_link(label, link))
    return "\n".join(lines)


def _times(seconds: Seconds) -> tuple[str, ...]:
    values = (
        seconds.forward,
        seconds.backward,
        seconds.backward_input,
        seconds.backward_weight,
        seconds.recompute,
        seconds.step,
    )
    return tuple(f"{value * 1e3:.3f}" for value in values)


def _row(cells: tuple[str, ...], width: int) -> str:
    return (f"  {cells[0]:{width}}" + "".join(f"{cell:>10}" for cell in cells[1:])).rstrip()


def _link(label: str, link: Link) -> str:
    return f"{label}: {link.latency_s * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s"
