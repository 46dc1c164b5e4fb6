"""The Dockerfile names what is there; it is built by hand, as that needs Docker and a network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from launcher.config import LaunchConfig

ROOT = Path(__file__).resolve().parents[1]
TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="ascii"))


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_wheel_needs_nothing_else() -> None:
    """What hatch reads for it: the metadata's files, the packages and conf/."""
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'^(?:readme = |license-files = \[)"(\w[\w.]*)"', project, re.MULTILINE)
    assert {"README.md", "LICENSE"} <= set(named) <= {path.name for path in ROOT.iterdir()}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_document_builds_each_target(target: str) -> None:
    assert re.search(rf"^FROM \S+ AS {target}$", TEXT, re.MULTILINE)
    page = (ROOT / "docs" / "guides" / "containers.md").read_text()
    assert f"docker build --target {target} --tag foldpipe:{target} ." in page


def test_commands_are_bash_and_torch_has_the_locked_version() -> None:
    commands = re.findall(r"^RUN (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    assert len([line for line in lock if line.startswith("torch==")]) == 1


def test_a_container_runs_as_nobody_in_particular() -> None:
    stages = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[-2:]
    assert all(stage.rstrip().endswith("USER 1000") for stage in stages)
    assert LaunchConfig().cluster.container.python == "python"  # which these images have
