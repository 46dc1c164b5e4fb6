import sysconfig
from pathlib import Path

import pytest

from launcher.workloads.data.text_files import stdlib_files, text_files
from strategies.errors import DataError


def test_the_library_is_read_in_sorted_order_without_tests_and_installed_packages():
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(folder).as_posix() for file in stdlib_files()]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert names == sorted(names, key=lambda name: name.split("/"))


def test_hidden_and_binary_files_are_left_out_and_links_to_folders_not_followed(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("c.md", "b/deep/z.txt", "b/a.txt", "a.txt", ".hidden", ".git/config"):
        (tmp_path / name).write_text("text")
    (tmp_path / "b/picture.txt").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "absent")
    names = [file.relative_to(tmp_path).as_posix() for file in text_files(tmp_path)]
    assert names == ["a.txt", "b/a.txt", "b/deep/z.txt", "c.md", "link.txt"]


def test_a_python_without_sources_is_told_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="Try data=text"):
        stdlib_files()


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="absent cannot be read: No such file"):
        list(text_files(tmp_path / "absent"))
