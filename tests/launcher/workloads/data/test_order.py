import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.workloads.data.module import ReplicaOrder


def orders(num_blocks, *, num_replicas=1, epoch=0, **options):
    result = []
    for replica in range(num_replicas):
        order = ReplicaOrder(num_blocks, num_replicas=num_replicas, replica=replica, **options)
        order.set_epoch(epoch)
        result.append(order)
    return result


def global_batches(each, batch_size):
    lists = [list(order) for order in each]
    return [
        [index for blocks in lists for index in blocks[at : at + batch_size]]
        for at in range(0, len(lists[0]), batch_size)
    ]


def test_the_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    (first,) = map(list, orders(50, batch_size=5, seed=3, epoch=2))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    (again,) = map(list, orders(50, batch_size=5, seed=3, epoch=2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again
    assert sorted(first) == list(range(50))
    assert first != list(next(iter(orders(50, batch_size=5, seed=3, epoch=3))))
    assert first != list(next(iter(orders(50, batch_size=5, seed=4, epoch=2))))


def test_a_global_batch_is_the_same_however_it_is_divided():
    one = global_batches(orders(47, batch_size=12), 12)
    three = global_batches(orders(47, batch_size=4, num_replicas=3), 4)
    assert one == three
    assert len(one) == 3


@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 70),
)
def test_replicas_are_disjoint_equally_long_and_complete(n, batch, replicas, shuffle, full, done):
    each = orders(
        n, batch_size=batch, num_replicas=replicas, shuffle=shuffle, full_batches=full, epoch=1
    )
    lists = [list(order) for order in each]
    assert [len(order) for order in each] == [len(blocks) for blocks in lists]
    together = [index for blocks in lists for index in blocks]
    assert len(set(together)) == len(together)
    assert len(set(map(len, lists))) == 1
    lost = n - len(together)
    assert lost < (batch * replicas if full else replicas)
    for order in each:
        order.resume(epoch=1, num_blocks_done=min(done, n) // (batch * replicas) * batch * replicas)
    rest = [list(order) for order in each]
    skipped = min(done, n) // (batch * replicas) * batch
    assert rest == [blocks[skipped:] for blocks in lists]
    for order in each:
        order.set_epoch(2)
    assert [len(list(order)) for order in each] == [len(blocks) for blocks in lists]
