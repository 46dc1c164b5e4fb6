"""Which lines of a page are commands, which blocks are files, and that a wrong one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import test_commands
from tests.documents.steps import Command, File, steps
from tools.docs import pages

PAGE = """# A page

Say `python -m launcher pp=9` inline: no command of a block.

    python -m launcher pp=2     # a comment
    1f1b  pp=2: what it prints

- a list

    python -m launcher pp=3

```bash
$ time python -m launcher mode=plan \\
    planner.num_gpus=4
OMP_NUM_THREADS=1 chrt -r 10 python -m benchmarks.plan_ranking
```

```text
python -m launcher pp=5
```

```python title="net.py"
x = 1
```
"""


def _steps(text: str, folder: Path) -> list[File | Command]:
    (folder / "page.md").write_text(text)
    return steps(folder / "page.md", folder)


def test_commands_and_files_are_found_in_their_order(tmp_path: Path) -> None:
    found = _steps(PAGE, tmp_path)
    commands = [step for step in found if isinstance(step, Command)]
    assert [command.words for command in commands] == [
        ["python", "-m", "launcher", "pp=2"],
        ["python", "-m", "launcher", "mode=plan", "planner.num_gpus=4"],
        ["python", "-m", "benchmarks.plan_ranking"],
    ]
    assert [command.place for command in commands] == ["page.md:5", "page.md:13", "page.md:15"]
    assert commands[0].launcher == ["pp=2"]
    assert commands[2].launcher is None
    assert found[-1] == File("net.py", "x = 1\n")


def test_the_console_script_is_the_launcher(tmp_path: Path) -> None:
    (command,) = _steps("```sh\nfoldpipe -m pp=1,2\n```\n", tmp_path)
    assert isinstance(command, Command)
    assert command.launcher == ["-m", "pp=1,2"]


@pytest.mark.parametrize(
    "line, told",
    [
        ("python -m launcher schedle=1f1b", "schedle"),
        ("python -m launcher -m schedule=1f1b,zb_x pp=2", "zb_x"),
        ("python -m launcher schedule=chimera pp=3", "chimera"),
        ("make no-such-target", "no-such-target"),
        ("python -m benchmarks.no_such_file", "page.md:3"),
        ("pip install '.[no_such_extra]'", "page.md:3"),
        ("pip install foldpipe", "page.md:3"),
        ("curl example.org", "no test types it"),
    ],
)
def test_a_wrong_command_is_found(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = _steps(f"# Page\n\n    {line}\n", tmp_path)
    assert isinstance(command, Command)
    with pytest.raises(AssertionError, match=told):
        test_commands._accept(command, tmp_path / "reader", monkeypatch)


def test_a_picture_that_is_older_than_what_makes_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With other microbatches in the pictures, every one of them is."""
    from tests.documents.test_pages import stale
    from tools.docs import schedule_pages

    monkeypatch.setattr(pages, "made", lambda **_: [(pages.DOCS / "schedules" / "1f1b.svg", drawn)])
    drawn = schedule_pages.svg([("1f1b", schedule_pages.timeline("1f1b", 4))], title="1f1b")
    assert stale(quick=True) == ["docs/schedules/1f1b.svg"]
