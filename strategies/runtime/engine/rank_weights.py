"""What a rank has of a run: its groups, its stages' weights and gradients, and their updates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from strategies.analysis.late_verdict import gains_time
from strategies.costs.uniform import UniformCosts
from strategies.runtime.engine.rank_setup import RankSetup
from strategies.runtime.messages import mesh
from strategies.runtime.update.grad_sync import clip_
from strategies.runtime.update.main_weights import refuse_freezing
from strategies.runtime.update.nan_guard import Finding, left_by_hooks
from strategies.runtime.update.post_validation import UpdateUndone
from strategies.runtime.update.rank_gradients import RankGradients
from strategies.simulator.engine import simulate


class RankWeights(RankSetup):
    """One rank's share of a run; ``Engine`` runs programs over it."""

    # ---------------------------------------------------------------- set-up

    def synchronise_weights(self) -> None:
        self._weights.synchronise(self.communicators, self.tensor_ranks)

    def updated_by(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Notes what optimizers that have not run yet will update: only that has a norm."""
        groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
        known = {id(parameter) for group in groups for parameter in group}
        named = self.named_parameters().items()
        left_alone = frozenset(n for n, p in named if p.requires_grad and id(p) not in known)
        for gradients in self._all_sums():
            gradients.left_alone = left_alone

    def add_hooks(self) -> None:
        if self.stream is None:  # which follows one set of buffers at a time
            self._gradients.add_hooks()

    def remove_hooks(self) -> None:
        for gradients in self._all_sums():
            gradients.remove_hooks()

    def _follow_freezing(self) -> None:
        """Lays the buffers out anew when a callback has frozen or unfrozen parameters."""
        if self._weights.trained() != self._trained:
            refuse_freezing(self.mains)
            self.build_gradients()

    def follow_freezing(self) -> None:
        """Parameters of any rank were frozen or unfrozen since the last pass; on all ranks."""
        refuse_freezing(self.mains)
        self.model.follow_freezing()
        self.mailbox.forget()

    def adopt(self, *, gradients: bool) -> None:
        """Takes over weights, and gradients, that somebody has changed between two passes."""
        if self._gradients.stages:
            self.mains.refresh()
            shown = self._gradients if self.stream is None else self.stream.shown
            if gradients and shown is not None:
                shown.adopt()

    @property
    def mixes_updates(self) -> bool:
        """Whether stages now have gradients of different updates where people look for them."""
        return self.applies_apart and self.stream is not None and not self.stream.empty

    @property
    def applies_apart(self) -> bool:
        """Whether stages apply the gradients of a microbatch one after the other."""
        plan = self.plan
        return plan.schedule == "pipedream" and not plan.vertical_sync and plan.pp > 1

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which of this rank's parameters the gradients are laid out for, in a fixed order."""
        return self._trained

    def trained_now(self) -> tuple[bool, ...]:
        return self._weights.trained()

    def create_hook_groups(self, *, timeout_s: float) -> None:
        """Groups in which a replica's ranks talk inside people's hooks; collective."""
        wanted = mesh.hook_groups(
            self.coordinates,
            fast=self.options.backend == "nccl",
            together=self.stream is not None or self.coordinates.exchanges_across,
        )
        self._create(wanted, timeout_s=timeout_s)

    def updating(self) -> AbstractContextManager[None]:
        """Around an optimizer's step."""
        versions = self._parts.versions
        return nullcontext() if versions is None else versions.updated()

    def seed_of(self, step: int) -> int:
        """From which a pass draws, on all ranks of this replica."""
        return (self.seed * 1_000_003 + step) * 1021 + self.coordinates.dp_rank

    def begin_sum(self) -> None:
        """A backward outside of a pass is going to add to the gradients, as they are now."""
        cleared = {id(p) for p in self.named_parameters().values() if p.grad is None}
        self._gradients.adopt()
        self._gradients.clear(cleared)
        self.continue_sum()

    def continue_sum(self) -> None:
        """Gradients are going to be added to those that are there."""
        self._gradients.continue_sums()
        self._gradients.attach(zero=False)
        self._flush.expect(None)

    def settle(self) -> None:
        """Reduces what has been added up since the last time; collective over the replicas."""
        self._gradients.start_all()
        self.flush()

    @property
    def settled(self) -> bool:
        return self._gradients.whole

    def clear_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begins a new sum for some parameters; somebody has cleared their gradients."""
        self._gradients.clear({id(parameter) for parameter in parameters})

    def clip_some_by_norm(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """``clip_by_norm`` of some parameters, those of other ranks included; settled before."""
        norm = self._flush.gradient_norm({id(parameter) for parameter in parameters})
        clip_(parameters, norm, limit)
        return norm

    def trained_flags(self) -> tuple[bool, ...]:
        return self._weights.trained()

    # ---------------------------------------------------------------- the flush

    def restore_gradients(self) -> None:
        """Puts the accumulated gradients back where optimizers look for them."""
        gradients = self._due_sums()
        if gradients is not None:
            gradients.attach(zero=False)

    def _due_sums(self) -> RankGradients | None:
        """The sums that the optimizer is to apply; None where this rank has none yet."""
        if self.stream is None or self.stream.empty:
            return self._gradients
        return self.stream.due

    def flush(self) -> None:
        gradients = self._due_sums()
        if gradients is not None:
            if self.stream is not None:
                self.stream.ask_due()
            self._flush.take(gradients)
            self._flush.run()

    def ask_early(self, limit: float | None) -> None:
        """From now on asks for the verdict on an update as soon as its sums are complete.

        For a program without a flush whose ranks apply an update together; ``limit`` as in
        ``go_on``. Nobody may change gradients between their last backward and the update.
        """
        assert self.stream is not None
        self.stream.ask = None
        if self.plan.overlap != "none" or self.coordinates.dp == 1:
            self.stream.ask = lambda gradients: self._flush.ask_early(gradients, limit)

    @property
    def alone(self) -> bool:
        """Whether no other rank has a part of this one's model or update."""
        return self._flush.alone

    @property
    def gains_at_flush(self) -> bool:
        """Whether steps are shorter where ranks do not wait for each other at the flush."""
        costs = self.plan.costs or UniformCosts(1.0, 2.0)
        return gains_time(simulate(self.programs.train, costs))

    @property
    def may_go_on(self) -> bool:
        """Whether the update may be made before its verdict: somebody is asked, and all is calm."""
        return self.late.calm and not self._flush.alone

    def go_on(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        limit: float | None,
        step: int,
        unchanged: bool = False,
    ) -> None:
        """Asks for the verdict on the update that the caller makes now; collective, nobody waits.

        Args:
            optimizer: What makes it.
            limit: What the norm is to be clipped to; None to leave out only what is not finite.
            step: Its number, for ``late.left_out``.
            unchanged: Whether gradients are as the flush has left them.
        """
        self.late.begin(self._flush.ask(limit, unchanged=unchanged), optimizer, step=step)

    def _confirm(self) -> None:
        """At the cut: the weights are right, or nobody goes on."""
        asked = time.perf_counter()
        struck = self.late.strikes()
        self._flush.norm_waits_s.append(time.perf_counter() - asked)
        if struck:
            raise UpdateUndone
        if self._parts.watch is not None:
            self._parts.watch.before = None  # The next verdict is on the step that runs now.
        self._gradients.attach(zero=True)

    def complete(self) -> None:
        """Makes the weights right, and whole, now; collective. Of no cost if they are."""
        self.late.settle()
        self.mains.complete()

    def leaves_out(self) -> bool:
        return self._flush.leaves_out()

    def findings(self) -> list[Finding]:
        return self._flush.findings()

    def late_findings(self) -> list[Finding]:
        """What is not finite in the step whose update has just been undone."""
        return self._flush.findings(kept=True)

    def left_by_hooks(self, counted: Collection[int]) -> list[Finding]:
        """What people's hooks have left not finite of the gradients that ``counted`` take."""
        stages = self._weights.by_stage
        return left_by_hooks(
            self.coordinates, stages, lambda p: self.mains.updated_parameters((p,)), counted
        )

    def left_out(self) -> None:
        """Ends a step whose update nobody has made."""
        if self.feedback is not None:
            self.feedback.forget()
        self._end_step()

    def end_call(self) -> None:
        """Ends a call behind which nobody updates, of an update that takes several."""
        self._end_step()

    def _end_step(self) -> None:
        if self.stream is not None:
            if self.stream.empty:
                self._gradients.remove_hooks()
            self.stream.applied()
        self._flush.end_step()

    def stepped(self) -> None:
        """Notes that the optimizer has updated the stages: the STEPs of the program have ended."""
        if self.feedback is not None and self.stream is not None:
            self.feedback.end(late=bool(self.stream.due_update))
        if self._due_sums() is not None:
            self.mains.updated()
        self._end_step()

    def gradient_norm(self, *, unchanged: bool = False) -> Tensor:
        """Of all gradients; ``unchanged``: they are as the flush has left them."""
        return self._flush.gradient_norm(unchanged=unchanged)

    @property
    def norm_waits_s(self) -> deque[float]:
        return self._flush.norm_waits_s

    def clip_by_norm(self, limit: float) -> Tensor:
        """Scales the whole model's gradient to at most ``limit``; returns the norm before."""
        norm = self.gradient_norm()
        clip_(self.updated_parameters(), norm, limit)
        return norm

    # ---------------------------------------------------------------- parameters

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self._weights.named()

    def holders(self, *, share: bool = False) -> dict[str, tuple[int, ...]]:
        return self._weights.holders(share=share)

    # ---------------------------------------------------------------- the end

    def drain(self) -> None:
        self.mailbox.drain()

    def close(self) -> None:
        """Ends all sends and gives the communicators back; the engine is of no use afterwards."""
        self.drain()
        self.mailbox.close()
        self.remove_hooks()
        if self._parts.turns is not None:
            self._parts.turns.close()
        self.communicators.destroy()
