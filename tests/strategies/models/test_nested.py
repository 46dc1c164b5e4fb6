"""Containers of a batch, copied and described."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from strategies.models.nested import cloned, rebuild, structure

ONE = torch.ones(2)


def test_a_tuple_with_names_is_rebuilt_whatever_its_leaves_become() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    words = rebuild(packed, lambda leaf: "tensor" if isinstance(leaf, torch.Tensor) else leaf)
    assert type(words) is PackedSequence
    assert words[:2] == ("tensor", "tensor")
    assert cloned(packed).data is not packed.data


def test_a_list_of_a_batch_may_have_any_number_of_equal_entries() -> None:
    two, three = ({"boxes": [ONE] * count, "size": 1} for count in (2, 3))
    assert structure(two) == structure(three)
    assert structure([two, ONE]) == structure([three, ONE])
    # Neither the batch itself, nor a list whose entries differ.
    assert structure([ONE, ONE]) != structure([ONE, ONE, ONE])
    assert structure({"boxes": [ONE, 1]}) != structure({"boxes": [ONE, 1, 1]})
