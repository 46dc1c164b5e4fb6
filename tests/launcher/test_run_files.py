"""What a run leaves in its folder, for people, scripts and dashboards."""

from __future__ import annotations

import itertools
import json
import math
import re
import stat
import subprocess
import sys

import pytest

from tests.launcher.runs import MODEL, environment, launch, read_metrics, read_result

ALL_MODES = (
    "status", "mode", "schedule", "pp", "dp", "tp", "ep", "expert_tp", "sequence_parallel",
    "stages_per_rank", "num_microbatches", "recompute", "overlap", "hardware", "seed",
    "versions", "group", "group_choice", "split_backward",
)  # fmt: skip
SIMULATED = (
    "makespan", "period", "bubble_ratio", "lower_bound", "binding_bound", "bound_gap",
    "gap_to_ideal", "peak_activations", "peak_memory_bytes", "exposed_grad_reduce",
    "weight_copies", "synchronous", "costs", "time_unit", "lb1", "lb1_rank", "lb2", "lb2_rank",
    "recomputed", "memory_breakdown", "predicted_memory_breakdown", "throughput", "num_messages",
)  # fmt: skip
TRAINED = (
    "world_size", "num_parameters", "num_active_parameters", "steps", "loss_first", "loss_last",
    "val_loss", "step_time_s",
    "tokens_per_s", "mfu", "predicted_step_time_s", "measured_bubble_ratio",
    "measured_exposed_grad_reduce_s", "peak_memory_bytes", "predicted_peak_memory_bytes",
    "measured_peak_memory_bytes", "measured_memory_kind", "checkpoint", "measured_makespan_s",
    "measured_period_s",
    "measured_norm_sync_s",
    "model_flops_per_step", "skipped_steps", "flush_repairs", "restarts",
    "peak_flops", "peak_format",
)  # fmt: skip
PICTURES = ("schedule.txt", "schedule.csv", "timeline.html", "trace.json")


def panels(folder) -> list[str]:
    return re.findall("<section><h2>(.*?)</h2>", (folder / "timeline.html").read_text())


@pytest.mark.distributed
class TestATrainingRun:
    def test_says_what_it_does_and_where_its_files_are(self, trained):
        assert trained.errors == ""
        lines = trained.output.splitlines()
        assert "12,112 parameters" in lines[0]
        assert "1f1b on 2 ranks (pp=2 dp=1), 4 microbatches of 4 x 16 tokens" in lines[0]
        assert sum(line.startswith("step ") and "loss" in line for line in lines) >= 20
        assert lines[-1] == f"files: {trained.folder}"

    def test_ends_with_one_screen(self, trained):
        closing = trained.output[trained.output.index("\ntrained tiny") + 1 :].splitlines()
        assert len(closing) <= 23
        assert all(len(line) <= 80 for line in closing[:-1])
        result = trained.result
        assert f"loss     {result['loss_last']:.4f}, from {result['loss_first']:.4f}" in closing[3]
        assert f"validation {result['val_loss']:.4f}" in closing[3]
        assert "above the bound" in (trained.folder / "report.txt").read_text()
        assert not any("above the bound" in line for line in closing)

    def test_leaves_every_file_of_the_table(self, trained):
        left = sorted(path.name for path in trained.folder.iterdir())
        assert left == sorted(
            [".hydra", "checkpoints", "logs", "metrics.csv", "report.txt", "resolved.json",
             "result.json", *PICTURES]
        )  # fmt: skip
        assert trained.folder.parents[1] == trained.cwd / "outputs"
        # The home of these runs lies there, too, and in it a cache of the user's own.
        assert {path.name for path in trained.cwd.iterdir()} <= {"outputs", ".cache"}

    def test_leaves_nothing_that_others_can_read(self, trained):
        for path in trained.folder.rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
        assert stat.S_IMODE(trained.folder.stat().st_mode) == 0o700

    def test_has_a_quiet_log_per_rank(self, trained):
        logs = sorted((trained.folder / "logs").iterdir())
        assert [log.name for log in logs] == ["rank_00000.log", "rank_00001.log"]
        for log in logs:
            assert "Traceback" not in log.read_text()
            assert "Warning" not in log.read_text()

    def test_has_a_checkpoint_per_interval_and_one_at_the_end(self, trained):
        left = sorted(path.name for path in (trained.folder / "checkpoints").iterdir())
        assert left == ["step-00000010.ckpt", "step-00000020.ckpt"]

    def test_has_every_figure_in_its_result(self, trained):
        result = trained.result
        assert list(result)[: len(ALL_MODES)] == list(ALL_MODES)
        assert set(result) == {*ALL_MODES, *SIMULATED, *TRAINED}
        expected = {
            "status": "done", "mode": "train", "schedule": "1f1b", "pp": 2, "dp": 1, "tp": 1,
            "stages_per_rank": 1, "num_microbatches": 4, "recompute": "none", "seed": 3,
            "overlap": "grad_reduce", "weight_copies": 1, "synchronous": True, "time_unit": "s",
            "costs": "analytic", "world_size": 2, "num_parameters": 12112, "steps": 20,
        }  # fmt: skip
        assert {key: result[key] for key in expected} == expected
        assert result["checkpoint"] == str(trained.folder / "checkpoints" / "step-00000020.ckpt")
        assert result["versions"]["python"] == sys.version.split()[0]
        assert result["versions"]["torch"].startswith("2.")

    def test_has_figures_that_agree_with_each_other(self, trained):
        result = trained.result
        rows = read_metrics(trained.folder)
        assert result["loss_first"] == pytest.approx(rows[0]["train_loss"])
        assert result["loss_last"] == pytest.approx(rows[-1]["train_loss"])
        assert result["val_loss"] == pytest.approx(rows[15]["val_loss"])
        times = sorted(row["step_time_s"] for row in rows[1:])
        assert result["step_time_s"] == pytest.approx(times[9])
        assert result["tokens_per_s"] == pytest.approx(4 * 4 * 16 / times[9])
        peak = 2 * 9.6e10  # two ranks of tests/calibration.json
        assert (result["peak_flops"], result["peak_format"]) == (9.6e10, "fp64")
        assert "% of 96 GFLOPS fp64 per rank" in trained.output
        assert result["mfu"] == pytest.approx(result["model_flops_per_step"] / times[9] / peak)
        assert result["predicted_step_time_s"] == result["period"]
        assert 0 < result["measured_bubble_ratio"] < 1
        assert result["measured_exposed_grad_reduce_s"] == 0  # a single replica
        assert len(result["peak_memory_bytes"]) == len(result["predicted_peak_memory_bytes"]) == 2
        assert all(value > 0 for value in result["peak_memory_bytes"])
        assert result["bound_gap"] == pytest.approx(result["makespan"] / result["lower_bound"] - 1)

    def test_measures_above_what_it_predicted(self, trained):
        assert panels(trained.folder) == ["predicted", "measured"]
        trace = json.loads((trained.folder / "trace.json").read_text())
        names = [
            event["args"]["name"]
            for event in trace["traceEvents"]
            if event.get("name") == "process_name"
        ]
        assert any("predicted" in name for name in names)
        assert any("measured" in name for name in names)

    def test_has_the_schedule_as_text_and_as_rows(self, trained):
        assert (trained.folder / "schedule.csv").read_text() == (
            "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
        )
        text = (trained.folder / "schedule.txt").read_text()
        assert text.isascii()
        assert len([line for line in text.splitlines() if line.startswith("rank ")]) == 2

    def test_has_a_row_of_metrics_per_step(self, trained):
        rows = read_metrics(trained.folder)
        assert [row["step"] for row in rows] == list(range(1, 21))
        for name in ("epoch", "train_loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", "mfu",
                     "peak_memory_bytes_max"):  # fmt: skip
            assert all(row[name] is not None and math.isfinite(row[name]) for row in rows), name
        assert all(0 < row["bubble_ratio"] < 1 for row in rows)
        assert all(row["grad_norm"] > 0 for row in rows)
        # The limit of 1.0 is applied after the norm has been taken.
        assert max(row["grad_norm"] for row in rows) > 1

    def test_notes_the_rate_that_each_step_used(self, trained):
        rates = [row["lr"] for row in read_metrics(trained.folder)]
        warm_up = [0.01 * step / 10 for step in range(1, 11)]
        assert rates[:10] == pytest.approx(warm_up)
        assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
        assert rates[-1] >= 0.1 * 0.01

    def test_notes_a_validation_at_the_step_after_which_it_ran(self, trained):
        rows = read_metrics(trained.folder)
        validated = [row["step"] for row in rows if row["val_loss"] is not None]
        assert validated == [8, 16]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    words = [
        *MODEL, "trainer.max_steps=7", "trainer.log_every_n_steps=3",
        "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=8",
        "trainer.limit_val_batches=1", "tracking=none",
    ]  # fmt: skip
    return launch(words, tmp_path_factory.mktemp("sparse")).assert_done()


@pytest.mark.distributed
class TestRowsThatAreNotLogged:
    def test_rows_follow_the_logging_interval(self, sparse):
        rows = read_metrics(sparse.folder)
        trained = [row["step"] for row in rows if row["train_loss"] is not None]
        assert trained == [3, 6]
        assert all(row["grad_norm"] and row["bubble_ratio"] is not None for row in rows if
                   row["train_loss"] is not None)  # fmt: skip

    def test_a_validation_between_them_is_not_lost(self, sparse):
        # 8 batches are 4 steps, a step that is not logged.
        rows = read_metrics(sparse.folder)
        assert [row["step"] for row in rows if row["val_loss"] is not None] == [4]

    def test_there_are_no_files_of_a_tracker(self, sparse):
        left = sorted(path.name for path in sparse.folder.iterdir())
        assert left == sorted(
            [".hydra", "checkpoints", "logs", "metrics.csv", "report.txt", "resolved.json",
             "result.json", *PICTURES]
        )  # fmt: skip

    def test_steps_are_those_of_the_optimizer(self, sparse):
        assert sparse.result["steps"] == 7
        assert sparse.result["checkpoint"].endswith("step-00000007.ckpt")
        tokens = 2 * 16 * 2
        result = sparse.result
        assert result["tokens_per_s"] == pytest.approx(tokens / result["step_time_s"])


class TestASimulation:
    def test_leaves_pictures_and_figures_only(self, simulated):
        left = sorted(path.name for path in simulated.folder.iterdir())
        assert left == sorted([".hydra", "result.json", *PICTURES])
        result = simulated.result
        assert set(result) == {*ALL_MODES, *SIMULATED}
        assert (result["status"], result["mode"]) == ("done", "simulate")
        assert (result["costs"], result["time_unit"]) == ("uniform", "F")
        assert result["peak_memory_bytes"] is None

    def test_has_the_figures_of_the_formula(self, simulated):
        # Interleaved: (P-1)(F+B)/V of bubble in front of M(F+B) of work; P=4, V=2, M=8, F+B=3.
        result = simulated.result
        assert result["makespan"] == pytest.approx(8 * 3 + 3 * 3 / 2)
        assert result["bubble_ratio"] == pytest.approx(4.5 / 28.5)

    def test_shows_the_timeline_and_its_figures(self, simulated):
        assert simulated.errors == ""
        lines = simulated.output.splitlines()
        # The picture goes over several blocks of lines where the terminal is too narrow.
        assert {line[:6] for line in lines if line.startswith("rank ")} == {
            f"rank {rank}" for rank in range(4)
        }
        assert any("bubble ratio" in line and "15.8" in line for line in lines)
        assert lines[-1] == f"files: {simulated.folder}"

    def test_has_one_panel(self, simulated):
        assert panels(simulated.folder) == ["predicted"]
        json.loads((simulated.folder / "trace.json").read_text())

    @pytest.mark.parametrize(
        "words",
        [
            ["costs=analytic"],
            pytest.param(["costs=uniform"], marks=pytest.mark.full),
            pytest.param(["model=gpt3_13b"], marks=pytest.mark.full),
        ],
    )
    def test_needs_no_torch(self, words, tmp_path):
        program = (
            "import sys\n"
            "from launcher.__main__ import main\n"
            "code = main(sys.argv[1:])\n"
            "heavy = {'torch', 'lightning', 'wandb', 'transformers', 'numpy'} & set(sys.modules)\n"
            "sys.exit(f'{code} {sorted(heavy)}')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "mode=simulate", "pp=4", *words],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == "0 []\n"


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    words = [*MODEL, "pp=2", "dp=2", "mode=validate", "optimizer=sgd", "generate.prompt='a b'"]
    return launch(words, tmp_path_factory.mktemp("validated")).assert_done()


class TestAValidation:
    def test_starts_nothing(self, validated):
        assert "valid: nothing was started" in validated.output
        left = sorted(path.name for path in validated.folder.iterdir())
        assert left == sorted([".hydra", "result.json", *PICTURES])

    def test_estimates_the_memory_of_each_rank(self, validated):
        for rank in (0, 1):
            (line,) = re.findall(f"^rank {rank}: .*GiB.*$", validated.output, re.MULTILINE)
            assert f"stage {rank}: " in line
            total = float(re.search("memory ([0-9.e-]+)", line)[1])
            parts = re.findall("([a-z]+) ([0-9.e-]+)", line[line.index("(") :])
            assert {"parameters", "gradients", "optimizer", "activations"} <= dict(parts).keys()
            assert total == pytest.approx(sum(float(part) for _, part in parts), rel=1e-2)
            assert validated.result["peak_memory_bytes"][rank] == pytest.approx(
                total * 2**30, rel=1e-3
            )
        assert len(validated.result["peak_memory_bytes"]) == 2
        assert all(value > 0 for value in validated.result["peak_memory_bytes"])

    def test_prints_a_command_that_a_shell_takes(self, validated):
        (command,) = re.findall("^command on this machine: (.*)$", validated.output, re.MULTILINE)
        command = command.replace("python -m", f"{sys.executable} -m", 1)
        again = subprocess.run(
            f"{command} mode=validate --cfg job -p generate.prompt",
            shell=True,
            cwd=validated.cwd,
            env=environment(validated.cwd),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (again.returncode, again.stderr) == (0, "")
        assert "a b" in again.stdout
        assert "mode=" not in command.split("launcher", 1)[1]
        assert "optimizer=sgd" in command

    def test_has_the_figures_of_the_simulation(self, validated):
        assert set(read_result(validated.folder)) == {*ALL_MODES, *SIMULATED}
