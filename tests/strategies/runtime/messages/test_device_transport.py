"""NCCL's bytes, and copies through host memory beside the kernels, on an emulated device."""

from __future__ import annotations

from collections import deque
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from strategies.runtime.messages.device_transport import NcclTransport, StagedTransport
from tests.emulated_device import CUDA, emulated_device


class Ended:
    def wait(self) -> None:
        """It has."""


class Wire:
    """What one rank sends is what it receives, whichever way it is asked."""

    def __init__(self):
        self.sent = deque()

    def send(self, tensors, rank, tag):
        self.sent.append(tensors[0].clone())
        return Ended()

    def recv(self, tensors, rank, tag):
        tensors[0].copy_(self.sent.popleft())
        return Ended()

    def isend(self, tensor, *, group, group_dst):
        # Of NCCL's types the one that stands for all.
        assert tensor.is_cuda
        assert tensor.dtype == torch.uint8
        return self.send([tensor], group_dst, 0)

    def irecv(self, tensor, *, group, group_src):
        assert tensor.is_cuda
        assert tensor.dtype == torch.uint8
        return self.recv([tensor], group_src, 0)


@pytest.mark.parametrize("place", [CUDA, torch.device("cpu")], ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.bool,
     torch.bfloat16, torch.float64],
    ids=str,
)  # fmt: skip
def test_nccl_is_given_bytes_of_the_device_whatever_the_type_and_place(dtype, place):
    wire = Wire()
    with (
        emulated_device(),
        mock.patch.multiple(dist, isend=wire.isend, irecv=wire.irecv),
    ):
        transport = NcclTransport(lambda source, target: None, 0, CUDA)
        sent = torch.arange(6).view(2, 3).to(dtype)
        transport.send(sent.to(place), 1, 0).wait()
        came = transport.expect((2, 3), dtype, place, 1, 0).wait()
        assert came.device == place
        assert came.dtype == dtype
        assert torch.equal(came.cpu(), sent)


def test_copies_through_the_host_need_nothing_of_what_the_device_has_been_given_since():
    with emulated_device() as device:
        transport = StagedTransport(Wire(), CUDA)
        sent = torch.arange(10.0, device=CUDA) + 1
        done = []
        sending = transport.send(sent, 1, 0)
        device.default.give(lambda: done.append("a kernel behind the send"))
        sending.wait()
        assert done == []
        arrival = transport.expect((10,), torch.float32, CUDA, 1, 0)
        device.default.give(lambda: done.append("a kernel behind the receive"))
        came = arrival.wait()
        transport._from_host.synchronize()
        assert done == ["a kernel behind the send"]
        assert torch.equal(came.cpu(), torch.arange(10.0) + 1)


def test_threads_that_wait_for_the_device_have_chosen_it():
    with emulated_device() as device:
        transport = StagedTransport(Wire(), CUDA)
        transport.send(torch.ones(3, device=CUDA), 1, 0).wait()
        assert device.chosen_by == {"copies", "messages"}
