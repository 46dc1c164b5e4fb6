"""``python -m launcher doctor``: what this machine has, measured, and what to do about it.

Nothing of a run is needed, nothing is left behind. What concerns torch is asked in two processes
that talk to each other as ranks do (``launcher.rank.link_probe``), because the launcher itself
imports none. ``--listen PORT`` on one host and ``--to HOST:PORT`` on another measure between them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.processes.failure import free_bytes
from launcher.processes.local import our_python, rank_environment
from launcher.resolve import num_cores
from launcher.secrets import has_wandb_key
from launcher.terminal import say
from launcher.tools.host_link import answer, clock_state, measure_link
from strategies.errors import PlanError, readable
from strategies.plan import IDLE_RANK_BYTES

State = Literal["ok", "note", "bad"]
_STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "bad": "bold red"}
_MB, _GB = 1e6, 1e9
_PROBE_S = 120.0
_LEAST_FILES, _LEAST_SHARED, _LEAST_DISK = 1024, 1e9, 5e9
_WRITTEN = 32 << 20
_PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "wandb", "transformers", "optuna")
_SPEAKING = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
             "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "TORCH_NCCL_BLOCKING_WAIT",
             "MASTER_ADDR", "http_proxy")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do."""

    what: str
    state: State
    found: str
    advice: str = ""


def run(words: Sequence[str]) -> int:
    """Prints the table.

    Returns:
        0 if everything is usable, 1 if something is not.
    """
    asked = _parse(words)
    if asked.listen is not None:
        say(f"answering on port {asked.listen}; elsewhere: {_elsewhere(asked.listen)}")
        answer(asked.listen, timeout_s=asked.timeout)
        return 0
    findings = [*_here(), *_of_torch()]
    if asked.to is not None:
        findings.append(_link(asked.to))
    print_findings(findings)
    bad = [finding.what for finding in findings if finding.state == "bad"]
    say(f"unusable: {', '.join(bad)}" if bad else "usable")
    return 1 if bad else 0


def print_findings(findings: Sequence[Finding], *, width: int | None = None) -> None:
    """The table, as wide as the terminal; advice is wrapped under itself."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", ratio=3, overflow="fold")
    table.add_column("what to do", ratio=2, overflow="fold")
    for item in findings:
        advice = item.advice or "nothing"
        mark = Text(item.state, style=_STYLES[item.state])
        texts = (item.what, item.found, advice)
        table.add_row(mark, *(Text(readable(text)) for text in texts))
    Console(highlight=False, width=width).print(table)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{message}. Try doctor, doctor --listen 29500, doctor --to HOST:29500.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="foldpipe doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--listen", type=_port)
    parser.add_argument("--to")
    parser.add_argument("--timeout", type=float, default=600.0)
    asked = parser.parse_args(list(words))
    if asked.to is not None:
        host, _, port = asked.to.rpartition(":")
        if not host:
            name = asked.to if port == asked.to and port else "node1"
            raise PlanError(f"--to {asked.to}: expected HOST:PORT. Try --to {name}:29500.")
        asked.to = host, _port(port)
    return asked


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise PlanError(f"{text} is no port: expected 1 to 65535. Try 29500.")
    return int(text)


def _elsewhere(port: int) -> str:
    return f"python -m launcher doctor --to {socket.gethostname()}:{port}"


def _link(place: tuple[str, int]) -> Finding:
    what = f"link to {place[0]}"
    try:
        link = measure_link(*place)
    except OSError as error:
        advice = f"start doctor --listen {place[1]} there; open the port in the firewall"
        return Finding(what, "bad", f"{place[0]}:{place[1]}: {error}", advice)
    found = (
        f"round trip {link.round_trip_s * 1e6:.0f} us, {link.bytes_per_s / _GB:.2f} GB/s, clock "
        f"{link.clock_ahead_s * 1e3:+.1f} ms"
    )
    if abs(link.clock_ahead_s) > 1.0:
        return Finding(what, "note", found, "set the clocks (chrony): logs name who failed first")
    return Finding(what, "ok", found, "hardware.inter_bandwidth, inter_latency_s take these")


# What can be seen without torch.


def _here() -> Iterator[Finding]:
    yield _python()
    yield from _versions()
    for look in (_cores, _memory, _shared_memory, _files, _ports, _name, _disk, _clock):
        yield _guarded(look)
    yield from _variables()
    yield from (_guarded(look) for look in (_compiler, _slurm, _wandb))


def _guarded(look: Callable[[], Finding]) -> Finding:
    """A look that fails is a finding itself."""
    try:
        return look()
    except OSError as error:
        return Finding(look.__name__.strip("_").replace("_", " "), "bad", str(error), "see found")


def _python() -> Finding:
    found = f"{sys.version.split()[0]} on {sys.platform}, {sys.executable}"
    if sys.platform != "linux":
        return Finding("Python", "note", found, "ranks are started afresh; Linux is what is tested")
    return Finding("Python", "ok", found)


def _versions() -> Iterator[Finding]:
    """Installed packages against what this package asks for."""
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(line) for line in requires("foldpipe-launcher") or ()]
    except PackageNotFoundError:
        yield Finding("foldpipe", "note", "run from a checkout, not installed", "make install")
        asked = []
    ranges = {item.name.lower(): item for item in asked}
    needed = {item.name.lower() for item in asked if item.marker is None}
    for name in dict.fromkeys((*_PACKAGES, *sorted(needed))):
        try:
            found = version(name)
        except PackageNotFoundError:
            if name in needed:
                yield Finding(name, "bad", "not installed", f"pip install '{ranges[name]}'")
            continue
        wanted = ranges.get(name)
        if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
            yield Finding(name, "bad", found, f"pip install '{name}{wanted.specifier}'")
        elif name in _PACKAGES:
            yield Finding(name, "ok", found)


def _cores() -> Finding:
    usable, there = num_cores(), os.cpu_count() or 1
    found = f"{usable} of {there} usable"
    quota = _quota()
    if quota is not None and quota < usable:
        advice = "give the container more CPUs, or set OMP_NUM_THREADS=1"
        return Finding("cores", "note", f"{found}, limited to {quota:g}", advice)
    if usable < 2:
        return Finding("cores", "note", found, "ranks take turns: times say nothing")
    return Finding("cores", "ok", found)


def _quota() -> float | None:
    """CPUs that a container may use, of cgroup v2."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) / int(period)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    ranks = int(memory.available // IDLE_RANK_BYTES)
    found = f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB free"
    if ranks < 2:
        return Finding(
            "memory", "bad", found, f"a rank takes {IDLE_RANK_BYTES / _GB:g} GB: free some"
        )
    return Finding("memory", "ok", f"{found}: room for {ranks} idle ranks")


def _shared_memory() -> Finding:
    free = free_bytes(Path("/dev/shm"))
    found = f"{free / _GB:.2f} GB free in /dev/shm"
    if free < 64 * _MB:
        advice = "docker run --shm-size=8g; until then data.num_workers=0"
        return Finding("shared memory", "bad", found, advice)
    if free < _LEAST_SHARED:
        advice = "loaders and NCCL use it: docker run --shm-size=8g, or data.num_workers=0"
        return Finding("shared memory", "note", found, advice)
    return Finding("shared memory", "ok", found)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files ({hard} at most)"
    if soft < _LEAST_FILES:
        return Finding("file limit", "note", found, f"ulimit -n {min(hard, 65536)}")
    return Finding("file limit", "ok", found)


def _ports() -> Finding:
    """A connection of this machine with itself, as ranks make them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        begin = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            took = time.perf_counter() - begin
    low, high = 32768, 60999
    with_range = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if with_range.is_file():
        low, high = map(int, with_range.read_text().split())
    return Finding(
        "ports", "ok", f"loopback in {took * 1e6:.0f} us; {low} to {high} are handed out"
    )


def _name() -> Finding:
    """Gloo listens on what the host's own name leads to."""
    name = socket.gethostname()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return Finding("host name", "ok", f"{name}; GLOO_SOCKET_IFNAME decides")
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        advice = f"several hosts: export GLOO_SOCKET_IFNAME=eth0, or add {name} to /etc/hosts"
        return Finding("host name", "note", f"{name} leads nowhere: {error}", advice)
    if address.startswith("127."):
        advice = "several hosts: export GLOO_SOCKET_IFNAME=eth0 (ip addr lists names)"
        return Finding(
            "host name", "note", f"{name} is {address}, which other hosts cannot reach", advice
        )
    return Finding("host name", "ok", f"{name} is {address}")


def _disk() -> Finding:
    """Written and synced, as a checkpoint is."""
    here = Path.cwd()
    free = free_bytes(here)
    with tempfile.NamedTemporaryFile(dir=here, prefix=".doctor-") as file:
        data = secrets.token_bytes(1 << 20)
        begin = time.perf_counter()
        for _ in range(_WRITTEN >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        rate = _WRITTEN / (time.perf_counter() - begin)
    found = f"{free / _GB:.1f} GB free, {rate / _MB:.0f} MB/s written and synced in {here}"
    if free < _LEAST_DISK:
        advice = (
            "hydra.run.dir=ELSEWHERE, trainer.keep_last=1: a checkpoint is 12 bytes a parameter"
        )
        return Finding("disk", "note", found, advice)
    return Finding("disk", "ok", found)


def _clock() -> Finding:
    state = clock_state()
    if state is None:
        return Finding("clock", "note", "cannot be asked here", "several hosts: chronyc tracking")
    if not state.synchronised:
        advice = "several hosts: install chrony, or logs cannot say who failed first"
        return Finding("clock", "note", "not synchronised, says the kernel", advice)
    return Finding("clock", "ok", f"synchronised, error at most {state.error_s * 1e3:.0f} ms")


def _variables() -> Iterator[Finding]:
    for name in _SPEAKING:
        value = os.environ.get(name)
        if value is not None:
            advice = "ranks obey it; unset it if that is not meant"
            yield Finding("variable", "note", f"{name}={value[:60]}", advice)


def _compiler() -> Finding:
    found = shutil.which(os.environ.get("CXX") or "g++")
    if found is None:
        return Finding("compiler", "note", "no g++", "only compile=true needs it: apt install g++")
    return Finding("compiler", "ok", f"{found}, for compile=true")


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("SLURM", "note", "no sbatch here", "only cluster=slurm needs it")
    # Clients are in many images that no controller is near; a job cannot do without one.
    job = os.environ.get("SLURM_JOB_ID")
    state: Literal["note", "bad"] = "note" if job is None else "bad"
    why = "only cluster=slurm needs it" if job is None else "this job cannot do without slurmctld"
    advice = f"{why}: scontrol ping"
    try:
        said = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %a %D nodes"],
            capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("SLURM", state, "sinfo does not answer", advice)
    except OSError as error:
        return Finding("SLURM", state, f"sinfo: {error.strerror}", advice)
    if said.returncode:
        found = " ".join(said.stderr.split())[:200] or f"sinfo: exit code {said.returncode}"
        return Finding("SLURM", state, found, advice)
    partitions = "; ".join(said.stdout.split("\n")[:4]).strip("; ")
    inside = "" if job is None else f"; inside job {job}"
    return Finding("SLURM", "ok", f"{partitions}{inside}", "cluster=slurm cluster.partition=NAME")


def _wandb() -> Finding:
    if not has_wandb_key():
        advice = "tracking=wandb writes locally; wandb login, and it is online"
        return Finding("W&B", "note", "no key", advice)
    return Finding("W&B", "ok", "a key is set up")


# torch, its devices and its transports: asked in processes of their own.


def _of_torch() -> Iterator[Finding]:
    try:
        said = _probe(world=2)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield Finding("torch", "bad", str(error)[-400:], "pip install torch; see found")
        return
    yield Finding("torch build", "ok", said["build"])
    yield from _devices(said)
    for link in said["links"]:
        if "error" in link:
            advice = "export GLOO_SOCKET_IFNAME=lo; see found"
            if link["backend"] == "nccl":
                advice = "export NCCL_DEBUG=INFO and look; cluster.backend=staged does without"
            yield Finding(link["backend"], "bad", link["error"][-400:], advice)
        else:
            found = (
                f"{link['ranks']} ranks, {link['latency_s'] * 1e6:.0f} us a message, "
                f"{link['bytes_per_s'] / _GB:.2f} GB/s"
            )
            yield Finding(link["backend"], "ok", found, "hardware.intra_bandwidth takes this")


def _devices(said: dict[str, Any]) -> Iterator[Finding]:
    rate = said["cpu_flops"] / 1e9
    found = f"{rate:.0f} GFLOPS fp32 on {said['threads']} threads, {said['capability']}"
    yield Finding("CPU", "ok", found, "mode=profile measures layers")
    if not said["gpus"]:
        driver = shutil.which("nvidia-smi")
        if driver is not None or list(Path("/dev").glob("nvidia[0-9]*")):
            advice = "install the torch build for this driver's CUDA (nvidia-smi names it)"
            yield Finding("GPU", "bad", f"{driver or '/dev/nvidia*'}, but torch sees none", advice)
        else:
            yield Finding("GPU", "note", "none", "ranks run on CPU, over gloo")
    for gpu in said["gpus"]:
        found = (
            f"{gpu['name']}, {gpu['free'] / _GB:.1f} of {gpu['total'] / _GB:.1f} GB free, "
            f"{gpu['flops'] / 1e12:.0f} TFLOPS {gpu['format']}"
        )
        if gpu["free"] < gpu["total"] / 2:
            yield Finding("GPU", "note", found, "somebody else uses it: nvidia-smi names who")
        else:
            yield Finding("GPU", "ok", found)
    if said["gpus"] and not said["nccl"]:
        advice = "install a torch build with it; cluster.backend=staged does without"
        yield Finding("NCCL", "bad", "this torch has none", advice)


def _probe(*, world: int) -> dict[str, Any]:
    """What two ranks say of themselves.

    Raises:
        ValueError: One of them has failed; with its last words.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = rank_environment(world)
    command = our_python("launcher.rank.link_probe")
    with tempfile.TemporaryFile() as errors:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(world)
        ]
        try:
            said, _ = ranks[0].communicate(timeout=_PROBE_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        lines = said.decode(errors="replace").strip().splitlines()
        if not lines:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip().splitlines()
            raise ValueError(words[-1] if words else "a process with torch ended without a word")
        found = json.loads(lines[-1])
        assert isinstance(found, dict)
        return found
