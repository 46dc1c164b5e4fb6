from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from strategies.models.collectives import LocalGroup, ShapesFirst, default_group, gather


@pytest.fixture
def world() -> Iterator[LocalGroup]:
    """A default group of three, as rank 1; no process is asked."""
    group = LocalGroup(1, 3)
    before = dist.group.WORLD
    dist.group.WORLD = group  # type: ignore[misc]
    yield group
    dist.group.WORLD = before  # type: ignore[misc]


def test_a_group_of_one_gives_each_collective_its_result(world: LocalGroup) -> None:
    own = torch.arange(3.0)
    with default_group(LocalGroup(0, 1)):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        everyone = [torch.zeros(3)]
        dist.all_gather(everyone, own)
        assert torch.equal(everyone[0], own)
        total = own.clone()
        dist.all_reduce(total)
        assert torch.equal(total, own)
        into = torch.zeros(3)
        dist.reduce_scatter(into, [own])
        assert torch.equal(into, own)
        dist.barrier()
        assert dist.all_reduce(total, async_op=True).wait()
        said = [None]
        dist.all_gather_object(said, {"rows": 3})
        assert said == [{"rows": 3}]
    assert dist.get_world_size() == 3


def test_without_a_world_there_is_nothing_to_replace() -> None:
    with default_group(LocalGroup(0, 1)):
        assert not dist.is_initialized()
    first = ShapesFirst()
    first.begin()
    first.open()
    first.end()


def test_a_replay_answers_by_shapes_until_it_is_opened(world: LocalGroup) -> None:
    first = ShapesFirst()
    first.begin()
    assert dist.group.WORLD is not world
    meta = torch.empty(2, 4, device="meta")
    assert gather(meta, None, sync_grads=True).shape == (3, 2, 4)
    first.open()
    assert dist.group.WORLD is world
    first.end()
    assert dist.group.WORLD is world


def test_gathered_gradients_are_added_up_over_the_members(world: LocalGroup) -> None:
    with default_group(LocalGroup(0, 1)):
        own = torch.ones(2, requires_grad=True)
        gather(own, None, sync_grads=True).pow(2).sum().backward()
        assert own.grad is not None
        assert own.grad.tolist() == [2.0, 2.0]
        assert not gather(own, None, sync_grads=False).requires_grad
