"""Kernels of a small card worked out by hand: 10 multiprocessors, 1e9 FLOP/s each, 1e9 B/s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import ElementSizes, Hardware
from strategies.costs.kernels import Core, Product, Work, unit_seconds
from strategies.costs.load import Load, sum_loads
from strategies.errors import CostError
from strategies.ir.program import Program, chain, loop

CARD = Hardware(
    name="small",
    peak_flops=2.0e10,
    efficiency=0.5,
    memory_gb=1.0,
    memory_bandwidth=2.0e9,
    intra_bandwidth=1.0e9,
    intra_latency_s=0.0,
    inter_bandwidth=1.0e8,
    inter_latency_s=0.0,
    gpus_per_node=8,
    num_sms=10,
    bandwidth_efficiency=0.5,
    attention_efficiency=0.25,
    lockstep_loss=0.1,
)
FAST = replace(CARD, memory_bandwidth=1e15)
SIZES = ElementSizes(weight=2, activation=2, main=4)


def seconds(work: Work, card: Hardware = CARD, sizes: ElementSizes = SIZES):
    return unit_seconds(work, card, sizes, "bf16")


def product_s(rows: int, columns: int, inner: int, card: Hardware = FAST) -> float:
    return seconds(Work(products=(Product(rows, columns, inner),)), card).forward


def test_a_product_takes_whole_waves_of_whole_tiles():
    wave = 2 * 256 * 128 * (1024 + 128) / 1e9
    assert product_s(2560, 128, 1024) == pytest.approx(wave)
    # One row more is an eleventh tile: another wave; smaller tiles cost less than that.
    assert wave < product_s(2561, 128, 1024) < 2 * wave
    # 16 tiles of 64 x 64 are two waves, 8 of 128 x 64 one; 2 of 256 x 128 keep two of ten busy.
    assert product_s(256, 256, 1024) == pytest.approx(2 * 128 * 64 * 1152 / 1e9 / 0.8)


def test_few_rows_waste_what_many_use():
    # 128 x 128 on 10 multiprocessors: 4 tiles of 64 x 64, in one wave, as a single one would.
    assert product_s(128, 128, 512) == product_s(64, 64, 512)
    per_row = [product_s(rows, 1280, 1024) / rows for rows in (128, 256, 1280, 12800)]
    assert per_row == sorted(per_row, reverse=True)


def test_rows_that_are_no_whole_cache_lines_take_longer():
    assert product_s(2560, 128, 1000) > product_s(2560, 128, 1024)
    # 64 elements of 2 bytes are a line of 128.
    assert product_s(2560, 128, 1088) < product_s(2560, 128, 1080)


def test_a_backward_has_two_products_of_the_same_flops():
    work = Work(products=(Product(2560, 1280, 640),))
    found = seconds(work, FAST)
    assert found.inputs == product_s(2560, 640, 1280)
    assert found.weights == product_s(640, 1280, 2560)


def test_thin_products_and_all_other_kernels_move_bytes():
    # One row: reading a matrix of 1280 x 1280 takes longer than multiplying by it.
    alone = seconds(Work(products=(Product(1, 128000, 1280),)), replace(CARD, peak_flops=1e14))
    assert alone.forward == pytest.approx(2 * (1280 * 128000 + 1280 + 128000) / 1e9)
    card = replace(CARD, kernel_overhead_s=0.25)
    moved = seconds(Work(forward_elements=500, backward_elements=1000, forward_kernels=2,
                         backward_kernels=3, weights=100), card)  # fmt: skip
    assert moved.forward == pytest.approx(2 * 500 / 1e9 + 2 * 0.25)
    assert moved.inputs == pytest.approx(2 * 1000 / 1e9 + 3 * 0.25)
    # A sum of gradients in 4 bytes is read and written.
    assert moved.weights == pytest.approx(8 * 100 / 1e9)


def test_mixed_precision_casts_the_weights():
    work = Work(weights=100)
    assert seconds(work).forward == 0
    assert seconds(work, sizes=ElementSizes(activation=2)).forward == pytest.approx(600 / 1e9)


def test_an_attention_core_is_one_kernel_or_moves_all_its_scores():
    core = Core(batch=4, tokens=128, head_size=64)
    fused = seconds(Work(core=core))
    assert core.flops == 4 * 4 * 128 * 128 * 64
    assert fused.forward == pytest.approx(core.flops / 2 / 5e9)
    assert fused.inputs == pytest.approx(2.5 * fused.forward)
    plain = seconds(Work(core=core._replace(kind="unfused")))
    dropped = seconds(Work(core=core._replace(kind="unfused_dropout")))
    scores = 4 * 128 * 128
    assert dropped.forward - plain.forward == pytest.approx(3.5 * 2 * scores / 1e9)
    assert dropped.inputs - plain.inputs == pytest.approx(3.5 * 2 * scores / 1e9)
    kinds = ("fused", "unfused", "unfused_dropout")
    kept = [core._replace(kind=kind).kept_elements for kind in kinds]
    assert kept == [0, scores, 2.5 * scores]  # 5 a s s bytes of the textbook formula


def test_what_a_backward_computes_again_is_the_forward_of_it():
    core, products = Core(4, 128, 64), (Product(2560, 1280, 640),)
    both = Work(products=products, core=core, forward_elements=500)
    again = replace(both, again_core=True, again_products=1.0, again_elements=500)
    assert seconds(both).again == 0
    assert seconds(again).again == pytest.approx(seconds(again).forward)


def test_a_stage_takes_what_its_units_take_and_sharers_wait_for_each_other():
    work = Work(products=(Product(2560, 1280, 640),), weights=640 * 1280)
    unit = Load(1.0, 1, 1, 1, works=((work, 1),))
    stage = sum_loads([unit, unit, unit])
    assert stage.works == ((work, 3),)
    program = Program("draft", loop(1, 1), 1, ((),), chain(1))
    one, two = (AnalyticCosts((stage,), CARD, tp=tp, sizes=SIZES).table(program) for tp in (1, 2))
    found = seconds(work)
    assert one.forward[0] == one.recompute[0] == pytest.approx(3 * found.forward)
    assert one.backward[0] == pytest.approx(3 * (found.inputs + found.weights))
    assert two.forward[0] == pytest.approx(1.1 * one.forward[0])


def test_kernels_that_nobody_listed_read_and_write_what_is_kept():
    load = Load(1e10, 1, output_elements=1000, saved_elements=10**6)
    program = Program("draft", loop(1, 1), 1, ((),), chain(1))
    table = AnalyticCosts((load,), CARD, sizes=SIZES).table(program)
    assert table.forward[0] == pytest.approx(1.0 + 2 * 2 * 10**6 / 1e9 + 2 * 2 * 1000 / 1e9)


def test_a_card_without_the_peak_is_refused():
    with pytest.raises(CostError, match="small has no peak for bf16"):
        seconds(Work(products=(Product(1, 1, 1),)), replace(CARD, peak_flops=None))
