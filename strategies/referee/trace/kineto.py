"""A rank's Kineto trace (Chrome's format, also gzipped) as the computations of a pipeline.

torch.profiler writes what ran, not what it was for. What each stretch of work belongs to is found,
best first, from

1. torch's pipeline runtime: a mark ``PP:2F0`` around every instruction (interleaved, zero-bubble,
   CSV); its GPipe: ``Forward 0``, ``Backward 0``;
2. Python's stack (``with_stack=True``), as Megatron-LM records it: ``forward_step`` and
   ``backward_step`` of ``schedules.py``, counted;
3. the operations alone (torch's 1F1B leaves no marks): work between two messages, backward where
   autograd's engine runs it, counted.

A mark begins while its input is still awaited, so an instruction lasts from the first of its work
to the last: kernels where there are any, found by the call that launched them, else operators.
Messages are no work.
"""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from strategies.errors import DataError
from strategies.small_file import FileRefusedError, opened, parse_json

# A trace of more, unzipped, is more than a few steps.
_MOST_BYTES = 1 << 29
_BLOCK = 1 << 20

_PP = re.compile(r"PP:(\d{1,6}[FBIW]\d{1,7}|\(\d{1,6}F\d{1,7};\d{1,6}[BI]\d{1,7}\)OVERLAP_F_B)")
_PP_MESSAGE = re.compile(r"PP:(\d{1,6})(SEND|RECV)_([FB])\d{1,7}")
_SINGLE = re.compile(r"(Forward|Backward) (\d{1,7})")
_STACK = re.compile(r".*schedules\.py\(\d+\): (forward|backward)_step")
_EXCHANGE = re.compile(r"(?i)(c10d::|gloo:|nccl:)(i?send|i?recv|coalesced)")
_MESSAGE = re.compile(r"(?i)(c10d::|gloo:|nccl|record_param_comms|p2p_|ncclDevKernel)")
# Operators that prepare a message or a loss and take no time worth a name.
_SLIGHT = re.compile(
    r"(aten::)?(detach|detach_|empty\w*|view|reshape|resolve_\w+|zeros?(_like|_)?|fill_|item|"
    r"_local_scalar_dense|is_\w+|alias|(tensor_)?split\w*|broadcast_tensors|narrow|slice|as_strided|chunk|cat|stack|"
    r"unsafe_split|select|ones_like|_to_copy|to|copy_|clone|mean|div|div_|add_|result_type|"
    r"requires_grad_|set_|lift_fresh|squeeze|unsqueeze|t|transpose)"
)
_BACKWARD = "autograd::engine::evaluate_function"
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
        found_by: ``marks``, ``stack`` or ``operators``.
        earlier: Whether a stage before the first one that it computes exists.
        later: Whether one behind the last does.
    """

    file: str
    rank: int | None
    world_size: int | None
    host: str
    steps: tuple[tuple[Span, ...], ...]
    found_by: str
    earlier: bool
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
    kept = _Kept(str(path))
    for event in events:
        kept.take(event)
    spans, found_by = kept.spans()
    steps = _steps(spans)
    if not steps:
        raise DataError(
            f"{path}: nothing in it is a forward or backward of a pipeline. Record with "
            "torch.profiler around whole steps, on every rank; of Megatron-LM with_stack=True."
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
        found_by,
        kept.earlier,
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
    blocks, left = [], _MOST_BYTES + 1
    while left and (block := stream.read(min(_BLOCK, left))):
        blocks.append(block)
        left -= len(block)
    if not left:
        raise FileRefusedError(
            f"it has more than {_MOST_BYTES:,} bytes, which is the most; record fewer steps"
        )
    return b"".join(blocks)


def _unzipped(stream: Any) -> bytes:  # noqa: ANN401
    with gzip.GzipFile(fileobj=stream) as plain:
        return _whole(plain)


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str
    start: float
    end: float
    order: int


@dataclass(frozen=True, slots=True)
class _Work:
    """Something that was computed: where it was called, and when it ran."""

    called: float
    start: float
    end: float
    backward: bool
    slight: bool


@dataclass(eq=False)
class _Kept:
    """What is worth keeping of a file's events."""

    file: str
    marks: list[_Mark] = field(default_factory=list)
    stack: list[_Mark] = field(default_factory=list)
    operators: list[_Work] = field(default_factory=list)
    messages: list[float] = field(default_factory=list)
    sends: list[bool] = field(default_factory=list)  # for each message
    outside: list[tuple[float, float]] = field(default_factory=list)  # optimizer steps
    earlier: bool = False
    later: bool = False

    def __post_init__(self) -> None:
        self._after = -1  # the last stage that hands activations on, or gets gradients
        self._kernels: list[tuple[object, float, float]] = []
        self._launched: dict[object, float] = {}
        self._engine: list[tuple[float, float]] = []

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
        if category in ("user_annotation", "cpu_op", "python_function", "gpu_user_annotation"):
            self._named(name, category, begin, end)
        elif category in _KERNELS:
            if not _MESSAGE.search(name):
                self._kernels.append((_correlation(event), begin, end))
        elif category in ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"):
            self._launched[_correlation(event)] = begin

    def _named(self, name: str, category: str, begin: float, end: float) -> None:
        if category == "gpu_user_annotation":
            return  # Its kernels say it better.
        if category == "python_function":
            if match := _STACK.fullmatch(name):
                letter = "F" if match[1] == "forward" else "B"
                self.stack.append(_Mark(f"?{letter}", begin, end, len(self.stack)))
            return
        if match := _PP.fullmatch(name):
            self.marks.append(_Mark(match[1], begin, end, len(self.marks)))
        elif match := _SINGLE.fullmatch(name):
            self.marks.append(_Mark(f"?{match[1][0]}{match[2]}", begin, end, len(self.marks)))
        elif match := _PP_MESSAGE.fullmatch(name):
            # Activations go out, and gradients come in, only where a later stage exists.
            if (match[2], match[3]) in (("SEND", "F"), ("RECV", "B")):
                self._after = max(self._after, int(match[1]))
        elif name.startswith("Optimizer.step"):
            self.outside.append((begin, end))
        elif _MESSAGE.search(name):
            if _EXCHANGE.match(name):
                self.messages.append(begin)
                self.sends.append("send" in name)
        elif category == "cpu_op":
            if name.startswith(_BACKWARD):
                self._engine.append((begin, end))
            backward = name.startswith(_BACKWARD) or name.endswith("Backward0")
            self.operators.append(
                _Work(begin, begin, end, backward, _SLIGHT.fullmatch(name) is not None)
            )

    def spans(self) -> tuple[list[Span], str]:
        work = self._work()
        marks = self.marks or self.stack
        if not marks:
            return self._unmarked(work), "operators"
        if not self.marks:
            marks = _outermost(marks)
        if not self.marks:
            self._neighbours([Span(mark.name, mark.start, mark.end) for mark in marks])
        elif marks[0].name.startswith("?"):
            self._neighbours_of_marks(marks)
        else:
            self.later = self._is_later()
        marks = sorted(marks, key=lambda mark: (mark.start, mark.order))
        starts = [mark.start for mark in marks]
        first = [float("inf")] * len(marks)
        last = [float("-inf")] * len(marks)
        for item in work:
            place = bisect_right(starts, item.called) - 1
            if place >= 0 and item.called <= marks[place].end and not item.slight:
                first[place] = min(first[place], item.start)
                last[place] = max(last[place], item.end)
        found: list[Span] = []
        counts: dict[str, int] = defaultdict(int)
        for mark, start, end in zip(marks, first, last, strict=True):
            if end < start:
                # Where others have work it waited, and had nothing to do (torch's I of stage 0).
                start, end = mark.end if work else mark.start, mark.end
            name = mark.name
            if name in ("?F", "?B"):  # Python's stack does not say which.
                counts[name] += 1
                name = f"{name}{counts[name] - 1}"
            found.append(Span(name, start, end))
        return sorted(found, key=lambda span: span.start), "marks" if self.marks else "stack"

    def _is_later(self) -> bool:
        own = {int(found) for mark in self.marks for found in re.findall(r"(\d+)[FBIW]", mark.name)}
        return bool(own) and self._after >= max(own)

    def _neighbours_of_marks(self, marks: Sequence[_Mark]) -> None:
        """A forward of torch's GPipe holds its messages."""
        for mark in marks:
            inside = [
                send
                for at, send in zip(self.messages, self.sends, strict=True)
                if mark.start <= at <= mark.end
            ]
            if mark.name.startswith("?F"):
                self.later = self.later or True in inside
                self.earlier = self.earlier or False in inside

    def _neighbours(self, spans: Sequence[Span]) -> None:
        """The last stage goes from a forward to its backward at once, the first one back again."""
        cuts = sorted(self.messages)
        turns: dict[str, list[bool]] = {"F": [], "B": []}
        for one, two in pairwise(sorted(spans, key=lambda span: span.start)):
            if one.name[1] != two.name[1]:
                between = bisect_right(cuts, two.start) - bisect_right(cuts, one.start)
                turns[one.name[1]].append(between > 0)
        self.later = bool(turns["F"]) and all(turns["F"])
        self.earlier = bool(turns["B"]) and all(turns["B"])

    def _work(self) -> list[_Work]:
        """Kernels by the call that launched them, or operators where nothing was launched."""
        if not self._kernels:
            return sorted(self.operators, key=lambda item: item.called)
        engine = sorted(self._engine)
        begins = [begin for begin, _ in engine]
        found = []
        for correlation, start, end in self._kernels:
            called = self._launched.get(correlation)
            if called is None:
                continue  # Launched before the trace began.
            place = bisect_right(begins, called) - 1
            backward = place >= 0 and called <= engine[place][1]
            found.append(_Work(called, start, end, backward, slight=False))
        return sorted(found, key=lambda item: item.called)

    def _unmarked(self, work: Sequence[_Work]) -> list[Span]:
        """Stretches of work between messages, of one kind each."""
        cuts = sorted(self.messages)
        outside = sorted(self.outside)
        counts: dict[str, int] = defaultdict(int)
        found: list[Span] = []
        for stretch in _stretches(work, cuts, outside):
            if all(item.slight for item in stretch):
                continue
            letter = "B" if any(item.backward for item in stretch) else "F"
            # What prepares a message at its end is no part of it.
            start = min(item.start for item in stretch if not item.slight)
            end = max(item.end for item in stretch if not item.slight)
            found.append(Span(f"?{letter}{counts[letter]}", start, end))
            counts[letter] += 1
        self._neighbours(found)
        return found


def _stretches(
    work: Sequence[_Work], cuts: Sequence[float], outside: Sequence[tuple[float, float]]
) -> Iterator[list[_Work]]:
    starts = [begin for begin, _ in outside]
    row: list[_Work] = []
    reached, backward = float("-inf"), False
    for item in work:
        place = bisect_right(starts, item.called) - 1
        if place >= 0 and item.called <= outside[place][1]:
            continue
        inside = item.called < reached  # Called by the operator before it.
        crossed = row and bisect_right(cuts, item.called) != bisect_right(cuts, row[-1].called)
        # A loss behind a forward is no backward; the engine's operators are.
        turned = row and not inside and item.backward != backward and not item.slight
        if crossed or turned:
            yield row
            row = []
        if not row:
            backward = item.backward
        elif not inside and not item.slight:
            backward = backward or item.backward
        row.append(item)
        reached = max(reached, item.end)
    if row:
        yield row


def _outermost(marks: Iterable[_Mark]) -> list[_Mark]:
    """Without marks inside others: a step may call another of that name."""
    found: list[_Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.start, -mark.end)):
        if not found or mark.start >= found[-1].end:
            found.append(mark)
    return found


def _steps(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """Whole steps: an instruction that comes again begins the next one.

    What was only counted stays in one piece; other ranks, or an order, say where steps end.
    """
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
