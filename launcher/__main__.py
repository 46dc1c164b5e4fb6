"""The command line: compose, check, pick the command, print what is wrong in one message.

Imports neither torch nor Lightning nor wandb: commands are loaded by name, after the request has
been checked, so that a wrong one ends in well under a second.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from launcher.checkpoints import hold, require_no_training
from launcher.compose.execute import (
    make_run_folder,
    require_one_line,
    run_one,
    tell_closed,
)
from launcher.compose.help_text import (
    completion_script,
    completions,
    help_text,
    help_words,
    require_completion,
)
from launcher.compose.option_groups import Flags, Groups, find_groups, parse_flags, require_node
from launcher.compose.overrides import (
    chosen_options,
    expand,
    parse_overrides,
    quote,
    quote_explain,
    require_single,
)
from launcher.compose.search import Search, asks_for_trials, check_search, find_space
from launcher.compose.session import (
    CONFIG_NAME,
    compose_whole,
    hydra_session,
    search_path,
    show_info,
)
from launcher.compose.user_files import check_user_files
from launcher.config import LaunchConfig, Mode
from launcher.config.check_code import own_code
from launcher.config.decode import brings_own
from launcher.config.key import shorten
from launcher.config.pipeline import AUTO
from launcher.processes import torchrun
from launcher.processes.failure import explained
from launcher.processes.watchdog import fork_under_guard
from launcher.report.result import REPORT
from launcher.secrets import MaskedStream
from launcher.terminal import say, say_error, use_lasting_streams, write_anything
from strategies.errors import PipelineError, PlanError

COMMANDS: dict[Mode, str] = {
    "train": "launcher.commands.train",
    "simulate": "launcher.commands.layouts:simulate",
    "plan": "launcher.commands.layouts",
    "validate": "launcher.commands.validate",
    "profile": "launcher.commands.profile",
    "eval": "launcher.commands.evaluate",
    "predict": "launcher.commands.evaluate",
    "generate": "launcher.commands.evaluate:generate",
    "export": "launcher.commands.evaluate:export",
    "check": "launcher.commands.verdict",
    "explain": "launcher.commands.explanation",
}
# Words that stand first, in place of a run.
_TOOLS = {
    "demo": "launcher.tools.demo",
    "doctor": "launcher.tools.doctor",
    "init": "launcher.tools.project",
}
# Modes without a run folder.
_FOLDERLESS = {"collect": "launcher.commands.collect", "dashboard": "launcher.commands.dashboard"}
# What is trained where nothing is asked for: a pipeline, on any machine, as `make run` does.
_DEFAULT_RUN = ("pp=2",)
# What ends this process as Ctrl-C does, wherever ranks are not asked to save first.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Modes whose ranks a cluster can run.
_ON_CLUSTERS = ("train", "eval", "predict")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Returns:
        0 done, 1 a run failed, 2 the request is wrong, 85 preempted, 130 interrupted.
    """
    # Run folders hold configurations and checkpoints: readable for their owner only, unless
    # output.group_readable says more.
    umask = os.umask(0o077)
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        write_anything()
        use_lasting_streams()
    streams = sys.stdout, sys.stderr
    # What code of the user's own prints here (an order, say), or under torchrun, is as in a log.
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    try:
        if words and words[0] in _TOOLS:
            if words[0] == "init":  # its files are the user's, as open as all others
                os.umask(umask)
            return _tool(words[0], words[1:])
        if words and words[0] == "check":
            words = _check_words(words[1:])
        elif words and words[0] == "explain":
            words = _explain_words(words[1:])
        if not torchrun.joins(words):
            if arguments is None:
                _hear_endings()
            return _main(_parse(words))
        if arguments is None:  # a process of our own, in which nothing runs yet
            fork_under_guard(torchrun.rank(), torchrun.guarded_store())
        torchrun.leave(_lead(words) if torchrun.rank() == 0 else torchrun.follow())
    except PipelineError as error:
        say_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        if arguments is None:
            _hear_no_more()
        sys.stderr.write("interrupted\n")
        if arguments is None:
            _end(130)
        return 130
    except Exception as error:
        known = explained(error)
        if known is None:
            raise  # a defect
        say_error(known)
        return known.exit_code
    finally:
        os.umask(umask)
        sys.stdout, sys.stderr = streams
        if arguments is None:
            _hear_no_more()


def _end(code: int) -> NoReturn:
    """Ends this process with its code.

    CPython would end itself by SIGINT where Ctrl-C has come while it compiled a text (a dataclass
    is being made), whoever has caught that meanwhile.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _hear_no_more() -> None:
    """What this process ends with is decided; the interpreter, too, takes time to end."""
    for number in (signal.SIGINT, *_ENDINGS):
        if signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)


def _hear_endings() -> None:
    """Ctrl-C for whoever cannot type: a sweep's table is written, and child processes end."""
    for number in _ENDINGS:
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)


def _check_words(words: Sequence[str]) -> Sequence[str]:
    """``check theirs.csv`` as what it is short for."""
    if {"-h", "--help"} & {*words}:
        return ("--help", "check")
    if words and words[0].startswith("--pipeline-model-parallel"):
        # Megatron-LM's own command line, as far as it goes; our keys have no dashes in front.
        ours = [word for word in words if "=" in word and not word.startswith("-")]
        flags = [word for word in words if word not in ours]
        return ["mode=check", quote("check.flags", shlex.join(flags)), *ours]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise PlanError(
            "check needs the schedule's file behind it. Try python -m launcher check theirs.csv."
        )
    return ["mode=check", quote("schedule.file", words[0]), *words[1:]]


def _explain_words(words: Sequence[str]) -> Sequence[str]:
    """``explain rank0.json rank1.json`` as what it is short for."""
    if {"-h", "--help"} & {*words}:
        return ("--help", "explain")
    files = [word for word in words if "=" not in word and not word.startswith("-")]
    if not files:
        raise PlanError(
            "explain needs the traces behind it, one of each rank. "
            "Try python -m launcher explain rank0.json.gz rank1.json.gz."
        )
    listed = ",".join(quote("", file).removeprefix("=") for file in files)
    return ["mode=explain", f"trace=[{listed}]", *(word for word in words if word not in files)]


def _tool(name: str, words: Sequence[str]) -> int:
    """``demo``, ``doctor`` or ``init``, with what stands behind it."""
    tool = importlib.import_module(_TOOLS[name])
    if {"-h", "--help"} & {*words}:
        sys.stdout.write((tool.__doc__ or "").replace("``", "").strip() + "\n")
        return 0
    if name == "demo" and not any(word.startswith("-") for word in words):
        _compose_only(tool.trained_words(words))
    code = tool.run(words, main) if name == "demo" else tool.run(words)
    assert isinstance(code, int)
    return code


def _compose_only(words: Sequence[str]) -> None:
    """Refuses what the demo would run, before anything of it is shown."""
    groups = find_groups(None)
    with hydra_session():
        for job in _jobs(_parse(words), groups):
            compose_whole(job)


def _parse(words: Sequence[str]) -> Flags:
    flags = parse_flags(words or _DEFAULT_RUN)
    return replace(flags, overrides=quote_explain(flags.overrides))


def run_command(
    config: LaunchConfig, run_dir: Path, *, verbose: bool = False, in_sweep: bool = False
) -> int:
    """Loads the command of ``config.mode`` and runs it in an existing, absolute folder.

    ``verbose``: whether every figure of a training run is printed at its end.
    ``in_sweep``: whether it is one of several jobs.
    """
    name = COMMANDS[config.mode]
    if config.mode != "train":
        require_no_training(run_dir, config.mode)
    if config.mode in _ON_CLUSTERS:
        torchrun.refuse_stray(config)
        if config.cluster.name == "torchrun":
            nodes = torchrun.num_nodes()
            config = replace(config, cluster=replace(config.cluster, nodes=nodes))
        elif config.cluster.name == "slurm":
            name = "launcher.commands.submit" + (":prepare" if in_sweep else "")
    if config.hardware.name == AUTO:
        found = importlib.import_module("launcher.commands.calibration")
        config = found.with_figures(config, run_dir)
    module, _, function = name.partition(":")
    code = getattr(importlib.import_module(module), function or "run")(config, run_dir)
    assert isinstance(code, int)
    if verbose and code == 0 and config.mode == "train" and (run_dir / REPORT).is_file():
        say((run_dir / REPORT).read_text(encoding="utf-8"))
    return code


def _lead(words: Sequence[str]) -> int:
    """Rank 0 under torchrun: as ever, except that the other ranks wait for what it says."""
    code = PipelineError.exit_code
    try:
        flags = _parse(words)
        if flags.multirun:
            raise PlanError(
                "-m needs fresh processes for every job, and torchrun has started one set. "
                "Try -m with cluster=local or cluster=slurm."
            )
        code = _main(flags)
    finally:
        if code:
            torchrun.dismiss(code)
    return code


def _main(flags: Flags) -> int:
    if flags.version:
        sys.stdout.write(f"foldpipe {_version()}\n")
        return 0
    try:
        os.getcwd()
    except FileNotFoundError:
        raise PlanError(
            "the working directory is gone: somebody has deleted it. Try cd to another folder."
        ) from None
    if flags.shell_completion:
        require_completion(flags.overrides)
        if flags.overrides[0].startswith("query="):
            line = os.environ.get("COMP_LINE", "")
            typed = line[: int(os.environ.get("COMP_POINT", len(line)))]
            sys.stdout.write("".join(f"{word}\n" for word in completions(typed)))
            return 0
        if flags.overrides == ("install=bash",):
            sys.stdout.write(completion_script())
            return 0
    topics: tuple[str, ...] = ()
    if flags.help:
        topics, overrides = help_words(flags.overrides)
        flags = replace(flags, overrides=overrides)
    groups = find_groups(flags.config_dir)
    extra = search_path(flags.config_dir)
    with hydra_session() as hydra:
        if flags.shell_completion:
            hydra.shell_completion(config_name=CONFIG_NAME, overrides=list(flags.overrides))
            return 0
        jobs = _jobs(flags, groups)
        checked = [compose_whole([*extra, *job]) for job in jobs]
        config, composed = checked[0]
        node = composed.hydra
        words = [*extra, *flags.overrides]
        if flags.help:
            sys.stdout.write(help_text(topics, config, groups))
            return 0
        if flags.info is not None:
            show_info(hydra, flags.info, words, multirun=flags.multirun)
            return 0
        if flags.cfg is not None:
            if flags.package is not None:
                require_node(config, flags.package)
            hydra.show_cfg(CONFIG_NAME, words, flags.cfg, flags.package, flags.resolve)
            return 0
        _check_sweep(config, flags)
        if flags.multirun:
            pool = importlib.import_module("launcher.compose.job_pool")
            pool.check_parallel([config for config, _ in checked])
            if any(word.startswith("hydra.sweep.subdir=") for word in words):
                importlib.import_module("launcher.compose.multirun").check_subdirs(
                    [whole for _, whole in checked], searched=asks_for_trials(flags.overrides)
                )
            ranks = importlib.import_module("launcher.commands.ranks")
            ranks.check_named_files([config for config, _ in checked])
        command = partial(run_command, verbose=flags.verbose)
        if config.mode in _FOLDERLESS:
            found = importlib.import_module(_FOLDERLESS[config.mode]).run(config)
            assert isinstance(found, int)
            return found
        _check_code([each for each, _ in checked])
        kind = "sweep" if flags.multirun else "run"
        named = any(word.startswith(f"hydra.{kind}.dir=") for word in words)
        place = str(node[kind].dir)
        if flags.multirun and config.sweep.resume is not None:
            multirun = importlib.import_module("launcher.compose.multirun")
            found = multirun.resumed_folder(config, place if named else None)
            place, named = str(found), True
        os.umask(config.output.umask)
        folder = make_run_folder(place, unique=not named, kind=kind)
        if config.output.group_readable:
            tell_closed(folder.path)
        with hold(folder.path):
            if not flags.multirun:
                return run_one(hydra, composed, words, folder, command)
            multirun = importlib.import_module("launcher.compose.multirun")
            past = multirun.earlier_jobs(folder.path) if config.sweep.resume else ()
            if asks_for_trials(flags.overrides):
                parsed = parse_overrides(flags.overrides, groups)
                source = Search(find_space(parsed), config, past)
            else:
                source = multirun.Combinations(jobs, past)
            code = multirun.run_multirun(
                hydra, words, folder, partial(command, in_sweep=True),
                source=source, config=config, verbose=flags.verbose, past=past,
            )  # fmt: skip
            assert isinstance(code, int)
            return code


def _check_code(configs: list[LaunchConfig]) -> None:
    """Code that a request names is there, and takes its arguments; nothing has been made yet."""
    groups = ((group, getattr(each, group).name) for each in configs for group in ("model", "data"))
    if any(map(own_code, configs)) or any(brings_own(*chosen) for chosen in groups):
        importlib.import_module("launcher.commands.code_check").check_own_code(configs)


def _check_folders(flags: Flags) -> None:
    """A folder of a sweep for one run, or of one run for a sweep, would be made nowhere."""
    one, several = "hydra.run.dir", "hydra.sweep.dir"
    for word in flags.overrides:
        name, _, value = word.partition("=")
        if name == "hydra.sweep.subdir":
            require_one_line(name, value)
        if name == one and flags.multirun:
            raise PlanError(
                f"{one}={shorten(value)} is the folder of one run, and a sweep has one for all of "
                f"its jobs. Try {several}={shorten(value)}."
            )
        if name.startswith("hydra.sweep.") and not flags.multirun:
            raise PlanError(
                f"{name}={shorten(value)} is about the folder of a sweep, and this is one run. "
                f"Try {one}={shorten(value)}, or -m."
            )


def _check_sweep(config: LaunchConfig, flags: Flags) -> None:
    sweep, multirun = config.sweep, flags.multirun
    _check_folders(flags)
    if flags.verbose and not multirun and config.mode != "train":
        raise PlanError(
            f"--verbose prints every figure of a training run, and mode={config.mode} prints all "
            "that it has. Try it without."
        )
    if sweep.trials is not None and not (multirun and asks_for_trials(flags.overrides)):
        raise PlanError(
            f"sweep.trials={sweep.trials} belongs on the command line of a sweep. "
            f"Try -m sweep.trials={sweep.trials} optimizer.lr='interval(1e-4,1e-2)'."
        )
    if sweep.trials is not None:
        check_search(config)
    if config.mode == "collect" and multirun:
        raise PlanError("mode=collect compares one sweep. Try it without -m.")
    if config.mode == "dashboard" and multirun:
        raise PlanError("mode=dashboard saves one view. Try it without -m.")
    if sweep.dir is not None and config.mode != "collect":
        raise PlanError(
            f"sweep.dir={sweep.dir} is read by mode=collect, not by mode={config.mode}. "
            "Try mode=collect, or hydra.sweep.dir=FOLDER for where a sweep is written."
        )
    if multirun:
        _check_pruning(config)
    elif sweep.prune_at or sweep.resume is not None:
        key = f"sweep.resume={sweep.resume}" if sweep.resume else "sweep.prune_at"
        raise PlanError(f"{key} is about the jobs of a sweep. Try it with -m.")
    if not multirun and sweep.parallel > 1:
        raise PlanError(
            f"sweep.parallel={sweep.parallel} is about the jobs of a sweep. Try it with -m."
        )
    if not multirun and (sweep.fail_fast or (sweep.metric != "auto" and config.mode != "collect")):
        key = "sweep.fail_fast=true" if sweep.fail_fast else f"sweep.metric={sweep.metric}"
        raise PlanError(f"{key} is about the jobs of a sweep. Try it with -m.")
    if multirun or config.mode == "collect":
        importlib.import_module("launcher.report.sweep.sweep_figures").check_metric(sweep.metric)


def _check_pruning(config: LaunchConfig) -> None:
    at, most = config.sweep.prune_at, config.trainer.max_steps
    if not at:
        return
    if config.mode != "train" or config.cluster.name != "local":
        raise PlanError(
            "sweep.prune_at ends jobs that train on this machine, not "
            f"mode={config.mode} cluster={config.cluster.name}. Try without it."
        )
    if most > 0 and max(at) >= most:
        raise PlanError(
            f"sweep.prune_at={list(at)}, but trainer.max_steps={most}: there is nothing to save "
            f"at the end. Try sweep.prune_at=[{max(1, most // 3)}]."
        )


def _jobs(flags: Flags, groups: Groups) -> list[list[str]]:
    """The overrides of every job that the command line asks for, checked word by word."""
    overrides = parse_overrides(flags.overrides, groups)
    if flags.multirun and asks_for_trials(flags.overrides):
        jobs = find_space(overrides).corners()
    elif flags.multirun:
        jobs = expand(overrides)
    else:
        require_single(overrides)
        jobs = [list(flags.overrides)]
    check_user_files(chosen_options(overrides, groups), groups)
    return jobs


def _version() -> str:
    try:
        return version("foldpipe-launcher")
    except PackageNotFoundError:
        return "(not installed, run from a checkout)"


if __name__ == "__main__":
    sys.exit(main())
