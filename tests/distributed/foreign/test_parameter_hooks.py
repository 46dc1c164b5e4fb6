"""Hooks that look at the whole model's weights or gradients, or change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from strategies.errors import ModelError
from strategies.runtime.lightning.hooks import hook_watch
from strategies.runtime.lightning.manual_optimization import hide_states
from strategies.runtime.lightning.refusals import refuse_optimizers
from tests.ranks.comparison import (
    EVERY_LAYOUT,
    LAYOUTS,
    SHARED,
    WIDTH,
    Net,
    equal_to_stock,
    spread,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed


def _follow(student: nn.Module, teacher: nn.Module, momentum: float) -> None:
    with torch.no_grad():
        for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
            q.mul_(momentum).add_(p, alpha=1 - momentum)


class Byol(Net):
    """The teacher's layers lie on other ranks than the student's that they follow."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        return mse_loss(self.net(batch[0]), wanted + 1) + self.head.weight.sum() * 0

    def on_train_batch_end(self, *_: Any) -> None:
        _follow(self.net, self.teacher, 0.5)


class BeforeZeroGrad(Byol):
    on_train_batch_end = pl.LightningModule.on_train_batch_end

    def on_before_zero_grad(self, *_: Any) -> None:
        _follow(self.net, self.teacher, 0.5)


class Dino(Byol):
    """A momentum that changes with the steps, a centre, and a last layer that waits."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.float64))
        self.calls = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.calls += 1
        momentum = 0.5 + 0.1 * self.trainer.global_step
        _follow(self.net, self.teacher, momentum)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(self.teacher[-2].weight.mean(dim=0), alpha=0.1)
        self.log("momentum", momentum)
        self.log("calls", float(self.calls))

    def on_after_backward(self) -> None:
        if self.trainer.global_step < 2:
            self.net[-2].weight.grad = None


class Moco(Net):
    """A queue of keys, filled by the step, and an encoder that follows."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys_net = copy.deepcopy(self.net).requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("queue", torch.randn(WIDTH, WIDTH, generator=generator))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            keys = normalize(self.keys_net(batch[0]), dim=1)
        queries = normalize(self.net(batch[0]), dim=1)
        same = (queries * keys).sum(dim=1, keepdim=True)
        scores = torch.cat([same, queries @ self.queue], dim=1) / 0.2
        target = torch.zeros(len(scores), dtype=torch.long)
        return cross_entropy(scores, target) + cross_entropy(self.head(queries), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        _follow(self.net, self.keys_net, 0.7)
        with torch.no_grad():  # of the weights: the rows of a microbatch are no batch
            self.queue.copy_(normalize(self.keys_net[0].weight @ self.queue, dim=0))


class MeanTeacher(pl.Callback):
    """Keeps a copy of the whole module and takes the weights over at the end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = copy.deepcopy(pl_module.net)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in self.copy.state_dict().items():
            value.mul_(0.9).add_(pl_module.net.state_dict()[name], alpha=0.1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.load_state_dict(self.copy.state_dict())


def mean_teacher() -> list[pl.Callback]:
    return [MeanTeacher()]


class ClippedByNorm(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ClippedGroups(Net):
    """Goes by the optimizer's groups instead of the module."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [{"params": self.net.parameters(), "lr": 0.2}, {"params": self.head.parameters()}],
            lr=0.1,
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            norms = [p.grad.norm() for p in group["params"]]
            self.log(f"norm{number}", torch.stack(norms).norm())
            self.log(f"count{number}", float(len(group["params"])))
            torch.nn.utils.clip_grad_value_(group["params"], 0.02)


class OwnClipping(Net):
    """Clips the head alone, then everything by Lightning's way, as its documentation shows."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.01)
        self.clip_gradients(
            optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=gradient_clip_algorithm
        )


class NormsLogged(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def on_train_epoch_end(self) -> None:
        norm = torch.stack([p.norm() for p in self.parameters()]).norm()
        self.log("weight_norm", norm, sync_dist=True)
        self.log("one_weight", self.net[0].weight.abs().max(), sync_dist=True)
        number = sum(p.numel() for p in self.parameters())
        self.log("number", float(number), sync_dist=True)


class Clamped(Net):
    """As a critic of a WGAN."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class LateTouch(Net):
    """Touches nothing in its first call."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with torch.no_grad():
                self.net[0].weight.add_(self.head.weight.sum())


class WholeForward(Net):
    """Runs the whole model in a hook, on noise."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            noise = self(torch.randn(4, WIDTH, dtype=torch.float64))
            self.log("noise", noise.mean(), sync_dist=True)


class HeadOnly(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.1)


class OwnStep(Net):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", grad_norm(self, norm_type=2)["grad_2.0_norm_total"])


class ByHand(Net):
    """Runs the closure itself, looks at what it has left, and leaves out every second update."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        if batch_idx % 2 == 0 and all(p.grad.isfinite().all() for p in self.parameters()):
            optimizer.step()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(parameter, alpha=0.1)


class PartFrozen(Net):
    """Layers that it takes together for that are no module of the module."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[:4].requires_grad_(self.global_step >= 2)


class PrunedLate(Net):
    def on_train_epoch_end(self) -> None:
        torch.nn.utils.prune.l1_unstructured(self.net[2], "weight", 0.3)


class Unfreezing(Net):
    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch > 0)


class AddedGroup(Net):
    """A parameter that is trained, too, but is in no optimizer until training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)

    def on_train_start(self) -> None:
        self.optimizers().add_param_group({"params": [self.scale], "lr": 0.5})  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net.parameters(), *self.head.parameters()], lr=0.1)


class FreezingMiddle(Net):
    """What is behind the cut is frozen first, then what is before it, then a bias alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.net(x)))  # type: ignore[no-any-return]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(True)
        frozen = [self.net[4:], self.net[:4], nn.ModuleList()][batch_idx % 3]
        frozen.requires_grad_(False)
        self.net[0].bias.requires_grad = batch_idx != 2


class Tuned(Net):
    """As the documentation of BackboneFinetuning has it: an optimizer of what is not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


def finetuning() -> list[pl.Callback]:
    return [BackboneFinetuning(1, lambda epoch: 1.5)]


def learning_rates(module: Any, trainer: Any) -> list[float]:
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


class OwnBackward(Net):
    """Scales the loss by what has been done so far, and counts and logs its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        self.log("scaled", loss.detach() * self.calls)
        super().backward(loss * 0.5 * self.calls, *args, retain_graph=True, **kwargs)
        (loss / 3).backward()

    def on_after_backward(self) -> None:
        self.log("norm", grad_norm(self, norm_type=2)["grad_2.0_norm_total"])


class ScaledBackward(Net):
    def backward(self, loss: Tensor) -> None:
        (loss * 2).backward()


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


class WithScheduler(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def swa() -> list[pl.Callback]:
    return [StochasticWeightAveraging(0.05, swa_epoch_start=1)]


def ema() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.8)]


def averaging() -> list[pl.Callback]:
    return [WeightAveraging()]


class KeptParameters(pl.Callback):
    """Keeps the objects themselves, and copies of the whole, from before training."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = list(pl_module.parameters())
        self.start = {n: v.detach().clone() for n, v in pl_module.state_dict().items()}
        self.model = copy.deepcopy(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters[:4]:
                parameter.mul_(0.9)
        moved = sum((p - self.start[n]).norm() for n, p in pl_module.named_parameters())
        pl_module.log("moved", moved)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.model.load_state_dict(pl_module.state_dict())
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            pl_module.log("copy", self.model.net(x).sum(), sync_dist=True)


class FirstRankReads(pl.Callback):
    """Looks at weights on the first process alone, as who writes histograms does."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self._write(pl_module)

    @rank_zero_only
    def _write(self, pl_module: Any) -> None:
        self.seen += [float(p.detach().sum()) for p in pl_module.parameters()]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen = self.seen


class Saves(pl.Callback):
    """Writes a checkpoint where it has just looked at weights."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            pl_module.head.weight.mul_(0.9)
        trainer.save_checkpoint(f"{trainer.default_root_dir}/now.ckpt")
        with torch.no_grad():
            pl_module.net[0].weight.mul_(0.9)


def kept_parameters() -> list[pl.Callback]:
    return [KeptParameters()]


def first_rank_reads() -> list[pl.Callback]:
    return [FirstRankReads()]


def saves() -> list[pl.Callback]:
    return [Saves()]


class Recurrent(Net):
    """An LSTM keeps a list of its weights; two layers share theirs across the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.net[6].weight = self.net[0].weight

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.net(x)[:, None])
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.95)
            self.log("out", self(torch.ones(2, WIDTH, dtype=torch.float64)).sum())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Noisy(Net):
    """Draws in hooks; without its own seed."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


class ValidatedWeights(Validated):
    """Hooks of validation run in inference mode."""

    def on_validation_epoch_end(self) -> None:
        norm = torch.stack([p.norm() for p in self.parameters()]).norm()
        self.log("weights", norm, sync_dist=True)

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.99)


class Sizes(Net):
    """A rate for each group by the size of its parameters, before anything else looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Any] = []

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(layer.parameters())} for layer in (self.net, self.head)]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            self.sizes += [(*p.shape, p.numel(), p.nbytes, len(p)) for p in group["params"]]
            group["lr"] = 1.0 / sum(p.numel() for p in group["params"])
            group["momentum"] *= 0.5


def sizes(module: Any, trainer: Any) -> Any:
    return module.sizes


def seen(module: Any, trainer: Any) -> Any:
    return module.seen if trainer.is_global_zero else None


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "byol": (Byol, {}),
    "before_zero_grad": (BeforeZeroGrad, {}),
    "dino": (Dino, {"buffers": ["centre"]}),
    "moco": (Moco, {"buffers": ["queue"]}),
    "mean_teacher": (Net, {"callbacks": mean_teacher}),
    "clipped_by_norm": (ClippedByNorm, {}),
    "clipped_groups": (ClippedGroups, {}),
    "own_clipping": (OwnClipping, {}),
    "norms_logged": (NormsLogged, {"max_epochs": 2}),
    "clamped": (Clamped, {}),
    "late_touch": (LateTouch, {}),
    "whole_forward": (WholeForward, {}),
    "head_only": (HeadOnly, {}),
    "own_step": (OwnStep, {}),
    "by_hand": (ByHand, {"max_epochs": 2}),
    "part_frozen": (PartFrozen, {}),
    "own_backward": (OwnBackward, {"gradient_clip_val": 0.2}),
    "own_backward_accumulated": (ScaledBackward, {"accumulate_grad_batches": 2}),
    "kept_parameters": (Net, {"callbacks": kept_parameters}),
    "saves": (Net, {"callbacks": saves}),
    "recurrent": (Recurrent, {}),
    "noisy": (Noisy, {}),
    "validated_weights": (ValidatedWeights, {"max_epochs": 2}),
    "zero1": (Byol, {"strategy": {"overlap": "zero1"}}),
    "swa": (WithScheduler, {"callbacks": swa, "max_epochs": 4, "told": learning_rates}),
    "ema": (Validated, {"callbacks": ema, "max_epochs": 2}),
    "averaging": (Validated, {"callbacks": averaging, "max_epochs": 2}),
    "unfreezing": (Unfreezing, {"max_epochs": 2}),
    "freezing_middle": (FreezingMiddle, {}),
    "added_group": (AddedGroup, {}),
    "sizes": (Sizes, {"told": sizes}),
    "finetuning": (Tuned, {"callbacks": finetuning, "max_epochs": 4, "told": learning_rates}),
}


EVERYDAY = (
    "byol", "swa", "own_clipping", "norms_logged", "late_touch", "own_backward", "ema",
    "finetuning",
)  # fmt: skip

SHARES_EVERYDAY = (("swa", "tp2"),)


@spread(EVERYDAY, name="name", seldom=[name for name in CASES if name not in EVERYDAY])
@pytest.mark.lightning_feature(
    "callback", "BackboneFinetuning", "EMAWeightAveraging", "StochasticWeightAveraging",
    "WeightAveraging",
)  # fmt: skip
def test_a_hook_sees_the_whole_model(name: str, layout: str, ranks: Callable[[int], Ranks]) -> None:
    case, options = CASES[name]
    stock, piped = equal_to_stock(ranks, case, layout, **options)
    assert all(fitted.told == stock.told for fitted in piped)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name, layout, marks=() if (name, layout) in SHARES_EVERYDAY else pytest.mark.full
        )
        for name in CASES
        for layout in SHARED
    ],
)
def test_a_hook_sees_whole_weights_where_ranks_share_them(
    name: str, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    case, options = CASES[name]
    stock, piped = equal_to_stock(ranks, case, layout, **options)
    assert all(fitted.told == stock.told for fitted in piped)


def test_ranks_without_anything_to_train_take_part_where_optimizer_state_is_shared(
    ranks: Callable[[int], Ranks],
) -> None:
    equal_to_stock(ranks, Byol, "1f1b-dp2", strategy={"overlap": "zero1"})


@pytest.mark.full
def test_a_parameter_that_a_hook_adds_is_refused(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(ModelError, match=r"gives net\.2 the parameter weight_orig during"):
        ranks(2).run(train, case=f"{__name__}:PrunedLate", strategy=LAYOUTS["1f1b"])


class Normed(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        found = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        with torch.no_grad():
            for parameter in found:
                parameter.sub_(parameter.grad / norm, alpha=0.1)
        return loss


class Sharpness(Normed):
    """Goes uphill by a step of that norm first, as SAM does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        found = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        with torch.no_grad():
            moves = [0.05 * p.grad / norm for p in found]
            torch._foreach_add_(found, moves)
            closure()
            torch._foreach_sub_(found, moves)
            for parameter in found:
                parameter.sub_(parameter.grad, alpha=0.1)


class Signed(Normed):
    """Treats each parameter by itself, and keeps a momentum."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    kept = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                    kept.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(kept.sign(), alpha=0.01)
        return loss


class Slow(Signed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]


class Steady(Normed):
    """One step size for all parameters, as Prodigy and D-Adaptation have; ``see`` updates it."""

    def see(self, group: Any, parameters: list[Any], size: float) -> float:
        """How far the weights have come, by their gradients."""
        for parameter in parameters:
            start = self.state[parameter].setdefault("start", parameter.detach().clone())
            came = float((parameter.grad * (start - parameter)).sum())
            group["came"] = group.get("came", 0.0) + came
            group["way"] = group.get("way", 0.0) + float(parameter.grad.abs().sum())
        return max(size, group["came"] / group["way"])

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                size = group.setdefault("size", 1e-6)
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign(), alpha=size)
                group["size"] = self.see(group, group["params"], size)
        return loss


class Largest(Steady):
    def see(self, group: Any, parameters: list[Any], size: float) -> float:
        found = max(float(parameter.grad.abs().max()) for parameter in parameters)
        return 1e-3 / max(found, 1.0)


class Late(Steady):
    """Begins to look across after five steps."""

    def see(self, group: Any, parameters: list[Any], size: float) -> float:
        group["n"] = group.get("n", 0) + 1
        return super().see(group, parameters, size) if group["n"] > 5 else size


class AcrossGroups(Steady):
    def see(self, group: Any, parameters: list[Any], size: float) -> float:
        every = [p for each in self.param_groups for p in each["params"]]
        return 1e-3 / (1 + float(sum(p.grad.abs().sum() for p in every)))


class PerWeight(Steady):
    """A step size of each parameter's own, and a number that is the same on all ranks."""

    def see(self, group: Any, parameters: list[Any], size: float) -> float:
        for parameter in parameters:
            self.state[parameter]["norm"] = float(parameter.grad.norm())
            parameter.sub_(parameter.grad / (1 + self.state[parameter]["norm"]), alpha=0.1)
        return size * 1.1


class Polyak(Normed):
    """By the loss and the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        found = [p for group in self.param_groups for p in group["params"]]
        size = loss / (1 + sum(p.grad.square().sum() for p in found))
        with torch.no_grad():
            for parameter in found:
                parameter.sub_(parameter.grad * size)
        return loss


class Around(Normed):
    """Has an optimizer inside, whose groups are its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inside = torch.optim.Adam(self.param_groups)
        self.param_groups = self.inside.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inside.step(closure)


class NoisySteps(Signed):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        return loss


class NoisyByItself(Signed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                noise = torch.rand(parameter.shape, generator=self.generator)
                parameter.add_(noise, alpha=1e-4)
        return loss


_OTHERS = "updates a parameter by the gradients of others"
_DRAWS = "draws random numbers"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Normed, _OTHERS),
        (Sharpness, _OTHERS),
        (Steady, _OTHERS),
        (Largest, _OTHERS),
        (Late, _OTHERS),
        (AcrossGroups, _OTHERS),
        (Polyak, _OTHERS),
        (NoisySteps, _DRAWS),
        (NoisyByItself, _DRAWS),
        (Slow, "keeps tensors of the whole model"),
        (Signed, None),
        (PerWeight, None),
        (Around, None),
        (torch.optim.Adam, None),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_an_optimizer_that_needs_the_whole_model_is_refused(
    kind: Any, words: str | None, apart: bool
) -> None:
    owned = list(Net().parameters())
    optimizer = kind([{"params": owned[::2]}, {"params": owned[1::2]}] if apart else owned, lr=0.1)
    before = [p.detach().clone() for p in owned]
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    drawn = torch.get_rng_state()
    refused = nullcontext() if words is None else pytest.raises(ModelError, match=words)
    with refused:
        refuse_optimizers([optimizer], world_size=2, pipeline=2, on_nan="stop")
    assert all(torch.equal(one, other) for one, other in zip(before, owned, strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert str(groups) == str(optimizer.param_groups)
    assert not optimizer.state
    assert not getattr(optimizer, "inside", optimizer).state


class Fussy(Signed):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if len(self.param_groups[0]["params"][0]) == 4:
            raise RuntimeError("too small")
        return super().step(closure)


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:
    optimizer = Fussy(Net().parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"Fussy could not be tried .*RuntimeError: too small"):
        refuse_optimizers([optimizer], world_size=2, pipeline=2, on_nan="stop")


class Moments(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.log("moments", sum(s["exp_avg"].norm() for s in optimizer.state.values()))


class MomentsInStep(Moments):
    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.log("moments", float(len(optimizer.state)))
        return super().training_step(batch, batch_idx)


@pytest.mark.full
@pytest.mark.parametrize(("case", "who"), [("Moments", "hook"), ("MomentsInStep", "step")])
def test_who_looks_at_moments_is_refused(
    case: str, who: str, ranks: Callable[[int], Ranks]
) -> None:
    with pytest.raises(ModelError, match=f"a {who} looks at the state of an optimizer"):
        ranks(2).run(train, case=f"{__name__}:{case}", strategy=LAYOUTS["1f1b"])


def test_moments_are_hidden_from_steps_alone() -> None:
    optimizer = torch.optim.Adam(Net().parameters())
    shown = LightningOptimizer(optimizer)
    inside = False
    hide_states([shown], hidden=lambda: inside)
    optimizer.state[0] = {"step": 1}
    assert shown.state[0] == {"step": 1} and len(shown.state) == 1
    inside = True
    with pytest.raises(ModelError, match="a step looks at the state of an optimizer"):
        shown.state.items().__iter__().__next__()
    with pytest.raises(ModelError, match=r"self\.global_step"):
        len(shown.state)
    assert optimizer.state[0] == {"step": 1}


@EVERY_LAYOUT
def test_what_one_rank_reads_is_the_whole_model(layout: str, ranks: Callable[[int], Ranks]) -> None:
    stock, piped = equal_to_stock(
        ranks, Net, layout, callbacks=first_rank_reads, told=seen, max_epochs=2
    )
    assert stock.told
    assert piped[0].told == pytest.approx(stock.told, abs=1e-10)


def test_hooks_that_ask_for_their_rank_are_known() -> None:
    assert hook_watch.differs_by_rank(FirstRankReads(), "on_train_batch_end")
    assert not hook_watch.differs_by_rank(KeptParameters(), "on_train_batch_end")
    assert not hook_watch.differs_by_rank(Byol(), "on_train_batch_end")


class Squared(Net):
    def backward(self, loss: Tensor) -> None:
        (loss * loss).backward()


class Penalised(Net):
    def backward(self, loss: Tensor) -> None:
        (loss + sum(p.square().sum() for p in self.parameters())).backward()


class WeightInBackward(Net):
    def backward(self, loss: Tensor) -> None:
        (loss + self.head.weight.sum()).backward()


class Without(Net):
    def backward(self, loss: Tensor) -> None:
        pass


class Threshold(Net):
    def backward(self, loss: Tensor) -> None:
        (loss if loss > 0.5 else loss * 2).backward()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Squared, "not linear in the loss"),
        (Penalised, "looks at the module's parameters"),
        (WeightInBackward, "tensors with gradients beside the loss"),
        (Without, "runs no backward of the loss"),
        (Threshold, "not linear in the loss"),
    ],
)
def test_a_backward_that_does_more_than_scale_the_loss_is_refused_before_training(
    module: type[Net], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        hook_watch.OwnBackward(module(), torch.device("cpu"))
