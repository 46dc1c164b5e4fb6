"""Puts a module's plan into effect, unit by unit: whole layers in, layers with shares out."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import operation_name, user_line
from strategies.models.tensor_parallel.regions import Entrance
from strategies.models.tensor_parallel.sharded_layers import (
    ColumnLinear,
    RowLinear,
    SequenceDropout,
    SplitOutput,
    Turned,
    VocabularyEmbedding,
    VocabularyShare,
)
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks
from strategies.sharding_plan import matches


class Sharding:
    """A module's plan and what has been done with it.

    Attributes:
        shards: Parameter name -> how it is cut; those that are not here are whole.
        partial: Names of whole parameters whose gradients have to be added up over the ranks.
    """

    def __init__(self, module: nn.Module, ranks: TensorRanks) -> None:
        """Reads the plan.

        Raises:
            ModelError: There is none, or it names nothing.
        """
        plan = getattr(module, "tensor_parallel_plan", None)
        if not callable(plan):
            raise ModelError(_refusal(module, ranks.size))
        self.ranks = ranks
        self.shards: dict[str, Shard] = {}
        self.partial: set[str] = set()
        self._styles: dict[str, Style] = {}
        # Of weights that are shares by now: several layers may use one.
        self._shares: dict[int, tuple[weakref.ref[nn.Parameter], Shard]] = {}
        self._turned: list[Turned] = []
        self._splits: list[SplitOutput] = []
        names = [name for name, _ in module.named_modules() if name]
        for pattern, given in plan().items():
            style = read_style(pattern, given)
            found = [name for name in names if matches(pattern, name)]
            if not found:
                raise ModelError(
                    f"tensor_parallel_plan() names {pattern!r}, and {type(module).__name__} has no "
                    "module of that name. Use names as named_modules() gives them; * is one part."
                )
            self._styles.update(dict.fromkeys(found, style))

    def apply(self, module: nn.Module, unit_name: str) -> None:
        """Cuts one unit, whose weights are there; their memory is free afterwards.

        Raises:
            ModelError: A layer does not come out even, or cannot be cut.
        """
        unit = module.get_submodule(unit_name)
        entrance = Entrance(self.ranks)
        inside = [name for name, _ in unit.named_modules(prefix=unit_name)]
        for name in inside:
            style = self._styles.get(name)
            if style is not None:
                layer = module.get_submodule(name)
                turned = self._cut(name, layer, style, entrance)
                if turned is not None:
                    self._turned.append(Turned(layer, turned))
        entrance.forget_after(unit)

    def finish(self, canonical: Mapping[str, str]) -> None:
        """Notes all names of tied weights: ``canonical`` gives the first of any name."""
        for name, shard in list(self.shards.items()):
            self.shards[canonical[name]] = shard
        self.partial = {canonical[name] for name in self.partial}
        self._shares.clear()

    def compute_whole(self, whole: bool) -> None:
        """Lets layers compute as they did before they were cut, or with shares again."""
        for turned in self._turned:
            turned.turn(back=whole)
        for split in self._splits:
            split.whole = whole

    def _cut(
        self, name: str, layer: nn.Module, style: Style, entrance: Entrance
    ) -> nn.Module | None:
        ranks = self.ranks
        if isinstance(style, Replicated | Stream | Split):
            return self._on_the_stream(name, layer, style)
        if isinstance(style, Vocabulary) and _is_plain(layer, nn.Embedding):
            assert isinstance(layer, nn.Embedding)
            self._check_embedding(name, layer)
            weight = self._share(f"{name}.weight", layer.weight, 0)
            shard = self.shards[f"{name}.weight"]
            return VocabularyEmbedding(weight, shard=shard, ranks=ranks, padding=layer.padding_idx)
        if not (isinstance(layer, nn.Linear) and _is_plain(layer, nn.Linear)):
            raise ModelError(
                f"tensor_parallel_plan() has {type(style).__name__}() for {name}, which is a "
                f"{type(layer).__name__}: only Linear layers are cut so (and an Embedding by "
                "Vocabulary()). Leave it out of the plan, or use tp=1."
            )
        if isinstance(style, Row):
            self._check_even(name, layer.in_features, style.block)
            weight = self._share(f"{name}.weight", layer.weight, 1)
            if ranks.sequence and layer.bias is not None:
                self.partial.add(f"{name}.bias")
            return RowLinear(weight, layer.bias, ranks=ranks)
        if isinstance(style, Column):
            self._check_even(name, layer.out_features, style.block)
        weight = self._share(f"{name}.weight", layer.weight, 0)
        bias = None if layer.bias is None else self._share(f"{name}.bias", layer.bias, 0)
        gathered = vocabulary = None
        if isinstance(style, Vocabulary):
            vocabulary = VocabularyShare(self.shards[f"{name}.weight"], ranks)
        elif style.gather:
            gathered = ranks
        return ColumnLinear(
            weight, bias, entrance=entrance, gathered=gathered, vocabulary=vocabulary
        )

    def _on_the_stream(
        self, name: str, layer: nn.Module, style: Replicated | Stream | Split
    ) -> nn.Module | None:
        if isinstance(style, Replicated):
            if style.partial:
                self.partial |= {f"{name}.{own}" for own, _ in layer.named_parameters()}
            return None
        if not self.ranks.sequence:
            return None
        if isinstance(style, Split):
            self._splits.append(SplitOutput(self.ranks))
            layer.register_forward_hook(self._splits[-1])
            return None
        self.partial |= {f"{name}.{own}" for own, _ in layer.named_parameters()}
        if isinstance(layer, nn.Dropout) and _is_plain(layer, nn.Dropout):
            return SequenceDropout(layer.p, ranks=self.ranks)
        return None

    def _share(self, name: str, whole: Tensor, dim: int) -> nn.Parameter:
        known = self._shares.get(id(whole))
        if not isinstance(whole, nn.Parameter) or type(whole.data) is not Tensor:
            raise ModelError(
                f"{name} is a {type(whole).__name__}, not a plain parameter. Declare "
                "tensor_parallel_plan() instead of cutting layers by hand."
            )
        if known is not None and known[0]() is whole:
            # The weight of another layer, cut already.
            self.shards[name] = known[1]
            return whole
        shard = Shard(dim, whole.shape[dim], self.ranks.size)
        # The same object: its hooks stay, and lists that have it.
        whole.data = shard.local(whole.detach(), self.ranks.rank)
        self.shards[name] = shard
        self._shares[id(whole)] = weakref.ref(whole), shard
        return whole

    def _check_even(self, name: str, size: int, block: int) -> None:
        parts = self.ranks.size
        blocks = size // block
        if size % block or blocks % parts:
            fit = max(n for n in range(1, parts + 1) if size % block == 0 and blocks % n == 0)
            of = "" if block == 1 else f" blocks of {block}"
            raise ModelError(
                f"tp={parts} does not divide the {blocks}{of} that {name} is cut into. "
                f"Try tp={fit}."
            )

    def _check_embedding(self, name: str, layer: nn.Embedding) -> None:
        if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            raise ModelError(
                f"{name} is an Embedding with max_norm, scale_grad_by_freq or sparse=True, which "
                "is not cut over ranks. Leave it out of tensor_parallel_plan()."
            )


class ShareReads(TorchFunctionMode):
    """Refuses operations on shares, in code that is written for whole weights."""

    def __init__(self, shares: Mapping[int, tuple[str, str]]) -> None:
        """``shares``: by identity of a parameter its name, and the degree that cuts it."""
        super().__init__()
        self._shares = shares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tensors((args, kwargs)):
            if id(leaf) in self._shares and operation_name(func) not in (
                "requires_grad",
                "is_leaf",
            ):
                name, degree = self._shares[id(leaf)]
                raise ModelError(
                    f"{user_line()}: {operation_name(func)} takes {name} outside of its unit, and "
                    f"this rank has a share of it. Take it in the forward of its unit, or in a "
                    f"hook (on_train_batch_end), which has all of it, or use {degree}=1."
                )
        return func(*args, **kwargs)


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer computes what torch's does, under whatever name."""
    return isinstance(layer, kind) and type(layer).forward is kind.forward


def _refusal(module: nn.Module, tp: int) -> str:
    return (
        f"tp={tp}, but {type(module).__name__} does not say how its layers are cut. Declare, "
        "beside pipeline_units(), a method tensor_parallel_plan(self) that returns module names "
        "and styles, as {'layers.*.query': 'colwise', 'layers.*.output': 'rowwise'}, or use tp=1."
    )


# -- styles: what a module's plan says about each of its layers ------------------------------------
#
# ``tensor_parallel_plan()`` maps module names (``*`` stands for any one part) to these. Words as
# transformers has them in its models' plans, and torch's own parallel styles, say the same.


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
    """A plan's entry as one of the styles here: one itself, a word, or torch's in its usual layout.

    Raises:
        ModelError: It is none of them; names the entry.
    """
    if isinstance(given, Style):
        return given
    if isinstance(given, str) and given in _WORDS:
        return _WORDS[given]
    # Costs half a second that most runs have no use for.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
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
        f"Stream() or Split() of strategies.models.tensor_parallel, or one of {words}."
    )
