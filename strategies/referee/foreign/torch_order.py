"""The orders that torch's pipeline schedules have by name, with messages where torch puts them.

torchtitan, NeMo AutoModel and everything else on torch.distributed.pipelining name a schedule or
give a CSV of computations; the messages are torch's own. Two ways are in use (torch 2.13):

- One stage per rank (``1F1B``, ``GPipe``): written out by hand. 1F1B sends an activation and
  receives a gradient in one group, and the other way round.
- All others: every SEND stands right behind what makes its value and, at the same moment of one
  walk over all ranks, its RECV at the end of what the other rank has got so far. The walk gives
  each rank one instruction in turn, and counts those for sharded weights (UNSHARD of up to three
  stages ahead, RESHARD, REDUCE_GRAD), so where they stand decides where RECVs do.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.compiler import compile_plan
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError, ProgramError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Placement, Program
from strategies.plan import Plan
from strategies.referee.foreign.their_words import check_size

# torch's names, in lower case, with ours and the stages of a rank that they have unless told.
NAMES: dict[str, tuple[str, int]] = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("interleaved_1f1b", 2),
    "loopedbfs": ("looped_bfs", 2),
    "interleavedzerobubble": ("interleaved_zb", 2),
    "zbvzerobubble": ("zb_v", 2),
    "dualpipev": ("dualpipe_v", 2),
}
_SPELLED = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip


def named_order(
    name: str, pp: int, count: int, stages_per_rank: int | None, *, where: str
) -> tuple[list[list[str]], bool]:
    """The rows of a schedule that torch knows by name, and whether its messages go in groups.

    Raises:
        PlanError: torch has no schedule of that name, or not for these numbers.
    """
    known = NAMES.get(name.lower())
    if known is None:
        raise PlanError(
            f"{where}: {name[:40]!a} is no schedule of torch. It has {', '.join(_SPELLED)}, or "
            "takes a CSV file."
        )
    ours, usual = known
    wanted = usual if stages_per_rank is None else stages_per_rank
    if usual == 1 and wanted != 1:
        raise PlanError(
            f"{where}: {name} runs one stage per rank, and there are {wanted}. Try Interleaved1F1B."
        )
    check_size(3 * pp * wanted * count, where)
    if pp == 1 and wanted == 1:
        row = [f"0{kind}{m}" for m in range(count) for kind in "FB"]
        return [row], False
    least = {"interleaved_zb": pp, "zb_v": 2 * pp - 1}.get(ours, 1)
    if count < least:
        raise PlanError(
            f"{where}: {name} with {count} microbatches on {pp} ranks has an order of its own in "
            f"torch, which is known here from {least} microbatches on. Try {least}, or let torch "
            "write the order (_dump_csv) and check that file."
        )
    if ours == "1f1b":
        return one_f_one_b(pp, count), True
    # torch keeps the pairs of DualPipeV, ours only where fusing them gains something.
    costs = UniformCosts(fused=2.5) if ours == "dualpipe_v" else None
    try:
        plan = Plan(ours, pp, count, wanted if usual > 1 else None, costs=costs)
        program = compile_plan(plan).train
    except PlanError as error:
        raise PlanError(f"{where}: {name} does not take these numbers: {error}") from None
    return torch_rows(program), False


def one_f_one_b(pp: int, count: int) -> list[list[str]]:
    """1F1B with its exchanges: SEND and RECV side by side are one call.

    >>> [" ".join(row) for row in one_f_one_b(2, 2)][1]
    '1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1'
    """
    rows = []
    for stage in range(pp):
        first, last = stage == 0, stage == pp - 1
        warm = min(pp - stage - 1, count)
        row: list[str] = []

        def put(kind: str, microbatch: int, *, unless: bool, row: list[str] = row,
                stage: int = stage) -> None:  # fmt: skip
            if not unless:
                row.append(f"{stage}{kind}{microbatch}")

        for m in range(warm):
            put("RECV_F", m, unless=first)
            put("F", m, unless=False)
            put("SEND_F", m, unless=last)
        if warm < count:
            put("RECV_F", warm, unless=first)
        for m in range(count - warm):
            put("F", m + warm, unless=False)
            put("SEND_F", m + warm, unless=last)
            put("RECV_B", m, unless=last)
            put("B", m, unless=False)
            put("SEND_B", m, unless=first)
            if m + warm + 1 < count:
                put("RECV_F", m + warm + 1, unless=first)
        for m in range(count - warm, count):
            put("RECV_B", m, unless=last)
            put("B", m, unless=False)
            put("SEND_B", m, unless=first)
        rows.append(row)
    return rows


def torch_rows(program: Program) -> list[list[str]]:
    """The computations of a program, with messages where torch's own pass puts them.

    Raises:
        ProgramError: No rank can go on: torch refuses such an order, too.
    """
    place = program.placement
    waiting = [
        _with_turns([item for item in row if item.kind in _COMPUTED], program.num_microbatches)
        for row in program.compute_rows()
    ]
    rows: list[list[str]] = [[] for _ in waiting]
    here: list[set[tuple[bool, int, int]]] = [set() for _ in waiting]  # forward, stage, microbatch
    heads = [0] * len(waiting)
    while True:
        going = False
        for rank, items in enumerate(waiting):
            if heads[rank] == len(items):
                continue
            item = items[heads[rank]]
            if item is None:
                heads[rank] += 1
                going = True
                continue
            if not all(_ready(part, here[rank], place) for part in item.parts):
                continue
            going = True
            heads[rank] += 1
            rows[rank].append(str(item))
            for part in item.parts:
                _hand_on(part, rank, rows, here, place)
        if all(head == len(items) for head, items in zip(heads, waiting, strict=True)):
            return rows
        if not going:
            stuck = [
                f"rank {rank} at {items[head]}"
                for rank, (head, items) in enumerate(zip(heads, waiting, strict=True))
                if head < len(items)
            ]
            raise ProgramError(
                f"{program.schedule}: torch finds no place for its messages; "
                f"{', '.join(stuck[:4])} would wait for ever."
            )


def _with_turns(row: Sequence[Instruction], count: int) -> list[Instruction | None]:
    """A rank's list with None for each instruction about sharded weights."""
    turns: list[Instruction | None] = []
    active: set[int] = set()
    left: dict[int, int] = {}
    for place, item in enumerate(row):
        wanted = _next_stages(row[place:])
        turns += [None] * (len(active - wanted) + len(wanted - active))
        active = wanted
        turns.append(item)
        for part in item.parts:
            if part.kind in (Kind.B, Kind.W):
                left[part.stage] = left.get(part.stage, count) - 1
                if not left[part.stage]:
                    turns.append(None)  # REDUCE_GRAD
    return turns + [None] * len(active)


def _next_stages(row: Sequence[Instruction]) -> set[int]:
    """The stages that are computed next: three, or one more for a fused pair."""
    found: set[int] = set()
    for item in row:
        found |= {part.stage for part in item.parts}
        if len(found) >= _AHEAD:
            break
    return found


_AHEAD = 3
_COMPUTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP})


def _ready(part: Instruction, here: set[tuple[bool, int, int]], place: Placement) -> bool:
    assert part.microbatch is not None
    if part.kind is Kind.W:
        return True
    down = part.kind is Kind.F
    source = part.stage - 1 if down else part.stage + 1
    if not 0 <= source < place.num_stages:
        return True
    return (down, source, part.microbatch) in here


def _hand_on(
    part: Instruction,
    rank: int,
    rows: Sequence[list[str]],
    here: Sequence[set[tuple[bool, int, int]]],
    place: Placement,
) -> None:
    """Lets the next stage know, with a SEND here and a RECV there if it is on another rank."""
    if part.kind is Kind.W:
        return
    assert part.microbatch is not None
    down, m = part.kind is Kind.F, part.microbatch
    target = part.stage + 1 if down else part.stage - 1
    here[rank].add((down, part.stage, m))
    if not 0 <= target < place.num_stages:
        return
    other = place.rank_of(target, m)
    if other == rank:
        return
    letter = "F" if down else "B"
    rows[rank].append(f"{part.stage}SEND_{letter}{m}")
    rows[other].append(f"{target}RECV_{letter}{m}")
    here[other].add((down, part.stage, m))
