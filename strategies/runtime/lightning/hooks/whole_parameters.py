"""The whole model on every rank while a hook looks at it: brought there, and parted behind it.

At the first touch all ranks tell each other what they have come to and what they want (weights,
gradients); each brings what it owns, of shares the whole. Behind the hook each keeps its own part
of what was changed. Of a module that declares units a rank has its own stages' parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Size, Tensor

from strategies.errors import ModelError
from strategies.models.replay.hole import Hole
from strategies.raised import is_late
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.hooks.shown_groups import Groups
from strategies.runtime.lightning.hooks.whole_shares import WholeShares
from strategies.runtime.lightning.refusals import refuse_post_hooks
from strategies.runtime.messages.control import Bulletin

_PATIENCE_S = 300.0
WEIGHTS, GRADIENTS, END = "weights", "gradients", "end"


class WholeParameters:
    """Brings the whole model to this rank while a hook looks at it.

    Args:
        reduced: Whether gradients behind this pass are those of all replicas.
        changed: Called when a hook has ended that had the whole model.
        settle: Called on all ranks before weights or gradients are brought; what is under way may
            end there. Whether anything was.
    """

    def __init__(
        self,
        engine: Engine,
        module: pl.LightningModule,
        *,
        reduced: Callable[[], bool],
        changed: Callable[[], None],
        settle: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._module = module
        self._table = engine.model.table
        self._shares = WholeShares(engine)
        self._reduced = reduced
        self._changed = changed
        self._settle = settle
        self._where = engine.coordinates
        self._patience_s = min(_PATIENCE_S, engine.options.timeout_s)
        engine.create_hook_groups(timeout_s=self._patience_s)
        # What is under way ends on all replicas or on none; so is an expert brought.
        together = engine.stream is not None or self._where.exchanges_across
        replicas = range(self._where.dp) if together else [self._where.dp_rank]
        self._ranks = [rank for replica in replicas for rank in self._where.replica(replica)]
        among = tuple(sorted(self._ranks))
        self._bulletin = Bulletin(engine.communicators.get("hooks", among), len(among))
        self._owners = dict.fromkeys(engine.named_parameters(), self._where.pp_rank)
        if self._table is not None:
            first = engine.model.first_stages()
            self._owners = {n: engine.placement.owners(first[n])[0] for n in self._table.names}
        self._buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
        self._optimizers: list[Groups] = []
        self._wrapped: list[tuple[Any, str, Any]] = []  # with what was there before, if anything
        self._settled: set[tuple[int, str]] = set()  # hooks that have run
        self._uneven: set[tuple[int, str]] = set()  # of those, what not all ranks have touched
        self._told: set[str] = set()
        self._call: tuple[tuple[int, str], str] | None = None  # the hook that runs, and its name
        self._watching = False
        self._look()
        self._here = False  # whether the holes' places are filled
        # Parameters with gradient hooks that were there at the last look: whether they are here.
        self.hooked: dict[str, bool] = {}
        self._has_gradients = False

    def _look(self) -> None:
        """Notes which objects count as the module's."""
        self._foreign: dict[int, str] = {}
        if self._table is not None:
            self._foreign = {id(self._table.original(name)): name for name in self._table.freed}
        own = {id(parameter) for parameter in self._engine.named_parameters().values()}
        self._parameters = own | self._foreign.keys()
        modules = list(self._module.modules())
        self._modules = {id(module) for module in modules}
        cut = self._shares.ids
        self._sharing = {id(m) for m in modules if any(id(p) in cut for p in m.parameters())}
        self._tables = [module._buffers for module in modules]
        self._look_at_buffers()

    def _look_at_buffers(self) -> None:
        """The same of buffers, which others may take the place of at any time."""
        self._buffer_ids = {id(b) for table in self._tables for b in table.values()} - {id(None)}

    def _is_parted(self, parameter: Tensor) -> bool:
        return self._is_foreign(parameter) or id(parameter) in self._shares.ids

    def _look_at_gradient_hooks(self) -> None:
        """Notes which parameters have hooks, and refuses what such hooks would be wrong for.

        Raises:
            ModelError: One would see a share, or a microbatch's gradient for the batch's.
        """
        own = self._engine.named_parameters()
        for name, parameter in own.items():
            refuse_post_hooks(name, parameter)
            if parameter._backward_hooks and id(parameter) in self._shares.ids:
                degree = "ep" if name in self._engine.model.experts else "tp"
                kept = (
                    ""
                    if self._table is None
                    else ", register it before fit(), where its layer then stays whole"
                )
                raise ModelError(
                    f"{name} has a hook (register_hook), which would see this rank's share of its "
                    f"gradient. Use on_before_optimizer_step, which has all of it{kept}, or use "
                    f"{degree}=1."
                )
        self.hooked = {name: True for name, p in own.items() if p._backward_hooks}
        if self._table is not None:
            for name in self._table.freed:
                if self._table.original(name)._backward_hooks:
                    self.hooked[name] = False

    def _is_foreign(self, parameter: Tensor) -> bool:
        return id(parameter) in self._foreign

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exchange(self, kind: str) -> None:
        """Tells the other ranks what this one has come to, and brings what any of them asks for.

        Raises:
            ModelError: The others have come to something else.
        """
        assert self._call is not None
        key, label = self._call
        loose = key not in self._settled or key in self._uneven
        while True:
            own = {"hook": label, "kind": kind, **self._contribution()}
            self._bulletin.post(own)
            try:
                said = self._bulletin.read()
            except RuntimeError as error:
                if not is_late(error):
                    raise
                raise self._apart(label, f"nothing for {self._patience_s:.0f} s") from error
            kinds = {one["kind"] for one in said}
            others = {one["hook"] for one in said} - {label}
            if others or (len(kinds) > 1 and not loose):
                raise self._apart(label, ", ".join(sorted(others or kinds - {kind})))
            if len(kinds) > 1:
                self._uneven.add(key)
            if kinds - {END} and not self._here:
                with self.away():
                    anything = self._settle()
                if anything:
                    continue
                self._bring_weights(self._of_pipeline(said), label)
            if GRADIENTS in kinds and self._engine.mixes_updates:
                raise ModelError(
                    f"{label} looks at gradients around an update, where each stage has that "
                    "of another microbatch with schedule=pipedream. Look at them in "
                    "on_train_batch_end, or try schedule.vertical_sync=true, where all stages "
                    "apply the same, or schedule=pipedream_2bw."
                )
            if GRADIENTS in kinds and not self._has_gradients:
                self._bring_gradients(self._of_pipeline(said), self._of_sharers(said))
            if kind != END or kinds == {END}:
                return

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the module is cut, although a hook is running: the pipeline's own work."""
        if self._call is None:
            yield
            return
        call, self._call = self._call, None
        watching = self._watching
        self._leave()
        try:
            yield
        finally:
            for groups in self._optimizers:
                groups.show()
            self._call, self._watching = call, watching

    def _of_pipeline(self, said: Sequence[Any]) -> list[Any]:
        """What the ranks of this replica have said, by pipeline rank."""
        by_rank = dict(zip(sorted(self._ranks), said, strict=True))
        return [by_rank[rank] for rank in self._where.pipeline(self._where.dp_rank)]

    def _of_sharers(self, said: Sequence[Any]) -> list[Any]:
        """What ranks have said that may have other shares of this one's parameters."""
        by_rank = zip(sorted(self._ranks), said, strict=True)
        first = self._where.pp_rank * self._where.dp * self._where.tp
        return [one for rank, one in by_rank if 0 <= rank - first < self._where.dp * self._where.tp]

    def _apart(self, label: str, met: str) -> ModelError:
        return ModelError(
            f"{label} looked at parameters or gradients on pipeline rank {self._where.pp_rank}, "
            f"and another rank came to: {met}. Hooks must look at them on all "
            "ranks in the same calls; where only one rank is to use what it sees, let all ranks "
            "look and one rank write."
        )

    def _contribution(self) -> dict[str, Any]:
        """What the other ranks need to know to receive this rank's part."""
        now = dict(self._module.named_buffers())
        changed = {
            name: list(buffer.shape)
            for name, buffer in now.items()
            if not _same(buffer, self._buffers.get(name))
        }
        graded = [
            name
            for name, parameter in self._engine.named_parameters().items()
            if parameter.grad is not None and self._owners[name] == self._where.pp_rank
        ]
        return {"buffers": changed, "gradients": graded}

    def _bring_weights(self, said: Sequence[Mapping[str, Any]], label: str) -> None:
        self._engine.complete()
        self._shares.bring()
        own = {name: p.detach() for name, p in self._engine.named_parameters().items()}
        size = sum(p.nbytes for p in own.values())
        if self._table is not None:
            wanted = self._wanted(self._owners)
            values = self._spread(wanted, own)
            size = sum(Size(shape).numel() * kind.itemsize for _, shape, kind in wanted.values())
            self._bring_buffers(said)
            self._table.fill(values)
        self._bring_generators()
        self._here = True
        self._look_at_buffers()
        if label not in self._told:
            self._told.add(label)
            rank_zero_info(
                f"{label} looks at parameters: the whole model ({size / 2**20:.1f} MiB) is brought "
                "to every rank in each call that does."
            )

    def _wanted(
        self, owners: Mapping[str, int]
    ) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """For ``_spread``: parameters of the whole model."""
        assert self._table is not None
        specs = {name: self._table.spec(name) for name in owners}
        return {name: (owners[name], spec.shape, spec.dtype) for name, spec in specs.items()}

    def _bring_buffers(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Each buffer as the rank has it that has changed it last; of several the last stage's."""
        last = self._engine.placement.owners(self._engine.placement.num_stages - 1)[0]
        ranks = [rank for rank in range(self._where.pp) if rank != last] + [last]
        found = {
            name: (rank, tuple(shape), dict(self._module.named_buffers())[name].dtype)
            for rank in ranks
            for name, shape in said[rank]["buffers"].items()
        }
        now = dict(self._module.named_buffers())
        for name, value in self._spread(found, now).items():
            if now[name].shape == value.shape:
                now[name].copy_(value)
            else:
                now[name].data = value

    def _bring_generators(self) -> None:
        """Draws in the hook are the same everywhere."""
        replica = self._where.replica(self._where.dp_rank)
        group = self._engine.communicators.get("hooks", replica)
        if group is not None:
            state = torch.default_generator.get_state()
            dist.broadcast(state, src=replica[0], group=group)
            torch.default_generator.set_state(state)

    def _bring_gradients(
        self, said: Sequence[Mapping[str, Any]], sharers: Sequence[Mapping[str, Any]]
    ) -> None:
        self._shares.bring_gradients({name for one in sharers for name in one["gradients"]})
        self._has_gradients = True
        if self._table is None:
            return
        wanted = self._wanted(
            {name: rank for rank, one in enumerate(said) for name in one["gradients"]}
        )
        own = {n: p.grad for n, p in self._engine.named_parameters().items() if p.grad is not None}
        for name, gradient in self._spread(wanted, own).items():
            if name in self._table.freed:
                self._table.original(name).grad = gradient

    def _spread(
        self,
        wanted: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]],
        own: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Tensors of other ranks, by owner, shape and type; collective over the pipeline."""
        packs: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, (owner, _, dtype) in wanted.items():
            packs.setdefault((owner, dtype), []).append(name)
        fast = self._engine.options.backend == "nccl"
        device = self._engine.device if fast else torch.device("cpu")
        group = self._group_of("whole" if fast else "hooks")
        if group is None:
            return {}
        found: dict[str, Tensor] = {}
        for (owner, dtype), names in packs.items():
            sizes = [torch.Size(wanted[name][1]).numel() for name in names]
            if owner == self._where.pp_rank:
                flat = torch.cat([own[name].detach().reshape(-1) for name in names]).to(device)
            else:
                flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            source = self._where.global_rank(owner, self._where.dp_rank)
            if flat.numel():
                dist.broadcast(flat.view(torch.uint8), src=source, group=group)
            if owner != self._where.pp_rank:
                parts = torch.split(flat.to(self._engine.device), sizes)
                for name, part in zip(names, parts, strict=True):
                    found[name] = part.view(wanted[name][1])
        return found

    def _group_of(self, purpose: str) -> dist.ProcessGroup | None:
        return self._engine.communicators.get(purpose, self._where.pipeline(self._where.dp_rank))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _leave(self) -> None:
        """Each rank keeps what is its own of what the hook has done."""
        self._watching = False
        here, self._here = self._here, False
        gradients, self._has_gradients = self._has_gradients, False
        for groups in self._optimizers:
            groups.hide(self._is_foreign)
        if not here:
            return
        now = list(self._engine.named_parameters().values())
        if self._table is not None:
            now = [p for n in self._table.names if not isinstance(p := self._table.find(n), Hole)]
        for parameter in now:
            if parameter.grad_fn is not None:
                parameter.detach_()  # Written in place, of values with gradients.
        frozen = self._table is not None and self._table.take_out()
        self._shares.part()
        self._buffers = {n: b.detach().clone() for n, b in self._module.named_buffers()}
        self._look_at_gradient_hooks()
        self._engine.adopt(gradients=gradients)
        if frozen or self._engine.trained != self._engine.trained_now():
            self._engine.follow_freezing()
        self._changed()


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)
