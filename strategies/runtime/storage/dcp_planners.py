"""Planners of torch.distributed.checkpoint for pieces by name.

The stock planners pickle what is no tensor and put their plans together by collectives on the
training's process group. Here a rank's plan to write is made from what it holds alone (holders have
shared out what is to be written, see ``piece.own_share``), so it can be carried out in a thread,
and everything but tensors travels as JSON beside them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
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

from strategies.runtime.storage.part import Piece


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
