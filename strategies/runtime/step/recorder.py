"""When each instruction really ran; two clock reads per instruction, nothing else.

On CPU the clock is the host's. On CUDA, events on the compute stream are recorded and read when the
timeline is asked for, so that recording never waits for the device's work. At each step an event
on a stream with nothing before it, whose end the host sees at once, says how the two clocks differ:
the device may be far behind the host, and what gloo reduces ends on the host's clock. Events of a
step that nobody can read any more are recorded again in a later one.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from strategies.analysis.timeline import Timeline, inside
from strategies.ir.kinds import MICROBATCH_KINDS, Kind
from strategies.ir.program import Program
from strategies.runtime.messages.exchange import Exchange

if TYPE_CHECKING:
    from strategies.ir.instruction import Instruction
    from strategies.runtime.engine.rank_engine import Engine
    from strategies.runtime.step.stream_state import Place

_KEPT_STEPS = 32


class Anchor(NamedTuple):
    """One moment on two clocks."""

    event: Any  # on the device's
    seen_s: float  # on the host's

    def on_host(self, stamp: Any) -> float:
        """When an event was, on the host's clock; what is on it already stays."""
        if isinstance(stamp, float):
            return stamp
        return self.seen_s + float(self.event.elapsed_time(stamp)) / 1e3


@dataclass
class StepRecord:
    """One rank's stamps of one step as in a ``Timeline``; 0 where nothing was stamped."""

    step: int
    program: Program
    start: list[Any]
    end: list[Any]
    begun: float  # host clock at the step's first instruction
    finished: float = 0.0
    anchor: Anchor | None = None  # on CUDA
    place: Place | None = None  # in a stream of batches


class Spans(NamedTuple):
    """A step of one rank in short, on the host clock."""

    begun: float  # on CUDA when the device began and ended it, which may be behind
    finished: float
    busy: float  # seconds of compute
    computed: float  # when the last compute ended
    reduced: float | None  # when the last reduction ended; None where nothing was reduced


@dataclass
class Recorder:
    """Stamps instructions of the running step and keeps the last few steps."""

    rank: int  # pipeline rank, whose list is stamped
    device: torch.device
    # Whether collectives end on a stream of the device (NCCL), not in a thread of the host (gloo).
    collectives_on_device: bool = False
    kept: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    current: StepRecord | None = None
    _side: Any = None
    _idle: Any = None
    _free: list[Any] = field(default_factory=list)  # events to be recorded again

    @property
    def stamp(self) -> Callable[[], Any]:
        return self._cuda_stamp if self.device.type == "cuda" else time.perf_counter

    def begin(self, step: int, program: Program, place: Place | None = None) -> StepRecord:
        length = len(program.ranks[self.rank]) + len(inside(program, self.rank))
        self.current = StepRecord(
            step, program, [0.0] * length, [0.0] * length, time.perf_counter(), place=place
        )
        if self.device.type == "cuda":
            record = self.current
            record.anchor = self._anchor()
            # The record owns its events: whoever keeps it may read them as long as that.
            stamps = (record.start, record.end, [record.anchor.event])
            weakref.finalize(record, _take_back, self._free, *stamps).atexit = False
        return self.current

    def _cuda_stamp(self) -> Any:
        make: Any = torch.cuda.Event  # Untyped in torch.
        event = self._free.pop() if self._free else make(enable_timing=True)
        event.record()
        return event

    def _anchor(self) -> Anchor:
        if self._idle is None:
            self._idle = _cuda_stream(self.device)
        with torch.cuda.stream(self._idle):
            before = time.perf_counter()
            event = self._cuda_stamp()
            event.synchronize()
            return Anchor(event, (before + time.perf_counter()) / 2)

    def keep(self, lists: int) -> None:
        """Keeps so many at least."""
        self.kept = deque(self.kept, maxlen=max(lists, _KEPT_STEPS))

    def finish(self, *, keep: bool = True) -> None:
        """Ends the step, and keeps it among the last few if it is to be looked at."""
        if self.current is not None:
            self.current.finished = time.perf_counter()
            if keep:
                self.kept.append(self.current)
            self.current = None

    def stamp_end_of(self, work: Any, record: StepRecord, place: int) -> None:
        """Stamps a collective when it ends; nobody waits for that."""
        if not self.collectives_on_device:

            def ended(_: Any) -> None:
                record.end[place] = time.perf_counter()

            work.get_future().add_done_callback(ended)
            return
        if self._side is None:
            self._side = _cuda_stream(self.device)
        # A stream of its own waits for the collective's, so that compute does not. The first wait()
        # makes torch let go of the tensors that the collective uses, and this is the first. Until
        # the compute stream has waited, too, whoever has started the collective must hold them:
        # ``Reduction`` (``_sent``, ``_result``), ``_Way.sent``, ``MainWeights._sources``. If one is
        # freed earlier, the compute stream may write to its memory meanwhile.
        with torch.cuda.stream(self._side):
            work.wait()
            record.end[place] = self._cuda_stamp()

    def seconds(self, record: StepRecord) -> tuple[list[float], list[float]]:
        """A step's stamps on the host clock (on CUDA waits for that step, not for the device)."""
        if record.anchor is None:
            return list(record.start), list(record.end)
        for stamp in record.start + record.end:
            if not isinstance(stamp, float):
                stamp.synchronize()
        on_host = record.anchor.on_host
        return list(map(on_host, record.start)), list(map(on_host, record.end))

    def spans(self, record: StepRecord) -> Spans:
        start, end = self.seconds(record)
        row = record.program.ranks[self.rank]
        computed = [
            (s, e)
            for item, s, e in zip(row, start, end, strict=False)
            if item.kind in MICROBATCH_KINDS
        ]
        reduced = [e for item, e in zip(row, end, strict=False) if item.kind is Kind.REDUCE and e]
        begun, finished = record.begun, record.finished
        if record.anchor is not None:
            begun = min((s for s in start if s), default=begun)
            finished = max((e for e in end if e), default=finished)
        return Spans(
            begun=begun,
            finished=finished,
            busy=sum(e - s for s, e in computed),
            computed=max((e for _, e in computed), default=0.0),
            reduced=max(reduced, default=None),
        )


def _cuda_stream(device: torch.device) -> Any:
    make: Any = torch.cuda.Stream  # Untyped in torch.
    return make(device)


def _take_back(free: list[Any], *stamps: list[Any]) -> None:
    """Of a record that has gone; an event may be the end of one instruction and another's start."""
    free += {id(s): s for each in stamps for s in each if not isinstance(s, float)}.values()


class RankStep(NamedTuple):
    """What one rank says of a step; sent as a JSON list."""

    step: int  # as given to ``train_pass``
    begun: float  # first start, seconds on the host's clock
    finished: float  # last end
    squared_norm: float | None  # this rank's part of that of the gradient, before clipping
    busy_s: float
    computed: float  # when the last compute ended
    reduced: float | None  # when the last reduction ended; None where nothing is reduced
    peak_bytes: int  # since the engine was made


@dataclass(frozen=True, slots=True)
class StepStats:
    """An earlier training step over all ranks of the pipeline, known one step later."""

    step: int  # as given to ``train_pass``
    makespan_s: float  # first start to last end over the ranks
    busy_s: float  # compute of all ranks together
    bubble_ratio: float  # idle over P * makespan
    # 2-norm of the whole model's gradient, before clipping; None where no update is all ranks' yet.
    gradient_norm: float | None
    # How long the last reduction outlasted the last compute; 0 when hidden, None without any.
    exposed_grad_reduce_s: float | None = None
    # Per pipeline rank, of its sharers the largest; since the engine was made.
    peak_memory_bytes: tuple[int, ...] = ()


def joined_stats(
    said: Sequence[Sequence[Any] | None], *, tp: int, flushes: bool = True
) -> StepStats | None:
    """What the ranks of a replica say together; None unless all speak of the same step.

    ``said`` has a ``RankStep`` per rank of the replica: pipeline ranks, each with its tp sharers.
    Without a flush a rank is in a batch's call some time after the one before it, so the makespan
    is that of the slowest rank's call, and nobody knows yet what its reductions will outlast.
    """
    ranks = [RankStep(*entry) for entry in said if entry is not None]
    if len(ranks) < len(said) or len({rank.step for rank in ranks}) != 1:
        return None
    if flushes:
        makespan = max(rank.finished for rank in ranks) - min(rank.begun for rank in ranks)
    else:
        makespan = max(rank.finished - rank.begun for rank in ranks)
    busy = sum(rank.busy_s for rank in ranks)
    ends = [rank.reduced for rank in ranks if rank.reduced is not None and flushes]
    peaks = [rank.peak_bytes for rank in ranks]
    norms = [rank.squared_norm for rank in ranks if rank.squared_norm is not None]
    exposed = max(0.0, max(ends) - max(rank.computed for rank in ranks)) if ends else None
    return StepStats(
        step=int(ranks[0].step),
        makespan_s=makespan,
        busy_s=busy,
        bubble_ratio=1.0 - busy / (len(ranks) * makespan),
        gradient_norm=math.sqrt(sum(norms)) if len(norms) == len(ranks) else None,
        exposed_grad_reduce_s=exposed,
        peak_memory_bytes=tuple(max(peaks[i : i + tp]) for i in range(0, len(peaks), tp)),
    )


def gather_timeline(engine: Engine, *, median: bool) -> Timeline | None:
    """One recorded training step over the ranks of this replica's pipeline; collective.

    None when no full one was recorded. The ranks of one machine share a clock; steps are told by
    their number, which all ranks count alike.

    Without a flush, as many batches as the program has, from an update on which began with the
    first of them. What ranks did for batches before and behind is left out, so their first and
    last moments look idle: the picture is that of an empty pipeline, the times are not.
    """
    full = _stretches(engine) if engine.stream is not None else _steps(engine)
    exchange = Exchange(engine.control_group)
    said = exchange.everyone([(number, own.span) for number, own in full.items()])
    known = [dict(map(tuple, each)) for each in said]
    common = {n: max(each[n] for each in known) for n in known[0] if all(n in k for k in known)}
    if not common:
        return None
    middle = statistics.median_low(common.values())
    by_span = next(number for number, span in common.items() if span == middle)
    chosen = full[by_span if median else max(common)]
    gathered = exchange.everyone((chosen.start, chosen.end))
    where = engine.coordinates
    if engine.control_group is not None:
        gathered = gathered[where.tp_rank :: where.tp]
    zero = min(min(v for v in start if v) for start, _ in gathered)
    return Timeline(
        engine.programs.train,
        tuple(tuple(max(0.0, v - zero) for v in start) for start, _ in gathered),
        tuple(tuple(max(0.0, v - zero) for v in end) for _, end in gathered),
        "s",
        "measured",
    )


class _Stamps(NamedTuple):
    """One rank's times of its list of the program, in list order, on the host's clock."""

    span: float  # from first to last
    start: list[float]
    end: list[float]


def _steps(engine: Engine) -> dict[int, _Stamps]:
    recorder = engine.recorder
    full = [r for r in recorder.kept if r.program is engine.programs.train]
    return {r.step: _Stamps(r.finished - r.begun, *recorder.seconds(r)) for r in full}


def _stretches(engine: Engine) -> dict[int, _Stamps]:
    """Of the stream that has run last: by their first batch, as many as the program has."""
    recorder, whole = engine.recorder, engine.programs.train
    placed = [(record, record.place) for record in recorder.kept if record.place is not None]
    if not placed:
        return {}
    last = placed[-1][1]
    stamps: dict[Instruction, tuple[float, float]] = {}
    for record, place in placed:
        if place.fill == last.fill:
            items = map(place.counted, record.program.ranks[recorder.rank])
            stamps.update(zip(items, zip(*recorder.seconds(record), strict=True), strict=True))
    found = {}
    for first in range(last.entered - whole.num_microbatches // last.steps.updates.per_step + 1):
        window = last.window(whole, first)
        if window is not None and stamps.keys() >= set(own := window[recorder.rank]):
            start, end = (list(each) for each in zip(*map(stamps.__getitem__, own), strict=True))
            found[first] = _Stamps(max(end) - min(v for v in start if v), start, end)
    return found
