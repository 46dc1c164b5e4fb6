"""What sharers write of cut weights, and what they get back from a checkpoint."""

import pytest
import torch

from strategies.errors import CheckpointError
from strategies.models.tensor_parallel.tensor_ranks import Shard
from strategies.runtime.storage.part import Piece
from strategies.runtime.storage.share_pieces import Shares

WHOLE = torch.arange(10.0).reshape(5, 2)
SHARDS = {"table": Shard(0, 5, 2)}


def shares(rank, *, holders=None, first_replica=True):
    return Shares(SHARDS, rank, holders or {}, first_replica=first_replica)


def test_boxes_of_all_sharers_make_the_whole_without_padding():
    found = torch.full_like(WHOLE, -1)
    for rank in range(2):
        local = SHARDS["table"].local(WHOLE, rank)
        piece = shares(rank, holders={"table": (rank, 4 + rank)}).pieces({"table": local})["table"]
        assert isinstance(piece, Piece)
        assert piece.global_shape == (5, 2)
        assert piece.holders == (rank, 4 + rank)
        (start, _), (size, _) = piece.offsets, piece.sizes
        found[start : start + size] = piece.tensor
    assert torch.equal(found, WHOLE)


def test_what_was_read_is_padded_again():
    local = SHARDS["table"].local(WHOLE, 1)
    own = shares(1)
    read = own.boxes({"table": local})["table"].tensor.clone()
    assert read.shape == (2, 2)
    assert torch.equal(own.padded({"table": read})["table"], local)
    saved = {"state": {"table": {"exp_avg": read, "step": torch.tensor(3.0)}}, "param_groups": []}
    entry = own.padded_optimizer(saved, {"table": local})["state"]["table"]
    assert torch.equal(entry["exp_avg"], local)
    assert entry["step"] == 3


def test_another_replica_leaves_out_what_the_first_one_writes():
    local = SHARDS["table"].local(WHOLE, 0)
    state = {"table": local, "norm": torch.ones(2)}
    assert shares(0, first_replica=False).pieces(state).keys() == {"norm"}
    assert shares(0).pieces(state)["norm"] is state["norm"]
    named = {"state": {"table": {"exp_avg": local}}, "param_groups": []}
    assert shares(0, first_replica=False).optimizer_pieces(named, state)["state"] == {}


def test_single_values_are_no_shares_and_other_shapes_are_refused():
    local = SHARDS["table"].local(WHOLE, 0)
    entry = {"step": torch.tensor(1.0), "exp_avg": local, "count": torch.ones(1)}
    named = {"state": {"table": entry}, "param_groups": []}
    found = shares(0).optimizer_pieces(named, {"table": local})["state"]["table"]
    assert isinstance(found["exp_avg"], Piece)
    assert isinstance(found["step"], torch.Tensor)
    assert isinstance(found["count"], torch.Tensor)
    named["state"]["table"]["row"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"row of table has shape \(3,\)"):
        shares(0).optimizer_pieces(named, {"table": local})
