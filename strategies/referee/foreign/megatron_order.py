"""Megatron-LM's orders with its exchanges, as its schedules go through them.

1F1B without interleaving is torch's (``torch_order``): every exchange is one group. Interleaved,
with V model chunks per rank, counts *virtual* microbatches: groups of N microbatches go through one
chunk after the other, and step k of the forwards (of the backwards) is the same everywhere. Rank r
warms up with 2 (P - r - 1) + (V - 1) N forwards; the last rank hands a chunk's output to the first
one, which takes it P - 1 steps after its own.

Without overlap the exchange of a step stands behind its forward *and* its backward and is one
group; with two ranks both neighbours are one, and what is sent to the one is received from the
other. With overlap (Megatron's default) forwards and backwards exchange by themselves, ungrouped:
even ranks send first, odd ranks receive first.

Written after ``forward_backward_pipelining_with_interleaving`` of Megatron Core.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Steps:
    """Virtual microbatches of one rank.

    Attributes:
        rank: P of it; ``pp`` ranks, ``chunks`` stages on each.
        table: Microbatch and chunk of forward step k; backwards count chunks from the end.
    """

    rank: int
    pp: int
    chunks: int
    table: tuple[tuple[int, int], ...]

    def stage(self, k: int, *, forward: bool) -> tuple[int, int]:
        microbatch, chunk = self.table[k]
        chunk = chunk if forward else self.chunks - 1 - chunk
        return chunk * self.pp + self.rank, microbatch

    def compute(self, k: int, *, forward: bool) -> str:
        stage, microbatch = self.stage(k, forward=forward)
        return f"{stage}{'F' if forward else 'B'}{microbatch}"

    def send(self, k: int, *, forward: bool) -> list[str]:
        stage, microbatch = self.stage(k, forward=forward)
        if stage == (self.pp * self.chunks - 1 if forward else 0):
            return []
        return [f"{stage}SEND_{'F' if forward else 'B'}{microbatch}"]

    def receive(self, k: int, *, forward: bool) -> list[str]:
        """What the exchange behind step k brings."""
        letter = "F" if forward else "B"
        leads = self.rank == (0 if forward else self.pp - 1)
        if not leads:
            if k + 1 == len(self.table):
                return []
            stage, microbatch = self.stage(k + 1, forward=forward)
            return [f"{stage}RECV_{letter}{microbatch}"]
        past = k - (self.pp - 1)
        if past < 0:
            return []
        stage, microbatch = self.stage(past, forward=forward)
        stage += self.pp if forward else -self.pp
        if not 0 <= stage < self.pp * self.chunks:
            return []
        return [f"{stage}RECV_{letter}{microbatch}"]

    def first(self, *, forward: bool) -> list[str]:
        """What is received before step 0; the leading rank makes it itself."""
        if self.rank == (0 if forward else self.pp - 1):
            return []
        stage, microbatch = self.stage(0, forward=forward)
        return [f"{stage}RECV_{'F' if forward else 'B'}{microbatch}"]

    def exchange(self, sent: list[str], received: list[str]) -> list[str]:
        """Even ranks send first."""
        return [*sent, *received] if self.rank % 2 == 0 else [*received, *sent]


def interleaved(pp: int, chunks: int, count: int, group: int, *, overlap: bool) -> list[list[str]]:
    """Rows of Megatron's interleaved 1F1B.

    ``group``: microbatches that go through a chunk before the next one.

    >>> interleaved(2, 2, 2, 2, overlap=False)[0][:7]
    ['0F0', '0SEND_F0', '0F1', '0SEND_F1', '2RECV_F0', '2F0', '2SEND_F0']
    """
    table = tuple(
        (microbatch, chunk)
        for start in range(0, count, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, count))
    )
    return [
        _row(_Steps(rank, pp, chunks, table), min(len(table), warm_up(rank, pp, chunks, group)),
             overlap=overlap)
        for rank in range(pp)
    ]  # fmt: skip


def warm_up(rank: int, pp: int, chunks: int, group: int) -> int:
    return 2 * (pp - rank - 1) + (chunks - 1) * group


def _row(steps: _Steps, warm: int, *, overlap: bool) -> list[str]:
    total = len(steps.table)
    left = total - warm
    row = steps.first(forward=True)
    for k in range(warm):
        row.append(steps.compute(k, forward=True))
        received = steps.receive(k, forward=True) if k < total - 1 else []
        row += steps.exchange(steps.send(k, forward=True), received)
        if k == warm - 1 and left:
            row += steps.first(forward=False)
    if warm == 0:
        # The last rank of a pipeline with one chunk and group: it has its own gradient.
        row += steps.first(forward=False)
    for k in range(left):
        forward = k + warm
        sent = steps.send(forward, forward=True)
        received = steps.receive(forward, forward=True) if k < left - 1 else []
        row.append(steps.compute(forward, forward=True))
        if overlap:
            row += steps.exchange(sent, received)
        row.append(steps.compute(k, forward=False))
        grad_sent, grad_received = steps.send(k, forward=False), steps.receive(k, forward=False)
        if overlap:
            row += steps.exchange(grad_sent, grad_received)
        else:  # As they stand in its batch: to and from the rank before, then the one behind.
            row += [*grad_sent, *received, *sent, *grad_received]
    if not left:
        row += steps.first(forward=False)
    for k in range(left, total):
        row.append(steps.compute(k, forward=False))
        received = steps.receive(k, forward=False) if k < total - 1 else []
        row += steps.exchange(steps.send(k, forward=False), received)
    return row
