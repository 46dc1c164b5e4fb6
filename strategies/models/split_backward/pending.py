"""The second half of a backward: the weight gradients that the first one left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from strategies.models.split_backward.autograd_graph import Graph, Node
from strategies.models.split_backward.recipe import (
    EdgeRecipe,
    Unit,
    swaps_last,
    takes_gradients_directly,
)
from strategies.models.split_backward.rule import (
    Saved,
    add_gradient,
    add_product,
    awaits_weights,
    is_plain,
    read_saved,
)

Ready = Callable[[nn.Parameter], None]


class PendingWeights:
    """What one stage and microbatch still owes to its parameters' gradients."""

    def __init__(self, deferred: Sequence[Deferred]) -> None:
        self._groups: list[_Group] | None = _group(deferred)
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
        operands = [deferred.unchanged() for deferred in members]
        return tuple(t for saved, incoming in operands for t in (incoming, *saved.tensors.values()))

    def run(self, ready: Ready | None = None) -> None:
        """Adds the weight gradients to ``parameter.grad`` and lets go of all that they needed.

        A ``.grad`` that is there is changed in place and stays the same tensor. ``ready`` is called
        once for every parameter that got a gradient, as soon as this microbatch's is complete. It
        stands in for the parameters' hooks that run after accumulation; without it, those run.

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
                    touched = group.add()
                elif ready is None:
                    # The engine carries the gradients to the leaves and calls their hooks.
                    torch.autograd.backward(*group.roots())
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

    def add(self) -> list[Tensor]:
        """Adds the only member's gradients by hand; returns the leaves."""
        (deferred,) = self.members
        saved, incoming = deferred.operands()
        rule = deferred.rule
        rest: list[_WeightEdge] = []
        for edge in deferred.edges:
            position = edge.recipe.position
            if rule.product is None or position == rule.bias:
                rest.append(edge)
                continue
            product = rule.product(saved, incoming, position)
            add_product(edge.leaves[0], product.turned() if edge.turned else product)
        if rest:
            found = rule.gradients(saved, incoming, [edge.recipe.position for edge in rest])
            for edge, gradient in zip(rest, found, strict=True):
                add_gradient(edge.leaves[0], gradient.mT if edge.turned else gradient)
        return list(self.leaves.values())

    def capture(self) -> list[Tensor]:
        """Lets the engine carry the gradients as far as the leaves; returns those that got one."""
        edges, gradients = self.roots()
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(edges, leaves, gradients, allow_unused=True)
        touched = []
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                add_gradient(leaf, gradient)
                touched.append(leaf)
        return touched

    def roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
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


def _group(deferred: Sequence[Deferred]) -> list[_Group]:
    """Splits into groups, in the order of each one's last member.

    Where the engine is needed for one contribution to a parameter, it gets all of them at once:
    hooks must see the sum, and what lies between may be shared and is freed on the way.
    """
    direct = [item.is_direct() for item in deferred]
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
                    # A leaf of this node may still lead to a third list.
                    for leaf in _leaves(deferred[member]):
                        if component_of.get(leaf) is small:
                            component_of[leaf] = large
                merged = large
            component_of[key] = merged
    for component in {id(component): component for component in found}.values():
        component.sort()
    return found


def _leaves(deferred: Deferred) -> list[int]:
    return [id(leaf) for edge in deferred.edges for leaf in edge.leaves]


# -- a heavy node's weight gradients, from the plan until they are computed ------------------------


class _WeightEdge(NamedTuple):
    """Where a deferred gradient goes: to ``child``, and the ``leaves`` below.

    The child is never the heavy node, whose descendants are the rest of the graph.

    Attributes:
        turned: Whether the operand is the only leaf turned.
        direct: Whether the gradient can be added to that leaf without the engine.
    """

    recipe: EdgeRecipe
    child: Node
    leaves: tuple[Tensor, ...]
    turned: bool
    direct: bool

    @property
    def shape(self) -> torch.Size:
        if self.direct and not self.turned:
            return self.leaves[0].shape
        shape: torch.Size = self.child._input_metadata[self.recipe.number].shape
        return shape


class Deferred:
    """A heavy node whose weight gradients wait.

    Attributes:
        node: None once the engine has passed it.
        edges: To the weights, and to the bias.
        saved: What the gradients need; None until it has been read.
        incoming: The gradient of the node's output, from the engine.
    """

    __slots__ = ("_names", "_versions", "edges", "incoming", "node", "rule", "saved")

    def __init__(self, unit: Unit, graph: Graph) -> None:
        self.node: Node = graph.nodes[unit.node]
        self.rule = unit.rule
        self._names = unit.names
        self.edges = tuple(_edge(recipe, graph) for recipe in unit.edges)
        self.saved: Saved | None = None
        self.incoming: Tensor | None = None
        self._versions: tuple[int, ...] = ()

    def read(self) -> Saved:
        edges = self.edges
        shaped = self.rule.shaped
        self.saved = read_saved(
            self.node,
            self.rule,
            self._names,
            shapes={e.recipe.position: e.shape for e in edges if e.recipe.position in shaped},
            flipped=[e.recipe.position for e in edges if e.recipe.flipped],
        )
        return self.saved

    def wait(self) -> None:
        """Tells what the node has saved that its weight gradients will be computed elsewhere."""
        awaits_weights(self.node, self._names)

    def catch(self, incoming: Tensor) -> None:
        """Keeps the gradient that has arrived; nobody may change it or the saved tensors now."""
        saved = self.read() if self.saved is None else self.saved
        self.incoming = incoming
        self._versions = _versions(saved, incoming)

    def operands(self) -> tuple[Saved, Tensor]:
        """What the gradients are computed from; errors as for ``unchanged``."""
        saved, incoming = self.unchanged()
        return saved.complete(), incoming

    def unchanged(self) -> tuple[Saved, Tensor]:
        """What is kept for them.

        Raises:
            RuntimeError: Something has changed it in place.
        """
        saved, incoming = self.saved, self.incoming
        assert saved is not None
        assert incoming is not None
        versions = _versions(saved, incoming)
        if versions != self._versions:
            names = ["the incoming gradient", *saved.tensors]
            pairs = zip(names, self._versions, versions, strict=True)
            changed = ", ".join(name for name, before, now in pairs if before != now)
            raise RuntimeError(
                f"a weight gradient of {self.rule.node} needs a tensor that was changed in place "
                f"after the input gradients had been computed ({changed}): buffers of a microbatch "
                "must be left alone until its W has run"
            )
        return saved, incoming

    def is_direct(self) -> bool:
        """Whether the gradients can be added to their parameters without the engine."""
        assert self.saved is not None
        assert self.incoming is not None
        return (
            all([edge.direct for edge in self.edges])
            and is_plain(self.incoming)
            and all([is_plain(tensor) for tensor in self.saved.tensors.values()])
        )


def _versions(saved: Saved, incoming: Tensor) -> tuple[int, ...]:
    return (incoming._version, *[t._version for t in saved.tensors.values()])


def _edge(recipe: EdgeRecipe, graph: Graph) -> _WeightEdge:
    leaves = tuple([graph.nodes[number].variable for number in recipe.leaves])
    turned, direct = recipe.turned, recipe.simple
    for number in recipe.turns:
        turned = not turned
        direct = direct and swaps_last(graph.nodes[number])
    return _WeightEdge(
        recipe,
        graph.nodes[recipe.child],
        leaves,
        turned,
        direct and takes_gradients_directly(leaves[0]),
    )


class Meanwhile:
    """Collects weight gradients during a backward; ``run`` computes what has been collected.

    A backward that has to wait for a collective (the sum of an input's gradient over
    tensor-parallel ranks) has work at hand that nothing waits for: the weight gradients of the
    layers that it has just passed. The engine would have computed them before it began.
    """

    def __init__(self) -> None:
        self._alone: frozenset[int] = frozenset()
        self._waiting: list[Deferred] = []

    def expect(self, deferred: Iterable[Deferred]) -> None:
        """Tells what the backward will pass. Weights of several layers are left to the end."""
        users: dict[int, int] = {}
        items = list(deferred)
        for item in items:
            for leaf in {id(leaf) for edge in item.edges for leaf in edge.leaves}:
                users[leaf] = users.get(leaf, 0) + 1
        self._alone = frozenset(
            id(item)
            for item in items
            if all(users[id(leaf)] == 1 for edge in item.edges for leaf in edge.leaves)
        )

    def take(self, item: Deferred) -> bool:
        """Keeps a passed node's weight gradients for the next ``run``, if they can go alone."""
        if id(item) not in self._alone or not item.is_direct():
            return False
        self._waiting.append(item)
        return True

    def run(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            PendingWeights(waiting).run()
