"""``compile=true`` from the command line: what is refused, before anything starts."""

from __future__ import annotations

import pytest

from tests.launcher.command_line import launch_here


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["schedule=zb_h1", "pp=2"], "Try schedule=1f1b, which does not split them, or compile="),
        (["mode=validate", "schedule=zb_v", "pp=2"], "compile=true with schedule=zb_v: "),
        (["schedule.split_backward=true"], "Try schedule.split_backward=false, or compile=false."),
    ],
)
def test_split_backwards_are_refused(words, fix, tmp_path):
    run = launch_here(["compile=true", *words], tmp_path)
    assert run.code == 2
    assert run.errors.startswith("error: compile=true with ")
    assert fix in run.errors
    assert len(run.errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = launch_here(["compile=true", "trainer.accelerator=cpu"], tmp_path)
    assert run.code == 2
    assert "torch.compile needs CXX=no-such-compiler on this machine" in run.errors
    assert "or use compile=false." in run.errors


def test_generated_code_is_not_asked_of_a_simulation(tmp_path):
    words = ["mode=simulate", "costs=uniform", "schedule=zb_h1", "pp=2", "compile=true"]
    assert launch_here(words, tmp_path).assert_done().result["makespan"] > 0
