"""Where processes stand: tp innermost, pp outermost."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from strategies.compiler import compile_plan
from strategies.errors import PlanError
from strategies.ir.kinds import Kind
from strategies.plan import Plan
from strategies.runtime.messages.mesh import (
    Coordinates,
    abort_nccl,
    check_world,
    exchange_groups,
    neighbours,
    running_groups,
)


def test_ranks_and_coordinates_are_inverse():
    for rank in range(24):
        where = Coordinates.of(rank, pp=2, dp=3, tp=4)
        assert where.global_rank(where.pp_rank, where.dp_rank) == rank
        assert rank == (where.pp_rank * 3 + where.dp_rank) * 4 + where.tp_rank
        assert where.world_size == 24


def test_groups_are_those_of_the_axes():
    where = Coordinates.of(13, pp=2, dp=3, tp=4)
    assert (where.pp_rank, where.dp_rank, where.tp_rank) == (1, 0, 1)
    assert where.sharers(1, 0) == (12, 13, 14, 15)
    assert where.pipeline(0) == (1, 13)
    assert where.pipeline(2, 3) == (11, 23)
    assert where.replicas((1,)) == (13, 17, 21)
    assert where.replica(0) == (0, 1, 2, 3, 12, 13, 14, 15)


def test_experts_are_spread_over_neighbours_among_the_sharers_of_a_stage():
    where = Coordinates.of(19, pp=2, dp=3, tp=4, ep=6)
    assert (where.pp_rank, where.place, where.ep_rank) == (1, 7, 1)
    assert where.exchangers() == (18, 19, 20, 21, 22, 23)
    assert where.expert_holders((0, 1)) == (1, 7, 13, 19)
    assert where.exchanges_across
    blocks = [ranks for _, ranks in exchange_groups(where)]
    assert sorted(rank for block in blocks for rank in block) == list(range(24))
    # Inside one replica nobody waits for another one.
    assert not Coordinates.of(19, pp=2, dp=3, tp=4, ep=2).exchanges_across


def test_ranks_that_share_each_expert_exchange_with_those_of_the_same_part():
    where = Coordinates.of(13, pp=1, dp=4, tp=4, ep=2, sliced=4)
    assert (where.block, where.ep_rank, where.holds_first) == (8, 5, False)
    assert where.exchangers() == (9, 13)
    assert where.expert_holders((0,)) == (5, 13)
    assert where.exchanges_across
    alone = Coordinates.of(5, pp=1, dp=2, tp=4, ep=1, sliced=4)
    assert (alone.exchangers(), alone.expert_holders((0,))) == ((5,), (1, 5))
    assert not alone.exchanges_across
    assert ("exchange", (9, 13)) in exchange_groups(where)


def test_a_world_that_the_degrees_do_not_fill_is_refused():
    with pytest.raises(
        PlanError, match=r"pp=2 times dp=1 times tp=2 is 4 processes, .* there are 6"
    ):
        check_world(pp=2, dp=1, tp=2, world_size=6)
    with pytest.raises(PlanError, match=r"pp=2 times dp=2 is 4 .* Try devices=4, or dp=3\."):
        check_world(pp=2, dp=2, world_size=6)
    with pytest.raises(PlanError, match=r"pp=2 times dp=1 is 2 .* there are 3\. Try devices=2\.$"):
        check_world(pp=2, dp=1, world_size=3)


def test_at_the_end_only_communicators_of_nccl_are_aborted(monkeypatch):
    class Nccl:
        aborted = 0

        def abort(self):
            self.aborted += 1

    class Group:
        def __init__(self, backend):
            self._backend = backend

        def _get_backend(self, device):
            if self._backend is None:
                raise RuntimeError(f"No backend type associated with device type {device.type}")
            return self._backend

    device, host = Nccl(), SimpleNamespace()  # gloo serves both kinds of memory
    groups = [Group(device), Group(host), Group(None)]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    abort_nccl()
    assert device.aborted == 1


@pytest.mark.parametrize(
    "plan",
    [
        Plan(schedule="1f1b", pp=4, num_microbatches=4),
        Plan(schedule="interleaved_1f1b", pp=4, num_microbatches=4, stages_per_rank=2),
        Plan(schedule="zb_v", pp=4, num_microbatches=4, stages_per_rank=2),
        Plan(schedule="chimera", pp=4, num_microbatches=4),
        Plan(schedule="1f1b", pp=4, num_microbatches=4, skips=((0, 2), (0, 3))),
    ],
    ids=lambda plan: plan.schedule + (" with skips" if plan.skips else ""),
)
def test_the_pairs_that_get_a_communicator_are_those_that_send(plan):
    program = compile_plan(plan).train
    sent = {
        (rank, program.placement.rank_of(item.peer, item.microbatch))
        for rank, row in enumerate(program.ranks)
        for item in row
        if item.kind is Kind.SEND
    }
    assert sent and neighbours(program.placement, plan.skips) == tuple(sorted(sent))


def test_each_pipeline_has_communicators_of_its_own_for_its_pairs():
    where = Coordinates.of(0, pp=3, dp=2)
    placement = compile_plan(Plan(schedule="1f1b", pp=3, num_microbatches=3)).train.placement
    wanted = running_groups(where, placement, (), shards=False, pairs=neighbours(placement, ()))
    pairs = [ranks for purpose, ranks in wanted if purpose == "messages" and len(ranks) == 2]
    assert pairs == [(0, 2), (2, 0), (2, 4), (4, 2), (1, 3), (3, 1), (3, 5), (5, 3)]
