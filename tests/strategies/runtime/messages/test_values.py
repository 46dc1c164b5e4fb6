"""Values become JSON and bytes, and are the same at the other end."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.models.contents import MISSING
from strategies.runtime.messages.values import Opening, Parcel

CPU = torch.device("cpu")


class Record:
    def __init__(self, value: Any) -> None:
        self.value = value


def sent(value: Any, onto: Any = MISSING, *, inline_bytes: int = 0) -> Any:
    parcel = Parcel(inline_bytes=inline_bytes)
    tree = json.loads(json.dumps(parcel.pack(value)))
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in parcel.tensors]
    content = torch.cat(raw) if raw else torch.zeros(0, dtype=torch.uint8)
    return Opening(content, CPU).unpack(tree, onto)


@pytest.mark.parametrize("inline_bytes", [0, 1000])
@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 1e-300, "text", (1, [2, (3,)]), {1: "a", "b": {2.5: None}}, {3, 4}, [],
        deque([1, 2]), float("inf"),
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_are(value: Any, inline_bytes: int) -> None:
    arrived = sent(value, inline_bytes=inline_bytes)
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize("inline_bytes", [0, 1000])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1 / 3, dtype=torch.float64), torch.zeros(0, 3), torch.tensor([True, False]),
        torch.randn(2, 3).T, torch.ones(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.cfloat),
    ],
)  # fmt: skip
def test_tensors_arrive_bit_for_bit(tensor: Tensor, inline_bytes: int) -> None:
    before, arrived = sent([torch.ones(1), tensor], inline_bytes=inline_bytes)
    assert before.tolist() == [1]
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)


def test_numbers_of_numpy_stay_such() -> None:
    number, array = sent([np.float32(0.5), np.arange(3)])
    assert type(number) is np.float32
    assert number == 0.5
    assert array.tolist() == [0, 1, 2]


def test_containers_and_objects_that_are_there_are_filled() -> None:
    there: Any = defaultdict(list, {"a": [1], "b": [2]})
    first = there["a"]
    assert sent({"a": [3, 4], "c": [5]}, there) is there
    assert there == {"a": [3, 4], "c": [5]}
    assert there["a"] is first
    record = Record(1)
    assert sent(Record([2]), record) is record
    assert record.value == [2]


def test_what_cannot_be_sent_is_said() -> None:
    with pytest.raises(TypeError, match="type generator"):
        Parcel().pack(x for x in ())
    with pytest.raises(ModelError, match="object of type Record"):
        sent(Record(1))
