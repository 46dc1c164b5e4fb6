"""model=hf and mode=export from the command line: what runs, and what is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from launcher.processes.rank_server import SHARED
from tests.forgery import write_bare
from tests.launcher.command_line import launch_here, refused_here
from tests.launcher.runs import Finished, launch
from tests.ranks.rank_server import rank_server_address
from tests.tiny_models import tiny_config, write_model

WORDS = ("model=hf", "model.sequence=16", "data.max_bytes=100000")
LLAMA = {"vocab_size": 300, "tie_word_embeddings": True}


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """`refused(*words)`: the message; all else about a refusal is checked there."""
    return lambda *words: refused_here(words, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_model(path, "llama", **LLAMA)
    return path


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four steps on two ranks in double precision."""
    words = (
        *WORDS, f"model.path={folder}", "pp=2", "trainer.max_steps=4", "data.microbatch_size=2",
        "trainer.precision=64-true", "trainer.val_check_interval=4", "experiment_name=hf",
    )  # fmt: skip
    return launch(words, tmp_path_factory.mktemp("hf")).assert_done()


def again(trained: Finished, folder: Path, *words: str) -> Finished:
    given = (*WORDS, f"model.path={folder}", "trainer.precision=64-true", "experiment_name=hf")
    run = trained.cwd / "again" / words[0].removeprefix("mode=")
    return launch((*given, *words, f"hydra.run.dir={run}"), trained.cwd).assert_done()


@pytest.mark.distributed
def test_a_model_of_a_folder_trains_on_two_ranks(trained):
    result = json.loads(next(trained.cwd.glob("outputs/**/result.json")).read_text())
    assert (result["status"], result["steps"], result["world_size"]) == ("done", 4, 2)
    assert result["num_parameters"] == 32_864
    assert result["predicted_peak_memory_bytes"][0] > 0


@pytest.mark.distributed
@pytest.mark.full
def test_its_export_has_the_validation_loss_of_the_run(trained, folder):
    again(trained, folder, "mode=export", "export.path=written")
    again(trained, folder, "mode=predict", "pp=2", "trainer.limit_predict_batches=2")
    model = AutoModelForCausalLM.from_pretrained(trained.cwd / "written").eval()
    assert model.dtype == torch.float64
    from launcher.workloads.data.module import TextDataModule
    from launcher.workloads.data.source import TextSource

    (file,) = (trained.cwd / "again" / "predict").glob("predictions_*.safetensors")
    found = load_file(file)["log_probabilities"]
    data = TextDataModule(TextSource(max_bytes=100_000), sequence=16, batch_size=len(found), seed=0)
    data.setup("predict")
    batch = next(iter(data.predict_dataloader()))
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    losses = functional.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
    )
    assert (found + losses.view_as(found)).abs().max().item() < 1e-10


@pytest.mark.distributed
@pytest.mark.full
def test_a_folder_is_evaluated_without_a_checkpoint(trained, folder):
    done = again(
        trained, folder, "mode=eval", "pp=2", "trainer.limit_test_batches=2",
        "experiment_name=nobody_trained_this",
    )  # fmt: skip
    assert f"checkpoint: none, the weights in {folder}" in done.output
    result = json.loads((trained.cwd / "again" / "eval" / "result.json").read_text())
    assert 5.0 < result["val_loss"] < 6.5  # about ln(300)
    assert result["checkpoint"] is None


UNCUTTABLE = ("model.pretrained=false", "pp=2", "model.layers_path=model.layers")


@pytest.fixture(scope="module")
def uncuttable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers are given more than the residual stream."""
    path = tmp_path_factory.mktemp("models") / "shared"
    tiny_config("gemma3n_text", num_kv_shared_layers=0, head_dim=8, vocab_size=300).save_pretrained(
        path
    )
    return path


@pytest.mark.distributed
@pytest.mark.full
def test_what_only_a_rank_can_refuse_is_one_message_and_exit_code_2(uncuttable, tmp_path):
    done = launch((*WORDS, f"model.path={uncuttable}", *UNCUTTABLE), tmp_path)
    assert done.code == 2
    assert done.errors.startswith("error: model.path=")
    assert "Try another list, model.layers_path=NAME" in done.errors
    assert done.errors.count("\n") == 1
    assert done.result["status"] == "failed"
    assert done.result["error"] + "\n" == done.errors.removeprefix("error: ")


def invalid(folder: Path, *words: str) -> str:
    """The one message of ``mode=validate``, after a child process has built the model."""
    done = launch_here((*WORDS, "mode=validate", *words), folder)
    assert (done.code, done.output) == (2, ""), done.errors
    assert done.errors.startswith("error: ")
    assert done.errors.count("\n") == 1
    assert list(folder.glob("**/*.json")) == []
    return done.errors


def test_validating_refuses_what_the_ranks_would_refuse(uncuttable, tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED, rank_server_address())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    message = invalid(tmp_path, f"model.path={uncuttable}", *UNCUTTABLE)
    assert "cannot be cut between the layers of model.layers" in message


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "words", "expected"),
    [
        ("mixtral", (), "lacks 1 of 30 tensors (model.norm.weight) that config.json asks for"),
        ("falcon", (), "lacks 1 of 22 tensors (transformer.ln_f.weight) that config.json asks"),
        ("gpt_neox", ("pp=1", "tp=3"), "tp=3: tensor_parallel_plan() has Column() for"),
        ("llama", ("model.layers_path=model.blocks",), "has no list of layers of that name"),
        ("mixtral", ("pp=4", "schedule=zb_v"), "8 stages (pp * schedule.stages_per_rank) for a"),
        ("mixtral", ("schedule.units_per_stage=[4,4]",), "has 2 stages and 8 units; needed are"),
    ],
    ids=["experts", "falcon", "heads", "list", "stages", "units"],
)
def test_what_is_wrong_with_the_files_of_any_family_is_found(family, words, expected, tmp_path):
    write_model(tmp_path / "model", family, vocab_size=300)
    file = tmp_path / "model" / "model.safetensors"
    if not words:
        lost = ("model.norm.weight", "transformer.ln_f.weight")
        left = {name: value for name, value in load_file(file).items() if name not in lost}
        save_file(left, file, metadata={"format": "pt"})
    message = invalid(tmp_path / "run", f"model.path={tmp_path / 'model'}", "pp=2", *words)
    assert expected in message


@pytest.mark.full
def test_tied_weights_that_differ_are_found_before_a_rank_is_started(tmp_path):
    write_model(tmp_path / "model", "llama", **LLAMA)
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, file, metadata={"format": "pt"})
    message = invalid(tmp_path / "run", f"model.path={tmp_path / 'model'}", "pp=2")
    assert "lm_head.weight and model.embed_tokens.weight differ" in message


@pytest.mark.full
@pytest.mark.distributed
def test_a_model_of_merged_experts_is_valid_trains_and_is_exported(tmp_path):
    write_model(tmp_path / "model", "mixtral", vocab_size=300)
    words = (
        *WORDS, f"model.path={tmp_path / 'model'}", "pp=2", "trainer.max_steps=2",
        "data.microbatch_size=2", "experiment_name=experts",
    )  # fmt: skip
    assert launch_here((*words, "mode=validate"), tmp_path / "validated").code == 0
    launch((*words, "trainer.val_check_interval=2"), tmp_path).assert_done()
    launch((*words[:4], "mode=export", "export.path=out", "experiment_name=experts"), tmp_path)
    written, stored = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "model")
    )
    assert set(written) == set(stored)
    assert any(not torch.equal(written[name], stored[name]) for name in stored)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.full
def test_validating_prints_layers_and_memory(folder, tmp_path):
    done = launch_here((*WORDS, f"model.path={folder}", "mode=validate", "pp=2"), tmp_path)
    assert done.code == 0, done.errors
    assert "32,864 parameters" in done.output
    assert "stage 0: 2 layers" in done.output
    assert "stage 1: 1 layers" in done.output


@pytest.mark.full
def test_layers_per_stage_counts_decoder_layers(folder, tmp_path):
    words = (*WORDS, f"model.path={folder}", "mode=validate", "pp=2")
    done = launch_here((*words, "schedule.layers_per_stage=[0,3]"), tmp_path)
    assert "stage 1: 3 layers" in done.output


def test_layers_per_stage_must_be_those_of_the_model(folder, refused):
    words = (*WORDS, f"model.path={folder}", "mode=validate", "pp=2")
    message = refused(*words, "schedule.layers_per_stage=[1,1]")
    assert "adds up to 2 layers, but num_hidden_layers=3" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("model=hf",), "model=hf needs the folder of a model"),
        (("model=hf", "model.path=nowhere"), "nowhere: no such folder"),
        (("model=hf", "model.path=."), "has no config.json"),
        (("model=hf", "model.path=.", "model.hidden=64"), "model.hidden=64 has no meaning with"),
        (("model=hf", "model.path=.", "model.vocab=64"), "model.vocab=64 has no meaning with"),
        (("model=tiny", "model.path=x"), "Try model=hf model.path=x."),
        (("model=tiny", "model.pretrained=false"), "Try model=hf model.pretrained=false."),
        (("mode=train", "export.path=x"), "export.path=x has no meaning with mode=train."),
        (("mode=export", "pp=2"), "Try mode=export pp=1 dp=1"),
        (("mode=export",), "no checkpoint of experiment_name=default"),
        (("mode=train", "checkpoint=x"), "read by mode=eval, predict, generate and export"),
    ],
)
def test_a_request_that_cannot_work_is_refused(words, expected, refused):
    assert expected in refused(*words)


def test_a_vocabulary_smaller_than_the_bytes_is_refused(refused, tmp_path):
    write_model(tmp_path / "small", "llama")
    for mode in ("train", "validate"):
        message = refused("model=hf", "model.path=small", "model.sequence=16", f"mode={mode}")
        assert "token ids up to 255, but the model in" in message
        assert "vocab_size=64" in message


def test_a_damaged_file_is_refused_before_a_rank_is_started(refused, tmp_path):
    write_model(tmp_path / "cut", "llama", **LLAMA)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    message = refused("model=hf", "model.path=cut", "model.sequence=16")
    assert f"{file} is damaged" in message


def checkpoint_of(path: Path, model: object) -> Path:
    return write_bare(path, {"model": model, "experiment_name": "default"})


def test_checkpoints_of_the_two_kinds_are_told_apart(refused, tmp_path, folder):
    theirs = checkpoint_of(tmp_path / "hf.ckpt", {"hf": {"model_type": "llama"}})
    ours = checkpoint_of(tmp_path / "tiny.ckpt", {"layers": 2})
    for mode in ("eval", "export"):
        message = refused("model=tiny", f"mode={mode}", f"checkpoint={theirs}")
        assert "is a checkpoint of model=hf" in message
        words = (*WORDS, f"model.path={folder}", f"mode={mode}")
        assert "no checkpoint of model=hf" in refused(*words, f"checkpoint={ours}")
        assert "vocab=32000 (here 300)" in refused(*words, f"checkpoint={theirs}")


def test_a_shape_without_counterpart_is_refused_before_a_rank_is_started(refused, tmp_path):
    path = checkpoint_of(tmp_path / "tiny.ckpt", None)
    message = refused("model=tiny", "model.activation=gelu", "mode=export", f"checkpoint={path}")
    assert "model.activation=gelu has no counterpart in Llama (which has swiglu)" in message


def test_an_existing_folder_is_not_exported_over(refused, tmp_path):
    path = checkpoint_of(tmp_path / "tiny.ckpt", None)
    message = refused("model=tiny", "mode=export", f"checkpoint={path}", f"export.path={path}")
    assert f"export.path={path} exists and is never overwritten" in message


@pytest.mark.distributed
@pytest.mark.full
def test_a_family_without_a_plan_is_cut_as_it_is_found_from_the_command_line(tmp_path):
    """Trained on 2 by 2 ranks, resumed on one and on two, exported for transformers."""
    still = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    write_model(tmp_path / "gpt2", "gpt2", vocab_size=300, **still)
    words = (
        *WORDS, f"model.path={tmp_path / 'gpt2'}", "data.microbatch_size=2",
        "data.global_batch_size=8", "trainer.precision=64-true", "experiment_name=found",
        "trainer.checkpoint_every_n_steps=2",
    )  # fmt: skip
    assert "valid" in launch((*words, "mode=validate", "pp=2", "tp=2"), tmp_path).output

    def losses(folder: Path) -> list[float]:
        return [json.loads(file.read_text())["loss_last"] for file in folder.glob("**/result.json")]

    whole = launch((*words, "trainer.max_steps=4", "hydra.run.dir=whole"), tmp_path)
    cut = launch((*words, "trainer.max_steps=2", "hydra.run.dir=cut", "pp=2", "tp=2"), tmp_path)
    whole.assert_done()
    cut.assert_done()
    saved = next((tmp_path / "cut" / "checkpoints").glob("step*2*"))
    for number, more in enumerate(((), ("tp=2",), ("dp=2",))):
        folder = f"again{number}"
        again = (*words, f"trainer.resume={saved}", "trainer.max_steps=4", *more)
        launch((*again, f"hydra.run.dir={folder}"), tmp_path).assert_done()
        assert losses(tmp_path / folder) == pytest.approx(losses(tmp_path / "whole"), abs=1e-9)
    export = (*words, "mode=export", f"checkpoint={saved}", "export.path=written")
    launch(export, tmp_path).assert_done()
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(report.values()), report
