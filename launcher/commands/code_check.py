"""Whether code of the user's own is there and takes what it is given: asked before all else.

A process with torch imports it and holds arguments against signatures, for every job of a sweep at
once; until it has said yes, no folder and no rank is made. On this machine that is the process
from which the ranks are forked afterwards, so it costs what they would cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.commands.ranks import fork_server
from launcher.config import LaunchConfig, dump
from launcher.config.check_code import CODE_MODES, own_code
from launcher.config.checkpoint_keys import saved_keys
from launcher.config.decode import CLASS, brings_own
from launcher.config.key import Args, typed, value_at
from launcher.processes.failure import describe, read_failure
from launcher.processes.local import our_python, rank_environment
from launcher.processes.task import rewrite_task
from launcher.resolve import Run, num_replicas
from launcher.terminal import say
from launcher.workloads.own_code import require_place
from strategies.errors import CheckpointError, PlanError, RunError

_LOG = "rank_00000.log"
_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def check_own_code(configs: Iterable[LaunchConfig]) -> None:
    """Imports what the configurations name, in another process.

    Raises:
        PlanError: It is not there, several things could be meant, or its arguments are wrong.
        RunError: The process has ended without a word of its own.
    """
    named = [config for config in configs if _names_code(config)]
    if not named:
        return
    for own in dict.fromkeys(own for config in named for own in own_code(config)):
        require_place(own.key, own.path)
    tasks = {json.dumps(dump(config), sort_keys=True): None for config in named}
    with tempfile.TemporaryDirectory(prefix="foldpipe-code-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        task = {"job": "code", "config": {"mode": "validate"}, "configs": [*map(json.loads, tasks)]}
        rewrite_task(folder, task)
        code = _asked(named[0], folder)
        if not code:
            return
        failure = read_failure(folder, 0)
        if failure is not None and failure.exit_code == PlanError.exit_code:
            raise PlanError(failure.message)
        log = folder / "logs" / _LOG
        if failure is not None:
            raise RunError(describe(failure, log))
        said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        paths = ", ".join(dict.fromkeys(c.path for config in named for c in own_code(config)))
        raise RunError(
            f"importing {paths} ended the process that tried, with code {code} ({said[0]}). "
            "Try python -c 'import ...' of each."
        )


def _names_code(config: LaunchConfig) -> bool:
    if config.mode not in CODE_MODES:
        return False
    packages = (brings_own(group, value_at(config, group).name) for group in ("model", "data"))
    return bool(own_code(config)) or any(packages)


def _asked(config: LaunchConfig, folder: Path) -> int:
    """Runs the process; its exit code."""
    degrees = config.pp * num_replicas(config) * config.tp
    environment = rank_environment(degrees)
    server = fork_server(config, environment)
    # Descriptors of a rank under torchrun, for one, are its own.
    own = {name: value for name, value in environment.items() if not name.startswith("FOLDPIPE_")}
    own |= _RANK
    with (folder / "logs" / _LOG).open("wb") as log:
        if server is None:
            return subprocess.run(
                our_python("launcher.rank.worker", str(folder)),
                env=own | {"FOLDPIPE_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            ).returncode
        server.load(["launcher.rank.jobs", "omegaconf"])
        return server.start(folder, own, log.fileno(), {}).wait()


# A checkpoint says which class its model was. That is code named by a file, which somebody else may
# have written: it is run where the user has allowed it, and nowhere else.


def with_checkpoints_code(run: Run, checkpoint: Path | None) -> Run:
    """The run with the paths that it leaves to its checkpoint.

    Raises:
        PlanError: It leaves one open, and the checkpoint may not say it, or says none.
    """
    config = run.config
    left = [g for g in ("model", "data") if value_at(config, g).name == CLASS
            and value_at(config, g).path is None]  # fmt: skip
    if not left:
        return run
    saved = None if checkpoint is None else saved_keys(checkpoint)
    said = {group: values for group, values in (saved or {}).items() if values["name"] == CLASS}
    for group in left:
        if said.get(group, {}).get("path") is None:
            raise CheckpointError(
                f"{group}=class without {group}.path: "
                f"{checkpoint or 'there is no checkpoint, which'} names no class. "
                f"Try {group}.path=MODULE:NAME."
            )
    if not config.allow_code:
        named = " and ".join(f"{said[group]['path']} as its {group}" for group in left)
        words = " ".join(
            typed(f"{group}.path", said[group]["path"]) + _words(group, said[group]["args"])
            for group in left
        )
        raise PlanError(
            f"{checkpoint} names {named}: code that a file names is not run. "
            f"Try {words}, or allow_code=true if you trust the file."
        )
    for group in left:
        chosen, path = value_at(config, group), said[group]["path"]
        merged = Args({**said[group]["args"], **chosen.args.plain()})
        config = replace(config, **{group: replace(chosen, path=path, args=merged)})
        say(f"{group}.path={path}{_words(group, merged)}, as the checkpoint says (allow_code=true)")
    check_own_code([config])
    return replace(run, config=config)


def _words(group: str, args: Mapping[str, Any]) -> str:
    return "".join(f" {typed(f'{group}.args.{name}', value)}" for name, value in args.items())
