"""Mixed and short types: sums, updates and loss scales are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.test_training_details import Units
from tests.ranks.fit import fit as fit_module
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed
FULL = pytest.mark.full


class Gradients(Callback):
    """Keeps the first step's gradients as the optimizer gets them."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.found:
            return
        mains = trainer.strategy.engine.mains
        for name, parameter in module.named_parameters():
            pieces = mains.pieces_of(parameter)
            grad = parameter.grad if pieces is None else pieces[0].main.grad
            self.found[name] = grad.clone()


class Scales(Callback):
    """Notes scale and weights at the end of each step."""

    reads_weights = False

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        scaler = trainer.strategy.precision_plugin.scaler
        self.scales.append(scaler.get_scale())
        trainer.strategy.engine.complete()
        self.weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]).cpu())


class Spoiled(Callback):
    """One gradient of one rank is infinite in one step."""

    def __init__(self, rank: tuple[int, int], step: int) -> None:
        self._rank = rank
        self._step = step

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        where = trainer.strategy.coordinates
        if (where.pp_rank, where.dp_rank) == self._rank:
            parameter = next(module.parameters())
            parameter.register_hook(
                lambda grad: grad * float("inf") if trainer.global_step == self._step else grad
            )


class Float32Units(Units):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Ordinary(pl.LightningModule):
    """No pipeline method: cut by replaying its step, which mixes types by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch[0])
        mask = torch.ones(hidden.shape[-1], device=hidden.device)
        return ((hidden * mask).float() - batch[1].float()).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


MODULES = {"adamw": Units, "sgd": Float32Units, "ordinary": Ordinary}


def data(rows: int = 16, batch: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, 4, generator=generator).unbind()
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def fit(
    precision: str,
    *,
    pp: int = 1,
    dp: int = 1,
    batch: int = 8,
    rows: int = 16,
    callbacks: tuple[Callback, ...] = (),
    optimizer: str = "adamw",
    clip: float | None = None,
    resume: str | None = None,
    epochs: int = 1,
    save: str | None = None,
    accelerator: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    given = {"num_microbatches": 3, "schedule": "1f1b", "bucket_mb": 1e-4, **options}
    kinds: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        device = "cuda" if accelerator == "gpu" else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=1000)
        kinds = {"plugins": [MixedPrecision("16-mixed", device, scaler)]}
    module = MODULES[optimizer]()
    with fit_module(
        module,
        data(rows, batch),
        data(rows, batch),
        strategy={"pp": pp, "dp": dp, **given},
        resume=resume,
        accelerator=accelerator,
        callbacks=callbacks,
        gradient_clip_val=clip,
        max_epochs=epochs,
        **kinds,
    ) as run:
        if save is not None:
            run.trainer.save_checkpoint(save)
        return _found(run.engine, run.strategy)


def _found(engine: Any, strategy: Any) -> dict[str, Any]:
    return {
        "parameters": {n: p.detach().cpu().clone() for n, p in engine.named_parameters().items()},
        "mains": {
            n: piece.main.detach().cpu().clone()
            for n, p in engine.named_parameters().items()
            for piece in engine.mains.pieces_of(p) or ()
        },
        "sent": sorted({str(d) for spec in engine.mailbox._specs.values() for d in spec.dtypes}),
        "gradient_bytes": sum(
            buffer.flat.nbytes for stage in engine.gradients.values() for buffer in stage.buffers
        ),
        "norm": strategy.stats.gradient_norm if strategy.stats else None,
    }


def fit_noting_gradients(**options: Any) -> dict[str, Any]:
    notes = Gradients()
    return {**fit(callbacks=(notes,), **options), "gradients": notes.found}


def short_sums(microbatches: int) -> dict[str, Tensor]:
    """The 32-bit sums of bfloat16 gradients of microbatches, in plain torch."""
    module = Units().bfloat16()
    x, y = next(iter(data()))
    sums = {name: torch.zeros(p.shape) for name, p in module.named_parameters()}
    for part in torch.arange(8).tensor_split(microbatches):
        hidden = x[part].bfloat16()
        for unit in module.units:
            hidden = unit(hidden)
        loss = torch.nn.functional.mse_loss(hidden, y[part].bfloat16())
        loss.backward(torch.full_like(loss, len(part) / 8))
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.float()
        module.zero_grad()
    return sums


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=FULL), "zb_h1"])
def test_short_gradients_are_summed_in_32_bits_exactly(
    schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    expected = short_sums(3)
    results = ranks(2).run(fit_noting_gradients, precision="bf16-true", pp=2, schedule=schedule)
    seen = set()
    for result in results:
        assert result["sent"] == ["torch.bfloat16"]
        for name, gradient in result["gradients"].items():
            seen.add(name)
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, expected[name]), name
        for name, value in result["parameters"].items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, result["mains"][name].bfloat16())
    assert seen == set(expected)


@pytest.mark.parametrize(
    ("clip", "schedule", "precision"),
    [
        pytest.param(None, "1f1b", "bf16-mixed", marks=FULL),
        (0.05, "1f1b", "16-mixed"),
        (0.05, "zb_h1", "bf16-mixed"),
        pytest.param(None, "zb_h1", "16-mixed", marks=FULL),
        pytest.param(0.05, "1f1b", "bf16-mixed", marks=FULL),
        pytest.param(None, "1f1b", "16-mixed", marks=FULL),
        pytest.param(None, "zb_h1", "bf16-mixed", marks=FULL),
        pytest.param(0.05, "zb_h1", "16-mixed", marks=FULL),
    ],
)
def test_mixed_precision_is_that_of_one_device(
    precision: str, schedule: str, clip: float | None, ranks: Callable[[int], Ranks]
) -> None:
    options = {"precision": precision, "clip": clip, "num_microbatches": 2, "rows": 24}
    (alone,) = ranks(1).run(fit, **options)
    kind = "torch.bfloat16" if precision == "bf16-mixed" else "torch.float16"
    for result in ranks(2).run(fit, pp=2, schedule=schedule, **options):
        assert result["sent"] == [kind]
        assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        for name, value in result["parameters"].items():
            assert value.dtype == torch.float32
            assert torch.allclose(value, alone["parameters"][name], atol=1e-6, rtol=0), name


def fit_scaled(
    rank: tuple[int, int], overlap: str, clip: float | None, **options: Any
) -> dict[str, Any]:
    scales = Scales()
    result = fit(
        "16-mixed",
        pp=2,
        dp=2,
        batch=4,
        rows=32,
        overlap=overlap,
        clip=clip,
        callbacks=(scales, Spoiled(rank, step=1)),
        **options,
    )
    return {**result, "scales": scales.scales, "weights": scales.weights}


@pytest.mark.parametrize(
    ("rank", "overlap", "clip"),
    [
        ((0, 0), "grad_reduce", None),
        ((1, 1), "zero1", 0.1),
        pytest.param((1, 0), "none", 0.1, marks=FULL),
    ],
)
def test_one_infinite_gradient_on_one_rank_skips_the_step_everywhere(
    rank: tuple[int, int], overlap: str, clip: float | None, ranks: Callable[[int], Ranks]
) -> None:
    check_skipped(ranks(4).run(fit_scaled, rank=rank, overlap=overlap, clip=clip))


def check_skipped(results: list[dict[str, Any]]) -> None:
    """All have left step 2 out, and halved the scale."""
    for result in results:
        # Step 2 of 4 is skipped, and the steps after it use half the scale. Lightning counts
        # steps that were asked for.
        assert result["scales"] == [1024.0, 512.0, 512.0, 512.0]
        first, second, third, _ = result["weights"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert all(torch.isfinite(weights).all() for weights in result["weights"])
    copies: dict[str, Tensor] = {}
    for result in results:
        for name, value in result["parameters"].items():
            assert torch.equal(value, copies.setdefault(name, value)), name


def test_short_weights_shard_and_resume_anywhere(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = str(tmp_path / "half.ckpt")
    options = {"precision": "bf16-true", "pp": 2, "dp": 2, "batch": 4, "overlap": "zero1"}
    ranks(4).run(fit, **options, save=path)
    whole = ranks(4).run(fit, **options, epochs=2)
    resumed = ranks(4).run(fit, **options, epochs=2, resume=path)
    for one, other in zip(whole, resumed, strict=True):
        for name, value in one["mains"].items():
            assert torch.equal(value, other["mains"][name]), name
    # In 32 bits it goes on with the weights that the short ones were rounded from.
    (alone,) = ranks(1).run(fit, precision="32-true", epochs=1, resume=path)
    unsharded = ranks(4).run(fit, **{**options, "overlap": "grad_reduce"}, epochs=1, resume=path)
    for result in unsharded:
        for name, value in result["mains"].items():
            assert torch.equal(value, alone["parameters"][name]), name


@pytest.mark.parametrize("overlap", ["grad_reduce", "zero1"])
def test_gradients_may_travel_short(overlap: str, ranks: Callable[[int], Ranks]) -> None:
    options = {"precision": "32-true", "dp": 2, "batch": 4, "overlap": overlap, "rows": 32}
    wide = ranks(2).run(fit, **options, optimizer="sgd")
    short = ranks(2).run(fit, **options, optimizer="sgd", grad_dtype="bf16")
    for name, value in short[0]["parameters"].items():
        assert torch.equal(value, short[1]["parameters"][name])
        assert torch.allclose(value, wide[0]["parameters"][name], atol=1e-3, rtol=0)
    assert any(
        not torch.equal(value, wide[0]["parameters"][name])
        for name, value in short[0]["parameters"].items()
    )


@pytest.mark.parametrize("overlap", [pytest.param("grad_reduce", marks=FULL), "zero1"])
def test_gradients_of_short_weights_may_be_summed_short(
    overlap: str, ranks: Callable[[int], Ranks]
) -> None:
    options = {"precision": "bf16-true", "pp": 2, "dp": 2, "batch": 4, "overlap": overlap}
    wide = ranks(4).run(fit, **options, clip=0.5)
    short = ranks(4).run(fit, **options, clip=0.5, sum_dtype="bf16")
    differs = False
    for one, other in zip(short, wide, strict=True):
        assert one["gradient_bytes"] * 2 <= other["gradient_bytes"] + 1024
        assert {value.dtype for value in one["mains"].values()} == {torch.float32}
        assert one["norm"] == pytest.approx(other["norm"], rel=0.02)
        for name, value in one["parameters"].items():
            wanted = other["parameters"][name]
            assert torch.allclose(value.float(), wanted.float(), atol=2e-2, rtol=0)
        if overlap == "grad_reduce":
            # Replicas have done the same; a share of a bucket counts its marks, too.
            differs |= any(not torch.equal(v, other["mains"][n]) for n, v in one["mains"].items())
    assert differs or overlap == "zero1"


def test_sums_in_16_bits_need_16_bit_weights(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(Exception, match="sum_dtype=bf16 sums gradients of bf16 weights"):
        ranks(1).run(fit, precision="bf16-mixed", sum_dtype="bf16")


@pytest.mark.parametrize(
    "precision",
    ["bf16-true", "16-mixed", *(pytest.param(n, marks=FULL) for n in ("bf16-mixed", "16-true"))],
)
@pytest.mark.lightning_feature("flag", "precision")
def test_ordinary_modules_train_in_any_precision(
    precision: str, ranks: Callable[[int], Ranks]
) -> None:
    options = {"precision": precision, "optimizer": "ordinary", "num_microbatches": 2}
    (alone,) = ranks(1).run(fit, **options)
    for result in ranks(4).run(fit, pp=2, dp=2, batch=4, overlap="zero1", **options):
        assert result["sent"] == ["torch.bfloat16" if "bf" in precision else "torch.float16"]
        for name, value in result["parameters"].items():
            # Short weights are rounded to 8 or 11 bits, wide ones moved by slightly other sums.
            tolerance = 2e-3 if "true" in precision else 2e-4
            assert torch.allclose(value, alone["parameters"][name], atol=tolerance, rtol=0), name
