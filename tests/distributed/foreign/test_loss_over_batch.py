"""Losses that compare rows with each other: one of the whole batch, as stock Lightning has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from tests.ranks.comparison import (
    BATCH,
    EVERY_LAYOUT,
    WIDTH,
    Net,
    equal_to_stock,
    examples,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
WHOLE = {"loss_over": "batch"}


def all_rows(module: Any, z: Tensor) -> Tensor:
    """Of all replicas, one behind the other; gradients go back to them."""
    return module.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1])  # type: ignore[no-any-return]


def info_nce(first: Tensor, second: Tensor, scale: Tensor | float = 2.0) -> Tensor:
    """Each row against all rows of the other view; its own one is the right answer."""
    first, second = nn.functional.normalize(first), nn.functional.normalize(second)
    similar = scale * first @ second.T
    answer = torch.arange(len(similar))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(similar, answer) + cross_entropy(similar.T, answer)) / 2


class SimCLR(Net):
    """Two views of each row run at once: first all first ones, then all second ones."""

    def views(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.roll(1, 1)])

    def apart(self, z: Tensor) -> Any:
        return z.chunk(2)

    def loss(self, batch: Any) -> Tensor:
        first, second = self.apart(self(self.views(batch[0])))
        return info_nce(all_rows(self, first), all_rows(self, second))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Neighbours(SimCLR):
    """A row's two views stand together."""

    def views(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.roll(1, 1)], 1).flatten(0, 1)

    def apart(self, z: Tensor) -> Any:
        return z.unflatten(0, (-1, 2)).unbind(1)


class Towers(Net):
    """As CLIP: two towers, of which the first one's features wait, and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images = nn.functional.normalize(self(batch[0]))
        texts = nn.functional.normalize(self.text(batch[0].flip(1)))
        loss = info_nce(all_rows(self, images), all_rows(self, texts), self.scale.exp())
        self.log("scale", self.scale.detach())
        return loss


class Sequences(Net):
    """Time comes first between the layers; hard negatives of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.stack([batch[0], batch[0].roll(2, 1), batch[0].roll(3, 1)])  # [time, rows, width]
        z = self(x)
        pooled = z.mean(0)
        apart = torch.cdist(all_rows(self, pooled), all_rows(self, z[0].contiguous()))
        return torch.relu(apart.diagonal() - apart.min(1).values + 1).mean()


class Cox(Net):
    """A partial likelihood: the risk set of a row is all rows that live longer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        risk = all_rows(self, self(batch[0]).sum(1, keepdim=True)).squeeze(1)
        lived = all_rows(self, batch[0][:, :1]).squeeze(1).detach()
        later = lived[None] >= lived[:, None]
        masked = risk[None].expand(len(risk), -1).masked_fill(~later, -torch.inf)
        return (masked.logsumexp(1) - risk).mean()


def simclr() -> Any:
    return SimCLR()


def neighbours() -> Any:
    return Neighbours()


def towers() -> Any:
    return Towers()


def sequences() -> Any:
    return Sequences()


def cox() -> Any:
    return Cox()


MORE = [pytest.param(case, marks=pytest.mark.full) for case in (towers, neighbours, sequences, cox)]


@EVERY_LAYOUT
@pytest.mark.parametrize("case", [simclr, *MORE])
def test_one_loss_of_the_whole_batch_is_that_of_stock_lightning(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, strategy=WHOLE)


class Ragged(SimCLR):
    """Batches of 8 rows, one of 8 and a last one of 2, for four microbatches."""

    def loaders(self, *, replicas: int) -> Any:
        return examples(rows=26, replicas=replicas)


def ragged() -> Any:
    return Ragged()


def test_short_batches_accumulation_and_clipping_go_with_it(ranks: Callable[[int], Ranks]) -> None:
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    equal_to_stock(ranks, ragged, "zb_v", strategy=WHOLE, **more)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "foldx_fifo", "hanayo", "zb_h1"])
def test_other_schedules_run_all_forwards_first(
    ranks: Callable[[int], Ranks], schedule: str
) -> None:
    equal_to_stock(ranks, towers, "1f1b", strategy={**WHOLE, "schedule": schedule})


@pytest.mark.full
@pytest.mark.parametrize("more", [{"recompute": "full"}, {"split_backward": True}])
def test_passes_go_with_it(ranks: Callable[[int], Ranks], more: Any) -> None:
    equal_to_stock(ranks, towers, "1f1b-dp2", strategy={**WHOLE, **more})


@pytest.mark.full
def test_shared_optimizer_state_goes_with_it(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, towers, "zb_v-dp2", strategy={**WHOLE, "overlap": "zero1"})


class Noisy(Net):
    """What is drawn before the layers has two numbers for a row, and nobody knows which."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn(2 * len(batch[0]), *batch[0].shape[1:], dtype=torch.float64)
        return (self(noise).sum(1) - noise.sum(1)).square().mean()


class Auxiliary(Net):
    """A layer's own loss has no rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        own = hidden.square().mean()
        return nn.functional.cross_entropy(self.head(hidden), batch[1]) + own


def noisy() -> Any:
    return Noisy()


def auxiliary() -> Any:
    return Auxiliary()


@pytest.mark.parametrize(
    ("case", "schedule", "reason"),
    [
        (noisy, "1f1b", "depends on random numbers"),
        (auxiliary, "1f1b", "what mean gives is used behind the last layer and cannot be put"),
        (simclr, "dualpipe", "schedule=dualpipe holds every stage twice"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_the_first_step(
    ranks: Callable[[int], Ranks], case: Callable[[], Any], schedule: str, reason: str
) -> None:
    place = f"{__name__}:{case.__name__}"
    answers = ranks(2).run(refusal, case=place, strategy={"pp": 2, "schedule": schedule, **WHOLE})
    assert all(reason in answer for answer in answers), answers


def refusal(case: str, strategy: dict[str, Any]) -> str:
    with pytest.raises(Exception) as refused:
        train(case, strategy=strategy)
    return f"{refused.type.__name__} {refused.value}"


class HuggingFaceClip(pl.LightningModule):
    """The library's own model, with its own contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPConfig, CLIPModel

        torch.manual_seed(0)
        shared = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
        text = {**shared, "num_hidden_layers": 2, "vocab_size": 16, "max_position_embeddings": 6}
        text |= {"eos_token_id": 15, "bos_token_id": 0, "pad_token_id": 1}
        vision = {**shared, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        self.clip = CLIPModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pixels, words = batch
        out = self.clip(input_ids=words, pixel_values=pixels, return_loss=True)
        self.log("loss", out.loss)
        return out.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loaders(self, *, replicas: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
        words = torch.randint(2, 15, (16, 6), generator=generator)
        words[:, -1] = 15
        data = torch.utils.data.TensorDataset(pixels, words)
        return torch.utils.data.DataLoader(data, batch_size=8 * replicas)


def hugging_face_clip() -> Any:
    return HuggingFaceClip()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1f1b", "zb_v"])
def test_clip_of_hugging_face_is_that_of_stock_lightning(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    pytest.importorskip("transformers")
    equal_to_stock(ranks, hugging_face_clip, layout, strategy=WHOLE)


class Measured(Towers):
    """Counters and metric objects of the step are those of one run on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen += 1
        self.accuracy(loss.detach())
        self.log("mean", self.accuracy, on_step=False, on_epoch=True)
        self.log("seen", float(self.seen))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("told", outputs["loss"])


def measured() -> Any:
    return Measured()


@pytest.mark.parametrize("layout", ["1f1b"])
def test_what_the_step_leaves_is_that_of_one_run(
    ranks: Callable[[int], Ranks], layout: str
) -> None:
    equal_to_stock(ranks, measured, layout, strategy=WHOLE)


class Hardest(Net):
    """A mean over more rows than a microbatch has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log("hardest", losses.topk(3).values.mean())
        return losses.topk(5).values.mean()


class Grouped(Net):
    """Groups of rows between layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        groups = hidden.reshape(4, -1, WIDTH).mean(1).sum()
        return nn.functional.cross_entropy(self.head(hidden - groups), batch[1])


class Asserted(Net):
    """Says how many rows it wants, between layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        assert len(hidden) == BATCH, "a whole batch"
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


class Edges(Net):
    """A graph whose nodes are the rows of a batch, all beside the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0])
        neighbour = hidden[torch.tensor([BATCH - 1])]
        return nn.functional.cross_entropy(self.head(hidden + neighbour), batch[1])


def hardest() -> Any:
    return Hardest()


def edges() -> Any:
    return Edges()


def asserted() -> Any:
    return Asserted()


def grouped() -> Any:
    return Grouped()


def test_a_step_that_needs_more_rows_than_a_microbatch_has(ranks: Callable[[int], Ranks]) -> None:
    equal_to_stock(ranks, hardest, "1f1b", strategy=WHOLE)
    for case, way_out, error in (
        (hardest, "loss_over=batch, which computes one loss of all rows, or a smaller", "Runtime"),
        (grouped, "a smaller num_microbatches.", "Runtime"),
        (edges, "a smaller num_microbatches.", "Index"),
        (asserted, "a smaller num_microbatches.", "Assertion"),
    ):
        place = f"{__name__}:{case.__name__}"
        for answer in ranks(2).run(refusal, case=place, strategy={"pp": 2, "schedule": "1f1b"}):
            assert answer.startswith("FewRowsError"), answer
            assert "training_step runs on the 8 rows of a batch, but " in answer
            assert f"not on the 2 of a microbatch ({error}Error: " in answer
            assert f"Try {way_out}" in answer


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self(batch[0]).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def by_hand() -> Any:
    return ByHand()


def test_backwards_by_hand_are_refused(ranks: Callable[[int], Ranks]) -> None:
    place = f"{__name__}:by_hand"
    answers = ranks(2).run(refusal, case=place, strategy={"pp": 2, "schedule": "1f1b", **WHOLE})
    assert all("manual optimization" in answer for answer in answers), answers
