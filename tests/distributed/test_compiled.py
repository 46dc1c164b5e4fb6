"""Units that run through torch.compile give what they give without it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strategies.errors import PlanError
from strategies.plan import Recompute
from strategies.runtime.lightning.strategy import PipelineStrategy
from tests.distributed import test_parity, test_tensor_parallel
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, small_shape, train

pytestmark = pytest.mark.distributed

NONE = Recompute()
R = re.compile(r"\d+R\d+.*")
SMALL = small_shape(layers=1)
SHARED = small_shape(layers=1, hidden=16, heads=4, kv_heads=4, tie_embeddings=True)


class Compiling:
    """Ranks whose trainings may warn: torch's compiler does, about itself."""

    def __init__(self, ranks: Ranks, function: Callable[..., Any]) -> None:
        self._ranks = ranks
        self._function = function

    def run(self, function: Any, **arguments: Any) -> list[Any]:
        assert function is train
        results = self._ranks.run(self._function, **arguments)
        # Whatever is compared below was computed by what the compiler has traced.
        assert all(result["graphs"] > 0 for result in results)
        return results


def train_and_count(case: Case) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(case)
    return {**result, "graphs": counters["stats"]["unique_graphs"]}


def train_traced(case: Case) -> dict[str, Any]:
    """The same without a C++ compiler: graphs of forward and backward run as torch's operators."""
    compile_it: Any = torch.compile

    def traced(function: Any, *, options: dict[str, Any]) -> Any:
        assert options == {"fallback_random": True}
        return compile_it(function, backend="aot_eager")

    with mock.patch.object(torch, "compile", traced):
        return train_and_count(case)


def check(
    case: Case, ranks: Callable[[int], Ranks], run: Callable[..., Any] = train_and_count
) -> list[dict[str, Any]]:
    compiling: Any = lambda size: Compiling(ranks(size), run)  # noqa: E731
    module = test_tensor_parallel if case.tp > 1 else test_parity
    return module.check(replace(case, compile=True), compiling)


def test_traced_training_equals_plain_torch(ranks: Callable[[int], Ranks]) -> None:
    case = Case("1f1b", pp=2, steps=3, shape=SMALL, clip=0.05, microbatches=2, rows=4)
    check(case, ranks, train_traced)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", pp=2, clip=0.05, microbatches=2, rows=4, shape=SMALL),
        Case("1f1b", pp=2, dp=2, clip=0.05, accumulation=2, overlap="zero1"),
        Case("foldx_fifo", pp=2, short_last=True, shape=replace(SMALL, tie_embeddings=True)),
        Case("chimera", pp=2, clip=0.05),
        Case(pp=1, tp=2, shape=SHARED, clip=0.05),
        Case(pp=2, tp=2, shape=SHARED, sequence_parallel=True),
    ],
    ids=["plain", "zero1", "ragged-tied", "chimera", "tp", "sequence"],
)
def test_compiled_training_equals_plain_torch_everywhere(
    case: Case, ranks: Callable[[int], Ranks]
) -> None:
    check(replace(case, steps=10 if case.tp == 1 else 5), ranks)


RECOMPUTED = {
    "full": Case("1f1b", recompute=Recompute("full")),
    "mario": Case("1f1b", recompute=Recompute("mario"), clip=0.05),
    "optimal": Case("gpipe", recompute=Recompute("optimal", max_full_activations=1)),
    "full-chimera": Case("chimera", recompute=Recompute("full")),
    "dropout": Case("1f1b", recompute=Recompute("full"), shape=replace(SMALL, dropout=0.3)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RECOMPUTED)
def test_compiled_units_run_again_for_their_backward(
    name: str, ranks: Callable[[int], Ranks]
) -> None:
    case = replace(RECOMPUTED[name], pp=2, steps=3, rows=8, microbatches=4)
    if name == "dropout":
        # No plain training draws what compiled ranks do: the same ranks without R do.
        plain = ranks(2).run(train_and_count, case=replace(case, compile=True, recompute=NONE))
        again = ranks(2).run(train_and_count, case=replace(case, compile=True))
        for one, other in zip(plain, again, strict=True):
            assert one["graphs"] > 0
            assert other["losses"] == pytest.approx(one["losses"], abs=1e-10)
    else:
        case = replace(case, shape=SMALL)
        again = check(case, ranks)
    assert any(R.fullmatch(instruction) for result in again for instruction in result["program"])


@pytest.mark.full
def test_dropout_is_the_same_compiled_or_not(ranks: Callable[[int], Ranks]) -> None:
    case = Case("1f1b", steps=3, shape=replace(SMALL, dropout=0.3))
    (plain,) = ranks(1).run(train, case=case)
    (compiled,) = ranks(1).run(train_and_count, case=replace(case, compile=True))
    assert compiled["graphs"] > 0
    assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-10)


class Net(pl.LightningModule):
    """Somebody's own module, which is cut by replaying its step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def fit_net(compile: bool) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    net = Net()
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(data, data.flip(1)), batch_size=8)
    strategy = {
        "pp": 2, "num_microbatches": 4, "schedule": "gpipe", "compile": compile, "timeout_s": 120,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fit(net, loader, strategy=strategy, max_epochs=1) as run:
            return {"weights": run.weights, "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.full
def test_layers_of_a_replayed_module_are_compiled(ranks: Callable[[int], Ranks]) -> None:
    plain = ranks(2).run(fit_net, compile=False)
    compiled = ranks(2).run(fit_net, compile=True)
    for one, other in zip(plain, compiled, strict=True):
        assert (one["graphs"], other["graphs"] > 0) == (0, True)
        assert one["weights"].keys() == other["weights"].keys() != set()
        for name, value in one["weights"].items():
            assert (value - other["weights"][name]).abs().max() < 1e-10, name


@pytest.mark.filterwarnings("ignore:The `srun` command")
@pytest.mark.parametrize(
    "options", [{"schedule": "zb_h1"}, {"schedule": "1f1b", "split_backward": True}]
)
def test_split_backwards_are_refused_with_the_reason(options: dict[str, Any]) -> None:
    strategy = PipelineStrategy(pp=1, num_microbatches=2, compile=True, **options)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"compile=true with schedule.* cannot be cut. Try"):
        trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4, 8), torch.randn(4, 8))))
