"""A plan of how a model's layers are cut over tensor-parallel ranks: found, priced, and executed.

A module declares it, in its own or a library's words, or layers' sizes decide
(``models/tensor_parallel/layer_plan.py``), or the planner finds it (``planner/shardings``); layers
are cut by it, reports show it. So it is data alone, without torch: a row per pattern of module
names.

Between layers, ranks hold a value whole or a share of it, and run a module's own code on that. So
all messages are a layer's: where it wants its input, and where it leaves its output.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from strategies.errors import ModelError

StyleName = Literal["column", "row", "vocabulary", "replicated", "stream", "split"]

CUT = frozenset({"column", "row", "vocabulary"})  # styles that leave a rank a share of the weights
LayerKind = Literal["linear", "conv", "embedding", "norm", "attention", "parameter", "other"]


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """How the layers of one name pattern are cut.

    Attributes:
        pattern: Name as ``named_modules()`` gives it; ``*`` stands for any one part.
        style: ``column``: outputs are cut, each rank computes some. ``row``: inputs are cut,
            outputs are summed over ranks. ``vocabulary``: a table cut by ids; a classifier's
            outputs stay cut, and its loss is taken from shares. ``replicated``: whole weights.
            With sequence parallelism, ``stream``: a norm or dropout on the residual stream, which
            is cut along time; ``split``: its output begins that stream.
        kind: What the layer is.
        split_dim: Dimension of ``weight`` that is cut, None where none is: a Linear's or a
            convolution's 0 by column and 1 by row, an Embedding's 0 by vocabulary and 1 by column,
            the only one of a norm or of a bias.
        block: Indices of that dimension which stay together: a head's width.
        segments: Equal parts that lie side by side along it, each cut by itself: 3 where one
            matrix makes queries, keys and values.
        whole_input: Whether the layer is given the whole value. Where a ``column`` is given a share
            (a norm of channels, a convolution per group), rank r's inputs belong to its outputs.
            Where a ``row`` is given the whole, it takes its share.
        whole_output: Whether it leaves the whole value: a ``row`` does, a ``column`` that gathers
            too.
        partial: A ``replicated`` layer that is used on a share of a value (a norm of heads): its
            gradients are added up over the ranks.
        count: Layers of that pattern.
        forward_bytes: What a rank sends for all of them in a microbatch's forward.
        backward_bytes: The same for its backward.
        weight_bytes: Of all their weights, on one rank.
        seconds: Of a rank in a microbatch, forward and backward, messages included.
    """

    pattern: str
    style: StyleName
    kind: LayerKind = "other"
    split_dim: int | None = None
    block: int = 1
    segments: int = 1
    whole_input: bool = True
    whole_output: bool = True
    partial: bool = False
    count: int = 1
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    seconds: float = 0.0

    def matches(self, name: str) -> bool:
        return matches(self.pattern, name)


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """How a model is cut over ``tp`` ranks, and what that comes to.

    Attributes:
        tp: Ranks.
        layers: One row per pattern; a layer that no row names is replicated. Of rows that name
            the same layer the last one holds.
        rows: Of the microbatch that was priced.
        seconds: Of a rank in a microbatch, forward and backward, messages included.
        seconds_whole: The same at tp=1.
        weight_bytes: Of all weights, on one rank.
        weight_bytes_whole: The same at tp=1.
        unknown: (operation, where, seconds) that have no known shardings: their inputs are whole.
        reasons: Sentences about the plan as a whole.
        written_for_shares: Whether the module's code takes what a rank has of a value; else it
            sees whole shapes everywhere.
    """

    tp: int
    layers: tuple[LayerSharding, ...]
    rows: int = 1
    seconds: float = 0.0
    seconds_whole: float = 0.0
    weight_bytes: float = 0.0
    weight_bytes_whole: float = 0.0
    unknown: tuple[tuple[str, str, float], ...] = ()
    reasons: tuple[str, ...] = ()
    written_for_shares: bool = False

    @property
    def worth(self) -> bool:
        """Whether anything is cut; if not, tp=1 is as good."""
        return any(layer.style in CUT for layer in self.layers)

    def layer(self, name: str) -> LayerSharding | None:
        """The last row that names a module: a declared plan's later rows win."""
        return next((layer for layer in reversed(self.layers) if layer.matches(name)), None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of names means this one; ``*`` is any one part.

    >>> matches("layers.*.mlp", "layers.3.mlp"), matches("layers.*", "layers.3.mlp")
    (True, False)
    """
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def plan_from_json(content: Mapping[str, Any]) -> ShardingPlan:
    """What ``to_json`` has written.

    Raises:
        ModelError: It is something else.
    """
    try:
        layers = tuple(LayerSharding(**entry) for entry in content["layers"])
        unknown = tuple((str(op), str(at), float(cost)) for op, at, cost in content["unknown"])
        reasons = tuple(map(str, content["reasons"]))
        return ShardingPlan(**{**content, "layers": layers, "unknown": unknown, "reasons": reasons})
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(f"a damaged sharding plan ({type(error).__name__}: {error})") from error
