"""Walks one rank's list: the only loop that runs a program, and it has no order of its own.

Receives are posted ahead of their place where messages have tags (never where they are matched by
order), values are waited for by the instruction that uses them, and sends are never waited for
inline: a sent buffer is let go when a later receive proves that it has arrived
(``lowering.release``), or with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from strategies.heartbeat import PHASE, STATE, WAITING, Heartbeat, Phase
from strategies.ir.instruction import CHANNEL_KINDS, MICROBATCH_KINDS, Instruction, Kind
from strategies.ir.program import Program
from strategies.lowering.release import release_points
from strategies.runtime.activation_bytes import ActivationBytes
from strategies.runtime.grad_sync import StageGradients
from strategies.runtime.links import Links
from strategies.runtime.logs import LogEntry
from strategies.runtime.mailbox import Mailbox
from strategies.runtime.main_weights import AllMainWeights
from strategies.runtime.microbatch import Microbatch
from strategies.runtime.nan_guard import NanWatch
from strategies.runtime.pulse import Pulse
from strategies.runtime.recompute import KeptForward, Recomputation
from strategies.runtime.recorder import Recorder, StepRecord
from strategies.runtime.replay.structure import tensors as tensors_in
from strategies.runtime.split_backward import Meanwhile, PendingWeights, input_backward
from strategies.runtime.stage_model import Mode, StageModel, StageOutput
from strategies.runtime.tensor_parallel import TensorRanks

_RECEIVE_AHEAD = 4


@dataclass
class StepResult:
    """What one pass leaves on this rank.

    Attributes:
        loss: Mean loss over the microbatches whose last stage ran here, in 64 bits and still on the
            device, so that nobody waits for it before the forwards are done; None elsewhere.
        logs: The user's log calls.
        results: Microbatch -> return value of the user's step, on the last stage's rank.
    """

    loss: Tensor | None = None
    logs: list[LogEntry] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Route:
    """One rank's list with what the executor derives from it once."""

    row: tuple[Instruction, ...]
    receives: tuple[int, ...]  # places of the RECVs
    release: dict[int, tuple[Instruction, ...]]
    arming: frozenset[tuple[int, int]]  # (place, stage) of last gradients, where REDUCE overlaps
    last_forward: int
    recomputed: frozenset[tuple[int, int | None]]  # pairs whose forward keeps its input only


def _route(program: Program, rank: int) -> _Route:
    row = program.ranks[rank]
    last: dict[int, int] = {}
    overlapped: set[int] = set()
    last_forward = -1
    for place, item in enumerate(row):
        for part in item.parts:
            if part.kind is Kind.B or part.kind is Kind.W:
                last[part.stage] = place
            elif part.kind is Kind.F:
                last_forward = place
        if item.kind is Kind.REDUCE and not item.after:
            overlapped.add(item.stage)
    return _Route(
        row=row,
        receives=tuple(p for p, item in enumerate(row) if item.kind is Kind.RECV),
        release=release_points(program, rank),
        arming=frozenset((place, stage) for stage, place in last.items() if stage in overlapped),
        last_forward=last_forward,
        recomputed=frozenset((i.stage, i.microbatch) for i in row if i.kind is Kind.R),
    )


class Executor:
    """Runs programs for one rank."""

    def __init__(
        self,
        *,
        model: StageModel,
        rank: int,
        mailbox: Mailbox,
        gradients: dict[int, StageGradients],
        mains: AllMainWeights,
        recorder: Recorder,
        tensor_ranks: TensorRanks | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._tensor_ranks = tensor_ranks
        self._pulse = pulse or Pulse(Heartbeat())
        self._model = model
        self._rank = rank
        self._mailbox = mailbox
        self._gradients = gradients
        self._mains = mains
        self._recorder = recorder
        self._routes: dict[int, tuple[Program, _Route]] = {}
        self._places: dict[tuple[int, int | None], int] = {}
        self.begins_in_place: set[int] = set()
        self._recomputation = Recomputation(model.module)
        self.activations: ActivationBytes | None = None  # measured if there
        self.watch: NanWatch | None = None  # notes what is not finite if there

    def run(
        self,
        program: Program,
        microbatches: Sequence[Microbatch],
        *,
        step: int,
        batch_idx: int,
        mode: Mode,
        scale: float,
        loss_scale: Tensor | None = None,
        seed: int | None,
        dataloader_idx: int,
        forwards_done: Callable[[StepResult], None],
    ) -> StepResult:
        """Executes the list up to its optimizer steps.

        Args:
            program: Lowered; its number of microbatches is ``len(microbatches)``.
            microbatches: This replica's batch, the same on every rank of the pipeline.
            step: Counts passes, for the recorder.
            batch_idx: Lightning's batch index.
            mode: Which of the user's steps runs.
            scale: Factor on every gradient: 1 / (accumulation * dp).
            loss_scale: Another one, on the device; None for 1.
            seed: Seed of the pass; every (microbatch, unit) draws from its own.
            dataloader_idx: Which of several evaluation loaders the batch is from.
            forwards_done: Called after this rank's last forward.
        """
        route = self._route_of(program)
        run = _Run(self, program, microbatches, batch_idx, mode, scale, seed, dataloader_idx)
        run.loss_scale = loss_scale
        run.recomputed = route.recomputed
        record = self._recorder.begin(step, program)
        self._index_channel(route.row)
        stamp = self._recorder.stamp
        start, end = record.start, record.end
        self._mailbox.begin(program, mode, [m.signature for m in microbatches])
        if self.activations is not None:
            self.activations.begin(len(route.row), tensors_in([m.data for m in microbatches]))
        posted = 0
        passed = 0
        self._pulse.begin(program)
        beat = self._pulse.words
        blocks = self._mailbox.ordered  # Then messages are waited for at their place.
        for place, item in enumerate(route.row):
            kind = item.kind
            if kind is Kind.STEP:
                break
            beat[STATE] = place << 1
            if kind in MICROBATCH_KINDS and not self._mailbox.ordered:
                # The next few receives of the list, whatever compute stands between. Not before a
                # SEND, which somebody may be waiting for.
                while posted < len(route.receives) and posted < passed + _RECEIVE_AHEAD:
                    ahead = route.receives[posted]
                    self._mailbox.post(route.row[ahead])
                    start[ahead] = stamp()
                    posted += 1
            if kind in MICROBATCH_KINDS:
                # A fused pair waits for the inputs of both halves, then runs them in turn.
                inputs = [run.collect(part, record, stamp) for part in item.parts]
                beat[STATE] = place << 1  # Waiting for a message had its place there.
                for part in item.parts:
                    if part.kind is Kind.F:
                        self._mains.wait(part.stage)
                start[place] = stamp()
                for part in item.parts:
                    run.compute(part, inputs.pop(0), final=(place, part.stage) in route.arming)
                end[place] = stamp()
                if place == route.last_forward:
                    forwards_done(run.result)
            elif kind is Kind.SEND:
                if blocks:
                    beat[STATE] = place << 1 | WAITING
                start[place] = stamp()
                run.send(item)
                end[place] = stamp()
            elif kind is Kind.RECV:
                passed += 1
                if blocks:
                    beat[STATE] = place << 1 | WAITING
                if self._mailbox.ordered or posted < passed:
                    # At its place at the latest: what is released counts on that.
                    self._mailbox.post(item)
                    start[place] = stamp()
                    posted = passed
                run.places[item] = place
                for ended in route.release.get(place, ()):
                    run.releasable.setdefault(item, []).append(ended)
            elif kind is Kind.REDUCE:
                assert item.bucket is not None
                self._gradients[item.stage].reduce(item.bucket)
            elif kind is Kind.GATHER:
                self._mains.gather(item.stage, self.gather_started)
            else:
                raise NotImplementedError(f"{item}: the runtime has no {kind.value}")
            if self.activations is not None:
                self.activations.sample(place)
        beat[STATE] = PHASE | Phase.SENDING
        self._mailbox.finish()
        return run.result

    def reduction_started(self, stage: int, bucket: int, work: Any) -> None:
        """Stamps a REDUCE when it starts and, from the backend's thread, when it ends."""
        self._stamp_channel(self._places.get((stage, bucket)), work)

    def gather_started(self, stage: int, work: Any) -> None:
        """Stamps a GATHER likewise."""
        self._stamp_channel(self._places.get((stage, None)), work)

    def _stamp_channel(self, place: int | None, work: Any) -> None:
        record = self._recorder.current
        if record is None or place is None:
            return
        stamp = self._recorder.stamp
        record.start[place] = record.end[place] = stamp()
        if work is not None:
            self._recorder.stamp_end_of(work, record, place)

    def _index_channel(self, row: Sequence[Instruction]) -> None:
        self._places = {
            (item.stage, item.bucket): place
            for place, item in enumerate(row)
            if item.kind in CHANNEL_KINDS
        }

    def _route_of(self, program: Program) -> _Route:
        # Keyed by identity: programs are immutable and kept alive here.
        known = self._routes.get(id(program))
        if known is None:
            known = (program, _route(program, self._rank))
            self._routes[id(program)] = known
        return known[1]


@dataclass
class _Graph:
    """What a forward keeps for its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    loss: Tensor | None


class _Run:
    """The values of one pass."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        microbatches: Sequence[Microbatch],
        batch_idx: int,
        mode: Mode,
        scale: float,
        seed: int | None,
        dataloader_idx: int,
    ) -> None:
        self._dataloader_idx = dataloader_idx
        self.result = StepResult()
        self.loss_scale: Tensor | None = None
        self.places: dict[Instruction, int] = {}
        self.releasable: dict[Instruction, list[Instruction]] = {}
        self._executor = executor
        self._beat = executor._pulse.words
        self._mailbox = executor._mailbox
        self._model = executor._model
        self._program = program
        self._microbatches = microbatches
        self._batch_idx = batch_idx
        self._mode: Mode = mode
        self._scale = scale
        self._seed = seed
        self._last = program.placement.num_stages - 1
        self._learns = program.role != "forward"
        self.recomputed: frozenset[tuple[int, int | None]] = frozenset()
        self._recomputation = executor._recomputation
        self._activations = executor.activations
        self._kept: dict[tuple[int, int], KeptForward] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pending: dict[tuple[int, int], PendingWeights] = {}
        # By payload, the stage that made them and the one that they are for, and microbatch.
        self._values: dict[tuple[Kind, int, int, int], tuple[Tensor, ...]] = {}
        self._links = Links.of(program)

    def collect(
        self, item: Instruction, record: StepRecord, stamp: Callable[[], Any]
    ) -> tuple[Tensor, ...]:
        """The boundary tensors that F, B or I consumes: received, or handed over on this rank."""
        assert item.microbatch is not None
        if item.kind is Kind.W:
            return ()
        if item.kind is Kind.R:
            gradient = Instruction(Kind.B, item.stage, item.microbatch)
            for edge in item.after:
                if edge.payload is Kind.B and edge.peer is not None:
                    # It waits for its gradient, which its backward will ask for.
                    here = (Kind.B, edge.peer, item.stage, item.microbatch)
                    self._values[here] = self._value(gradient, Kind.B, edge.peer, record, stamp)
            return ()
        payload = Kind.F if item.kind is Kind.F else Kind.B
        others = (self._links.sources if payload is Kind.F else self._links.targets)[item.stage]
        parts = [self._value(item, payload, other, record, stamp) for other in others]
        return tuple(tensor for part in parts for tensor in part)

    def _value(
        self,
        item: Instruction,
        payload: Kind,
        other: int,
        record: StepRecord,
        stamp: Callable[[], Any],
    ) -> tuple[Tensor, ...]:
        """What one other stage hands to ``item``."""
        assert item.microbatch is not None
        rank_of = self._program.placement.rank_of
        known = self._values.pop((payload, other, item.stage, item.microbatch), None)
        if known is not None:
            return known
        assert rank_of(other, item.microbatch) != rank_of(item.stage, item.microbatch)
        receive = Instruction(Kind.RECV, item.stage, item.microbatch, payload=payload, peer=other)
        place = self.places[receive]
        self._beat[STATE] = place << 1 | WAITING
        tensors = self._mailbox.wait(receive)
        record.end[place] = stamp()
        for ended in self.releasable.pop(receive, ()):
            self._mailbox.release(ended)
        return tensors

    def compute(self, item: Instruction, inputs: tuple[Tensor, ...], *, final: bool) -> None:
        """Runs one F, B, I, W or R.

        Args:
            item: No fused pair.
            inputs: What ``collect`` gave for it.
            final: Whether it completes its stage's gradient, so that ready buckets may go.
        """
        if item.kind is Kind.F:
            self.forward(item, inputs)
        elif item.kind is Kind.B:
            if final:
                self._executor._gradients[item.stage].arm()
            with self._without_autocast():
                self.backward(item, inputs)
        elif item.kind is Kind.I:
            with self._without_autocast():
                self.input_gradient(item, inputs)
        elif item.kind is Kind.W:
            self.weight_gradient(item, final=final)
        elif item.kind is Kind.R:
            self.rebuild(item)
        else:
            raise NotImplementedError(f"{item}: the runtime has no {item.kind.value}")

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Gradients have the types of their forward; the precision plugin's context is around."""
        device = self._executor._recorder.device.type
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, enabled=False)
        return nullcontext()

    def forward(self, item: Instruction, inputs: tuple[Tensor, ...]) -> None:
        assert item.microbatch is not None
        microbatch = self._microbatches[item.microbatch]
        flags = [flag for part in self._flags(item) for flag in part]
        if self._learns:
            leaves = tuple(
                tensor.detach().requires_grad_(flag)
                for tensor, flag in zip(inputs, flags, strict=True)
            )
        else:
            leaves = inputs
        here = (item.stage, item.microbatch)
        if here in self.recomputed:
            self._kept[here], output = self._recomputation.forward(
                item.stage, leaves, microbatch.data, partial(self._call, item)
            )
            if self._activations is not None:
                self._activations.note("inputs", *here, leaves)
        else:
            output = self._call(item, leaves, microbatch.data)
        copy = item.microbatch % self._program.placement.weight_copies
        self.result.logs.extend(
            LogEntry(call, microbatch.share, item.stage, copy) for call in output.logs
        )
        watch = self._executor.watch if self._learns else None
        if item.stage == self._last:
            self._end_of_pipeline(item.microbatch, output.loss, output.result)
            if watch is not None and output.loss is not None:
                gradients = self._executor._gradients.get(item.stage)
                watch.note_loss(item.stage, item.microbatch, output.loss, gradients)
        else:
            if watch is not None:
                watch.note_output(item.stage, item.microbatch, output.tensors)
            for target, part in self._links.deal(item.stage, output):
                self._mailbox.describe(item.stage, target, item.microbatch, part)
                detached = tuple(tensor.detach() for tensor in part)
                self._values[Kind.F, item.stage, target, item.microbatch] = detached
        if self._learns and here not in self.recomputed:
            self._keep_graph(here, leaves, output)

    def rebuild(self, item: Instruction) -> None:
        """The graph of a checkpointed forward; its results have been handed on and logged."""
        assert item.microbatch is not None
        here = (item.stage, item.microbatch)
        leaves, output = self._recomputation.again(self._kept.pop(here), partial(self._call, item))
        self._keep_graph(here, leaves, output)

    def _keep_graph(
        self, here: tuple[int, int], leaves: tuple[Tensor, ...], output: StageOutput
    ) -> None:
        self._graphs[here] = _Graph(leaves, output.tensors, output.loss)
        if self._activations is not None:
            self._activations.graph(*here, leaves, (*output.tensors, output.loss))

    def _call(self, item: Instruction, leaves: tuple[Tensor, ...], data: Any) -> StageOutput:
        """Runs the stage; one that begins in place gets copies, which autograd lets it change."""
        assert item.microbatch is not None
        copies = self._executor.begins_in_place
        seed = None if self._seed is None else self._seed * 8191 + item.microbatch
        while True:
            inputs = leaves
            with torch.set_grad_enabled(self._learns):
                if item.stage in copies:
                    inputs = tuple(leaf.clone() for leaf in leaves)
                try:
                    return self._model.forward(
                        item.stage,
                        inputs,
                        batch=data,
                        batch_idx=self._batch_idx,
                        microbatch=item.microbatch,
                        mode=self._mode,
                        seed=seed,
                        dataloader_idx=self._dataloader_idx,
                    )
                except RuntimeError as error:
                    # It failed at its first operation, so nothing has happened yet.
                    if "leaf Variable" not in str(error) or item.stage in copies:
                        raise
                    copies.add(item.stage)

    def _end_of_pipeline(self, microbatch: int, loss: Tensor | None, result: Any) -> None:
        if loss is not None:
            share = self._microbatches[microbatch].share
            value = loss.detach().reshape(()).to(torch.float64) * share
            self.result.loss = value if self.result.loss is None else self.result.loss + value
        if not self._learns:
            self.result.results[microbatch] = result

    def backward(self, item: Instruction, gradients: tuple[Tensor, ...]) -> None:
        graph, outputs, incoming = self._roots(item, gradients)
        if outputs and self._executor._tensor_ranks is not None:
            leaves = [leaf for leaf in graph.inputs if leaf.requires_grad]
            _backward_under_sums(self._executor._tensor_ranks, outputs, incoming, leaves)
        elif outputs:
            torch.autograd.backward(outputs, incoming)
        self._hand_back(item, graph)

    def input_gradient(self, item: Instruction, gradients: tuple[Tensor, ...]) -> None:
        assert item.microbatch is not None
        graph, outputs, incoming = self._roots(item, gradients)
        if outputs:
            inputs = [leaf for leaf in graph.inputs if leaf.requires_grad]
            pending = input_backward(outputs, incoming, inputs)
            self._pending[item.stage, item.microbatch] = pending
            if self._activations is not None:
                self._activations.note("waiting", item.stage, item.microbatch, pending.held)
        self._hand_back(item, graph)

    def weight_gradient(self, item: Instruction, *, final: bool) -> None:
        assert item.microbatch is not None
        gradients = self._executor._gradients[item.stage]
        pending = self._pending.pop((item.stage, item.microbatch), None)
        if final:
            # The rest of the stage's weights got their last gradient in an I.
            gradients.arm(() if pending is None else pending.parameters)
        if pending is not None:
            pending.run()

    def _roots(
        self, item: Instruction, gradients: tuple[Tensor, ...]
    ) -> tuple[_Graph, list[Tensor], list[Tensor]]:
        """Where a backward begins, and with which gradients; takes the graph out of the store."""
        assert item.microbatch is not None
        graph = self._graphs.pop((item.stage, item.microbatch))
        if item.stage == self._last:
            assert graph.loss is not None
            if not graph.loss.requires_grad:
                return graph, [], []
            share = self._microbatches[item.microbatch].share
            seed = torch.full_like(graph.loss, share * self._scale)
            if self.loss_scale is not None:
                seed = (seed * self.loss_scale).to(seed.dtype)
            return graph, [graph.loss], [seed]
        outputs = [tensor for tensor in graph.outputs if tensor.requires_grad]
        assert len(outputs) == len(gradients)
        return graph, outputs, list(gradients)

    def _hand_back(self, item: Instruction, graph: _Graph) -> None:
        """Keeps the gradients of the stage's inputs for the stage before."""
        assert item.microbatch is not None
        leaves = iter(graph.inputs)
        for source, flags in zip(self._links.sources[item.stage], self._flags(item), strict=True):
            part = islice(leaves, len(flags))
            self._values[Kind.B, item.stage, source, item.microbatch] = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for leaf in part
                if leaf.requires_grad
            )

    def _flags(self, item: Instruction) -> list[tuple[bool, ...]]:
        """Per stage that hands tensors to this one, which of them want a gradient."""
        assert item.microbatch is not None
        return [
            self._mailbox.gradient_flags(source, item.stage, item.microbatch)
            for source in self._links.sources[item.stage]
        ]

    def send(self, item: Instruction) -> None:
        assert item.payload is not None
        assert item.microbatch is not None
        assert item.peer is not None
        tensors = self._values.pop((item.payload, item.stage, item.peer, item.microbatch))
        self._mailbox.send(item, tensors)


def _backward_under_sums(
    ranks: TensorRanks, outputs: list[Tensor], incoming: list[Tensor], inputs: list[Tensor]
) -> None:
    """A whole backward whose weight gradients run while input gradients are added up over ranks."""
    meanwhile = ranks.meanwhile = Meanwhile()
    try:
        rest = input_backward(outputs, incoming, inputs, meanwhile=meanwhile)
    finally:
        ranks.meanwhile = None
    meanwhile.run()
    rest.run()
