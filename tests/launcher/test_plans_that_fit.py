"""What a plan says of step time and memory is what a simulation of its command says."""

from __future__ import annotations

import pytest

from launcher.compose.session import compose_checked, hydra_session, search_path
from launcher.planning.question import question
from launcher.planning.report import candidate_words
from launcher.report.predicted import memory_margin, memory_note, predict, rank_memory
from launcher.resolve import resolve
from strategies.planner.layout_search import search

BF16 = "trainer.precision=bf16-true"
FEW = [
    # The first plans needed 100 % of the card by the plan, and 120 % by its simulation.
    ("model=llama2_13b", "hardware=a100_80g", "planner.num_gpus=16", "pp=4"),
    ("model=llama2_7b", "hardware=v100_32g", "planner.num_gpus=16", "trainer.precision=16-mixed"),
    ("model=mixtral_8x7b", "hardware=h100", "planner.num_gpus=32", "pp=4"),
    ("model=gpt2_124m", "planner.num_gpus=4", "planner.memory_gb=2"),
]
MORE = [
    ("model=llama2_13b", "hardware=a100_80g", "planner.num_gpus=64"),
    ("model=gpt3_13b", "hardware=a100_40g", "planner.num_gpus=32"),
    ("model=gpt_moe_10b", "hardware=a100_40g", "planner.num_gpus=16"),
    ("model=deepseek_moe_16b", "hardware=h200", "planner.num_gpus=16"),
    ("model=llama2_7b", "hardware=a100_40g", "planner.num_gpus=8", "planner.memory_gb=100"),
    ("model=gpt3_1_6b", "hardware=a100_40g", "planner.num_gpus=4", "pp=4", "recompute=optimal"),
]


def listed(words):
    """Of each plan of a question: the words it prints, step time and bytes per rank."""
    typed = ["mode=plan", BF16, "planner.global_batch_size=64", *words]
    config = compose_checked([*search_path(None), *typed])[0]
    asked = question(config, {word.partition("=")[0] for word in typed})
    for plan in search(asked.problem, asked.space, top_k=3).plans:
        again = [word for word in (BF16, *words) if not word.startswith("planner.")]
        chosen = candidate_words(plan.candidate, asked)
        names = {word.partition("=")[0] for word in chosen}
        kept = [word for word in again if word.partition("=")[0] not in names]
        yield ["mode=simulate", *kept, *chosen], plan


def compare(words):
    with hydra_session():
        found = list(listed(words))
        assert found
        for command, plan in found:
            run = resolve(compose_checked([*search_path(None), *command])[0])
            _, metrics = predict(run)
            waits = run.config.trainer.waits_at_flush
            step = metrics.makespan if waits else metrics.period
            assert step == pytest.approx(plan.step_time_s), command
            assert tuple(held.total for held in rank_memory(run)) == plan.rank_bytes, command
            assert memory_note(run) is None, command
            says = run.config.hardware.context_gb > 0
            assert (memory_margin(run) is not None) == says, command


@pytest.mark.parametrize("words", FEW, ids=lambda words: words[0])
def test_each_plan_fits_as_its_simulation_has_it(words):
    compare(words)


@pytest.mark.full
@pytest.mark.parametrize("words", MORE, ids=lambda words: f"{words[0]} {words[1]}")
def test_each_plan_of_more_questions_does(words):
    compare(words)
