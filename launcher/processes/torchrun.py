"""``cluster=torchrun``: the ranks are processes that torchrun has started, this is one of them.

Rank 0 composes, checks and writes the run's folder; the others wait in the rendezvous store for
what it has decided, so that nobody reads a configuration twice and one message tells what is wrong.
Torch is imported when the ranks first meet, not before.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from launcher.checkpoints import remember_damage
from launcher.config import LaunchConfig
from launcher.config.key import shorten
from launcher.processes.failure import (
    describe,
    failure_file,
    first_failure,
    is_consequence,
    raised,
    read_failure,
    write_failure,
)
from launcher.processes.local import private_caches
from launcher.processes.preempted import PreemptedError, StopRequest, installed_request
from launcher.processes.store import listen_at, meeting_address
from launcher.processes.watchdog import own_heartbeat
from launcher.terminal import say_error, shortened
from strategies.errors import DamagedCheckpointError, PipelineError, PlanError, RunError
from strategies.small_file import FileRefusedError, opened, parse_json

WORD = "cluster=torchrun"
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "foldpipe/task"  # for each other rank its own, which says again what that one has asked
_ASKED = "foldpipe/asked"
_HEARD = "foldpipe/heard"
_PLACE = "FOLDPIPE_PLACE"
_GRACE_S = 1.0
_MOST_KEY_BYTES = 4096
_MOST_NONCE = 64
_LOOK_AGAIN_S = 2.0  # once all have been answered
_MOST_SAID, _MOST_PORT = 300, 65_535
_FAREWELL_S = 20.0  # for the others to import torch
_PATIENCE = timedelta(minutes=30)  # for rank 0 to compose, compile and check
_COMMAND = "python -m torch.distributed.run --nproc-per-node=2 -m launcher cluster=torchrun pp=2"


def joins(words: Sequence[str]) -> bool:
    """Whether this process belongs to a torchrun that is to be joined; takes its signals then.

    Raises:
        PlanError: Variables that torchrun sets are none of its own.
    """
    if WORD not in words or not _inside():
        return False
    _check_numbers()
    _TOLD.clear()
    StopRequest().install(signal.SIGUSR1, signal.SIGTERM)
    return True


def _check_numbers() -> None:
    """Refuses variables by hand that no torchrun has set."""
    most = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        given = os.environ[name]
        least = 0 if name in most else 1
        if not (given.isascii() and given.isdigit()) or int(given) < least:
            rule = f"a whole number, at least {least}"
        elif name in most and int(given) >= int(os.environ[most[name]]):
            rule = f"less than {most[name]}={os.environ[most[name]]}"
        elif name == "MASTER_PORT" and int(given) > _MOST_PORT:
            rule = f"at most {_MOST_PORT}"
        else:
            continue
        raise PlanError(
            f"cluster=torchrun with {name}={shorten(given)}: expected {rule}.",
            fix=f"torchrun sets it: try {_COMMAND}.",
        )


def rank() -> int:
    return int(os.environ["RANK"])


def num_nodes() -> int:
    """Machines, which torchrun gives as many ranks each."""
    if not _inside():
        missing = [name for name in _NEEDED if name not in os.environ]
        raise PlanError(
            f"cluster=torchrun joins processes that torchrun has started, but {', '.join(missing)} "
            f"are not in the environment. Try {_COMMAND}."
        )
    return max(1, int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]))


def check_world(world_size: int, *, mode: str) -> None:
    """Refuses a run of another size than torchrun's."""
    if mode == "validate" or not _inside():
        return
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise PlanError(
            f"pp * dp * tp = {world_size} ranks, but torchrun has started {started} processes. "
            f"Try --nproc-per-node={world_size} on one node, or degrees whose product is {started}."
        )


def refuse_stray(config: LaunchConfig) -> None:
    """Refuses what would become one whole run per process of torchrun."""
    local, started = config.cluster.name == "local", os.environ.get("WORLD_SIZE", "1")
    if local and os.environ.get("TORCHELASTIC_RUN_ID") and started.strip() not in ("", "0", "1"):
        raise PlanError(
            "torchrun has started this process, and cluster=local would start ranks of its own in "
            f"each of {started} processes. Try {WORD}."
        )


def lead(
    run_dir: Path, task: Mapping[str, Any], on_event: Callable[[dict[str, Any]], None]
) -> None:
    """Tells all ranks what to run, and runs rank 0's part of it in this process."""
    (run_dir / "logs").mkdir(exist_ok=True)
    for other in range(int(os.environ["WORLD_SIZE"])):  # of an earlier attempt
        failure_file(run_dir, other).unlink(missing_ok=True)
    # In a variable: the store lives in this process where torchrun's agent has none.
    store = _meet()
    place = _own_place()
    _answer(store, {"run_dir": str(run_dir), "task": task, "place": place})
    try:
        with events_told_to(on_event), _met_at(place):
            _work(run_dir, task)
    except PreemptedError:
        return  # the outcome says where
    except DamagedCheckpointError as error:
        # Whoever starts anew with trainer.resume=auto, as torchrun --max-restarts does, skips it.
        remember_damage(Path(task["checkpoint"]), str(error))
        raise
    except PipelineError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise RunError(_cause(run_dir, error)) from error


def follow() -> int:
    """Runs any other rank's part; returns its exit code."""
    store = _meet()
    nonce = secrets.token_hex(16)
    with _lost_in_words("was lost"):
        store.set(f"{_ASKED}/{rank()}", nonce)
        told = _heard(store, nonce)
    if "code" in told:
        store.add(_HEARD, 1)
        return int(told["code"])  # rank 0 has said why
    run_dir = Path(told["run_dir"])
    try:
        with _met_at(told.get("place")):
            _work(run_dir, told["task"])
    except PreemptedError as error:
        return error.exit_code
    except BaseException as error:
        if isinstance(error, PipelineError):
            say_error(error)
        else:
            traceback.print_exc()
        with contextlib.suppress(OSError):  # the folder may be on another machine
            return write_failure(run_dir, rank(), error)
        return 1
    return 0


def guarded_store() -> tuple[socket.socket, str] | None:
    """What rank 0's guardian is to keep: a store of ours, as torch's own takes keys from anybody.

    To be called before the fork; None on other ranks.
    """
    if rank() != 0:
        return None
    alone = os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]
    address = meeting_address(os.environ["MASTER_ADDR"], alone=alone)
    listener = listen_at(address)
    nonce = secrets.token_hex(16)
    os.environ[_PLACE] = json.dumps([address, listener.getsockname()[1], nonce])
    return listener, _store_token(nonce)


def _own_place() -> list[Any] | None:
    """Address, port and nonce of the store that this rank's guardian keeps; None without one."""
    found = os.environ.pop(_PLACE, None)
    return None if found is None else list(json.loads(found))


def _store_token(nonce: str) -> str:
    """What every key there begins with: known to whoever has the user's key, and told to nobody."""
    return _mac(f"store\0{nonce}")


@contextmanager
def _met_at(place: Sequence[Any] | None) -> Iterator[None]:
    """Has the ranks meet at our store inside the block."""
    if place is None:
        yield
        return
    address, port, nonce = place
    named = {"MASTER_ADDR": str(address), "MASTER_PORT": str(port)}
    named["FOLDPIPE_STORE"] = _store_token(nonce)
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def dismiss(code: int) -> None:
    """Ends the other ranks where rank 0 has been refused before it told them anything."""
    with contextlib.suppress(Exception):
        if not _TOLD.is_set():
            store = _meet()
            _answer(store, {"code": code})
            # Where torchrun's agent has no store it is ours, and lives as long as we do.
            until = time.monotonic() + _FAREWELL_S
            while store.add(_HEARD, 0) < int(os.environ["WORLD_SIZE"]) - 1:
                if time.monotonic() > until:
                    return
                time.sleep(0.1)


def leave(code: int) -> NoReturn:
    """Ends this process without the destructors of communicators: peers may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(run_dir: Path, task: Mapping[str, Any]) -> None:
    request = installed_request()
    if request is not None and task["config"]["mode"] != "train":
        request.disregard()
    os.environ.update(private_caches(os.environ))
    importlib.import_module("launcher.rank.jobs").run(task, run_dir)


def _cause(run_dir: Path, error: Exception) -> str:
    """This rank's failure, or another's that it is a consequence of, if that one has said so."""
    found = own = raised(rank(), error)
    if is_consequence(own):
        time.sleep(_GRACE_S)  # for the others' guardians to look
        ranks = range(int(os.environ["WORLD_SIZE"]))
        others = [f for r in ranks if (f := read_failure(run_dir, r)) is not None]
        found = first_failure([own, *others])
    if found is not own:
        return describe(found, run_dir / "logs" / f"rank_{found.rank:05d}.log")
    doing = own_heartbeat(os.environ).beat().describe()
    return f"rank {own.rank} on {own.host} failed: {own.kind}: {own.message}\nIt was {doing}."


def _inside() -> bool:
    return all(name in os.environ for name in _NEEDED)


def _meet() -> Any:  # noqa: ANN401 -- a torch.distributed.Store
    """The store that all ranks share, the agent's or rank 0's.

    Raises:
        RunError: There is none at the address that torchrun has given.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous").rendezvous
    with _lost_in_words("cannot be reached"):
        store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    return store


@contextmanager
def _lost_in_words(what: str) -> Iterator[None]:
    """What torch says of a store that is not there, in one message."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # a DistError, or a port that is no number
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise RunError(
            f"the store where torchrun's ranks meet, {place}, {what} by rank {rank()}: "
            f"{shortened(said, _MOST_SAID)}. If rank 0 has ended, its own words say why; else see "
            "that MASTER_ADDR and MASTER_PORT are those of its node."
        ) from error


# What rank 0 says is signed. Anybody who reaches the store can write into it, and what the ranks
# read there decides what they run; the key is in a file that only this user can read, so ranks on
# several hosts need a common home, or the key in a variable.

#
# The signature is for one number, too, which the rank that hears it has made for this start: what
# somebody has written down of another run is no answer to it.

KEY_VARIABLE = "FOLDPIPE_KEY"
_TOLD = threading.Event()  # whether this process, rank 0, has said anything
_LOOK_S = 0.2
_COMPLAIN_S = 20.0


def _answer(store: Any, content: Mapping[str, Any]) -> None:  # noqa: ANN401 -- as ``_meet``
    """Tells each other rank that asks, from now on."""
    _TOLD.set()
    # Ranks meet at another port later on, which this process then has in its environment.
    given = (store, content, _where())
    threading.Thread(target=_serve, args=given, name="answers", daemon=True).start()


def _serve(store: Any, content: Mapping[str, Any], where: str) -> None:  # noqa: ANN401 -- as ``_meet``
    others = range(1, int(os.environ["WORLD_SIZE"]))
    answered: dict[int, str] = {}
    with contextlib.suppress(Exception):  # The store has ended, and with it who asks.
        while True:
            for other in others:
                key = f"{_ASKED}/{other}"
                if not store.check([key]):
                    continue
                asked = store.get(key)
                nonce = asked if isinstance(asked, str) else asked.decode(errors="replace")
                if answered.get(other) != nonce and len(nonce) <= _MOST_NONCE:
                    answered[other] = nonce
                    store.set(f"{_KEY}/{other}", signed({**content, "to": nonce}, where))
            time.sleep(_LOOK_AGAIN_S if len(answered) == len(others) else _LOOK_S)


def signed(content: Mapping[str, Any], where: str | None = None) -> str:
    """Text that only somebody with this user's key can have written, for this set of processes.

    ``where`` is that set as it was; None for now.
    """
    text = json.dumps(content)
    return json.dumps({"text": text, "mac": _mac(text, where)})


def read_signed(data: str | bytes) -> dict[str, Any] | None:
    """What was signed; None where a stranger has written it."""
    try:
        outer = parse_json(data)
        text, mac = outer["text"], outer["mac"]
        if not hmac.compare_digest(mac, _mac(text)):
            return None
        content = parse_json(text)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return content if isinstance(content, dict) else None


def _heard(store: Any, nonce: str) -> dict[str, Any]:  # noqa: ANN401 -- a torch.distributed.Store
    """What rank 0 has answered; what a stranger has left in its place is waited over."""
    key = f"{_KEY}/{rank()}"

    def look() -> dict[str, Any] | None:
        told = read_signed(store.get(key))
        return told if told is not None and told.get("to") == nonce else None

    told = look()
    began, complained = time.monotonic(), False
    while told is None:
        time.sleep(_LOOK_S)
        waited = time.monotonic() - began
        if waited > _PATIENCE.total_seconds():
            raise PlanError(_unsigned())
        if waited > _COMPLAIN_S and not complained:
            complained = True
            sys.stderr.write(f"rank {rank()} goes on waiting for rank 0: {_unsigned()}\n")
        told = look()
    return told


def _unsigned() -> str:
    return (
        "what is in the store where the ranks meet is not signed with this user's key for this "
        f"start, so it is not used. Where hosts have no common home, set {KEY_VARIABLE} to the "
        "same secret on all."
    )


def _where() -> str:
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "MASTER_PORT")
    return "\0".join(os.environ.get(name, "") for name in names)


def _mac(text: str, where: str | None = None) -> str:
    where = _where() if where is None else where
    return hmac.new(_key(), f"{where}\0{text}".encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's, made when it is first asked for."""
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return given.encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foldpipe"
    file = folder / "torchrun.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            made = folder / f"torchrun.key.{secrets.token_hex(8)}"
            handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as stream:
                stream.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another rank was faster
                os.link(made, file)
            made.unlink()
        with opened(file) as stream:
            status = os.fstat(stream.fileno())
            found = stream.read(_MOST_KEY_BYTES)
    except (OSError, FileRefusedError) as error:
        raise PlanError(
            f"{file}, this user's key for torchrun's ranks, cannot be read or made: {error}. "
            f"Try {KEY_VARIABLE}=SECRET, the same for all processes."
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not found:
        raise PlanError(
            f"{file}, this user's key for torchrun's ranks, is another user's, or others can read "
            "it.",
            fix=f"Remove it, or try {KEY_VARIABLE}=SECRET, the same for all processes.",
        )
    return found


# Progress on standard output, where no parent of ours reads what rank 0 tells.


@contextmanager
def events_told_to(listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Hands what ``launcher.rank.callbacks.Progress`` tells inside the block to a function.

    That is called in a thread of its own, and has had every event when the block ends.
    """
    reader, writer = os.pipe()
    thread = threading.Thread(target=_read, args=(reader, listener), name="progress", daemon=True)
    thread.start()
    os.environ["FOLDPIPE_EVENTS"] = str(writer)
    try:
        yield
    finally:
        del os.environ["FOLDPIPE_EVENTS"]
        os.close(writer)
        thread.join()


def _read(reader: int, listener: Callable[[dict[str, Any]], None]) -> None:
    with os.fdopen(reader) as lines:
        for line in lines:
            listener(json.loads(line))
