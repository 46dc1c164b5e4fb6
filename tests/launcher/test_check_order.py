from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from strategies.referee import examine
from tests.launcher.command_line import launch_here, refused_here
from tests.strategies.referee.orders import CROSSED, FACING, TURNED

DIR = "hydra.run.dir=run"


def _file(folder: Path, text: str) -> str:
    (folder / "theirs.csv").write_text(text)
    return "theirs.csv"


def test_an_order_that_deadlocks_ends_with_1_its_ring_and_a_repaired_file(tmp_path):
    done = launch_here(["check", _file(tmp_path, FACING), DIR], tmp_path)
    assert done.code == 1, done.errors
    lines = done.output.splitlines()
    assert lines[0] == "theirs.csv: 2 ranks, 2 stages, 2 microbatches, with its messages"
    assert "> one_queue   deadlocks" in lines and "  per_edge    runs" in lines
    assert "[0B0]" in done.output and "which queues behind 0SEND_F1>1" in done.output
    assert "it runs with messages placed by our lowering: " in done.output
    assert any(line.startswith("  1f1b              100% alike   the same time") for line in lines)
    assert examine((tmp_path / "run" / "repaired.csv").read_text()).runs
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["mode"], result["runs"], result["semantics"]) == ("check", False, "one_queue")
    assert result["verdicts"]["buffered"] == "runs"
    assert (result["repair_placed"], result["repair_ungrouped"]) == (True, False)
    assert result["alternatives"][0]["likeness"] == 1.0
    assert result["makespan"] > 0
    assert (tmp_path / "run" / "timeline.html").is_file()


def test_an_order_that_runs_ends_with_0(tmp_path):
    words = ["mode=check", f"schedule.file={_file(tmp_path, FACING)}", "check.grouped=true"]
    done = launch_here([*words, "costs=uniform", "costs.backward=2.5", DIR], tmp_path)
    assert done.code == 0, done.errors
    assert "it runs: every instruction and message ends, whatever the durations" in done.output
    assert not (tmp_path / "run" / "repaired.csv").exists()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["time_unit"], result["repair_placed"]) == ("F", None)


def test_messages_taken_for_each_other_are_told(tmp_path):
    done = launch_here(["check", _file(tmp_path, CROSSED), DIR], tmp_path)
    assert done.code == 1
    assert "is sent as 0SEND_F0>1 and received as 1RECV_F1<0" in done.output


def test_an_order_without_messages_is_judged_by_its_computations(tmp_path):
    done = launch_here(["check", _file(tmp_path, "1F0,0F0,0B0,1B0\n"), DIR], tmp_path)
    assert done.code == 1
    assert "without messages: computations alone" in done.output
    assert "it deadlocks:" in done.output
    assert "1F0 on rank 0 needs 0F0" in done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["runs"], result["repair_placed"]) == (False, None)
    assert not (tmp_path / "run" / "repaired.csv").exists()


def test_messages_around_computations_that_wait_for_each_other_are_not_placed_anew(tmp_path):
    done = launch_here(["check", _file(tmp_path, TURNED), DIR], tmp_path)
    assert done.code == 1, done.errors
    assert "its computations wait for each other: no place of its messages" in done.output
    assert not (tmp_path / "run" / "repaired.csv").exists()


def test_a_script_of_megatron_is_proven_priced_and_compared(tmp_path):
    (tmp_path / "pretrain.sh").write_text(
        "PP=2\ntorchrun pretrain_gpt.py --pipeline-model-parallel-size $PP --num-layers 8 \\\n"
        "  --micro-batch-size 1 --global-batch-size 4 --world-size 2 \\\n"
        "  --pipeline-model-parallel-layout 'Et|tt|tt|tttL'\n"
    )
    done = launch_here(["check", "pretrain.sh", DIR], tmp_path)
    assert done.code == 0, done.errors
    assert done.output.startswith("Megatron-LM's words:\n  interleaved 1F1B, 2 chunks, groups of 2")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["semantics"], result["framework"]) == ("per_edge", "Megatron-LM")
    assert examine((tmp_path / "run" / "read.csv").read_text()).program.num_microbatches == 4
    assert result["layers_per_stage"] == [1, 2, 2, 3]


def test_flags_alone_are_enough_and_their_groups_count(tmp_path):
    numbers = {"pipeline-model-parallel-size": 2, "micro-batch-size": 1, "global-batch-size": 4}
    flags = [word for flag, number in numbers.items() for word in (f"--{flag}", str(number))]
    assert launch_here(["check", *flags, DIR], tmp_path).code == 0
    alone = launch_here(["check", *flags, "check.grouped=false", "hydra.run.dir=two"], tmp_path)
    assert alone.code == 1 and "deadlocks" in alone.output


def test_a_configuration_of_torchtitan_is_checked_with_torchs_messages(tmp_path):
    (tmp_path / "t.toml").write_text(
        "[parallelism]\npipeline_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\n[training]\nlocal_batch_size = 4\n'
    )
    done = launch_here(["check", "t.toml", DIR], tmp_path)
    assert done.code == 0 and "interleaved_1f1b" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check"], "Try python -m launcher check theirs.csv."),
        (["check", "pp=2"], "Try python -m launcher check theirs.csv."),
        (["check", "nowhere.csv"], "schedule.file=nowhere.csv does not exist"),
        (["mode=check"], "Try schedule.file=theirs.csv."),
        (["check", "x.csv", "pp=3"], "Try without pp=3."),
        (["check", "x.csv", "schedule=zb_v"], "Try without schedule=zb_v."),
        (["check", "x.csv", "check.semantics=nccl"], "check.semantics"),
        (["mode=simulate", "check.grouped=true"], "check.grouped=true: this is about mode=check"),
        (["check", "--pipeline-model-parallel-size", "2"], "--micro-batch-size is not there"),
        (["check", "x.csv", "check.flags=--seed"], "x.csv is none"),
        (["check", "x.csv", "check.grouped=maybe"], "check.grouped"),
        (["check", "x.csv"], "x.csv, line 2, column 2: '1RECV_F' is not an instruction"),
        (["check", "short.csv"], "1RECV_F0"),
    ],
)
def test_what_cannot_be_checked_is_one_message(words, told, tmp_path, monkeypatch):
    (tmp_path / "x.csv").write_text("0F0,0SEND_F0,0RECV_B0,0B0\n,1RECV_F\n")
    (tmp_path / "short.csv").write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n")
    assert told in refused_here(words, tmp_path, monkeypatch)


def test_it_needs_no_torch(tmp_path):
    before = "torch" in sys.modules
    launch_here(["check", _file(tmp_path, FACING), DIR], tmp_path)
    assert ("torch" in sys.modules) == before
