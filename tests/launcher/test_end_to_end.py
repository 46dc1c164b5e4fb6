"""Train, resume, evaluate, predict and generate, each a command line of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer_shape import TransformerShape
from strategies.runtime.lightning.checkpoints.rank_folder import load_state_dict
from tests.launcher.command_line import launch_here
from tests.launcher.conftest import TRAIN
from tests.launcher.runs import MODEL, Finished, launch, read_metrics

pytestmark = pytest.mark.distributed

SHAPE = TransformerShape(
    layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=256, sequence=16, norm="rmsnorm",
    activation="swiglu", position="rope", tie_embeddings=False, dropout=0.0,
)  # fmt: skip
VALIDATION = 64  # sequences


def trained_model(checkpoint: Path, dtype: torch.dtype) -> LanguageModel:
    model = LanguageModel(SHAPE).to(dtype)
    model.load_state_dict(load_state_dict(checkpoint))
    return model


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """640 sequences of text, a tenth of which is for validation."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = b"def value(self, name): return self.values[name] # and so on\n"
    rows = [words[i % 9 :] for i in range(400)]
    path.write_bytes(b"".join(rows)[: 640 * 16 + 1])
    assert path.stat().st_size == 640 * 16 + 1
    return path


@pytest.fixture(scope="session")
def expected(corpus, checkpoint) -> np.ndarray:
    """Log-probability of each token of the validation text by the trained model, in fp64."""
    ids = torch.tensor(list(corpus.read_bytes()))[(640 - VALIDATION) * 16 :]
    tokens, targets = ids[:-1].view(VALIDATION, 16), ids[1:].view(VALIDATION, 16)
    with torch.no_grad():
        logits = trained_model(checkpoint, torch.float64)(tokens)
    found = functional.log_softmax(logits, dim=-1).gather(-1, targets[..., None])
    return found[..., 0].numpy()


def test_a_model_learns_from_the_default_text(trained):
    losses = [row["train_loss"] for row in read_metrics(trained.folder)]
    assert losses[0] == pytest.approx(np.log(256), abs=1.0)
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 1.0


def test_half_of_the_way_from_a_checkpoint_is_the_same_way(trained, tmp_path):
    # The folder of another day, beside an unfinished and a foreign checkpoint that are newer.
    source = trained.folder / "checkpoints" / "step-00000010.ckpt"
    for folder in ("2020-01-01/a", "2020-01-02/b"):
        (tmp_path / "outputs" / folder / "checkpoints").mkdir(parents=True)
    first = tmp_path / "outputs/2020-01-01/a/checkpoints" / source.name
    shutil.copytree(source, first)
    unfinished = first.with_name("step-00000011.ckpt.tmp")
    shutil.copytree(source, unfinished)
    later = time.time() + 100
    os.utime(unfinished / "manifest.json", (later, later))
    foreign = tmp_path / "outputs/2020-01-02/b/checkpoints/step-00000099.ckpt"
    shutil.copytree(source, foreign)
    manifest = json.loads((foreign / "manifest.json").read_text())
    manifest["metadata"]["experiment_name"] = "second"
    (foreign / "manifest.json").write_text(json.dumps(manifest))
    os.utime(foreign / "manifest.json", (later, later))
    words = [*TRAIN, "trainer.resume=auto", "hydra.run.dir=here"]
    resumed = launch(words, tmp_path).assert_done()

    assert f"continues {first}\n" in resumed.output
    assert resumed.result["steps"] == 20
    rows, whole = read_metrics(resumed.folder), read_metrics(trained.folder)[10:]
    assert [row["step"] for row in rows] == list(range(11, 21))
    for name in ("train_loss", "val_loss", "lr", "grad_norm"):
        assert [row[name] for row in rows] == [row[name] for row in whole], name
    mine, theirs = (run.folder / "checkpoints" / "step-00000020.ckpt" for run in (resumed, trained))
    for rank in (0, 1):
        file = f"rank_{rank:05d}.safetensors"
        ours, others = load_file(mine / file), load_file(theirs / file)
        assert ours.keys() == others.keys()
        assert len(ours) > 5
        for name, tensor in ours.items():
            assert tensor.tobytes() == others[name].tobytes(), name


def test_a_run_continues_a_named_checkpoint_in_another_layout(checkpoint, tmp_path):
    words = [*TRAIN, "pp=1", "num_microbatches=4", "trainer.max_steps=23"]
    resumed = launch([*words, f"trainer.resume={checkpoint}"], tmp_path).assert_done()
    assert f"continues {checkpoint}\n" in resumed.output
    rows = read_metrics(resumed.folder)
    assert [row["step"] for row in rows] == [21, 22, 23]
    assert all(row["train_loss"] < np.log(256) - 0.5 for row in rows)
    assert resumed.result["world_size"] == 1


def test_a_folder_with_checkpoints_of_its_own_is_not_trained_into(trained, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(trained.folder, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = launch_here([*TRAIN, f"hydra.run.dir={folder}"], tmp_path)
    assert (done.code, done.output) == (2, "")
    last = folder / "checkpoints" / "step-00000020.ckpt"
    assert f"Try trainer.resume={last}, or another hydra.run.dir." in done.errors
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("pp", "precision", "tolerance"),
    [(2, "64-true", 1e-9), pytest.param(1, "32-true", 1e-4, marks=pytest.mark.full)],
)
def test_a_checkpoint_is_evaluated_in_any_layout(
    pp, precision, tolerance, checkpoint, corpus, expected, tmp_path
):
    assert VALIDATION % (2 * pp) == 0  # no incomplete batch, which would be left out
    words = [  # The model is the checkpoint's.
        "mode=eval", f"pp={pp}", f"checkpoint={checkpoint}", "data=text", f"data.path={corpus}",
        f"trainer.precision={precision}",
    ]  # fmt: skip
    done = launch(words, tmp_path).assert_done()
    loss = -expected.mean()
    assert done.result["val_loss"] == pytest.approx(loss, abs=tolerance)
    (shown,) = re.findall("^loss (.*)$", done.output, re.MULTILINE)
    assert float(shown) == pytest.approx(loss, abs=1e-4)
    assert f"checkpoint: {checkpoint}" in done.output
    assert (done.result["status"], done.result["mode"]) == ("done", "eval")
    assert done.result["checkpoint"] == str(checkpoint)
    assert done.result["world_size"] == pp


@pytest.mark.full
def test_predictions_are_those_of_the_model(checkpoint, corpus, expected, tmp_path):
    experiment = tmp_path / "outputs" / "some" / "run" / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, experiment)
    words = [
        *MODEL, "mode=predict", "experiment_name=first", "data=text", f"data.path={corpus}",
        "trainer.precision=64-true", "data.microbatch_size=4", "hydra.run.dir=here",
    ]  # fmt: skip
    done = launch(words, tmp_path).assert_done()
    assert done.result["checkpoint"] == str(experiment)  # found by its name, checkpoint=auto
    assert done.result["num_predictions"] == VALIDATION
    found = load_file(done.result["predictions"][0])["log_probabilities"]
    assert found.shape == (VALIDATION, 16)
    assert found == pytest.approx(expected, abs=1e-9)
    assert f"{VALIDATION} predictions" in done.output


@pytest.fixture(scope="module")
def generated(checkpoint, tmp_path_factory) -> Finished:
    """A sweep: the most probable continuation, and one drawn among five tokens."""
    words = [
        *MODEL, "-m", "mode=generate", "model.vocab=256", f"checkpoint={checkpoint}",
        "generate.prompt=import s", "generate.max_new_tokens=24", "generate.top_k=5",
        "generate.temperature=0,3.0", "hydra.sweep.dir=sweep",
    ]  # fmt: skip
    return launch(words, tmp_path_factory.mktemp("generated")).assert_done()


def generation(done: Finished, job: int) -> list[int]:
    folder = done.cwd / "sweep" / str(job)
    result = json.loads((folder / "result.json").read_text())
    text = (folder / "generated.txt").read_text()
    assert text == result["text"]
    assert text in (folder / "output.txt").read_text()
    assert text.isascii()  # so that its bytes are the tokens
    return list(text.encode())


@torch.no_grad()
def logits_after(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids[-16:]]))[0, -1]


def test_temperature_0_takes_the_most_probable_token(generated, checkpoint):
    model = trained_model(checkpoint, torch.float32)
    ids = generation(generated, 0)
    assert ids[:8] == list(b"import s")
    assert len(ids) == 8 + 24
    for end in range(8, len(ids)):
        assert ids[end] == int(logits_after(model, ids[:end]).argmax())


def test_sampling_draws_among_the_most_probable(generated, checkpoint):
    model = trained_model(checkpoint, torch.float32)
    ids = generation(generated, 1)
    assert ids[:8] == list(b"import s")
    assert len(ids) == 8 + 24
    ranks = []
    for end in range(8, len(ids)):
        best = logits_after(model, ids[:end]).topk(5).indices.tolist()
        assert ids[end] in best
        ranks.append(best.index(ids[end]))
    assert len(set(ranks)) > 2


def test_a_sweep_trains_each_job_afresh_and_outlives_a_failing_one(corpus, tmp_path):
    (tmp_path / "short.txt").write_bytes(b"def")
    words = [
        *MODEL, "-m", "data=text", f"data.path={corpus},{tmp_path}/short.txt",
        "optimizer=sgd", "trainer.max_steps=2", "trainer.limit_val_batches=0", "tracking=none",
        "hydra.sweep.dir=sweep",
    ]  # fmt: skip
    done = launch(words, tmp_path)
    assert done.code == 2
    assert done.output.count("\n[1/2] data.path=") == 1
    assert "\njob 1 refused (exit 2): data.path=" in done.output
    output = (tmp_path / "sweep" / "1" / "output.txt").read_text()
    assert f"data.path={tmp_path}/short.txt" in output
    assert "job 1 of the sweep failed (exit 2)" in done.errors
    assert "Traceback" not in done.errors
    first, second = (tmp_path / "sweep" / str(job) for job in (0, 1))
    assert json.loads((first / "result.json").read_text())["status"] == "done"
    assert [row["step"] for row in read_metrics(first)] == [1, 2]
    assert (first / "checkpoints" / "step-00000002.ckpt" / "manifest.json").is_file()
    assert not (second / "logs").exists()
