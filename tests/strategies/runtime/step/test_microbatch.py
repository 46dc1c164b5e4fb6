"""Batches cut into microbatches, and their predictions put together again."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils._pytree import tree_flatten

from strategies.errors import ModelError
from strategies.runtime.lightning.rows_told import RowsTold
from strategies.runtime.step.microbatch import (
    concatenate,
    count_rows,
    row_lists,
    share_sizes,
    split_batch,
)

ROWS = (3, 2, 2)


def loaders(batch: Any) -> Any:
    """Where the batches of loaders are in ``batch``, which has one tensor for each."""
    return tree_flatten(batch)[1]


def test_batches_of_several_loaders_are_cut_into_equal_shares_of_each() -> None:
    batch = {"a": torch.arange(8), "b": torch.arange(6)}
    shares = split_batch(batch, 4, loaders(batch))
    assert [(len(s.data["a"]), len(s.data["b"]), s.share) for s in shares] == [(4, 3, 0.5)] * 2
    assert count_rows(batch, loaders(batch)) == 8


def test_loaders_of_equal_rows_are_cut_like_one() -> None:
    batch = [torch.arange(7), torch.arange(7)]
    shares = split_batch(batch, 4, loaders(batch))
    assert [len(s.data[1]) for s in shares] == [2, 2, 2, 1]
    assert sum(s.share for s in shares) == pytest.approx(1)


def test_lists_of_boxes_are_cut_with_the_rows_and_columns_as_columns() -> None:
    boxes = [torch.zeros(1 + row % 4, 4) for row in range(8)]
    records = [{"boxes": b, "label": torch.tensor(i)} for i, b in enumerate(boxes)]
    columns = [torch.zeros(8, 2), torch.zeros(8, 3)]
    batch = {"x": torch.zeros(8, 5), "boxes": boxes, "records": tuple(records), "views": columns}
    first, *_ = split_batch(batch, 4)
    assert count_rows(batch) == 8
    assert [box.shape for box in first.data["boxes"]] == [(1, 4), (2, 4)]
    assert [int(record["label"]) for record in first.data["records"]] == [0, 1]
    assert [view.shape for view in first.data["views"]] == [(2, 2), (2, 3)]


def listed(texts: list[str], **more: Any) -> dict[str, Any]:
    """A batch of three rows, as a detection data set gives them."""
    boxes = [torch.zeros(1 + row, 4) for row in range(3)]
    names = ["cat", "dog", "bird"]
    records = [{"box": box, "names": names} for box in boxes]
    return {"x": torch.zeros(3, 5), "n": [boxes, [1, 2]], "texts": texts, "records": records} | more


def test_lists_that_are_as_long_as_the_batch_in_two_batches_are_named_once() -> None:
    same = {"classes": ["cat", "dog", "bird"], "more": ([0.5, 1, 2],)}
    first, second = listed(["a", "b", "c"], **same), listed(["b", "c", "d"], **same)
    assert [*row_lists(first)] == ["batch['texts']", "batch['classes']", "batch['more'][0]"]
    told = RowsTold(LightningModule())
    assert told.lists(first, 0, None, 2) is None
    said = str(told.lists(second, 1, None, 2))
    assert said.startswith("batch['classes'] and 1 more has the same 3 entries in two batches, as")
    assert told.lists(second, 2, None, 2) is None


@pytest.mark.parametrize(
    ("second", "number"),
    [
        (listed(["b", "c", "d"]), 1),
        (listed(["a", "b", "c"]), 0),  # the only batch of the next epoch
        (listed(["b", "c", "d"], languages=["en"] * 3), 1),
    ],
    ids=["of_the_rows", "of_the_same_batch", "of_equal_entries"],
)
def test_lists_of_rows_are_not_named(second: Any, number: int) -> None:
    told = RowsTold(LightningModule())
    assert told.lists(listed(["a", "b", "c"], languages=["en"] * 3), 0, None, 2) is None
    assert told.lists(second, number, None, 2) is None


def test_two_views_of_two_rows_are_columns() -> None:
    batch = [[torch.zeros(2, 5), torch.zeros(2, 5)], torch.zeros(2)]
    _, second = split_batch(batch, 4)
    assert [view.shape for view in second.data[0]] == [(1, 5), (1, 5)]
    constant = [[torch.zeros(2, 5), torch.zeros(1, 7)], torch.zeros(2)]
    assert [part.shape for part in split_batch(constant, 2)[0].data[0]] == [(1, 5), (1, 7)]


def test_a_loader_that_is_through_gives_nothing_to_any_share() -> None:
    spec = loaders([torch.arange(4), torch.arange(4)])
    shares = split_batch([None, torch.arange(4)], 2, spec)
    assert [s.data[0] for s in shares] == [None, None]
    assert [s.data[1].tolist() for s in shares] == [[0, 1], [2, 3]]


def test_a_batch_that_a_hook_has_rebuilt_is_cut_like_that_of_one_loader() -> None:
    spec = loaders({"a": torch.arange(4), "b": torch.arange(4)})
    shares = split_batch(torch.arange(4), 2, spec)
    assert [s.data.tolist() for s in shares] == [[0, 1], [2, 3]]


Pair = namedtuple("Pair", "scores names")


@dataclass(frozen=True)
class Found:
    scores: Any
    count: int


def predicted(rows: slice) -> dict[str, Any]:
    """A prediction of each kind for these rows of a batch."""
    scores = torch.arange(21.0).reshape(7, 3)[rows]
    names = [f"row {row}" for row in range(7)][rows]
    return {
        "tensor": scores,
        "array": scores.numpy(),
        "strings": names,
        "pair": (scores, scores * 2),
        "columns": [scores, scores.sum(1)],
        "named": Pair(scores, names),
        "record": Found(scores, 3),
        "rows": [{"name": name, "score": float(s)} for name, s in zip(names, scores[:, 0])],  # noqa: B905
        "by name": dict(zip(names, scores.tolist(), strict=True)),
        "tensors": list(scores),
        "nothing": None,
        "classes": ["cat", "dog", "cow", "owl"],
        "batch_idx": 4,
        "weight": torch.tensor(2.0),
    }


def test_predictions_of_all_kinds_are_those_of_the_whole_batch() -> None:
    parts = [predicted(slice(a, b)) for a, b in ((0, 3), (3, 5), (5, 7))]
    joined, whole = concatenate(parts, ROWS), predicted(slice(0, 7))
    assert share_sizes(7, 3) == list(ROWS)
    assert isinstance(joined["array"], np.ndarray)
    assert isinstance(joined["named"], Pair)
    assert isinstance(joined["record"], Found)
    assert same(joined, whole)


def test_a_pair_is_none_of_rows_although_there_are_two() -> None:
    parts = [(torch.zeros(2, 3), ["a", "b"]), (torch.ones(2, 3), ["c", "d"])]
    scores, names = concatenate(parts, [2, 2])
    assert scores.shape == (4, 3)
    assert names == ["a", "b", "c", "d"]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor | np.ndarray):
        return bool((torch.as_tensor(first) == torch.as_tensor(second)).all())
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Found):
        return same(first.scores, second.scores) and first.count == second.count
    return bool(first == second)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        ["a, b", "c, d"],
        [{"x": 1, "y": 1}, {"x": 1}],
        [torch.zeros(2), None],
    ],
)
def test_what_belongs_to_a_microbatch_as_a_whole_is_refused(parts: list[Any]) -> None:
    with pytest.raises(ModelError, match="num_microbatches=1"):
        concatenate(parts, [2, 2])


def test_a_number_of_rows_is_a_microbatch_s_own() -> None:
    with pytest.raises(ModelError, match="int for a microbatch as a whole"):
        concatenate([2, 2], [2, 2])
    assert concatenate([2, 2], [3, 3]) == 2
