"""``python -m launcher init my_project``: a small project that trains with its first command.

A module, a data module, an experiment, a test and a README, none of which is known to this program:
what is trained is found by the paths in the experiment's file, as with anybody's own code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.config.key import require_name, shorten
from launcher.terminal import say
from strategies.errors import PlanError

_TEMPLATES = Path(__file__).with_name("project")
_SUFFIX, _NAME = ".in", "my_project"
_PLAIN = re.compile(r"[A-Za-z0-9][\w.-]*")


def run(words: Sequence[str]) -> int:
    """Writes the project.

    Raises:
        PlanError: The folder is not empty, or cannot be written.
    """
    folder = _asked(words)
    try:
        _check_empty(folder)
        written = [_write(template, folder) for template in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}"))]
    except OSError as error:
        raise PlanError(
            f"init {shorten(str(folder))}: {error.strerror}: {error.filename}. "
            "Try a folder that you can write."
        ) from error
    say(f"{folder}: {' '.join(sorted(written))}")
    say(f"train it:  cd {shlex.quote(str(folder))}")
    say("           python -m launcher --config-dir conf experiment=first")
    return 0


def _asked(words: Sequence[str]) -> Path:
    stray = next((word for word in words if word.startswith("-") or "=" in word), None)
    if len(words) != 1 or stray is not None or not words[0].strip():
        given = f"init {shorten(' '.join(words))}" if words else "init"
        raise PlanError(f"{given}: expected one folder. Try python -m launcher init my_project.")
    require_name("init ", words[0])
    folder = Path(words[0]).expanduser()
    if not _PLAIN.fullmatch(folder.absolute().name):
        raise PlanError(
            f"init {shorten(words[0])}: a project's name has letters, digits and _ . - only. "
            "Try python -m launcher init my_project."
        )
    return folder


def _check_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"init {folder}: there is a file of that name. Try another name.")
    there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if there:
        shown = ", ".join(there[:3]) + (" ..." if len(there) > 3 else "")
        raise PlanError(
            f"init {folder}: the folder is not empty ({shown}), and nothing in it is overwritten. "
            f"Try python -m launcher init {shlex.quote(str(folder))}_2."
        )


def _write(template: Path, folder: Path) -> str:
    name = template.relative_to(_TEMPLATES).with_suffix("").as_posix()
    name = ".gitignore" if name == "gitignore" else name
    text = template.read_text(encoding="utf-8").replace(_NAME, folder.absolute().name)
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as file:
        file.write(text)
    return name
