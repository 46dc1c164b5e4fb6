"""Experts spread over ranks give what a single process gives: losses, weights, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.workloads.transformer_shape import MoeShape
from strategies.models.expert_parallel import ExpertRanks
from strategies.models.experts import Experts, Mixture, Router
from strategies.plan import Recompute
from tests.ranks.expert_training import (
    HIDDEN,
    ExpertCase,
    predict_unevenly,
    reference_experts,
    train_alone,
    train_experts,
)
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, reference, small_shape, train

TOLERANCE = 1e-10

pytestmark = pytest.mark.distributed


def check(case: ExpertCase, ranks: Callable[[int], Ranks]) -> list[dict[str, Any]]:
    results = ranks(case.world).run(train_experts, case=case)
    losses, parameters = reference_experts(case)
    for result in results:
        for batch, expected in enumerate(losses):
            mean = sum(
                other["losses"][batch]
                for other in results
                if (other["pp_rank"], other["tp_rank"]) == (result["pp_rank"], result["tp_rank"])
            )
            assert mean / case.dp == pytest.approx(expected, abs=TOLERANCE), f"loss of {batch}"
        assert not result["unseen"], "every exchange is recorded, inside of what it belongs to"
        assert set(result["whole"]) == set(parameters)
        for name, value in result["whole"].items():
            difference = (value - parameters[name]).abs().max().item()
            assert difference < TOLERANCE, f"{name}: {difference}"
        for name, shape in result["held"].items():
            if ".stacks." in name:
                assert shape[0] == case.experts // case.ep, "a rank holds its share only"
                inner = shape[2 if name.endswith("up") else 1]
                assert inner == 2 * HIDDEN // (case.tp if case.expert_tp else 1)
    return results


FULL = pytest.mark.full


def _name(case: ExpertCase | Case) -> str:
    degrees = f"pp{case.pp}-dp{case.dp}-tp{case.tp}-ep{case.ep}"
    return f"{case.schedule}-{degrees}-{case.overlap}-{case.recompute.policy}"


# A module of one's own; the built-in model has the rest.
OWN = [
    ExpertCase(dp=2, ep=2, accumulation=2, steps=4),
    ExpertCase(tp=2, steps=4),
]
LONG = [
    ExpertCase("foldx_fifo", pp=2, dp=2, ep=2, microbatches=4, steps=4, one=True,
               recompute=Recompute("optimal", max_full_activations=1.0)),
    ExpertCase(tp=2, ep=2, dp=2, steps=4, overlap="zero1"),
    ExpertCase(pp=2, dp=2, ep=2),
    ExpertCase("zb_v", dp=2, ep=2, pp=2, tied=True),
    ExpertCase("dualpipe", pp=2, dp=2, ep=2, microbatches=4),
    ExpertCase(dp=4, ep=2, overlap="zero1", one=True),
    ExpertCase(tp=2, expert_tp=True, accumulation=2),
    ExpertCase("zb_v", dp=2, tp=2, ep=2, expert_tp=True, overlap="zero1", one=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*OWN, *(pytest.param(case, marks=FULL) for case in LONG)], ids=_name
)
def test_training_equals_a_single_process(case: ExpertCase, ranks: Callable[[int], Ranks]) -> None:
    check(case, ranks)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(ExpertCase(pp=2, dp=2, ep=2), ExpertCase(tp=2, dp=2, ep=4), marks=FULL),
        (ExpertCase(dp=4, ep=2, overlap="zero1"), ExpertCase("dualpipe", pp=2, microbatches=4)),
        pytest.param(
            ExpertCase("zb_v", pp=2, tp=2, ep=2, overlap="zero1"),
            ExpertCase(dp=2, ep=2),
            marks=FULL,
        ),
        pytest.param(
            ExpertCase(dp=2, tp=2, ep=2, expert_tp=True, overlap="zero1"),
            ExpertCase(pp=2, tp=2, expert_tp=True),
            marks=FULL,
        ),
    ],
    ids=["grown", "zero1-to-dense", "tp-to-dp", "sliced"],
)
def test_a_checkpoint_goes_on_at_another_layout(
    first: ExpertCase, second: ExpertCase, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "first.ckpt")
    # The same batches of 8 rows at all layouts.
    first, second = (
        replace(case, steps=2, rows=8 // case.dp, tied=True, clip=0.05) for case in (first, second)
    )
    ranks(first.world).run(train_experts, case=first, save=path, ahead=2)
    results = ranks(second.world).run(train_experts, case=second, resume=path, ahead=2)
    _, parameters = reference_experts(replace(second, steps=4))
    for result in results:
        for name, value in result["whole"].items():
            assert (value - parameters[name]).abs().max().item() < TOLERANCE, name


def test_a_sharded_optimizer_holds_a_share_of_its_experts(ranks: Callable[[int], Ranks]) -> None:
    case = ExpertCase(dp=4, ep=2, steps=1, overlap="zero1")
    results = ranks(4).run(train_experts, case=case)
    _, parameters = reference_experts(case)
    sizes = [p.numel() for n, p in parameters.items()]
    total = sum(result["state_elements"] for result in results)
    assert 2 * sum(sizes) <= total <= 2 * sum(sizes) + 200, "padding"


def test_replicas_that_exchange_tokens_refuse_to_evaluate_unevenly(
    ranks: Callable[[int], Ranks],
) -> None:
    for said in ranks(2).run(predict_unevenly, case=ExpertCase(dp=2, ep=2)):
        assert "predict with ep=2 over dp=2 replicas" in said


@pytest.mark.parametrize("degrees", [{"dp": 2, "ep": 2}, {"tp": 2}], ids=["spread", "shared"])
def test_a_layer_that_does_not_ask_the_ranks_with_its_other_experts_is_refused(
    degrees: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    for said in ranks(2).run(train_alone, case=ExpertCase(**degrees, alone=True)):
        assert "the experts of blocks.0.1 are shared by several ranks" in said
        assert "Call exchange.around(compute, rows, counts)" in said


def test_16_bit_weights_follow_those_of_one_rank(ranks: Callable[[int], Ranks]) -> None:
    alone = ExpertCase(steps=4, precision="bf16-true", rows=8)
    (expected,) = ranks(1).run(train_experts, case=alone)
    for result in ranks(2).run(train_experts, case=replace(alone, dp=2, ep=2, rows=4)):
        for name, value in result["whole"].items():
            assert value.dtype == torch.bfloat16
            difference = (value - expected["whole"][name]).abs().max().item()
            assert difference < 0.02, name


# The built-in model: losses of its layers included, which travel to the last stage.
MOE = MoeShape(experts=8, per_token=2, ffn=6, balance_loss=0.3, z_loss=0.1)
SPARSE = small_shape(moe=MOE)
SHARED = small_shape(
    layers=2,
    kv_heads=2,
    tie_embeddings=True,
    moe=replace(MOE, shared=1, scores="sigmoid", scale=2.5),
)


def check_built_in(case: Case, ranks: Callable[[int], Ranks]) -> None:
    compare_built_in(case, ranks(case.pp * case.dp * case.tp).run(train, case=case))


def compare_built_in(case: Case, results: list[dict[str, Any]]) -> None:
    """Holds what the ranks have come to against plain torch."""
    losses, parameters = reference(case)
    for batch, expected in enumerate(losses):
        mean = sum(result["losses"][batch] for result in results) / len(results)
        assert mean == pytest.approx(expected, abs=TOLERANCE), f"loss of batch {batch}"
    seen: dict[str, set[int]] = {}
    for result in results:
        for name, value in result["parameters"].items():
            expected = parameters[name]
            for kind, rank in (("shards", "tp_rank"), ("experts", "ep_rank")):
                if name in result[kind]:
                    expected = result[kind][name].local(expected, result[rank])
            difference = (value - expected).abs().max().item()
            assert difference < TOLERANCE, f"{name} on rank {result['pp_rank']}: {difference}"
            seen.setdefault(name, set()).add(result["ep_rank"])
    tied = {"net.head.projection.weight"} if case.shape.tie_embeddings else set()
    assert set(seen) >= set(parameters) - tied
    block = case.ep * (case.tp if case.expert_tp else 1)
    assert all(who == set(range(block)) for name, who in seen.items() if ".experts." in name)


def exchange_order() -> list[str]:
    """What one rank does, in order: waits are told where they end."""
    ranks, seen = ExpertRanks(dist.group.WORLD), []
    for name in ("depart", "arrive"):
        own = getattr(ranks, name)

        def told(*given: Any, own: Any = own, name: str = name, **named: Any) -> Any:
            seen.append(name)
            return own(*given, **named)

        setattr(ranks, name, told)
    torch.manual_seed(dist.get_rank())
    mixture = Mixture(
        Router(experts=2, per_token=1, hidden=4), Experts(experts=1, hidden=4, inner=4)
    )
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    mixture.exchange = ranks
    shared = torch.nn.Linear(4, 4)

    def beside(tokens: torch.Tensor) -> torch.Tensor:
        seen.append("shared")
        found = shared(tokens)
        found.register_hook(lambda _: seen.append("shared backward"))
        return found

    mixed, _ = mixture(torch.randn(1, 6, 4, requires_grad=True), beside)
    mixed.square().sum().backward()
    return seen


def test_shared_experts_are_computed_while_tokens_travel(ranks: Callable[[int], Ranks]) -> None:
    there, back = ["depart", "shared", "arrive"], ["depart", "shared backward", "arrive"]
    for seen in ranks(2).run(exchange_order):
        assert seen == [*there, "depart", "arrive", "depart", "arrive", *back]


PAIRED = {
    "eager_1f1b": Case("eager_1f1b", pp=2, dp=2, ep=2, shape=SHARED, clip=0.05),
    "1f1b": Case("1f1b", pp=1, dp=2, ep=2, shape=replace(SPARSE, dropout=0.2), accumulation=2),
    "interleaved": Case("interleaved_1f1b", pp=2, dp=2, ep=2, shape=SPARSE, overlap="zero1"),
    "dualpipe": Case("dualpipe", pp=2, dp=2, ep=2, shape=SPARSE, clip=0.05),
    "zb_v": Case("zb_v", pp=2, tp=2, ep=2, shape=SHARED),
    "recomputed": Case("eager_1f1b", pp=1, dp=2, ep=2, shape=SHARED, recompute=Recompute("layer")),
}


DAILY = ("eager_1f1b",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name in DAILY else FULL) for name, case in PAIRED.items()],
    ids=PAIRED,
)
def test_exchanges_under_other_compute_change_no_number(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    case = replace(case, steps=3, rows=4, pairs=True)
    results = ranks(case.pp * case.dp * case.tp).run(train, case=case)
    assert all(any("OVERLAP" in word for word in result["program"]) for result in results)
    in_turn = ranks(case.pp * case.dp * case.tp).run(train, case=replace(case, pairs=False))
    for paired, plain in zip(results, in_turn, strict=True):
        assert paired["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE)
        for name, value in paired["parameters"].items():
            assert (value - plain["parameters"][name]).abs().max().item() < TOLERANCE, name


BUILT_IN = {
    "1f1b": Case("1f1b", pp=2, dp=2, ep=2, shape=SHARED, clip=0.05, accumulation=2),
    "zb_v": Case("zb_v", pp=1, dp=2, ep=2, shape=SPARSE, clip=0.05, overlap="zero1"),
    "dualpipe": Case("dualpipe", pp=2, dp=2, ep=2, shape=SPARSE),
    "foldx_fifo": Case("foldx_fifo", pp=2, dp=1, tp=2, ep=2, shape=SHARED, clip=0.05),
    "optimal": Case(
        pp=1, dp=4, ep=4, shape=SPARSE, recompute=Recompute("optimal", max_full_activations=1.0),
        overlap="zero1",
    ),
    "selective": Case(dp=2, ep=2, shape=SHARED, recompute=Recompute("selective"), clip=0.05),
    "sliced": Case(
        "1f1b", dp=2, tp=2, ep=2, expert_tp=True, shape=SHARED, clip=0.05, overlap="zero1"
    ),
    "sliced_whole": Case("zb_v", pp=2, tp=2, expert_tp=True, shape=SHARED, clip=0.05),
    "sliced_optimal": Case(
        dp=2, tp=2, ep=2, expert_tp=True, shape=SHARED, accumulation=2,
        recompute=Recompute("optimal", max_full_activations=1.0),
    ),
    "tensor": Case(dp=2, tp=2, ep=4, shape=SHARED, clip=0.05, overlap="zero1"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name == "tensor" else FULL) for name, case in BUILT_IN.items()],
    ids=BUILT_IN,
)
def test_the_built_in_experts_keep_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check_built_in(replace(case, steps=3, rows=4), ranks)


def _matrix() -> list[Case]:
    """ep {1, 2, 4} by pp {1, 2} by dp and tp and schedules; the rest goes round."""
    cases = []
    schedules = ("1f1b", "zb_v", "dualpipe", "foldx_fifo")
    for schedule, pp, (dp, tp) in itertools.product(
        schedules, (1, 2), ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
    ):
        for ep in (1, 2, 4):
            if dp * tp % ep or (schedule == "dualpipe" and pp == 1):
                continue
            turn = len(cases)
            cases.append(
                Case(
                    schedule,
                    pp=pp,
                    dp=dp,
                    tp=tp,
                    ep=ep,
                    rows=4,
                    clip=0.05 if turn % 2 else None,
                    shape=(SHARED, SPARSE)[turn % 2 if tp == 1 else 0],
                    overlap=("grad_reduce", "zero1")[turn // 2 % 2],
                    recompute=Recompute("optimal", max_full_activations=1.0)
                    if turn % 3 == 0
                    else Recompute(),
                )
            )
    return cases


@pytest.mark.full
@pytest.mark.parametrize("case", _matrix(), ids=_name)
def test_every_layout_keeps_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check_built_in(case, ranks)
