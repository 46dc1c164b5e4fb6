import itertools
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from launcher.workloads.data.module import TextDataModule
from launcher.workloads.data.source import TextSource
from launcher.workloads.data.tokens import load_tokens
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer_shape import TransformerShape
from strategies.errors import DataError

SHAPE = TransformerShape(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8, vocab=256, sequence=8)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning 2.6.6 itself uses what torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(8 * 40 + 1, dtype="<u2").tofile(path)
    return TextSource(kind="tokens", path=str(path))


class Placed:
    """The part of a Trainer that tells a data module where it stands."""

    def __init__(self, num_replicas, rank):
        self.distributed_sampler_kwargs = {"num_replicas": num_replicas, "rank": rank}
        self.strategy = SimpleNamespace(root_device=torch.device("cpu"))


def loaded(source, *, place=None, **options):
    data = TextDataModule(source, **{"sequence": 8, "batch_size": 4, **options})
    data.trainer = place
    data.setup("fit")
    return data


def firsts(loader):
    """The first token of each sequence, batch by batch."""
    return [batch["tokens"][:, 0].tolist() for batch in loader]


def test_batches_are_int64_and_targets_come_one_token_later(source):
    data = loaded(source)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            assert set(batch) == {"tokens", "targets"}
            assert batch["tokens"].shape == batch["targets"].shape == (4, 8)
            assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
            assert torch.equal(batch["tokens"] + 1, batch["targets"])
    train = {token for batch in firsts(data.train_dataloader()) for token in batch}
    assert train == set(range(0, 8 * 36, 8))
    assert firsts(data.val_dataloader()) == [list(range(8 * 36, 8 * 40, 8))]
    assert firsts(data.test_dataloader()) == firsts(data.predict_dataloader())


def test_loading_neither_reads_nor_moves_the_global_generator(source):
    torch.manual_seed(0)
    first = firsts(loaded(source).train_dataloader())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert firsts(loaded(source).train_dataloader()) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_replicas_share_out_what_one_would_read(source):
    alone = firsts(loaded(source).train_dataloader())
    shares = [
        firsts(loaded(source, batch_size=2, place=Placed(2, rank)).train_dataloader())
        for rank in range(2)
    ]
    assert [a + b for a, b in zip(*shares, strict=True)] == alone


def test_the_last_validation_batch_may_be_smaller_when_asked_for(source):
    options = {"batch_size": 3, "val_fraction": 0.25}
    assert list(map(len, firsts(loaded(source, **options).val_dataloader()))) == [3, 3, 3]
    ragged = loaded(source, full_batches=False, **options)
    assert list(map(len, firsts(ragged.val_dataloader()))) == [3, 3, 3, 1]
    assert set(map(len, firsts(ragged.train_dataloader()))) == {3}
    assert loaded(source, val_fraction=0).val_dataloader() == []


def test_ids_beyond_the_models_vocabulary_are_refused_before_training(source):
    loaded(source, vocab=321)
    with pytest.raises(
        DataError, match=r"token id 320, but model\.vocab=320 .* Try model\.vocab=null"
    ):
        loaded(source, vocab=320)


def test_ids_are_checked_again_block_by_block(source, monkeypatch):
    monkeypatch.setattr("launcher.workloads.data.module._CHECKED_IDS", 10)
    data = loaded(source, vocab=300)
    with pytest.raises(DataError, match=r"token id 304, but model\.vocab=300"):
        list(data.val_dataloader())


def test_too_short_a_text_is_refused_with_the_true_number_of_replicas(source):
    with pytest.raises(DataError, match=r"4 validation sequences .* dp=2"):
        loaded(source, place=Placed(2, 0))


def test_worker_processes_give_the_same_batches(source):
    data = loaded(source, num_workers=1)
    assert firsts(data.train_dataloader()) == firsts(loaded(source).train_dataloader())


class Watching(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        first = batch["tokens"][:, 0].tolist()
        self.seen.append((trainer.current_epoch, batch_idx, first))


def fit(tmp_path, *, max_steps, ckpt_path=None, save_every=None, **options):
    # Bytes that differ from block to block, so that blocks can be told apart.
    path = tmp_path / "text"
    path.write_bytes(bytes(itertools.islice(itertools.cycle(range(251)), 8 * 40 + 1)))
    watching = Watching()
    callbacks = [watching]
    if save_every:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                tmp_path / "saved", filename="{step}", every_n_train_steps=save_every
            )
        )
    run = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(save_every),
        callbacks=callbacks,
        max_steps=max_steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        **options,
    )
    data = TextDataModule(TextSource(kind="text", path=str(path)), sequence=8, batch_size=4, seed=5)
    run.fit(LanguageModel(SHAPE), data, ckpt_path=ckpt_path)
    return watching.seen


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("stop", [4, 9, 11])
def test_a_resumed_run_sees_what_an_uninterrupted_one_would(tmp_path, stop):
    whole = fit(tmp_path, max_steps=20)
    assert len({tuple(first) for _, _, first in whole[:9]}) == 9  # an epoch has nine batches
    fit(tmp_path, max_steps=stop, save_every=stop)
    resumed = fit(tmp_path, max_steps=20, ckpt_path=tmp_path / "saved" / f"step={stop}.ckpt")
    assert resumed == whole[stop:]


def test_lightning_leaves_the_order_alone(source):
    data = loaded(source)
    loader = data.train_dataloader()
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, torch.utils.data.distributed.DistributedSampler)
    assert load_tokens(source).dtype == np.uint16


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_repeats_the_same_batches(tmp_path):
    seen = [first for _, _, first in fit(tmp_path, max_steps=6, overfit_batches=2)]
    assert seen == seen[:2] * 3
    assert seen[0] != seen[1]
