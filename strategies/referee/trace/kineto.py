"""A rank's Kineto trace (Chrome's format, also gzipped) as the computations of a pipeline.

torch.profiler writes what ran, not what it was for; torch's pipeline runtime puts a mark ``PP:2F0``
around every instruction (interleaved, zero-bubble and CSV schedules; its GPipe ``Forward 0`` and
``Backward 0``, of the rank's one stage). Its 1F1B and Megatron-LM leave none, and are refused.

A mark begins while its input is still awaited, so an instruction lasts from the first of its work
to the last: kernels where there are any, found by the call that launched them, else operators.
Messages are no work.
"""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strategies.errors import DataError
from strategies.small_file import FileRefusedError, opened, parse_json

# A trace of more, unzipped, is more than a few steps.
_MOST_BYTES = 1 << 29

_PP = re.compile(r"PP:(\d{1,6}[FBIW]\d{1,7}|\(\d{1,6}F\d{1,7};\d{1,6}[BI]\d{1,7}\)OVERLAP_F_B)")
_PP_MESSAGE = re.compile(r"PP:(\d{1,6})(SEND|RECV)_([FB])\d{1,7}")
_SINGLE = re.compile(r"(Forward|Backward) (\d{1,7})")
_MESSAGE = re.compile(r"(?i)(c10d::|gloo:|nccl|record_param_comms|p2p_|ncclDevKernel)")
# Operators that prepare a message or a loss and take no time worth a name.
_SLIGHT = re.compile(
    r"(aten::)?(detach|detach_|empty\w*|view|reshape|resolve_\w+|zeros?(_like|_)?|fill_|item|"
    r"_local_scalar_dense|is_\w+|alias|(tensor_)?split\w*|broadcast_tensors|narrow|slice|as_strided|chunk|cat|stack|"
    r"unsafe_split|select|ones_like|_to_copy|to|copy_|clone|mean|div|div_|add_|result_type|"
    r"requires_grad_|set_|lift_fresh|squeeze|unsqueeze|t|transpose)"
)
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Span:
    """One computation as it was measured.

    Attributes:
        name: As torch spells it (``2F0``); stage "?" where the trace does not say (``?F0``).
        start: Of its work, in seconds of the rank's own clock.
        end: Of its work.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one file says.

    Attributes:
        file: Its name, for messages.
        rank: Of the whole job; None where the file does not say.
        world_size: Ranks of the job; None where the file does not say.
        host: The machine, for whether clocks can differ.
        steps: Whole steps, each the rank's computations in the order of their starts.
        later: Whether a stage behind the last one that it computes exists.
    """

    file: str
    rank: int | None
    world_size: int | None
    host: str
    steps: tuple[tuple[Span, ...], ...]
    later: bool


def read_trace(path: Path) -> RankTrace:
    """Reads one rank's file.

    Raises:
        DataError: It is no trace, damaged, or of nothing that a pipeline does.
    """
    tree = _tree(path)
    events = tree.get("traceEvents") if isinstance(tree, dict) else tree
    if not isinstance(events, list):
        raise DataError(
            f"{path}: this is JSON and no trace: it has no traceEvents. torch.profiler writes one "
            "with export_chrome_trace."
        )
    kept = _Kept()
    for event in events:
        kept.take(event)
    steps = _steps(kept.spans())
    if not steps:
        raise DataError(
            f"{path}: no mark in it names a forward or backward of a pipeline (PP:2F0). Record "
            "whole steps with torch.profiler on every rank, of a schedule of torch that leaves "
            "marks: interleaved, zero-bubble, GPipe or a CSV file (its plain 1F1B leaves none)."
        )
    info = tree.get("distributedInfo") if isinstance(tree, dict) else None
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    return RankTrace(
        str(path),
        rank if isinstance(rank, int) else _number(path.name),
        world if isinstance(world, int) else None,
        str(tree.get("host_name", "")) if isinstance(tree, dict) else "",
        tuple(steps),
        kept.later,
    )


def _number(name: str) -> int | None:
    """The rank that a file's name tells: ``rank3_trace.json``, ``trace-3.json.gz``."""
    match = re.search(r"rank[_-]?(\d{1,6})", name) or re.search(r"(\d{1,6})(?!.*\d)", name)
    return int(match[1]) if match else None


def _tree(path: Path) -> Any:  # noqa: ANN401
    try:
        with opened(path) as stream:
            data = _unzipped(stream) if path.suffix == ".gz" else _whole(stream)
        return parse_json(data)
    except FileNotFoundError:
        raise DataError(
            f"trace={path} does not exist in {Path.cwd()}. Try trace=[rank0.json.gz,rank1.json.gz]."
        ) from None
    except FileRefusedError as error:
        raise DataError(f"trace={path} cannot be read: {error}.") from None
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"trace={path} cannot be read: it ends too early ({error}).") from None
    except MemoryError:
        raise DataError(
            f"trace={path} is more than fits into memory. Record fewer steps."
        ) from None


def _whole(stream: Any) -> bytes:  # noqa: ANN401
    data: bytes = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise FileRefusedError(
            f"it has more than {_MOST_BYTES:,} bytes, which is the most; record fewer steps"
        )
    return data


def _unzipped(stream: Any) -> bytes:  # noqa: ANN401
    with gzip.GzipFile(fileobj=stream) as plain:
        return _whole(plain)


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Work:
    """Something that was computed: where it was called, and when it ran."""

    called: float
    start: float
    end: float


@dataclass(eq=False)
class _Kept:
    """What is worth keeping of a file's events."""

    marks: list[_Mark] = field(default_factory=list)
    operators: list[_Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._after = -1  # the last stage that hands activations on, or gets gradients
        self._kernels: list[tuple[object, float, float]] = []
        self._launched: dict[object, float] = {}

    def take(self, event: object) -> None:
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        name, start, duration = event.get("name"), event.get("ts"), event.get("dur", 0)
        if not isinstance(name, str) or not isinstance(start, int | float):
            return
        if not isinstance(duration, int | float) or not (
            abs(start) < 1e18 and 0 <= duration < 1e18
        ):
            return
        category = event.get("cat", "")
        begin, end = start * 1e-6, (start + duration) * 1e-6
        if category in ("user_annotation", "cpu_op"):
            self._named(name, category, begin, end)
        elif category in _KERNELS:
            if not _MESSAGE.search(name):
                self._kernels.append((_correlation(event), begin, end))
        elif category in ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"):
            self._launched[_correlation(event)] = begin

    def _named(self, name: str, category: str, begin: float, end: float) -> None:
        if match := _PP.fullmatch(name):
            self.marks.append(_Mark(match[1], begin, end))
        elif match := _SINGLE.fullmatch(name):
            self.marks.append(_Mark(f"?{match[1][0]}{match[2]}", begin, end))
        elif match := _PP_MESSAGE.fullmatch(name):
            # Activations go out, and gradients come in, only where a later stage exists.
            if (match[2], match[3]) in (("SEND", "F"), ("RECV", "B")):
                self._after = max(self._after, int(match[1]))
        elif category == "cpu_op" and not _MESSAGE.search(name) and not _SLIGHT.fullmatch(name):
            self.operators.append(_Work(begin, begin, end))

    def spans(self) -> list[Span]:
        work = self._work()
        marks = sorted(self.marks, key=lambda mark: mark.start)
        starts = [mark.start for mark in marks]
        first = [float("inf")] * len(marks)
        last = [float("-inf")] * len(marks)
        for item in work:
            place = bisect_right(starts, item.called) - 1
            if place >= 0 and item.called <= marks[place].end:
                first[place] = min(first[place], item.start)
                last[place] = max(last[place], item.end)
        found: list[Span] = []
        for mark, start, end in zip(marks, first, last, strict=True):
            if end < start:
                # Where others have work it waited, and had nothing to do (torch's I of stage 0).
                start, end = mark.end if work else mark.start, mark.end
            found.append(Span(mark.name, start, end))
        return sorted(found, key=lambda span: span.start)

    @property
    def later(self) -> bool:
        own = {int(found) for mark in self.marks for found in re.findall(r"(\d+)[FBIW]", mark.name)}
        return bool(own) and self._after >= max(own)

    def _work(self) -> list[_Work]:
        """Kernels by the call that launched them, or operators where nothing was launched."""
        if not self._kernels:
            return self.operators
        return [
            _Work(self._launched[correlation], start, end)
            for correlation, start, end in self._kernels
            if correlation in self._launched  # Else it was launched before the trace began.
        ]


def _steps(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """Whole steps: an instruction that comes again begins the next one."""
    steps: list[list[Span]] = [[]]
    seen: set[str] = set()
    for span in spans:
        if span.name in seen:
            steps.append([])
            seen = set()
        seen.add(span.name)
        steps[-1].append(span)
    most = max(map(len, steps))
    return [tuple(step) for step in steps if len(step) == most and most]


def _correlation(event: dict[str, Any]) -> object:
    arguments = event.get("args")
    found = arguments.get("correlation") if isinstance(arguments, dict) else None
    return found if isinstance(found, int | str) else None
