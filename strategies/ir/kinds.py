"""The table of kinds: what is known of each kind of instruction, in one row.

Graph, verifier, text, walk, memory, cost tables, simulator and reports read the table and do not
repeat it, so a new kind is its name, its row, the pass that adds it and its execution. Where a kind
is named elsewhere, the code is about that one kind: a schedule that orders F and B, a pass that
adds REDUCE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


class Kind(Enum):
    """What an instruction does; the value is its spelling in text."""

    F = "F"  # forward
    B = "B"  # full backward, I and W together
    I = "I"  # gradient of the stage's inputs  # noqa: E741
    W = "W"  # gradient of the stage's weights
    R = "R"  # recompute: rebuild the graph of a forward that kept its input only
    SEND = "SEND"
    RECV = "RECV"
    REDUCE = "REDUCE"  # one bucket of a stage's gradient, over owners x dp
    GATHER = "GATHER"  # a stage's updated weights, before its first forward
    STEP = "STEP"  # the optimizer on one stage
    LOSS = (
        "LOSS"  # one loss of all microbatches, and its gradient, behind the last stage's forwards
    )
    OVERLAP = "OVERLAP_F_B"  # a forward and a backward of two microbatches, run as one
    # Inside an F, R, B or I, which the model runs: shown beside it, and no program has them.
    DISPATCH = "DISPATCH"  # a layer's tokens to the ranks of their experts
    COMBINE = "COMBINE"  # and what these have made of them, back

    # Members are singletons; the default hashes a member's name, in Python, millions of times.
    __hash__ = object.__hash__


class Value(Enum):
    """What instructions use and make; what runs before what follows from it.

    ``strategies.ir.graph`` tells the values of stages, microbatches, updates and ranks apart.
    """

    ACTIVATION = "activation"  # a stage's output, on its way to later stages
    GRADIENT = "gradient"  # that of a stage's inputs, on its way to earlier stages
    GRAPH = "graph"  # what the backward of a pair (stage, microbatch) reads
    INPUT = "input"  # what a forward keeps in its place whose pair has an R
    SAVED_FOR_W = "saved for W"
    SHARE = "share"  # of a stage's weight gradient: that of one microbatch
    SUM = "sum"  # one bucket of an update's gradient, over owners and replicas
    WEIGHTS = "weights"  # as an update has made them
    GATHERED = "gathered"  # the same, put together from replicas' shares
    LOSS_GRADIENT = "loss gradient"  # of all microbatches' outputs

    __hash__ = object.__hash__


class Purpose(Enum):
    """What memory of a (stage, microbatch) pair is held for."""

    GRAPH = "graph"  # what a forward, or its R, keeps for the backward
    INPUT = "input"  # what a forward keeps in its place whose pair has an R
    WAITING = "waiting"  # what I leaves for W
    RESULT = "result"  # the boundary tensors that a forward has made, with their graph


Amounts = Mapping[Purpose, int]
"""How many pairs' worth of each purpose; below zero where a taking instruction gives some back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """One row.

    Attributes:
        word: What it is called in legends and tips.
        occupies: The ``rank``, its collective ``channel``, or the ``wire`` to another one; nothing
            for what runs inside of a computation, which is no instruction.
        number: What tells those of a stage apart: its ``microbatch``, its ``bucket`` or nothing.
        duration: Its column in a ``CostTable``; "" for none: it takes no time, or that of others.
        work: Of which parts of a microbatch's compute it consists, by their names in ``Durations``.
        essential: Whether any order runs it; passes add the other kinds.
        uses: Of its stage's neighbours an ACTIVATION or GRADIENT, else of its own stage. GATHERED
            and LOSS_GRADIENT only where the program makes them. SEND and RECV use what their
            payload says.
        makes: Each once; only what is made can be used.
        takes: Held from its start on.
        checkpointed: The same where its pair is recomputed later; None for no difference.
        frees: Given back at its end; below zero for what is held from then on.
        temporaries: Its column of those in a ``StageMemory``.
        colour: Hue in degrees and saturation in percent; the lightness tells the stage. Forward
            and backward also differ in grey.
        key: How a legend of single letters explains its own, the first of its spelling; "" where
            the letter is the spelling.
    """

    word: str
    occupies: Literal["rank", "channel", "wire", ""]
    number: Literal["microbatch", "bucket", ""] = "microbatch"
    duration: str = ""
    work: tuple[Literal["forward", "backward_input", "backward_weight"], ...] = ()
    essential: bool = False
    uses: tuple[Value, ...] = ()
    makes: tuple[Value, ...] = ()
    takes: Amounts = field(default_factory=dict)
    checkpointed: Amounts | None = None
    frees: Amounts = field(default_factory=dict)
    temporaries: Literal["forward_temporaries", "backward_temporaries", ""] = ""
    colour: tuple[int, int] = (0, 0)
    key: str = ""

    @property
    def receives(self) -> Kind | None:
        """The payload of the messages that it consumes: F activations, B gradients."""
        if self.number != "microbatch":
            return None
        return next((payload for payload, value in PAYLOADS.items() if value in self.uses), None)


PAYLOADS: Mapping[Kind | None, Value] = {Kind.F: Value.ACTIVATION, Kind.B: Value.GRADIENT}
"""What messages carry."""

_GRAPH: Amounts = {Purpose.GRAPH: 1, Purpose.RESULT: 1}
_BACKWARD = (Value.GRAPH, Value.GRADIENT, Value.LOSS_GRADIENT)

KINDS: Mapping[Kind, KindSpec] = {
    Kind.F: KindSpec(
        word="forward", occupies="rank", duration="forward", work=("forward",), essential=True,
        uses=(Value.ACTIVATION, Value.GATHERED), makes=(Value.ACTIVATION, Value.GRAPH),
        takes=_GRAPH, checkpointed={Purpose.INPUT: 1}, temporaries="forward_temporaries",
        colour=(212, 62),
    ),
    Kind.B: KindSpec(
        word="full backward", occupies="rank", duration="backward",
        work=("backward_input", "backward_weight"), essential=True,
        uses=_BACKWARD, makes=(Value.GRADIENT, Value.SHARE),
        frees=_GRAPH, temporaries="backward_temporaries",
        colour=(28, 78),
    ),
    Kind.I: KindSpec(
        word="input gradient", occupies="rank", duration="backward_input",
        work=("backward_input",), essential=True,
        uses=_BACKWARD, makes=(Value.GRADIENT, Value.SAVED_FOR_W),
        frees={**_GRAPH, Purpose.WAITING: -1}, temporaries="backward_temporaries",
        colour=(44, 80),
    ),
    Kind.W: KindSpec(
        word="weight gradient", occupies="rank", duration="backward_weight",
        work=("backward_weight",), essential=True,
        uses=(Value.SAVED_FOR_W,), makes=(Value.SHARE,),
        frees={Purpose.WAITING: 1}, temporaries="backward_temporaries",
        colour=(150, 42),
    ),
    Kind.R: KindSpec(
        word="recompute", occupies="rank", duration="recompute", work=("forward",),
        uses=(Value.INPUT,), makes=(Value.GRAPH,),
        takes={**_GRAPH, Purpose.INPUT: -1}, temporaries="forward_temporaries",
        colour=(272, 42),
    ),
    Kind.SEND: KindSpec(word="send", occupies="wire"),
    Kind.RECV: KindSpec(word="receive", occupies="wire"),
    Kind.REDUCE: KindSpec(
        word="gradient reduction", occupies="channel", number="bucket", duration="reduce",
        uses=(Value.SHARE,), makes=(Value.SUM,),
        colour=(184, 58), key="R reduces gradients",
    ),
    Kind.GATHER: KindSpec(
        word="weight gather", occupies="channel", number="", duration="gather",
        makes=(Value.GATHERED,), colour=(320, 40), key="G gathers weights",
    ),
    Kind.STEP: KindSpec(
        word="optimizer step", occupies="rank", number="", duration="step",
        uses=(Value.SUM,), makes=(Value.WEIGHTS,), key="S: optimizer step",
    ),
    # Of what it reads the forwards' results are there, and what it makes of them is small.
    Kind.LOSS: KindSpec(
        word="loss of the whole batch", occupies="rank", number="",
        uses=(Value.ACTIVATION,), makes=(Value.LOSS_GRADIENT,),
        colour=(0, 60), key="L: loss of the whole batch",
    ),
    # Needs, work and memory are those of its halves.
    Kind.OVERLAP: KindSpec(
        word="forward and backward as one", occupies="rank", essential=True,
        colour=(340, 50), key="O: F and B as one",
    ),
    Kind.DISPATCH: KindSpec(
        word="tokens to their experts", occupies="", colour=(84, 42),
        key="D sends tokens to experts",
    ),
    Kind.COMBINE: KindSpec(
        word="tokens back from experts", occupies="", colour=(64, 46), key="C brings them back",
    ),
}  # fmt: skip


def _kinds_where(fact: Callable[[KindSpec], bool]) -> frozenset[Kind]:
    return frozenset(kind for kind, facts in KINDS.items() if fact(facts))


MESSAGE_KINDS = _kinds_where(lambda facts: facts.occupies == "wire")
CHANNEL_KINDS = _kinds_where(lambda facts: facts.occupies == "channel")
COMPUTE_KINDS = _kinds_where(lambda facts: facts.occupies == "rank")
MICROBATCH_KINDS = _kinds_where(
    lambda facts: facts.occupies == "rank" and facts.number == "microbatch"
)
EXCHANGE_KINDS = _kinds_where(lambda facts: not facts.occupies)
BUCKET_KINDS = _kinds_where(lambda facts: facts.number == "bucket")
STAGE_KINDS = _kinds_where(lambda facts: not facts.number)
BACKWARD_KINDS = _kinds_where(lambda facts: Value.GRADIENT in facts.makes)
GRADIENT_KINDS = _kinds_where(lambda facts: Value.SHARE in facts.makes)
ESSENTIAL_KINDS = _kinds_where(lambda facts: facts.essential)
UPDATE_KINDS = _kinds_where(lambda facts: bool({Value.SHARE, Value.SUM} & {*facts.uses}))


def spellings(kinds: Iterable[Kind]) -> tuple[str, ...]:
    """How they are written, in the table's order."""
    chosen = frozenset(kinds)
    return tuple(kind.value for kind in KINDS if kind in chosen)
