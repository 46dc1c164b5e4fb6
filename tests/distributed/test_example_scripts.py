"""Every script of ``examples/`` runs, and what it trains learns."""

from __future__ import annotations

import contextlib
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.processes.local import our_path
from launcher.resolve import resolve
from strategies.analysis.timeline import Timeline
from tests.launcher.command_line import launch_here, run_here
from tests.launcher.runs import launch, read_result
from tests.ranks.pool import Ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Of each script a figure, and where that lies once it has learned something: after an epoch.
LEARNED: dict[str, tuple[str, float, float]] = {
    "unet.py": ("loss", 0.0, 0.1),  # the noise alone is 0.25
    "resnet.py": ("accuracy", 0.45, 1.0),  # of four kinds
    "encoder_decoder.py": ("loss", 0.0, 2.1),  # from ln 12 = 2.5
    "experts.py": ("loss", 0.0, 2.8),  # from ln 32 = 3.5
    "gan.py": ("seen", 0.3, 0.69),  # from ln 2 = 0.69
    "llama_lora.py": ("loss", 0.0, 5.4),  # from ln 256 = 5.5
}
SHORT = 2  # steps of an everyday run, which has the figure, and has not learned yet
PAGE = ROOT / "docs" / "guides" / "examples.md"
COMMANDS = (
    "own_schedule.py", "csv_order.sh", "sweep.sh", "slurm_array.sh", "resume_elsewhere.sh",
    "late_gradients.sh",
)  # fmt: skip
NEEDS = {"llama_lora.py": "peft"}


def missing(name: str) -> bool:
    return name in NEEDS and find_spec(NEEDS[name]) is None


def skip_without(name: str) -> None:
    if missing(name):
        pytest.skip(f"{name} needs {NEEDS[name]}: pip install 'transformers>=5' 'peft>=0.17'")


def play(path: str, folder: str, **changes: Any) -> dict[str, float]:
    """What a script has come to after an epoch; runs on a rank."""
    with _played(path, folder, max_epochs=1, **changes) as trainer:
        return {name: float(value) for name, value in trainer.callback_metrics.items()}


def measured(path: str, folder: str) -> Timeline | None:
    """The median step of a script; runs on a rank, and the first has it."""
    with _played(path, folder) as trainer:
        return trainer.strategy.measured_timeline()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _played(path: str, folder: str, **changes: Any) -> Iterator[Any]:
    """Runs a script as its own process would; its Trainer is told to be quiet."""
    import lightning.pytorch as pl

    changes |= {
        "enable_progress_bar": False, "enable_model_summary": False, "logger": False,
        "log_every_n_steps": 1, "default_root_dir": folder,
    }  # fmt: skip
    trainer, words = pl.Trainer, sys.argv
    # Of peft, about transformers.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
    try:
        sys.argv = [path]
        pl.Trainer = lambda **given: trainer(**{**given, **changes})  # type: ignore[misc,assignment]
        it = runpy.run_path(path, run_name="__main__")["trainer"]
        yield it
        it.strategy.engine.close()
    finally:
        pl.Trainer, sys.argv = trainer, words  # type: ignore[misc]


def commands(file: Path) -> list[list[str]]:
    """What it types behind ``python -m launcher``."""
    text = file.read_text().replace("\\\n", " ")
    found = re.findall(r"^ *python -m launcher (.*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))


def test_each_example_is_short_and_is_one_of_those_that_are_run() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == {*LEARNED, *COMMANDS}
    assert len(files) == 12
    page = PAGE.read_text()
    for name in files:
        assert len((EXAMPLES / name).read_text().splitlines()) < 60, name
        assert f"examples/{name}" in page, name


@pytest.mark.distributed
@pytest.mark.parametrize("name", LEARNED)
def test_a_script_trains(name: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    skip_without(name)
    options = {"limit_train_batches": SHORT, "limit_val_batches": SHORT}
    found = ranks(2).run(play, path=str(EXAMPLES / name), folder=str(tmp_path), **options)
    assert all(math.isfinite(rank[LEARNED[name][0]]) for rank in found), found


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("name", LEARNED)
def test_a_script_learns(name: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    skip_without(name)
    figure, low, high = LEARNED[name]
    found = ranks(2).run(play, path=str(EXAMPLES / name), folder=str(tmp_path))
    assert all(low <= rank[figure] <= high for rank in found), found


@pytest.mark.parametrize(
    "file",
    # Those of the page are about classes, which a process with torch looks at.
    [
        *(EXAMPLES / name for name in COMMANDS if name != "slurm_array.sh"),
        # That array is made below.
        *(pytest.param(p, marks=pytest.mark.full) for p in (PAGE, EXAMPLES / "slurm_array.sh")),
    ],
    ids=lambda file: file.name,
)
def test_the_commands_of_an_example_are_accepted(
    file: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts no rank is run; of the others the programs are compiled."""
    typed = commands(file)
    assert typed
    for words in typed:
        if "mode=simulate" in words and "-m" not in words:
            done = launch_here(words, copy)
            assert done.code == 0, done.errors
            continue
        words = [*words, "--help"] if "-m" in words else words  # checks every job, and starts none
        with monkeypatch.context() as patch:
            done = run_here(words, copy, patch, _compiled)
        assert done.code == 0, done.errors


def _compiled(config: LaunchConfig, run_dir: Path) -> int:
    resolve(config)
    return 0


def test_the_sweep_has_its_picture_and_the_array_its_container(copy: Path) -> None:
    assert launch_here(commands(EXAMPLES / "sweep.sh")[0], copy).code == 0
    assert next(copy.glob("multirun/*/*/sweep.png")).stat().st_size > 10_000
    assert launch_here(commands(EXAMPLES / "slurm_array.sh")[0], copy).code == 0
    assert "#SBATCH --array=0-2%2" in next(copy.rglob("array.sbatch")).read_text()
    jobs = [path.read_text() for path in copy.rglob("job.sbatch")]
    assert len(jobs) == 3 and all("/images/torch.sif" in job for job in jobs)


@pytest.mark.distributed
@pytest.mark.full
def test_a_checkpoint_goes_on_elsewhere(copy: Path) -> None:
    for number, words in enumerate(commands(EXAMPLES / "resume_elsewhere.sh"), start=1):
        short = [re.sub(r"(max_steps=.)0", r"\1", word) for word in words]
        launch([*short, "trainer.limit_val_batches=0"], copy).assert_done()
        steps = [read_result(path.parent)["steps"] for path in copy.rglob("result.json")]
        assert sorted(steps) == [2, 4, 6][:number]


@pytest.mark.distributed
@pytest.mark.full
def test_trainings_with_late_gradients_are_one_picture(copy: Path) -> None:
    """The long sweep in short: all six trainings, and a curve of each over steps and seconds."""
    (words,) = commands(EXAMPLES / "late_gradients.sh")
    short = ["trainer.max_steps=6", "trainer.log_every_n_steps=2", "trainer.limit_val_batches=0"]
    launch([*words, *short], copy).assert_done()
    page = next(copy.glob("multirun/*/*/sweep.html")).read_text()
    drawings = re.findall(r'<svg class="front curve".*?</svg>', page, re.DOTALL)
    assert [drawing.count("<title>experiment=") for drawing in drawings] == [6, 6]
    results = [read_result(path.parent) for path in copy.rglob("result.json")]
    assert sorted(r["synchronous"] for r in results) == [False] * 4 + [True] * 2
    assert sorted(r.get("error_feedback", 0.0) for r in results) == [0.0] * 4 + [1.0] * 2


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("name", [*LEARNED, *(n for n in COMMANDS if n != "late_gradients.sh")])
def test_an_example_runs_as_it_is_typed(name: str, copy: Path) -> None:
    skip_without(name)
    typed = [["bash", name]] if name.endswith(".sh") else [[sys.executable, name]]
    if name in COMMANDS and name.endswith(".py"):
        typed = [[sys.executable, "-m", "launcher", *words] for words in commands(copy / name)]
    environment = {**os.environ, "PYTHONPATH": our_path(os.environ)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for words in typed:
        done = subprocess.run(
            words,
            cwd=copy,
            env=environment | {"OMP_NUM_THREADS": "1", "PATH": path},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
