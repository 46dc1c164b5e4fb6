"""Where random generators stand when a step of the user's begins, the same on a pipeline's ranks.

A step draws from the generators as the user's program has left them: what stock Lightning draws for
that batch. The numbers behind it (the order of the next epoch's data) are stock Lightning's, too:
the last stage's rank says where its generators stand behind the step. A run with a seed of its own
draws from that, step by step, which a resumed run repeats; and so does one whose ranks stand at
different numbers, since one of them alone has drawn some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec

from strategies.models.collectives import default_group
from strategies.models.nested import leaves, rebuild, structure
from strategies.models.replay.hole import Hole
from strategies.models.replay.rows.draws import BatchDraws
from strategies.models.replay.rows.row_scout import FewRowsError
from strategies.models.snapshot import Snapshot, StateRef
from strategies.models.stage_model import StageModel, Step
from strategies.models.state import (
    Generators,
    TorchState,
    decoded,
    encoded,
    kept_generators,
    seed_all,
    seed_torch,
    torch_state,
)
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.microbatch import Microbatch, count_rows, pick_rows, share_sizes
from strategies.runtime.step.stage_compute import PassOptions
from strategies.runtime.step.whole_batch import WholeBatch


class StepNumbers:
    """Sets what each pass draws from.

    Args:
        model: Whose steps these are.
        coordinates: Of this rank.
        group: All ranks of its replica, for numbers in host memory; None for a single one.
        replicas: What a step sees as all processes.
        seeded: Whether each step draws from the run's seed, whatever the generators say.
    """

    def __init__(
        self,
        model: StageModel,
        coordinates: Coordinates,
        *,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        seeded: bool,
    ) -> None:
        self._model: StageModel | None = model
        self._where = coordinates
        self._group = group
        self._replicas = replicas
        self._seeded = seeded
        self._looked: set[Any] = set()
        self._draws: BatchDraws | None = None
        self._before: Generators | None = None
        self._goes_on = False  # what draws after the pass does so behind the step
        self._host = False  # the step draws by Python or numpy
        # Where torch's generators stand for what draws behind the last layer, for the whole batch.
        self.behind: TorchState | None = None

    def run_whole(self) -> None:
        """From now on steps draw for themselves."""
        self._model = None

    @property
    def steers(self) -> bool:
        """Whether what a step draws counts for all that draws after it."""
        return not self._seeded

    def stand(self, seed: int) -> None:
        """Puts the generators where a step with this seed draws from."""
        if self._seeded:
            seed_all(seed - self._where.dp_rank)

    def look(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
        *,
        whole: WholeBatch,
        seed: int,
        then: Callable[[Step, Any, Sequence[Any], Sequence[int]], None],
        way: int | None = None,
    ) -> None:
        """Before the first batch of a kind, calls ``then`` with it, two parts of it and their rows.

        A step may have several ``way``s. ``whole`` knows the module's state, which stays as it is.
        """
        model, count = self._model, len(microbatches)
        if model is None or model.look is None or count == 1 or loaders is not None:
            return  # Or several loaders, each of whose batches has rows of its own.
        step = _step(microbatches, options, way)
        if (step, model.look) in self._looked:
            return
        self._looked.add((step, model.look))
        rows = count_rows(batch)
        first = rows - share_sizes(rows, count)[-1]
        before = Generators.now()
        self.stand(seed)
        whole.note()
        try:
            with default_group(self._replicas):
                parts = [pick_rows(batch, range(first)), pick_rows(batch, range(first, rows))]
                then(step, batch, parts, [first, rows - first])
        except FewRowsError as error:
            if not (error.behind and whole.once_behind):
                raise
        finally:
            before.put_back()
            whole.state.restore()

    def begin(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
        seed: int,
        drew: tuple[bool, bool] | None,
    ) -> None:
        """Sets what the passes of a batch draw from; collective over the replica.

        ``drew``: whether the step draws, and whether by Python or numpy; None for as before.
        """
        self._draws = None
        self.behind = torch_state()  # From here on microbatches draw, each for itself.
        if self._seeded:
            with kept_generators():
                seed_torch(seed)
                self.behind = torch_state()
        model = self._model
        if model is None:
            return
        model.draw_from(None)
        if drew is None:
            with default_group(self._replicas):
                step = _step(microbatches, options, None)
                drew = model.drew(step, microbatches[0].data, options.batch_idx)
        if not drew[0] or loaders is not None:
            return
        host = drew[1]
        before = base = Generators.now()
        self._host = host
        self._goes_on = not self._seeded and self._agree(before, [True, host, host])
        if not self._goes_on:
            seed_all(seed - self._where.dp_rank)  # All replicas draw for the rows of all.
            base = Generators.now()
            before.put_back()
        self.behind = base.cpu, base.cuda
        self._before = before
        self._draws = BatchDraws(
            model.module,
            base,
            share_sizes(count_rows(batch), len(microbatches)),
            replicas=self._where.dp,
            replica=self._where.dp_rank,
        )
        model.draw_from(self._draws)

    @property
    def draws(self) -> bool:
        """Whether steps draw the batch's numbers."""
        return self._draws is not None

    def leave(self) -> None:
        """Behind the runs of a batch, whose microbatches have drawn by Python and numpy."""
        if self._draws is not None and self._before is not None:
            self._before.put_back(host_only=True)

    def end(self) -> None:
        """Behind a batch whose steps have run to their end on this rank."""
        self.take(self.drawn())

    def drawn(self) -> Any:
        """Where generators stand behind the step, JSON-ready; None if this rank does not know."""
        if self._draws is None or self._draws.after is None:
            return None
        after, own = self._draws.after
        written = after.written(host=self._host) if self._goes_on else None
        return [written, [encoded(state) for state in own]] if written or own else None

    def take(self, drawn: Any) -> None:
        """Puts the generators where a rank has ``drawn`` to; back where they were if none has."""
        draws, self._draws = self._draws, None
        written, own = drawn or (None, ())
        if written is not None:
            Generators.read(written).put_back()
        elif draws is not None and self._before is not None:
            self._before.put_back()
        for (generator, begun), state in zip_longest(() if draws is None else draws.own, own):
            generator.set_state(begun if state is None else decoded(state))

    def reads(
        self,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        *,
        state: Snapshot,
        ref: StateRef,
    ) -> bool:
        """Whether a step reads a place of its module before its last stage.

        ``state`` is one of its own, which watches nothing else.
        """
        model = self._model
        if model is None or options.part:
            return True
        value = state.value(ref)
        other = _changed(value)
        if other is value:
            return True
        before = Generators.now()
        state.take()
        try:
            with default_group(self._replicas):
                return model.reads(
                    _step(microbatches, options, None),
                    microbatches[0].data,
                    options.batch_idx,
                    lambda: state.put(ref, other),
                )
        finally:
            state.put(ref, value)
            state.restore()
            before.put_back()

    def _agree(self, states: Generators, used: Sequence[bool]) -> bool:
        """Whether all ranks of the pipeline would draw the same by torch, Python and numpy.

        Of these, those that any rank has ``used`` count.
        """
        if self._group is None:
            return True
        marks = torch.tensor(states.marks())
        ends = torch.stack([marks, -marks, torch.tensor(used, dtype=torch.int64)])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._group)
        most, least, drawn = ends
        return bool(((most == -least) | (drawn == 0)).all())


def _step(microbatches: Sequence[Microbatch], options: PassOptions, way: int | None) -> Step:
    number = (options.dataloader_idx or 0) if way is None else way
    return options.mode, number, structure(microbatches[0].data)


def _changed(value: Any) -> Any:
    """Another value of the same kind; the same object where nobody knows one."""
    if isinstance(value, deque):
        return deque([_changed(item) for item in value], value.maxlen)
    if all(_other(leaf) is leaf for leaf in leaves(value)):
        return value
    return rebuild(value, _other)


def _other(leaf: Any) -> Any:
    if isinstance(leaf, Hole):
        return leaf
    if isinstance(leaf, Tensor):
        return leaf if leaf.dtype == torch.bool or not leaf.numel() else leaf + 1
    return leaf + 1 if isinstance(leaf, int | float) and not isinstance(leaf, bool) else leaf
