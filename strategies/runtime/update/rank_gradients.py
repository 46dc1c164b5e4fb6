"""The gradients of all stages of a rank, and of weights that several stages use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.ir.program import Placement
from strategies.models.stage_model import StageModel
from strategies.models.tensor_parallel.tensor_ranks import Grid, Shard, TensorRanks
from strategies.runtime.messages.mesh import Communicators, Coordinates, holders_of
from strategies.runtime.update.grad_sync import (
    Launched,
    Noted,
    StageGradients,
    adopt_gradient,
)
from strategies.runtime.update.gradient_layout import Buffer, main_dtype
from strategies.runtime.update.main_weights import AllMainWeights, MainWeights, widened_piece
from strategies.runtime.update.reduction import check_asynchronous


@dataclass(frozen=True)
class _Shared:
    """The gradient of a weight that several stages use; no stage's backward completes it."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor

    @property
    def widened(self) -> bool:
        return self.gradient.dtype != self.parameter.dtype


class RankGradients:
    """Lays gradients out, keeps them out of Lightning's reach, and ends their reductions."""

    def __init__(
        self,
        weights: OwnedWeights,
        placement: Placement,
        where: Coordinates,
        communicators: Communicators,
    ) -> None:
        self._weights = weights
        self._placement = placement
        self._where = where
        self._communicators = communicators
        self.stages: dict[int, StageGradients] = {}  # empty until ``build``
        self.mains = AllMainWeights()
        self.left_alone: frozenset[str] = frozenset()  # names of weights that no optimizer updates
        self._shared: list[_Shared] = []
        self._sharded = False  # whether any rank's sums are scattered over replicas
        self._whole = False  # whether sums are over all replicas, where passes only add to them
        self._hooks: list[Any] = []
        self._shared_works: list[dist.Work] | None = None  # None until they are started

    def build(
        self,
        *,
        buckets: tuple[int, ...],
        sharded: bool,
        wire: torch.dtype | None,
        narrow: bool,
        launched: Launched,
        noted: Noted | None,
        alone: bool,
        mains: AllMainWeights | None = None,
    ) -> None:
        """Lays out gradient buffers; parameters are on their device.

        ``buckets`` are per stage, 0 where nothing is reduced; ``alone``: no other sums take turns
        with these on the parameters; ``mains`` is what is updated with these sums, too, None for
        their own; for the rest see ``StageGradients``.
        """
        if mains is not None:
            self.mains = mains
        self._sharded = sharded and self._where.dp > 1
        self.remove_hooks()
        for old in self.stages.values():
            old.detach()
        for stage in self._weights.by_stage:
            count = buckets[stage]
            pp_ranks = self._placement.owners(stage)
            owners = self._where.replicas(pp_ranks)
            experts = self._weights.experts_of(stage)
            holders = self._where.expert_holders(pp_ranks) if experts else ()
            self.stages[stage] = StageGradients.build(
                stage,
                self._weights.others_of(stage),
                count=count,
                loose=alone and not count,
                group=self._communicators.get("reduce", owners) if count else None,
                launched=launched,
                noted=noted,
                sharded=sharded,
                wire=wire,
                narrow=narrow,
                experts=experts,
                expert_group=self._communicators.get("experts", holders) if count else None,
            )
            if mains is not None:
                mains.serve(self.stages[stage])
                continue
            main = MainWeights.build(self.stages[stage])
            if main is not None:
                self.mains.add_stage(main)
        self._shared = [
            _Shared(name, p, torch.zeros_like(p, dtype=main_dtype(p.dtype)))
            for name, p in self._weights.trained_shared().items()
        ]
        for shared in self._shared:
            if shared.widened and mains is None:
                self.mains.add_shared(widened_piece(shared.parameter))
        self.add_hooks()

    def check_asynchronous(self, device: torch.device) -> None:
        """Refuses reductions that wait inside their calls; collective, after ``build``."""
        asked = set()
        for stage, gradients in sorted(self.stages.items()):
            pp_ranks = self._placement.owners(stage)
            for buffer in gradients.buffers:
                group = buffer.group
                if group is not None and group not in asked:
                    asked.add(group)
                    where = self._where
                    members = (where.expert_holders if buffer.experts else where.replicas)(pp_ranks)
                    check_asynchronous(group, members, gradients.starter(buffer), device)

    def add_hooks(self) -> None:
        for gradients in self.stages.values():
            gradients.add_hooks()
        if not self._hooks:
            self._hooks = [_widen(s.parameter, s.gradient) for s in self._shared if s.widened]

    def remove_hooks(self) -> None:
        """Leaves the parameters alone, until ``add_hooks``.

        Python's garbage collector cannot see through a parameter's hooks: left there, they would
        keep the engine, its weights and its message thread for ever.
        """
        for gradients in self.stages.values():
            gradients.remove_hooks()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def attach(self, *, zero: bool) -> None:
        """Puts gradients where autograd and optimizers look for them; ``zero`` begins a new sum."""
        for gradients in self.stages.values():
            gradients.attach(zero=zero)
        for shared in self._shared:
            if zero:
                shared.gradient.zero_()
            shared.parameter.grad = None if shared.widened else shared.gradient

    def detach(self) -> None:
        """Takes them away again; their values stay."""
        for gradients in self.stages.values():
            gradients.detach()
        for shared in self._shared:
            shared.parameter.grad = None
            for piece in self.mains.pieces_of(shared.parameter) or ():
                piece.main.grad = None

    def adopt(self) -> None:
        """Takes over gradients that somebody has changed or replaced between two passes."""
        for gradients in self.stages.values():
            gradients.adopt()
        for shared in self._shared:
            if not shared.widened:
                adopt_gradient(shared.parameter, shared.gradient)

    # -- sums over several passes, reduced when somebody asks for them ----------------------

    @property
    def whole(self) -> bool:
        """Whether the sums are over all replicas."""
        return self._whole

    def start_all(self) -> None:
        """Starts all reductions, unless they have been since the last pass."""
        if not self._whole:
            self._whole = True
            for _, gradients in sorted(self.stages.items()):
                for bucket in range(gradients.count):
                    gradients.reduce(bucket)

    def continue_sums(self) -> None:
        """Makes sums over all replicas this one's part again: more is to be added to them."""
        if not self._whole:
            return
        self._whole = False
        for gradients in self.stages.values():
            for buffer in gradients.buffers:
                if buffer.group is not None:
                    buffer.flat.div_(buffer.group.size())
        for shared in self._shared:
            group = self._communicators.get("reduce", self._weights.sharing(shared.name))
            if group is not None:
                shared.gradient.div_(group.size())

    def clear(self, wanted: Collection[int]) -> None:
        """Begins a new sum for the parameters of these identities, whose gradients are cleared."""
        for gradients in self.stages.values():
            gradients.clear(wanted)
        for shared in self._shared:
            if id(shared.parameter) in wanted:
                shared.gradient.zero_()
                shared.parameter.grad = shared.gradient

    @property
    def differs(self) -> bool:
        """Whether the gradients of replicas are not the same when they have been reduced.

        The same on all ranks, of which some may have nothing to train.
        """
        return self._sharded or bool(self._weights.experts)

    def start_shared(self) -> None:
        """Starts the reductions of weights that several stages use; once per sum."""
        if self._shared_works is not None:
            return
        works: list[dist.Work] = []
        for shared in self._shared:
            group = self._communicators.get("reduce", self._weights.sharing(shared.name))
            if group is not None:
                work = dist.all_reduce(shared.gradient, group=group, async_op=True)
                assert work is not None
                works.append(work)
        self._shared_works = works

    def end(self, *, early: bool = False) -> None:
        """Ends this rank's reductions, those of weights that several stages use included.

        Where it is ``early``, of the latter only what counts in this rank's part of the norm.
        """
        self.start_shared()
        for gradients in self.stages.values():
            gradients.end()
        assert self._shared_works is not None
        if not early or any(self._counts(shared) for shared in self._shared):
            for work in self._shared_works:
                work.wait()
            self._shared_works = []
        if not early:
            self._shared_works = None

    def multiply(self, factor: float) -> None:
        """Multiplies sums that are complete."""
        for gradients in self.stages.values():
            gradients.multiply(factor)
        for shared in self._shared:
            shared.gradient.mul_(factor)

    def _counts(self, shared: _Shared) -> bool:
        """Whether a shared weight counts here: on the first rank that holds it."""
        stage = self._weights.shared[shared.name][0]
        return self._placement.owners(stage)[0] == self._where.pp_rank

    def show(self) -> None:
        """Puts sums that are complete where optimizers look for them."""
        for gradients in self.stages.values():
            gradients.show()
        for shared in self._shared:
            for piece in self.mains.pieces_of(shared.parameter) or ():
                piece.main.grad = shared.gradient

    def widen(self) -> None:
        """The sums are complete: the optimizer's weights get gradients of their own type."""
        for gradients in self.stages.values():
            gradients.widen()

    def add_up_partial(self, ranks: TensorRanks, model: StageModel) -> None:
        """Sums the gradients of whole weights that each tensor-parallel rank used on its share."""
        wanted = model.partial_parameters
        if not wanted:
            return
        found: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        for name, parameter in self._weights.named().items():
            if name not in wanted:
                continue
            for updated in self.mains.updated_parameters((parameter,)):
                gradient = updated.grad
                if gradient is not None:
                    kind = (gradient.dtype, gradient.device)
                    found.setdefault(kind, {})[gradient.data_ptr()] = gradient
        for gradients in found.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
            ranks.sum_(flat)
            sizes = [gradient.numel() for gradient in gradients.values()]
            totals = torch.split(flat, sizes)
            for gradient, total in zip(gradients.values(), totals, strict=True):
                gradient.copy_(total.view_as(gradient))

    def reduced(self) -> dict[str, Tensor]:
        """This rank's gradients by name; of sharded ones only the own share is summed up."""
        names = {id(parameter): name for name, parameter in self._weights.named().items()}
        found = {shared.name: shared.gradient for shared in self._shared}
        for gradients in self.stages.values():
            found |= {names[id(p)]: gradient for p, gradient in gradients.views()}
        return found

    def squared_norm(
        self,
        device: torch.device,
        shards: Callable[[str], bool],
        only: Collection[int] | None = None,
    ) -> Tensor:
        """This rank's share of the squared norm; weights on several ranks count on the first.

        ``shards`` says by name whether a weight is cut between the tensor-parallel ranks, ``only``
        by identity which weights count; those that no optimizer updates (``left_alone``) do not. A
        float64 scalar, on the device of the gradients still.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        where = self._where
        counts: Callable[[Tensor], bool] | None = None
        if where.tp_rank > 0 or only is not None or self.left_alone:
            named = self._weights.named()
            counted = {id(p) for name, p in named.items() if name not in self.left_alone}
            if only is not None:
                counted = set(only)
            if where.tp_rank > 0:
                # The first of the sharers counts what all of them have whole.
                spread = self._weights.experts
                counted &= {id(p) for name, p in named.items() if shards(name) or name in spread}

            def counts(parameter: Tensor) -> bool:
                return id(parameter) in counted

        # Replicas' sums are added only where each has a share.
        first = where.dp_rank == 0 or not self.differs
        for stage, gradients in self.stages.items():
            owner = self._placement.owners(stage)[0] == where.pp_rank

            def counts_here(buffer: Buffer, owner: bool = owner) -> bool:
                return owner and (where.holds_first if buffer.experts else first)

            total += gradients.squared_norm(counts, counts_here)
        for shared in self._shared:
            if counts is not None and not counts(shared.parameter):
                continue
            if first and self._counts(shared):
                total += torch.linalg.vector_norm(shared.gradient).double().square()
        return total


def _widen(parameter: nn.Parameter, gradient: Tensor) -> Any:
    """Lets a shared weight's gradients add up in a wider type, for a copy of it."""

    def add(_: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    hooked: Any = parameter  # The hook's registration is untyped in torch.
    return hooked.register_post_accumulate_grad_hook(add)


class OwnedWeights:
    """Names of the parameters of this rank's stages, once the model is cut, and who holds them."""

    def __init__(self, model: StageModel, placement: Placement, where: Coordinates) -> None:
        self._placement = placement
        self._where = where
        self._model = model
        # Name of a weight that several stages use -> those stages, on all ranks alike.
        self.shared = dict(model.shared_parameters())
        self.by_stage = {
            stage: dict(model.stage_parameters(stage))
            for stage in placement.stages_of(where.pp_rank)
        }

    @property
    def experts(self) -> Mapping[str, Shard | Grid]:
        """By name, what is spread over ranks and how."""
        return self._model.experts

    def named(self) -> dict[str, nn.Parameter]:
        """By name; one that several of the rank's stages use has one entry."""
        return {name: p for named in self.by_stage.values() for name, p in named.items()}

    def __iter__(self) -> Iterator[nn.Parameter]:
        seen: set[int] = set()
        for named in self.by_stage.values():
            for parameter in named.values():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def trained(self) -> tuple[bool, ...]:
        """Which of them want a gradient, in a fixed order."""
        return tuple(p.requires_grad for named in self.by_stage.values() for p in named.values())

    def own_of(self, stage: int) -> list[nn.Parameter]:
        """What is trained of a stage and of no other."""
        named = self.by_stage[stage].items()
        return [p for name, p in named if p.requires_grad and name not in self.shared]

    def experts_of(self, stage: int) -> list[nn.Parameter]:
        """What is trained of a stage and spread over ranks."""
        named = self.by_stage[stage].items()
        return [p for name, p in named if p.requires_grad and name in self.experts]

    def others_of(self, stage: int) -> list[nn.Parameter]:
        """What is trained of a stage alone, and whole on its replicas."""
        spread = {id(parameter) for parameter in self.experts_of(stage)}
        return [parameter for parameter in self.own_of(stage) if id(parameter) not in spread]

    def trained_shared(self) -> dict[str, nn.Parameter]:
        """What is trained and used by several stages, by name in order: the same on all holders."""
        named = self.named()
        names = sorted(name for name in self.shared if name in named)
        return {name: named[name] for name in names if named[name].requires_grad}

    def sharing(self, name: str) -> tuple[int, ...]:
        return holders_of(self.shared[name], self._placement, self._where)

    def holders(self, *, share: bool) -> dict[str, tuple[int, ...]]:
        """Global ranks that hold the same of a parameter and of its optimizer state.

        less of it, under fewer names. With ``share`` those that hold the same share of it, not the
        same whole.
        """
        where = self._where
        sharers = (where.tp_rank,) if share else range(where.tp)

        def ranks_of(stage: int) -> tuple[int, ...]:
            owners = self._placement.owners(stage)
            return tuple(rank for sharer in sharers for rank in where.replicas(owners, sharer))

        def holders_of_one(stage: int, name: str) -> tuple[int, ...]:
            if share and name in self.experts:
                return where.expert_holders(self._placement.owners(stage))
            return ranks_of(stage)

        found = {
            name: holders_of_one(stage, name)
            for stage, named in self.by_stage.items()
            for name in named
        }
        return found | {
            name: ranks_of(min(stages)) for name, stages in self.shared.items() if name in found
        }

    def synchronise(self, communicators: Communicators, tensor_ranks: TensorRanks | None) -> None:
        """Gives all copies of a weight the value of the first; collective.

        Modules that nobody seeded start differently in every process. Call when parameters are on
        their device.
        """
        if self._where.world_size == 1:
            return

        def broadcast(tensor: Tensor, members: tuple[int, ...], purpose: str = "reduce") -> None:
            group = communicators.get(purpose, members)
            if group is not None:
                dist.broadcast(tensor.detach(), src=members[0], group=group)

        done = set(self.shared)
        for stage, named in self.by_stage.items():
            owners = self._where.replicas(self._placement.owners(stage))
            for name, parameter in named.items():
                if name not in done:
                    done.add(name)
                    if name in self.experts:
                        holders = self._where.expert_holders(self._placement.owners(stage))
                        broadcast(parameter, holders, "experts")
                    else:
                        broadcast(parameter, owners)
        named = self.named()
        for name in sorted(self.shared):
            if name in named:
                broadcast(named[name], self.sharing(name))
        if tensor_ranks is not None:
            for name, parameter in named.items():
                if name not in self._model.shards and name not in self.experts:
                    tensor_ranks.broadcast_(parameter.detach())
