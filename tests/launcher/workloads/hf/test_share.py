"""What a sharer holds of a library's model, and what it cannot be cut into."""

from __future__ import annotations

import re

import pytest
import torch

from launcher.workloads.hf.model import HfLanguageModel
from launcher.workloads.model_share import check_tp, model_shares, vocabulary_note
from strategies.errors import ModelError, PlanError
from strategies.runtime.unit_model import UnitModel
from tests.strategies.runtime.tensor_parallel.fake_ranks import FakeRanks
from tests.tiny_models import shape_of, write_model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "vocab_size": 65}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_parameters_per_unit_are_those_of_the_cut_module(family, changes, tmp_path):
    write_model(tmp_path, family, **changes)
    shape = shape_of(tmp_path)
    with torch.device("meta"):
        module = HfLanguageModel(shape)
    model = UnitModel(module)
    model.shard(FakeRanks(2))
    model.cut([range(len(model.units))], [0])
    seen: set[int] = set()
    for (name, unit), share in zip(module.pipeline_units(), model_shares(shape, 2), strict=True):
        own = {id(p): p.numel() for p in unit.parameters() if id(p) not in seen}
        seen |= set(own)
        assert sum(own.values()) == share.parameters, name
    assert (vocabulary_note(shape, 2) is not None) == (shape.vocab == 65)


@pytest.mark.parametrize(
    ("family", "tp", "sequence_parallel", "message"),
    [
        ("llama", 4, False, "tp=4 does not divide num_key_value_heads=2. Try tp=2."),
        ("llama", 2, True, "sequence_parallel=true: layers of the transformers library"),
        ("gpt2", 2, False, "tp=2: the transformers library keeps queries, keys and values"),
    ],
)
def test_what_cannot_be_cut_is_told_before_anything_starts(
    family, tp, sequence_parallel, message, tmp_path
):
    write_model(tmp_path, family)
    with pytest.raises(PlanError, match=re.escape(message)):
        check_tp(shape_of(tmp_path), tp, sequence_parallel=sequence_parallel)


def test_heads_stay_whole_where_the_parent_did_not_look(tmp_path):
    write_model(tmp_path, "llama")
    with torch.device("meta"):
        model = UnitModel(HfLanguageModel(shape_of(tmp_path)))
    model.shard(FakeRanks(4))
    with pytest.raises(ModelError, match=r"tp=4 does not divide the 2 blocks of 8 .*k_proj"):
        model.cut([range(5)], [0])
