"""`make mutants`: a fault that no test tells is found, in a small tree; the list fits this one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import (
    FEWEST,
    LIST,
    ROOT,
    ListError,
    Mutant,
    chosen,
    mutated,
    problems,
    read_list,
)

CODE = """LARGEST = 5


def larger(first, second):
    if first > second:
        return first
    return second
"""
TESTS = """from strategies.sizes import larger


def test_the_larger():
    assert larger(1, 2) == 2


def test_of_one_value():
    assert larger(1, 1) == 1


def test_what_is_imported_late():
    from strategies.late import late

    assert late() == 1
"""
KILLED = """# found by the first test
strategies/sizes.py
- if first > second:
+ if first < second:
tests/test_sizes.py::test_the_larger
"""
SURVIVES = """
strategies/sizes.py
- if first > second:
+ if first >= second:
tests/test_sizes.py
"""

NOT_RUN = """
strategies/sizes.py
- LARGEST = 5
+ LARGEST = 6
tests/test_sizes.py

strategies/sizes.py
- return second
+ return (second
tests/test_sizes.py

strategies/late.py
- return 1
+ return 2
tests/test_sizes.py::test_what_is_imported_late
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "strategies/__init__.py": "",
        "strategies/sizes.py": CODE,
        "strategies/late.py": "def late():\n    return 1\n",
        "tests/test_sizes.py": TESTS,
        "tools/mutants.txt": KILLED,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(tree: Path, capsys, *words: str) -> tuple[int, str]:
    code = mutants.main(words, tree)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_every_line_stands_once_and_every_folder_has_a_mutant():
    listed = read_list(LIST.read_text(encoding="utf-8"))
    assert problems(listed, ROOT) == []
    assert len(listed) >= FEWEST
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in listed}) == len(listed)


def test_what_survives_or_was_not_run_is_printed_and_the_tree_is_as_before(tree, capsys):
    (tree / "tools/mutants.txt").write_text(KILLED + SURVIVES + NOT_RUN)
    code, said = run(tree, capsys, "--jobs", "1")
    assert code == 1
    assert re.sub(r"[0-9.]+ s\n", "0 s\n", said) == (
        "  2 strategies/sizes.py\n"
        "    - if first > second:\n"
        "    + if first >= second:\n"
        "    SURVIVED, 0 s\n"
        "  3 strategies/sizes.py\n"
        "    - LARGEST = 5\n"
        "    + LARGEST = 6\n"
        "    NOT SEEN: no function that its tests have imported has changed, 0 s\n"
        "  4 strategies/sizes.py\n"
        "    - return second\n"
        "    + return (second\n"
        "    NOT RUN: the file cannot be compiled, 0 s\n"
        "2 of 5 mutants killed in 0 s\n"
    )
    assert (tree / "strategies/sizes.py").read_text() == CODE


def test_tests_that_fail_without_any_mutant_kill_none(tree, capsys):
    (tree / "tests/test_sizes.py").write_text(TESTS.replace("larger(1, 2) == 2", "True is False"))
    code, said = run(tree, capsys)
    assert code == 2
    assert said.startswith(
        "Without any mutant, tests fail (killed):\ntests/test_sizes.py::test_the"
    )


def test_a_case_that_is_not_there_kills_none(tree, capsys):
    text = KILLED.replace("test_the_larger", "test_the_larger[gone]")
    (tree / "tools/mutants.txt").write_text(text)
    code, said = run(tree, capsys)
    assert code == 2
    assert said.startswith("The tests could not be collected:\n")
    assert "not found: " in said


def test_a_line_that_is_there_no_longer_or_twice_is_refused(tree, capsys):
    for code, times in ((CODE.replace("first >", "first  >"), 0), (CODE + CODE, 2)):
        (tree / "strategies/sizes.py").write_text(code)
        assert run(tree, capsys) == (
            2,
            f"mutant 1: strategies/sizes.py has this line {times} times, not once:\n"
            "    if first > second:\n"
            "Give tools/mutants.txt a fault of the same kind in the lines that stand there now.\n",
        )


def test_a_folder_without_mutants_and_a_test_without_file_are_refused(tree, capsys):
    (tree / "strategies/ir").mkdir()
    (tree / "strategies/ir/text.py").write_text("def parse():\n    return 1\n")
    (tree / "tools/mutants.txt").write_text(KILLED.replace("test_sizes", "test_gone"))
    assert run(tree, capsys) == (
        2,
        "mutant 1: tests/test_gone.py::test_the_larger: there is no such file\n"
        "strategies/ir/ has no mutant\n",
    )


def test_a_check_runs_nothing_and_names_tests_that_are_gone(tree, capsys):
    assert run(tree, capsys, "--check") == (0, "")
    (tree / "tools/mutants.txt").write_text(KILLED.replace("test_the_larger", "test_gone[a-b]"))
    assert run(tree, capsys, "--check") == (
        2,
        "mutant 1: tests/test_sizes.py::test_gone[a-b]: there is no such test\n",
    )


def test_a_list_that_has_become_short_is_refused(tmp_path, monkeypatch, capsys):
    short = "\n\n".join(LIST.read_text(encoding="utf-8").split("\n\n")[: FEWEST - 2])
    (tmp_path / "mutants.txt").write_text(short)
    monkeypatch.setattr(mutants, "LIST", tmp_path / "mutants.txt")
    assert mutants.main(["--check", "--from", str(tmp_path / "mutants.txt")]) == 2
    assert f"mutants.txt has {FEWEST - 3} mutants, fewer than 200" in capsys.readouterr().err


def test_a_mutant_keeps_the_indentation_and_changes_something():
    mutant = Mutant(1, "strategies/sizes.py", "return first", "return None", ("t",))
    assert mutated(CODE, mutant) == CODE.replace("return first", "return None")
    with pytest.raises(ListError, match="it changes nothing"):
        mutated(CODE, Mutant(1, "strategies/sizes.py", "return first", "return first", ("t",)))
    with pytest.raises(ListError, match=r"mutant 1 \(strategies/sizes.py\): a file, `- line`"):
        read_list("strategies/sizes.py\n- return first\n+ return None\n")


def test_numbers_folders_and_files_choose():
    listed = [
        Mutant(number, file, "a", "b", ("t",))
        for number, file in enumerate(["strategies/ir/text.py", "strategies/ir_more.py"], start=1)
    ]
    assert chosen(listed, "strategies/ir") == listed[:1]
    assert chosen(listed, "2,strategies/ir/text.py") == listed
    with pytest.raises(ListError, match="--only 3: no mutant has this number"):
        chosen(listed, "1,3")


def test_a_few_of_this_tree_are_killed(capsys):
    assert mutants.main(["--only", SHORT, "--jobs", "1"]) == 0
    assert " mutants killed in " in capsys.readouterr().out


# Few, and without torch.
SHORT = "strategies/ir/kinds.py,strategies/passes/recompute/mario.py"
