"""Saves, and is killed: ``python -m tests.strategies.runtime.storage.killed FOLDER KIND=COUNT...``.

A process of its own because it forks: importing torch for every kill would take seconds. Prints a
JSON summary; fails where what is left behind cannot be loaded, or is a mixture of two steps.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.mesh import Communicators, Coordinates
from strategies.runtime.storage.commit import Saver
from tests.strategies.runtime.storage.saving import newest, save, step_in

_CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
NAMES = ("first.ckpt", "second.ckpt")  # in the place of an older one, and beside it
_LARGE = 100_000  # numbers per row of three


def forked(work: Callable[[], None]) -> int:
    """A child that does some work; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    """Its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(count: int) -> None:
    """Kills this process at its so-many-th call that changes a file system."""
    left = [count]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted

    for name in _CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def every_call(folder: Path, target: str, stride: int = 1) -> int:
    """Kills a save at each of its calls in turn, or at one of ``stride``.

    Returns how many calls there were, up to the next one of those.
    """
    first, second = folder / "first.ckpt", folder / target
    before = folder.with_name("before.ckpt")
    save(Saver(Exchange(None)), before, 1)
    for count in itertools.count(1, stride):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(before, first)

        def work(point: int = count) -> None:
            die_at(point)
            save(Saver(Exchange(None)), second, 2)

        code = ended(forked(work))
        assert code in (0, -signal.SIGKILL), code
        # The name itself loads, though the folder may have stepped aside that moment.
        assert step_in(first) in ((1, 2) if target == first.name else (1,))
        assert newest(folder) in (1, 2), count
        # The next save does not mind what is left, and clears it away.
        save(Saver(Exchange(None)), second, 3)
        assert step_in(second) == 3
        assert sorted(os.listdir(folder)) == sorted({first.name, target}), os.listdir(folder)
        if code == 0:
            break
    return count - 1


def at_random(folder: Path, kills: int, seed: int = 0) -> int:
    """Kills a process that saves again and again, in a thread; returns the newest step."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    reached = 0
    for _ in range(kills):

        def work(start: int = reached) -> None:
            saver = Saver(Exchange(None))
            for step in range(start + 1, start + 1000):
                name = "last.ckpt" if step % 2 else f"step-{step}.ckpt"
                save(saver, folder / name, step, size=_LARGE, in_thread=True)
                if step % 2 == 0:
                    saver.remove(folder / f"step-{step - 2}.ckpt")

        child = forked(work)
        time.sleep(chance.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        found = newest(folder, size=_LARGE)
        assert found >= reached, (found, reached)
        reached = found
    return reached


def one_of_two(folder: Path, kills: int, seed: int = 0) -> int:
    """Kills one of two ranks that save together; the other must hear of it."""
    import torch.distributed as dist

    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    reached = 0
    for turn in range(kills):
        store = folder.with_name(f"store-{turn}")

        def work(rank: int, start: int = reached, store: Path = store) -> None:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            where = Coordinates.of(rank, pp=1, dp=2)
            groups = Communicators(where)
            groups.create([("save", (0, 1))], backends={"save": "gloo"}, timeout_s=20)
            saver = Saver(Exchange(groups.get("save", (0, 1))))
            for step in range(start + 1, start + 1000):
                name = "last.ckpt" if step % 2 else f"step-{step}.ckpt"
                save(saver, folder / name, step, size=_LARGE, in_thread=True, where=where)
                store.with_name(f"{store.name}-{rank}").touch()  # it is connected
                if step % 2 == 0 and rank == 0:
                    saver.remove(folder / f"step-{step - 2}.ckpt")

        children = [forked(lambda rank=rank: work(rank)) for rank in (0, 1)]
        until = time.monotonic() + 60
        while len(list(folder.parent.glob(f"{store.name}-*"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.4))
        victim = chance.randrange(2)
        os.kill(children[victim], signal.SIGKILL)
        assert ended(children[victim]) == -signal.SIGKILL
        signal.alarm(180)  # it hears at once, or by its time-out; never is what this ends
        assert ended(children[1 - victim]) == 1, "the other rank went on"
        signal.alarm(0)
        found = newest(folder, size=_LARGE)
        assert found >= reached, (found, reached)
        reached = found
        store.unlink(missing_ok=True)
    return reached


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for word in sys.argv[2:]:
        kind, _, count = word.partition("=")
        folder = Path(sys.argv[1]) / kind / "checkpoints"
        if kind == "calls":
            found[kind] = [every_call(folder, name) for name in NAMES]
        elif kind == "every":
            found[kind] = every_call(folder, NAMES[0], stride=int(count))
        else:
            found[kind] = {"random": at_random, "ranks": one_of_two}[kind](folder, int(count))
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
