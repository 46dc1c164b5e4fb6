"""Ranks that do not come, and ports that are taken: who is named."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from launcher.processes.failure import raised
from launcher.processes.store import store_served
from strategies.errors import PlanError, RunError
from strategies.runtime.messages.joining import connecting, gpu_backend, join, ranks_gpus

HOST = socket.gethostname()


@pytest.fixture
def port(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "FOLDPIPE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def joined(rank: int, port: int, *, world_size: int, timeout_s: float):
    return join(
        rank=rank, world_size=world_size, address="127.0.0.1", port=port, timeout_s=timeout_s
    )


def test_ranks_that_are_all_there_share_a_store(port):
    stores = {}

    def come(rank: int) -> None:
        stores[rank], hosts = joined(rank, port, world_size=2, timeout_s=120)
        assert hosts == {0: HOST, 1: HOST}

    other = threading.Thread(target=come, args=(1,))
    other.start()
    come(0)
    other.join()
    stores[1].set("word", "spoken")
    assert stores[0].get("word") == b"spoken"


def test_the_ranks_that_have_not_come_are_named(port):
    found = {}

    def come() -> None:
        with pytest.raises(RunError) as caught:
            joined(2, port, world_size=4, timeout_s=1.0)
        found[2] = str(caught.value)

    other = threading.Thread(target=come)
    begin = time.monotonic()
    other.start()
    with pytest.raises(RunError) as caught:
        joined(0, port, world_size=4, timeout_s=1.0)
    other.join()
    assert time.monotonic() - begin < 1 + 20
    message = (
        f"ranks 1, 3 have not come within 1 s (cluster.timeout_s); here are ranks 0, 2 on {HOST}"
    )
    assert (str(caught.value), found[2]) == (message, message)


def test_a_rank_0_that_has_not_come_is_named(port):
    begin = time.monotonic()
    with pytest.raises(RunError) as caught:
        joined(1, port, world_size=2, timeout_s=1.0)
    assert time.monotonic() - begin < 1 + 20
    assert str(caught.value).startswith(
        "rank 0 has not come within 1 s (cluster.timeout_s): nobody answers at "
        f"127.0.0.1:{port}, where it keeps the list of ranks ("
    )
    assert str(caught.value).endswith(f"). Rank 1 on {HOST} is here.")


def test_the_holder_of_a_port_that_is_taken_is_named(port):
    with socket.create_server(("0.0.0.0", port)):
        begin = time.monotonic()
        with pytest.raises(PlanError) as caught:
            joined(0, port, world_size=2, timeout_s=120)
        assert time.monotonic() - begin < 60
    assert str(caught.value).startswith(
        f"port {port} on {HOST}, where the ranks are to meet, is taken by process {os.getpid()} ("
    )
    assert str(caught.value).endswith(
        "try another port: MASTER_PORT, --master-port, cluster.master."
    )


def test_a_store_that_the_parent_keeps_is_used(monkeypatch, port):
    monkeypatch.setenv("FOLDPIPE_STORE", "parent")
    with store_served() as there:
        store, hosts = joined(0, there, world_size=1, timeout_s=5)
        store.set("word", "spoken")
        assert hosts == {0: HOST}


# --------------------------------------------------------------------- GPUs and the backend of auto


def test_ranks_compare_the_gpus_that_they_see_by_uuid(port, monkeypatch):
    # Each process sees one GPU and calls it cuda:0.
    gpus = {"MainThread": "GPU-a", "other": "GPU-b"}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=gpus[threading.current_thread().name]),
    )
    found = {}
    stores = []  # rank 0's serves the list until both have read it

    def come(rank: int) -> None:
        store, _ = joined(rank, port, world_size=2, timeout_s=120)
        stores.append(store)
        found[rank] = ranks_gpus(store, torch.device("cuda", 0), rank=rank, world_size=2)

    other = threading.Thread(target=come, args=(1,), name="other")
    other.start()
    come(0)
    other.join()
    assert found == {0: ["GPU-a", "GPU-b"], 1: ["GPU-a", "GPU-b"]}


def test_only_ranks_that_share_a_gpu_talk_through_host_memory(caplog):
    assert gpu_backend(["GPU-a", "GPU-b"], rank=0) == "nccl"
    assert not caplog.text
    assert {gpu_backend(["GPU-a", "GPU-b", "GPU-a"], rank=rank) for rank in range(3)} == {"shared"}
    told = "shared (through the memory of the GPU), because 3 ranks share 2 GPUs and NCCL needs"
    assert caplog.text.count(told) == 1


def test_a_connection_that_breaks_at_the_start_names_both_causes():
    gloo = "[pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
    with pytest.raises(RunError) as told, connecting():
        raise RuntimeError(gloo)
    first = f"a connection to another rank broke while ranks connected ({gloo}): another rank "
    assert str(told.value).startswith(first)
    assert "another process has connected to a port of gloo's in a rank's place" in str(told.value)
    assert raised(0, told.value).lost  # A rank that says why it ended is named before this one.
    with pytest.raises(RuntimeError, match="Too many open files"), connecting():
        raise RuntimeError("pipe2() failed: Too many open files")
