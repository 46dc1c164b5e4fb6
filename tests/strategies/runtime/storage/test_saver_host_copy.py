"""The copy that a thread writes from."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from strategies.runtime.storage.commit import HostCopy
from strategies.runtime.storage.part import as_piece
from tests.emulated_device import emulated_device


def check_copies(device: str) -> HostCopy:
    state = {
        "a": torch.arange(6.0, device=device).reshape(2, 3).T,  # no contiguous memory
        "b": torch.ones((), dtype=torch.bfloat16, device=device),
    }
    before = {name: value.clone().cpu() for name, value in state.items()}
    host = HostCopy()
    copies = host.of({name: as_piece(value) for name, value in state.items()})
    for value in state.values():
        value.zero_()
    for name, piece in copies.items():
        assert piece.tensor.device.type == "cpu"
        assert torch.equal(piece.tensor, before[name])
        assert piece.global_shape == tuple(before[name].shape)
    # The next copy reuses the memory, unless the tensor has changed its form.
    places = {name: piece.tensor.data_ptr() for name, piece in copies.items()}
    state["b"] = torch.ones(4, device=device)
    again = host.of({name: as_piece(value) for name, value in state.items()})
    assert again["a"].tensor.data_ptr() == places["a"]
    assert torch.equal(again["a"].tensor, torch.zeros(3, 2))
    assert torch.equal(again["b"].tensor, torch.ones(4))
    return host


def test_it_stays_when_the_state_changes() -> None:
    check_copies("cpu")


def test_it_stays_when_the_state_on_a_device_changes_that_does_nothing_unasked() -> None:
    with emulated_device() as device:
        host = check_copies("cuda")
    # Three buffers in pinned memory: a (24 bytes), and b before and after it has changed its form.
    assert device.pinned_bytes == 24 + 2 + 16
    assert [type(buffer) for buffer in host._buffers.values()] == [torch.Tensor] * 2


def test_copies_that_nobody_waited_for_are_not_there() -> None:
    with emulated_device():
        state = {"a": as_piece(torch.ones(3, device="cuda"))}
        with mock.patch.object(torch.cuda, "current_stream", mock.Mock()):
            copies = HostCopy().of(state)
        assert copies["a"].tensor.isnan().all()


@pytest.mark.gpu
def test_it_stays_when_the_state_on_a_gpu_changes() -> None:
    host = check_copies("cuda")
    assert all(buffer.is_pinned() for buffer in host._buffers.values())
