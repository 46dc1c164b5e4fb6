from dataclasses import replace

import pytest

from strategies.costs.capacity import capacity
from strategies.costs.hardware import Hardware

BARE = Hardware("box", 1e12, 0.5, 80.0, 1e9, 100.0, 1e-6, 10.0, 1e-5, gpus_per_node=4)
CARD = replace(BARE, context_gb=2.0, communicator_gb=0.5, allocator_loss=0.25)


def test_a_device_needs_more_than_the_tensors_of_a_rank():
    assert capacity(CARD).taken(40e9) == 52e9
    assert capacity(BARE, tp=8, pp=4).taken(40e9) == 40e9


@pytest.mark.parametrize(
    ("layout", "communicators"),
    [({}, 0), ({"tp": 2}, 1), ({"tp": 2, "pp": 4}, 2), ({"tp": 2, "pp": 4, "dp": 8, "ep": 2}, 4)],
)
def test_each_communicator_of_a_rank_takes_its_buffers(layout, communicators):
    assert capacity(CARD, **layout).room == int((78e9 - communicators * 0.5e9) / 1.25)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 4, "dp": 8}])
def test_the_room_is_what_fits_and_a_byte_more_does_not(layout):
    memory = capacity(CARD, **layout)
    assert memory.fits(memory.room)
    assert not memory.fits(memory.room + 1)
    assert memory.taken(memory.room) <= memory.total < memory.taken(memory.room + 1)


def test_what_is_left_is_said_with_its_parts():
    assert capacity(CARD, tp=2).margin(40e9) == (
        "52.5 GB (tensors 40, allocator 10, context 2, communicators 0.5); 27.5 of 80 GB are left"
    )
    assert capacity(BARE).needs(40e9) == "40 GB"
