"""``FollowedSteps``: the path that each step of a cut module takes.

The first probe decides where stages begin and end. The step of another mode, of another kind of
batch, or another way through a step that has branches, is probed when it comes, and its layers run
on the stages that have them. The recording of a batch's first microbatch tells its way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import nn

from strategies.errors import ModelError
from strategies.models.nested import structure
from strategies.models.recording.recording import Recording
from strategies.models.recording.step_recorder import Recorder
from strategies.models.replay.inference import Outcome
from strategies.models.replay.layout import Layout, follow_layout, same_layout
from strategies.models.replay.path import Cut, ParameterTable, Path
from strategies.models.replay.probing import Probed, probe_path
from strategies.models.replay.rows.draws import BatchDraws
from strategies.models.stage_model import STEP_NAMES, Mode, NoLayersError, StageModel, Step
from strategies.models.state import Generators, own_generators, seed_all

Where = tuple[int, int | None]  # indices of batch and loader, as the step is given them

# So many ways are told apart by what is done besides layers; more differ from batch to batch. And
# so many by how often, and to what: a loop over what is in a batch goes round as often as it must.
_MOST_WAYS = 32
_MOST_ALIKE = 8


class _Way(NamedTuple):
    """One way through a step, by a recording that does not end behind its last layer."""

    marks: tuple[tuple[Any, ...], ...]  # layers, and operations up to the last one
    others: frozenset[str]  # what else is done
    behind: Hashable  # the last layer; what is logged; and what is returned

    @classmethod
    def of(cls, run: Recorder) -> _Way:
        entries = [entry for entry in run.entries if entry.numbers or entry.unit is not None]
        marks = [entry.mark for entry in entries]
        last = max((n + 1 for n, mark in enumerate(marks) if isinstance(mark[0], int)), default=0)
        logs = [entry.mark for entry in run.entries if entry.log is not None]
        others = frozenset({*run.others, *(str(name) for name, *_ in marks[last:])})
        return cls(tuple(marks[:last]), others, (tuple(marks[last:]), tuple(logs), run.returns))

    def begins_with(self, other: _Way) -> bool:
        return self.trail[: len(other.trail)] == other.trail

    @property
    def trail(self) -> tuple[Any, ...]:
        return tuple(mark[0] for mark in self.marks)


class Followed(NamedTuple):
    """The recording of a batch's first microbatch.

    Attributes:
        way: Which way through the step it goes, by number; None if it comes to no layer.
        recording: For the stages; None if the step ended by an error of its own.
        drew: Whether the step has drawn numbers, and whether by Python or numpy.
    """

    way: int | None
    recording: Recording | None
    drew: tuple[bool, bool]


class FollowedSteps(StageModel):
    """Knows, by mode, loader or way, and structure of the batch, which layers a step calls."""

    def __init__(self, module: LightningModule, first: Step, probed: Probed) -> None:
        self._module = module
        self._units: dict[str, nn.Module] = probed.units
        self._table: ParameterTable = probed.table
        self._first = first
        self._paths: dict[Step, Path] = {first: probed.path}
        self._caches: dict[Step, dict[Hashable, Outcome]] = {first: probed.cache}
        self._layouts: dict[Step, Layout] = {}
        self._owned: frozenset[int] = frozenset()
        self._draws: BatchDraws | None = None
        # Of the first batch of each step of evaluation, and of all ways of training, by number.
        self._evaluated: dict[Step, _Way] = {}
        # The probe's is None until a batch goes it.
        self._ways: dict[Step, list[_Way | None]] = {}
        self._refused: dict[Step, ModelError] = {}  # steps of evaluation that cannot be cut
        self._looks = False  # whether a look at a layer's value has ended the last recording
        self._frozen_anew: set[Step] = set()  # whose gradients are no longer those of the probe

    def follow(self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None) -> None:
        """Finds the path of a step, and what each stage has of it.

        Raises:
            ModelError: It cannot be cut, or its layers do not run in the order of the stages.
        """
        self._path(which, batch, batch_idx, dataloader_idx)

    def refusal(
        self, mode: Mode, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> ModelError | None:
        which: Step = (mode, dataloader_idx or 0, structure(batch))
        if which in self._refused:
            return self._refused[which]
        try:
            self.follow(which, batch, batch_idx, dataloader_idx)
        except ModelError as error:
            self._refused[which] = error
            return error
        if not self._paths[which].calls:  # Another batch may come to layers.
            del self._layouts[which], self._paths[which], self._caches[which]
            return NoLayersError(f"{STEP_NAMES[mode]} calls no layer for this batch.")
        return self._straying(which, batch, (batch_idx, dataloader_idx))

    def _straying(self, which: Step, batch: Any, where: Where) -> ModelError | None:
        """Why a batch cannot go the way of the first one: it comes to other layers, or to none."""
        try:
            run = self.record_freely(which, batch, where)
        except ModelError as error:
            return error
        way = _Way.of(run)
        step = STEP_NAMES[which[0]]
        if not way.trail:
            return NoLayersError(f"{step} calls no layer for this batch.")
        first = self._evaluated.setdefault(which, way)
        if way.trail == first.trail and way.others <= first.others:
            return None
        what = "runs other layers" if way.trail != first.trail else "does something else"
        return ModelError(
            f"{step} {what} for some batches than for the first. Do the same for every batch, or "
            "use pp=1."
        )

    @property
    def look(self) -> Hashable:
        return frozenset(
            (name, value)
            for name, value in vars(self._module).items()
            if type(value) in (bool, int, float) and value in (0, 1)
        )

    def drew(self, step: Step, batch: Any, batch_idx: int) -> tuple[bool, bool]:
        return self._path(step, batch, batch_idx, step[1] or None).drew

    def draw_from(self, draws: BatchDraws | None) -> None:
        self._draws = draws

    def reads(self, step: Step, batch: Any, batch_idx: int, change: Callable[[], None]) -> bool:
        where = (batch_idx, step[1] or None)
        begins = [o.cuts[-1][0].position for key, o in self._layouts.items() if key[0] == step[0]]
        try:
            seed_all(1)
            first = self.record_freely(step, batch, where, copies=True)
            change()
            seed_all(1)
            second = self.record_freely(step, batch, where, copies=True)
        except ModelError:
            return True  # Nobody knows that it does not.
        failed = first.failed or second.failed
        return failed or not begins or first.differs(second, up_to=max(begins))

    def first_recording(self, batch: Any, batch_idx: int) -> Followed:
        """Records the first microbatch of a training batch, and finds which way the step goes.

        The first one is the probe's. Another one (a loss that joins in later, a layer that is left
        out for a while, rows that are mixed from some epoch on) is probed and looked at like the
        step of another kind of batch.
        """
        which: Step = ("train", 0, structure(batch))
        frozen_anew = which in self._frozen_anew
        self._frozen_anew.discard(which)  # That way is probed again when it is gone.
        self._path(which, batch, batch_idx, None)
        begun, own = Generators.now(), own_generators(self._module)
        run = self.record_freely(which, batch, (batch_idx, None), microbatch=0)
        drawn = any(not generator.get_state().equal(state) for generator, state in own)
        drew = (drawn or not begun.are_now(), not begun.are_now(host_only=True))
        begun.put_back()
        for generator, state in own:
            generator.set_state(state)
        if frozen_anew:
            self._frozen_anew.add(which)
        self._looks = not run.returned
        return Followed(self._way_of(which, run), None if run.failed else run.recording(), drew)

    def _way_of(self, which: Step, run: Recorder) -> int | None:
        now = _Way.of(run)
        known = self._ways.setdefault(which, [None])
        if known[0] is None and now.trail == _trail_of(self._paths[which]):
            known[0] = now
        if now in known:
            return known.index(now)
        if run.failed:  # It may need more rows than these behind its last layer, or ends for good.
            return next((n for n, way in enumerate(known) if way and way.begins_with(now)), 0)
        if not now.trail:
            return None
        ways = [(number, way) for number, way in enumerate(known) if way is not None]
        same = [number for number, way in ways if way.trail == now.trail]
        alike = [n for n, way in ways if n in same and way.others == now.others]
        if len(alike) >= _MOST_ALIKE:
            return alike[0]
        if same and len(known) >= _MOST_WAYS:
            return same[0]
        known.append(now)
        return len(known) - 1

    def may_log(self, mode: Mode) -> bool:
        return mode != "train" or self._looks

    def changes_batch(self, mode: Mode) -> bool:
        return any(path.clones_batch for step, path in self._paths.items() if step[0] == mode)

    def follow_way(self, way: int, batch: Any, batch_idx: int) -> None:
        self._path(("train", way, structure(batch)), batch, batch_idx, None)

    def follow_freezing(self) -> None:
        self._frozen_anew |= {step for step in self._layouts if step[0] == "train"}

    def _path(self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Path:
        """The path of a step; probed when the step runs for the first time."""
        if which in self._frozen_anew:
            self._probe_again(which, batch, batch_idx, dataloader_idx)
        if which in self._layouts:
            return self._paths[which]
        mode = which[0]
        path, cache = self._paths.get(which), self._caches.get(which, {})
        if path is None:
            path = self._probed(mode, batch, batch_idx, cache, dataloader_idx)
        layout = self._layouts[self._first]
        if which != self._first and (len(layout.cuts) == 1 or len(self._owned) < len(layout.cuts)):
            refuse_left(path, STEP_NAMES[mode])
        self._layouts[which] = follow_layout(path, layout, STEP_NAMES[mode])
        self._paths[which], self._caches[which] = path, cache
        return path

    def _probe_again(
        self, which: Step, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> None:
        """Finds anew which tensors between the stages, cut as they are, need a gradient."""
        cache: dict[Hashable, Outcome] = {}
        path = self._probed(which[0], batch, batch_idx, cache, dataloader_idx)
        self._layouts[which] = same_layout(path, self._layouts[which], STEP_NAMES[which[0]])
        self._paths[which], self._caches[which] = path, cache
        self._frozen_anew.discard(which)

    def _probed(
        self,
        mode: Mode,
        batch: Any,
        batch_idx: int,
        cache: dict[Hashable, Outcome],
        dataloader_idx: int | None,
    ) -> Path:
        # What is drawn may decide: a way of training is probed with what has led to it.
        draws = partial(self._draws.run, 0) if self._draws and mode == "train" else None
        with self._between_layers():
            return probe_path(
                self._module,
                self._units,
                self._table,
                mode,
                batch,
                batch_idx,
                cache,
                dataloader_idx=dataloader_idx,
                draws=draws,
            )

    def _between_layers(self) -> AbstractContextManager[None]:
        """Around a step: what layers leave cut over ranks runs inside."""
        return nullcontext()

    @abstractmethod
    def record_freely(
        self,
        which: Step,
        batch: Any,
        where: Where,
        *,
        microbatch: int | None = None,
        copies: bool = False,
    ) -> Recorder:
        """Records a step wherever it goes, up to its return or to a look at a layer's value.

        What it changes in the module is the caller's care. A ``microbatch`` draws what that draws;
        with ``copies`` what the batch alone decides is kept as it is now.
        """


def _trail_of(path: Path) -> tuple[Any, ...]:
    trail: list[int | str] = []
    for events, call in zip(path.events, path.calls, strict=False):
        trail += [*(event.name for event in events), call.unit]
    return tuple(trail)


def refuse_left(path: Path, step: str) -> None:
    """Refuses attributes that hooks may read on all ranks, and that the last stage lacks.

    What a step leaves is made once for the batch, from what crosses the cut behind its last layer.
    """
    end = path.cuts[-1]
    there = {boundary.key for boundary in end.tensors} if isinstance(end, Cut) else set()
    for name, key in path.left:
        if key not in there:
            raise ModelError(
                f"{step} leaves in self.{name} a value from before its last layer, of another "
                "stage, and hooks may read that on all ranks. Keep what the last layer gives, "
                "append what others give to a list, or log it. What goes on from batch to batch "
                "through layers (the hidden state of an LSTM) needs pp=1."
            )
