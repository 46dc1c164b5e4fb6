"""planner.explain=[tp=2]: found shardings layer by layer, in words, as data and as a picture."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launcher.command_line import launch_here


def test_a_plan_is_explained_layer_by_layer_with_its_messages_and_what_lost(tmp_path: Path):
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
    assert "shardings found for tp=2 (O2" in done.output
    assert re.search(r"the model's own tensor_parallel_plan\(\) (takes|is as good)", done.output)
    page = (done.folder / "shardings.html").read_text()
    assert "<svg" in page
    assert "query" in page
