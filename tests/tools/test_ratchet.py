"""`make check` refuses a tree that has grown, and says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import ratchet

BEGUN = "as long as it was"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three folders, a file that is too long and a folder that is too wide, all committed."""
    for name in ("launcher/start.py", "launcher/report/page.py", "strategies/ir/verify.py"):
        put(tmp_path / name, 10)
    put(tmp_path / "strategies/models/replay/gate.py", 500)
    for number in range(16):
        put(tmp_path / f"strategies/orders/order_{number}.py", 1)
    put(tmp_path / "tools/ratchet.txt", 0)
    assert ratchet.main(["--update", "--because", BEGUN], tmp_path) == 0
    return tmp_path


def put(path: Path, num_lines: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * num_lines)


def said(capsys, tree: Path, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = ratchet.main(words, tree)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_subfolders_count_to_the_folder_of_the_second_level(tree, capsys):
    assert said(capsys, tree) == (
        0,
        "folder              lines committed\n"
        "launcher               10        10\n"
        "launcher/report        10        10\n"
        "strategies/ir          10        10\n"
        "strategies/models     500       500\n"
        "strategies/orders      16        16\n"
        "all                   546       546\n",
        "",
    )


def test_a_folder_that_has_grown_is_refused_and_raised_with_a_sentence(tree, capsys):
    put(tree / "launcher/report/page.py", 12)
    code, out, err = said(capsys, tree)
    assert code == 1
    assert "launcher/report        12        10 +2\n" in out
    assert err == (
        "launcher/report: 12 (lines of a folder), 2 more than committed\n"
        "Make it smaller, or say why it grows, in the same commit:\n"
        '    python -m tools.ratchet --update --because "a sentence"\n'
    )
    committed = (tree / "tools/ratchet.txt").read_text()
    assert said(capsys, tree, "--update")[0] == 1
    assert (tree / "tools/ratchet.txt").read_text() == committed
    assert said(capsys, tree, "--update", "--because", "Pages have\na map.")[0] == 0
    assert (
        "launcher/report       12  Pages have a map.\n" in (tree / "tools/ratchet.txt").read_text()
    )
    assert said(capsys, tree)[0] == 0


def test_what_is_smaller_passes_and_is_kept_small_by_update(tree, capsys):
    put(tree / "strategies/models/replay/gate.py", 440)
    code, out, err = said(capsys, tree)
    assert (code, err) == (0, "")
    assert out.endswith("Smaller than committed. To keep it so: python -m tools.ratchet --update\n")
    assert said(capsys, tree, "--update")[0] == 0
    tables = ratchet.read_tables((tree / "tools/ratchet.txt").read_text())
    assert tables[ratchet.LONG] == {}
    assert tables[ratchet.LINES]["strategies/models"] == ratchet.Row(440)
    put(tree / "strategies/models/replay/gate.py", 441)
    assert said(capsys, tree)[0] == 1


def test_a_file_of_more_than_450_lines_is_refused(tree, capsys):
    put(tree / "launcher/report/page.py", 451)
    code, _, err = said(capsys, tree)
    assert code == 1
    assert (
        "launcher/report/page.py: 451 (files of more than 450 lines); "
        "all others have at most 450 lines\n"
    ) in err


def test_a_long_file_that_is_named_may_not_grow_and_needs_its_reason(tree, capsys):
    put(tree / "strategies/models/replay/gate.py", 501)
    assert (
        "strategies/models/replay/gate.py: 501 (files of more than 450 lines), "
        "1 more than committed\n"
    ) in said(capsys, tree)[2]
    put(tree / "strategies/models/replay/gate.py", 500)
    file = tree / "tools/ratchet.txt"
    file.write_text(file.read_text().replace(f"gate.py    500  {BEGUN}", "gate.py    500"))
    code, _, err = said(capsys, tree)
    assert code == 1
    assert "gate.py: 500 (files of more than 450 lines) stands in tools/ratchet.txt without" in err


def test_a_folder_of_more_than_14_files_is_refused(tree, capsys):
    for number in range(14):
        put(tree / f"strategies/ir/part_{number}.py", 0)
    code, _, err = said(capsys, tree)
    assert code == 1
    assert err.startswith(
        "strategies/ir: 15 (folders of more than 14 files); all others have at most 14 files\n"
    )


def test_a_folder_that_nobody_has_committed_is_refused(tree, capsys):
    put(tree / "strategies/planner/cut.py", 3)
    code, _, err = said(capsys, tree)
    assert code == 1
    assert err.startswith(
        "strategies/planner: 3 (lines of a folder); it is new, and a new folder has no number yet\n"
    )


def test_a_line_that_is_no_row_is_named(tree, capsys):
    file = tree / "tools/ratchet.txt"
    file.write_text(file.read_text().replace("strategies/ir         10", "strategies/ir ten"))
    code, _, err = said(capsys, tree)
    assert code == 2
    assert err.startswith(
        f"tools/ratchet.txt, line 8: 'strategies/ir ten  {BEGUN}' is no `name number sentence`"
    )
