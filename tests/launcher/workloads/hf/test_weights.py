"""Weights: read from files of every kind, or drawn so that the cut does not change them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.workloads.hf.export import library_name
from launcher.workloads.hf.hf_model import HfLanguageModel
from launcher.workloads.hf.hf_shape import check_folder
from launcher.workloads.hf.weights import FreshWeights
from strategies.errors import ModelError
from strategies.models.unit_model import UnitModel
from tests.tiny_models import batch_of, shape_of, tiny_config, write_model


def weights(folder, **changes):
    """By the library's names, tied ones under each."""
    module = HfLanguageModel(shape_of(folder, **changes))
    return {library_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_one_file_and_shards_give_the_same_weights(family, tmp_path):
    reference = write_model(tmp_path / "one", family)
    write_model(tmp_path / "many", family, shard="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    check_folder(shape_of(tmp_path / "many"))
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert set(one) == set(many) == set(expected)
    for name, value in expected.items():
        assert torch.equal(one[name].double(), value), name
        assert torch.equal(one[name], many[name]), name


def test_weights_do_not_change_with_the_file_they_were_read_from(tmp_path):
    write_model(tmp_path, "llama")
    found = weights(tmp_path)
    before = {name: value.detach().clone() for name, value in found.items()}
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(b"\0" * size)
    for name, value in found.items():
        assert torch.equal(value, before[name]), name


def test_half_precision_files_are_read_in_the_precision_of_the_run(tmp_path):
    write_model(tmp_path, "llama")
    edit(tmp_path, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    stored = load_file(tmp_path / "model.safetensors")
    for name, value in weights(tmp_path).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, stored[name].float())


def test_files_of_older_versions_are_read(tmp_path):
    reference = write_model(tmp_path, "gpt2")

    def older(tensors):
        named = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        named["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
        named["lm_head.weight"] = named["wte.weight"].clone()
        return named

    edit(tmp_path, older)
    check_folder(shape_of(tmp_path))
    found = weights(tmp_path)
    for name, value in reference.named_parameters(remove_duplicate=False):
        assert torch.equal(found[name].double(), value), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "cohere"])
def test_fresh_weights_do_not_depend_on_the_cut(family, tmp_path):
    write_model(tmp_path, family, tie_word_embeddings=True)
    (tmp_path / "model.safetensors").unlink()
    before = torch.random.get_rng_state()
    whole = weights(tmp_path, pretrained=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    for stages in ([range(1), range(1, 5)], [range(4), range(4, 5)]):
        for owned in (0, 1):
            with torch.device("meta"):
                module = HfLanguageModel(shape_of(tmp_path, pretrained=False))
            UnitModel(module).cut(stages, [owned])
            for name, value in module.named_parameters():
                assert torch.equal(value, whole[library_name(name)]), name


def test_fresh_weights_follow_the_rules_of_the_library_and_the_seed(tmp_path):
    reference = write_model(tmp_path, "gpt2", hidden_size=64, initializer_range=0.3)
    config = reference.config
    shape = shape_of(tmp_path, pretrained=False)
    one, two = HfLanguageModel(shape, seed=1), HfLanguageModel(shape, seed=2)
    first = {library_name(n): p for n, p in one.named_parameters()}
    second = {library_name(n): p for n, p in two.named_parameters()}
    assert torch.equal(first["transformer.ln_f.weight"], torch.ones(64))
    assert not first["transformer.h.1.attn.c_attn.bias"].any()
    deviations = {
        "transformer.wte.weight": 0.3,
        "transformer.h.1.mlp.c_fc.weight": 0.3,
        # The paper's rule for layers that write to the residual stream.
        "transformer.h.1.mlp.c_proj.weight": 0.3 / (2 * config.n_layer) ** 0.5,
    }
    for name, expected in deviations.items():
        assert first[name].std().item() == pytest.approx(expected, rel=0.05), name
        assert not torch.equal(first[name], second[name])
    assert not torch.equal(
        first["transformer.h.0.mlp.c_fc.weight"], first["transformer.h.1.mlp.c_fc.weight"]
    )


def test_fresh_weights_train_in_every_precision_from_the_same_numbers(tmp_path):
    write_model(tmp_path, "llama")
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path, pretrained=False))
    UnitModel(module.double()).cut([range(5)], [0])
    single = weights(tmp_path, pretrained=False)
    for name, value in module.named_parameters():
        assert value.dtype == torch.float64
        assert torch.equal(value.float(), single[library_name(name)])
    logits = module(batch_of(1)["tokens"])
    assert logits.dtype == torch.float64


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def with_more(name):
    return lambda tensors: {**tensors, name: torch.zeros(3)}


def reshaped(name):
    return lambda tensors: {**tensors, name: tensors[name][:-1].clone()}


NAMED = [
    (without("model.layers.1.mlp.up_proj.weight"), "lacks 1 of 30 tensors (model.layers.1.mlp.up"),
    (with_more("model.layers.1.adapter.weight"), "has 1 of 31 tensors (model.layers.1.adapter.we"),
    (reshaped("model.norm.weight"), "has shape [31], but config.json makes it [32]"),
]


@pytest.mark.parametrize(("change", "expected"), NAMED, ids=["missing", "more", "shape"])
def test_tensors_that_do_not_fit_are_named(change, expected, tmp_path):
    write_model(tmp_path, "llama")
    edit(tmp_path, change)
    for look in (check_folder, HfLanguageModel):
        with pytest.raises(ModelError, match="Try") as caught:
            look(shape_of(tmp_path))
        assert expected in str(caught.value)


def test_tensors_of_an_undescribed_architecture_are_checked_on_the_rank(tmp_path):
    write_model(tmp_path, "falcon")
    edit(tmp_path, without("transformer.h.2.ln_attn.bias"))
    edit(tmp_path, without("transformer.ln_f.bias"))
    check_folder(shape_of(tmp_path))
    with pytest.raises(ModelError, match=r"lacks \d of \d+ tensors .*transformer.ln_f.bias"):
        HfLanguageModel(shape_of(tmp_path))


def test_a_tied_weight_that_is_stored_twice_and_differs_is_refused(tmp_path):
    write_model(tmp_path, "llama", tie_word_embeddings=True)
    edit(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(ModelError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
        HfLanguageModel(shape_of(tmp_path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "header asks for"),
        (lambda file: file.write_bytes(b""), "header of 0 bytes does not fit into 0 bytes"),
        (lambda file: file.write_bytes(b"\xff" * 64), "does not fit into 64 bytes"),
        (lambda file: file.write_bytes(b"\x08" + b"\0" * 7 + b"{{{{{{{{"), "is no JSON"),
        (lambda file: file.write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "header is incomplete"),
        (lambda file: file.write_bytes(b"\x07" + b"\0" * 7 + b'{"a":3}'), "header is incomplete"),
        (lambda file: file.unlink(), "has neither model.safetensors nor"),
        (lambda file: file.rename(file.with_name("x.safetensors")), "has x.safetensors, without"),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), "which may run code"),
    ],
)
def test_files_that_are_damaged_or_missing_are_named(change, expected, tmp_path):
    write_model(tmp_path, "llama")
    change(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="Try") as caught:
        check_folder(shape_of(tmp_path))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: next(f.glob("model-00002*")).unlink(), "which is not there"),
        (
            lambda f: shutil.copy(next(f.glob("model-00001*")), next(f.glob("model-00002*"))),
            "which does not have it",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "KeyError('weight_map')"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "../../secret.safetensors"}})
            ),
            "which is not there",
        ),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(change, expected, tmp_path):
    write_model(tmp_path, "llama", shard="20KB")
    change(tmp_path)
    with pytest.raises(ModelError, match="Try") as caught:
        check_folder(shape_of(tmp_path))
    assert expected in str(caught.value)


def test_parameters_that_are_made_in_spite_of_the_meta_device_are_read(tmp_path):
    # Their values come from torch.normal(), which does not ask for the device of the context.
    reference = write_model(tmp_path, "diffllama")
    found = weights(tmp_path)
    for name, value in reference.named_parameters():
        assert torch.equal(found[name].double(), value), name


def test_parameters_that_are_tied_inside_of_one_module_are_both_filled(tmp_path):
    reference = write_model(tmp_path, "bert", is_decoder=True)
    found = weights(tmp_path)
    assert found["cls.predictions.decoder.bias"] is found["cls.predictions.bias"]
    for name, value in reference.named_parameters(remove_duplicate=False):
        assert torch.equal(found[name].double(), value), name


def test_weights_that_the_library_does_not_draw_are_refused(tmp_path):
    tiny_config("apertus").save_pretrained(tmp_path)
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path, pretrained=False))
    for look in (module.check_weights, lambda: weights(tmp_path, pretrained=False)):
        with pytest.raises(ModelError, match=r"no rule for model.layers.0.mlp.act_fn.alpha_p. Try"):
            look()


@pytest.mark.parametrize("family", ["llama", "mixtral", "mamba"])
def test_weights_that_the_library_draws_are_not_drawn_to_check_that(family, tmp_path, monkeypatch):
    tiny_config(family).save_pretrained(tmp_path)
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path, pretrained=False))
    monkeypatch.setattr(FreshWeights, "_draw", lambda *_: pytest.fail("drawn"))
    module.check_weights()
