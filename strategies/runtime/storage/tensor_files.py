"""Storage of torch.distributed.checkpoint: a hashed safetensors file per rank, and a JSON index.

DCP's own storage pickles its ``.metadata``, which would be executed at every load, and its Hugging
Face storage (hf_storage.py, torch 2.13) takes one box per tensor and file, takes shapes from the
boxes that happen to be there, and hashes and syncs nothing. Here the index says which tensors there
are, so a missing box is noticed, and safetensors gives slices without reading the rest.

The file is written here and not by ``safetensors.torch.save_file``, which would need the whole file
to be read again for its hash, and holds the interpreter's lock while it writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from strategies.errors import CheckpointError
from strategies.manifest import TENSORS, read_part

_ALIGNMENT = 8
_SHOWN = 60

# Names of the safetensors format.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorWriter(StorageWriter):
    """Writes one rank's pieces into one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entry: dict[str, Any] | None = None  # hash and size of the file, once it is written

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        header: dict[str, Any] = {}
        results = []
        begin = 0
        # Wide types first: then every tensor of the file is aligned.
        items = sorted(plan.items, key=lambda item: -_data(item).properties.dtype.itemsize)
        for item in items:
            data = _data(item)
            sizes = list(data.chunk.sizes)
            key = _key(item.index.fqn, data.chunk, data.size)
            size = math.prod(sizes) * data.properties.dtype.itemsize
            header[key] = {
                "dtype": dtype_name(data.properties.dtype),
                "shape": sizes,
                "data_offsets": [begin, begin + size],
            }
            begin += size
            row = [
                item.index.fqn, header[key]["dtype"], list(data.size), self._path.name, key,
                list(data.chunk.offsets), sizes,
            ]  # fmt: skip
            results.append(WriteResult(item.index, size, row))

        def blocks() -> Iterator[Any]:
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % _ALIGNMENT)
            yield len(text).to_bytes(8, "little")
            yield text
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                yield _bytes_of(tensor)

        self.entry = write_durably(self._path, blocks())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        rows = [result.storage_data for rank in results for result in rank]
        write_index(self._path.parent, rows)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders of a file system."""
        return "://" not in str(checkpoint_id)


class TensorReader(StorageReader):
    """Reads slices of a committed checkpoint's files, which somebody has verified.

    Only what the manifest names is opened, and only what fits into it is believed.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files: Mapping[MetadataIndex, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = read_part(self._folder, self._manifest, TENSORS)
        flaw = _flaw(tensors, self._manifest["files"])
        if flaw is not None:
            raise CheckpointError(
                f"{self._folder / TENSORS} is not as this program writes it: {flaw}. "
                "Use an earlier checkpoint."
            )
        state: dict[str, Any] = {}
        files: dict[MetadataIndex, tuple[str, str]] = {}
        for name, (dtype, shape, boxes) in tensors.items():
            chunks = []
            for file, key, offsets, sizes in boxes:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                files[MetadataIndex(name, offsets)] = (file, key)
            state[name] = TensorStorageMetadata(
                TensorProperties(dtype=_DTYPES[dtype]), torch.Size(shape), chunks
            )
        return Metadata(state_dict_metadata=state, storage_data=files)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._files = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            file, key = self._files[item.storage_index]
            by_file[file].append((key, item))
        for file, wanted in by_file.items():
            path = self._folder / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for key, item in wanted:
                        _read(opened, key, item, planner)
            except (OSError, SafetensorError, *_MISFITS) as error:
                said = str(error)[:_MOST_SAID]  # names in the index can be of any length
                raise CheckpointError(f"{path} cannot be read: {said}.") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return TensorWriter.validate_checkpoint_id(checkpoint_id)


def _read(opened: Any, key: str, item: ReadItem, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item)
    stored = opened.get_slice(key)
    if _DTYPES.get(stored.get_dtype()) != target.dtype:
        raise TypeError(f"{key} is {stored.get_dtype()} there, and {target.dtype} in {TENSORS}")
    if item.lengths:
        place = tuple(
            slice(start, start + length)
            for start, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
        found = stored[place]
    else:
        found = opened.get_tensor(key)  # a scalar has no slices
    if found.shape != target.shape:
        raise ValueError(f"{key} has another shape there than in {TENSORS}")
    target.detach().copy_(found)
    planner.commit_tensor(item, target)


_MOST_SAID = 300
# What reading raises where a file holds something else than the index says.
_MISFITS = (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def _flaw(tensors: Any, files: Mapping[str, Any]) -> str | None:
    """What in an index is not as it is written, in words; None if all is."""
    if not isinstance(tensors, dict):
        return "it must be an object"
    held: dict[str, int] = defaultdict(int)
    for name, entry in tensors.items():
        try:
            dtype, shape, boxes = entry
            if dtype not in _DTYPES or not _are_sizes(shape):
                return f"{name} has no such type or shape: {str(entry[:2])[:_SHOWN]}"
            elements = 0
            for file, key, offsets, sizes in boxes:
                if file not in files or not file.endswith(".safetensors"):
                    return f"{name} is in {str(file)[:_SHOWN]}, which the manifest does not name"
                inside = _are_sizes(offsets) and _are_sizes(sizes) and isinstance(key, str)
                ends = [a + n <= end for a, n, end in zip(offsets, sizes, shape, strict=True)]
                if not (inside and all(ends)):
                    return f"{name} has a piece outside of its shape"
                elements += math.prod(sizes)
                held[file] += math.prod(sizes) * _DTYPES[dtype].itemsize
            if elements != math.prod(shape):
                return f"{name} has {elements:,} of {math.prod(shape):,} elements"
        except (TypeError, ValueError):
            return f"{name} is no [type, shape, pieces]"
    for file, size in held.items():
        if size > files[file]["bytes"]:
            return f"it finds {size:,} bytes in {file}, which has {files[file]['bytes']:,}"
    return None


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62
        for item in value
    )


def write_index(folder: Path, rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Writes what all ranks have written, a row per piece, as the folder's index.

    A row is ``[name, dtype, shape of the whole, file, key, offsets, sizes]``.
    """
    text = json.dumps(make_index(rows), separators=(",", ":"))
    return write_durably(folder / TENSORS, [text.encode()])


def make_index(rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """``{name: [dtype, shape, [[file, key, offsets, sizes], ...]]}``; doubles count once.

    >>> row = ["w", "F32", [4, 2], "a.safetensors", "w[0:2,0:2]", [0, 0], [2, 2]]
    >>> make_index([row])
    Traceback (most recent call last):
    strategies.errors.CheckpointError: of w, F32 [4, 2], 1 pieces with 4 of 8 elements were written.

    Raises:
        CheckpointError: Pieces are missing, overlap or disagree.
    """
    index: dict[str, Any] = {}
    boxes: dict[str, dict[tuple[int, ...], list[Any]]] = defaultdict(dict)
    for name, dtype, shape, file, key, offsets, sizes in rows:
        entry = index.setdefault(name, [dtype, list(shape), []])
        box = boxes[name].setdefault(tuple(offsets), [file, key, list(offsets), list(sizes)])
        if entry[:2] != [dtype, list(shape)] or box[3] != list(sizes):
            raise CheckpointError(
                f"ranks hold different tensors under the name {name}: {entry[0]} {entry[1]} in a "
                f"piece of {box[3]}, and {dtype} {list(shape)} in a piece of {list(sizes)}."
            )
    for name, entry in index.items():
        entry[2] = [boxes[name][offsets] for offsets in sorted(boxes[name])]
        held = sum(math.prod(sizes) for *_, sizes in entry[2])
        if held != math.prod(entry[1]):
            raise CheckpointError(
                f"of {name}, {entry[0]} {entry[1]}, {len(entry[2])} pieces with {held:,} of "
                f"{math.prod(entry[1]):,} elements were written."
            )
    return index


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a type."""
    if dtype not in _NAMES:
        raise CheckpointError(f"a checkpoint cannot hold {dtype}: safetensors has no such type.")
    return _NAMES[dtype]


def _data(item: Any) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data


def _key(name: str, chunk: ChunkStorageMetadata, size: torch.Size) -> str:
    if chunk.sizes == size:
        return name
    box = ",".join(
        f"{start}:{start + length}"
        for start, length in zip(chunk.offsets, chunk.sizes, strict=True)
    )
    return f"{name}[{box}]"


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


_BLOCK_BYTES = 1 << 22


def write_durably(path: Path, blocks: Iterable[Any]) -> dict[str, Any]:
    """Writes a new file and syncs it; its hash and size, as the manifest has them.

    The hash is of what was to be written, taken on the way: the file is not read again, and what a
    faulty disk makes of it is found out. Blocks are asked for one at a time.
    """
    digest = hashlib.sha256()
    size = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for block in blocks:
            view = memoryview(block)
            for start in range(0, len(view), _BLOCK_BYTES):
                part = view[start : start + _BLOCK_BYTES]
                digest.update(part)
                _write(handle, part)
                size += len(part)
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _write(handle: int, part: memoryview) -> None:
    while len(part):
        part = part[os.write(handle, part) :]


def sync_folder(path: Path) -> None:
    """Makes names in a folder last: what was created or renamed there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
