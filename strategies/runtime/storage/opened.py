"""A verified checkpoint, open for reading: compared with a model, read as far as it is needed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from strategies.errors import CheckpointError
from strategies.manifest import VALUES, read_part, tree_file
from strategies.runtime.storage.part import Piece, as_piece, join, like, tensors_for
from strategies.runtime.storage.tensor_files import TensorReader

# --------------------------------------------------------------------------------------------------
# Planners of torch.distributed.checkpoint for pieces by name.
#
# The stock planners pickle what is no tensor and put their plans together by collectives on the
# training's process group. Here a rank's plan to write is made from what it holds alone (holders
# have shared out what is to be written, see ``piece.own_share``), so it can be carried out in a
# thread, and everything but tensors travels as JSON beside them.


class PieceSavePlanner(SavePlanner):
    """Writes every piece it is given."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._pieces: dict[str, Piece] = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                _write_item(name, box)
                for name, piece in self._pieces.items()
                for box in piece.boxes()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """All ranks' plans as they are, and the tensors that they make up together."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                known = tensors.setdefault(
                    item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
                )
                known.chunks.append(data.chunk)
        return all_plans, Metadata(state_dict_metadata=dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return _box_at(self._pieces[write_item.index.fqn], write_item.index).tensor


def _box_at(piece: Piece, index: MetadataIndex) -> Piece:
    offsets = None if index.offset is None else tuple(index.offset)
    return next(box for box in piece.boxes() if offsets in (None, box.offsets))


def _write_item(name: str, piece: Piece) -> WriteItem:
    chunk = piece.chunk
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.global_shape),
        ),
    )


class PieceLoadPlanner(LoadPlanner):
    """Reads the boxes of its pieces, from however many boxes they were written in."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self._pieces: Mapping[str, Piece] = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            written = self._metadata.state_dict_metadata[name]
            assert isinstance(written, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(
                name, written, [box.chunk for box in piece.boxes()]
            )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read without regard to each other."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never: there are tensors only."""
        raise TypeError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = _box_at(self._pieces[read_item.dest_index.fqn], read_item.dest_index).tensor
        for axis, start in enumerate(read_item.dest_offsets):
            part = part.narrow(axis, start, read_item.lengths[axis])
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The part was filled in place."""


# --------------------------------------------------------------------------------------------------
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

    def of_first(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What rank 0 has under keys that a rank's nested state lacks: people write some there."""
        if not set(read_part(self.path, self.manifest, tree_file(0))) - set(found):
            return {}
        first = self.read(rank=0, state={}, optimized={})
        return {key: value for key, value in first.items() if key not in found}

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
