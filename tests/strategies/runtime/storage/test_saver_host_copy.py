"""The copy that a thread writes from."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from strategies.errors import CheckpointError
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
    # The next copy reuses the memory, whatever form the tensors have, while it is large enough.
    for size, reused in ((4, True), (100, False), (5, True)):
        place = copies["a"].tensor.data_ptr()
        state["b"] = torch.ones(size, device=device)
        copies = host.of({name: as_piece(value) for name, value in state.items()})
        if reused:  # Else it may have got the same place again.
            assert copies["a"].tensor.data_ptr() == place
        assert torch.equal(copies["a"].tensor, torch.zeros(3, 2))
        assert torch.equal(copies["b"].tensor, torch.ones(size))
    return host


def test_it_stays_when_the_state_changes() -> None:
    check_copies("cpu")


def test_it_stays_when_the_state_on_a_device_changes_that_does_nothing_unasked() -> None:
    with emulated_device() as device:
        host = check_copies("cuda")
        # One piece of pinned memory, no larger than what is copied: 24 bytes and 400, each aligned.
        assert device.pinned_bytes == 64 + 448
        del host
        assert device.pinned_bytes == 0


def test_memory_that_cannot_be_pinned_is_told() -> None:
    with emulated_device() as device:
        device.registered[0] = 1 << 64
        with pytest.raises(CheckpointError, match=r"64 bytes .* cannot be pinned: .* 712"):
            HostCopy().of({"a": as_piece(torch.ones(3, device="cuda"))})


def test_copies_that_nobody_waited_for_are_not_there() -> None:
    with emulated_device():
        state = {"a": as_piece(torch.ones(3, device="cuda"))}
        with mock.patch.object(torch.cuda, "current_stream", mock.Mock()):
            copies = HostCopy().of(state)
        assert copies["a"].tensor.isnan().all()


@pytest.mark.gpu
def test_it_stays_when_the_state_on_a_gpu_changes() -> None:
    host = check_copies("cuda")
    assert host._memory.is_pinned()
