"""Ranks of one pipeline whose loaders are not of the same length: all say so, and none waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from strategies.errors import DataError
from strategies.runtime.lightning import common_end
from tests.distributed.test_common_end import WIDTH, Net
from tests.ranks.fit import trainer_of

pytestmark = pytest.mark.distributed


class Stream(IterableDataset[Tensor]):
    """Rows that are all alike, so that checksums of batches say nothing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        for _ in range(self.rows):
            yield (torch.linspace(0, 1, WIDTH, dtype=torch.float64),)


class Promise(Stream):
    def __len__(self) -> int:
        return 32


class All(Net):
    def __init__(self, whole: bool) -> None:
        super().__init__(0)
        self.whole = whole

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.layers(batch[0])
        if self.whole:
            hidden = self.layers(hidden * hidden.std())
        self.log("loss", hidden.square().mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0])


def loader_of(kind: str, rows: int) -> Any:
    if kind == "map":
        data = TensorDataset(torch.ones(rows, WIDTH, dtype=torch.float64))
        return DataLoader(data, batch_size=8)
    return DataLoader((Promise if kind == "promise" else Stream)(rows), batch_size=8)


def run(
    call: str, kind: str, rows: list[int], layout: dict[str, Any], whole: bool = False,
    **options: Any,
) -> str | int:  # fmt: skip
    strategy = {"pp": 2, "num_microbatches": 2, "timeout_s": 15, **layout}
    trainer = trainer_of(strategy, **{"max_epochs": 2} | options)
    loader, equal = loader_of(kind, rows[int(os.environ["RANK"])]), loader_of("map", 24)
    given = {"val_dataloaders": loader} if call == "validate in fit" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_end, "_REFUSED_S", 0.3)  # until one knows that it fails alone
        try:
            if call in ("fit", "validate in fit"):
                trainer.fit(All(whole), equal if given else loader, **given)
            else:
                getattr(trainer, call)(All(whole), loader)
        except DataError as error:
            return str(error)
    return trainer.global_step


MORE, LESS = "rank 0 has more than 3, rank 1 has 3. ", "rank 0 has 3, rank 1 has more than 3. "
CASES: dict[str, tuple[str, str, list[int], dict[str, Any], str]] = {
    "known": ("fit", "map", [32, 24], {}, "training batches: rank 0 has 4, rank 1 has 3. "),
    "known rows": ("fit", "map", [32, 30], {}, "training rows: rank 0 has 32, rank 1 has 30. "),
    "first has more": ("fit", "stream", [32, 24], {}, f"training batches: {MORE}"),
    "last has more": ("fit", "stream", [24, 32], {}, f"training batches: {LESS}"),
    "rows": ("fit", "stream", [32, 30], {}, "in a training batch: rank 0 has 8, rank 1 has 6. "),
    "first promises": ("fit", "promise", [24, 32], {}, f"training batches: {LESS}"),
    "last promises": ("fit", "promise", [32, 24], {}, f"training batches: {MORE}"),
    "two promises": ("fit", "promise", [24, 16], {}, "rank 0 has more than 2, rank 1 has 2. "),
    "of one matrix": ("fit", "stream", [24, 32], {"pp": 1, "tp": 2}, f"training batches: {LESS}"),
    "without a flush": ("fit", "stream", [32, 24], {"schedule": "pipedream_2bw"}, MORE),
    "validation in fit": ("validate in fit", "stream", [32, 24], {}, f"validation batches: {MORE}"),
    "no validation": ("validate in fit", "map", [24, 0], {}, "rank 0 has 3, rank 1 has 0. "),
    "empty validation": ("validate in fit", "stream", [24, 0], {}, "more than 0, rank 1 has 0. "),
    "validation": ("validate", "stream", [24, 32], {}, f"validation batches: {LESS}"),
    "whole validation": ("validate", "stream", [32, 24], {"whole": True}, MORE),
    "test": ("test", "map", [32, 24], {}, "test batches: rank 0 has 4, rank 1 has 3. "),
    "test promises": ("test", "promise", [24, 32], {}, f"test batches: {LESS}"),
    "prediction": ("predict", "stream", [32, 24], {}, f"prediction batches: {MORE}"),
    "prediction rows": ("predict", "map", [32, 30], {}, "rank 0 has 32, rank 1 has 30. "),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_unequal_numbers_are_named_before_a_rank_waits(ranks: Any, case: str) -> None:
    call, kind, rows, given, said = CASES[case]
    layout = {key: value for key, value in given.items() if key != "whole"}
    whole = given.get("whole", False)
    first, second = ranks(2).run(run, call=call, kind=kind, rows=rows, layout=layout, whole=whole)
    assert first == second
    assert said in first
    assert "seed what chooses the samples" in first


@pytest.mark.full
@pytest.mark.parametrize("kind", ["map", "stream", "promise"])
def test_a_pipeline_of_a_replica_says_so_as_well(ranks: Any, kind: str) -> None:
    layout, rows = {"dp": 2}, [24, 24, 24, 16]
    options = {"use_distributed_sampler": False}
    found = ranks(4).run(run, call="fit", kind=kind, rows=rows, layout=layout, **options)
    assert len(set(found)) == 1
    known = "rank 1 has 3, rank 3 has 2. "
    assert (known if kind == "map" else "rank 1 has more than 2, rank 3 has 2. ") in found[0]


@pytest.mark.parametrize("kind", ["map", "stream", "promise"])
def test_what_ends_before_the_shorter_loader_is_no_matter(ranks: Any, kind: str) -> None:
    given = {"call": "fit", "kind": kind, "rows": [32, 30], "layout": {}}
    assert ranks(2).run(run, **given, limit_train_batches=2) == [4, 4]
    assert ranks(2).run(run, **given, max_steps=3) == [3, 3]
