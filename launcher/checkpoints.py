"""Checkpoints as the parent sees them: found by name, verified, compared with the model."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import spell, typed
from launcher.report.result import write_atomically
from launcher.resolve import Run, text_source
from launcher.terminal import say
from launcher.workloads.data.identity import tell_other_data
from launcher.workloads.transformer_shape import MoeShape, TransformerShape, shape_keys
from strategies.errors import CheckpointError, PlanError
from strategies.manifest import (
    MANIFEST,
    NOT_FINITE,
    OLD,
    UNFINISHED,
    committed,
    find_damage,
    find_misfit,
    read_manifest,
    total_bytes,
)
from strategies.small_file import read_json

ROOTS = ("outputs", "multirun")
_HASHED_BYTES = 4_000_000_000
_SKEW_S = 300.0  # by which clocks of hosts that are looked after may differ
_STEP = re.compile(r"step-(\d{1,15})\.ckpt")


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: There is none, or it is not as this program writes it.
    """
    return read_manifest(committed(path))


def check_whole(path: Path) -> None:
    """Refuses a checkpoint with a damaged, cut or missing file before anything is started.

    Sizes are always compared, hashes up to 4 GB; the ranks compare all of them.

    Raises:
        CheckpointError: Which file, the expected and the found hash.
    """
    if path.is_file():  # of stock Lightning, which has no hashes
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} is no checkpoint: neither a folder with {MANIFEST} nor a whole file of "
                "Lightning.",
                fix="Use another checkpoint.",
            )
        return
    problem = _damage(committed(path))
    if problem is not None:
        raise CheckpointError(problem)


def check_model(path: Path, shape: TransformerShape) -> None:
    """Refuses a checkpoint of another model."""
    written = manifest_of(path)["metadata"].get("model")
    if written is None:
        return
    if not isinstance(written, dict):
        raise CheckpointError(f"{path} is a checkpoint of model={written}. Try model={written}.")
    if "hf" in written:
        raise CheckpointError(
            f"{path} is a checkpoint of model=hf, not of the built-in transformer. "
            "Try model=hf model.path=FOLDER with the folder that it was trained from."
        )
    now, then = shape_keys(asdict(shape)), shape_keys(written)
    # What may differ: it changes no weight.
    free = {"dropout", "aux_loss", "aux_loss_over", "z_loss"}
    free |= {"sequence"} if shape.position == "rope" else set()
    # A rate of 0 has no bias; of all others it is by how much one moves.
    both = now.get("bias_update_rate") and then.get("bias_update_rate")
    free |= {"bias_update_rate"} if both else set()
    wrong = [key for key in now if key not in free and then.get(key) != now[key]]
    if wrong and then["experts"] is None:  # what other keys are about
        wrong = [key for key in wrong if key in then]
    if wrong:
        asked = ", ".join(f"model.{key}={spell(now[key])}" for key in wrong)
        beside = shape_keys({"moe": asdict(MoeShape(1, 1, 1))})  # what need not be typed
        changed = wrong + [
            key for key in then if key not in (*now, *free) and then[key] != beside.get(key)
        ]
        if then["sequence"] != now["sequence"]:  # losses are of one length
            changed.append("sequence")
        fix = " ".join(f"model.{key}={spell(then[key])}" for key in changed)
        raise CheckpointError(f"{path} is a checkpoint of another model than {asked}. Try {fix}.")


def check_continues(path: Path, run: Run) -> None:
    """Refuses to go on where nothing is left to do, or with another optimizer.

    Raises:
        CheckpointError: The optimizer's state is of no use.
        PlanError: The checkpoint is of the last step already, or of a later one.
    """
    if path.is_file():
        return  # a file of stock Lightning, which only ranks open
    config, written = run.config, manifest_of(path)["metadata"]
    problem = written.get(NOT_FINITE)
    if problem is not None and config.trainer.on_nan != "ignore":
        raise CheckpointError(
            f"{path} is not finite: {problem}, and so would be every step after it.",
            fix="Use an earlier "
            "checkpoint (trainer.resume=auto finds the newest that is finite), or train anew.",
        )
    step, most = written.get("step"), config.trainer.max_steps
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # of ranks after their last
    if step is not None and 0 <= most <= step and not again:
        raise PlanError(
            f"nothing is left to do: {path} is at step {step}, and trainer.max_steps={most}. "
            f"Try trainer.max_steps={max(2 * step, 1)}, or mode=eval "
            f"{typed('checkpoint', str(path))}."
        )
    optimizers, name = written.get("optimizers"), config.optimizer.name
    if not run.own_model and optimizers and [each.lower() for each in optimizers] != [name]:
        raise CheckpointError(
            f"{path} was written with optimizer={optimizers[0].lower()}, whose state is of no use "
            f"to optimizer={name}. Try optimizer={optimizers[0].lower()}, or train anew."
        )


def check_data(path: Path, run: Run) -> None:
    """Refuses to go on in other data than the checkpoint's.

    Raises:
        CheckpointError: With what has changed, and the key that accepts it.
    """
    if path.is_file() or run.own_data or run.config.trainer.accept_other_data:
        return
    written = manifest_of(path)["metadata"].get("data")
    problem = tell_other_data(path, written, text_source(run.config))
    if problem is not None:
        raise CheckpointError(problem)


def require_no_training(run_dir: Path, mode: str) -> None:
    """Refuses a folder whose figures are those of a training run, which ``mode`` would replace."""
    there = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    if there:
        raise PlanError(
            f"{run_dir} is the folder of a training run, with checkpoints up to {there[-1].name}: "
            f"mode={mode} would write over its result.json and its pictures. "
            "Try another hydra.run.dir (of a sweep: hydra.sweep.dir)."
        )


def check_run_folder(run_dir: Path, resumed: Path | None) -> None:
    """Refuses to train into a folder with checkpoints that the run would take for its own."""
    folder = run_dir / "checkpoints"
    there = sorted(path for path in folder.glob("*.ckpt")) if folder.is_dir() else []
    while resumed is not None and there and there[-1] != resumed and _unusable(there[-1]):
        del there[-1]  # what is of no use is replaced when the run gets there
    if there and (resumed is None or there[-1] != resumed):
        raise CheckpointError(
            f"{folder} has checkpoints of an earlier run up to {there[-1].name}, which are never "
            f"overwritten. Try {typed('trainer.resume', str(there[-1]))}, or another hydra.run.dir."
        )


def newest_checkpoint(
    experiment_name: str,
    run_dir: Path,
    *,
    optional: bool,
    without: Collection[Path] = (),
    skipped: Callable[[str], None] = say,
) -> Path | None:
    """The newest whole checkpoint of an experiment: of the run that began last, its last step.

    Looked for below outputs/ and multirun/ of the working directory, and in the run folders beside
    ``run_dir`` (of a user's own ``hydra.run.dir``). Manifests say when a run began and at which
    step it was, so neither copies nor the times of files matter. One that is damaged is skipped:
    sizes are always compared, hashes up to 4 GB (the ranks compare all of them, each a share,
    before they load anything).

    ``experiment_name``: as the checkpoint's manifest has it.
    ``without``: those that ranks have found damaged.
    ``skipped``: told of each newer one that does not serve, and what was chosen.

    Raises:
        CheckpointError: There is none, and it is not optional.
    """
    files = [file for root in ROOTS for file in Path(root).glob(f"**/checkpoints/*/{MANIFEST}")]
    files += run_dir.parent.glob(f"*/checkpoints/*/{MANIFEST}")
    found = {file.parent.absolute() for file in files} - set(without)
    others: set[str] = set()
    whole = _newest_whole(found, experiment_name, skipped, others)
    if whole is not None:
        return whole
    none = (
        f"no {'usable ' if found else ''}checkpoint of experiment_name={experiment_name} lies "
        f"below outputs/, multirun/ or {run_dir.parent}"
    )
    meant = did_you_mean(f"experiment_name={name}" for name in nearest(experiment_name, others))
    if not optional:
        raise CheckpointError(f"{none}.", fix=f"Train first, or name one: checkpoint=PATH.{meant}")
    skipped(f"{none}: there is none to go on from.{meant}")
    return None


def newest_in(
    run_dir: Path, *, without: Collection[Path] = (), skipped: Callable[[str], None] = say
) -> Path | None:
    """The newest whole checkpoint of one run, which a job goes on with when it is requeued.

    ``without``: those that ranks have found damaged.
    """
    found = {path.absolute() for path in (run_dir / "checkpoints").glob("step-*")}
    return _newest_whole(found - set(without), None, skipped)


@dataclass(frozen=True, slots=True, order=True)
class _Known:
    """A checkpoint with a manifest that can be read, ordered by age."""

    begun: float  # of its run, in seconds since the epoch; 0 where nobody knows
    step: int
    path: Path
    said: float  # by its run, as ``begun`` or a time that is still to come

    @classmethod
    def of(cls, path: Path, metadata: Mapping[str, Any]) -> _Known:
        said = metadata.get("begun") or 0.0
        return cls(believed(said), metadata.get("step") or 0, path, said)


def believed(begun: float) -> float:
    """When a run began; 0, before all others, where that is still to come: a clock was ahead."""
    return begun if begun <= time.time() + _SKEW_S else 0.0


def ahead(begun: float) -> str:
    """What is said of a run for which ``believed`` gives 0."""
    return f"the clock was ahead, and counts as the oldest: it says that it began {date(begun)}"


def _newest_whole(
    paths: Iterable[Path],
    experiment_name: str | None,
    say_it: Callable[[str], None],
    others: set[str] | None = None,
) -> Path | None:
    """The newest of the experiment that is whole, or of all; tells why others are not.

    ``others``: takes the names of other experiments that have checkpoints.
    """
    known: list[_Known] = []
    for path in sorted(paths):
        # A run that was killed while it saved may leave one, with its manifest.
        if path.suffix == UNFINISHED:
            continue
        if path.suffix == OLD and committed(path.with_suffix("")) != path:
            continue  # its successor is there
        try:
            metadata = read_manifest(path)["metadata"]
        except CheckpointError as error:
            say_it(f"skips {path}: {error}")
            continue
        if experiment_name in (None, metadata.get("experiment_name")):
            known.append(_Known.of(path, metadata))
        elif others is not None:
            others.add(str(metadata.get("experiment_name")))
    known.sort(reverse=True)
    for found in known:
        problem = _unusable(found.path)
        if problem is None:
            _tell_choice(found, known, say_it)
            return found.path
        say_it(f"skips {found.path}: {problem}")
    return None


def _tell_choice(chosen: _Known, known: Sequence[_Known], say_it: Callable[[str], None]) -> None:
    if len(known) == 1:
        return
    runs = len({found.said for found in known})
    steps = [found.step for found in known]
    since = "" if not chosen.begun else f" of the run that began {date(chosen.begun)}"
    early = {f.said: f.path.parents[1] for f in known if f.said != f.begun}
    for said, folder in sorted(early.items()):
        say_it(f"of {folder} {ahead(said)}")
    named = _STEP.fullmatch(chosen.path.name)
    other = named is not None and int(named[1]) != chosen.step
    say_it(
        f"chosen among {len(known)} checkpoints (of {runs} run{'s' if runs > 1 else ''}, steps "
        f"{min(steps)} to {max(steps)}): step {chosen.step}{since}"
        + (f"; its folder is named {chosen.path.name}" if other else "")
    )


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _unusable(path: Path) -> str | None:
    """Why nothing goes on from a checkpoint by itself: damaged, or not finite."""
    problem = _damage(path)
    if problem is not None:
        return problem
    found = read_manifest(path)["metadata"].get(NOT_FINITE)
    return None if found is None else f"it is not finite: {found}"


def _damage(path: Path) -> str | None:
    known = _remembered(path)
    if known is not None:
        return known
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    problem = find_misfit(path, manifest)
    if problem is None and total_bytes(manifest) <= _HASHED_BYTES:
        problem = _hash_problem(path, json.dumps(_stamps(path)))
    return problem


@functools.lru_cache(maxsize=64)  # it is looked for when a request is composed, and when it runs
def _hash_problem(path: Path, _stamps: str) -> str | None:
    return find_damage(path, read_manifest(path))


# What ranks have found damaged, who compare the hashes of files that are too large to be hashed
# here each time. A file that somebody has restored since is looked at anew.

_DAMAGED = "damaged.json"
_MOST_DAMAGED_BYTES = 1 << 22


def remember_damage(path: Path, said: str) -> bool:
    """Has every later ``auto`` skip a checkpoint; False where that cannot be written down."""
    file = _damage_file(path)
    found = _read_damage(file)
    found[path.name] = {"said": said, "files": _stamps(path)}
    try:
        write_atomically(file, json.dumps(found, indent=1))
    except OSError:
        return False
    return _remembered(path) is not None


def is_remembered(path: Path) -> bool:
    return _remembered(path) is not None


def _remembered(path: Path) -> str | None:
    known = _read_damage(_damage_file(path)).get(path.name)
    if not isinstance(known, dict) or known.get("files") != _stamps(path):
        return None
    return str(known.get("said"))


def _read_damage(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = read_json(file, most_bytes=_MOST_DAMAGED_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _damage_file(path: Path) -> Path:
    folder = path.absolute().parent
    return (folder.parent if folder.name == "checkpoints" else folder) / _DAMAGED


def _stamps(path: Path) -> dict[str, list[int]]:
    """Size and time of each file, by name."""
    with contextlib.suppress(OSError):
        found = {file.name: file.stat() for file in path.iterdir()}
        return {name: [s.st_size, s.st_mtime_ns] for name, s in sorted(found.items())}
    return {}


LOCK = ".lock"


@contextlib.contextmanager
def hold(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keeps other runs out of a run's folder while the block runs.

    The folder itself is locked, so nothing is left in it; where a file system locks no folders,
    as NFS does not, a file in it is, and stays.

    Raises:
        PlanError: Another run has it, and still has it after ``wait_s``.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + wait_s
        while not (locked := _locked(handle)):
            if locked is None:
                beside = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.close(handle)
                handle = beside
                if _locked(handle) is not False:  # or there are no locks at all
                    break
            if time.monotonic() > until:
                raise PlanError(
                    f"Another run is writing into {folder} at this moment, and two would spoil "
                    "each other's files.",
                    fix="Wait for its end, or try another hydra.run.dir.",
                )
            time.sleep(0.2)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool | None:
    """Whether it is ours alone; None where the file system locks nothing of that kind."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
