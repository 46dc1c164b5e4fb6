"""What a module's plan says about each of its layers.

``tensor_parallel_plan()`` maps module names (``*`` stands for any one part) to these. Words as
transformers has them in its models' plans, and torch's own parallel styles, say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strategies.errors import ModelError


@dataclass(frozen=True, slots=True)
class Column:
    """A linear layer whose outputs are cut: each rank computes some of them.

    Attributes:
        block: Outputs that must stay together (the width of an attention head).
        gather: Whether every rank needs all outputs.
    """

    block: int = 1
    gather: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A linear layer whose inputs are cut, as a column layer leaves them; its outputs are summed.

    Attributes:
        block: Inputs that must stay together.
    """

    block: int = 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A table cut by token ids: an embedding, or the head.

    Outputs of a head stay cut: its user takes ``token_losses`` and ``most_probable``. A vocabulary
    that does not come out even is padded.
    """


@dataclass(frozen=True, slots=True)
class Stream:
    """A norm or dropout on the residual stream, which sequence parallelism cuts along time."""


@dataclass(frozen=True, slots=True)
class Split:
    """A module whose output begins the residual stream; sequence parallelism cuts it there."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank has the whole parameters; what modules without an entry do.

    Attributes:
        partial: Whether each rank uses them on its own share only (a norm of attention heads), so
            that their gradients have to be added up.
    """

    partial: bool = False


Style = Column | Row | Vocabulary | Stream | Split | Replicated

_WORDS: dict[str, Style] = {
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
    """A plan's entry as one of the styles here.

    Args:
        name: The entry's key, for the message.
        given: A style of this module, a word, or one of torch's styles in its usual layout.

    Raises:
        ModelError: It is none of them.
    """
    if isinstance(given, Style):
        return given
    if isinstance(given, str) and given in _WORDS:
        return _WORDS[given]
    # Costs half a second that most runs have no use for.
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )
    from torch.distributed.tensor.placement_types import Replicate

    if isinstance(given, ColwiseParallel):
        return Column(gather=isinstance(given.output_layouts[0], Replicate))
    if isinstance(given, RowwiseParallel):
        return Vocabulary() if isinstance(given.input_layouts[0], Replicate) else Row()
    if isinstance(given, SequenceParallel):
        return Stream()
    words = ", ".join(map(repr, _WORDS))
    raise ModelError(
        f"tensor_parallel_plan() has {given!r} for {name}. Use Column(), Row(), Vocabulary(), "
        f"Stream() or Split() of strategies.runtime.tensor_parallel, or one of {words}."
    )
