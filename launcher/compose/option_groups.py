"""Which configuration groups exist and which options each has: the YAML files of ``conf/``.

A user's ``--config-dir`` may add options to these groups; it cannot add groups or replace an
option, because Hydra would take ours and ignore theirs without a word.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from launcher.config.decode import did_you_mean, nearest
from launcher.config.installed import ENTRY_POINTS, installed_names
from launcher.config.key import shorten
from strategies.errors import PlanError

_NOT_GROUPS = ("hydra",)


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
        built_in: Options shipped with the package.
        added: Options of the user's folder, with their files.
        installed: Names that other installed distributions offer through entry points.
    """

    built_in: dict[str, tuple[str, ...]]
    added: dict[str, dict[str, Path]]
    installed: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        return tuple(self.built_in)

    def options(self, group: str) -> tuple[str, ...]:
        """All options of a group, ours first."""
        ours = (*self.built_in[group], *sorted(self.added.get(group, {})))
        return (*ours, *(name for name in self.installed.get(group, ()) if name not in ours))

    def require(self, group: str, option: str) -> None:
        """Raises unless the option exists.

        Raises:
            PlanError: With the nearest options.
        """
        options = self.options(group)
        if option in options:
            return
        near = nearest(option, options)
        hint = did_you_mean(f"{group}={name}" for name in near)
        listed = ", ".join(options)
        extra = " To only name a run: experiment_name=NAME." if group == "experiment" else ""
        raise PlanError(
            f"{group}={shorten(option)} does not exist.{hint} "
            f"Options of {group}: {listed or 'none'}.{extra}"
        )


def find_groups(config_dir: Path | None) -> Groups:
    """Lists our groups, and what the user's folder adds to them.

    Raises:
        PlanError: The folder is missing or not readable, or redefines one of our options.
    """
    built_in = {
        folder.name: tuple(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in sorted(conf_dir().iterdir())
        if folder.is_dir() and folder.name not in _NOT_GROUPS
    }
    installed = {group: installed_names(group) for group in ENTRY_POINTS}
    if config_dir is None:
        return Groups(built_in, {}, installed)
    if not config_dir.is_dir():
        raise PlanError(
            f"--config-dir {config_dir}: no such folder. Try --config-dir with a folder that "
            "holds e.g. model/mine.yaml."
        )
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
                    f"{folder / name}: {group}={stem} is built in and would win. "
                    f"Rename the file, e.g. {group}/my_{stem}.yaml."
                )
            added.setdefault(group, {})[stem] = folder / name
    return Groups(built_in, added, installed)
