"""Lists of kernels agree with the model's FLOPs and parameters, and with how ranks share them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from launcher.compose.session import compose_checked, hydra_session, search_path
from launcher.report.predicted import ideal_step_s
from launcher.resolve import resolve
from launcher.workloads.loads import unit_loads
from launcher.workloads.unit_kernels import unit_works
from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import ElementSizes
from strategies.costs.kernels import Work
from strategies.simulator.engine import simulate
from tests.launcher.workloads.hf.test_hf_shape import CASES
from tests.launcher.workloads.presets import preset
from tests.tiny_models import shape_of, write_model


def flops(work: Work) -> float:
    products = (*work.products, *work.experts)
    return sum(p.flops for p in products) + (work.core.flops if work.core else 0.0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["llama2_7b", "gpt3_1_6b"])
def test_products_and_cores_are_the_flops_of_a_unit(name, tp):
    for load in unit_loads(replace(preset(name), layers=2), tp, 3):
        ((work, number),) = load.works
        assert number == 1
        assert flops(work) == pytest.approx(load.forward_flops)
        # But for norms and biases, a unit's weights are those of its products.
        assert work.weights == sum(p.columns * p.inner for p in work.products)


def test_experts_count_by_the_tokens_that_they_get():
    shape = replace(preset("deepseek_moe_16b"), layers=2)
    for tp in (2, 1):
        loads = unit_loads(shape, tp, 3)
        for load in loads:
            ((work, _),) = load.works
            assert flops(work) == pytest.approx(load.forward_flops, rel=1e-4)
    dense, sparse = (loads[index].works[0][0] for index in (2, 4))
    weights = sparse.weights + sum(p.columns * p.inner * p.batch for p in sparse.experts)
    assert weights > 7 * dense.weights
    assert flops(sparse) < 1.1 * flops(dense)


FREE = {
    "intra_bandwidth": 1e30, "inter_bandwidth": 1e30, "ring_bandwidth": 1e30,
    "intra_latency_s": 0.0, "inter_latency_s": 0.0, "ring_latency_s": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(("tp", "expert_tp"), [(1, False), (2, False), (2, True)])
def test_with_free_links_experts_on_more_ranks_take_less(tp, expert_tp):
    """Each rank was said to compute all experts, in products of few rows, whatever ep."""
    with hydra_session():
        card = compose_checked([*search_path(None), "hardware=h100", "mode=plan"])[0].hardware
    # 64 rows of each expert, which are no whole tile.
    shape = replace(preset("mixtral_8x7b"), layers=1, sequence=256)
    (load,) = (n for n in unit_loads(shape, tp, 1, expert_tp=expert_tp) if n.experts)
    sizes = ElementSizes(weight=2, activation=2, main=4)
    costs = AnalyticCosts(
        (load,), replace(card, **FREE), dp=8, tp=tp, sizes=sizes, number_format="bf16",
        expert_tp=expert_tp,
    )  # fmt: skip
    spread = [replace(costs, ep=ep) for ep in (1, 2, 4, 8)]
    for fewer, more in pairwise(spread):
        took, takes = fewer.passes.of(load), more.passes.of(load)
        assert all(after < before for before, after in zip(took, takes, strict=True))
        assert more.held(load) < fewer.held(load)
        # The fullest rank computes more; its weights are those of all.
        fullest = replace(more, imbalance=1.5)
        assert all(a < b for a, b in zip(takes, fullest.passes.of(load), strict=True))
        assert fullest.held(load) == more.held(load)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2 with dropout"])
def test_layers_of_the_library_are_both_halves(family, tmp_path):
    kind, changes = CASES[family]
    write_model(tmp_path, kind, **changes)
    shape = shape_of(tmp_path)
    loads = unit_loads(shape, 1, 2)
    for load in loads:
        ((work, _),) = load.works
        assert flops(work) == pytest.approx(load.forward_flops)
    layer = unit_works(shape, 1, 2, attention="unfused_dropout")[1]
    assert layer.core is not None
    # Only where the model has dropout on attention.
    assert layer.core.kind == ("unfused_dropout" if "dropout" in family else "unfused")


def test_what_lies_on_the_stream_is_whole_on_every_rank_unless_the_sequence_is_cut():
    shape = replace(preset("gpt3_1_6b"), layers=1)
    whole = unit_works(shape, 1, 1)[2]
    shared = unit_works(shape, 2, 1)[2]
    cut = unit_works(shape, 2, 1, sequence_parallel=True)[2]
    stream, inner = shape.sequence * shape.hidden, shape.sequence * shape.ffn
    assert whole.forward_elements == 5 * stream + 2 * inner
    assert shared.forward_elements == 5 * stream + inner
    assert cut.forward_elements == whole.forward_elements / 2


def predicted(*words: str):
    with hydra_session():
        given = ["mode=simulate", "model=gpt3_1_6b", "hardware=a100_80g", "pp=2",
                 "trainer.precision=bf16-true", "num_microbatches=4", *words]  # fmt: skip
        run = resolve(compose_checked([*search_path(None), *given])[0])
    return run.costs.table(run.programs.train)


def test_an_unfused_core_takes_longer_and_keeps_its_scores():
    fused, unfused, dropped = (
        predicted(f"costs.attention={kind}") for kind in ("fused", "unfused", "unfused_dropout")
    )
    for column in ("forward", "backward", "activation_bytes"):
        times = [getattr(table, column)[0] for table in (fused, unfused, dropped)]
        assert times == sorted(set(times)), column
    again = predicted(
        "costs.attention=unfused", "recompute=selective",
        "recompute.layers=[Attention:attention,Mlp:none,Embedding:none,Head:none]",
    )  # fmt: skip
    # Scores that are computed again are not kept.
    assert again.activation_bytes[0] < fused.activation_bytes[0] < unfused.activation_bytes[0]
    assert unfused.backward[0] < again.backward[0] < unfused.backward[0] + unfused.forward[0]


@pytest.mark.parametrize("families", ["attention", "norm", "activation", "matmul"])
def test_what_is_computed_again_takes_part_of_a_forward(families):
    plain = predicted()
    again = predicted(
        "recompute=selective",
        f"recompute.layers=[Attention:{families},Mlp:none,Embedding:none,Head:none]",
    )
    more = again.backward[0] - plain.backward[0]
    assert 0 <= more < plain.forward[0]
    assert again.forward == plain.forward


def test_a_loss_is_not_computed_again():
    """Half of the loss was charged to selective recomputation, which runs layers again."""
    shape = replace(preset("gpt3_1_6b"), layers=1, vocab=200_000)
    *_, head = unit_loads(shape, 1, 1, selective=True)
    ((work, _),) = head.works
    assert work.again_elements == shape.sequence * shape.hidden  # of the norm
    assert work.forward_elements > 6 * shape.sequence * shape.vocab


def test_larger_microbatches_take_less_per_sequence():
    one, four = predicted(), predicted("data.microbatch_size=4")
    assert four.forward[0] < 4 * one.forward[0]
    assert four.backward[0] < 4 * one.backward[0]


def throughput(*words: str) -> float:
    """Sequences of a step of 128, over its seconds."""
    with hydra_session():
        given = ["mode=simulate", "pp=8", "data.global_batch_size=128", *words]
        run = resolve(compose_checked([*search_path(None), *given])[0])
    return 128 / simulate(run.programs.train, run.costs).makespan


# SC21 (arXiv:2104.04473), figure 16: 91 billion parameters on 64 A100, where 2 was measured best.
FIGURE_16 = (
    "hardware=a100_80g", "tp=8", "trainer.precision=bf16-true", "recompute=full", "model.layers=32",
    "model.hidden=15360", "model.heads=128", "model.kv_heads=null", "model.ffn=null",
    "model.vocab=51200", "model.sequence=2048", "model.norm=layernorm", "model.activation=gelu",
    "model.position=learned", "model.dropout=0.1", "costs.attention=unfused_dropout",
)  # fmt: skip


def test_the_best_microbatch_has_two_sequences_as_was_measured():
    speeds = {n: throughput(*FIGURE_16, f"data.microbatch_size={n}") for n in (1, 2, 4, 8)}
    assert max(speeds, key=speeds.__getitem__) == 2


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[] if name == "gpt3_1_6b" else pytest.mark.full)
     for name in ("gpt3_1_6b", "gpt3_13b", "llama2_3b", "llama2_7b", "llama2_13b")],
)  # fmt: skip
def test_memory_that_mario_frees_pays_as_a_microbatch_of_two(model):
    card = ("hardware=v100_32g", "trainer.precision=16-mixed", "recompute=mario", f"model={model}")
    one, two = (throughput(*card, f"data.microbatch_size={size}") for size in (1, 2))
    assert two > one


@pytest.mark.parametrize("sequence", [2048, 131_072, 1 << 20])
def test_no_utilisation_is_above_one(sequence):
    """Scores that the mask hides counted as FLOPs and took no time: 1.6 of the peak."""
    with hydra_session():
        given = ["mode=simulate", "model=llama2_7b", "hardware=h100", f"model.sequence={sequence}",
                 "trainer.precision=bf16-true", "num_microbatches=1"]  # fmt: skip
        run = resolve(compose_checked([*search_path(None), *given])[0])
    ideal = ideal_step_s(replace(run, config=full_speed(run.config)))
    fast = replace(run.costs, hardware=full_speed(run.config).hardware)
    assert ideal < simulate(run.programs.train, fast).makespan


def full_speed(config):
    """Kernels that reach the peak."""
    card = replace(config.hardware, efficiency=1.0, attention_efficiency=1.0)
    return replace(config, hardware=card)
