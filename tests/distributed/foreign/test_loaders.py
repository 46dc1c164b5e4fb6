"""Several loaders, loaders that can be read once, and steps that take what Lightning gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Sampler, random_split

from tests.ranks.comparison import (
    BATCH,
    LAYOUTS,
    Net,
    equal_to_stock,
    examples,
    spread,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


class Pairs(Net):
    """The loss of each loader's batch, added up."""

    def loaders(self, replicas: int) -> Any:
        return {"a": examples(replicas=replicas), "b": examples(replicas=replicas, seed=3)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch["a"], batch["b"])

    def losses(self, *pairs: Any) -> Any:
        return sum(cross_entropy(self(pair[0]), pair[1]) for pair in pairs if pair is not None)


class Lists(Pairs):
    def loaders(self, replicas: int) -> Any:
        return [examples(replicas=replicas), examples(replicas=replicas, seed=3)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(*batch)


class Nested(Pairs):
    def loaders(self, replicas: int) -> Any:
        return {"a": Lists.loaders(self, replicas), "b": examples(replicas=replicas, seed=4)}  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(*batch["a"], batch["b"])


class Cycled(Pairs):
    mode = "max_size_cycle"

    def loaders(self, replicas: int) -> Any:
        short = examples(rows=16, replicas=replicas, seed=3)
        return CombinedLoader({"a": examples(replicas=replicas), "b": short}, self.mode)


class Shortest(Cycled):
    mode = "min_size"


class Longest(Cycled):
    """Then one of the loaders has nothing more to give."""

    mode = "max_size"


class Unequal(Pairs):
    """Batches of 8 and 4 rows."""

    def loaders(self, replicas: int) -> Any:
        short = DataLoader(examples(rows=16, seed=3).dataset, batch_size=BATCH // 2 * replicas)
        return {"a": examples(replicas=replicas), "b": short}


class Indivisible(Pairs):
    """Batches of 8 and 3 rows, which no number of microbatches but one divides."""

    def loaders(self, replicas: int) -> Any:
        odd = DataLoader(examples(rows=12, seed=3).dataset, batch_size=3 * replicas)
        return {"a": examples(replicas=replicas), "b": odd}


class Working(Pairs):
    def loaders(self, replicas: int) -> Any:
        return {
            name: DataLoader(loader.dataset, batch_size=loader.batch_size, num_workers=1)
            for name, loader in super().loaders(replicas).items()
        }


class Transferred(Net):
    """What the loader gives is no batch yet."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"x": 2 * batch["x"]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self(batch["x"]), batch["y"])


class TwoValidations(Net):
    """Batches of two kinds, for each of which the step goes another way."""

    def loaders(self, replicas: int) -> Any:
        self.replicas = replicas
        return examples(replicas=replicas)

    def val_dataloader(self) -> Any:
        images = [{"x": x} for x, _ in examples(seed=5).dataset]  # type: ignore[attr-defined]
        plain = examples(seed=2, replicas=self.replicas)
        return CombinedLoader(
            [plain, DataLoader(images, batch_size=BATCH * self.replicas)], "sequential"
        )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if dataloader_idx == 0:
            self.log("loss", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)
        else:
            self.log("mean", self.net(batch["x"]).mean(), sync_dist=True)


SEVERAL = [Pairs, Nested, Cycled, Longest, Indivisible, TwoValidations]


@spread(SEVERAL, seldom=[Lists, Shortest, Unequal, Transferred])
def test_batches_of_several_loaders_are_cut_each_by_its_own_rows(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout)


# -- batches with a list of what belongs to each row, as for detection -----------------------------


class Boxes(Net):
    """Rows have one to four boxes each, in a list of dicts."""

    def loaders(self, replicas: int) -> Any:
        data: Any = examples().dataset
        boxes = torch.randn(32, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        rows = [
            (x, {"label": y, "boxes": boxes[number][: 1 + number % 4]})
            for number, (x, y) in enumerate(data)
        ]
        return DataLoader(rows, batch_size=BATCH * replicas, collate_fn=_with_targets)

    def val_dataloader(self) -> Any:
        return self.loaders(1)

    def cost(self, batch: Any) -> torch.Tensor:
        losses = [
            cross_entropy(row[None], target["label"][None]) * target["boxes"].mean().exp()
            for row, target in zip(self(batch[0]), batch[1], strict=True)
        ]
        return torch.stack(losses).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.cost(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("cost", self.cost(batch), batch_size=len(batch[0]), sync_dist=True)


def _with_targets(rows: Any) -> Any:
    return torch.stack([x for x, _ in rows]), [target for _, target in rows]


@spread([Boxes])
def test_lists_with_an_entry_per_row_are_cut_with_the_rows(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaders_with_workers(layout: str, ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Working, layout)


# -- what can be read once: the batch that the model was probed with is not lost ------------------


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = iter(list(examples().dataset))  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        return self.rows


class Counting(Sampler[int]):
    """Another order each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([(7 * row + self.asked) % 32 for row in range(32)])

    def __len__(self) -> int:
        return 32


class Generated(Net):
    def loaders(self, replicas: int) -> Any:
        return (batch for batch in list(examples()))


class Streamed(Net):
    def loaders(self, replicas: int) -> Any:
        return DataLoader(Stream(), batch_size=BATCH)


class OneStreamed(Pairs):
    def loaders(self, replicas: int) -> Any:
        return {"a": DataLoader(Stream(), batch_size=BATCH), "b": examples(seed=3)}


class Sampled(Net):
    def loaders(self, replicas: int) -> Any:
        return DataLoader(examples().dataset, batch_size=BATCH * replicas, sampler=Counting())


class Epochs(Counting):
    """Another order for each epoch, of which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(7 * row + self.epoch) % 32 for row in range(32)])


class InEpochs(Net):
    def loaders(self, replicas: int) -> Any:
        return DataLoader(examples().dataset, batch_size=BATCH * replicas, sampler=Epochs())


class Hooked(Net):
    """Loaders of hooks: others at each call, or parts that are drawn."""

    calls = 0

    def loaders(self, replicas: int) -> None:
        self.rows = BATCH * replicas

    def train_dataloader(self) -> Any:
        self.calls += 1
        return examples(seed=self.calls, replicas=self.rows // BATCH)


class Split(Hooked):
    def train_dataloader(self) -> Any:
        self.calls += 1
        data = random_split(examples(rows=48).dataset, [32, 16])[0]  # type: ignore[arg-type]
        return DataLoader(data, batch_size=self.rows)


def split() -> Net:
    module = Split()
    torch.manual_seed(2)
    return module


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, "1f1b") for case in (Generated, OneStreamed, InEpochs)),
        *((case, "zb_v-dp2") for case in (Sampled, Hooked)),
        *(pytest.param(case, "1f1b", marks=pytest.mark.full) for case in (Streamed, Sampled)),
        pytest.param(split, "zb_v-dp2", marks=pytest.mark.full),
    ],
)
def test_data_is_asked_for_as_often_as_under_stock_lightning(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    more = {} if case in (Generated, Streamed, OneStreamed) else {"max_epochs": 2}
    again = {"reload_dataloaders_every_n_epochs": 1} if case in (Hooked, split) else {}
    equal_to_stock(ranks, case, layout, **more, **again)


# -- arguments of steps ---------------------------------------------------------------------------


class BatchAlone(Net):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self.training_step(batch), sync_dist=True)


class BatchAndKeywords(Net):
    def training_step(self, batch: Any, **_: Any) -> Any:  # type: ignore[override]
        return cross_entropy(self(batch[0]), batch[1])


class AllArguments(Net):
    def training_step(self, *args: Any, **_: Any) -> Any:
        batch, batch_idx = args
        return cross_entropy(self(batch[0]), batch[1]) * (1 + batch_idx)

    def validation_step(self, *args: Any) -> None:
        self.log("loss", self.training_step(*args), sync_dist=True)


class OtherNames(Net):
    def training_step(self, b: Any, i: int) -> Any:  # type: ignore[override]
        return cross_entropy(self(b[0]), b[1]) * (1 + i)

    def validation_step(self, b: Any, i: int, dataloader_idx: int = 0) -> None:
        self.log("loss", self.training_step(b, i) * (1 + dataloader_idx), sync_dist=True)


class LoaderAlone(Net):
    """Lightning gives a second argument the batch's index, whatever its name."""

    def validation_step(self, batch: Any, dataloader_idx: int = 0) -> None:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss * (1 + dataloader_idx), sync_dist=True)


@spread([BatchAlone, AllArguments, LoaderAlone], seldom=[BatchAndKeywords, OtherNames])
def test_a_step_gets_the_arguments_that_lightning_gives_it(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout)
