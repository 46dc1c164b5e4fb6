"""planner.explain=[tp=2]: found shardings layer by layer, in words and as data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.processes.rank_server import SHARED
from tests.launcher.command_line import launch_here
from tests.ranks.rank_server import rank_server_address


def test_a_plan_is_explained_layer_by_layer_with_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SHARED, rank_server_address())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [
        "mode=plan", "model.layers=2", "model.hidden=2048", "model.heads=16", "model.kv_heads=16",
        "model.ffn=8192", "model.sequence=1024", "model.vocab=8192", "planner.num_gpus=4",
        "planner.global_batch_size=16", "pp=2", "planner.explain=[tp=2]", "planner.top_k=1",
        "hardware=a100_80g",
    ]  # fmt: skip
    done = launch_here(words, tmp_path).assert_done()
    plan = done.result["tensor_plan"]
    styles = {row["pattern"]: row["style"] for row in plan["layers"]}
    for name in ("query", "key", "value"):
        assert styles[f"net.layers.*.attention.{name}"] == "column"
    assert styles["net.layers.*.attention.output"] == styles["net.layers.*.mlp.down"] == "row"
    assert plan["tp"] == 2
    assert plan["seconds"] <= plan["seconds_whole"] * (1 + 1e-9)
    assert plan["by_hand_seconds"] >= plan["seconds"] * (1 - 1e-9)
    assert "shardings found for tp=2 (microbatches of" in done.output
    assert re.search(r"the model's own tensor_parallel_plan\(\) (takes|is as good)", done.output)


@pytest.mark.full
def test_a_degree_over_which_nothing_is_worth_cutting_is_explained_beside_the_plan(tmp_path: Path):
    sizes = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 256,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    }  # fmt: skip
    (tmp_path / "mixtral").mkdir()
    (tmp_path / "mixtral" / "config.json").write_text(json.dumps(sizes))
    words = [
        "mode=plan", "model=hf", f"model.path={tmp_path / 'mixtral'}", "model.pretrained=false",
        "model.sequence=32", "hardware=a100_80g", "planner.num_gpus=4", "planner.explain=[tp=2]",
    ]  # fmt: skip
    done = launch_here(words, tmp_path).assert_done()
    assert "nothing is worth cutting over 2 ranks: tp=1 is as good" in done.output
    assert "MixtralExperts in network.layers.*.model.layers.*.mlp.experts has no" in done.output
    assert done.result["plans"][0]["tp"] == 1
    assert {row["style"] for row in done.result["tensor_plan"]["layers"]} == {"replicated"}
    plan = done.result["tensor_plan"]
    assert plan["seconds"] == plan["seconds_whole"]
