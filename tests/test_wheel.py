"""A wheel works without the checkout: configuration, types and the command travel inside it."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("foldpipe_launcher-*-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_every_configuration_file_is_inside_the_launcher_package(wheel):
    in_checkout = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("conf/**/*.yaml")}
    names = set(wheel.namelist())
    assert "conf/config.yaml" in in_checkout
    assert {f"launcher/{name}" for name in in_checkout} <= names


def test_both_packages_are_complete_and_say_that_they_are_typed(wheel):
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("launcher", "strategies")
        for path in ROOT.glob(f"{package}/**/*.py")
    }
    assert sources | {"launcher/py.typed", "strategies/py.typed"} <= set(wheel.namelist())


def test_what_is_no_python_comes_along(wheel):
    names = set(wheel.namelist())
    for pattern in ("launcher/tools/project/**/*.in", "launcher/compose/*.bash"):
        files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert files
        assert files <= names


def test_nothing_else_is_installed(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"launcher", "strategies"}


def test_the_console_script_is_the_launcher(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(name).decode())
    assert dict(scripts["console_scripts"]) == {"foldpipe": "launcher.__main__:main"}
