"""``recompute.*`` on the command line becomes what the compiler takes, or one message."""

from __future__ import annotations

import pytest

from launcher.config.pipeline import RecomputeConfig, recompute_policy
from strategies.errors import PlanError
from strategies.plan import Recompute
from tests.launcher.command_line import run_here


def test_layers_name_types_and_what_is_recomputed_in_them():
    config = RecomputeConfig(
        "selective", layers=("Mlp:activation", "A:attention+norm", "Head:none")
    )
    assert recompute_policy(config) == Recompute(
        "selective",
        layers=(("Mlp", ("activation",)), ("A", ("attention", "norm")), ("Head", ())),
    )


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("selective", "Mlp", r"recompute\.layers=\[Mlp\]: .* Try recompute\.layers=\[Mlp:act"),
        ("selective", "Mlp:gelu", r"gelu is none of matmul, .* Try recompute\.layers=\[Mlp:atten"),
        ("full", "Mlp:activation", "recompute=full. Try recompute=selective"),
    ],
)
def test_a_wrong_entry_is_named_with_its_remedy(name, entry, message):
    with pytest.raises(PlanError, match=message):
        recompute_policy(RecomputeConfig(name, layers=(entry,)))


def test_compiled_layers_cannot_recompute_operation_by_operation(tmp_path, monkeypatch):
    words = ["mode=validate", "compile=true", "recompute=selective"]
    done = run_here(words, tmp_path / "run", monkeypatch)
    done.assert_refused()
    assert "compile=true with recompute=selective" in done.errors
    assert "Try recompute=full, or compile=false." in done.errors


def test_one_loss_of_the_batch_leaves_the_order_to_nobody_else(tmp_path, monkeypatch):
    words = ["mode=simulate", "costs=uniform", "pp=2", "loss_over=batch"]
    done = run_here([*words, "recompute=mario"], tmp_path / "mario", monkeypatch)
    done.assert_refused()
    assert "loss_over=batch with recompute=mario" in done.errors
    done = run_here([*words, "plan=auto"], tmp_path / "auto", monkeypatch)
    done.assert_refused()
    assert "loss_over=batch puts all forwards before the first backward" in done.errors
    words = ["mode=plan", "costs=uniform", "loss_over=tokens", "planner.asynchronous=true"]
    done = run_here(words, tmp_path / "late", monkeypatch)
    done.assert_refused()
    assert "loss_over=tokens needs a flush" in done.errors


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "16-mixed"])
def test_sums_in_16_bits_are_of_16_bit_weights(precision, tmp_path, monkeypatch):
    words = ["mode=validate", "overlap.sum_dtype=bf16", f"trainer.precision={precision}"]
    done = run_here(words, tmp_path / "run", monkeypatch)
    done.assert_refused()
    assert f"overlap.sum_dtype=bf16 with trainer.precision={precision}" in done.errors
    assert "Try trainer.precision=bf16-true, or overlap.sum_dtype=fp32." in done.errors
    # What it offers is taken.
    for index, words in enumerate(
        (["overlap.sum_dtype=bf16", "trainer.precision=bf16-true"],
         ["overlap.sum_dtype=fp32", "trainer.precision=bf16-mixed"])
    ):  # fmt: skip
        done = run_here(["mode=validate", *words], tmp_path / str(index), monkeypatch)
        assert (done.code, done.errors, len(done.calls)) == (0, "", 1)
