"""The second half of a backward: the weight gradients that the first one left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from strategies.runtime.split_backward.accumulate import add_gradient, add_product
from strategies.runtime.split_backward.deferred import Deferred, WeightEdge

Ready = Callable[[nn.Parameter], None]


class PendingWeights:
    """What one stage and microbatch still owes to its parameters' gradients."""

    def __init__(self, deferred: Sequence[Deferred], *, exact: bool, through_engine: bool) -> None:
        self._exact = exact
        self._groups: list[_Group] | None = _group(deferred, through_engine)
        self._left: dict[int, int] = {}
        for group in self._groups:
            for key in group.leaves:
                self._left[key] = self._left.get(key, 0) + 1

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The leaves that ``run`` will add to, in the order of their first contribution."""
        found = {key: leaf for group in self._groups or () for key, leaf in group.leaves.items()}
        return tuple(found.values())

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What ``run`` will compute from: saved operands, and the gradients that met them."""
        members = [deferred for group in self._groups or () for deferred in group.members]
        operands = [deferred.operands() for deferred in members]
        return tuple(t for saved, incoming in operands for t in (incoming, *saved.tensors.values()))

    def run(self, ready: Ready | None = None) -> None:
        """Adds the weight gradients to ``parameter.grad`` and lets go of all that they needed.

        A ``.grad`` that is there is changed in place and stays the same tensor.

        Args:
            ready: Called once for every parameter that got a gradient, as soon as this
                microbatch's is complete. It stands in for the parameters' hooks that run after
                accumulation; without it, those run.

        Raises:
            RuntimeError: A tensor that is needed here was changed in place since the first half,
                or this is the second call.
        """
        if self._groups is None:
            raise RuntimeError("these weight gradients have been computed already")
        # The last group first, so that each can be dropped as it is done.
        waiting, self._groups = self._groups[::-1], None
        left, self._left = self._left, {}
        with torch.no_grad(), _without_autocast(waiting):
            while waiting:
                group = waiting.pop()
                if group.direct:
                    touched = group.add(exact=self._exact)
                elif ready is None:
                    group.backward()
                    continue
                else:
                    touched = group.capture()
                for leaf in touched:
                    left[id(leaf)] -= 1
                    if left[id(leaf)] == 0:
                        _finish(leaf, ready)


def _finish(leaf: Tensor, ready: Ready | None) -> None:
    if ready is not None:
        ready(leaf)  # type: ignore[arg-type]  # any other leaf is the caller's, too
        return
    hooks: Any = leaf
    for hook in tuple((hooks._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


def _without_autocast(groups: Sequence[_Group]) -> AbstractContextManager[Any]:
    """Gradients are computed in the types of the forward, whatever surrounds the call."""
    for group in groups:
        for deferred in group.members:
            assert deferred.incoming is not None
            device = deferred.incoming.device.type
            if torch.is_autocast_enabled(device):
                return torch.autocast(device, enabled=False)
    return nullcontext()


class _Group:
    """Heavy nodes that share parameters, or a single one that can do without the engine."""

    def __init__(self, members: list[Deferred], *, direct: bool) -> None:
        self.members = members
        self.direct = direct
        self.leaves = {
            id(leaf): leaf
            for deferred in members
            for edge in deferred.edges
            for leaf in edge.leaves
        }

    def add(self, *, exact: bool) -> list[Tensor]:
        """Adds the only member's gradients by hand; returns the leaves."""
        (deferred,) = self.members
        saved, incoming = deferred.operands()
        rule = deferred.rule
        rest: list[WeightEdge] = []
        for edge in deferred.edges:
            position = edge.recipe.position
            if rule.product is None or position == rule.bias:
                rest.append(edge)
                continue
            product = rule.product(saved, incoming, position)
            add_product(edge.leaves[0], product.turned() if edge.turned else product, exact=exact)
        if rest:
            found = rule.gradients(saved, incoming, [edge.recipe.position for edge in rest])
            for edge, gradient in zip(rest, found, strict=True):
                add_gradient(edge.leaves[0], gradient.mT if edge.turned else gradient)
        return list(self.leaves.values())

    def backward(self) -> None:
        """Lets the engine carry the gradients to the leaves; it calls their hooks."""
        edges, gradients = self._roots()
        torch.autograd.backward(edges, gradients)

    def capture(self) -> list[Tensor]:
        """Lets the engine carry the gradients as far as the leaves; returns those that got one."""
        edges, gradients = self._roots()
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(edges, leaves, gradients, allow_unused=True)
        touched = []
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                add_gradient(leaf, gradient)
                touched.append(leaf)
        return touched

    def _roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        self.members.reverse()
        while self.members:
            deferred = self.members.pop()
            saved, incoming = deferred.operands()
            positions = [edge.recipe.position for edge in deferred.edges]
            gradients.extend(deferred.rule.gradients(saved, incoming, positions))
            edges.extend(GradientEdge(edge.child, edge.recipe.number) for edge in deferred.edges)
        return edges, gradients


def _group(deferred: Sequence[Deferred], through_engine: bool) -> list[_Group]:
    """Splits into groups, in the order of each one's last member.

    Where the engine is needed for one contribution to a parameter, it gets all of them at once:
    hooks must see the sum, and what lies between may be shared and is freed on the way.
    """
    direct = [not through_engine and item.is_direct() for item in deferred]
    if all(direct):
        return [_Group([item], direct=True) for item in deferred]
    places = _components(deferred)
    groups: list[_Group] = []
    for last, (item, component) in enumerate(zip(deferred, places, strict=True)):
        if all(direct[place] for place in component):
            groups.append(_Group([item], direct=True))
        elif component[-1] == last:
            groups.append(_Group([deferred[place] for place in component], direct=False))
    return groups


def _components(deferred: Sequence[Deferred]) -> list[list[int]]:
    """For each heavy node the places of all that it shares parameters with, over any steps."""
    component_of: dict[int, list[int]] = {}
    found: list[list[int]] = []
    for place, item in enumerate(deferred):
        merged = [place]
        found.append(merged)
        for key in _leaves(item):
            other = component_of.get(key)
            if other is not None and other is not merged:
                # The smaller list's members are told of the larger one.
                large, small = (merged, other) if len(merged) > len(other) else (other, merged)
                large.extend(small)
                for member in small:
                    found[member] = large
                    component_of.update(dict.fromkeys(_leaves(deferred[member]), large))
                merged = large
            component_of[key] = merged
    for component in {id(component): component for component in found}.values():
        component.sort()
    return found


def _leaves(deferred: Deferred) -> list[int]:
    return [id(leaf) for edge in deferred.edges for leaf in edge.leaves]
