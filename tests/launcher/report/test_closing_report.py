"""What a training run ends with fits one screen, whatever the run was."""

import re
import shlex
from pathlib import Path

import pytest

from launcher.config import from_dict
from launcher.config.pipeline import QUICK
from launcher.report.closing_report import closing_lines
from launcher.report.predicted import peak_mapping, predict, predicted_mapping
from launcher.resolve import resolve

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path("/runs/1")
MEASURED = {
    "num_parameters": 1_246_848,
    "steps": 60,
    "loss_first": 5.44624,
    "loss_last": 2.96701,
    "val_loss": 3.71142,
    "step_time_s": 0.07759,
    "tokens_per_s": 6598.6,
    "mfu": 0.2752,
    "predicted_step_time_s": 0.06554,
    "measured_makespan_s": 0.07448,
    "measured_bubble_ratio": 0.3008,
    "measured_exposed_grad_reduce_s": 0.0,
    "predicted_peak_memory_bytes": [18_971_648, 15_065_088],
    "measured_peak_memory_bytes": [73_506_816, 68_833_280],
    "measured_memory_kind": "resident_growth",
    "skipped_steps": 0,
    "restarts": 0,
    "checkpoint": str(Path("outputs/1/checkpoints/step-00000060.ckpt").absolute()),
}

# The machine of that run, as it was measured before.
MACHINE = {
    "name": QUICK,
    "peak_flops": 1.01351e11,
    "efficiency": 0.71141,
    "memory_bandwidth": 1.0798e10,
    "intra_bandwidth": 3.9335e9,
    "intra_latency_s": 0.0,
    "unit_overhead_s": 1.8649e-4,
    "stage_overhead_s": 2.6617e-4,
    "step_overhead_s": 2.2694e-3,
    "measured_on": "two cores",
    "cores": 2,
}
ASKED = {
    "pp": 2,
    "model": {"kv_heads": 2, "ffn": 384},
    "trainer": {"accelerator": "cpu"},
    "hardware": MACHINE,
}


def closing(words=(), folder=FOLDER, **figures):
    """The screen of a run; ``words`` as ``{"pp": 2}``."""
    run = resolve(from_dict(ASKED | dict(words)))
    common = predicted_mapping(run, predict(run)[1]) | peak_mapping(run.config)
    return closing_lines(run, folder, common | MEASURED | figures)


def test_it_is_what_the_page_about_the_first_run_shows(tmp_path):
    page = (ROOT / "docs" / "start" / "first-run.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(trained .*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- pp=2\n")
    lines = closing(folder=tmp_path)
    assert lines[-1] == f"files: {tmp_path}"
    assert [*lines[:-1], "files: /runs/1"] == shown.splitlines()


UNKNOWN = dict.fromkeys(MEASURED) | {"steps": 60}
WORST = {
    "val_loss": None,
    "skipped_steps": 12,
    "restarts": 3,
    "measured_exposed_grad_reduce_s": 0.01,
}


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"pp": 4, "dp": 4, "schedule": {"name": "interleaved_1f1b"}},
        {"dp": 2, "costs": {"name": "uniform"}},
        {"model": {"name": "n" * 90}, "dp": 2, "recompute": {"name": "mario"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("figures", [{}, WORST, UNKNOWN], ids=["all", "bad", "no"])
def test_it_fits_24_lines_of_80_columns(words, figures):
    lines = closing(words, **figures)
    assert len(lines) <= 23  # and the shell's own
    assert all(len(line) <= 80 and "\n" not in line and "None" not in line for line in lines), lines


def test_a_run_without_validation_and_with_losses_says_so():
    text = "\n".join(closing(**WORST))
    assert "no val_loss in 60 steps (trainer.val_check_interval=30)" in text
    assert "12 steps were left out" in text
    assert "started again 3 times" in text


def test_words_that_were_typed_come_again_and_too_many_are_left_to_the_user(tmp_path):
    (tmp_path / ".hydra").mkdir()
    kept = tmp_path / ".hydra" / "overrides.yaml"
    kept.write_text("- pp=2\n- trainer.max_steps=60\n- optimizer.lr=0.01\n- trainer.resume=x\n")
    text = "\n".join(closing(folder=tmp_path))
    assert (
        "go on      python -m launcher pp=2 optimizer.lr=0.01 trainer.max_steps=120 \\\n"
        "             trainer.resume=auto\n" in text
    )
    kept.write_text("".join(f"- model.hidden={i}{'0' * 60}\n" for i in range(4)))
    text = "\n".join(closing(folder=tmp_path))
    assert "go on      add trainer.max_steps=120 trainer.resume=auto\n" in text
    kept.write_text(kept.read_text() + "- trainer.resume=auto\n")
    text = "\n".join(closing(folder=tmp_path))
    assert "go on      add trainer.max_steps=120\n" in text
    assert "compare    add -m schedule=1f1b,zb_h1" in text
    assert all(len(line) <= 80 for line in text.splitlines()[:-1])


def test_a_checkpoint_that_auto_would_not_find_is_named(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- pp=2\n- hydra.run.dir=/my runs/1\n")
    lines = closing(folder=tmp_path, checkpoint="/my runs/1/checkpoints/step-00000060.ckpt")
    (line,) = [line for line in lines if line.startswith("go on")]
    words = shlex.split(line)
    assert words[-1] == "trainer.resume='/my runs/1/checkpoints/step-00000060.ckpt'"


def test_only_runs_that_others_can_stand_in_for_are_compared():
    assert not any("compare" in line for line in closing({"recompute": {"name": "mario"}}))
    assert not any("compare" in line for line in closing({"pp": 1}))
    assert any("schedule=gpipe,1f1b" in line for line in closing({"schedule": {"name": "gpipe"}}))
