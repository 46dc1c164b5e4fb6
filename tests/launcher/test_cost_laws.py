"""Laws that predictions keep, whatever the model, the machine and the layout.

Each draws small configurations, changes one thing, and compares the two predictions. Orders that
are searched for the costs (zero bubble) may come out worse for better costs, as any list of tasks
may (Graham's anomalies), so where a machine changes those of fixed order are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.compose.option_groups import conf_dir
from launcher.config.decode import from_dict
from launcher.report.predicted import memory_note, predict, rank_memory
from launcher.resolve import resolve
from strategies.analysis.memory import RankMemory
from strategies.analysis.metrics import Metrics

FIXED = ("1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b")
MADE = (*FIXED, "zb_h1", "zb_v")
SAME = 1 + 1e-9
# Known: a product with few tiles leaves multiprocessors idle (weight gradients of a few small
# experts), where libraries would split its inner dimension.
IDLE = 1.05
FREE = {
    "intra_bandwidth": 1e18, "inter_bandwidth": 1e18, "ring_bandwidth": 1e18,
    "intra_latency_s": 0.0, "inter_latency_s": 0.0, "ring_latency_s": 0.0,
}  # fmt: skip
Words = dict[str, Any]


@dataclass(frozen=True)
class Predicted:
    """What is compared of a configuration."""

    metrics: Metrics
    ranks: tuple[RankMemory, ...]
    fits: bool

    @property
    def step(self) -> float:
        return self.metrics.makespan

    def most(self, part: str) -> float:
        """Of the fullest rank."""
        return max(getattr(rank, part) for rank in self.ranks)


@lru_cache
def card(name: str) -> Words:
    found = yaml.safe_load((conf_dir() / "hardware" / f"{name}.yaml").read_text(encoding="ascii"))
    # PyYAML takes 5.0e10 for a word.
    numbers = {key: float(value) for key, value in found.items() if "e1" in str(value)}
    return {"ring_bandwidth": None, "ring_latency_s": None, **found, **numbers}


@st.composite
def asked(draw: Callable[[Any], Any], schedules: tuple[str, ...] = MADE, **fixed: Any) -> Words:
    """A configuration; ``fixed`` are keys that stay."""

    def one(*of: Any) -> Any:
        return draw(st.sampled_from(of))

    pp, schedule = one(1, 2, 4), one(*schedules)
    tp, dp = one(1, 2, 4, 8), one(1, 2, 4)
    hidden = one(512, 1024, 4096)
    model = {
        "layers": one(4, 8), "hidden": hidden, "heads": 8, "kv_heads": one(8, tp),
        "ffn": 4 * hidden, "vocab": one(1024, 32768), "sequence": one(512, 2048),
    }  # fmt: skip
    experts = one(True, False, False)
    if experts or fixed.get("experts"):
        model |= {"experts": 8, "experts_per_token": 2, "expert_ffn": hidden}
    size, count = one(1, 2), pp * one(1, 2, 3)
    words: Words = {
        "mode": "simulate", "pp": pp, "tp": tp, "dp": dp, "model": model,
        "hardware": card(one("h100", "a100_80g", "cpu_gloo")),
        "schedule": {"name": schedule if pp > 1 else "1f1b"},
        "num_microbatches": count, "data": {"microbatch_size": size},
        "overlap": {"name": one("grad_reduce", "zero1", "none") if dp > 1 else "grad_reduce"},
        "trainer": {"precision": "32-true"},
        "recompute": {"name": one("none", "none", "selective")},
    }  # fmt: skip
    if words["hardware"]["peak_flops"] is None and one(True, False):
        words["trainer"] = {"precision": "bf16-true"}
    fixed.pop("experts", None)
    return words | fixed


def change(words: Words, **parts: Any) -> Words:
    """With keys of groups changed, and others replaced."""
    return words | {
        name: words[name] | value if isinstance(value, dict) and name in words else value
        for name, value in parts.items()
    }


def predicted(words: Words) -> Predicted:
    run = resolve(from_dict(words))
    ranks = rank_memory(run)
    assert ranks is not None
    return Predicted(predict(run)[1], ranks, memory_note(run) is None)


def law(test: Callable[..., None]) -> Callable[..., None]:
    """With fewer examples than other tests: each is two simulations."""
    few = settings.default.max_examples // 2
    return settings(max_examples=few, suppress_health_check=[HealthCheck.too_slow])(test)


FASTER: dict[str, Words] = {
    "flops": {"peak_flops": 4.0, "peak_bf16_flops": 4.0, "peak_fp32_flops": 4.0},
    "memory": {"memory_bandwidth": 2.0},
    "links": {"intra_bandwidth": 3.0, "inter_bandwidth": 3.0, "ring_bandwidth": 3.0},
    "latency": {"intra_latency_s": 0.3, "inter_latency_s": 0.3, "ring_latency_s": 0.3},
    "kernels": {"kernel_overhead_s": 0.1, "message_overhead_s": 0.1},
}


@pytest.mark.parametrize("what", FASTER)
@law
@given(words=asked(FIXED))
def test_a_better_machine_is_never_slower(what: str, words: Words) -> None:
    old = words["hardware"]
    better = {key: old[key] * by for key, by in FASTER[what].items() if old.get(key)}
    before, after = predicted(words), predicted(change(words, hardware=better))
    assert after.step <= before.step * SAME
    assert all(after.most(part) == before.most(part) for part in ("parameters", "optimizer"))


@law
@given(words=asked(), share=st.floats(0.01, 3.0))
def test_what_fits_fits_into_more_memory(words: Words, share: float) -> None:
    need = predicted(words).most("total") * share / 1e9
    few, more = (
        predicted(change(words, hardware={"memory_gb": need * by})).fits for by in (1.0, 1.1)
    )
    assert more or not few


@law
@given(words=asked(FIXED, experts=True, dp=4, overlap={"name": "grad_reduce"}))
def test_with_free_links_experts_on_more_ranks_take_no_longer(words: Words) -> None:
    words = change(words, hardware=FREE)
    spread = [predicted(words | {"ep": ep}) for ep in (1, 2, 4)]
    for fewer, more in pairwise(spread):
        assert more.step <= fewer.step * IDLE
        assert more.most("parameters") <= fewer.most("parameters")


@law
@given(words=asked(FIXED))
def test_one_node_is_never_slower_than_two(words: Words) -> None:
    ranks = words["pp"] * words["tp"] * words["dp"]
    one, two = (
        predicted(change(words, hardware={"gpus_per_node": max(1, ranks // n)})) for n in (1, 2)
    )
    assert one.step <= two.step * SAME


@law
@given(words=asked(FIXED))
def test_more_microbatches_take_longer_and_each_takes_less(words: Words) -> None:
    count = words["num_microbatches"]
    few, many = predicted(words), predicted(words | {"num_microbatches": 2 * count})
    assert few.step < many.step <= 2 * few.step * SAME


@law
@given(words=asked())
def test_larger_microbatches_hold_more_activations(words: Words) -> None:
    size = words["data"]["microbatch_size"]
    small, large = predicted(words), predicted(change(words, data={"microbatch_size": 2 * size}))
    assert large.most("activations") > small.most("activations")
    assert large.step > small.step
    assert large.metrics.lower_bound > small.metrics.lower_bound


@law
@given(words=asked(("1f1b",), pp=2, num_microbatches=8))
def test_more_stages_hold_fewer_weights_each(words: Words) -> None:
    two, four = predicted(words), predicted(words | {"pp": 4})
    assert four.most("parameters") <= two.most("parameters")


@law
@given(words=asked(FIXED, hardware=card("h100")))
def test_sixteen_bits_are_never_slower_and_hold_no_more_activations(words: Words) -> None:
    half, whole = (
        predicted(change(words, trainer={"precision": name})) for name in ("bf16-true", "32-true")
    )
    assert half.step <= whole.step * SAME
    assert half.most("activations") <= whole.most("activations")
    assert half.most("parameters") < whole.most("parameters")


@law
@given(words=asked(FIXED))
def test_recomputation_costs_time_and_saves_activations(words: Words) -> None:
    none, selective, full = (
        predicted(words | {"recompute": {"name": name}}) for name in ("none", "selective", "full")
    )
    assert none.step <= selective.step * SAME
    assert selective.step <= full.step * SAME
    assert selective.most("activations") <= none.most("activations")
    assert full.most("total") <= none.most("total")


@law
@given(words=asked(dp=4))
def test_a_sharded_optimizer_never_holds_more(words: Words) -> None:
    whole, sharded = (
        predicted(change(words, overlap={"name": name})) for name in ("grad_reduce", "zero1")
    )
    assert sharded.most("total") <= whole.most("total")


@law
@given(words=asked())
def test_no_step_is_below_its_bound(words: Words) -> None:
    found = predicted(words).metrics
    assert found.makespan >= found.lower_bound / SAME


@law
@given(words=asked())
def test_more_layers_raise_step_and_bound(words: Words) -> None:
    layers = words["model"]["layers"]
    few, more = predicted(words), predicted(change(words, model={"layers": 2 * layers}))
    assert more.metrics.lower_bound > few.metrics.lower_bound
    assert more.step > few.step
    assert more.most("parameters") > few.most("parameters")
