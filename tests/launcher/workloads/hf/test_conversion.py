"""Tensors that the library renames or merges: read, written back, and refused where they cannot."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launcher.workloads.hf import weights as weights_module
from launcher.workloads.hf.export import library_name
from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.hf.skeleton import build_skeleton
from launcher.workloads.hf.weights import as_stored
from strategies.errors import ModelError
from strategies.models.unit_model import UnitModel
from tests.tiny_models import batch_of, shape_of, write_model

EVERYDAY = ("mixtral", "gpt_neox", "deepseek_v3", "minimax_m2")
OTHERS = (
    "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "minimax", "ernie4_5_moe", "jamba",
    "dbrx", "llama4_text", "mamba",
)  # fmt: skip
FAMILIES = [*EVERYDAY, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]

EXPERT = "model.layers.1.block_sparse_moe.experts.3."


def values_of(module):
    """Everything that has a value, by the library's names."""
    return {library_name(name): value for name, value in module.state_dict().items()}


def edit(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_weights_and_logits_that_the_library_gives_it(family, tmp_path):
    reference = write_model(tmp_path, family)
    module = HfLanguageModel(shape_of(tmp_path)).eval()
    expected = reference.state_dict()
    found = values_of(module)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name].double(), value.double()), name
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        theirs = reference(tokens, use_cache=False).logits
        assert (module.double()(tokens) - theirs).abs().max().item() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_has_the_names_and_values_of_save_pretrained(family, tmp_path):
    write_model(tmp_path, family)
    shape = shape_of(tmp_path)
    written = as_stored(build_skeleton(shape), values_of(HfLanguageModel(shape)))
    stored = load_file(tmp_path / "model.safetensors")
    assert set(written) == set(stored)
    for name, value in stored.items():
        assert torch.equal(written[name], value), name


def test_merged_matrices_in_many_files_are_read(tmp_path):
    reference = write_model(tmp_path, "mixtral", shard="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    found = values_of(HfLanguageModel(shape_of(tmp_path)))
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name].double(), value), name


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_a_tied_head_of_a_renamed_family_is_the_embedding(family, tmp_path):
    reference = write_model(tmp_path, family, tie_word_embeddings=True)
    shape = shape_of(tmp_path)
    found = HfLanguageModel(shape)
    embedding = reference.get_input_embeddings().weight
    assert torch.equal(values_of(found)["lm_head.weight"].double(), embedding)
    written = as_stored(build_skeleton(shape), values_of(found))
    assert set(written) == set(load_file(tmp_path / "model.safetensors"))


def test_half_precision_experts_are_merged_without_a_change(tmp_path):
    write_model(tmp_path, "mixtral")
    edit(tmp_path, lambda tensors: {name: value.bfloat16() for name, value in tensors.items()})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.dtype == torch.float32  # as config.json says
    found = values_of(HfLanguageModel(shape_of(tmp_path)))
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name], value), name


def test_experts_of_several_types_are_merged_in_the_widest(tmp_path):
    reference = write_model(tmp_path, "mixtral")
    edit(
        tmp_path,
        lambda tensors: {**tensors, f"{EXPERT}w2.weight": tensors[f"{EXPERT}w2.weight"].bfloat16()},
    )
    found = values_of(HfLanguageModel(shape_of(tmp_path)))["model.layers.1.mlp.experts.down_proj"]
    expected = reference.state_dict()["model.layers.1.mlp.experts.down_proj"].float()
    assert torch.equal(found[:3], expected[:3])
    assert torch.equal(found[3], expected[3].bfloat16().float())


def test_files_with_the_names_of_the_network_are_read_as_they_are(tmp_path):
    reference = write_model(tmp_path, "mixtral")
    reference.float().save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    found = values_of(HfLanguageModel(shape_of(tmp_path)))
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_stage_reads_the_matrices_of_its_own_experts_only(tmp_path, monkeypatch):
    write_model(tmp_path, "mixtral")
    read = []
    plain = weights_module.StoredWeights._read

    def spy(self, name):
        read.append(name)
        return plain(self, name)

    monkeypatch.setattr(weights_module.StoredWeights, "_read", spy)
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path))
    assert read == []
    units = UnitModel(module)
    units.cut([range(2), range(2, 5)], [0])
    stored = load_file(tmp_path / "model.safetensors")
    own = ("model.embed_tokens.", "model.layers.0.")
    # Each once: a merged matrix is made as a whole.
    assert sorted(read) == sorted(name for name in stored if name.startswith(own))


def without(*names):
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without(f"{EXPERT}w2.weight"), r"down_proj has shape \[3, 32, 48\], but .* \[4, 32, 48\]"),
        (without(f"{EXPERT}w1.weight"), r"7 stored tensors of .*gate_up_proj .* be converted"),
        (
            without(*(f"{EXPERT[:-2]}{i}.w2.weight" for i in range(4))),
            r"lacks 1 of 30 tensors \(model.layers.1.mlp.experts.down_proj\)",
        ),
        (
            lambda tensors: {**tensors, "model.layers.1.adapter.weight": torch.zeros(3)},
            r"has 1 of \d+ tensors \(model.layers.1.adapter.weight\)",
        ),
    ],
    ids=["too few", "pairs broken", "none", "more"],
)
def test_experts_that_are_not_all_there_are_refused(change, expected, tmp_path):
    write_model(tmp_path, "mixtral")
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=expected) as caught:
        HfLanguageModel(shape_of(tmp_path))
    assert "Try " in str(caught.value)


def test_experts_of_a_type_that_is_no_number_are_refused(tmp_path):
    write_model(tmp_path, "mixtral")
    name = f"{EXPERT}w2.weight"
    edit(tmp_path, lambda tensors: {**tensors, name: tensors[name].to(torch.int8)})
    with pytest.raises(ModelError, match=r"down_proj is of type I8, which is no float"):
        HfLanguageModel(shape_of(tmp_path))
