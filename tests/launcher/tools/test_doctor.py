"""``python -m launcher doctor``: one line per thing, each measured, with what to do."""

from __future__ import annotations

import io
import resource
import socket
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launcher.rank import link_probe
from launcher.tools import doctor
from launcher.tools.doctor import Finding
from launcher.tools.host_link import answer, clock_state, measure_link
from strategies.errors import PlanError
from tests.emulated_device import CUDA, emulated_device
from tests.launcher.command_line import run_here

TORCH = {
    "build": "2.13.0+cpu, CPU only, gloo yes, NCCL no", "nccl": False, "threads": 1,
    "capability": "AVX512", "cpu_flops": 67e9, "gpus": [],
    "links": [{"backend": "gloo", "ranks": 2, "latency_s": 44e-6, "bytes_per_s": 0.9e9}],
}  # fmt: skip
GPU = {"name": "H200", "free": 140e9, "total": 150e9, "flops": 6.8e14, "format": "bf16"}


def by_name(findings) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_everything_that_can_be_seen_without_torch_is_measured():
    found = by_name(doctor._here())
    for what in ("Python", "torch", "lightning", "cores", "memory", "shared memory", "file limit",
                 "ports", "host name", "disk", "clock", "compiler", "SLURM", "W&B"):  # fmt: skip
        assert found[what].found, what
        assert found[what].state == "ok" or found[what].advice, what
    assert " of " in found["cores"].found
    assert "MB/s written and synced" in found["disk"].found


def test_what_is_missing_too_old_or_too_small_says_what_to_do(monkeypatch):
    versions = {"lightning": "2.0.0", "torch": "2.13.0", "hydra-core": None}

    def version(name):
        found = versions.get(name, "99")
        if found is None:
            raise doctor.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor, "version", version)
    asked = ["lightning>=2.6", "torch>=2.11", "hydra-core>=1.3", "optuna>=5; extra == 'optuna'"]
    monkeypatch.setattr(doctor, "requires", {"foldpipe-launcher": asked}.get)  # fmt: skip
    found = by_name(doctor._versions())
    assert (found["lightning"].state, found["lightning"].advice) == (
        "bad", "pip install 'lightning>=2.6'",
    )  # fmt: skip
    assert found["hydra-core"].advice == "pip install 'hydra-core>=1.3'"
    assert found["torch"].state == "ok"
    monkeypatch.setattr(doctor, "free_bytes", lambda _: 64_000_000 - 1)
    assert doctor._shared_memory().state == "bad"
    assert "--shm-size" in doctor._shared_memory().advice
    assert doctor._disk().state == "note"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert doctor._files().advice == "ulimit -n 4096"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [[0, 0, 0, 0, ("127.0.1.1", 0)]])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert "GLOO_SOCKET_IFNAME" in doctor._name().advice
    memory = SimpleNamespace(available=5e8, total=1e9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert doctor._memory().state == "bad"


@pytest.mark.parametrize("job", [None, "17"])
@pytest.mark.parametrize("sinfo", ["echo no controller >&2; exit 1", None])
def test_slurm_that_does_not_answer_makes_the_machine_unusable_inside_a_job_only(
    job, sinfo, tmp_path, monkeypatch
):
    for name, script in (("sbatch", ""), ("sinfo", sinfo)):
        if script is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    found = doctor._guarded(doctor._slurm)
    assert (found.what, found.state) == ("SLURM", "note" if job is None else "bad")
    assert found.found == ("sinfo: No such file or directory" if sinfo is None else "no controller")
    assert "scontrol ping" in found.advice


def test_variables_that_ranks_obey_are_listed(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE=1" in {finding.found for finding in doctor._variables()}


@pytest.mark.parametrize(
    ("said", "what", "state"),
    [
        (TORCH, "gloo", "ok"),
        (TORCH | {"links": [{"backend": "gloo", "error": "no route"}]}, "gloo", "bad"),
        (TORCH | {"gpus": [GPU], "nccl": True}, "GPU", "ok"),
        (TORCH | {"gpus": [GPU | {"free": 1e9}], "nccl": True}, "GPU", "note"),
        (TORCH | {"gpus": [GPU], "nccl": False}, "NCCL", "bad"),
    ],
)
def test_what_torch_says_becomes_lines(said, what, state, monkeypatch):
    monkeypatch.setattr(doctor, "_probe", lambda *, world: said)
    found = by_name(doctor._of_torch())
    assert found[what].state == state
    assert found["torch build"].found == said["build"]


def test_a_torch_that_does_not_start_is_unusable_and_says_why(monkeypatch):
    def fail(*, world):
        raise ValueError("ImportError: libcudart.so.12")

    monkeypatch.setattr(doctor, "_probe", fail)
    (finding,) = doctor._of_torch()
    assert (finding.state, finding.found) == ("bad", "ImportError: libcudart.so.12")


@pytest.mark.parametrize("state", ["note", "bad"])
def test_the_exit_code_says_whether_something_is_unusable(state, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_here", lambda: [Finding("clock", state, "slow", "chrony")])
    monkeypatch.setattr(doctor, "_of_torch", list)
    done = run_here(["doctor"], tmp_path, monkeypatch)
    assert (done.code, done.calls) == (int(state == "bad"), [])
    assert done.output.splitlines()[-1] == {"bad": "unusable: clock", "note": "usable"}[state]
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_as_wide_as_the_terminal(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    doctor.print_findings([Finding("disk", "note", "x" * 90, "many words " * 9)], width=80)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert file.getvalue().count("x") == 90
    assert file.getvalue().count("many") == 9


def test_two_hosts_measure_the_link_between_them():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    other = threading.Thread(target=answer, args=(port,), kwargs={"timeout_s": 2.0})
    other.start()
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()  # none of ours
            break
        except ConnectionRefusedError:  # It does not listen yet.
            time.sleep(0.01)
    link = measure_link("127.0.0.1", port, bulk=1 << 20)
    other.join()
    assert 0 < link.round_trip_s < 1
    assert link.bytes_per_s > 0
    assert abs(link.clock_ahead_s) < 1


def test_a_link_to_nobody_is_unusable_and_names_what_to_start(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = doctor._link(("127.0.0.1", port))
    assert finding.state == "bad"
    assert f"doctor --listen {port}" in finding.advice


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "node1"], "expected HOST:PORT. Try --to node1:29500."),
        (["--to", "node1:x"], "x is no port"),
        (["--listen", "99999"], "99999 is no port"),
        (["--listne", "1"], "Try doctor --to"),
    ],
)
def test_wrong_words_of_doctor_are_refused(words, message):
    with pytest.raises(PlanError) as refused:
        doctor.run(words)
    assert message in str(refused.value).replace("doctor, doctor --listen 29500, ", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for its clock")
def test_the_kernel_is_asked_for_its_clock():
    state = clock_state()
    assert state is not None
    assert state.error_s >= 0


@pytest.mark.distributed
def test_two_ranks_are_asked_what_torch_is_and_how_fast_they_talk():
    said = doctor._probe(world=2)
    assert "gloo yes" in said["build"]
    (link, *_) = said["links"]
    assert (link["backend"], link["ranks"]) == ("gloo", 2)
    assert link["latency_s"] > 0
    assert link["bytes_per_s"] > 1e6
    assert said["cpu_flops"] > 1e8


def test_products_are_of_random_numbers():
    multiply = torch.mm
    with mock.patch.object(torch, "mm", side_effect=multiply) as multiplied:
        assert link_probe.product_flops(torch.device("cpu"), torch.float32) > 0
    for call in multiplied.call_args_list:
        assert all(len(factor.unique()) > 200 for factor in call.args)


def test_each_of_two_ranks_takes_its_gpu_before_it_waits_for_the_other():
    calls = mock.Mock()
    with (
        emulated_device(),
        mock.patch.object(link_probe, "TCPStore"),
        mock.patch.object(torch.cuda, "set_device", calls.set_device),
        mock.patch.multiple(
            dist, init_process_group=mock.Mock(), destroy_process_group=mock.Mock(),
            barrier=calls.barrier, send=mock.Mock(), recv=mock.Mock(),
        ),
    ):  # fmt: skip
        assert "error" not in link_probe._link("nccl", 0, 2, 1, CUDA)
    assert calls.mock_calls[:2] == [mock.call.set_device(CUDA), mock.call.barrier()]
