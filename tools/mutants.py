"""Faults of one line each, and whether the tests find them: `make mutants`.

``tools/mutants.txt`` has the list. A mutant is put into a copy of the tree, the tests that are
named with it run there, and it is killed if one of them fails. One that survives is a fault that no
test would tell. Hundreds run in minutes, because a worker (``tools/mutant_worker.py``) collects the
tests once and forks itself for each mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutant_worker import CRASHED, KILLED, SURVIVED

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.txt"
WORKER = ROOT / "tools" / "mutant_worker.py"
PACKAGES = ("strategies", "launcher")
FEWEST = 200  # A line that a change deletes gets a successor.
LIMIT_S = 300.0
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "runs", "outputs", ".*_cache", ".hypothesis", "node_modules"
)


class ListError(Exception):
    """The list, or what was asked of it, is wrong."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line of one file, what it becomes, and the tests that should fail then."""

    number: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number:>3} {self.file}\n    - {self.old}\n    + {self.new}"

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]


def read_list(text: str) -> list[Mutant]:
    """The mutants of a text, numbered from 1.

    A paragraph each: the file, ``- line``, ``+ what it becomes``, and a test per line. Indentation
    is the file's; lines that begin with ``#`` are for readers.

    Raises:
        ListError: A paragraph is not of this form.
    """
    mutants: list[Mutant] = []
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    for paragraph in "\n".join(lines).split("\n\n"):
        if not (rows := paragraph.strip("\n").split("\n"))[0]:
            continue
        number, (file, *rest) = len(mutants) + 1, rows
        if len(rest) < 3 or not (rest[0].startswith("- ") and rest[1].startswith("+ ")):
            raise ListError(
                f"mutant {number} ({file}): a file, `- line`, `+ line` and at least one test stand "
                f"below each other, with an empty line behind them"
            )
        mutants.append(Mutant(number, file, rest[0][2:], rest[1][2:], tuple(rest[2:])))
    return mutants


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with the mutant in it.

    Raises:
        ListError: The line is not in it exactly once, or would stay as it is.
    """
    lines = text.splitlines(keepends=True)
    hits = [index for index, line in enumerate(lines) if line.strip() == mutant.old]
    if len(hits) != 1:
        raise ListError(
            f"mutant {mutant.number}: {mutant.file} has this line {len(hits)} times, not once:\n"
            f"    {mutant.old}\n"
            f"Give tools/mutants.txt a fault of the same kind in the lines that stand there now."
        )
    if mutant.old == mutant.new:
        raise ListError(f"mutant {mutant.number}: {mutant.file}: it changes nothing")
    lines[hits[0]] = lines[hits[0]].replace(mutant.old, mutant.new)
    return "".join(lines)


def problems(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """What would keep some of them from being run, and folders of the packages without any."""
    texts: dict[str, str] = {}

    def text(file: str) -> str:
        if file not in texts:
            texts[file] = (root / file).read_text(encoding="utf-8")
        return texts[file]

    found = []
    for mutant in mutants:
        try:
            mutated(text(mutant.file), mutant)
        except (ListError, OSError) as error:
            found.append(str(error))
        for test in mutant.tests:
            file, _, name = test.partition("::")
            function = name.partition("[")[0].rpartition("::")[2]
            if not (root / file).is_file():
                found.append(f"mutant {mutant.number}: {test}: there is no such file")
            elif function and f"def {function}(" not in text(file):
                found.append(f"mutant {mutant.number}: {test}: there is no such test")
    covered = {mutant.folder for mutant in mutants}
    folders = {
        str(path.parent.relative_to(root))
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if path.name != "__init__.py" and "def " in path.read_text(encoding="utf-8")
    }
    found += [f"{folder}/ has no mutant" for folder in sorted(folders - covered)]
    return found


def chosen(mutants: Sequence[Mutant], only: str) -> list[Mutant]:
    """Those with one of these numbers, or whose path begins with one of these words.

    Raises:
        ListError: A word chooses none.
    """
    kept: set[int] = set()
    for word in only.split(","):
        hits = {
            mutant.number
            for mutant in mutants
            if str(mutant.number) == word
            or f"{mutant.file}/".startswith(word.rstrip("/") + "/")
            or mutant.file == word
        }
        if not hits:
            raise ListError(
                f"--only {word}: no mutant has this number or is below this path (there are "
                f"{len(mutants)}). Try --list."
            )
        kept |= hits
    return [mutant for mutant in mutants if mutant.number in kept]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a mutant's tests have ended; ``word`` is one of those below."""

    word: str
    seconds: float
    told: str

    @property
    def killed(self) -> bool:
        return self.word in (KILLED, CRASHED)


class Copy:
    """A copy of the tree, and the worker that has collected these tests there."""

    def __init__(self, root: Path, folder: Path, tests: Sequence[str]) -> None:
        self.tree = folder / "tree"
        shutil.copytree(root, self.tree, ignore=_NOT_COPIED, symlinks=True)
        for name in ("tmp", "told"):
            (folder / name).mkdir()
        self._told = folder / "told" / "failure"
        self._output = folder / "told" / "output"
        with self._output.open("wb") as output:
            ours, theirs = socket.socketpair()
            self._worker = subprocess.Popen(
                [sys.executable, str(WORKER), str(theirs.fileno()), str(self._told), *tests],
                cwd=self.tree,
                env=os.environ
                | {"PYTHONPATH": str(self.tree), "TMPDIR": str(folder / "tmp")}
                | {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder / "tmp")},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            theirs.close()
        self._channel = ours.makefile("rw", encoding="utf-8")
        ours.close()

    def run(self, tests: Sequence[str], file: str = "", limit_s: float = LIMIT_S) -> Outcome:
        """Runs tests; those of a mutant with the functions of its file as they stand there now.

        Raises:
            ListError: Not all tests could be collected.
        """
        self._told.unlink(missing_ok=True)
        try:
            print(json.dumps([list(tests), file, limit_s]), file=self._channel, flush=True)
            answer = self._channel.readline()
        except OSError:  # It has ended.
            answer = ""
        if not answer:
            self._worker.wait()
            output = self._output.read_text(encoding="utf-8", errors="replace")
            raise ListError(f"The tests could not be collected:\n{output[-4000:]}")
        word, seconds = json.loads(answer)
        told = self._told.read_text(encoding="utf-8") if self._told.exists() else ""
        return Outcome(word, seconds, told)

    @contextlib.contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """The tree with this mutant."""
        path = self.tree / mutant.file
        text, stamp = path.read_bytes(), path.stat().st_mtime_ns
        path.write_text(mutated(text.decode(), mutant), encoding="utf-8")
        # Python takes bytecode for that of the source with the same second and size: each mutant
        # has a second of its own, and the file its old one afterwards.
        later = stamp + (mutant.number + 1) * 1_000_000_000_000
        os.utime(path, ns=(later, later))
        try:
            yield
        finally:
            path.write_bytes(text)
            os.utime(path, ns=(stamp, stamp))

    def close(self) -> None:
        self._channel.close()
        self._worker.wait()


def shares(mutants: Sequence[Mutant], jobs: int) -> list[list[Mutant]]:
    """One list per worker: mutants of the same tests together, about as many in each."""
    found: list[list[Mutant]] = [[] for _ in range(max(1, min(jobs, len(mutants) // 2)))]
    groups: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(mutant.tests[0].partition("::")[0], []).append(mutant)
    for _, group in sorted(groups.items()):
        min(found, key=len).extend(group)
    return found


def run_all(
    mutants: Sequence[Mutant], root: Path, jobs: int, *, verbose: bool = False
) -> list[tuple[Mutant, Outcome]]:
    """Each mutant and how its tests ended; who survives is printed at once.

    Raises:
        ListError: A test fails without any mutant.
    """
    found: list[tuple[Mutant, Outcome]] = []
    errors: list[Exception] = []

    def work(share: list[Mutant], folder: Path) -> None:
        tests = sorted({test for mutant in share for test in mutant.tests})
        copy = Copy(root, folder, tests)
        try:
            plain = copy.run(tests, limit_s=10 * LIMIT_S)
            if plain.word != SURVIVED:
                raise ListError(f"Without any mutant, tests fail ({plain.word}):\n{plain.told}")
            for mutant in share:
                if errors:
                    break
                with copy.holding(mutant):
                    outcome = copy.run(mutant.tests, mutant.file)
                found.append((mutant, outcome))
                if verbose or not outcome.killed:
                    print(f"{mutant}\n    {outcome.word}, {outcome.seconds:.1f} s", flush=True)
        except Exception as error:
            errors.append(error)
        finally:
            copy.close()

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        threads = []
        for index, share in enumerate(shares(mutants, jobs)):
            own = Path(folder) / str(index)
            own.mkdir()
            threads.append(threading.Thread(target=work, args=(share, own)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return found


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit code 0 if all were killed, 1 if one was not, 2 if the list is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--only", help="numbers, folders or files, with commas between them")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    parser.add_argument("--check", action="store_true", help="only whether lines and tests exist")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--verbose", action="store_true", help="print those that are killed, too")
    parser.add_argument("--from", dest="file", type=Path, default=root / "tools" / "mutants.txt")
    asked = parser.parse_args(words)
    begin = time.monotonic()
    try:
        listed = read_list(asked.file.read_text(encoding="utf-8"))
        mutants = chosen(listed, asked.only) if asked.only else listed
        wrong = problems(listed, root)
        if len(listed) < FEWEST and asked.file == LIST:
            wrong.append(f"{asked.file.name} has {len(listed)} mutants, fewer than {FEWEST}")
        if asked.list:
            print("\n".join(str(mutant) for mutant in mutants))
        if wrong:
            raise ListError("\n".join(wrong))
        if asked.list or asked.check:
            return 0
        found = run_all(mutants, root, asked.jobs, verbose=asked.verbose)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    left = [mutant for mutant, outcome in found if not outcome.killed]
    print(f"{len(found) - len(left)} of {len(found)} mutants killed in "
          f"{time.monotonic() - begin:.0f} s")  # fmt: skip
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
