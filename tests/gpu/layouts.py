"""Layouts in which each two choices meet at least once, trained on ranks and in plain torch.

The same functions run on a CPU, so they are known to work before there is a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from strategies.plan import Recompute
from tests.ranks.pool import Ranks
from tests.ranks.training import Case, Learner, Sentences, small_shape, train

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
MOST_RANKS = 4
STEPS, MICROBATCHES, ROWS = 3, 4, 8  # rows of a replica's batch
CLIP = 0.5  # the gradients' norm is about 2
LR = 0.1  # So large that rounding a 32-bit weight is 1e-6 of its change.
# Far enough from overflow and underflow that no step is left out, and a power of two, which
# scales without rounding.
SCALE = 1024.0
# Heads of 16 and at least two of them per rank: the GPU's fused attention takes these.
SHAPE = small_shape(layers=4, hidden=64, heads=4, kv_heads=2, ffn=96)

# Written down before the first run on a GPU. What is compared is, per weight, the change over all
# steps: |change - expected| / |expected|, in the 2-norm. With SGD a change is a sum of gradients,
# so its relative error is theirs. Both sides compute the same microbatches from weights that differ
# by as little. What is left is the order of sums and where they are rounded; without replicas and
# tensor parallelism even that is the same.
#
# 32-true: unit roundoff 2^-24, TF32 off. A gradient passes ten units with sums of up to 96
# products, and sums over 48 tokens. The gradients of queries lose most, since a softmax subtracts
# nearly equal numbers in its backward: 2^10 roundoffs are allowed, 6.1e-5. On a CPU the largest
# were 2.5e-5.
# 16-bit products: unit roundoff 2^-8 (bfloat16) and 2^-11 (half). The partial products of two
# tensor-parallel ranks are rounded once more than those of one process, in each of eight layers,
# forward and backward: sqrt(16) = 4 roundoffs if they are independent. 16 are allowed for the same
# cancellation: 6.2e-2 and 7.8e-3. On a CPU the largest were 2.6e-2 and 2.7e-3. With bf16-true the
# 32-bit weights of the optimizer are compared.
#
# A microbatch that is left out is an error of 0.3 and more.
TOLERANCE = {
    "32-true": 2.0**-24 * 2**10,
    "bf16-mixed": 2.0**-8 * 16,
    "16-mixed": 2.0**-11 * 16,
    "bf16-true": 2.0**-8 * 16,
}
# A loss is a mean over 48 tokens or more, and no difference of nearly equal numbers.
LOSS_TOLERANCE = {name: value / 8 for name, value in TOLERANCE.items()}


@dataclass(frozen=True)
class Layout:
    """One choice per axis."""

    schedule: str
    pp: int
    dp: int
    tp: int
    precision: str
    zero1: bool
    recompute: str
    clip: bool

    def __str__(self) -> str:
        chosen = [name for name in ("zero1", "clip") if getattr(self, name)]
        return "-".join(
            [
                self.schedule, f"pp{self.pp}", f"dp{self.dp}", f"tp{self.tp}", self.precision,
                *([] if self.recompute == "none" else [self.recompute]), *chosen,
            ]
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    def case(self, *, backend: str, accelerator: str) -> Case:
        return Case(
            self.schedule,
            self.pp,
            self.dp,
            self.tp,
            rows=ROWS,
            microbatches=MICROBATCHES,
            steps=STEPS,
            clip=CLIP if self.clip else None,
            backend="auto" if self.ranks == 1 else backend,
            overlap="zero1" if self.zero1 else "grad_reduce",
            accelerator=accelerator,
            recompute=Recompute(self.recompute),  # type: ignore[arg-type]
            optimizer="SGD",
            shape=SHAPE,
        )


AXES: dict[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "zb_v", "foldx_fifo", "interleaved_1f1b"),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "tp": (1, 2),
    "precision": PRECISIONS,
    "zero1": (False, True),
    "recompute": ("none", "full", "selective"),
    "clip": (False, True),
}
Pair = tuple[str, Any, str, Any]


def allowed(layout: Layout) -> bool:
    """Whether it fits on the ranks that a test may have, and shards only what has replicas."""
    return layout.ranks <= MOST_RANKS and (layout.dp > 1 or not layout.zero1)


def all_layouts() -> list[Layout]:
    assert [field.name for field in fields(Layout)] == list(AXES)
    every = itertools.starmap(Layout, itertools.product(*AXES.values()))
    return [layout for layout in every if allowed(layout)]


def pairs_of(layout: Layout) -> tuple[Pair, ...]:
    """Each two of its choices."""
    chosen = zip(AXES, astuple(layout), strict=True)
    return tuple((*one, *other) for one, other in itertools.combinations(chosen, 2))


def pairwise(layouts: list[Layout]) -> list[Layout]:
    """Some of them that hold every pair of choices that any of them holds.

    The same in every process. Pairs of the axes with the most choices come first, since they decide
    how many layouts it takes; of layouts that add as many pairs, one with the most ranks.
    """
    held = [pairs_of(layout) for layout in layouts]
    every = sorted(
        dict.fromkeys(itertools.chain.from_iterable(held)),
        key=lambda pair: -len(AXES[pair[0]]) * len(AXES[pair[2]]),
    )
    bits = {pair: 1 << number for number, pair in enumerate(every)}
    masks = [sum(bits[pair] for pair in pairs) for pairs in held]
    missing = (1 << len(bits)) - 1
    found = []
    while missing:
        first = missing & -missing
        best = max(
            (number for number, mask in enumerate(masks) if mask & first),
            key=lambda number: ((masks[number] & missing).bit_count(), layouts[number].ranks),
        )
        found.append(layouts[best])
        missing &= ~masks[best]
    return found


# ---------------------------------------------------------------------------------------- on ranks


class Changes(Callback):
    """Sets the learning rate, and notes how far training moves what the optimizer updates."""

    reads_weights = False

    def __init__(self) -> None:
        self._first: dict[tuple[str, int, int], Tensor] = {}
        self.found: dict[tuple[str, int, int], Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._first = _updated(trainer.strategy.engine)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = LR

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.engine.complete()
        last = _updated(trainer.strategy.engine)
        self.found = {key: last[key] - value for key, value in self._first.items()}


def _updated(engine: Any) -> dict[tuple[str, int, int], Tensor]:
    """(name, first element, behind the last one) -> values, flat, on the host."""
    found = {}
    for name, parameter in engine.named_parameters().items():
        pieces = engine.mains.pieces_of(parameter)
        if pieces is None:
            found[name, 0, parameter.numel()] = parameter
        else:
            found.update({(name, piece.start, piece.stop): piece.main for piece in pieces})
    return {key: value.detach().cpu().flatten().clone() for key, value in found.items()}


def precision_options(precision: str, accelerator: str) -> dict[str, Any]:
    """What the Trainer is given; half with a scaler whose first scale overflows nothing."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"precision": None, "plugins": [_plugin(precision, accelerator)]}


def train_layout(layout: Layout, *, backend: str, accelerator: str) -> dict[str, Any]:
    """Trains on this rank."""
    changes = Changes()
    result = train(
        layout.case(backend=backend, accelerator=accelerator),
        callbacks=[changes],
        **precision_options(layout.precision, accelerator),
    )
    return {name: result[name] for name in ("losses", "shards", "tp_rank", "pp_rank")} | {
        "changes": changes.found
    }


# ----------------------------------------------------------------------------------- in plain torch


def train_alone(layout: Layout, *, accelerator: str, left_out: int = 0) -> dict[str, Any]:
    """The same training of one process: a loop, stock precision, and torch's optimizer.

    The rows of a microbatch are those of the ranks; 16-bit weights are copies of 32-bit ones.
    ``left_out``: so many microbatches of each step have no gradient, an error to be found.
    """
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is on"
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    plugin = _plugin(layout.precision, accelerator)
    case = layout.case(backend="auto", accelerator=accelerator)
    model = plugin.convert_module(Learner(SHAPE)).to(device)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    mains = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    first = [main.detach().clone() for main in mains]
    optimizer = torch.optim.SGD(mains, lr=LR, momentum=0.9)
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    losses = []
    for rows in Sentences(case.count).tokens.to(device).split(ROWS * layout.dp):
        total = 0.0
        for main in mains:
            main.grad = torch.zeros_like(main)
        parts = [p for r in range(layout.dp) for p in rows[r :: layout.dp].chunk(MICROBATCHES)]
        for part in parts[left_out:]:
            with plugin.train_step_context():
                loss = model.training_step({"tokens": part[:, :-1], "targets": part[:, 1:]}, 0)
            loss = loss * (len(part) / len(rows))
            total += float(loss.detach())
            (loss if scaler is None else scaler.scale(loss)).backward()
            for main, parameter in zip(mains, model.parameters(), strict=True):
                assert main.grad is not None
                assert parameter.grad is not None
                main.grad += parameter.grad
                parameter.grad = None
        losses.append(total)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if layout.clip:
            assert nn.utils.clip_grad_norm_(mains, CLIP) > CLIP
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            for main, parameter in zip(mains, model.parameters(), strict=True):
                parameter.copy_(main)
    names = [name for name, _ in model.named_parameters()]
    changes = [main.detach() - before for main, before in zip(mains, first, strict=True)]
    assert scaler is None or scaler.get_scale() == SCALE, "a step was left out"
    return {
        "losses": losses,
        "changes": {name: change.cpu() for name, change in zip(names, changes, strict=True)},
    }


def _plugin(precision: str, accelerator: str) -> Precision:
    device = "cuda" if accelerator == "gpu" else "cpu"
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=1000)
        return MixedPrecision("16-mixed", device, scaler)
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device)
    return HalfPrecision("bf16-true") if precision == "bf16-true" else Precision()


# ---------------------------------------------------------------------------------------- compared


def differences(
    results: list[dict[str, Any]], alone: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Of the losses the largest relative one, and of each weight's change, over all ranks."""
    losses = []
    for batch, expected in enumerate(alone["losses"]):
        # Each rank of a replica has its replica's loss, or everybody's.
        found = sum(result["losses"][batch] for result in results) / len(results)
        losses.append(abs(found / expected - 1))
    squares: dict[str, tuple[float, float]] = {}
    for result in results:
        for (name, start, stop), change in result["changes"].items():
            expected = alone["changes"][name]
            if name in result["shards"]:
                expected = result["shards"][name].local(expected, result["tp_rank"])
            expected = expected.flatten()[start:stop]
            wrong, whole = squares.get(name, (0.0, 0.0))
            wrong += float((change - expected).double().square().sum())
            squares[name] = wrong, whole + float(expected.double().square().sum())
    assert set(squares) == set(alone["changes"])
    return max(losses), {n: (wrong / whole) ** 0.5 for n, (wrong, whole) in squares.items()}


def check(layout: Layout, ranks: Callable[[int], Ranks], *, backend: str, accelerator: str) -> None:
    """Holds ranks against one process on the same device."""
    where = {"layout": layout, "accelerator": accelerator}
    results = ranks(layout.ranks).run(train_layout, backend=backend, **where)
    (alone,) = ranks(1).run(train_alone, **where)
    loss, changes = differences(results, alone)
    assert loss <= LOSS_TOLERANCE[layout.precision]
    worst = max(changes, key=changes.__getitem__)
    assert changes[worst] <= TOLERANCE[layout.precision], worst
