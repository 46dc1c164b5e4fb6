"""Numbers that are asked for later; on a CPU they are there at once."""

from __future__ import annotations

import pytest
import torch

from strategies.models.logs import LogEntry, start_packing
from strategies.models.stage_model import LogCall
from strategies.models.state import Fetch
from strategies.runtime.step.microbatch import checksum, start_checksum
from tests.emulated_device import emulated_device


def test_a_fetched_tensor_belongs_to_no_graph():
    weight = torch.ones((), requires_grad=True)
    copy = Fetch(weight * 2).tensor()
    assert (float(copy), copy.requires_grad) == (2.0, False)


def test_a_number_on_a_device_is_not_there_before_it_is_waited_for():
    with emulated_device() as device:
        fetch = Fetch(torch.tensor(2.0, device="cuda") * 3)
        assert fetch._copy.isnan()
        assert float(fetch.tensor()) == 6.0
        given = device.default.given
        assert float(fetch.tensor()) == 6.0  # Nothing is asked of the device a second time.
        assert device.default.given == given


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_batch_that_changes_after_its_checksum_has_begun_keeps_it(place: str):
    batch = {"ids": torch.arange(6).reshape(2, 3), "of nothing": torch.zeros(0, 4)}
    expected = checksum(batch)
    with emulated_device():
        batch = {name: value.to(place, non_blocking=True) for name, value in batch.items()}
        later = start_checksum(batch)
        batch["ids"].zero_()
        assert later() == expected != checksum(batch)


def test_logs_are_packed_later_as_they_are_at_once():
    entries = [
        LogEntry(LogCall("loss", torch.tensor(value), {}), share=0.5, stage=1, copy=0)
        for value in (1.0, 3.0)
    ] + [LogEntry(LogCall("rate", 0.1, {}), share=0.5, stage=1, copy=0)]
    later = start_packing(entries)
    assert later() == [
        ["loss", 2.0, {}, 1.0, 1, 0, None],
        ["rate", 0.1, {}, 0.5, 1, 0, None],
    ]
