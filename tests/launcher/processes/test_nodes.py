"""How ranks lie on nodes, and what is said when they cannot."""

from __future__ import annotations

import re

import pytest

from launcher.config import LaunchConfig, from_dict
from launcher.processes.nodes import Nodes, asked_world, check_variables, node_commands, plan_nodes
from strategies.errors import PlanError
from strategies.runtime.messages.mesh import Coordinates


def config(cluster: dict[str, object], **top: object) -> LaunchConfig:
    return from_dict({**top, "cluster": cluster})


def test_a_pipeline_crosses_nodes_as_seldom_as_it_can():
    nodes = plan_nodes(config({"nodes": 2}, pp=4, tp=2), dp=2)
    assert nodes.describe() == [
        "node 0: ranks 0-7, pp_ranks 0-1",
        "node 1: ranks 8-15, pp_ranks 2-3",
    ]
    assert nodes.note() is None
    # The line agrees with where the runtime puts a rank.
    for rank in range(16):
        where = Coordinates.of(rank, pp=4, dp=2, tp=2)
        assert where.pp_rank // 2 == rank // nodes.ranks_each


def test_sharers_on_two_nodes_are_noted():
    note = plan_nodes(config({"nodes": 2}, pp=1, tp=4), dp=1).note()
    assert note is not None
    assert "tp=4 shares matrices between nodes of 2 ranks" in note


def test_of_many_nodes_the_first_and_the_last_are_shown():
    assert [line.split(":")[0] for line in Nodes(100, 1, tp=1, dp=1).describe()] == [
        "node 0", "node 1", "node 99",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "top", "message"),
    [
        ({"nodes": 3}, {"pp": 4}, "spread evenly over cluster.nodes=3. Try cluster.nodes=2."),
        ({"nodes": 9}, {"pp": 4}, "spread evenly over cluster.nodes=9. Try cluster.nodes=4."),
        (
            {"name": "slurm", "nodes": 2, "gpus_per_node": 8},
            {"pp": 4},
            "= 4 ranks do not fill cluster.nodes=2 \\* cluster.gpus_per_node=8 = 16 GPUs, one "
            "rank each. Try dp=4, or cluster.nodes=1 cluster.gpus_per_node=4.",
        ),
        (
            {"name": "slurm", "nodes": 3, "gpus_per_node": 2},
            {"pp": 4},
            "Try cluster.nodes=2, or",
        ),
    ],
)
def test_uneven_nodes_are_refused_with_numbers_that_work(cluster, top, message):
    with pytest.raises(PlanError, match=message):
        plan_nodes(config(cluster, **top), dp=1)


def test_auto_fills_the_cluster(monkeypatch):
    assert asked_world(config({})) is None
    assert asked_world(config({"name": "slurm", "nodes": 2, "gpus_per_node": 4})) == 8
    with pytest.raises(PlanError, match=r"Try cluster\.gpus_per_node=8, or dp=2"):
        asked_world(config({"name": "slurm"}))
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert asked_world(config({"name": "torchrun"})) == 6


def test_every_node_gets_its_command():
    words = ["pp=4", "model.layers=4", "mode=validate", "cluster.nodes=2", "data.path='a b'"]
    commands = node_commands(Nodes(2, 2, tp=1, dp=1), words, master="head:1234")
    common = (
        "--nproc-per-node=2 --rdzv-backend=static --master-addr=head --master-port=1234 "
        "-m launcher cluster=torchrun pp=4 model.layers=4 'data.path='\"'\"'a b'\"'\"''"
    )
    assert commands == [
        f"python -m torch.distributed.run --nnodes=2 --node-rank={node} {common}" for node in (0, 1)
    ]


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("GLOO_SOCKET_IFNAME=eth99", "this machine has no interface eth99, only "),
        ("GLOO_SOCKET_IFNAME=lo,wlan7", "no interface wlan7"),
        ("TORCH_DISTRIBUTED_DEBUG=verbose", "torch knows OFF, INFO, DETAIL. Try "),
        ("TORCH_LOGS=+dynamoo", "no log called dynamoo. Did you mean dynamo"),
    ],
)
def test_variables_that_would_end_ranks_are_refused_before_they_start(variable: str, said: str):
    name, _, value = variable.partition("=")
    with pytest.raises(PlanError, match=re.escape(said)):
        check_variables({name: value})


@pytest.mark.parametrize(
    "variable",
    ["GLOO_SOCKET_IFNAME=lo", "TORCH_DISTRIBUTED_DEBUG=info", "TORCH_LOGS=+dynamo,-guards,logging"],
)
def test_variables_that_ranks_understand_stay(variable: str):
    name, _, value = variable.partition("=")
    check_variables({name: value})
