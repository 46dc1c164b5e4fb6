"""What a step does to its module, and what it logs, as one run on the whole batch would have it.

A pipeline runs the user's step per microbatch and stage. Its loss is a mean over microbatches, its
side effects are not: a counter would count microbatches, an F1 score is no mean of F1 scores. So
each of these runs is restored (``Snapshot``), and where the step does more than to return a
loss, the last stage runs what lies behind its last layer once more, for the whole batch and without
gradients: metrics, counters, lists and log calls are then those of stock Lightning by construction.

Nothing is run twice where nothing is left: a step that only logs means is known by a trial.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strategies.errors import DataError, ModelError
from strategies.models.logs import (
    LogEntry,
    Replicas,
    join_entries,
    on_microbatch,
    on_whole_batch,
    share_metrics,
)
from strategies.models.nested import tensors
from strategies.models.snapshot import Snapshot, StateRef
from strategies.models.stage_model import STEP_NAMES, LogCall, Mode, StageModel, StageOutput, Step
from strategies.models.state import Generators, TorchState, kept_generators
from strategies.runtime.step.microbatch import (
    Microbatch,
    count_rows,
    first_rows,
    share_sizes,
    signature,
)

# A trial of a step that seems to leave nothing may hold so much for its batch, no more.
_TRIAL_BYTES = 64 << 20


@dataclass
class Whole:
    """What a pass has come to on the last stage's rank.

    Attributes:
        changed: Places of the module that have another value than before.
        result: What the step returned for the batch; None where nobody asked.
        refusal: Why it could not be run, although it had to be.
        generators: Where they stand behind it, if it has drawn behind its last layer.
    """

    changed: set[StateRef] = field(default_factory=set)
    result: Any = None
    refusal: str | None = None
    generators: Generators | None = None


class WholeBatch:
    """Around the forwards of each pass on one rank.

    Attributes:
        carried: The modes whose hooks look at what a step has returned.
        unlike: Of the first training batch, the mean of the microbatches' losses and the loss of
            all rows at once, where they differ.
        mixed: The line of a layer that gets rows of a training batch which others have a part in.
        uneven: What is logged before the last layer, and is no mean over rows.
        gathered: The line of a number that the loss takes, made of all rows before the last layer.
        kept: The line of such a number that the step keeps on its module.
        once_behind: Whether what lies behind the last layer runs for the whole batch anyway.
        replicas: With whom metrics are computed.
        together: The modes in which a metric's value of a batch is that of all replicas' batches,
            which have as many.
    """

    def __init__(self, model: StageModel, last_stage: int, copies: int, *, once: bool) -> None:
        self.state = Snapshot(model.module, model.layers())
        self.carried: frozenset[Mode] = frozenset()
        self.replicas = Replicas(None)
        self.together: set[Mode] = {"train"}
        self._model = model
        self._last = last_stage
        self._copies = copies
        self.once_behind = once  # What lies behind the last layer runs for the whole batch anyway.
        self._output: StageOutput | None = None
        self._compares = not once and copies == 1  # the first batch's loss, with that of all rows
        self._compared: set[Hashable] = set()  # ways through the training step, and looks
        self.unlike: tuple[float, float] | None = None
        self.mixed: str | None = None
        self.uneven: tuple[str, ...] = ()
        self.gathered: str | None = None
        self.kept: str | None = None
        self._linear: dict[Mode, bool] = {}  # whether means over microbatches say all
        # For which loaders or ways, and names that are logged.
        self._tried: set[tuple[Mode, int, frozenset[str]]] = set()
        self._gone: set[tuple[Mode, int]] = set()  # loaders and ways of batches before
        self._has_metrics = False
        self._microbatches: Sequence[Microbatch] = ()

    def run_whole(self, model: StageModel) -> None:
        """From now on ``model`` runs each step once, for the whole batch."""
        self._model, self.once_behind, self._compares = model, True, False

    def layers(self) -> Iterator[nn.Module]:
        """What their forwards keep is their stage's own."""
        return self._model.layers()

    def compare_layers(
        self, batch_idx: int, step: Step, whole: Any, parts: Sequence[Any], rows: Sequence[int]
    ) -> None:
        """Looks at a training batch: two parts of it and their numbers of rows."""
        found = self._model.mixed_rows(step, whole, parts, rows, batch_idx)
        self.mixed, self.uneven = self.mixed or found.line, self.uneven or found.uneven
        self.gathered, self.kept = self.gathered or found.number, self.kept or found.kept

    def note(self) -> None:
        """Notes the state to which ``state.restore`` goes."""
        if not self.state.knows_modules:
            self._has_metrics = share_metrics(self._model.module, self.replicas)
        self.state.take()

    def begin(self, batch: Any, microbatches: Sequence[Microbatch], options: Any) -> None:
        """Before the first forward of a pass."""
        self.note()
        self._batch = batch
        self._microbatches = microbatches
        self._options = options
        self._ends: dict[int, tuple[Tensor, ...]] = {}
        self._why_not = ""
        self._must = self._needed = self._deep = False
        self._bytes = 0
        self._output = None
        mode: Mode = options.mode
        # Another batch may log what the first one has not.
        new = mode not in self._linear or (mode, options.dataloader_idx or 0) not in self._gone
        self._tries = self._linear.get(mode, True) and (new or self._model.may_log(mode))

    def around(self, stage: int) -> AbstractContextManager[None]:
        """Around a forward."""
        if stage == self._last and self._has_metrics:
            return on_microbatch(self._model.module)
        return nullcontext()

    @contextmanager
    def unchanged(self, stage: int) -> Iterator[None]:
        """Around a forward that runs again: what it changes has been counted the first time."""
        if stage != self._last:
            yield  # The step's own code does not run there.
            return
        state = Snapshot(self._model.module, self._model.layers()).take()
        try:
            yield
        finally:
            state.restore()

    def at_end(self) -> Any:
        """What ``forward`` of the last stage notes behind its last layer; None for no change."""
        return None if self.state.is_unchanged() else self.state.marks()

    def after(self, stage: int, microbatch: int, output: StageOutput) -> None:
        """Behind a forward: it has changed nothing."""
        if stage != self._last or self.once_behind:
            self.state.restore()
            return
        late = touched = False
        if not self.state.is_unchanged():
            late = output.marks != self.state.marks() or (not self._deep and self._keeps_values())
            touched = self.state.restore()
        mode: Mode = self._options.mode
        must = (touched and late) or any(call.metric is not None for call in output.logs)
        carried = mode in self.carried and _says_more(output, mode)
        self._must = self._must or must or touched
        self._deep = self._deep or must or carried or self._linear.get(mode) is False
        self._needed = self._must or self._deep
        if isinstance(output.ends, str):
            self._why_not = output.ends or "its last layer is not where its result is made"
            return
        self._bytes += sum(t.numel() * t.element_size() for t in output.ends)
        if self._deep or (self._tries and self._bytes <= _TRIAL_BYTES):
            self._ends[microbatch] = output.ends

    def _keeps_values(self) -> bool:
        """Whether a forward has left tensors, which are then to be those of all rows."""
        return any(
            tensors(self.state.value(ref))
            for ref in self.state.changed()
            if not self.state.is_buffer(ref)
        )

    def once(self) -> AbstractContextManager[None]:
        """Around the end of the step where there is one for the whole batch."""
        together = self.replicas.group is not None and self._options.mode in self.together
        return on_whole_batch(self._model.module, together=together)

    def ended(self, output: StageOutput) -> None:
        self._output = output

    def end(
        self, logs: list[LogEntry], loss: Tensor | None, *, behind: TorchState | None = None
    ) -> tuple[Whole, list[LogEntry]]:
        """Behind the last forward of a rank: runs the step for the whole batch, where it has to.

        ``behind`` is where torch's generators stand for that; None for where they are.
        Returns what came of it and the log calls of the pass, among them those of the whole batch.
        """
        plain = [entry for entry in logs if entry.call.metric is None]
        batch, microbatches, options = self._batch, self._microbatches, self._options
        self._batch = self._options = None
        self._microbatches = ()
        ends, self._ends = self._ends, {}
        mode: Mode = options.mode
        if self._output is not None:
            output = self._output
            plain += [LogEntry(call, 1.0, self._last + 1, 0) for call in output.logs]
            # A step that runs whole draws what stock Lightning draws.
            drawn = Generators.now() if self._model.uncut else None
            beyond = _beyond_loss(output, mode)
            return Whole(self.state.changed(), beyond, generators=drawn), plain
        way = options.dataloader_idx or 0, self._model.look
        if mode == "train" and self._compares and ends and way not in self._compared:
            self._compared.add(way)
            self.unlike = self._compare(batch, microbatches, options, ends, loss) or self.unlike
        self._gone.add((mode, options.dataloader_idx or 0))
        tries = self._tries and not self._needed and len(ends) == len(microbatches)
        logged = mode, options.dataloader_idx or 0, frozenset(entry.call.name for entry in plain)
        tries = tries and logged not in self._tried
        if tries:
            self._tried.add(logged)
        if not self._needed and not tries:
            return Whole(), plain
        if tries and not self._is_worth_a_trial(plain, loss, mode):
            self._linear[mode] = True
            return Whole(), plain
        missing = self._refusal(mode, len(ends), len(microbatches))
        if missing is not None:
            return Whole(refusal=missing if self._must else None), plain
        short = self._needed and not self._deep
        parts = [ends[index] for index in sorted(ends)]
        generators = Generators.now()
        if behind is not None:
            generators.with_torch(*behind).put_back()
        begun = Generators.now()
        try:
            together = self.replicas.group is not None and mode in self.together
            with on_whole_batch(self._model.module, together=together):
                output = self._model.whole(
                    parts,
                    [microbatch.share for microbatch in microbatches],
                    batch=batch,
                    batch_idx=options.batch_idx,
                    mode=mode,
                    seed=None,  # So that what it draws is seen.
                    dataloader_idx=options.dataloader_idx,
                    short=short,
                )
        except ModelError as error:
            generators.put_back()
            if self._must:
                return Whole(refusal=f"{self._left(mode)}, but {error}"), plain
            self._linear[mode] = True
            self.state.restore()
            return Whole(), plain
        drew = not begun.are_now()
        after = Generators.now() if drew else None
        generators.put_back()
        if short:
            return Whole(self.state.changed()), plain
        agrees = self._agrees(output, loss, mode)
        # What is drawn behind the last layer (dropout) is as good as another draw.
        if output.marks and self._must and not self._is_indifferent(output, plain, agrees, mode):
            return Whole(refusal=self._draws(mode)), plain
        trusted = agrees and not drew
        calls = [call for call in output.logs if trusted or call.metric is not None]
        if tries or mode not in self._linear:
            self._linear[mode] = not trusted or _means_are_right(calls, plain, self._last)
        if not self._needed and self._linear[mode]:
            self.state.restore()
            return Whole(), plain
        # The whole batch's word counts more than any stage's.
        plain += [LogEntry(call, 1.0, self._last + 1, 0) for call in calls]
        return Whole(self.state.changed(), _beyond_loss(output, mode), generators=after), plain

    def _compare(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: Any,
        ends: dict[int, tuple[Tensor, ...]],
        loss: Tensor | None,
    ) -> tuple[float, float] | None:
        """The mean of the microbatches' losses and the loss of all rows, where they differ.

        Only where it is known for sure how the rows of what the loss takes belong together.
        """
        if (
            loss is None
            or len(microbatches) < 2
            or len(ends) < len(microbatches)
            or self._model.draws.get("train")
        ):
            return None
        try:
            rows = count_rows(batch)
            sizes = share_sizes(rows, len(microbatches))
            pair = first_rows(batch, sizes[0] + sizes[1])
            same = first_rows(batch, sizes[0])
            if signature(same) != microbatches[0].signature:
                return None
            with kept_generators():
                self._model.compare_rows(
                    "train", pair, microbatches[1].data, (sizes[0], sizes[1]),
                    options.dataloader_idx, options.batch_idx,
                )  # fmt: skip
            with on_microbatch(self._model.module):
                output = self._model.whole(
                    [ends[index] for index in sorted(ends)],
                    [microbatch.share for microbatch in microbatches],
                    batch=batch,
                    batch_idx=options.batch_idx,
                    mode="train",
                    seed=options.seed,
                    dataloader_idx=options.dataloader_idx,
                )
        except (ModelError, DataError):
            return None
        finally:
            self.state.restore()
        agrees = self._agrees(output, loss, "train")
        return None if agrees or output.loss is None else (float(loss), float(output.loss))

    def _is_worth_a_trial(
        self, entries: Sequence[LogEntry], loss: Tensor | None, mode: Mode
    ) -> bool:
        """Not where all that the step logs is its loss."""
        values = [call.value for call in join_entries(entries, self._last)]
        if mode == "train" and loss is not None:
            mean = float(loss)
            values = [v for v in values if v is None or not _close(float(v), mean, torch.float32)]
        return bool(values)

    def _agrees(self, output: StageOutput, loss: Tensor | None, mode: Mode) -> bool:
        """Whether the loss of the batch is the mean that is trained."""
        if mode != "train" or loss is None or output.loss is None:
            return True
        return _close(float(output.loss), float(loss), output.loss.dtype)

    def _is_indifferent(
        self, output: StageOutput, entries: Sequence[LogEntry], agrees: bool, mode: Mode
    ) -> bool:
        """Whether a step's numbers are the same although it has drawn others for the batch."""
        if mode == "train":
            return agrees
        calls = [call for call in output.logs if call.metric is None]
        return bool(calls) and _means_are_right(calls, entries, self._last)

    def _draws(self, mode: Mode) -> str:
        return (
            f"{self._left(mode)}, and draws random numbers, which are others for the whole batch "
            "than for its microbatches: what it keeps would not be of the losses that it returns. "
            "Draw them in the data set or in on_after_batch_transfer, or log numbers "
            "(self.log('loss', loss)) instead of keeping them."
        )

    def _refusal(self, mode: Mode, kept: int, count: int) -> str | None:
        if self._needed and not self._deep:
            return None if self._copies == 1 else self._two_copies(mode)
        if self._copies > 1:
            return self._two_copies(mode)
        if self._why_not:
            return (
                f"{self._left(mode)}, which is to happen once for the batch, but what is behind "
                f"the last layer cannot be run by itself: {self._why_not}."
            )
        if kept < count:
            return (
                f"{self._left(mode)} for some microbatches of a batch and not for others: whether "
                "it does must not depend on the data. Do it for every batch, or in a hook."
            )
        return None

    def _two_copies(self, mode: Mode) -> str:
        return (
            f"{self._left(mode)}, but this schedule holds the last stage twice, and each copy sees "
            "half of the batch. Use a schedule that holds it once (zb_v, 1f1b)."
        )

    def _left(self, mode: Mode) -> str:
        return (
            f"{STEP_NAMES[mode]} of {type(self._model.module).__name__} changes the module or logs "
            "a metric object"
        )


def _beyond_loss(output: StageOutput, mode: Mode) -> Any:
    """What a step has returned, where its loss does not say it."""
    return output.result if _says_more(output, mode) else None


def _says_more(output: StageOutput, mode: Mode) -> bool:
    """Whether a step returns something that its loss does not say."""
    if mode == "train":
        return isinstance(output.result, dict) and len(output.result) > 1
    return output.result is not None


def _means_are_right(calls: Sequence[LogCall], entries: Sequence[LogEntry], last: int) -> bool:
    joined = {call.name: call.value for call in join_entries(entries, last)}
    for call in calls:
        mean = joined.get(call.name)
        if mean is None or call.value is None or call.metric is not None:
            return False
        dtype = call.value.dtype if isinstance(call.value, Tensor) else torch.get_default_dtype()
        if not _close(float(call.value), float(mean), dtype):
            return False
    return True


def _close(first: float, second: float, dtype: torch.dtype) -> bool:
    if first == second or (first != first and second != second):
        return True
    # A loss of 64 bits may come of layers of 32.
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 2e-2)
    return abs(first - second) <= tolerance * max(abs(first), abs(second), 1e-3)
