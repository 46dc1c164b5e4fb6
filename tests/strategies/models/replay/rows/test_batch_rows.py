from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models.replay.replay_model import ReplayModel
from strategies.models.replay.rows.batch_rows import Rows, Share, join


@pytest.mark.parametrize("rows", [Rows(0), Rows(1), Rows(0, 2), Rows(1, 3)])
def test_a_joined_value_has_the_parts_that_it_was_made_of(rows: Rows) -> None:
    whole = torch.randn(30, 30)
    parts = [Share(0, 3, 5), Share(3, 2, 5)]
    head, second = (share.of(whole, rows) for share in parts)
    assert head is not None and second is not None
    assert parts[1].ways(whole, second) == [rows]
    assert torch.equal(join([head, second], rows), whole)


def test_values_of_other_rows_are_not_found() -> None:
    share = Share(2, 2, 4)
    whole = torch.randn(4, 3)
    assert share.ways(whole, whole[:2]) == []
    assert share.ways(whole, whole) == [None]
    assert share.ways(whole, torch.randn(4, 3)) == []


class Step(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.shift = nn.Parameter(torch.ones(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = batch
        if self.kind == "views":
            x = torch.cat([x, x * 2])
        elif self.kind == "apart":
            x = torch.stack([x, x * 2, x * 3], 1).flatten(0, 1)
        elif self.kind == "time first":
            x = torch.stack([x, x * 2])
        elif self.kind == "noise":
            x = x + torch.randn_like(x)
        elif self.kind == "share":
            x = x * torch.rand(())
        elif self.kind == "python":
            x = x * random.random()
        hidden = nn.functional.dropout(self.a(x), 0.5) + x + self.shift
        if self.kind == "mixed":
            hidden = hidden - hidden.mean(0)
        out = self.b(nn.functional.layer_norm(hidden, (6,)))
        return out.square().mean() + (hidden.mean() if self.kind == "waits" else 0)


def rows_of(kind: str) -> list[Rows | None]:
    torch.manual_seed(0)
    batch = torch.randn(5, 6)
    model = ReplayModel.probe(Step(kind), batch)
    model.cut((range(1), range(1, 2)), (1,))
    model.postpone_loss()
    model.compare_rows("train", batch, batch[3:], (3, 2))
    (found,) = model._rows.values()
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", [Rows(0)]),
        ("views", [Rows(0, 2)]),
        ("apart", [Rows(0)]),
        ("time first", [Rows(1)]),
        ("waits", [Rows(0), Rows(0)]),
        ("noise", [Rows(0)]),
        ("share", [Rows(0)]),
        ("python", [Rows(0)]),
    ],
)
def test_rows_are_found_wherever_the_step_puts_them(kind: str, expected: list[Rows | None]) -> None:
    assert rows_of(kind) == expected


def test_what_is_no_function_of_its_row_is_refused_with_its_line() -> None:
    with pytest.raises(
        ModelError, match=r"test_batch_rows.py:\d+: what b gives .* from microbatches"
    ):
        rows_of("mixed")
