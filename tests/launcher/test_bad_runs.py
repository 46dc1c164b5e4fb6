"""Requests that only a look at the data, the machine or a checkpoint shows to be wrong."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import multiprocessing.synchronize
import os
import stat
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher.checkpoints import check_model, hold
from launcher.processes import failure
from launcher.processes.failure import as_full_disk
from launcher.processes.local import private_caches
from launcher.workloads.transformer_shape import MoeShape, TransformerShape
from strategies.errors import CheckpointError, PlanError
from tests.forgery import write_bare
from tests.launcher.command_line import launch_here, refused_here
from tests.launcher.runs import MODEL

SHAPE = {
    "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 256, "sequence": 16,
    "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "tie_embeddings": False,
    "dropout": 0.0,
}  # fmt: skip


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """`refused(words)`: the message; all else about a refusal is checked there."""
    return lambda words: refused_here(words, tmp_path, monkeypatch, limit_s=4)


def checkpoint_of(folder: Path, **differences: object) -> Path:
    """The part of a checkpoint that is read before anything starts."""
    return write_bare(folder, {"model": SHAPE | differences, "experiment_name": "default"})


def test_more_stages_than_units(refused):
    message = refused([*MODEL, "pp=7"])
    assert "7 stages" in message
    assert "6 units" in message
    assert "Try" in message


def test_layers_by_hand_that_do_not_add_up(refused):
    message = refused([*MODEL, "pp=2", "schedule.layers_per_stage=[2,1]"])
    assert "schedule.layers_per_stage=[2, 1] adds up to 3 layers, but model.layers=2" in message
    assert "Try schedule.layers_per_stage=[1,1]." in message


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["data.global_batch_size=6", "num_microbatches=4"], "Try data.global_batch_size=4"),
        (["dp=2", "data.global_batch_size=5"], "Try data.global_batch_size="),
        (
            ["data.global_batch_size=8", "data.microbatch_size=4", "num_microbatches=4"],
            "Try data.global_batch_size=16",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_batch_keys_that_contradict_each_other(refused, words, fix):
    message = refused([*MODEL, "pp=2", *words])
    assert words[-1] in message or words[0] in message
    assert fix in message


def test_a_batch_that_dp_auto_cannot_divide(refused, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    message = refused([*MODEL, "dp=auto", "data.global_batch_size=4"])
    assert "data.global_batch_size=4 is not divisible by dp=3. Try data.global_batch_size=3." in (
        message
    )


@pytest.mark.parametrize("mode", ["train", "validate"])
@pytest.mark.parametrize(
    ("size", "reason"),
    [(None, "there is no such file"), (0, "has 0 tokens"), (100, "data.val_fraction=0.1")],
    ids=["missing", "empty", "short"],
)
def test_a_text_that_cannot_be_trained_on(refused, tmp_path, mode, size, reason):
    path = tmp_path / "corpus.txt"
    if size is not None:
        path.write_text("a" * size)
    message = refused([*MODEL, f"mode={mode}", "pp=2", "data=text", f"data.path={path}"])
    assert str(path) in message
    assert reason in message
    assert "Try" in message


def test_text_without_a_path(refused):
    for mode in ("train", "validate"):
        message = refused([*MODEL, f"mode={mode}", "data=text"])
        assert "data=text needs data.path. Try data=text data.path=/path/to/" in message


def test_a_world_that_this_machine_cannot_hold(refused):
    message = refused([*MODEL, "model.layers=600", "pp=512", "num_microbatches=8"])
    assert "pp=512 * dp=1 = 512 ranks need about" in message
    assert "at most" in message
    assert "mode=simulate" in message


def test_replicas_that_this_machine_cannot_hold(refused):
    assert "pp=1 * dp=4000 = 4000 ranks need about" in refused([*MODEL, "dp=4000"])


def test_a_gpu_where_there_is_none(refused, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = refused([*MODEL, "trainer.accelerator=gpu"])
    assert "no GPU. Try trainer.accelerator=cpu." in message


def test_a_gpu_transport_on_a_cpu(refused, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Try cluster.backend=gloo." in refused([*MODEL, "cluster.backend=nccl"])


@pytest.mark.parametrize(
    ("key", "offline", "told"),
    [
        ("", "false", "no key is set up. Try `wandb login`"),
        ("abc", "auto", "WANDB_API_KEY has 3 characters, and a key of W&B 40 at least. Try"),
    ],
)
def test_a_run_that_could_not_log_in(key, offline, told, refused, monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert told in refused([*MODEL, "tracking=wandb", f"tracking.offline={offline}"])


def test_more_nccl_ranks_than_gpus(refused, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    message = refused([*MODEL, "pp=2", "cluster.backend=nccl"])
    assert "2 ranks on 1 GPUs" in message
    assert "Try cluster.backend=shared" in message


def test_generating_over_several_ranks(refused, tmp_path):
    path = checkpoint_of(tmp_path / "step-00000001.ckpt")
    words = [*MODEL, "mode=generate", f"checkpoint={path}"]
    assert "Try mode=generate pp=1 dp=1" in refused([*words, "pp=2"])
    assert "Try mode=generate pp=1 dp=1" in refused([*words, "dp=2"])


@pytest.mark.parametrize("mode", ["eval", "predict", "generate"])
def test_a_checkpoint_that_does_not_exist(refused, tmp_path, mode):
    message = refused([*MODEL, f"mode={mode}", "checkpoint=nowhere/step-00000001.ckpt"])
    assert f"{tmp_path / 'nowhere/step-00000001.ckpt'} is no checkpoint" in message
    message = refused([*MODEL, f"mode={mode}"])
    assert "no checkpoint of experiment_name=default" in message
    assert "checkpoint=PATH" in message


@pytest.mark.parametrize("words", [["trainer.resume=/"], ["mode=eval", "checkpoint=/"]])
def test_the_root_of_all_folders_is_no_checkpoint(refused, words):
    assert "/ is no checkpoint: it has no manifest.json" in refused([*MODEL, *words])


@pytest.mark.parametrize("mode", ["train", "validate"])
@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"metadata": 3, "files": {}}'])
def test_resuming_from_what_is_no_checkpoint(refused, tmp_path, mode, content):
    folder = tmp_path / "step-00000001.ckpt"
    folder.mkdir()
    if content is not None:
        (folder / "manifest.json").write_text(content)
    message = refused([*MODEL, f"mode={mode}", f"trainer.resume={folder}"])
    assert str(folder) in message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("checkpoint", ["mode=eval"]),
        ("checkpoint", ["mode=generate"]),
        ("trainer.resume", ["mode=train"]),
        ("trainer.resume", ["mode=validate"]),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model(refused, tmp_path, key, words):
    path = checkpoint_of(tmp_path / "step-00000001.ckpt", hidden=32, ffn=48)
    message = refused([*MODEL, *words, f"{key}={path}"])
    assert "model.hidden=16, model.ffn=24" in message
    assert "Try model.hidden=32 model.ffn=48." in message


def test_advice_names_the_checkpoints_sequence_length_too(refused, tmp_path):
    """Its weights fit any, and its losses are of one."""
    path = checkpoint_of(tmp_path / "step-00000001.ckpt", hidden=32, sequence=48)
    message = refused([*MODEL, "mode=eval", f"checkpoint={path}"])
    assert "Try model.hidden=32 model.sequence=48." in message


def test_a_dense_checkpoint_in_a_model_with_experts_and_the_other_way_round(refused, tmp_path):
    dense = checkpoint_of(tmp_path / "step-00000001.ckpt")
    experts = ["model.experts=4", "model.expert_ffn=8"]
    message = refused([*MODEL, *experts, "mode=eval", f"checkpoint={dense}"])
    assert "of another model than model.experts=4. Try model.experts=null." in message
    moe = MoeShape(experts=4, per_token=2, ffn=8, shared=1, balance_loss=0.01)
    sparse = checkpoint_of(tmp_path / "step-00000002.ckpt", moe=asdict(moe))
    message = refused([*MODEL, "mode=eval", f"checkpoint={sparse}"])
    assert "another model than model.experts=null. Try model.experts=4 model." in message
    words = "model.expert_ffn=8 model.experts=4 model.experts_per_token=2 model.shared_experts=1"
    assert sorted(message.partition(" Try ")[2].rstrip(".\n").split()) == words.split()
    message = refused([*MODEL, *experts, "mode=eval", f"checkpoint={sparse}"])
    assert "than model.shared_experts=0. Try model.shared_experts=1." in message
    # Losses change no weight, nor does by how much a bias moves, where there is one.
    shape = TransformerShape(**{**SHAPE, "moe": replace(moe, balance_loss=0.5, z_loss=0.1)})
    check_model(sparse, shape)
    slower = TransformerShape(**{**SHAPE, "moe": replace(moe, steering=0.001)})
    with pytest.raises(CheckpointError, match=r"Try model\.bias_update_rate=0\.0\."):
        check_model(sparse, slower)
    steered = checkpoint_of(
        tmp_path / "step-00000003.ckpt", moe=asdict(replace(moe, steering=0.01))
    )
    check_model(steered, slower)


def test_a_vocabulary_smaller_than_that_of_the_data(refused, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_bytes(b"plain ASCII and \xff " * 400)
    words = [*MODEL, "data=text", f"data.path={text}", "model.vocab=128"]
    for mode in ("train", "validate"):
        message = refused([*words, f"mode={mode}"])
        assert "model.vocab=128" in message
        assert "Try" in message


def test_a_vocabulary_smaller_than_the_ids_of_a_token_file(refused, tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(struct.pack("<4000H", *(i % 700 for i in range(4000))))
    words = [*MODEL, "data=tokens", f"data.path={path}", "model.vocab=512"]
    for mode in ("train", "validate"):
        message = refused([*words, f"mode={mode}"])
        assert "699" in message
        assert "model.vocab=512" in message
        assert "Try model.vocab=" in message


def test_an_empty_file_of_tokens(refused, tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"")
    message = refused([*MODEL, "data=tokens", f"data.path={path}"])
    assert f"data.path={path} holds no token id" in message
    message = refused([*MODEL, "data=tokens", f"data.path={path}", "model.vocab=512"])
    assert f"data.path={path} has 0 tokens" in message


def test_a_prompt_for_a_model_of_bare_ids(refused, tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(struct.pack("<4000H", *(i % 256 for i in range(4000))))
    checkpoint = checkpoint_of(tmp_path / "step-00000001.ckpt")
    words = [*MODEL, "mode=generate", f"checkpoint={checkpoint}"]
    message = refused([*words, "data=tokens", f"data.path={path}"])
    assert "generate.prompt cannot be encoded" in message
    message = refused([*words, "generate.prompt=''"])
    assert "generate.prompt is empty" in message


def test_torch_settings_that_make_reductions_wait_are_refused(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    words = [*MODEL, "model.vocab=256", "dp=2", "num_microbatches=2"]
    message = refused(words)
    assert "TORCH_DISTRIBUTED_DEBUG=INFO, or overlap=none" in message
    # Nothing is to be hidden there, so nothing is lost.
    launch_here(["mode=validate", *words, "overlap=none"], tmp_path).assert_done()
    launch_here(["mode=validate", *words, "dp=1"], tmp_path).assert_done()


def test_a_job_of_a_sweep_leaves_a_folder_alone_in_which_another_run_writes(tmp_path):
    (tmp_path / "s" / "1").mkdir(parents=True)
    words = ("-m", "pp=2,4", "mode=simulate", "costs=uniform", "hydra.sweep.dir=s")
    with hold(tmp_path / "s" / "1"):
        done = launch_here(words, tmp_path)
    assert done.code == 2
    assert f"Another run is writing into {tmp_path}/s/1 at this moment" in done.errors
    assert (tmp_path / "s" / "0" / "result.json").is_file()


@pytest.mark.parametrize("words", [(), ("-m", "seed=1,2")], ids=["a run", "a sweep"])
def test_a_folder_in_which_another_run_writes_is_refused(words, tmp_path):
    key = "sweep" if words else "run"
    (tmp_path / "r").mkdir()
    asked = (*words, "mode=simulate", "costs=uniform", f"hydra.{key}.dir=r")
    with hold(tmp_path / "r"):
        done = launch_here(asked, tmp_path)
        assert done.code == 2
        assert f"Another run is writing into {tmp_path / 'r'} at this moment" in done.errors
        assert list((tmp_path / "r").iterdir()) == []
    launch_here(asked, tmp_path).assert_done()


def test_the_folder_of_a_training_run_takes_no_other_run(tmp_path):
    folder = tmp_path / "r"
    (folder / "checkpoints" / "step-00000004.ckpt").mkdir(parents=True)
    (folder / ".hydra").mkdir()
    for name in ("result.json", "timeline.html", ".hydra/config.yaml"):
        (folder / name).write_text("of the training")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = launch_here(["mode=simulate", "costs=uniform", "hydra.run.dir=r"], tmp_path)
    assert done.code == 2
    assert done.errors == (
        f"error: {folder} is the folder of a training run, with checkpoints up to "
        "step-00000004.ckpt: mode=simulate would write over its result.json and its pictures. "
        "Try another hydra.run.dir (of a sweep: hydra.sweep.dir).\n"
    )
    assert {path: path.read_bytes() for path in before} == before


def test_a_file_system_that_locks_no_folders_has_a_file_locked(tmp_path, monkeypatch):
    lock = fcntl.flock

    def of_files(handle: int, how: int) -> None:  # as NFS does
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(handle, how)

    monkeypatch.setattr("fcntl.flock", of_files)
    with hold(tmp_path), pytest.raises(PlanError, match="Another run is writing"), hold(tmp_path):
        pass
    with hold(tmp_path):
        pass

    def of_nothing(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", of_nothing)
    with hold(tmp_path), hold(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_that_a_stranger_has_made_where_anybody_can_is_refused(refused, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "r").mkdir()
    os.chown(shared / "r", 65534, 65534)
    message = refused(("mode=simulate", "costs=uniform", "hydra.run.dir=shared/r"))
    assert f"The run folder {shared}/r is another user's, in a place where anybody can" in message


def _link(file: Path) -> None:
    file.symlink_to("/etc/hostname")


@pytest.mark.parametrize("lie", [os.mkfifo, os.mkdir, _link])
def test_what_an_earlier_run_has_left_is_looked_at_before_it_is_replaced(lie, refused, tmp_path):
    (tmp_path / "r" / ".hydra").mkdir(parents=True)
    lie(tmp_path / "r" / ".hydra" / "config.yaml")
    message = refused(("mode=simulate", "costs=uniform", "hydra.run.dir=r"))
    assert f"{tmp_path}/r/.hydra, which this run is to replace, cannot be read" in message


def test_what_libraries_keep_lies_in_folders_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fonts, code = (tmp_path / "foldpipe" / name for name in ("matplotlib", "inductor"))
    found = {"MPLCONFIGDIR": str(fonts), "TORCHINDUCTOR_CACHE_DIR": str(code)}
    assert private_caches({}) == found
    assert {folder.stat().st_mode & 0o777 for folder in (fonts, code)} == {0o700}
    assert private_caches({"MPLCONFIGDIR": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/mine"}) == {}
    new = set()
    for spoil in (fonts.parent.chmod, code.chmod):
        spoil(0o777)
        new |= private_caches({"MPLCONFIGDIR": "/mine"}).items()
        spoil(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    new |= private_caches({}).items()
    # One that nobody can have made before, the same for all ranks of a process.
    ((name, folder),) = new
    assert name == "TORCHINDUCTOR_CACHE_DIR"
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    Path(folder).rmdir()


def test_a_run_folder_that_takes_nothing_is_refused(refused, tmp_path, monkeypatch):
    asked = ("mode=simulate", "costs=uniform")
    long = refused((*asked, f"hydra.run.dir={'x' * 300}"))
    assert "cannot be created: File name too long" in long
    monkeypatch.setattr("launcher.compose.execute.free_bytes", lambda _: 70_000)
    full = refused((*asked, "hydra.run.dir=a/b"))
    assert f"The run folder {tmp_path}/a/b has 70,000 bytes free, and a run writes 1,048," in full
    assert "Try hydra.sweep.dir=" in refused(("-m", "pp=1,2", *asked, "hydra.sweep.dir=s"))


def test_a_sweep_goes_on_where_one_job_has_no_room(tmp_path, monkeypatch):
    def full(self: object, index: int, folder: Path, stamps: object) -> None:
        if index == 0:
            raise OSError(errno.ENOSPC, "whatever")

    monkeypatch.setattr("launcher.compose.multirun.SweepState.begun", full)
    words = ("-m", "pp=2,4", "mode=simulate", "costs=uniform", "hydra.sweep.dir=s")
    done = launch_here(words, tmp_path)
    assert done.code == 1
    assert "Traceback" not in done.errors
    assert "job 0 of the sweep failed" in done.errors
    assert "No space left on device" in done.errors
    assert (tmp_path / "s" / "sweep.csv").read_text().count("\n") == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_fills_up_later_is_one_message(number, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(number, "whatever", str(tmp_path / "run" / "timeline.html"))

    monkeypatch.setattr("launcher.commands.layouts.write_pictures", full)
    done = launch_here(("mode=simulate", "costs=uniform", "hydra.run.dir=run"), tmp_path)
    assert done.code == 1
    assert done.errors.count("\n") == 1
    said = f"error: {tmp_path}/run/timeline.html cannot be written: {os.strerror(number)} ("
    assert done.errors.startswith(said)


def test_shared_memory_that_is_full_is_named(tmp_path):
    error = RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")
    found = as_full_disk(error, tmp_path)
    assert found is not None
    assert str(found).startswith("/dev/shm is full (")
    assert as_full_disk(ValueError("x"), tmp_path) is None
    assert as_full_disk(FileNotFoundError(2, "no"), tmp_path) is None


def test_a_full_disk_that_nobody_names_is_not_the_run_folders(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # What loaders wait with is made in shared memory, and its error names no file.
    monkeypatch.setattr(multiprocessing.synchronize, "sem_unlink", full)
    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", full)
    with pytest.raises(OSError, match="No space left") as raised:
        multiprocessing.get_context("fork").Lock()
    assert str(as_full_disk(raised.value, tmp_path)).startswith("/dev/shm is full (")
    # A file of somebody's own, elsewhere.
    with pytest.raises(OSError, match="No space left") as raised, open("/dev/full", "wb", 0) as own:
        own.write(b"x")
    found = str(as_full_disk(raised.value, tmp_path))
    assert found.startswith(f"No space left on device: somewhere else than in {tmp_path}")
    # Where the run folder has no room itself, it is that.
    monkeypatch.setattr(failure, "free_bytes", lambda _: 4096)
    assert str(as_full_disk(raised.value, tmp_path)).startswith(f"{tmp_path} cannot be written")
