"""``FollowedSteps``: the path that each step of a cut module takes.

The first probe decides where stages begin and end. The step of another mode, of another kind of
batch, or another way through a step that has branches, is probed when it comes, and its layers run
on the stages that have them. Ways are told apart by runs without layers, before each batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import nn

from strategies.errors import ModelError
from strategies.models.nested import structure
from strategies.models.replay.inference import Outcome
from strategies.models.replay.layout import Layout, follow_layout, same_layout
from strategies.models.replay.path import Cut, ParameterTable, Path
from strategies.models.replay.probing import Probed, probe_path
from strategies.models.replay.rows.draws import BatchDraws
from strategies.models.replay.rows.dry_run import DryTrace
from strategies.models.replay.unit_search import has_branches, names_read
from strategies.models.stage_model import STEP_NAMES, Mode, NoLayersError, StageModel, Step
from strategies.models.state import Generators, seed_all

Where = tuple[int, int | None]  # indices of batch and loader, as the step is given them

# Layers by index, and the names of operations on their values, in order.
Trail = list[int | str]

# So many ways are told apart by what is done besides layers; more differ from batch to batch. And
# so many by how often, and to what: a loop over what is in a batch goes round as often as it must.
_MOST_WAYS = 32
_MOST_ALIKE = 8


class _Way(NamedTuple):
    """What one way through a step comes to; None where the probe has not noted it."""

    trail: Trail  # up to the last layer
    others: frozenset[str] | None = None  # what else is done
    # Of all layers and operations, and of what is returned: by which of them its values were made.
    wiring: list[tuple[int, ...]] | None = None


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
        self._decides: dict[Mode, bool] = {}  # whether a step has branches
        # Of the first batches of those that have, and of all ways of training, by number.
        self._trails: dict[Step, tuple[Trail, frozenset[str]]] = {}
        self._ways: dict[Step, list[_Way]] = {}
        self._read: frozenset[str] | None = None  # names in the code of the training step
        self._switches: frozenset[tuple[str, Any]] | None = None
        self._first_switches: frozenset[tuple[str, Any]] | None = None
        self._frozen_anew: set[Step] = set()  # whose gradients are no longer those of the probe
        inside = {id(c) for unit in probed.units.values() for c in unit.modules() if c is not unit}
        # Whose hooks a step comes to, besides those inside of layers.
        self._around = [child for child in module.modules() if id(child) not in inside]
        self._hooks = self._hooks_now()
        self._num_hook_changes = 0

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
        try:
            self.follow(which, batch, batch_idx, dataloader_idx)
        except ModelError as error:
            return error
        if not self._paths[which].calls:  # Another batch may come to layers.
            del self._layouts[which], self._paths[which], self._caches[which]
            return NoLayersError(f"{STEP_NAMES[mode]} calls no layer for this batch.")
        return self._straying(which, batch, (batch_idx, dataloader_idx))

    def decides(self, mode: Mode) -> bool:
        if mode not in self._decides:
            self._decides[mode] = has_branches(self._module, STEP_NAMES[mode], self._units)
        return self._decides[mode]

    def _straying(self, which: Step, batch: Any, where: Where) -> ModelError | None:
        """Why a batch cannot go the way of the first one: it comes to other layers, or to none."""
        if not self.decides(which[0]):
            return None
        try:
            run = self.dry_run(which, batch, where)
        except ModelError as error:
            return error
        trail, others = _way_of(run)
        step = STEP_NAMES[which[0]]
        if not trail:
            return NoLayersError(f"{step} calls no layer for this batch.")
        first, usual = self._trails.setdefault(which, (trail, others))
        if trail == first and others <= usual:
            return None
        what = "runs other layers" if trail != first else "does something else"
        return ModelError(
            f"{step} {what} for some batches than for the first. Do the same for every batch, or "
            "use pp=1."
        )

    def switched(self) -> bool:
        if self._read is None:
            self._read = names_read(self._module, STEP_NAMES["train"], self._units)
        now = frozenset(
            (name, value)
            for name, value in vars(self._module).items()
            if type(value) in (bool, int, float) and value in (0, 1) and name in self._read
        )
        if self._first_switches is None:
            self._first_switches = now
        self._switches = now
        return now != self._first_switches

    @property
    def look(self) -> Hashable:
        return self._switches, self._num_hook_changes

    def drew(self, step: Step, batch: Any, batch_idx: int) -> tuple[bool, bool]:
        return self._path(step, batch, batch_idx, step[1] or None).drew

    def draw_from(self, draws: BatchDraws | None) -> None:
        self._draws = draws

    def reads(self, step: Step, batch: Any, batch_idx: int, change: Callable[[], None]) -> bool:
        where = (batch_idx, step[1] or None)
        begins = [o.cuts[-1][0].position for key, o in self._layouts.items() if key[0] == step[0]]
        try:
            seed_all(1)
            first = self.dry_run(step, batch, where, notes=True)
            change()
            seed_all(1)
            second = self.dry_run(step, batch, where, notes=True)
        except ModelError:
            return True  # Nobody knows that it does not.
        return not begins or first.differs(second, up_to=max(begins))

    def way(self, batch: Any, batch_idx: int, again: Callable[[Generators], Any]) -> int | None:
        """Which way the training step goes: the same layers, operations between them, and others.

        The first one is the probe's. Another one (a loss that joins in later, a layer that is left
        out for a while, rows that are mixed from some epoch on) is probed and looked at like the
        step of another kind of batch.
        """
        which: Step = ("train", 0, structure(batch))
        before = Generators.now()
        frozen_anew = which in self._frozen_anew
        self._frozen_anew.discard(which)  # That way is probed again when it is gone.
        path = self._path(which, batch, batch_idx, None)
        run = self.dry_run(which, batch, (batch_idx, None))
        other = again(before)
        if other is not None:
            run = self.dry_run(which, other, (batch_idx, None))
        if frozen_anew:
            self._frozen_anew.add(which)
        trail, others = _way_of(run)
        now = _Way(trail, others, run.wiring)
        known = self._ways.setdefault(which, [_Way(_trail_of(path))])
        same = [number for number, way in enumerate(known) if way.trail == trail]
        for number in same:
            noted = known[number]
            if noted.others is None or (noted.wiring is None and noted.others == now.others):
                known[number] = now
        if now in known:
            return known.index(now)
        if not run.returned:  # It looks at a layer's value, and what follows is not known.
            began = [
                n for n, way in enumerate(known) if way.trail[: len(trail)] == trail != way.trail
            ]
            if began or run.failed is not None:
                return began[0] if began else 0
        if not trail:
            return None
        alike = [number for number in same if known[number].others == now.others]
        if len(alike) >= _MOST_ALIKE:
            return alike[0]
        if same and len(known) >= _MOST_WAYS:
            return same[0]
        known.append(now)
        return len(known) - 1

    def changes_batch(self, mode: Mode) -> bool:
        return any(path.clones_batch for step, path in self._paths.items() if step[0] == mode)

    def follow_way(self, way: int, batch: Any, batch_idx: int) -> None:
        self._path(("train", way, structure(batch)), batch, batch_idx, None)

    def follow_hooks(self) -> None:
        now = self._hooks_now()
        if now != self._hooks:
            self._hooks = now
            self._num_hook_changes += 1
            self._frozen_anew |= set(self._layouts)

    def _hooks_now(self) -> list[tuple[int, ...]]:
        tables = [table for child in self._around for table in _hooks_of(child)]
        return [tuple(table) for table in (*tables, *_hooks_of(torch.nn.modules.module))]

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
            )

    def _between_layers(self) -> AbstractContextManager[None]:
        """Around a step: what layers leave cut over ranks runs inside."""
        return nullcontext()

    @abstractmethod
    def dry_run(self, which: Step, batch: Any, where: Where, *, notes: bool = False) -> DryTrace:
        """Runs a step without its layers.

        With ``notes`` on what these are given; without them, what it changes is the caller's care.
        """


def _hooks_of(owner: Any) -> Iterator[Any]:
    """The tables of a module's hooks, or of those for all modules, by their numbers."""
    for name, value in vars(owner).items():
        if name.endswith(("forward_hooks", "forward_pre_hooks", "backward_hooks")):
            yield value


def _way_of(run: DryTrace) -> tuple[Trail, frozenset[str]]:
    """What a run has come to up to its last layer, in order, and the names of what else it did."""
    last = max((i for i, word in enumerate(run.trail) if isinstance(word, int)), default=-1)
    behind = (str(word) for word in run.trail[last + 1 :])
    return run.trail[: last + 1], frozenset({*run.others, *behind})


def _trail_of(path: Path) -> Trail:
    trail: Trail = []
    for events, call in zip(path.events, path.calls, strict=False):
        trail += [*(event.name for event in events), call.unit]
    return trail


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
