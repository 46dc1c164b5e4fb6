"""F, B, I, W and R of one pass: the instructions that compute, on this rank's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.models.collectives import default_group
from strategies.models.expert_parallel import TwoThreads
from strategies.models.logs import LogEntry
from strategies.models.nested import structure
from strategies.models.split_backward.input_step import (
    backward_under_sums,
    input_backward,
    run_backward,
)
from strategies.models.split_backward.pending import PendingWeights
from strategies.models.stage_model import Mode, StageOutput
from strategies.runtime.messages.mailbox import Values
from strategies.runtime.step.boundary_values import BoundaryValues
from strategies.runtime.step.microbatch import Microbatch
from strategies.runtime.step.rank_parts import RankParts
from strategies.runtime.step.recompute import KeptForward
from strategies.runtime.update.token_weights import pass_no_gradients


@dataclass
class StepResult:
    """What one pass leaves on this rank."""

    # Mean over the microbatches whose last stage ran here, in 64 bits and still on the device, so
    # that nobody waits for it before the forwards are done; None elsewhere.
    loss: Tensor | None = None
    logs: list[LogEntry] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)  # by microbatch, on the last stage's rank


@dataclass(frozen=True)
class PassOptions:
    """What all instructions of a pass have in common."""

    batch_idx: int
    mode: Mode
    scale: float  # factor on every gradient: 1 / (accumulation * dp), but for loss_over=tokens
    loss_scale: Tensor | None  # another one, on the device; None for 1
    seed: int | None  # every (microbatch, unit) draws from its own; None draws anew
    dataloader_idx: int | None  # which of several evaluation loaders the batch is from
    part: str = ""  # of a step that takes several passes; each has boundaries of its own
    retain_graph: bool = False  # whether another pass runs a backward through the same graphs
    batch: Any = None  # all of it, for a loss over it
    targets: float | None = None  # of this replica's batch, with loss_over=tokens

    def step_of(self, batch: Any) -> str:
        """What decides which tensors cross a boundary, besides their shapes."""
        return f"{self.mode}{self.part} {self.dataloader_idx or 0} {structure(batch)}"


@dataclass
class _Graph:
    """What a forward keeps for its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    loss: Tensor | None


@dataclass
class UnderWay:
    """What instructions leave for later ones, under stage and microbatch.

    It outlives a pass where the next one begins before this one's backwards have ended.
    """

    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    kept: dict[tuple[int, int], KeptForward] = field(default_factory=dict)
    pending: dict[tuple[int, int], PendingWeights] = field(default_factory=dict)
    # What the pass that ran the forward was given, and the recording of the step for its R.
    origins: dict[tuple[int, int], tuple[PassOptions, Microbatch, Any]] = field(
        default_factory=dict
    )


_NO_CONTEXT = nullcontext()


class StageCompute:
    """Runs the compute instructions of one pass, and keeps what they leave for each other."""

    def __init__(
        self,
        parts: RankParts,
        values: BoundaryValues,
        program: Program,
        microbatches: Mapping[int, Microbatch],
        options: PassOptions,
        recomputed: frozenset[tuple[int, int | None]],
        under_way: UnderWay,
        *,
        one_loss: bool,
        num_forwards: int,
        recording: Any,
    ) -> None:
        """``one_loss``: the program ends with a LOSS of the whole batch.

        ``num_forwards`` of each microbatch run on this rank; ``recording`` is that of the first.
        """
        self._first = recording
        self._num_forwards = num_forwards
        # Of each microbatch that has more forwards here: its recording, and how many have run.
        self._recordings: dict[int, tuple[Any, int]] = {}
        self._result = StepResult()
        # Of the losses, where these are the host's own numbers: it waits for none of them.
        self._mean: float | None = None
        device = parts.recorder.device.type
        self._on_host = device == "cpu"
        self._autocast = torch.is_autocast_enabled(device)  # around the whole pass
        self._parts = parts
        self._values = values
        self._options = options
        self._microbatches = microbatches
        self._last = program.placement.num_stages - 1
        self._copies = program.placement.weight_copies
        self._learns = program.role != "forward"
        self._recomputed = recomputed
        self._kept = under_way.kept
        self._graphs = under_way.graphs
        self._pending = under_way.pending
        self._origins = under_way.origins
        # For a loss of the whole batch: what the last stage gave, and later the gradients of that.
        self._one_loss = one_loss
        self._given: dict[int, tuple[Tensor, ...]] = {}

    @property
    def result(self) -> StepResult:
        if self._mean is not None:
            self._result.loss = torch.tensor(self._mean, dtype=torch.float64, device="cpu")
        return self._result

    def run(self, item: Instruction, inputs: Values, *, final: bool) -> None:
        """Runs one F, B, I, W or R, no fused pair.

        The ``final`` one completes its stage's gradient, so that ready buckets may go. All
        processes are the replicas to the user's code in it, also where a backward calls it.
        """
        versions = self._parts.versions if self._learns else None  # Nothing comes back.
        with default_group(self._parts.replicas):
            if versions is None:
                self._run(item, inputs, final=final)
                return
            with versions.read_by(item):
                self._run(item, inputs, final=final)

    def run_pair(
        self,
        pair: Instruction,
        inputs: Sequence[Values],
        *,
        final: tuple[bool, bool],
        turns: TwoThreads,
    ) -> None:
        """Runs the halves of a fused pair in turn, one while the other's tokens travel.

        ``inputs`` and ``final`` are those of the forward and of the backward; see ``run``.
        """
        first, second = pair.halves
        with default_group(self._parts.replicas):
            turns.run(
                partial(self._run, first, inputs[0], final=final[0]),
                partial(self._run, second, inputs[1], final=final[1]),
            )

    def _run(self, item: Instruction, inputs: Values, *, final: bool) -> None:
        if item.kind is Kind.F:
            self._forward(item, tuple(tensor for tensor in inputs if tensor is not None))
        elif item.kind is Kind.B:
            if final:
                self._parts.gradients[item.stage].arm()
            with self._without_autocast():
                self._backward(item, inputs)
        elif item.kind is Kind.I:
            with self._without_autocast():
                self._input_gradient(item, inputs)
        elif item.kind is Kind.W:
            self._weight_gradient(item, final=final)
        elif item.kind is Kind.R:
            self._rebuild(item)
        else:
            raise NotImplementedError(f"{item}: the runtime has no {item.kind.value}")

    def loss(self, item: Instruction) -> None:
        """Runs the LOSS: the end of the step on all microbatches' outputs, and its gradient."""
        with default_group(self._parts.replicas):
            with torch.set_grad_enabled(self._learns), self._parts.whole.once():
                output = self._parts.model.loss(
                    [self._given[place] for place in range(len(self._microbatches))],
                    [microbatch.share for microbatch in self._microbatches.values()],
                    batch=self._options.batch,
                    batch_idx=self._options.batch_idx,
                    mode=self._options.mode,
                    seed=self._options.seed,
                    dataloader_idx=self._options.dataloader_idx,
                )
            self._parts.whole.ended(output)
            if output.loss is not None:
                self._result.loss = output.loss.detach().reshape(()).to(torch.float64)
            if not self._learns:
                self._result.results[0] = output.result
                return
            assert output.loss is not None
            if self._parts.watch is not None:
                gradients = self._parts.gradients.get(item.stage)
                self._parts.watch.note_loss(item.stage, 0, output.loss, gradients)
            if output.loss.requires_grad and self._options.targets != 0:
                with self._without_autocast():
                    torch.autograd.backward([output.loss], [self._seed(output.loss, 1.0)])

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Gradients have the types of their forward; the precision plugin's context is around."""
        if self._autocast:
            return torch.autocast(self._parts.recorder.device.type, enabled=False)
        return _NO_CONTEXT

    def _forward(self, item: Instruction, inputs: tuple[Tensor, ...]) -> None:
        assert item.microbatch is not None
        microbatch = self._microbatches[item.microbatch]
        flags = [flag for part in self._values.flags(item) for flag in part]
        if self._learns:
            leaves = tuple(
                tensor.detach().requires_grad_(flag)
                for tensor, flag in zip(inputs, flags, strict=True)
            )
        else:
            leaves = inputs
        here = (item.stage, item.microbatch)
        whole = self._parts.whole
        recording = self._record(item, microbatch.data)
        self._origins[here] = (self._options, microbatch, recording)
        with whole.around(item.stage):
            if here in self._recomputed:
                self._kept[here], output = self._parts.recomputation.forward(
                    item.stage, leaves, microbatch.data, partial(self._call, item)
                )
                if self._parts.activations is not None:
                    self._parts.activations.note("inputs", *here, leaves)
            else:
                output = self._call(item, leaves, microbatch.data)
                self._origins[here] = (self._options, microbatch, None)
        whole.after(item.stage, item.microbatch, output)
        copy = item.microbatch % self._copies
        self._result.logs.extend(
            [LogEntry(call, microbatch.weight, item.stage, copy) for call in output.logs]
        )
        watch = self._parts.watch if self._learns else None
        if item.stage == self._last and self._one_loss:
            self._given[item.microbatch] = tuple(
                tensor.detach().requires_grad_(self._learns and tensor.requires_grad)
                for tensor in output.tensors
            )
        elif item.stage == self._last:
            loss: Tensor | float | None = output.loss
            if isinstance(loss, Tensor) and self._on_host and loss.is_floating_point():
                loss = float(loss.item())
            self._end_of_pipeline(item.microbatch, loss, output.result)
            if watch is not None and loss is not None and microbatch.weight > 0:
                gradients = self._parts.gradients.get(item.stage)
                watch.note_loss(item.stage, item.microbatch, loss, gradients)
        else:
            if watch is not None:
                watch.note_output(item.stage, item.microbatch, output.tensors)
            self._values.hand_on(item, output)
        if self._learns and here not in self._recomputed:
            self._keep_graph(here, leaves, output)

    def _rebuild(self, item: Instruction) -> None:
        """The graph of a checkpointed forward; its results have been handed on and logged."""
        assert item.microbatch is not None
        here = (item.stage, item.microbatch)
        again = partial(self._call, item)
        whole = self._parts.whole
        with whole.around(item.stage), whole.unchanged(item.stage):
            leaves, output = self._parts.recomputation.again(self._kept.pop(here), again)
        self._origins[here] = (*self._origins[here][:2], None)
        self._keep_graph(here, leaves, output)

    def _keep_graph(
        self, here: tuple[int, int], leaves: tuple[Tensor, ...], output: StageOutput
    ) -> None:
        leaves = leaves if output.leaves is None else output.leaves
        self._graphs[here] = _Graph(leaves, output.tensors, output.loss)
        if self._parts.activations is not None:
            self._parts.activations.graph(*here, leaves, (*output.tensors, output.loss))

    def _record(self, item: Instruction, data: Any) -> Any:
        """The recording of a microbatch's step, which this rank's first forward of it makes.

        None for a last stage that is the rank's only one and runs once: it runs the step itself.
        """
        label = item.microbatch
        assert label is not None
        first = next(iter(self._microbatches))
        recording, num_run = self._recordings.pop(label, (None, 0))
        again = (item.stage, label) in self._recomputed
        records = self._num_forwards > 1 or item.stage != self._last or again or self._one_loss
        if num_run == 0 and self._first is not None and label == first:
            recording, self._first = self._first, None
        elif num_run == 0 and records:
            with torch.set_grad_enabled(self._learns):
                recording = self._parts.model.record(
                    batch=data,
                    batch_idx=self._options.batch_idx,
                    microbatch=label - first,
                    mode=self._options.mode,
                    dataloader_idx=self._options.dataloader_idx,
                )
            if recording is not None:
                self._parts.whole.state.restore()
        if num_run + 1 < self._num_forwards:
            self._recordings[label] = recording, num_run + 1
        return recording

    def _call(self, item: Instruction, leaves: tuple[Tensor, ...], data: Any) -> StageOutput:
        """Runs the stage; one that begins in place gets copies, which autograd lets it change."""
        assert item.microbatch is not None
        copied = self._parts.begins_in_place
        options, _, recording = self._origins[item.stage, item.microbatch]
        seed = None if options.seed is None else options.seed * 8191 + item.microbatch
        # Without a flush labels go on from batch to batch, and those of earlier ones run again.
        known = item.microbatch in self._microbatches
        number = item.microbatch - next(iter(self._microbatches)) if known else -1
        while True:
            inputs = leaves
            with torch.set_grad_enabled(self._learns):
                if item.stage in copied:
                    inputs = tuple(leaf.clone() for leaf in leaves)
                try:
                    return self._parts.model.forward(
                        item.stage,
                        inputs,
                        batch=data,
                        batch_idx=options.batch_idx,
                        microbatch=number,
                        mode=options.mode,
                        seed=seed,
                        dataloader_idx=options.dataloader_idx,
                        at_end=self._parts.whole.at_end,
                        recording=recording,
                    )
                except RuntimeError as error:
                    # It failed at its first operation, so nothing has happened yet.
                    if "leaf Variable" not in str(error) or item.stage in copied:
                        raise
                    copied.add(item.stage)

    def _end_of_pipeline(self, microbatch: int, loss: Tensor | float | None, result: Any) -> None:
        weight = self._microbatches[microbatch].weight
        if weight == 0 and loss is not None:  # A mean over no target is not a number.
            loss = torch.zeros_like(loss) if isinstance(loss, Tensor) else 0.0
        if isinstance(loss, float):
            value = loss * weight
            self._mean = value if self._mean is None else self._mean + value
        elif loss is not None:
            part, known = loss.detach().reshape(()).to(torch.float64) * weight, self._result.loss
            self._result.loss = part if known is None else known + part
        if not self._learns:
            self._result.results[microbatch] = result

    def _seed(self, loss: Tensor, weight: float) -> Tensor:
        """The gradient that a loss's backward begins with."""
        seed = torch.full_like(loss, weight * self._options.scale)
        if self._options.loss_scale is not None:
            seed = (seed * self._options.loss_scale).to(seed.dtype)
        return seed

    def _backward(self, item: Instruction, gradients: Values) -> None:
        graph, outputs, incoming = self._roots(item, gradients)
        if outputs and self._parts.tensor_ranks is not None:
            leaves = [leaf for leaf in graph.inputs if leaf.requires_grad]
            backward_under_sums(self._parts.tensor_ranks, outputs, incoming, leaves)
        elif outputs:
            run_backward(outputs, incoming, retain_graph=self._options.retain_graph)
        self._values.hand_back(item, graph.inputs)

    def _input_gradient(self, item: Instruction, gradients: Values) -> None:
        assert item.microbatch is not None
        if self._options.retain_graph:
            # Nothing is put off: that would take from the graph what the next backward needs.
            return self._backward(item, gradients)
        graph, outputs, incoming = self._roots(item, gradients)
        if outputs:
            inputs = [leaf for leaf in graph.inputs if leaf.requires_grad]
            pending = input_backward(outputs, incoming, inputs)
            self._pending[item.stage, item.microbatch] = pending
            if self._parts.activations is not None:
                held = pending.held
                self._parts.activations.note("waiting", item.stage, item.microbatch, held)
        self._values.hand_back(item, graph.inputs)

    def _weight_gradient(self, item: Instruction, *, final: bool) -> None:
        assert item.microbatch is not None
        gradients = self._parts.gradients[item.stage]
        pending = self._pending.pop((item.stage, item.microbatch), None)
        if final:
            # The rest of the stage's weights got their last gradient in an I.
            gradients.arm(() if pending is None else pending.parameters)
        if pending is not None:
            pending.run()

    def _roots(
        self, item: Instruction, gradients: Values
    ) -> tuple[_Graph, list[Tensor], list[Tensor]]:
        """Where a backward begins, and with which gradients; takes the graph out of the store."""
        assert item.microbatch is not None
        graph = self._graphs.pop((item.stage, item.microbatch))
        if item.stage == self._last and self._one_loss:
            given = self._given.pop(item.microbatch)
            ends = [
                (output, leaf.grad)
                for output, leaf in zip(graph.outputs, given, strict=True)
                if leaf.grad is not None
            ]
            return graph, [output for output, _ in ends], [gradient for _, gradient in ends]
        if item.stage == self._last:
            assert graph.loss is not None
            _, microbatch, _ = self._origins[item.stage, item.microbatch]
            if not graph.loss.requires_grad:
                return graph, [], []
            if microbatch.weight == 0 and not bool(graph.loss.detach().isfinite().all()):
                pass_no_gradients(graph.inputs, item, exchanges=bool(self._parts.model.experts))
                return graph, [], []
            return graph, [graph.loss], [self._seed(graph.loss, microbatch.weight)]
        outputs = [tensor for tensor in graph.outputs if tensor.requires_grad]
        found = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        return graph, [output for output, _ in found], [g for _, g in found if g is not None]
