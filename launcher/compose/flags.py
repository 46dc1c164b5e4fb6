"""The command line's flags; everything else on it is an override.

A subset of Hydra's flags under Hydra's names. Left out on purpose: ``--experimental-rerun`` loads
a pickle, and ``--config-path`` and ``--config-name`` replace the typed configuration.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from launcher.compose.option_groups import Groups
from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import Key, describe, keys_of, nodes_of, shorten, spell
from launcher.config.launch import LaunchConfig
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


# -------------------------------------------------------------------------------------------- help
#
# ``--help``: every key with its type, its value under the given overrides, and one sentence.


_WIDTH = 98
_USAGE = """\
foldpipe: pipeline-parallel training from a declaration, simulated and executed alike.

usage: python -m launcher [flags] [key=value ...]        (or: foldpipe ...)

  python -m launcher                                     train a small model on this machine
  python -m launcher schedule=foldx_fifo pp=4            the same over 4 pipeline ranks
  python -m launcher mode=simulate costs=uniform pp=4    draw a schedule's timeline
  python -m launcher -m schedule=gpipe,1f1b pp=2,4       one run per combination
"""
_FOOTER = """\
Each run writes a folder of its own below outputs/ (hydra.run.dir=PATH chooses it), each sweep one
below multirun/ (hydra.sweep.dir=PATH). Own options: --config-dir DIR with DIR/model/mine.yaml.
Exit codes: 0 done, 1 a run failed, 2 the request is wrong and nothing was started, 85 preempted.
"""


def help_text(config: LaunchConfig, groups: Groups) -> str:
    """The text of ``--help``.

    Args:
        config: Whose values are shown as defaults.
        groups: Groups and their options.
    """
    parts = [_USAGE, "Flags", *(_entry(name, text) for name, text in FLAGS_HELP), ""]
    nodes = nodes_of(LaunchConfig)
    keys = keys_of(LaunchConfig)
    parts.append("Keys: name=value, type [value unless you set it], meaning")
    parts += [_key(entry, config) for entry in keys if "." not in entry.path]
    for group in nodes:
        parts.append("")
        if group in groups.built_in:
            doc = (nodes[group].__doc__ or "").replace("``", "").split(":", 1)[-1].strip()
            parts.append(f"{group}=  {doc}")
            parts.append(_paragraph("options: " + ", ".join(groups.options(group))))
        else:
            parts.append(f"{group}.*")
        parts += [_key(entry, config) for entry in keys if entry.path.startswith(f"{group}.")]
    parts.append("")
    parts.append("experiment=  a named set of overrides, [null]")
    parts.append(_paragraph("options: " + (", ".join(groups.options("experiment")) or "none yet")))
    return "\n".join([*parts, "", _FOOTER])


def _key(entry: Key, config: LaunchConfig) -> str:
    value: Any = config
    for name in entry.path.split("."):
        value = getattr(value, name)
    return _entry(
        f"{entry.path}=", f"{describe(entry.hint)} [{spell(value) or 'empty'}]. {entry.help_text}"
    )


def _entry(name: str, text: str) -> str:
    indent = " " * 34
    body = textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    head = f"  {name}"
    if len(head) < len(indent):
        return head + body[len(head) :]
    return f"{head}\n{body}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
