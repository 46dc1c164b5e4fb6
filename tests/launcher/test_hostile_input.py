"""What a stranger could send as configuration: nothing of it is imported, called or unpickled."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.command_line import run_here

_EVENTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "shutil.rmtree",
           "pickle.find_class", "os.remove", "socket.connect", "webbrowser.open")  # fmt: skip
_seen: list[str] = []
_listening = False


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listening:
        return
    planted = event == "import" and str(arguments[0]).startswith("hostile_")
    if planted or event in _EVENTS or (event == "exec" and "hostile" in repr(arguments[0])):
        _seen.append(f"{event} {arguments!r}"[:200])


sys.addaudithook(_listen)  # for ever: Python has no way to take one off


@pytest.fixture
def nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test in which something was run, or in which a planted module was imported."""
    global _listening
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "hostile_module.py").write_text("open('canary', 'w').close()\nrun = print\n")
    monkeypatch.syspath_prepend(str(planted))
    _seen.clear()
    _listening = True
    yield
    _listening = False
    assert _seen == []
    assert not list(tmp_path.rglob("canary"))
    assert "hostile_module" not in sys.modules


CALLS = (
    "os.system", "subprocess.run", "builtins.exec", "builtins.eval", "pathlib.Path.unlink",
    "torch.load", "pickle.loads", "hostile_module.run", "importlib.import_module",
)  # fmt: skip
WORDS = [
    *(f"+model._target_={call}" for call in CALLS),
    *(f"++trainer._target_={call}" for call in CALLS[:3]),
    "model={_target_: os.system, command: touch canary}",
    "+optimizer={_target_: builtins.eval, _args_: [x]}",
    "model._target_=os.system",
    "model.\\_target_=os.system",
    "+hydra.callbacks.x._target_=hostile_module.run",
    "hydra.launcher._target_=hostile_module.run",
    "hydra/launcher=hostile_module",
    "hydra/job_logging=hostile",
    "hydra.job_logging.handlers.file.class=hostile_module.run",
    "hydra.sweeper._target_=hostile_module.run",
    "+hydra.job.env_set.LD_PRELOAD=/tmp/hostile.so",
    "hydra.searchpath=[pkg://hostile_module]",
    "hydra.run.dir=${oc.decode:${hostile_module.run}}",
    "model=pkg://hostile_module",
    "model=../../hostile",
    "schedule=hostile_module.run",
    "data=hostile_module",
    "optimizer=hostile_module:run",
    "seed=${hostile_module:run}",
    "seed=${oc.create:{_target_:os.system}}",
    "seed=${eval:1}",
    "experiment=/etc/passwd",
    "mode=hostile_module",
    "mode=..commands.train",
    "pp=__import__('os').system('touch canary')",
    "pp=!!python/object/apply:os.system ['touch canary']",
    "seed=$(touch canary)",
    "seed=`touch canary`",
    "--config-path=/tmp/hostile",
    "--config-name=hostile",
    "--experimental-rerun=hostile.pickle",
    "--info=hostile",
]
FILES = {
    "target": "_target_: os.system\ncommand: touch canary\n",
    "target below": "mlp: {_target_: hostile_module.run}\n",
    "target in quotes": '"_target_": hostile_module.run\n',
    "target by escape": '"\\x5ftarget_": hostile_module.run\n',
    "target by merge": "a: &a {_target_: os.system}\n<<: *a\n",
    "target by alias": "k: &k _target_\n*k : os.system\n",
    "target that resolves": "hidden: ${oc.create:{_target_:os.system}}\n",
    "python object": "name: !!python/object/apply:os.system ['touch canary']\n",
    "python name": "name: !!python/name:hostile_module.run\n",
    "python module": "name: !!python/module:hostile_module\n",
    "own tag": "name: !hostile {a: 1}\n",
    "defaults": "defaults:\n  - /hydra/launcher: hostile_module\n",
    "package": "# @package hydra.launcher\n_target_: hostile_module.run\n",
    "search path": "# @package _global_\nhydra: {searchpath: [pkg://hostile_module]}\n",
}


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("word", WORDS)
def test_a_hostile_word_runs_nothing(word, tmp_path, monkeypatch):
    done = run_here([word], tmp_path / "cwd", monkeypatch)
    done.assert_refused()


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_hostile_file_runs_nothing(text, tmp_path, monkeypatch):
    file = tmp_path / "options" / "model" / "theirs.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    words = ["--config-dir", str(tmp_path / "options"), "model=theirs", "mode=simulate"]
    run_here(words, tmp_path / "cwd", monkeypatch).assert_refused()


def test_the_listener_would_see_them(tmp_path, monkeypatch):
    global _listening
    (tmp_path / "hostile_seen.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    _seen.clear()
    _listening = True
    importlib.import_module("hostile_seen")
    pickle.loads(pickle.dumps(print))
    _listening = False
    assert [line.split()[0] for line in _seen] == ["exec", "pickle.find_class"]


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("touch canary",))


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("name", ["manifest.json", "a file", ".metadata"])
def test_a_pickle_in_place_of_a_checkpoint_is_never_opened(name, tmp_path):
    from launcher.checkpoints import manifest_of
    from strategies.errors import CheckpointError
    from strategies.manifest import read_manifest

    folder = tmp_path / "step-00000001.ckpt"
    bomb = pickle.dumps(Bomb())
    if name == "a file":
        folder.write_bytes(bomb)
    else:
        folder.mkdir()
        (folder / name).write_bytes(bomb)
    for read in (manifest_of, read_manifest):
        with pytest.raises(CheckpointError):
            read(folder)
