"""Tensors written in any boxes are read in any other, and no more is read than that."""

from __future__ import annotations

import doctest
import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from strategies.errors import CheckpointError
from strategies.manifest import TENSORS
from strategies.models.tensor_parallel.tensor_ranks import Shard
from strategies.runtime.lightning.checkpoints.stock_file import boxed
from strategies.runtime.storage import part as piece
from strategies.runtime.storage import tensor_files
from strategies.runtime.storage.opened import PieceLoadPlanner, PieceSavePlanner
from strategies.runtime.storage.part import Piece, as_piece, own_share
from strategies.runtime.storage.share_pieces import Shares
from strategies.runtime.storage.tensor_files import TensorReader, TensorWriter, write_index


def write(folder: Path, ranks: list[dict[str, Piece]]) -> None:
    """What several ranks do, each by itself."""
    rows = []
    for rank, pieces in enumerate(ranks):
        planner = PieceSavePlanner()
        planner.set_up_planner(dict(pieces))
        writer = TensorWriter(folder / f"rank_{rank}.safetensors")
        results = writer.write_data(planner.create_local_plan(), planner).value()
        rows += [result.storage_data for result in results]
    write_index(folder, rows)


def manifest(folder: Path) -> dict[str, Any]:
    return {"files": {path.name: {"bytes": path.stat().st_size} for path in folder.iterdir()}}


def read(folder: Path, pieces: dict[str, Piece]) -> list[Any]:
    """Fills pieces; returns the reads that it took."""
    reader = TensorReader(folder, manifest(folder))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = PieceLoadPlanner()
    planner.set_up_planner(dict(pieces), metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    reader.read_data(plan, planner).wait()
    return plan.items


def boxes(shape: tuple[int, ...], cuts: list[list[int]]) -> list[tuple[slice, ...]]:
    """The boxes between cuts along each axis."""
    axes = []
    for size, marks in zip(shape, cuts, strict=True):
        ends = [0, *sorted({mark % (size + 1) for mark in marks}), size]
        axes.append([slice(a, b) for a, b in itertools.pairwise(ends) if a < b])
    return list(itertools.product(*axes))


def piece_of(whole: Tensor, box: tuple[slice, ...], *, empty: bool = False) -> Piece:
    part = whole[box].clone()
    if empty:
        part.fill_(-1)
    return Piece(part, tuple(whole.shape), tuple(item.start for item in box))


SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
CUTS = st.lists(st.lists(st.integers(0, 7), max_size=2), min_size=3, max_size=3)


@given(shape=SHAPES, written=CUTS, wanted=CUTS, ranks=st.integers(1, 3))
def test_any_boxes_make_up_any_others(
    shape: tuple[int, ...],
    written: list[list[int]],
    wanted: list[list[int]],
    ranks: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("boxes")
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    # A rank has at most one box of a tensor, so each box is a rank; all write a second tensor.
    holders = [{"w": piece_of(whole, box)} for box in boxes(shape, written[: len(shape)])]
    for rank in holders[:ranks]:
        rank["same"] = as_piece(whole)
    write(folder, holders)
    for box in boxes(shape, wanted[: len(shape)]):
        found = piece_of(whole, box, empty=True)
        same = piece_of(whole, box, empty=True)
        items = read(folder, {"w": found, "same": same})
        assert torch.equal(found.tensor, whole[box])
        assert torch.equal(same.tensor, whole[box])
        # Exactly the elements that are wanted, each once.
        assert sum(math.prod(item.lengths) for item in items) == 2 * found.tensor.numel()


@pytest.mark.parametrize("dtype", sorted(tensor_files._NAMES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 3)], ids=str)
def test_every_type_comes_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    width = dtype.itemsize
    raw = torch.arange(math.prod(shape) * width, dtype=torch.uint8) % 2
    value = raw.view(dtype).reshape(shape)
    write(tmp_path, [{"x": as_piece(value), "byte": as_piece(torch.ones(1, dtype=torch.uint8))}])
    found = as_piece(torch.full(shape, 0, dtype=torch.uint8).to(dtype))
    read(tmp_path, {"x": found})
    assert found.tensor.dtype == dtype
    assert found.tensor.reshape(-1).view(torch.uint8).equal(raw)
    # Anybody's safetensors reads it, too.
    plain = load_file(tmp_path / "rank_0.safetensors")["x"]
    assert plain.shape == shape
    assert plain.reshape(-1).view(torch.uint8).equal(raw)


def test_a_missing_box_is_noticed_before_anything_is_committed(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    with pytest.raises(CheckpointError, match=r"w, F32 \[4, 3\], 1 pieces with 6 of 12 elements"):
        write(tmp_path, [{"w": piece_of(whole, (slice(0, 2), slice(0, 3)))}])
    assert not (tmp_path / TENSORS).exists()


def test_ranks_that_disagree_about_a_name_are_noticed(tmp_path: Path) -> None:
    ranks = [{"w": as_piece(torch.zeros(2))}, {"w": as_piece(torch.zeros(3))}]
    with pytest.raises(CheckpointError, match="ranks hold different tensors under the name w"):
        write(tmp_path, ranks)


def test_files_are_free_of_pickles(tmp_path: Path) -> None:
    write(tmp_path, [{"w": as_piece(torch.zeros(5))}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0.safetensors", TENSORS]
    assert json.loads((tmp_path / TENSORS).read_text()) == {
        "w": ["F32", [5], [["rank_0.safetensors", "w", [0], [5]]]]
    }


def test_the_stock_api_reads_and_writes_the_same_files(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    write(tmp_path, [{"w": piece_of(whole, box)} for box in boxes((4, 3), [[1], [2]])])
    state = {"w": torch.zeros(4, 3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.load(state, storage_reader=TensorReader(tmp_path, manifest(tmp_path)), no_dist=True)
        assert torch.equal(state["w"], whole)
        (tmp_path / "again").mkdir()
        pieces = {"w": as_piece(whole)}
        writer = TensorWriter(tmp_path / "again" / "rank_0.safetensors")
        dcp.save(pieces, storage_writer=writer, planner=PieceSavePlanner(), no_dist=True)
    found = as_piece(torch.zeros(4, 3))
    read(tmp_path / "again", {"w": found})
    assert torch.equal(found.tensor, whole)


def test_holders_share_the_writing_evenly() -> None:
    held = {
        f"p{index}": Piece(torch.zeros(size), (size,), (0,), holders=(0, 1, 2))
        for index, size in enumerate([90, 50, 40, 30, 30, 20, 10, 0])
    }
    shares = [own_share(held, rank) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(held)
    sizes = [sum(item.num_bytes for item in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 10 * 4
    own = {"z": Piece(torch.zeros(3), (9,), (3,))}
    assert own_share(held | own, 7) == own  # what only this rank holds


def test_an_empty_shard_of_a_tensor_is_not_written() -> None:
    assert own_share({"w": Piece(torch.zeros(0, 3), (2, 3), (2, 0))}, 0) == {}


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (piece, tensor_files):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 0


@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (1, 2), (1, 4)])
def test_shares_of_parts_side_by_side_load_at_any_number_of_ranks(
    dim: int, ranks: int, tmp_path: Path
) -> None:
    whole = torch.arange(192, dtype=torch.float64).reshape((24, 8) if dim == 0 else (8, 24))
    shard = Shard(dim, 24, ranks, segments=3)

    def shares_of(shard: Shard, rank: int) -> Shares:
        return Shares({"w": shard}, rank, {}, first_replica=True)

    written = [
        shares_of(shard, rank).pieces({"w": shard.local(whole, rank)}) for rank in range(ranks)
    ]
    write(tmp_path, written)
    for wanted in (Shard(dim, 24, 1), Shard(dim, 24, 2, segments=3), Shard(dim, 24, 3)):
        for rank in range(wanted.parts):
            local = wanted.local(whole, rank)
            box = shares_of(wanted, rank).boxes({"w": torch.full_like(local, -1)})["w"]
            assert isinstance(box, Piece)
            read(tmp_path, {"w": box})
            assert torch.equal(box.tensor, local)
            assert torch.equal(boxed(whole, box), local)
