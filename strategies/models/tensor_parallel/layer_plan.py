"""Plans of shardings for a module: declared by it, in a library's words, or by its layers' sizes.

``tensor_parallel_plan()`` maps module names (``*`` stands for any one part) to the styles here, to
words as transformers has them in its models' plans, or to torch's own parallel styles. Code that
declares a plan is written for shares; a plan by sizes, as one that the planner has found, is for
code that is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from strategies.errors import ModelError
from strategies.sharding_plan import LayerKind, LayerSharding, ShardingPlan

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Style = LayerSharding  # Without a name: the plan's key is the pattern.


def Column(block: int = 1, gather: bool = False) -> Style:  # noqa: N802 -- users' plans have it
    """A layer whose outputs are cut: each rank computes some of them.

    Args:
        block: Outputs that must stay together (the width of an attention head).
        gather: Whether every rank needs all outputs.
    """
    return LayerSharding("", "column", block=block, whole_output=gather)


def Row(block: int = 1) -> Style:  # noqa: N802
    """A layer whose inputs are cut, as a column layer leaves them; its outputs are summed.

    Args:
        block: Inputs that must stay together.
    """
    return LayerSharding("", "row", block=block, whole_input=False)


def Vocabulary() -> Style:  # noqa: N802
    """A table cut by token ids: an embedding, or the head.

    Outputs of a head stay cut: its user takes ``token_losses`` and ``most_probable``. A vocabulary
    that does not come out even is padded.
    """
    return LayerSharding("", "vocabulary", whole_output=False)


def Stream() -> Style:  # noqa: N802
    """A norm or dropout on the residual stream, which sequence parallelism cuts along time."""
    return LayerSharding("", "stream")


def Split() -> Style:  # noqa: N802
    """A module whose output begins the residual stream; sequence parallelism cuts it there."""
    return LayerSharding("", "split")


def Replicated(partial: bool = False) -> Style:  # noqa: N802
    """Every rank has the whole parameters; what modules without an entry do.

    Args:
        partial: Whether each rank uses them on its own share only (a norm of attention heads), so
            that their gradients have to be added up.
    """
    return LayerSharding("", "replicated", partial=partial)


_WORDS = {
    "colwise": Column(),
    "colwise_rep": Column(gather=True),
    "colwise_gather_output": Column(gather=True),
    "rowwise": Row(),
    "embedding_rowwise": Vocabulary(),
    "sequence_parallel": Stream(),
    "replicated": Replicated(),
    "replicated_with_grad_allreduce": Replicated(partial=True),
}


def read_style(name: str, given: Any) -> Style:
    """A plan's entry as one of the styles here: one itself, a word, or torch's in its usual layout.

    Raises:
        ModelError: It is none of them; names the entry.
    """
    if isinstance(given, LayerSharding):
        return given
    if isinstance(given, str) and given in _WORDS:
        return _WORDS[given]
    if isinstance(given, ColwiseParallel):
        return Column(gather=isinstance(given.output_layouts[0], Replicate))
    if isinstance(given, RowwiseParallel):
        return Vocabulary() if isinstance(given.input_layouts[0], Replicate) else Row()
    if isinstance(given, SequenceParallel):
        return Stream()
    words = ", ".join(map(repr, _WORDS))
    raise ModelError(
        f"tensor_parallel_plan() has {given!r} for {name}. Use Column(), Row(), Vocabulary(), "
        f"Stream() or Split() of strategies.models.tensor_parallel, or one of {words}."
    )


def declared_plan(module: nn.Module, tp: int) -> ShardingPlan | None:
    """The module's own ``tensor_parallel_plan()``; None where it has none.

    Raises:
        ModelError: It names nothing, or something that cannot be.
    """
    declare = getattr(module, "tensor_parallel_plan", None)
    given_plan = declare() if callable(declare) else None
    if given_plan is None:
        return None
    names = [name for name, _ in module.named_modules() if name]
    rows = []
    for pattern, given in given_plan.items():
        rows.append(replace(read_style(pattern, given), pattern=pattern))
        if not any(rows[-1].matches(name) for name in names):
            raise ModelError(
                f"tensor_parallel_plan() names {pattern!r}, and {type(module).__name__} has no "
                "module of that name. Use names as named_modules() gives them; * is one part."
            )
    return ShardingPlan(tp, tuple(rows), written_for_shares=True)


# --------------------------------------------------------------------------------------------------
# By names and sizes alone, for modules whose operators nobody can look at.
#
# Of the layers that one module holds, the last one is cut by inputs and those before it by outputs:
# queries, keys and values, then the projection behind them; the wide layers of an MLP, then the
# narrow one. In a sequence they alternate. What is cut in a wrong place costs messages, not
# numbers.


def plan_by_sizes(module: nn.Module, tp: int) -> ShardingPlan:
    """A row for each layer that is cut."""
    rows: list[LayerSharding] = []
    seen: set[int] = set()
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    for path, parent in module.named_modules():
        layers = []
        for own, layer in parent.named_children():
            name = f"{path}.{own}" if path else own
            if id(layer) in seen or not isinstance(layer._parameters.get("weight"), nn.Parameter):
                continue
            seen.add(id(layer))
            if isinstance(layer, nn.Embedding):
                if layer.num_embeddings >= 4 * tp:
                    rows.append(LayerSharding(name, "vocabulary", "embedding", 0))
            elif (sizes := _sizes(layer)) is not None:
                if id(layer.weight) in tables:
                    rows.append(LayerSharding(name, "vocabulary", "linear", 0, whole_output=False))
                else:
                    layers.append((name, layer, sizes))
        rows += _in_pairs(layers, tp, alternate=isinstance(parent, nn.Sequential | nn.ModuleList))
    return ShardingPlan(tp, tuple(rows))


def _in_pairs(
    layers: list[tuple[str, nn.Module, tuple[int, int]]], tp: int, *, alternate: bool
) -> list[LayerSharding]:
    rows = []
    for place, (name, layer, (inputs, outputs)) in enumerate(layers):
        kind: LayerKind = "conv" if isinstance(layer, CONVOLUTIONS) else "linear"
        by_inputs = place % 2 == 1 if alternate else place == len(layers) - 1 > 0
        if by_inputs and inputs % tp == 0:
            rows.append(LayerSharding(name, "row", kind, 1, whole_input=False))
        elif not by_inputs and outputs % tp == 0 and outputs >= 2 * tp:
            rows.append(LayerSharding(name, "column", kind, 0, whole_output=len(layers) == 1))
    return rows


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a layer that can be cut by both."""
    weight = layer._parameters["weight"]
    assert weight is not None
    if type(layer).__name__ == "Conv1D" and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    if isinstance(layer, nn.Linear) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1):
        return weight.shape[1], weight.shape[0]
    return None
