"""Ordinary modules of people: a network with long skips and a plain one, nothing declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strategies.ir.kinds import Kind
from strategies.plan import Recompute
from tests.ranks.fit import fit as fit_module
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

WIDTH, SIZE, ROWS, STEPS = 4, 8, 6, 4


class UNet(pl.LightningModule):
    """Down and up again; each step up sees the image of its height on the way down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        down, up = [(1, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)], [(2 * WIDTH, WIDTH)] * 3
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in down)
        self.up = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in up)
        self.last = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = functional.gelu(layer(x))
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        for layer in self.up:
            wide = functional.interpolate(x, scale_factor=2)
            x = functional.gelu(layer(torch.cat([wide, skips.pop()], 1)))
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Perceptron(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [SIZE * SIZE, 24, 24, 24, 24, 24, SIZE * SIZE]
        layers = [nn.Linear(i, o) for i, o in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)

    training_step, validation_step = UNet.training_step, UNet.validation_step
    configure_optimizers = UNet.configure_optimizers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.view(-1, 1, SIZE, SIZE)


MODULES: dict[str, type[pl.LightningModule]] = {"unet": UNet, "perceptron": Perceptron}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS * ROWS, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(images, images.flip(-1)), batch_size=ROWS)


def fit(kind: str, **options: Any) -> dict[str, Any]:
    module = MODULES[kind]()
    calls = count_calls(module)
    with fit_module(
        module,
        loader(),
        loader(),
        strategy={"num_microbatches": 3, **options},
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    ) as run:
        program, mailbox = run.program, run.engine.mailbox
        return {
            "weights": run.weights,
            "val_loss": run.metrics["val_loss"],
            "skips": run.engine.plan.skips,
            "sent": [
                (
                    item.stage,
                    item.peer,
                    [] if spec is None else [len(shape) for shape in spec.shapes],
                )
                for item in program
                if item.kind is Kind.SEND and item.payload is Kind.F and item.microbatch == 0
                for spec in [mailbox._specs.get(mailbox._key(item.stage, item.peer, 0))]
            ],
            "bytes": mailbox.bytes_sent,
            "again": sum(item.kind is Kind.R for item in program),
            "forwards": sum(item.kind is Kind.F for item in program),
            "calls": dict(calls),
        }


def count_calls(module: pl.LightningModule) -> Counter[str]:
    """How often each layer runs in training, not on shapes alone."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., None]:
        def count(layer: nn.Module, given: Any) -> None:
            calls[name] += layer.training and type(given[0]) is torch.Tensor

        return count

    for name, layer in module.named_modules():
        if not list(layer.children()):
            layer.register_forward_pre_hook(counted(name))
    return calls


def plain(kind: str) -> tuple[dict[str, torch.Tensor], float]:
    """The same training in plain torch: weights, and the loss over all rows at the end."""
    module = MODULES[kind]().double()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for images, targets in loader():
        optimizer.zero_grad()
        functional.mse_loss(module(images), targets).backward()
        optimizer.step()
    losses = [functional.mse_loss(module(images), targets).item() for images, targets in loader()]
    return dict(module.state_dict()), sum(losses) / len(losses)


CASES = [
    ("unet", {"pp": 4, "schedule": "1f1b"}),
    ("unet", {"pp": 2, "schedule": "zb_v", "backend": "strict"}),
]
MORE = [
    ("unet", {"pp": 4, "schedule": schedule, "backend": backend})
    for schedule in ("gpipe", "zb_h1", "chimera", "eager_1f1b")
    for backend in ("auto", "strict")
    # Two copies of each stage need an even number of microbatches.
    if schedule != "chimera"
]
MORE += [
    ("perceptron", {"pp": 2, "schedule": "foldx_fifo"}),
    ("unet", {"pp": 1, "schedule": "interleaved_1f1b", "stages_per_rank": 7}),
    ("unet", {"pp": 2, "schedule": "foldx_aiao", "overlap": "none"}),
    ("unet", {"pp": 2, "schedule": "hanayo", "units_per_stage": (2, 1, 2, 2)}),
    ("unet", {"pp": 2, "schedule": "foldx_fifo", "units_per_stage": (2, 0, 3, 2)}),
    ("perceptron", {"pp": 4, "schedule": "1f1b", "split_backward": True}),
]


def check(kind: str, options: dict[str, Any], ranks: Callable[[int], Ranks]) -> list[Any]:
    weights, loss = plain(kind)
    results = ranks(options["pp"]).run(fit, kind=kind, **options)
    seen = set()
    for result in results:
        assert result["val_loss"] == pytest.approx(loss, abs=1e-10)
        for name, value in result["weights"].items():
            seen.add(name)
            assert (value - weights[name]).abs().max().item() < 1e-10, name
    assert seen == set(weights)
    return results


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_training_equals_plain_torch(
    kind: str, options: dict[str, Any], ranks: Callable[[int], Ranks]
) -> None:
    results = check(kind, options, ranks)
    if options["pp"] == 4:
        # The image of the upper arm goes past the stage between, which does not see it.
        assert results[0]["skips"]
        for source, target in results[0]["skips"]:
            assert target > source + 1
            assert (source, target, [4]) in [tuple(sent) for sent in results[source]["sent"]]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "options"), MORE, ids=str)
def test_training_equals_plain_torch_everywhere(
    kind: str, options: dict[str, Any], ranks: Callable[[int], Ranks]
) -> None:
    check(kind, options, ranks)


def test_a_value_goes_past_stages_without_a_flush(ranks: Callable[[int], Ranks]) -> None:
    """Gradients are one update late, whatever the number of ranks: with two no value goes past."""
    options = {"kind": "unet", "schedule": "pipedream_2bw", "num_microbatches": 6}
    here, there = (ranks(pp).run(fit, pp=pp, **options) for pp in (4, 2))
    assert here[0]["skips"]
    assert not there[0]["skips"]
    weights = {name: value for each in there for name, value in each["weights"].items()}
    assert {name for each in here for name in each["weights"]} == set(weights)
    for each in here:
        assert each["val_loss"] == pytest.approx(there[0]["val_loss"], abs=1e-10)
        for name, value in each["weights"].items():
            assert (value - weights[name]).abs().max().item() < 1e-10, name


# Two on the way down, the turn, and the last: the first image goes past the middle stage.
CUTS: dict[int, dict[str, Any]] = {3: {"units_per_stage": (2, 3, 2)}}
RECOMPUTED = [
    pytest.param(4, "1f1b", Recompute("mario"), id="mario-4"),
    *(
        pytest.param(3, schedule, policy, marks=pytest.mark.full, id=f"{name}-{schedule}-3")
        for schedule in ("1f1b", "zb_h1")
        for name, policy in (
            ("full", Recompute("full")),
            ("mario", Recompute("mario")),
            ("selective", Recompute("selective")),
            ("optimal", Recompute("optimal", max_full_activations=1)),
        )
    ),
]


@pytest.mark.parametrize(("pp", "schedule", "policy"), RECOMPUTED)
def test_recomputed_forwards_see_the_tensors_that_skipped_stages(
    pp: int, schedule: str, policy: Recompute, ranks: Callable[[int], Ranks]
) -> None:
    options = {"pp": pp, "schedule": schedule, "recompute": policy} | CUTS.get(pp, {})
    results = check("unet", options, ranks)
    assert results[0]["skips"]
    again = sum(result["again"] for result in results)
    forwards = sum(result["forwards"] for result in results)
    assert forwards == 3 * pp
    wanted = {"full": forwards, "selective": 0}.get(policy.policy)
    assert again == wanted if wanted is not None else 0 < again < forwards


@pytest.mark.full
def test_a_recomputed_stage_with_skips_runs_exactly_once_more(
    ranks: Callable[[int], Ranks],
) -> None:
    """Each call of a layer beyond those of the same training without R belongs to one R."""
    plain_runs, again = (
        ranks(3).run(
            fit, kind="unet", pp=3, schedule="1f1b", recompute=Recompute(policy), **CUTS[3]
        )
        for policy in ("none", "full")
    )
    names = ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2", "last"]
    for rank, (one, other) in enumerate(zip(plain_runs, again, strict=True)):
        start = sum(CUTS[3]["units_per_stage"][:rank])
        for name in names[start : start + CUTS[3]["units_per_stage"][rank]]:
            assert other["calls"][name] - one["calls"][name] == STEPS * other["again"], name
