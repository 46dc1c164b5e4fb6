"""The copy that a thread writes from."""

from __future__ import annotations

import pytest
import torch

from strategies.runtime.storage.part import as_piece
from strategies.runtime.storage.saver import HostCopy


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


@pytest.mark.gpu
def test_it_stays_when_the_state_on_a_gpu_changes() -> None:
    host = check_copies("cuda")
    assert all(buffer.is_pinned() for buffer in host._buffers.values())
