"""Models that cannot be cut, and what the user can do about it."""

from __future__ import annotations

import json

import pytest
import torch

from launcher.workloads.hf import hf_shape
from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.hf.hf_shape import check_same_model, check_vocabulary
from launcher.workloads.hf.skeleton import build_skeleton
from strategies.errors import CheckpointError, DataError, ModelError
from tests.tiny_models import shape_of, tiny_config, write_model


def test_a_layer_list_can_be_named(tmp_path):
    reference = write_model(tmp_path, "llama")
    module = HfLanguageModel(shape_of(tmp_path, layers_path="model.layers"))
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        difference = module.double()(tokens) - reference(tokens).logits
    assert difference.abs().max().item() < 1e-12


def test_a_list_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    write_model(tmp_path, "llama")
    with pytest.raises(ModelError) as caught:
        build_skeleton(shape_of(tmp_path, layers_path="transformer.h"))
    assert "model.layers_path=transformer.h: LlamaForCausalLM" in str(caught.value)
    assert "Try model.layers_path=model.layers." in str(caught.value)


def test_a_list_that_is_not_found_can_be_named(tmp_path):
    # Its num_hidden_layers counts the encoder's layers.
    reference = write_model(tmp_path, "bart", decoder_layers=2, d_model=32, decoder_ffn_dim=48)
    with pytest.raises(ModelError) as caught:
        build_skeleton(shape_of(tmp_path))
    assert "its lists: model.decoder.layers (2)" in str(caught.value)
    assert "Try naming it: model.layers_path=model.decoder.layers." in str(caught.value)
    shape = shape_of(tmp_path, layers_path="model.decoder.layers")
    assert len(build_skeleton(shape).layers) == 2
    module = HfLanguageModel(shape).eval().double()
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        difference = module(tokens) - reference(tokens).logits
    assert difference.abs().max().item() < 1e-12


@pytest.mark.parametrize(
    ("family", "changes", "layers_path", "reason"),
    [
        ("gemma3n_text", {"num_kv_shared_layers": 0, "head_dim": 8}, "model.layers", "Error"),
        ("deepseek_v4", {}, None, "layer 0 is given other arguments, which depend on the tokens"),
        ("glm_moe_dsa", {}, None, "layer 1 is given more of layer 0 than its output"),
    ],
)
def test_layers_that_need_more_than_the_residual_stream_are_refused(
    family, changes, layers_path, reason, tmp_path
):
    tiny_config(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"cannot be cut between .*entry points foldpipe.models"
    ) as caught:
        build_skeleton(shape_of(tmp_path, pretrained=False, layers_path=layers_path))
    assert reason in str(caught.value)


def test_a_loss_of_routers_that_is_none_of_sums_over_tokens_is_refused(tmp_path, monkeypatch):
    from transformers.models.mixtral import modeling_mixtral as library

    tiny_config("mixtral", output_router_logits=True).save_pretrained(tmp_path)
    shape = shape_of(tmp_path, pretrained=False)
    skeleton = build_skeleton(shape)
    assert skeleton.balance is not None
    assert (skeleton.balance.experts, skeleton.balance.per_token) == (4, 2)
    theirs = library.load_balancing_loss_func
    monkeypatch.setattr(library, "load_balancing_loss_func", lambda *args: theirs(*args) ** 2)
    with pytest.raises(ModelError, match="MixtralForCausalLM makes of its routers is not one of"):
        build_skeleton(shape)


def test_a_family_without_a_loss_of_routers_has_none(tmp_path):
    tiny_config("deepseek_v3", output_router_logits=True).save_pretrained(tmp_path)
    assert build_skeleton(shape_of(tmp_path, pretrained=False)).balance is None


def test_a_loss_that_has_more_in_it_than_tokens_and_routers_is_refused(tmp_path):
    more = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]}
    for coefficient, folder in ((0.0, tmp_path / "without"), (0.1, tmp_path / "with")):
        tiny_config("bamba", z_loss_coefficient=coefficient, **more).save_pretrained(folder)
    assert build_skeleton(shape_of(tmp_path / "without", pretrained=False)).balance is None
    with pytest.raises(ModelError, match="BambaForCausalLM adds something to the loss of its tok"):
        build_skeleton(shape_of(tmp_path / "with", pretrained=False))


@pytest.mark.parametrize("family", ["jetmoe", "doge"])
def test_routers_that_the_library_records_in_another_way_are_refused(family, tmp_path):
    config = tiny_config(family, output_router_logits=True, num_experts_per_tok=2, is_moe=True)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="makes of its routers is not one of sums over tokens"):
        build_skeleton(shape_of(tmp_path, pretrained=False))


@pytest.mark.parametrize("family", ["t5", "no_such_thing"])
def test_what_is_no_causal_language_model_is_refused(family, tmp_path):
    config = {"model_type": family, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"cannot build model_type={family}"):
        build_skeleton(shape_of(tmp_path, pretrained=False))


def test_the_library_is_asked_for_where_it_is_missing(monkeypatch, tmp_path):
    write_model(tmp_path, "llama")
    monkeypatch.setattr(hf_shape.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'transformers>=5'"):
        hf_shape.check_folder(shape_of(tmp_path))


def test_an_old_library_is_refused(monkeypatch, tmp_path):
    write_model(tmp_path, "llama")
    monkeypatch.setattr(hf_shape, "version", lambda name: "4.57.1")
    told = r"needs transformers >= 5, but 4\.57\.1 is installed\. Try pip install 'transformers>=5'"
    with pytest.raises(ModelError, match=told):
        hf_shape.check_folder(shape_of(tmp_path))


def test_more_token_ids_than_the_model_has_are_refused(tmp_path):
    write_model(tmp_path, "llama")
    check_vocabulary(shape_of(tmp_path), 64, "data=stdlib")
    with pytest.raises(DataError, match=r"ids up to 255, but .* vocab_size=64 and allows 0 to 63"):
        check_vocabulary(shape_of(tmp_path), 256, "data=stdlib")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    write_model(tmp_path / "one", "llama")
    write_model(tmp_path / "other", "llama", intermediate_size=64)
    write_model(tmp_path / "longer", "llama", max_position_embeddings=64, attention_dropout=0.1)
    one, other = shape_of(tmp_path / "one"), shape_of(tmp_path / "other")
    check_same_model(tmp_path, one.described, shape_of(tmp_path / "longer"))
    with pytest.raises(CheckpointError, match=r"another model than .*: ffn=48 \(here 64\)"):
        check_same_model(tmp_path, one.described, other)
    for written in (None, "mine", {"layers": 2}):
        with pytest.raises(CheckpointError, match="no checkpoint of model=hf"):
            check_same_model(tmp_path, written, one)
