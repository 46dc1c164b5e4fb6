"""What a step makes for all rows of a batch at once, before its microbatches run: noise, mixtures.

Every rank computes these values by itself (``rows/whole_values.py``), from the generators
as the user's program has left them: so a step draws what stock Lightning draws for that batch, and
the numbers behind it (the order of the next epoch's data) are stock Lightning's, too. A run with a
seed of its own draws from that, step by step, which a resumed run repeats; and so does one whose
ranks stand at different numbers, since one of them alone has drawn some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec

from strategies.errors import PipelineError
from strategies.models.collectives import default_group
from strategies.models.nested import leaves, rebuild, structure
from strategies.models.replay.hole import Hole
from strategies.models.replay.path import Position
from strategies.models.replay.rows.value_plan import Share
from strategies.models.replay.rows.value_run import seed_all
from strategies.models.replay.rows.whole_values import Dealer, FewRowsError, Step
from strategies.models.snapshot import Snapshot, StateRef
from strategies.models.state import Generators, TorchState, kept_generators, seed_torch, torch_state
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.microbatch import Microbatch, count_rows, pick_rows, share_sizes
from strategies.runtime.step.stage_compute import PassOptions
from strategies.runtime.step.whole_batch import WholeBatch

_ORDER = 20  # seed of the order in which rows are looked at: not the one in which they are given


class WholeDraws:
    """Deals a batch's values before each pass.

    Args:
        dealer: The model's; None where it has none.
        coordinates: Of this rank.
        group: All ranks of its replica, for numbers in host memory; None for a single one.
        replicas: What a step sees as all processes.
        seeded: Whether each step draws from the run's seed, whatever the generators say.
    """

    def __init__(
        self,
        dealer: Dealer | None,
        coordinates: Coordinates,
        *,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        seeded: bool,
    ) -> None:
        self._dealer = dealer
        self._where = coordinates
        self._group = group
        self._replicas = replicas
        self._seeded = seeded
        # Whether all ranks stand at the same numbers, where the step's way has asked for it.
        self._alike: bool | None = None
        # Where torch's generators stand for what the step draws behind that, for the whole batch.
        self.behind: TorchState | None = None

    def run_whole(self) -> None:
        """From now on steps draw for themselves."""
        self._dealer = None

    @property
    def steers(self) -> bool:
        """Whether what a step draws counts for all that draws after it."""
        return not self._seeded

    def stand(self, seed: int) -> None:
        """Puts the generators where a step with this seed draws from."""
        if self._seeded or self._alike is False:
            seed_all(seed - self._where.dp_rank)

    def stands_elsewhere(self, before: Generators, seed: int) -> bool:
        """Whether ranks had different numbers ``before`` this step drew some; collective then.

        Up to its first draw the step is the same on all ranks, so all have drawn or none. Behind
        it, those of ``seed`` count on all.
        """
        if self._seeded or before.are_now():
            return False
        began = zip(before.marks(), Generators.now().marks(), strict=True)
        self._alike = self._agree(before, [mark != now for mark, now in began])
        self.stand(seed)
        return not self._alike

    def look(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
        *,
        whole: WholeBatch,
        seed: int,
        way: int | None = None,
        then: Callable[[Step, Any, Sequence[Any], Sequence[int]], None] | None = None,
    ) -> None:
        """Finds out what there is to deal, before the first batch of a kind.

        A step may have several ``way``s; ``then`` is called with two parts of the batch that was
        looked at, and their rows. ``whole`` knows the module's state, which stays as it is.

        Raises:
            ModelError: The step mixes rows in a way that cannot be followed.
        """
        dealer, step = self._dealer, _step(microbatches, options, way)
        if dealer is None or dealer.plan(step) is not None:
            return
        rows = 0 if loaders is not None else count_rows(batch)
        if rows < 2:
            return  # Or several loaders, each of whose batches has rows of its own.
        count = len(microbatches)
        part = share_sizes(rows, count)[-1] if count > 1 else rows // 2
        generator = torch.Generator().manual_seed(_ORDER)
        order = torch.randperm(rows, generator=generator).tolist()

        def look(order: list[int]) -> None:
            standing.put_back()
            every = pick_rows(batch, order)
            own = pick_rows(batch, order[rows - part :])
            where = (options.batch_idx, options.dataloader_idx)
            turned = pick_rows(batch, [order[row // 2] for row in range(rows)])
            front = pick_rows(batch, order[:part])
            dp, replica = self._where.dp, self._where.dp_rank
            dealer.look(
                step, every, own, turned, front,
                rows=rows, first=rows - part, where=where, once=whole.once_behind, alone=count == 1,
                wide=None if dp == 1 else (self.of_replicas(every), dp, replica),
            )  # fmt: skip
            if then is not None and count > 1:
                others = pick_rows(batch, order[: rows - part])
                standing.put_back()
                then(step, every, [others, own], [rows - part, part])

        before = Generators.now()
        self.stand(seed)
        standing = Generators.now()
        whole.note()
        try:
            with default_group(self._replicas):
                try:
                    look(order)
                except PipelineError:
                    raise
                except Exception:
                    try:
                        look(sorted(order))  # It may want its rows sorted (by length).
                    except FewRowsError as error:
                        raise error.refusal from error
        finally:
            before.put_back()
            whole.state.restore()

    def deal(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        loaders: TreeSpec | None,
        *,
        seed: int,
        state: Snapshot,
        way: int | None = None,
    ) -> Generators | None:
        """Computes what the pass is going to use; collective over the replica.

        Returns where the generators stand behind the step; None where it draws nothing.
        """
        dealer = self._dealer
        known, self._alike = self._alike, None
        self.behind = torch_state()  # From here on microbatches draw, each for itself.
        if self._seeded:
            with kept_generators():
                seed_torch(seed)
                self.behind = torch_state()
        if dealer is None:
            return None
        dealer.clear()
        step = _step(microbatches, options, way)
        where = (options.batch_idx, options.dataloader_idx)
        plan = dealer.plan(step)
        if plan is None or plan.is_empty or loaders is not None:
            return None
        rows = count_rows(batch)
        before = Generators.now()
        alike = not plan.draws or (not self._seeded and known is not False)
        if alike and plan.draws and known is None:
            alike = self._agree(before, [True, plan.host, plan.host])
        replicas = self._where.dp if plan.draws else 1
        whole = self.of_replicas(batch) if plan.draws else batch
        shares = []
        start = 0
        for size in share_sizes(rows, len(microbatches)):
            shares.append(Share(start, size, rows, replicas, self._where.dp_rank))
            start += size
        shares.append(Share(0, rows, rows, replicas, self._where.dp_rank))
        try:
            if not alike:
                seed_all(seed - self._where.dp_rank)  # All replicas draw for the rows of all.
            with default_group(self._replicas):
                dealer.deal(step, whole, shares, where=where)
            after = Generators.now()
            self.behind = (after.cpu, after.cuda) if plan.draws else self.behind
        finally:
            before.put_back()
            state.restore()
        return after if alike and plan.draws else None

    def of_replicas(self, batch: Any) -> Any:
        """As many rows as all replicas have: they draw for these, and each takes its own."""
        replicas = self._where.dp
        if replicas == 1:
            return batch
        return pick_rows(batch, [row for row in range(count_rows(batch)) for _ in range(replicas)])

    def signed(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """With what shapes between stages depend on besides the batch's."""
        longest = () if self._dealer is None else self._dealer.longest
        if not longest:
            return microbatches
        mark = (longest, torch.int64)
        return [replace(m, signature=(*m.signature, mark)) for m in microbatches]

    def reads(
        self,
        batch: Any,
        microbatches: Sequence[Microbatch],
        options: PassOptions,
        *,
        state: Snapshot,
        ref: StateRef,
        place: Position | None,
    ) -> bool:
        """Whether a step reads a place of its module before it comes to ``place``.

        ``state`` is one of its own, which watches nothing else.
        """
        dealer = self._dealer
        if dealer is None or place is None or options.part:
            return True
        value = state.value(ref)
        other = _changed(value)
        if other is value:
            return True
        before = Generators.now()
        state.take()
        try:
            with default_group(self._replicas):
                return dealer.read_before(
                    _step(microbatches, options, None),
                    microbatches[0].data,
                    where=(options.batch_idx, options.dataloader_idx),
                    place=place,
                    change=lambda: state.put(ref, other),
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
