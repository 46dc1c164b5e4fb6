"""Hugging Face models on several ranks train as transformers trains them, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from launcher.workloads.hf.export import export_checkpoint, library_name
from strategies.plan import Policy
from tests.distributed.hf_training import HfCase, reference, train_hf
from tests.distributed.pool import Ranks
from tests.tiny_models import batch_of, shape_of, write_model

TOLERANCE = 1e-8

pytestmark = pytest.mark.distributed

NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


@pytest.mark.parametrize(
    ("family", "changes", "schedule", "padded", "recompute"),
    [
        ("llama", {}, "1f1b", False, "none"),
        ("llama", {"tie_word_embeddings": True}, "interleaved_1f1b", True, "none"),
        ("gpt2", NO_DROPOUT, "foldx_fifo", False, "none"),
        ("qwen2", {}, "zb_h1", True, "none"),
        ("qwen3", {"tie_word_embeddings": True}, "1f1b", False, "none"),
        ("llama", {}, "zb_h1", True, "full"),
        ("gpt2", NO_DROPOUT, "1f1b", False, "selective"),
        ("llama", {}, "zb_h1", True, "selective"),
    ],
    ids=[
        "llama",
        "llama-tied-padded",
        "gpt2",
        "qwen2-padded",
        "qwen3-tied",
        "llama-recomputed",
        "gpt2-selective",
        "llama-split-selective",
    ],
)
def test_two_ranks_train_as_transformers_does(
    family: str,
    changes: dict[str, object],
    schedule: str,
    padded: bool,
    recompute: Policy,
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, family, **changes)
    case = HfCase(str(tmp_path), schedule=schedule, padded=padded, recompute=recompute)
    losses = reference(model, case)
    results = ranks(2).run(train_hf, case=case)
    expected = dict(model.named_parameters(remove_duplicate=False))
    seen = set()
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=TOLERANCE)
        for name, value in result["parameters"].items():
            theirs = library_name(name)
            seen.add(theirs)
            assert (value - expected[theirs]).abs().max().item() < TOLERANCE, name
    assert seen >= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "changes", "schedule", "padded"),
    [
        ("llama", {}, "1f1b", True),
        ("llama", {"tie_word_embeddings": True, "pad_token_id": 3}, "zb_h1", False),
        ("qwen3", {}, "1f1b", False),
    ],
    ids=["llama-padded", "llama-tied", "qwen3"],
)
def test_two_stages_on_two_sharers_each_train_as_transformers_does(
    family: str,
    changes: dict[str, object],
    schedule: str,
    padded: bool,
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, family, **changes)
    saved = tmp_path / "saved.ckpt"
    case = HfCase(str(tmp_path), schedule=schedule, padded=padded, tp=2, save=str(saved))
    losses = reference(model, case)
    expected = dict(model.named_parameters(remove_duplicate=False))
    seen = set()
    cut = set()
    for rank, result in enumerate(ranks(4).run(train_hf, case=case)):
        assert result["losses"] == pytest.approx(losses, abs=TOLERANCE)
        for name, value in result["parameters"].items():
            theirs = library_name(name)
            seen.add(theirs)
            whole = expected[theirs]
            shard = result["shards"].get(name)
            if shard is not None:
                cut.add(theirs.rpartition(".")[0].rpartition(".")[2])
                whole = shard.local(whole.detach(), rank % 2)
            assert (value - whole).abs().max().item() < TOLERANCE, name
    assert seen >= {name for name, _ in model.named_parameters()}
    assert cut >= {"embed_tokens", "q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"}
    _exported_equals(model, saved, tmp_path)


def _exported_equals(model: nn.Module, saved: Path, folder: Path) -> None:
    """What transformers makes of the export gives the logits of the model it trained itself."""
    export_checkpoint(saved, shape_of(folder), folder / "exported")
    written = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    assert written.dtype == torch.float64
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        difference = written(tokens).logits - model.eval()(tokens).logits
    assert difference.abs().max().item() < TOLERANCE


def test_an_architecture_without_a_plan_is_refused(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    write_model(tmp_path, "gpt2", **NO_DROPOUT)
    with pytest.raises(AssertionError, match="no tensor-parallel plan for model_type=gpt2"):
        ranks(2).run(train_hf, case=HfCase(str(tmp_path), pp=1, tp=2))
