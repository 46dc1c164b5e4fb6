"""The command line's flags; everything else on it is an override.

A subset of Hydra's flags under Hydra's names. Left out on purpose: ``--experimental-rerun`` loads
a pickle, and ``--config-path`` and ``--config-name`` replace the typed configuration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from launcher.config.key import shorten
from launcher.config.suggest import did_you_mean, nearest
from strategies.errors import PlanError

FLAGS_HELP: tuple[tuple[str, str], ...] = (
    ("-h, --help", "explain every key, with the values that the overrides lead to"),
    ("-m, --multirun", "run one job per combination of values: schedule=gpipe,1f1b pp=1,2"),
    ("-c, --cfg {job,hydra,all}", "print the composed configuration and end"),
    ("--resolve", "with --cfg: with interpolations resolved"),
    ("-p, --package NODE", "with --cfg: only this node"),
    ("-cd, --config-dir DIR", "add your own option files, e.g. DIR/model/mine.yaml"),
    ("-sc, --shell-completion", 'eval "$(foldpipe -sc install=bash)" installs completion'),
    ("--version", "print the version"),
)


@dataclass(frozen=True, slots=True)
class Flags:
    """A parsed command line; the fields are the flags' names."""

    help: bool
    version: bool
    multirun: bool
    cfg: Literal["job", "hydra", "all"] | None
    resolve: bool
    package: str | None
    config_dir: Path | None
    shell_completion: bool
    overrides: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}. Try --help.")


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Splits the command line.

    Raises:
        PlanError: A flag that does not exist, lacks its value or contradicts another.
    """
    parser = _Parser(prog="foldpipe", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir", type=Path)
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("overrides", nargs="*")
    parsed, unknown = parser.parse_known_intermixed_args(list(arguments))
    # Python 3.11 leaves overrides that follow a flag among the unknown ones.
    stray = [word for word in unknown if word.startswith("-")]
    if stray:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hint = did_you_mean(nearest(stray[0].split("=")[0], flags)) or " Try --help."
        raise PlanError(f"{shorten(stray[0])} is not a flag.{hint}")
    if (parsed.resolve or parsed.package is not None) and parsed.cfg is None:
        raise PlanError("--resolve and --package say how to print --cfg. Try --cfg job --resolve.")
    if parsed.multirun and parsed.cfg is not None:
        raise PlanError("--cfg prints one configuration, --multirun runs several. Choose one.")
    return Flags(
        help=parsed.help,
        version=parsed.version,
        multirun=parsed.multirun,
        cfg=parsed.cfg,
        resolve=parsed.resolve,
        package=parsed.package,
        config_dir=parsed.config_dir,
        shell_completion=parsed.shell_completion,
        overrides=(*parsed.overrides, *unknown),
    )
