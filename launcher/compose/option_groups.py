"""Which configuration groups exist and which options each has: the YAML files of ``conf/``.

A user's ``--config-dir`` may add options to these groups; it cannot add groups or replace an
option, because Hydra would take ours and ignore theirs without a word.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NoReturn

from launcher.config.decode import ENTRY_POINTS, did_you_mean, installed_names, nearest
from launcher.config.foreign_words import meant_key, meant_option
from launcher.config.key import (
    keys_of,
    nodes_of,
    require_name,
    shorten,
    typed,
    value_at,
)
from launcher.config.launch import LaunchConfig
from launcher.terminal import shortened
from strategies.errors import PlanError
from strategies.schedules.synonym import meant_schedule
from strategies.small_file import FileRefusedError, read_text

_NOT_GROUPS = ("hydra",)
_OWN_ONLY = ("callbacks",)  # without an option of ours
# What a file of options is called where it should be called .yaml.
_ENDINGS = (".yaml", ".yml", ".YAML", ".yaml.txt", ".json", ".toml", ".ini", ".cfg", ".txt", "")
# Files of one's own that are given for an option: which option takes them, and under which key.
_TAKES_FILES = {
    ("schedule", ".csv"): ("custom", "file"),
    ("data", ".txt"): ("text", "path"),
    ("data", ".py"): ("class", "path"),
    ("model", ".py"): ("class", "path"),
    ("optimizer", ".py"): ("class", "path"),
}


_MANY = 8  # options: so many are listed by --help alone


@cache
def conf_dir() -> Path:
    """Our own ``conf/``, absolute: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@dataclass(frozen=True, slots=True)
class Groups:
    """Group names to option names.

    Attributes:
        added: Options of the user's folder, with their files.
        installed: Names that other installed distributions offer through entry points.
        folder: The user's own.
    """

    built_in: dict[str, tuple[str, ...]]
    added: dict[str, dict[str, Path]]
    installed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folder: Path | None = None

    def names(self) -> tuple[str, ...]:
        return tuple(self.built_in)

    def options(self, group: str) -> tuple[str, ...]:
        ours = (*self.built_in[group], *sorted(self.added.get(group, {})))
        return (*ours, *(name for name in self.installed.get(group, ()) if name not in ours))

    def file(self, group: str, option: str) -> Path | None:
        """Where an option is written; None for one of an installed distribution."""
        if option in self.built_in[group]:
            return conf_dir() / group / f"{option}.yaml"
        return self.added.get(group, {}).get(option)

    def require(self, group: str, option: str) -> None:
        options = self.options(group)
        if option in options:
            return
        near = nearest(option, options)
        hint = did_you_mean(f"{group}={name}" for name in near)
        if group == "schedule":
            hint = meant_schedule(option, options) or hint
            if option.lower() == "auto":
                hint = " Try plan=auto."
        meant = meant_option(group, option)
        if meant is not None:
            hint = f" Did you mean {group}={meant}?"
        if (group, option.lower()) == ("schedule", "auto"):
            hint = " Try plan=auto, which takes the fastest that fits."
        listed = ""
        if not hint and len(options) < _MANY:
            listed = f" Options of {group}: {', '.join(options) or 'none'}."
        elif not hint:
            listed = f" Try --help {group}, which lists its {len(options)} options."
        extra = {
            "experiment": " To only name a run: experiment_name=NAME.",
            "callbacks": f" Try callbacks.{shorten(option, 20)}.path=lightning.pytorch.callbacks:"
            "EarlyStopping, or a file DIR/callbacks/NAME.yaml with --config-dir DIR.",
        }.get(group, "")
        kind, key = _TAKES_FILES.get((group, Path(option.partition(":")[0]).suffix), ("", ""))
        if kind:
            hint = f" Try {group}={kind} {typed(f'{group}.{key}', option)}."
        stem = Path(option).stem
        if option.endswith((".yaml", ".yml")) and stem in options:
            raise PlanError(
                f"{group}={shorten(option)}: an option goes by its name alone. Try {group}={stem}."
            )
        if self.folder is None and (beside := _beside(group, option)) is not None:
            raise PlanError(
                f"{group}={shorten(option)} is in {beside}, which is read where it is named. "
                f"Try --config-dir {shlex.quote(beside)} {group}={stem}."
            )
        if option.endswith((".yaml", ".yml")):
            hint = f"{hint} {OWN_FILES}"
        misplaced = self._misplaced(group, option)
        if misplaced is not None and self.folder is not None:
            inside = self.folder if self.folder.name == group else self.folder / group
            target = inside / f"{option}.yaml"
            fix = f"Move it to {target}."
            if misplaced.suffix not in (".yaml", ".yml"):
                fix = f"Options are YAML: write it as {target}."
            elif misplaced.parent == self.folder and self.folder.name == group:
                fix = f"Try --config-dir {shlex.quote(str(self.folder.parent))}."
            raise PlanError(
                f"{group}={shorten(option)} does not exist: {misplaced} is not where options of "
                f"{group} are.",
                fix=fix,
            )
        raise PlanError(f"{group}={shorten(option)} does not exist.{hint}{listed}{extra}")

    def _misplaced(self, group: str, option: str) -> Path | None:
        """The user's file of that name in another place, which Hydra does not look into."""
        folder = self.folder
        if folder is None or not re.fullmatch(r"[\w.-]+", option):
            return None
        names = tuple(f"{option}{ending}" for ending in _ENDINGS)
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir())
            places = [folder, folder / group, *inside]
            found = (place / name for place in places[:100] for name in names)
            return next((path for path in found if path.is_file()), None)
        except OSError:
            return None


def _beside(group: str, option: str) -> str | None:
    """A folder of options here that has it, and that nobody has named."""
    for name in ("conf", "cfg", "config", "configs"):
        try:
            if (Path(name) / group / f"{Path(option).stem}.yaml").is_file():
                return name
        except (OSError, ValueError):
            return None
    return None


def _refuse_whole(folder: Path, ours: Collection[str]) -> None:
    """Refuses a ``config.yaml`` with keys of ours: in place of our own it would not be read."""
    for file in (folder / "config.yaml", folder / "config.yml"):
        try:
            lines = read_text(file, most_bytes=64 * 1024).splitlines()
        except (OSError, FileRefusedError):
            continue
        names = [line.partition(":")[0] for line in lines if re.match(r"[A-Za-z_]\w*\s*:", line)]
        if names and all(name.strip() in {*ours, "defaults"} for name in names):
            raise PlanError(f"{file} is no option, and would not be read.", fix=OWN_FILES)


def find_groups(config_dir: Path | None) -> Groups:
    """Lists our groups, and what the user's folder adds to them."""
    built_in = {
        folder.name: tuple(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in sorted(conf_dir().iterdir())
        if folder.is_dir() and folder.name not in _NOT_GROUPS
    }
    built_in |= {group: () for group in _OWN_ONLY}
    installed = {group: installed_names(group) for group in ENTRY_POINTS}
    if config_dir is None:
        return Groups(built_in, {}, installed)
    if "\0" in str(config_dir):
        raise PlanError("--config-dir: the folder's name holds a null byte. Try another folder.")
    if config_dir.is_file() and config_dir.suffix in (".yaml", ".yml"):
        group, stem = config_dir.parent.name, config_dir.stem
        known = f"{shlex.quote(str(config_dir.parent.parent))} {group}={stem}"
        raise PlanError(
            f"--config-dir {config_dir} is a file. "
            + (f"Try --config-dir {known}." if group in built_in else OWN_FILES)
        )
    if not config_dir.is_dir():
        raise PlanError(
            f"--config-dir {config_dir}: no such folder. Try --config-dir with a folder that "
            "holds e.g. model/mine.yaml."
        )
    _refuse_whole(config_dir, {entry.path.partition(".")[0] for entry in keys_of(LaunchConfig)})
    added: dict[str, dict[str, Path]] = {}
    for group, ours in built_in.items():
        folder = config_dir / group
        try:
            names = sorted(os.listdir(folder)) if folder.is_dir() else []
        except OSError as error:
            raise PlanError(f"--config-dir: cannot read {folder}: {error.strerror}.") from error
        for name in names:
            stem, extension = os.path.splitext(name)
            if extension != ".yaml":
                continue
            if stem in ours:
                raise PlanError(
                    f"{folder / name}: {group}={stem} is built in and would win.",
                    fix=f"Rename the file, e.g. {group}/my_{stem}.yaml.",
                )
            added.setdefault(group, {})[stem] = folder / name
    return Groups(built_in, added, installed, config_dir)


# The command line's flags; everything else on it is an override.
#
# A subset of Hydra's flags under Hydra's names. Left out on purpose: ``--experimental-rerun`` loads
# a pickle, and ``--config-path`` and ``--config-name`` replace the typed configuration.

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(frozen=True, slots=True)
class Flags:
    """A parsed command line; the fields are the flags' names."""

    help: bool
    version: bool
    multirun: bool
    info: str | None
    cfg: Literal["job", "hydra", "all"] | None
    resolve: bool
    package: str | None
    config_dir: Path | None
    shell_completion: bool
    verbose: bool
    overrides: tuple[str, ...]


# Where a file of options goes that somebody hands over as a whole.
OWN_FILES = (
    "A file of options is DIR/experiment/NAME.yaml: try --config-dir DIR experiment=NAME, or "
    "DIR/model/NAME.yaml and model=NAME for one group."
)


def _own_key(flag: str) -> str:
    """`` Try KEY=...`` for a flag that is called as one of our keys, or as the end of one."""
    plain = flag.replace("-", "_")
    keys = [entry.path for entry in keys_of(LaunchConfig)]
    found = [path for path in keys if plain in (path, path.rpartition(".")[2])]
    return f" Keys have no dashes. Try {found[0]}=VALUE." if len(found) == 1 else ""


def _own_folder(name: str) -> Path:
    if not name.strip():
        raise PlanError("--config-dir is empty. Try --config-dir DIR, or without it.")
    require_name("--config-dir ", name)
    return Path(name).expanduser()


# What is meant where a flag stands alone, or with something that it does not take.
_WITH = {
    "-c/--cfg": "--cfg job",
    "-cd/--config-dir": "--config-dir DIR",
    "-m/--multirun": "-m, with lists of values as in pp=1,2",
    "-p/--package": "--cfg job -p trainer",
}
_HYDRAS = ("-cn", "-cp", "--config-name", "--config-path")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        found = next((way for flag, way in _WITH.items() if f"argument {flag}:" in message), None)
        raise PlanError(f"{shortened(message, 400)}. Try {found or '--help'}.")


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Splits the command line."""
    parser = _Parser(prog="foldpipe", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=_INFO)
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir", type=_own_folder)
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("overrides", nargs="*")
    # "--info pp=4" asks for everything, under pp=4.
    folders = [w for w in arguments if w.partition("=")[0] in ("-cd", "--config-dir")]
    if len(folders) > 1:
        raise PlanError("--config-dir is given twice, and one folder is read.", fix="Keep one.")
    split = [
        "--info=all" if word in ("-i", "--info") and (*arguments, "")[i + 1] not in _INFO else word
        for i, word in enumerate(arguments)
    ]
    for word in arguments:
        if word.partition("=")[0] in _HYDRAS:
            raise PlanError(
                f"{word.partition('=')[0]} is not a flag: one configuration is composed, our own. "
                "Did you mean --config-dir?",
                fix=OWN_FILES,
            )
    known = {entry.path for entry in keys_of(LaunchConfig)}
    for word in arguments:  # -pp would be read as -p with a p behind it
        if word.startswith("-") and word.lstrip("-") in known:
            raise PlanError(
                f"{word} is not a flag. Keys have no dashes. Try {word.lstrip('-')}=VALUE."
            )
    parsed, unknown = parser.parse_known_intermixed_args(split)
    # Python 3.11 leaves overrides that follow a flag among the unknown ones.
    stray = [word for word in unknown if word.startswith("-")]
    for word in arguments:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("-") and "=" in word and name in known:
            # Without its value, which may be a credential.
            raise PlanError(f"{word.partition('=')[0]}: keys have no dashes. Try {name}=VALUE.")
        swept = name.removeprefix("m")
        if word.startswith("-m") and "=" in word and swept in known | {*nodes_of(LaunchConfig)}:
            raise PlanError(f"-m{swept}: a blank stands behind -m. Try -m {swept}=VALUE,VALUE.")
    if stray:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        name = stray[0].lstrip("-").partition("=")[0]
        short = {"v": ("--verbose", "--version"), "V": ("--version",)}.get(name)
        near = did_you_mean(short or (nearest(stray[0].split("=")[0], flags) if name[2:] else ()))
        value = stray[0].partition("=")[2] or (*arguments, "")[arguments.index(stray[0]) + 1]
        hint = meant_key(name, value) or _own_key(name) or near or " Try --help."
        if name == "config":
            hint = f" {OWN_FILES}"
        # Without its value, which may be a credential.
        raise PlanError(f"{shorten(stray[0].partition('=')[0])} is not a flag.{hint}")
    if (parsed.resolve or parsed.package is not None) and parsed.cfg is None:
        raise PlanError("--resolve and --package say how to print --cfg. Try --cfg job --resolve.")
    if parsed.multirun and parsed.cfg is not None:
        raise PlanError(
            "--cfg prints one configuration, --multirun runs several.", fix="Choose one."
        )
    return Flags(**vars(parsed) | {"overrides": (*parsed.overrides, *unknown)})


def require_node(config: LaunchConfig, name: str) -> None:
    """Refuses ``--package`` of what is no part of the configuration."""
    try:
        value_at(config, name)
    except AttributeError:
        if name.partition(".")[0] == "hydra":
            return
        hint = did_you_mean(nearest(name, nodes_of(LaunchConfig))) or " Try --package trainer."
        raise PlanError(f"--package {shorten(name)}: there is no such node.{hint}") from None
