"""The command line: compose, check, pick the command, print what is wrong in one message.

Imports neither torch nor Lightning nor wandb: commands are loaded by name, after the request has
been checked, so that a wrong one ends in well under a second.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launcher.compose.execute import make_run_folder, run_one, run_sweep
from launcher.compose.explain_word import quote_explain
from launcher.compose.flags import Flags, parse_flags
from launcher.compose.groups import Groups, find_groups
from launcher.compose.help import help_text
from launcher.compose.overrides import (
    chosen_options,
    expand,
    parse_overrides,
    require_single,
)
from launcher.compose.session import CONFIG_NAME, compose_checked, hydra_session, search_path
from launcher.compose.user_files import check_user_files
from launcher.config import LaunchConfig, Mode
from strategies.errors import PipelineError

COMMANDS: dict[Mode, str] = {
    "train": "launcher.commands.train",
    "simulate": "launcher.commands.simulate",
    "plan": "launcher.commands.plan",
    "validate": "launcher.commands.validate",
    "profile": "launcher.commands.profile",
    "eval": "launcher.commands.evaluate",
    "predict": "launcher.commands.evaluate",
    "generate": "launcher.commands.generate",
    "export": "launcher.commands.export",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        arguments: Without the program's name; ``sys.argv`` if None.

    Returns:
        0 done, 1 a run failed, 2 the request is wrong, 85 preempted, 130 interrupted.
    """
    # Run folders hold configurations and checkpoints: readable for their owner only.
    umask = os.umask(0o077)
    try:
        flags = parse_flags(sys.argv[1:] if arguments is None else arguments)
        return _main(replace(flags, overrides=quote_explain(flags.overrides)))
    except PipelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # `| head` has closed our output; without this the interpreter complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        os.umask(umask)


def run_command(config: LaunchConfig, run_dir: Path) -> int:
    """Loads the command of ``config.mode`` and runs it.

    Args:
        config: Checked.
        run_dir: Existing folder that the run may write to, absolute.

    Returns:
        The exit code.
    """
    command = importlib.import_module(COMMANDS[config.mode])
    code = command.run(config, run_dir)
    assert isinstance(code, int)
    return code


def _main(flags: Flags) -> int:
    if flags.version:
        sys.stdout.write(f"foldpipe {_version()}\n")
        return 0
    groups = find_groups(flags.config_dir)
    extra = search_path(flags.config_dir)
    with hydra_session() as hydra:
        if flags.shell_completion:
            hydra.shell_completion(config_name=CONFIG_NAME, overrides=list(flags.overrides))
            return 0
        jobs = _jobs(flags, groups, hydra)
        checked = [compose_checked([*extra, *job]) for job in jobs]
        config, node = checked[0]
        words = [*extra, *flags.overrides]
        if flags.help:
            sys.stdout.write(help_text(config, groups))
            return 0
        if flags.cfg is not None:
            hydra.show_cfg(CONFIG_NAME, words, flags.cfg, flags.package, flags.resolve)
            return 0
        if not flags.multirun:
            unique = not any(word.startswith("hydra.run.dir=") for word in words)
            folder = make_run_folder(str(node.run.dir), unique=unique)
            return run_one(hydra, words, folder, run_command)
        unique = not any(word.startswith("hydra.sweep.dir=") for word in words)
        folder = make_run_folder(str(node.sweep.dir), unique=unique)
        return run_sweep(hydra, words, folder, run_command, jobs=jobs)


def _jobs(flags: Flags, groups: Groups, hydra: object) -> list[list[str]]:
    """The overrides of every job that the command line asks for, checked word by word."""
    loader = getattr(hydra, "config_loader", None)
    overrides = parse_overrides(flags.overrides, groups, loader)
    if flags.multirun:
        jobs = expand(overrides)
    else:
        require_single(overrides)
        jobs = [list(flags.overrides)]
    check_user_files(chosen_options(overrides, groups), groups)
    return jobs


def _version() -> str:
    try:
        return version("foldpipe")
    except PackageNotFoundError:
        return "(not installed, run from a checkout)"


if __name__ == "__main__":
    sys.exit(main())
