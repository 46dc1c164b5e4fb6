"""What torchrun's ranks tell each other, with a store and a job of ours in place of torch's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.__main__ import main
from launcher.checkpoints import is_remembered
from launcher.processes import torchrun
from launcher.processes.local import write_outcome
from launcher.processes.preempted import PreemptedError
from strategies.errors import DamagedCheckpointError, ModelError, PlanError, RunError
from tests.launcher.runs import MODEL, read_result

INSIDE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip
OUTCOME = {
    "steps": 3, "checkpoint": "/c", "step_time_s": 0.5, "tokens_per_s": 2.0, "loss_last": 1.5,
    "timeline": None, "buckets": [0, 0], "skips": [],
    "exchanges": [],
}  # fmt: skip


class Store:
    """The part of a torch.distributed.Store that is used."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10)
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._counts[key] = self._counts.get(key, 0) + amount
            return self._counts[key]


@pytest.fixture
def store(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """Two ranks' store; signals are those of the test run again afterwards."""
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)}
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    shared = Store()
    monkeypatch.setattr(torchrun, "_meet", lambda: shared)
    monkeypatch.setattr(torchrun, "rank", rank)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(torchrun, "leave", leave)
    yield shared
    for number, handler in before.items():
        signal.signal(number, handler)


def job(monkeypatch: pytest.MonkeyPatch, run: Callable[[dict[str, Any], Path], None]) -> None:
    module = types.ModuleType("launcher.rank.jobs")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "launcher.rank.jobs", module)


def lead(*words: str) -> tuple[int | str | None, str, str]:
    """``python -m launcher cluster=torchrun *words`` as rank 0."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code: int | str | None = main(["cluster=torchrun", *words])
        except SystemExit as left:
            code = left.code
    return code, output.getvalue(), errors.getvalue()


def follower(answers: list[int]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(torchrun.follow()), name="rank 1")
    thread.start()
    return thread


def followed() -> int:
    """What rank 1 ends with, which rank 0 has told before."""
    codes: list[int] = []
    follower(codes).join(60)
    return codes[0]


def rank() -> int:
    return 1 if threading.current_thread().name == "rank 1" else int(os.environ["RANK"])


RUN = (*MODEL, "pp=2", "hydra.run.dir=run")


def test_rank_0_tells_the_others_what_it_has_written(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[dict[str, Any]] = []

    def run(task: dict[str, Any], run_dir: Path) -> None:
        seen.append(task)
        write_outcome(run_dir, dict(OUTCOME), stopped_by=None)

    job(monkeypatch, run)
    code, output, errors = lead(*RUN)
    assert (code, errors) == (0, "")
    assert read_result(tmp_path / "run")["status"] == "done"
    assert f"files: {tmp_path / 'run'}" in output
    assert followed() == 0
    assert seen[0] == seen[1] == json.loads((tmp_path / "run" / "resolved.json").read_text())
    assert seen[0]["config"]["cluster"]["nodes"] == 1


def test_nodes_are_those_of_torchrun(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    tasks = []

    def run(task: dict[str, Any], run_dir: Path) -> None:
        tasks.append(task)
        write_outcome(run_dir, dict(OUTCOME), stopped_by=None)

    job(monkeypatch, run)
    assert lead(*RUN)[0] == 0
    assert tasks[0]["config"]["cluster"]["nodes"] == 2


def test_a_preempted_run_ends_with_85_on_every_rank(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(task: dict[str, Any], run_dir: Path) -> None:
        write_outcome(run_dir, dict(OUTCOME), stopped_by="SIGTERM")
        raise PreemptedError("stopped", {})

    job(monkeypatch, run)
    code, _, errors = lead(*RUN)
    assert code == 85
    assert errors.startswith("error: SIGTERM has stopped the run after step 3")
    assert read_result(tmp_path / "run")["status"] == "preempted"
    assert followed() == 85


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pp=4"], "= 4 ranks, but torchrun has started 2 processes"),
        (["pp=2", "model.layrs=3"], "model.layers"),
        (["-m", "pp=1,2"], "Try -m with cluster=local or cluster=slurm"),
        (["--nope"], "is not a flag"),
    ],
)
def test_a_refusal_is_said_once_and_ends_all(words, message, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes: list[int] = []
    other = follower(codes)
    code, output, errors = lead(*MODEL, *words)
    other.join(60)
    assert (code, codes, output) == (2, [2], "")
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failing_rank_leaves_its_word(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def fail(task: dict[str, Any], run_dir: Path) -> None:
        raise ModelError("this layer is odd")

    job(monkeypatch, fail)
    code, _, errors = lead(*RUN)
    assert code == 2
    assert errors == "error: this layer is odd\n"
    monkeypatch.setenv("RANK", "1")
    assert followed() == 2
    assert "error: this layer is odd" in capsys.readouterr().err
    left = json.loads((tmp_path / "run" / "logs" / "rank_00001.error.json").read_text())
    assert (left["rank"], left["message"]) == (1, "this layer is odd")


def test_a_defect_on_rank_0_is_a_failed_run(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail(task: dict[str, Any], run_dir: Path) -> None:
        raise ZeroDivisionError("a defect")

    job(monkeypatch, fail)
    code, _, errors = lead(*RUN)
    assert code == 1
    assert "failed: ZeroDivisionError: a defect" in errors
    assert read_result(tmp_path / "run")["status"] == "failed"


def test_what_a_model_of_rank_0_raises_has_no_secret_in_it_and_is_cut(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_TOKEN", "b3c2a1f0e9d8")

    def fail(task: dict[str, Any], run_dir: Path) -> None:
        raise ZeroDivisionError(f"{dict(os.environ)['SOME_TOKEN']} {'x' * 100_000}")

    job(monkeypatch, fail)
    code, output, errors = lead(*RUN)
    assert code == 1
    error = read_result(tmp_path / "run")["error"]
    assert "failed: ZeroDivisionError: " in error
    assert len(error) < 5_000
    assert "b3c2a1f0e9d8" not in output + errors + error


def test_signals_are_taken_before_anything_else(store):
    assert torchrun.joins(["cluster=torchrun", "pp=2"])
    for number in (signal.SIGUSR1, signal.SIGTERM):
        assert type(signal.getsignal(number)).__name__ == "StopRequest"
    assert not torchrun.joins(["pp=2"])


@pytest.mark.parametrize("left", [
    '{"code": 0}', '{"run_dir": "/tmp", "task": {}}', "{", "[" * 100_000, "null",
    '{"text": "{\\"code\\": 0}", "mac": "0"}', '{"text": "{\\"code\\": 0}", "mac": 0}',
])  # fmt: skip
def test_what_a_stranger_has_left_in_the_store_ends_nobody(left, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[dict[str, Any]] = []

    def run(task: dict[str, Any], run_dir: Path) -> None:
        seen.append(task)
        write_outcome(run_dir, dict(OUTCOME), stopped_by=None)

    job(monkeypatch, run)
    store.set("foldpipe/task/1", left)
    codes: list[int] = []
    other = follower(codes)
    other.join(0.1)
    assert other.is_alive()
    assert codes == []
    assert lead(*RUN)[0] == 0
    other.join(60)
    assert codes == [0]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RANK", "x", "RANK=x: expected a whole number, at least 0."),
        ("RANK", "2", "RANK=2: expected less than WORLD_SIZE=2."),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0: expected a whole number, at least 1."),
        ("LOCAL_RANK", "-1", "LOCAL_RANK=-1: expected a whole number, at least 0."),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000: expected at most 65535."),
    ],
)
def test_variables_that_no_torchrun_has_set_are_refused(name, value, told, store, monkeypatch):
    monkeypatch.setenv(name, value)
    code, output, errors = lead(*RUN)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: cluster=torchrun with {told} torchrun sets it: try ")
    assert errors.count("\n") == 1


def test_a_store_that_is_lost_is_one_message(store, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    def lost(_: str) -> str:
        raise RuntimeError("Failed to recv, got 0 bytes.\nException raised from recvBytes")

    monkeypatch.setattr(store, "get", lost)
    with pytest.raises(RunError) as raised:
        torchrun.follow()
    assert str(raised.value) == (
        "the store where torchrun's ranks meet, 127.0.0.1:1, was lost by rank 1: Failed to recv, "
        "got 0 bytes. If rank 0 has ended, its own words say why; else see that MASTER_ADDR and "
        "MASTER_PORT are those of its node."
    )


def test_what_was_said_to_another_run_is_no_word_of_this_one(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []

    def run(task: dict[str, Any], run_dir: Path) -> None:
        seen.append(run_dir)
        write_outcome(run_dir, dict(OUTCOME), stopped_by=None)

    job(monkeypatch, run)
    assert lead(*RUN)[0] == 0
    assert followed() == 0
    recorded = store.get("foldpipe/task/1")
    later = Store()
    later.set("foldpipe/task/1", recorded)
    monkeypatch.setattr(torchrun, "_meet", lambda: later)
    codes: list[int] = []
    other = follower(codes)
    other.join(0.5)
    assert other.is_alive() and codes == []
    assert lead(*RUN[:-1], "hydra.run.dir=later")[0] == 0
    other.join(60)
    assert codes == [0]
    assert [folder.name for folder in seen] == ["run", "run", "later", "later"]


def test_a_refusal_is_heard_over_a_stranger(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.set("foldpipe/task/1", '{"code": 0}')
    codes: list[int] = []
    other = follower(codes)
    assert lead(*MODEL, "pp=4")[0] == 2
    other.join(60)
    assert codes == [2]


def test_a_signature_is_of_one_key_and_one_attempt(store, tmp_path, monkeypatch):
    said = torchrun.signed({"code": 3})
    assert torchrun.read_signed(said) == {"code": 3}
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert torchrun.read_signed(said) is None
    with monkeypatch.context() as patch:
        patch.setenv("FOLDPIPE_KEY", "another")
        assert torchrun.read_signed(said) is None
        assert torchrun.read_signed(torchrun.signed({"code": 3})) == {"code": 3}
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert torchrun.read_signed(said) is None  # another user's file
        file = tmp_path / "foldpipe" / "torchrun.key"
        assert file.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        file.chmod(0o644)
        with pytest.raises(PlanError, match="others can read it"):
            torchrun.signed({})
        file.unlink()
        file.mkdir()
        with pytest.raises(PlanError, match="Try FOLDPIPE_KEY=SECRET"):
            torchrun.signed({})


def test_ranks_meet_at_a_store_whose_token_only_the_users_key_gives(store, monkeypatch):
    found = torchrun.guarded_store()
    assert found is not None
    listener, token = found
    try:
        place = torchrun._own_place()
        assert place is not None
        # Neither the key nor the token is told; what is told says how to come by the token.
        assert token not in torchrun.signed({"place": place})
        with torchrun._met_at(place):
            assert os.environ["FOLDPIPE_STORE"] == token
            assert os.environ["MASTER_ADDR"] == "127.0.0.1"
            assert os.environ["MASTER_PORT"] == str(listener.getsockname()[1])
        assert os.environ["MASTER_PORT"] == INSIDE["MASTER_PORT"]
        assert "FOLDPIPE_STORE" not in os.environ
        monkeypatch.setenv(torchrun.KEY_VARIABLE, "another user's")
        with torchrun._met_at(place):
            assert os.environ["FOLDPIPE_STORE"] != token
    finally:
        listener.close()
    monkeypatch.setenv("RANK", "1")
    assert torchrun.guarded_store() is None


def test_a_damaged_checkpoint_is_skipped_by_the_next_attempt(store, tmp_path, monkeypatch):
    chosen = tmp_path / "checkpoints" / "step-00000003.ckpt"
    chosen.mkdir(parents=True)
    (chosen / "manifest.json").write_text("{}")

    def run(task: dict[str, Any], run_dir: Path) -> None:
        raise DamagedCheckpointError("rank_00001.safetensors is damaged")

    job(monkeypatch, run)
    (tmp_path / "run").mkdir()
    task = {"config": {"mode": "train"}, "checkpoint": str(chosen)}
    with pytest.raises(DamagedCheckpointError):
        torchrun.lead(tmp_path / "run", task, lambda _: None)
    assert is_remembered(chosen)
