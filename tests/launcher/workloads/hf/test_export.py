"""What is exported, transformers loads, and computes the same logits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from launcher.config import LaunchConfig
from launcher.workloads.hf import export as folder_module
from launcher.workloads.hf.counterpart import check_destination, counterpart, export_target
from launcher.workloads.hf.export import export_checkpoint, write_folder
from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer_shape import MoeShape, TransformerShape
from strategies.errors import ModelError, PlanError, RunError
from strategies.runtime.lightning.checkpoints.rank_folder import save
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.storage.commit import Saver
from tests.tiny_models import batch_of, shape_of, write_model

LLAMA = TransformerShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64, sequence=16)
GPT = TransformerShape(
    layers=2, hidden=32, heads=4, kv_heads=4, ffn=48, vocab=64, sequence=16, norm="layernorm",
    activation="gelu", position="learned", tie_embeddings=True, dropout=0.1,
)  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tie_embeddings=True),
    "mixtral": replace(LLAMA, moe=MoeShape(4, 2, 24, balance_loss=0.01)),
    "gpt2": GPT,
    "gpt2-untied": replace(GPT, tie_embeddings=False),
}


def checkpoint_of(module, path):
    """A committed checkpoint with the state that one rank has."""
    coordinates = Coordinates(pp=1, dp=1, pp_rank=0, dp_rank=0)
    save(
        Saver(Exchange(None)),
        {"state_dict": module.state_dict()},
        path,
        coordinates=coordinates,
        holders={},
        optimizer_holders={},
        metadata={},
        in_thread=False,
    )
    return path


def disturbed(module):
    """Norms and biases away from 1 and 0, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(0.1 * noise)
    return module.eval()


def loaded(path):
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def largest_difference(module, model):
    tokens = batch_of(3)["tokens"]
    with torch.no_grad():
        return (module(tokens) - model(tokens).logits).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_built_in_transformer_in_single_precision(shape, tmp_path):
    module = disturbed(LanguageModel(shape))
    path = checkpoint_of(module, tmp_path / "step.ckpt")
    export_checkpoint(path, shape, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.float32
    assert largest_difference(module, model) < 1e-5
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters


class ExactNorm(nn.Module):
    """The library's, without its detour over float32."""

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def exact_rotary(self, x, position_ids):
    exponents = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angles = (
        position_ids[..., None].double() / self.config.rope_parameters["rope_theta"] ** exponents
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


# The library multiplies experts as a group, which torch does in shorter types alone.
@pytest.mark.parametrize("shape", [s for s in SHAPES.values() if s.moe is None])
def test_the_built_in_transformer_in_double_precision(shape, tmp_path, monkeypatch):
    # The library's Llama works out norms and rotary tables in float32 whatever the weights are.
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", ExactNorm.forward)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", exact_rotary)
    module = disturbed(LanguageModel(shape).double())
    path = checkpoint_of(module, tmp_path / "step.ckpt")
    export_checkpoint(path, shape, tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.float64
    assert largest_difference(module, model) < 1e-10


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "falcon"])
def test_a_hugging_face_model_bit_for_bit(family, tmp_path):
    write_model(tmp_path / "in", family)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    shape = shape_of(tmp_path / "in")
    module = disturbed(HfLanguageModel(shape))
    path = checkpoint_of(module, tmp_path / "step.ckpt")
    export_checkpoint(path, shape, tmp_path / "out")
    assert largest_difference(module, loaded(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(tmp_path / "in" / "model.safetensors")
    assert set(stored) == set(original)


def test_an_export_can_be_trained_again(tmp_path):
    module = disturbed(LanguageModel(LLAMA))
    path = checkpoint_of(module, tmp_path / "step.ckpt")
    export_checkpoint(path, LLAMA, tmp_path / "out")
    again = HfLanguageModel(shape_of(tmp_path / "out"))
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        assert (module(tokens) - again(tokens)).abs().max().item() < 1e-5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"activation": "gelu"}, "model.activation=gelu has no counterpart in Llama"),
        ({"position": "learned"}, "model.position=learned has no counterpart in Llama"),
        ({"norm": "layernorm"}, "model.norm=layernorm has no counterpart in Llama"),
        (
            {"norm": "layernorm", "activation": "gelu", "position": "learned"},
            "model.kv_heads=2 has no counterpart in GPT-2 (which has as many as model.heads=4)",
        ),
        ({"norm": "layernorm", "activation": "gelu", "kv_heads": 4}, "model.position=rope"),
    ],
)
def test_a_shape_that_the_library_lacks_is_refused(changes, expected):
    with pytest.raises(ModelError) as caught:
        counterpart(replace(LLAMA, **changes))
    assert expected in str(caught.value)
    assert "Try model." in str(caught.value)


def test_experts_that_are_none_of_a_mixtral_are_refused():
    moe = MoeShape(4, 2, 24, shared=1, scores="sigmoid")
    with pytest.raises(ModelError) as caught:
        counterpart(replace(LLAMA, moe=moe, activation="gelu"))
    message = str(caught.value)
    assert "model.activation=gelu model.shared_experts=1 model.router=sigmoid has no" in message
    assert "(model.activation=swiglu model.shared_experts=0 model.router=softmax)" in message
    assert message.endswith("Try export.format=safetensors.")


def test_every_shape_is_exported_or_refused():
    shapes = [
        replace(LLAMA, norm=norm, activation=activation, position=position, kv_heads=heads)
        for norm in ("rmsnorm", "layernorm")
        for activation in ("swiglu", "gelu")
        for position in ("rope", "learned")
        for heads in (2, 4)
    ]
    found = []
    for shape in shapes:
        try:
            found.append(counterpart(shape))
        except ModelError:
            found.append("refused")
    assert sorted(found) == sorted(["llama"] * 2 + ["gpt2"] + ["refused"] * 13)


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(PlanError, match="never overwritten"):
            check_destination(tmp_path / name)
    check_destination(tmp_path / "empty")
    check_destination(tmp_path / "new")
    write_folder(tmp_path / "empty", {"a": 1}, {"w": torch.zeros(2)})
    assert json.loads((tmp_path / "empty" / "config.json").read_text()) == {"a": 1}


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "save_file", fail)
    with pytest.raises(
        RunError, match=r"out cannot be written: No space left on device \([\d,]+ bytes"
    ):
        write_folder(tmp_path / "out", {}, {"w": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_that_of_the_run_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = LaunchConfig(mode="export")
    assert export_target(config, tmp_path / "run", "huggingface") == tmp_path / "run" / "export"
    assert export_target(config, tmp_path / "run", "ckpt") == tmp_path / "run" / "export.ckpt"
    named = replace(config, export=replace(config.export, path="there"))
    assert export_target(named, tmp_path / "run", "huggingface") == tmp_path / "there"
