"""A measurement of layers and links on one machine, as the file that ``costs=profiled`` reads.

One JSON object, written by ``mode=profile``::

    {"format": "foldpipe-profile", "version": 1,
     "machine": {"processor": ..., "accelerator": ..., "cores": ..., "threads": ..., "torch": ...},
     "model": {...},                    what decides the cost of a unit; not how many layers
     "classes": ["net.embedding", "net.layers.*.attention", ...],
     "sizes": {"1": {"fixed": {...}, "units": [{...}, ...], "error": ...}},  by microbatch size
     "rest_s": ...,                     of a step: what is no instruction
     "links": {"messages": {"latency_s": ..., "bandwidth": ...}, "reductions": {...}}}

``units`` has an entry per class: seconds and bytes that one unit adds to whatever stage it lies in.
``fixed`` is what a stage takes whatever lies in it. ``links`` are null where there was one rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from strategies.errors import CostError
from strategies.small_file import FileRefusedError, parse_json

FORMAT = "foldpipe-profile"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Seconds:
    """What each kind of instruction takes, of one unit or of a stage itself."""

    forward: float = 0.0
    backward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    recompute: float = 0.0
    step: float = 0.0  # The optimizer's update, clearing of gradients included.


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """One unit of a class, for one microbatch.

    Attributes:
        seconds: What it adds to a stage.
        saved_bytes: Kept from F to the backward.
        waiting_bytes: Kept between I and W.
        output_bytes: Handed on, where a stage ends with it.
        forward_temporaries: Bytes that F needs besides.
        backward_temporaries: Bytes that a backward needs besides.
    """

    seconds: Seconds
    saved_bytes: int
    waiting_bytes: int
    output_bytes: int
    forward_temporaries: int
    backward_temporaries: int


_PARTS = tuple(entry.name for entry in fields(Seconds))
_COUNTS = tuple(entry.name for entry in fields(UnitProfile))[1:]  # All but the seconds.


@dataclass(frozen=True, slots=True)
class SizeProfile:
    """All units at one microbatch size.

    Attributes:
        fixed: What any stage takes, be it empty.
        units: One entry per class, in the profile's order.
        error: How far these sums are from what was measured, as a share of it: from the stages of
            the sample, or, in a profile that a training run has corrected, from that run's step.
            None where they were not compared.
    """

    fixed: Seconds
    units: tuple[UnitProfile, ...]
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What moving bytes between two ranks takes.

    Attributes:
        latency_s: Of a message of no length; of a reduction, of each step of its ring.
        bandwidth: Bytes/s.
    """

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides how fast a rank computes."""

    processor: str
    accelerator: str | None  # None where ranks run on the CPU.
    cores: int
    threads: int  # Per rank.
    torch: str  # Version.


@dataclass(frozen=True, slots=True)
class Profile:
    """A measurement.

    Attributes:
        model: Names and values of all that decides a unit's costs.
        classes: Names of the units that were measured, one per class.
        sizes: (microbatch size, figures), ascending.
        rest_s: What a training step takes on a rank beside its instructions.
        messages: Links between ranks of one node; None where there was one rank.
        reductions: The same for all-reduces.
        lockstep_loss: Share of their compute that ranks lose which wait for each other all the
            time; 0 where there was one.
    """

    machine: Machine
    model: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    sizes: tuple[tuple[int, SizeProfile], ...]
    rest_s: float
    messages: Link | None
    reductions: Link | None
    lockstep_loss: float = 0.0

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(each.error for _, each in self.sizes if each.error is not None)

    def at(self, microbatch_size: int) -> SizeProfile:
        """The figures of a size; between two that were measured, a straight line.

        Raises:
            CostError: It is smaller or larger than all that were measured.
        """
        low = max((n for n, _ in self.sizes if n <= microbatch_size), default=None)
        high = min((n for n, _ in self.sizes if n >= microbatch_size), default=None)
        if low is None or high is None:
            measured = ",".join(str(number) for number, _ in self.sizes)
            wanted = ",".join(map(str, sorted({microbatch_size, *dict(self.sizes)})))
            raise CostError(
                f"data.microbatch_size={microbatch_size}, but the profile has microbatch sizes "
                f"[{measured}]. Try mode=profile profile.microbatch_sizes=[{wanted}]."
            )
        known = dict(self.sizes)
        if low == high:
            return known[low]
        return _between(known[low], known[high], (microbatch_size - low) / (high - low))


def unit_classes(units: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """The class of every unit: its name without numbers, and another for each other size.

    ``units``: name, and whatever tells units of one name apart.

    >>> unit_classes([("net.a", 1), ("net.layers.0.b", 2), ("net.layers.1.b", 2)])
    ('net.a', 'net.layers.*.b', 'net.layers.*.b')
    >>> unit_classes([("layers.0", 1), ("layers.1", 2)])
    ('layers.*', 'layers.*#2')
    """
    known: dict[str, list[object]] = {}
    found = []
    for name, size in units:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        sizes = known.setdefault(pattern, [])
        if size not in sizes:
            sizes.append(size)
        number = sizes.index(size) + 1
        found.append(pattern if number == 1 else f"{pattern}#{number}")
    return tuple(found)


def dump_profile(profile: Profile) -> str:
    content = {
        "format": FORMAT,
        "version": VERSION,
        "machine": asdict(profile.machine),
        "model": dict(profile.model),
        "classes": list(profile.classes),
        "sizes": {str(number): asdict(figures) for number, figures in profile.sizes},
        "rest_s": profile.rest_s,
        "lockstep_loss": profile.lockstep_loss,
        "links": {
            name: None if link is None else asdict(link)
            for name, link in (("messages", profile.messages), ("reductions", profile.reductions))
        },
    }
    return json.dumps(content, indent=1) + "\n"


def parse_profile(text: str, *, label: str) -> Profile:
    """What ``dump_profile`` wrote; ``label`` is the file's name, for messages.

    Raises:
        CostError: It is no profile, or one of another version.
    """
    try:
        content = parse_json(text)
    except FileRefusedError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CostError(
            f'costs.file={label} is no profile: it has no "format": "{FORMAT}". '
            "Try mode=profile, which writes one."
        )
    if content.get("version") != VERSION:
        raise CostError(
            f"costs.file={label} is a profile of version {content.get('version')}, but version "
            f"{VERSION} is read. Try mode=profile, which writes a new one."
        )
    try:
        return _profile(content)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CostError(
            f"costs.file={label} is a damaged profile ({type(error).__name__}: {error}). "
            "Try mode=profile, which writes a new one."
        ) from error


def _profile(content: Mapping[str, Any]) -> Profile:
    machine, links = content["machine"], content["links"]
    classes = tuple(map(str, content["classes"]))
    sizes = tuple(sorted((int(n), _size(figures)) for n, figures in content["sizes"].items()))
    if not sizes or any(len(figures.units) != len(classes) for _, figures in sizes):
        raise ValueError("every microbatch size needs one entry per class")
    return Profile(
        machine=Machine(
            str(machine["processor"]),
            None if machine["accelerator"] is None else str(machine["accelerator"]),
            int(machine["cores"]),
            int(machine["threads"]),
            str(machine["torch"]),
        ),
        model=tuple(sorted((str(k), str(v)) for k, v in content["model"].items())),
        classes=classes,
        sizes=sizes,
        rest_s=float(content["rest_s"]),
        messages=_link(links["messages"]),
        reductions=_link(links["reductions"]),
        lockstep_loss=float(content.get("lockstep_loss", 0.0)),
    )


def _size(content: Mapping[str, Any]) -> SizeProfile:
    units = []
    for unit in content["units"]:
        counts = [int(unit[name]) for name in _COUNTS]
        units.append(UnitProfile(_seconds(unit["seconds"]), *counts))
    error = content.get("error")
    fixed = _seconds(content["fixed"])
    return SizeProfile(fixed, tuple(units), None if error is None else float(error))


def _seconds(content: Mapping[str, Any]) -> Seconds:
    return Seconds(*(float(content[name]) for name in _PARTS))


def _link(content: Mapping[str, Any] | None) -> Link | None:
    return None if content is None else Link(content["latency_s"], content["bandwidth"])


def _between(low: SizeProfile, high: SizeProfile, share: float) -> SizeProfile:
    def mixed(first: float, second: float) -> float:
        return first + share * (second - first)

    def seconds(first: Seconds, second: Seconds) -> Seconds:
        return Seconds(*(mixed(getattr(first, name), getattr(second, name)) for name in _PARTS))

    units = []
    for first, second in zip(low.units, high.units, strict=True):
        counts = [int(mixed(getattr(first, name), getattr(second, name))) for name in _COUNTS]
        units.append(UnitProfile(seconds(first.seconds, second.seconds), *counts))
    errors = [each.error for each in (low, high) if each.error is not None]
    return SizeProfile(seconds(low.fixed, high.fixed), tuple(units), max(errors, default=None))
