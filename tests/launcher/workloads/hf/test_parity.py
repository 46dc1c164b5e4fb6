"""A model that is cut computes what transformers' own forward and backward compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from launcher.workloads.hf.export import library_name
from launcher.workloads.hf.hf_model import HfLanguageModel
from strategies.models.held_units import Elsewhere
from strategies.models.unit_model import UnitModel
from tests.tiny_models import batch_of, shape_of, write_model

KNOWN = ("llama", "gpt2", "qwen2", "qwen3", "mistral")
# Found and cut without a line about them: other orders of modules, tuples, windows, ALiBi.
OTHERS = ("opt", "bloom", "falcon", "phi3", "gemma3_text", "cohere", "stablelm")
# Forwards that ask weights for their type, layers that return lists, constants outside of modules.
ODD = ("mamba", "llama4_text", "openai-gpt", "recurrent_gemma")
CUTS = {
    1: [range(5)],
    2: [range(2), range(2, 5)],
    3: [range(1), range(1, 4), range(4, 5)],
}


def cut_model(
    folder: Path, stages: list[range], **changes: object
) -> tuple[HfLanguageModel, UnitModel]:
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(folder, **changes))
    module = module.double()
    module.log = lambda *args, **options: None  # type: ignore[method-assign]
    units = UnitModel(module)
    units.cut(stages, range(len(stages)))
    return module.eval(), units


def check(folder: Path, reference: torch.nn.Module, num_stages: int, *, padded: bool) -> None:
    module, units = cut_model(folder, CUTS[num_stages])
    batch = batch_of(3, padded=padded)
    tensors: tuple[torch.Tensor, ...] = ()
    for stage in range(num_stages):
        output = units.forward(
            stage, tensors, batch=batch, batch_idx=0, microbatch=0, mode="train", seed=None
        )
        tensors = output.tensors
    assert output.loss is not None
    output.loss.backward()
    logits = reference(batch["tokens"], attention_mask=batch.get("attention_mask")).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    expected.backward()
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-12)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    seen = set()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        theirs = gradients[library_name(name)]
        assert (parameter.grad - theirs).abs().max().item() < 1e-12, name
        seen.add(library_name(name))
    assert seen == set(gradients)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", KNOWN)
def test_loss_and_gradients_are_those_of_transformers(family, num_stages, padded, tmp_path):
    check(tmp_path, write_model(tmp_path, family), num_stages, padded=padded)


@pytest.mark.parametrize(
    "family", [*OTHERS, *(pytest.param(family, marks=pytest.mark.full) for family in ODD)]
)
def test_architectures_nobody_has_described_are_cut_as_well(family, tmp_path):
    check(tmp_path, write_model(tmp_path, family), 3, padded=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tied_embeddings_are_one_shared_parameter(family, tmp_path):
    reference = write_model(tmp_path, family, tie_word_embeddings=True)
    check(tmp_path, reference, 3, padded=False)
    _, units = cut_model(tmp_path, CUTS[2])
    assert units.shared_parameters() == (("network.embedding.model.embed_tokens.weight", (0, 1)),)


def test_a_stage_holds_its_own_weights_only(tmp_path):
    reference = write_model(tmp_path, "llama", tie_word_embeddings=True)
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path))
    units = UnitModel(module)
    units.cut(CUTS[2], [1])
    held = {library_name(name): p for name, p in module.named_parameters()}
    assert set(held) == {
        name
        for name, _ in reference.named_parameters(remove_duplicate=False)
        if name.startswith(("model.layers.1", "model.layers.2", "model.norm", "lm_head"))
    }
    # The tied head is a copy of its own here, read from the embedding's place in the file.
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in held.items():
        assert torch.equal(parameter, theirs[name].float()), name
    assert isinstance(module.network.embedding, Elsewhere)


def test_a_new_model_is_in_training_mode_as_any_module_is(tmp_path):
    write_model(tmp_path, "gpt2")
    assert all(part.training for part in HfLanguageModel(shape_of(tmp_path)).modules())


def test_dropout_acts_in_training_and_only_there(tmp_path):
    reference = write_model(tmp_path, "gpt2", embd_pdrop=0.5, resid_pdrop=0.0, attn_pdrop=0.0)
    module, units = cut_model(tmp_path, CUTS[1])
    batch = batch_of(2)

    def loss(seed: int) -> float:
        output = units.forward(
            0, (), batch=batch, batch_idx=0, microbatch=0, mode="train", seed=seed
        )
        return float(output.loss.detach())

    logits = reference(batch["tokens"]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).item()
    assert loss(1) == loss(2) == pytest.approx(expected, abs=1e-12)
    module.train()
    assert loss(1) == loss(1) != loss(2)


def test_what_validation_works_out_can_be_used_in_training(tmp_path):
    reference = write_model(tmp_path, "gemma3_text")
    module, _ = cut_model(tmp_path, CUTS[1])
    batch = batch_of(2)
    with torch.inference_mode():
        module.validation_step(batch, 0)
    module.training_step(batch, 0).backward()
    logits = reference(batch["tokens"]).logits
    functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
    gradient = module.network.embedding.get_parameter("model.embed_tokens.weight").grad
    expected = reference.get_input_embeddings().weight.grad
    assert (gradient - expected).abs().max().item() < 1e-12


def test_sequences_of_several_lengths_take_turns(tmp_path):
    reference = write_model(tmp_path, "qwen3")
    module, _ = cut_model(tmp_path, CUTS[1])
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        for length in (3, 12, 5, 7, 9, 3, 12):
            for rows in (1, 2):
                part = tokens[:rows, :length]
                difference = module(part) - reference(part).logits
                assert difference.abs().max().item() < 1e-12


def test_generating_continues_as_transformers_does(tmp_path):
    reference = write_model(tmp_path, "llama")
    module, _ = cut_model(tmp_path, CUTS[1])
    module.to("cpu")  # Lightning remembers the meta device otherwise.
    prompt = [5, 9, 17]
    ours = module.generate(prompt, 6)
    with torch.no_grad():
        tokens = torch.tensor([prompt])
        for _ in range(6):
            following = reference(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), dim=-1)
    assert ours.tolist() == tokens[0].tolist()
