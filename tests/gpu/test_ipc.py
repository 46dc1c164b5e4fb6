"""Ranks that share one GPU exchange tensors in its memory: messages, and whole trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from strategies.runtime.messages.device_transport import DeviceTransport
from tests.device_messages import talk
from tests.distributed import test_parity
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, train

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

CASES = {
    "1f1b": Case("1f1b", pp=2, clip=0.05),
    "split backwards": Case("zb_v", pp=2, short_last=True),
    "replicas": Case("foldx_fifo", pp=2, dp=2),
    "interleaved": Case("interleaved_1f1b", pp=2, accumulation=2),
}


def test_messages_of_all_sizes_are_what_was_sent(ranks: Callable[[int], Ranks]) -> None:
    sizes = (1, 1000, 2**16, 2**21 - 1, 2**21 + 1, 2**24, 2**26)
    for rank, found in enumerate(ranks(2).run(talk, folder=None, sizes=sizes)):
        assert found["near"] == [1 - rank]
        assert found["wrong"] == []


def train_sharing(case: Case) -> dict[str, Any]:
    """``train``, if all messages stay on the device."""
    begin = DeviceTransport.__init__
    opened: list[DeviceTransport] = []

    def noted(self: DeviceTransport, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        opened.append(self)

    with mock.patch.object(DeviceTransport, "__init__", noted):
        result = train(case=case)
    assert [transport._staged for transport in opened] == [None]
    return result


@pytest.mark.parametrize("name", list(CASES))
def test_training_equals_plain_torch(
    name: str, ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_parity, "train", train_sharing)
    test_parity.check(replace(CASES[name], backend="shared", accelerator="gpu"), ranks)
