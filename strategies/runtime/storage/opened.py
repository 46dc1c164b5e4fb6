"""A verified checkpoint, open for reading: compared with a model, read as far as it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from strategies.errors import CheckpointError
from strategies.manifest import VALUES, read_part, tree_file
from strategies.runtime.storage.dcp_planners import PieceLoadPlanner
from strategies.runtime.storage.part import Piece, as_piece, join, like, tensors_for
from strategies.runtime.storage.tensor_files import TensorReader

_MODEL = "model:"
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose files have been verified."""

    path: Path
    manifest: Mapping[str, Any]
    reader: TensorReader
    metadata: Metadata  # which tensors there are
    values: Mapping[str, Any]  # what is no tensor in the state of model and optimizers

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> Opened:
        """Raises CheckpointError where it is not as it is written."""
        reader = TensorReader(path, manifest)
        values = read_part(path, manifest, VALUES)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path / VALUES} must be a JSON object.")
        return cls(path, manifest, reader, reader.read_metadata(), values)

    def misfit(self, state: Mapping[str, Any], *, parameters: set[str], strict: bool) -> str | None:
        """Why this is the checkpoint of another model, with the names that differ; None if not.

        ``state`` is what this rank wants, ``parameters`` are names of the whole model. With
        ``strict`` names must agree; shapes must in any case.
        """
        written = self.manifest["metadata"].get("parameters")
        if strict and written is not None and not set(written) <= parameters:
            more = sorted(set(written) - parameters)
            return (
                f"{self.path} is a checkpoint of another model: it has {len(more)} parameters that "
                f"this one lacks: {shortened(more)}. Use the model it was written with."
            )
        names = set(self.whole_names())
        missing = sorted(set(state) - names)
        if missing and strict:
            return (
                f"{self.path} is a checkpoint of another model: it lacks {len(missing)} of "
                f"{len(state)} names: {shortened(missing)}. Use the model it was written with."
            )
        shapes = []
        for name, value in state.items():
            found = self.metadata.state_dict_metadata.get(_MODEL + name)
            if isinstance(found, TensorStorageMetadata) and isinstance(value, Tensor | Piece):
                shape = as_piece(value).global_shape
                if tuple(found.size) != shape:
                    shapes.append(f"{name} is {list(found.size)} there and {list(shape)} here")
        if shapes:
            return (
                f"{self.path} is a checkpoint of another model: {shortened(shapes)}. Use the model "
                "it was written with."
            )
        return None

    def read(
        self, *, rank: int, state: Mapping[str, Any], optimized: Mapping[str, Tensor | Piece]
    ) -> dict[str, Any]:
        """One rank's nested state; nothing but what it needs is read.

        Args:
            rank: Whose tree to take (loops, callbacks, schedulers, generators).
            state: Names of the module's state, with the boxes that are wanted.
            optimized: Parameters whose optimizer state is wanted.
        """

        def model_of(name: str) -> Any:
            return (state if name.startswith(_MODEL) else optimized).get(name.partition(":")[2])

        wanted, known = set(state), set(optimized)
        names = tensors_for(
            self.metadata.state_dict_metadata, rank=rank, wanted=wanted, optimized=known
        )
        pieces = {name: self._target(name, model_of(name)) for name in names}
        self._fill(pieces)
        tensors = {}
        for name, piece in pieces.items():
            model = model_of(name)
            if isinstance(model, Tensor) and tuple(model.shape) == piece.global_shape:
                tensors[name] = like(model, piece.tensor)
            else:
                tensors[name] = piece.tensor
        tree = read_part(self.path, self.manifest, tree_file(rank))
        try:
            found = join(
                tree, rank=rank, tensors=tensors, values=self.values, wanted=wanted, optimized=known
            )
            flaw = strange_key(found)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            flaw = f"{type(error).__name__}: {error}"
        if flaw is not None:
            raise CheckpointError(
                f"{self.path / tree_file(rank)} or {VALUES} is not as training writes it "
                f"({flaw}). Use an earlier checkpoint."
            )
        return found

    def whole_names(self) -> list[str]:
        """Of the whole model's state, tensors and values."""
        there = (*self.metadata.state_dict_metadata, *self.values)
        return [name.removeprefix(_MODEL) for name in there if name.startswith(_MODEL)]

    def whole_model(self) -> dict[str, Tensor]:
        names = [name for name in self.metadata.state_dict_metadata if name.startswith(_MODEL)]
        pieces = {name: self._target(name, None) for name in names}
        self._fill(pieces)
        return {name.removeprefix(_MODEL): piece.tensor for name, piece in pieces.items()}

    def _target(self, name: str, model: Any) -> Piece:
        """An empty piece: of the same box as the model's tensor, if that has the same shape."""
        found = self.metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata)
        shape = tuple(found.size)
        sizes, offsets, strips = shape, (0,) * len(shape), None
        if isinstance(model, Tensor | Piece):
            own = as_piece(model)
            if own.global_shape == shape:
                sizes, offsets, strips = own.sizes, own.offsets, own.strips
        empty = torch.empty(sizes, dtype=found.properties.dtype)
        return Piece(empty, shape, offsets, strips=strips)

    def _fill(self, pieces: Mapping[str, Piece]) -> None:
        planner = PieceLoadPlanner()
        planner.set_up_planner(dict(pieces), self.metadata, is_coordinator=True)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        self.reader.read_data(planner.finish_plan(plan), planner).wait()


def shortened(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def strange_key(checkpoint: Mapping[str, Any]) -> str | None:
    """An entry that is of another type than Lightning writes, and relies on; None if all are."""
    kinds = _KINDS.items()
    return next((k for k, kind in kinds if not isinstance(checkpoint.get(k, kind()), kind)), None)


# What Lightning collects, as far as its own code relies on it.
_KINDS: Mapping[str, type] = {
    "callbacks": dict, "epoch": int, "global_step": int, "loops": dict, "lr_schedulers": list,
    "optimizer_states": list,
}  # fmt: skip
