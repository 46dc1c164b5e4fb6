"""A loss or gradient that is not finite on one rank: no rank updates, and the place is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from strategies.errors import ModelError, NotFiniteError
from strategies.runtime.engine.rank_engine import Engine
from tests.ranks.fit import trainer_of
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, Learner, Sentences, small_shape

pytestmark = pytest.mark.distributed

STEPS, BAD = 5, 2  # the third optimizer step


@dataclass(frozen=True)
class Fault:
    """What goes wrong in step ``BAD``, on ranks with ``pp_rank`` (None: any) and ``dp_rank``.

    ``what``: ``loss``, ``output`` of a unit, or the ``gradient`` of a parameter.
    """

    what: str
    name: str = ""
    dp_rank: int = 0
    value: float = math.nan
    case: Case = field(default_factory=Case)
    precision: str = "64-true"
    scale: float = 65536.0


class Faulty(Learner):
    """Multiplies with NaN where it is told to."""

    fault: Fault | None = None
    active = False

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: Any) -> Any:
        loss = super().pipeline_result(tensors, batch, batch_idx, mode)
        if self.active and self.fault is not None and self.fault.what == "loss":
            # The gradient of this loss is finite: only the loss itself tells.
            loss = loss + loss.detach() * self.fault.value
        return loss


class Schedule(pl.Callback):
    """Switches the fault on for one optimizer step, and keeps every step's weights."""

    reads_weights = False

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        fault = self._fault
        here = trainer.strategy.coordinates.dp_rank == fault.dp_rank
        self._mine = here
        named = dict(module.named_parameters())
        if fault.what == "gradient" and fault.name in named and here:
            named[fault.name].register_hook(self._spoil(module))
        if fault.what == "output" and here:
            unit = dict(module.pipeline_units())[fault.name]
            unit.register_forward_hook(
                lambda _, __, output: output * fault.value if module.active else output
            )

    def _spoil(self, module: Any) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient + self._fault.value if module.active else gradient

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.active = self._mine and trainer.global_step == BAD

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        trainer.strategy.engine.complete()
        owned = trainer.strategy.engine.named_parameters()
        self.weights.append({n: p.detach().cpu().clone() for n, p in owned.items()})


def train(*, fault: Fault, on_nan: str, module: type[Faulty] = Faulty) -> dict[str, Any]:
    """Trains on this rank; what is left of it, and what it said."""
    case = fault.case
    model = module(case.shape, case.optimizer)
    model.fault = fault
    schedule = Schedule(fault)
    strategy = case.strategy(on_nan=on_nan)
    kinds: dict[str, Any] = {"precision": fault.precision}
    if fault.precision == "16-mixed":  # Lightning would take bf16 on a CPU
        device = "cuda" if case.accelerator == "gpu" else "cpu"
        scaler = torch.amp.GradScaler(device, fault.scale)
        kinds = {"plugins": [MixedPrecision("16-mixed", device, scaler)]}
    options = case.trainer() | kinds | {"callbacks": [schedule], "max_steps": STEPS}
    del options["losses"]
    trainer = trainer_of(strategy, **options)
    loader = DataLoader(Sentences(case.count), batch_size=case.rows)
    error = ""
    try:
        trainer.fit(model, loader)
    except NotFiniteError as raised:
        error = str(raised)
    strategy = trainer.strategy
    engine = strategy.engine
    engine.complete()
    found = {
        "error": error,
        "skipped": strategy.skipped_steps,
        "step": trainer.global_step,
        "weights": schedule.weights,
        "left": {n: p.detach().cpu().clone() for n, p in engine.named_parameters().items()},
        "waits": len(engine.norm_waits_s),
    }
    engine.close()
    return found


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some)


def finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(weight).all()) for weight in weights.values())


GATE = "net.layers.1.mlp.gate.weight"
DOWN = "net.layers.2.mlp.down.weight"
# What the fault is, and what the message says of it.
CASES = {
    "no clipping": (
        Fault("gradient", GATE, case=Case(pp=2)),
        rf"the gradient of {GATE} .*is nan: stage 0 on rank 0 \(pp 0, dp 0, ",
    ),
    "clipping": (
        Fault("gradient", DOWN, case=Case(pp=2, clip=0.1)),
        rf"the gradient of {DOWN} .*is nan: stage 1 on rank 1 \(pp 1, dp 0, ",
    ),
    "a forward": (
        Fault("output", "net.layers.0.mlp", case=Case(pp=2)),
        r"the output of microbatch 0 is nan in the forward: stage 0 on rank 0 ",
    ),
    "a replica": (
        Fault("gradient", GATE, dp_rank=1, value=math.inf, case=Case(pp=2, dp=2)),
        rf"the gradient of {GATE} .*is inf: stage 0 on rank 1 \(pp 0, dp 1, ",
    ),
    "a loss that no gradient shows": (
        Fault("loss", dp_rank=1, case=Case(pp=2, dp=2)),
        r"the loss of microbatch 0 is nan in the forward: stage 1 on rank 3 \(pp 1, dp 1, ",
    ),
    "shares": (
        Fault("gradient", DOWN, dp_rank=1, case=Case(pp=2, dp=2, overlap="zero1")),
        rf"the gradient of {DOWN} .*is nan: stage 1 on rank 3 \(pp 1, dp 1, ",
    ),
    "shares, clipping": (
        Fault("gradient", GATE, dp_rank=1, case=Case(pp=2, dp=2, overlap="zero1", clip=0.1)),
        rf"the gradient of {GATE} .*stage 0 on rank 1 ",
    ),
    "a loss, shares": (
        Fault("loss", dp_rank=0, case=Case(pp=2, dp=2, overlap="zero1")),
        r"the loss of microbatch 0 is nan .*stage 1 on rank 2 ",
    ),
    "a loss, clipping": (
        Fault("loss", dp_rank=1, value=math.inf, case=Case(pp=2, dp=2, clip=0.1)),
        r"the loss of microbatch 0 is inf .*stage 1 on rank 3 ",
    ),
    "accumulation": (
        Fault("gradient", GATE, case=Case(pp=2, accumulation=2)),
        rf"the gradient of {GATE} .*stage 0 on rank 0 ",
    ),
    "split backward": (
        Fault("gradient", DOWN, case=Case(pp=2, schedule="zb_h2")),
        rf"the gradient of {DOWN} .*stage 1 on rank 1 ",
    ),
    "two stages per rank": (
        Fault("gradient", DOWN, case=Case(pp=2, schedule="zb_v")),
        rf"the gradient of {DOWN} .*stage 2 on rank 1 ",
    ),
    "two copies": (
        Fault("loss", case=Case(pp=4, schedule="chimera")),
        r"the loss of microbatch \d is nan .*stage 3 on rank [03] ",
    ),
    "shared matrices": (
        Fault("gradient", DOWN, case=Case(pp=2, tp=2, shape=small_shape(kv_heads=2))),
        rf"the gradient of {DOWN} .*stage 1 on rank 2 \(pp 1, dp 0, tp 0, ",
    ),
    "one process": (
        Fault("gradient", DOWN, case=Case()),
        rf"the gradient of {DOWN} .*stage 0 on rank 0 ",
    ),
    "16-bit weights": (
        Fault("gradient", DOWN, case=Case(pp=2), precision="bf16-true"),
        rf"the gradient of {DOWN} .*stage 1 on rank 1 ",
    ),
    "a gradient scaler, loss": (
        Fault("loss", case=Case(pp=2), precision="16-mixed"),
        r"the loss of microbatch 0 is nan .*stage 1 on rank 1 ",
    ),
}


def _long_but(*everyday: str) -> list[Any]:
    return [
        pytest.param(*case, id=name, marks=() if name in everyday else pytest.mark.full)
        for name, case in CASES.items()
    ]


@pytest.mark.parametrize(
    ("fault", "says"),
    _long_but("no clipping", "clipping", "shares"),
)
def test_no_rank_applies_the_step_and_training_goes_on(
    ranks: Callable[[int], Ranks], fault: Fault, says: str
) -> None:
    case = fault.case
    found = ranks(case.pp * case.dp * case.tp).run(train, fault=fault, on_nan="skip")
    for rank in found:
        assert (rank["error"], rank["skipped"], rank["step"]) == ("", [BAD], STEPS)
        for step, weights in enumerate(rank["weights"]):
            assert finite(weights)
            if step:
                before = rank["weights"][step - 1]
                assert same(before, weights) == (step == BAD), step


@pytest.mark.parametrize(
    ("fault", "says"),
    _long_but("no clipping", "a forward", "a replica", "a loss that no gradient shows"),
)
def test_all_ranks_stop_at_the_same_step_and_name_the_same_place(
    ranks: Callable[[int], Ranks], fault: Fault, says: str
) -> None:
    case = fault.case
    found = ranks(case.pp * case.dp * case.tp).run(train, fault=fault, on_nan="stop")
    assert len({rank["error"] for rank in found}) == 1
    error = found[0]["error"]
    assert error.startswith(f"step {BAD + 1}: ")
    assert re.search(says, error), error
    assert "No rank has applied this step. No checkpoint has been written." in error
    for rank in found:
        assert len(rank["weights"]) == BAD
        assert same(rank["weights"][-1], rank["left"])


def test_clipping_tells_all_ranks_with_the_all_reduce_that_it_makes_anyway(
    ranks: Callable[[int], Ranks],
) -> None:
    fault, _ = CASES["clipping"]
    for rank in ranks(2).run(calls, fault=fault):
        assert rank == {"norms": STEPS, "others": 0}
    for rank in ranks(2).run(calls, fault=replace(fault, case=replace(fault.case, clip=None))):
        assert rank == {"norms": 0, "others": STEPS}


def calls(*, fault: Fault) -> dict[str, int]:
    """How often the ranks agree, in the norm or beside it."""
    others = 0
    agree = Engine.leaves_out

    def counted(engine: Engine) -> bool:
        nonlocal others
        others += 1
        return agree(engine)

    Engine.leaves_out = counted  # type: ignore[method-assign]
    try:
        found = train(fault=fault, on_nan="skip")
    finally:
        Engine.leaves_out = agree  # type: ignore[method-assign]
    return {"norms": found["waits"], "others": others}


def test_infinite_gradients_are_the_scalers_where_there_is_one(
    ranks: Callable[[int], Ranks],
) -> None:
    fault = Fault("gradient", DOWN, value=math.inf, case=Case(pp=2), precision="16-mixed")
    for rank in ranks(2).run(train, fault=fault, on_nan="stop"):
        assert (rank["error"], rank["skipped"], rank["step"]) == ("", [], STEPS)
        assert same(rank["weights"][BAD - 1], rank["weights"][BAD])  # it has left the step out


@pytest.mark.full
def test_a_scaler_that_has_nothing_left_to_scale_down_is_no_excuse(
    ranks: Callable[[int], Ranks],
) -> None:
    fault = Fault("gradient", DOWN, case=Case(pp=2), precision="16-mixed", scale=1.0)
    for rank in ranks(2).run(train, fault=fault, on_nan="stop"):
        assert f"the gradient of {DOWN}" in rank["error"]
        assert same(rank["weights"][-1], rank["left"])


def test_a_run_that_ignores_them_goes_on_with_what_it_has(ranks: Callable[[int], Ranks]) -> None:
    fault, _ = CASES["no clipping"]
    found = ranks(2).run(train, fault=fault, on_nan="ignore")
    assert [rank["skipped"] for rank in found] == [[], []]
    assert not finite(found[0]["left"])


def test_a_healthy_run_is_the_same_with_and_without_the_guard(
    ranks: Callable[[int], Ranks],
) -> None:
    fault = Fault("nothing", case=Case(pp=2, dp=2))
    watched, alone = (ranks(4).run(train, fault=fault, on_nan=mode) for mode in ("skip", "ignore"))
    for one, other in zip(watched, alone, strict=True):
        assert one["skipped"] == []
        assert same(one["left"], other["left"])


def test_an_optimizer_that_moves_weights_several_times_cannot_skip(
    ranks: Callable[[int], Ranks],
) -> None:
    (said,) = ranks(1).run(refused)
    assert "LBFGS moves the weights several times" in said


def refused() -> str:
    try:
        train(fault=Fault("nothing", case=Case(optimizer="LBFGS")), on_nan="skip")
    except ModelError as error:
        return str(error)
    return ""


class Hooked(Faulty):
    """Its hook leaves a gradient not finite, which the backward has made finite."""

    hook = ""

    def _spoil(self) -> None:
        assert self.fault is not None
        named = dict(self.named_parameters())
        if self.trainer.global_step == BAD and self.fault.name in named:
            gradient = named[self.fault.name].grad
            assert gradient is not None
            gradient.view(-1)[0] = self.fault.value

    def on_after_backward(self) -> None:
        if self.hook == "on_after_backward":
            self._spoil()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.hook == "on_before_optimizer_step":
            self._spoil()


def train_hooked(*, hook: str, case: Case, on_nan: str) -> dict[str, Any]:
    Hooked.hook = hook
    return train(fault=Fault("hook", GATE, case=case), on_nan=on_nan, module=Hooked)


@pytest.mark.parametrize(
    ("hook", "case"),
    [
        ("on_after_backward", Case(pp=2)),
        ("on_before_optimizer_step", Case()),
        pytest.param("on_before_optimizer_step", Case(pp=2, dp=2), marks=pytest.mark.full),
        pytest.param("on_after_backward", Case(pp=2, clip=0.1), marks=pytest.mark.full),
    ],
)
def test_what_hooks_leave_not_finite_is_not_applied(
    ranks: Callable[[int], Ranks], hook: str, case: Case
) -> None:
    pool = ranks(case.pp * case.dp * case.tp)
    for rank in pool.run(train_hooked, hook=hook, case=case, on_nan="skip"):
        assert (rank["error"], rank["skipped"], rank["step"]) == ("", [BAD], STEPS)
        assert all(map(finite, rank["weights"]))
        assert same(rank["weights"][BAD - 1], rank["weights"][BAD])
    errors = {rank["error"] for rank in pool.run(train_hooked, hook=hook, case=case, on_nan="stop")}
    (error,) = errors
    assert error.startswith(f"step {BAD + 1}: the gradient of {GATE} is nan")
    if case.clip is None:
        assert "after the code between backward and update" in error
