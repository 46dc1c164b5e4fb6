"""Costs in any unit, equal for all stages or a list of them: what papers and formulas speak of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from strategies.costs.table import CostTable, Transport
from strategies.errors import CostError
from strategies.ir.kinds import Kind
from strategies.ir.program import Placement, Program

Sizes = float | tuple[float, ...]
"""One number for all, or a list of them."""


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """Costs per rank and microbatch, for all stages of the rank that one microbatch crosses.

    A virtual stage takes 1/V of them; with two weight copies a microbatch crosses one stage of a
    rank, which then costs the full figure.

    Where it says "or a list", there may be a number per rank, to be shared by its stages likewise,
    or one per stage, which takes all of it.

    Attributes:
        forward: F > 0, or a list; the unit of time is whatever it is given in.
        backward: B = I + W, or a list.
        backward_input: I, or a list; None for what W leaves of B, without W for half of it.
        recompute: R, or a list; None for F.
        grad_reduce: One rank's whole gradient on its collective channel, split evenly over its
            stages and buckets; or a list. Where a program gathers weights, its reductions are
            reduce-scatters and take half of it, the gathers the other half.
        num_buckets: Buckets per stage, where the program is made for these costs.
        p2p: Latency of one message, or a list: a number for each stage but the last, of what goes
            from it to the next one and back.
        transport: ``buffered`` or ``rendezvous``.
        fused: A fused F/B pair > 0; None for F + B.
        stage_input: What a checkpointed forward keeps, as a share of a full activation.
        backward_weight: W, or a list, in place of I; None for what I leaves of B.

    Raises:
        CostError: A number out of range. Lists of a wrong length are refused with the program.
    """

    forward: Sizes = 1.0
    backward: Sizes = 2.0
    backward_input: Sizes | None = None
    recompute: Sizes | None = None
    grad_reduce: Sizes = 0.0
    num_buckets: int = 1
    p2p: Sizes = 0.0
    transport: Transport = "buffered"
    fused: float | None = None
    stage_input: float = 0.0
    backward_weight: Sizes | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):  # Lists are from a script; costs must be hashable.
            if isinstance(value := getattr(self, entry.name), list):
                object.__setattr__(self, entry.name, tuple(value))
        for names, expected, holds, example in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is None and name in _OPTIONAL:
                    continue
                for number in (value,) if name in _SINGLE else _numbers(value):
                    is_number = isinstance(number, int | float) and not isinstance(number, bool)
                    if not (is_number and holds(number)):
                        listed = "" if name in _SINGLE else ", or a list of them"
                        raise CostError(
                            f"costs.{name}={number!r:.60}: expected {expected}{listed}. "
                            f"Try costs.{name}={example:g}."
                        )
        if self.transport not in ("buffered", "rendezvous"):
            raise CostError(
                f"costs.transport={self.transport} is unknown. Try costs.transport=buffered or "
                "costs.transport=rendezvous."
            )
        if self.backward_input is not None and self.backward_weight is not None:
            raise CostError(
                f"costs.backward_input={_spell(self.backward_input)} costs.backward_weight="
                f"{_spell(self.backward_weight)}: with costs.backward one of them says the other. "
                "Try costs.backward_weight=null."
            )
        uneven = next(
            (n for n in ("forward", "backward") if isinstance(getattr(self, n), tuple)), ""
        )
        if self.fused is not None and uneven:
            raise CostError(
                f"costs.fused={self.fused:g} is the duration of every pair, and costs.{uneven}="
                f"{_spell(getattr(self, uneven))} differs by stage. Try costs.fused=null."
            )

    @property
    def _pair(self) -> float:
        return sum(sum(_numbers(v)) / len(_numbers(v)) for v in (self.forward, self.backward))

    @property
    def reduces(self) -> bool:
        """Whether reductions take time."""
        return any(_numbers(self.grad_reduce))

    def check_sizes(self, placement: Placement) -> None:
        """Whether every list has a number for each rank or stage.

        Raises:
            CostError: One has not; or a half of a stage's backward is longer than the whole.
        """
        ranks, stages = placement.num_ranks, placement.num_stages
        for name in _LISTS:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) not in (ranks, stages):
                also = "" if stages == ranks else f", or {stages}, one per stage"
                raise CostError(
                    f"costs.{name}={_spell(value)} has {_count(value)}, but pp={ranks}: "
                    f"{ranks} are needed, one per rank{also}. "
                    f"Try costs.{name}={_spell(_stretched(value, ranks))}."
                )
        if isinstance(self.p2p, tuple) and len(self.p2p) != stages - 1:
            way = _spell(_stretched(self.p2p, stages - 1)) if stages > 1 else "0"
            raise CostError(
                f"costs.p2p={_spell(self.p2p)} has {_count(self.p2p)}, but there are {stages - 1} "
                f"boundaries between {stages} stages (pp={ranks}). Try costs.p2p={way}."
            )
        whole = _spread(self.backward, placement)
        for name in ("backward_input", "backward_weight"):
            value = getattr(self, name)
            parts = whole if value is None else _spread(value, placement)
            for stage, part in enumerate(parts):
                if value is not None and not 0 < part < whole[stage]:
                    raise CostError(
                        f"costs.{name}={_spell(value)} costs.backward={_spell(self.backward)}: on "
                        f"stage {stage} it is {part:g} of {whole[stage]:g}, and must lie between 0 "
                        f"and that. Try costs.{name}=null."
                    )

    def table(self, program: Program) -> CostTable:
        """Durations of a program."""
        placement = program.placement
        self.check_sizes(placement)
        count = placement.num_stages
        forward, backward = _spread(self.forward, placement), _spread(self.backward, placement)
        inputs, weights = self._halves(placement)
        copies = 1 if _by_stage(self.grad_reduce, placement) else placement.weight_copies
        reductions = [each / copies for each in _spread(self.grad_reduce, placement)]
        buckets, gathered = count_buckets(program), gathered_stages(program)
        halves = [each / (2 if s in gathered else 1) for s, each in enumerate(reductions)]
        return CostTable(
            name="uniform",
            time_unit="F",
            forward=forward,
            backward=backward,
            backward_input=inputs,
            backward_weight=weights,
            recompute=forward if self.recompute is None else _spread(self.recompute, placement),
            step=(0.0,) * count,
            reduce=tuple((h / max(n, 1),) * n for h, n in zip(halves, buckets, strict=True)),
            gather=tuple(reductions[s] / 2 if s in gathered else 0.0 for s in range(count)),
            latency=tuple(
                self.p2p[boundary.source] if isinstance(self.p2p, tuple) else self.p2p
                for boundary in program.boundaries
            ),
            occupancy=(0.0,) * len(program.boundaries),
            transport=self.transport,
            fused=1.0 if self.fused is None else self.fused / self._pair,
            stage_input=(self.stage_input,) * count,
        )

    def _halves(self, placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """I and W of each stage."""
        given = self.backward_input if self.backward_weight is None else self.backward_weight
        whole = self.backward
        if given is None:
            given = tuple(b / 2 for b in whole) if isinstance(whole, tuple) else whole / 2
        rest: tuple[float, ...]
        if isinstance(given, float | int) and isinstance(whole, float | int):
            rest = _spread(whole - given, placement)
        else:
            pairs = zip(_spread(whole, placement), _spread(given, placement), strict=True)
            rest = tuple(b - half for b, half in pairs)
        known = _spread(given, placement)
        return (known, rest) if self.backward_weight is None else (rest, known)


_Rule = tuple[tuple[str, ...], str, Callable[[float], bool], float]
_LISTS = (
    "forward", "backward", "backward_input", "backward_weight", "recompute", "grad_reduce",
)  # fmt: skip
_SINGLE = ("fused", "stage_input", "num_buckets")  # Of these there are no lists.
_OPTIONAL = ("backward_input", "backward_weight", "recompute", "fused")
# Fields, what each of their numbers has to be, and what works.
_RULES: tuple[_Rule, ...] = (
    (("forward", "backward", "backward_input", "backward_weight", "fused"),
     "a number > 0", lambda n: n > 0, 1),
    (("recompute", "grad_reduce", "p2p"), "a number >= 0", lambda n: n >= 0, 0),
    (("stage_input",), "a share of a full activation, >= 0 and < 1", lambda n: 0 <= n < 1, 0.1),
    (("num_buckets",), "a whole number >= 1", lambda n: isinstance(n, int) and n >= 1, 1),
)  # fmt: skip


def _numbers(value: Sizes) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _by_stage(value: Sizes, placement: Placement) -> bool:
    """Whether the list has a number per stage, where that is not a number per rank."""
    ranks, stages = placement.num_ranks, placement.num_stages
    return isinstance(value, tuple) and len(value) == stages != ranks


def _spread(value: Sizes, placement: Placement) -> tuple[float, ...]:
    """What each stage takes."""
    if isinstance(value, tuple) and _by_stage(value, placement):
        return value
    share = 1.0 / placement.stages_per_microbatch
    if isinstance(value, tuple):
        return tuple(value[rank] * share for rank in placement.copies[0])
    return (value * share,) * placement.num_stages


def _spell(value: Sizes) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(f"{number:g}" for number in value) + "]"
    return f"{value:g}"


def _count(value: tuple[float, ...]) -> str:
    return f"{len(value)} number{'' if len(value) == 1 else 's'}"


def _stretched(value: tuple[float, ...], count: int) -> tuple[float, ...]:
    """As many as there should be, the last one repeated."""
    return (*value, *((value or (1.0,))[-1:] * count))[:count]


def count_buckets(program: Program) -> tuple[int, ...]:
    counts = [0] * program.placement.num_stages
    for row in program.ranks:
        for item in row:
            if item.kind is Kind.REDUCE:
                assert item.bucket is not None
                counts[item.stage] = max(counts[item.stage], item.bucket + 1)
    return tuple(counts)


def gathered_stages(program: Program) -> frozenset[int]:
    """The stages whose weights are sharded: their reductions are reduce-scatters."""
    return frozenset(
        item.stage for row in program.ranks for item in row if item.kind is Kind.GATHER
    )


def reduced_and_gathered(program: Program, costed: int) -> tuple[tuple[int, ...], frozenset[int]]:
    """Buckets per stage, and ``gathered_stages``, for costs of so many stages.

    Raises:
        CostError: The program has another number of stages.
    """
    num_stages = program.placement.num_stages
    if costed != num_stages:
        raise CostError(f"costs of {costed} stages for a program of {num_stages}.")
    return count_buckets(program), gathered_stages(program)
