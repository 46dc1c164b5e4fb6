"""A step whose loss or gradient is not finite: seen by one rank, left out by all.

Nothing here waits or communicates. While a step runs, every forward's output, every loss and every
bucket before its reduction leave one number each, which stays on the device; they are looked at
only when a step is left out, to name the place where it began. That a gradient is not finite shows
in its norm, which every step takes of the reduced buckets anyway. A loss that is not finite travels
to the other replicas as a NaN in the marks behind the last stage's gradients.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.update.grad_sync import StageGradients

# What comes first in a step explains what comes later.
_ORDER = ("weight", "output", "loss", "gradient", "hook", "norm")


class NotFiniteStep(Exception):  # noqa: N818 - no error but the way out of an optimizer's closure
    """All ranks raise it where the optimizer would have updated the weights."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not finite on one rank, and first there."""

    kind: str  # weight, output, loss, gradient, hook or norm
    value: str  # nan or inf
    rank: int  # global
    host: str
    where: Coordinates
    stage: int
    microbatch: int | None = None  # of an output or a loss
    # The module's own name of the first one concerned, in the order of the backward.
    parameter: str | None = None
    count: int = 0  # parameters of the rank that are concerned
    own: bool = True  # whether it was there before gradients were added up over replicas
    position: int = 0  # sorts findings of one kind by time

    def sentence(self) -> str:
        where = self.where
        place = f"stage {self.stage} on rank {self.rank} (pp {where.pp_rank}, dp {where.dp_rank}"
        place += f", tp {where.tp_rank}, {self.host})" if where.tp > 1 else f", {self.host})"
        if self.kind == "weight":
            return f"the weight {self.parameter} of {place} was {self.value} before the step"
        if self.kind == "gradient":
            more = f" and {self.count - 1} more of that rank" if self.count > 1 else ""
            return f"the gradient of {self.parameter}{more} is {self.value}: {place}"
        if self.kind == "hook":
            return (
                f"the gradient of {self.parameter} is {self.value} after the code between backward "
                "and update (on_after_backward, on_before_optimizer_step, clipping, a manual "
                f"step), and was finite before it: {place}"
            )
        if self.kind == "norm":
            return f"the norm of the gradient overflows, although every element is finite: {place}"
        thing = "loss" if self.kind == "loss" else "output"
        text = (
            f"the {thing} of microbatch {self.microbatch} is {self.value} in the forward: {place}"
        )
        if self.kind == "loss":
            text += " (a mean over no target, all masked or ignored, is nan: then loss_over=batch)"
        if self.parameter is not None:
            text += f"; the first gradient to show it there is that of {self.parameter}"
        return text


@dataclass
class NanWatch:
    """What one rank notes from the first forward after an update to the next."""

    # The sum of x - x over this rank's losses: 0, or NaN. None where all are known to be finite.
    loss: Tensor | None = None
    _outputs: list[tuple[int, int, Tensor]] = field(default_factory=list)
    _losses: list[tuple[int, int, Tensor]] = field(default_factory=list)
    _buckets: list[tuple[int, Tensor]] = field(default_factory=list)
    _seen: tuple[int, int, int] = (0, 0, 0)  # notes from before the last turn
    before: NanWatch | None = None  # of the step before, where its verdict is not in yet

    def turn(self, *, behind: bool) -> None:
        """Another batch enters while the one before is not decided: notes of both are kept.

        ``behind``: it belongs to the update of the one before. If not, this rank has given its word
        on that one, whose losses say nothing of the next.
        """
        if not behind:
            self.loss = None
        outputs, losses, buckets = self._seen
        del self._outputs[:outputs], self._losses[:losses], self._buckets[:buckets]
        self._seen = (len(self._outputs), len(self._losses), len(self._buckets))

    def begin(self, *, keep: bool = False) -> None:
        """A step begins; ``keep`` what was noted of the one before."""
        old = NanWatch(self.loss, self._outputs, self._losses, self._buckets)
        self.before = old if keep else None
        self._seen = (0, 0, 0)
        self.loss = None
        self._outputs, self._losses, self._buckets = [], [], []

    def note_output(self, stage: int, microbatch: int, tensors: Iterable[Tensor]) -> None:
        """Of a forward that other stages go on with."""
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                self._outputs.append((stage, microbatch, _total(tensor)))

    def note_loss(
        self,
        stage: int,
        microbatch: int,
        loss: Tensor | float,
        gradients: StageGradients | None,
    ) -> None:
        """Of a microbatch, as the user's step returned it; a number where that is at hand."""
        if isinstance(loss, float) and math.isfinite(loss):
            return  # Nothing that ``findings`` could name.
        value = torch.as_tensor(loss).detach().reshape(()).to(torch.float64)
        self._losses.append((stage, microbatch, value))
        nothing = value - value
        self.loss = nothing if self.loss is None else self.loss + nothing
        if gradients is not None:
            gradients.taint(nothing)

    def note_bucket(self, stage: int, bucket: int, parts: Sequence[Tensor]) -> None:
        """Of this rank's own gradients, before others are added."""
        self._buckets.extend((stage, _total(part)) for part in parts)

    def findings(
        self,
        where: Coordinates,
        *,
        stages: Mapping[int, Mapping[str, Tensor]],
        gradients: Mapping[str, Tensor],
    ) -> list[Finding]:
        """What is not finite on this rank; waits for the device.

        ``stages`` have their parameters in the order of the forward, ``gradients`` are what is left
        after the reduction.
        """
        rank = where.global_rank(where.pp_rank, where.dp_rank, where.tp_rank)
        host = socket.gethostname()
        found: list[Finding] = []
        for stage, named in stages.items():
            bad = [name for name, weight in named.items() if not_finite(weight) is not None]
            for name in bad[:1]:
                was = not_finite(named[name]) or "nan"
                found.append(Finding("weight", was, rank, host, where, stage, None, name,
                                     len(bad), position=stage))  # fmt: skip
        concerned = {
            stage: [name for name in reversed(list(named)) if not_finite(gradients.get(name))]
            for stage, named in stages.items()
        }
        total = sum(len(names) for names in concerned.values())
        noted = [("output", entry) for entry in self._outputs]
        for kind, (stage, microbatch, item) in noted + [("loss", entry) for entry in self._losses]:
            value = not_finite(item)
            if value is not None:
                names = concerned.get(stage, [])
                found.append(
                    Finding(kind, value, rank, host, where, stage, microbatch,
                            names[0] if names else None, len(names), position=stage)
                )  # fmt: skip
        for stage, names in concerned.items():
            if names:
                sums = [item for at, item in self._buckets if at == stage]
                own = not sums or any(not_finite(item) is not None for item in sums)
                value = not_finite(gradients[names[0]]) or "nan"
                # Backwards go from the last stage to the first.
                found.append(Finding("gradient", value, rank, host, where, stage, None, names[0],
                                     total, own, position=-stage))  # fmt: skip
        if not found:
            first = next(iter(stages), 0)
            found.append(Finding("norm", "inf", rank, host, where, first))
        return found


def left_by_hooks(
    where: Coordinates,
    stages: Mapping[int, Mapping[str, nn.Parameter]],
    updated: Callable[[nn.Parameter], Iterable[Tensor]],
    counted: Collection[int],
) -> list[Finding]:
    """The first gradient that people's hooks have left not finite; waits for the device.

    ``updated`` is what an optimizer updates in place of a parameter, and ``counted`` are the
    identities of what it does.
    """
    rank = where.global_rank(where.pp_rank, where.dp_rank, where.tp_rank)
    for stage, named in stages.items():
        for name, parameter in named.items():
            for each in updated(parameter):
                value = not_finite(each.grad) if id(each) in counted else None
                if value is not None:
                    host = socket.gethostname()
                    return [Finding("hook", value, rank, host, where, stage, None, name, 1)]
    return []


def first_finding(findings: Iterable[Finding]) -> Finding:
    """The one that explains the others; the same on all ranks."""

    def key(item: Finding) -> tuple[int, int, int, int, int]:
        microbatch = item.microbatch or 0
        # A gradient that came with the reduction is another replica's.
        return (_ORDER.index(item.kind), not item.own, item.position, microbatch, item.rank)

    return min(findings, key=key)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every element is; waits for the device."""
    return all(not_finite(tensor) is None for tensor in tensors)


def not_finite(tensor: Tensor | None) -> str | None:
    """``nan`` or ``inf`` if it has such an element; waits for the device."""
    if tensor is None or tensor.is_meta:
        return None
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = (
            tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
        )
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return None
    total = float(tensor.sum(dtype=torch.float64))
    if math.isfinite(total):
        return None
    if bool(torch.isnan(tensor).any()):
        return "nan"
    return "inf" if bool(torch.isinf(tensor).any()) else None


def _total(tensor: Tensor) -> Tensor:
    """One number that is not finite if an element is not; left on the device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.sum(dtype=wide)
