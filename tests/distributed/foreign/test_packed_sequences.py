"""Recurrent layers on packed sequences come to what they come to without a pipeline.

Batches are padded to six places and have shorter sequences, whose longest differs from batch to
batch and from microbatch to microbatch. They are filled up to six again (``total_length``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import ModelError
from tests.ranks.comparison import BATCH, CLASSES, LAYOUTS, equal_to_stock, spread, train
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

WORDS, WIDTH, PLACES, ROWS = 20, 8, 6, 32


class Text(pl.LightningModule):
    """The longest of a batch is 4, 5, 3 and 4 long; replicas have rows of the same lengths."""

    rank_by_length = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.recurrent: nn.Module = nn.LSTM(
            WIDTH, WIDTH, batch_first=True, num_layers=2, bidirectional=True
        )
        self.mixed = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.inner(self.words(x)).relu(), lengths, batch_first=True, enforce_sorted=False
        )
        outputs, _ = self.recurrent(packed)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=x.size(1))
        return padded.mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths, y = batch
        loss = cross_entropy(self.head(self.mixed(self.features(x, lengths)).relu()), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loaders(self, replicas: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(1, WORDS, (ROWS, PLACES), generator=generator)
        lengths = torch.randint(1, 4, (ROWS // 2,), generator=generator)
        lengths[0], lengths[5], lengths[13] = 4, 5, 4
        lengths = lengths.repeat_interleave(2)
        if self.rank_by_length:
            lengths = lengths.view(-1, 2 * BATCH).sort(1, descending=True)[0].flatten()
        x[torch.arange(PLACES)[None] >= lengths[:, None]] = 0
        y = torch.randint(CLASSES, (ROWS,), generator=generator)
        return DataLoader(TensorDataset(x, lengths, y), batch_size=BATCH * max(replicas, 1))


class Encoder(nn.Module):
    """Packs and fills up by itself, to the longest sequence where nobody says how far."""

    def __init__(self, length: int | None = PLACES) -> None:
        super().__init__()
        self.length = length
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = self.recurrent(packed)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=self.length)
        return self.outer(padded) + x[:, : padded.size(1)]  # type: ignore[no-any-return]


class Inside(Text):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Encoder() for _ in range(4))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        del self.recurrent

    def features(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.inner(self.words(x))
        for block in self.blocks:
            hidden = block(hidden, lengths)
        return hidden.mean(1)


class NoLength(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Encoder(None) for _ in range(4))


class Ranked(Text):
    """Time first, rows sorted by length, noise, and the states at the end."""

    rank_by_length = True

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True)

    def features(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.inner(self.words(x)).transpose(0, 1)
        packed = pack_padded_sequence(hidden, lengths)
        outputs, states = self.recurrent(packed)
        padded, _ = pad_packed_sequence(outputs, padding_value=-1.0, total_length=PLACES)
        return torch.cat([states[-2], states[-1]], 1) + padded.mean(0)


class Layered(Text):
    """Layers work on what is packed, and on rows of the batch that were packed before them."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.GRU(2 * WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def features(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
        packed = pack_sequence(rows, enforce_sorted=False)
        packed = packed._replace(data=self.inner(self.words(packed.data)))
        first, _ = self.recurrent(packed)
        again = PackedSequence(first.data.tanh(), *first[1:])
        outputs, _ = self.second(again)
        padded, found = pad_packed_sequence(outputs, batch_first=True, total_length=PLACES)
        mask = torch.arange(padded.size(1))[None] < found[:, None]
        return (padded * mask[..., None]).sum(1) / padded.size(1)


@spread([Text, Inside, Ranked])
def test_packed_sequences_are_those_of_the_whole_batch(
    case: type[Text], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout)


def test_sequences_as_long_as_a_microbatchs_longest_do_not_cross_stages(
    ranks: Callable[[int], Ranks],
) -> None:
    with pytest.raises(ModelError, match=r"hands on tensors of .*total_length=x\.size\(1\)"):
        ranks(2).run(train, case=f"{__name__}:NoLength", strategy=LAYOUTS["1f1b"])


@pytest.mark.parametrize("layout", ["1f1b", pytest.param("1f1b-dp2", marks=pytest.mark.full)])
def test_layers_may_work_on_what_is_packed(layout: str, ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, Layered, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("more", [{"recompute": "full"}, {"loss_over": "batch"}])
def test_recomputation_and_one_loss_go_with_them(
    more: dict[str, Any], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, Inside, layout, strategy=more)
