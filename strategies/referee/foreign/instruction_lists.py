"""Orders as programs print them: DeepSpeed's instructions, zero-bubble's lines and nodes.

DeepSpeed names buffers and no microbatches: the k-th LoadMicroBatch or RecvActivation brings
microbatch k, and a buffer holds what was last put into it. Ranks are told apart by a word in front
(``rank 0:``, ``stage=1``, ``STAGE=1``), by an empty line between two, or by OptimizerStep().

zero-bubble prints a line per rank in three ways: in time (``F0--F0--..B0-B``), passes as words
(``F1 F2 B1 W1``), letters alone (``ffbfbwbw``); lower case is the second chunk where a line has
both, and stands on the ranks in reverse (V). ``ScheduledNode(...)`` lists have it all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from strategies.errors import ProgramError
from strategies.plan import ScheduleFile
from strategies.referee.foreign.their_words import Theirs, as_csv, check_size, place, shown

_CALL = re.compile(r"([A-Z]\w*)\(([^()\n]*)\)")
_RANK = re.compile(r"(?i)\b(?:rank|stage|stage_id)\s*[=:#]?\s*(\d{1,5})\b")
_BUFFER = re.compile(r"(?:buffer_id\s*=\s*)?(\d{1,7})\b")
# DeepSpeed's, which compute and send nothing between stages.
_SILENT = frozenset({"ReduceGrads", "ReduceTiedGrads", "OptimizerStep"})
_KNOWN = frozenset({
    "LoadMicroBatch", "ForwardPass", "BackwardPass", "SendActivation", "RecvActivation",
    "SendGrad", "RecvGrad",
})  # fmt: skip


def has_instructions(text: str) -> bool:
    return "ForwardPass(" in text


def read_deepspeed(text: str, *, name: str) -> Theirs:
    """DeepSpeed's printed instruction lists.

    Raises:
        ProgramError: An instruction is unknown, or uses a buffer that holds nothing.
    """
    ranks: dict[int, _Buffers] = {}
    for rank, match in _calls(text, name):
        lists = ranks.setdefault(rank, _Buffers(rank))
        where = f"{name}, {place(text, match.start())}"
        lists.take(match[1], match[2], where)
    _check_ranks(ranks, name)
    last = len(ranks) - 1
    rows = [ranks[rank].row for rank in range(last + 1)]
    check_size(sum(map(len, rows)), name)
    note = f"{len(rows)} stages; sends and receives hold the device in their order"
    return Theirs(ScheduleFile(name, as_csv(rows)), "DeepSpeed", "rendezvous", False, (note,))


def _check_ranks(ranks: dict[int, _Buffers], name: str) -> None:
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise ProgramError(
                f"{name} has nothing of rank {rank}, but of rank {max(ranks)}. Write the lists of "
                "all ranks into the file, 'rank 0:' before the first."
            )


def _calls(text: str, name: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Instructions with the rank that they are of."""
    rank, ended, offset = 0, False, 0
    named = _RANK.search(text) is not None
    for line in text.splitlines(keepends=True):
        found = list(_CALL.finditer(text, offset, offset + len(line)))
        if named:
            before = text[offset : found[0].start() if found else offset + len(line)]
            if head := _RANK.search(before):
                rank = int(head[1])
        elif found and ended:
            rank, ended = rank + 1, False
        for match in found:
            yield rank, match
            ended = ended or match[1] == "OptimizerStep"
        if not found and not named and not line.strip() and rank_has_begun(text, offset):
            ended = True
        if not found and line.strip() and not _is_frame(line, named):
            word = line.strip()
            column = line.index(word[0]) + 1
            raise ProgramError(
                f"{name}, line {text.count(chr(10), 0, offset) + 1}, column {column}: "
                f"{shown(word)} is no instruction of DeepSpeed. It has ForwardPass(buffer_id=0), "
                "SendActivation(buffer_id=0) and so on, in lists."
            )
        offset += len(line)


def rank_has_begun(text: str, offset: int) -> bool:
    return _CALL.search(text, 0, offset) is not None


def _is_frame(line: str, named: bool) -> bool:
    """A line that only holds brackets, or the name of a rank."""
    return not line.strip("[](){}, \t\r\n") or (named and _RANK.search(line) is not None)


class _Buffers:
    """What the buffers of a rank hold, and its list so far."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.row: list[str] = []
        self._ready: dict[int, int] = {}  # buffer -> microbatch that waits for its forward
        self._made: dict[int, int] = {}  # buffer -> microbatch whose forward has run
        self._sums: dict[int, int] = {}  # buffer -> microbatch whose backward has run
        self._brought = 0

    def take(self, word: str, inside: str, where: str) -> None:
        if word in _SILENT:
            return
        if word not in _KNOWN:
            raise ProgramError(
                f"{where}: {shown(word)} is no instruction of DeepSpeed's training schedule. It "
                f"has {', '.join(sorted(_KNOWN | _SILENT))}."
            )
        match = _BUFFER.search(inside)
        if match is None:
            raise ProgramError(f"{where}: {word}({inside[:40]}) names no buffer_id.")
        getattr(self, f"_{word.lower()}")(int(match[1]), where)

    def _put(self, word: str, microbatch: int) -> None:
        self.row.append(f"{self.rank}{word}{microbatch}")

    def _held(self, table: dict[int, int], buffer: int, where: str, what: str) -> int:
        if buffer not in table:
            raise ProgramError(
                f"{where}: buffer {buffer} of rank {self.rank} holds {what} at this place."
            )
        return table[buffer]

    def _loadmicrobatch(self, buffer: int, where: str) -> None:
        if self.rank == 0:
            self._bring(buffer)

    def _bring(self, buffer: int) -> int:
        self._ready[buffer] = self._brought
        self._brought += 1
        return self._ready[buffer]

    def _recvactivation(self, buffer: int, where: str) -> None:
        self._put("RECV_F", self._bring(buffer))

    def _forwardpass(self, buffer: int, where: str) -> None:
        microbatch = self._held(self._ready, buffer, where, "no input of a forward")
        del self._ready[buffer]
        if buffer in self._made:
            raise ProgramError(
                f"{where}: this forward overwrites buffer {buffer} of rank {self.rank}, which "
                f"microbatch {self._made[buffer]} still needs for its backward. It takes more "
                "buffers (num_pipe_buffers)."
            )
        self._made[buffer] = microbatch
        self._put("F", microbatch)

    def _sendactivation(self, buffer: int, where: str) -> None:
        self._put("SEND_F", self._held(self._made, buffer, where, "no output of a forward"))

    def _recvgrad(self, buffer: int, where: str) -> None:
        self._put("RECV_B", self._held(self._made, buffer, where, "no output of a forward"))

    def _backwardpass(self, buffer: int, where: str) -> None:
        microbatch = self._held(self._made, buffer, where, "no output of a forward")
        del self._made[buffer]
        self._sums[buffer] = microbatch
        self._put("B", microbatch)

    def _sendgrad(self, buffer: int, where: str) -> None:
        self._put("SEND_B", self._held(self._sums, buffer, where, "no gradient"))


# ------------------------------------------------------------------------------------- zero-bubble

_NODE = re.compile(r"ScheduledNode\(([^()\n]*)\)")
_FIELD = re.compile(r"(\w+)\s*=\s*(?:<[\w.]+:\s*)?['\"]?([\w.-]+)")
_LINE = re.compile(r"[FBWfbw.\d \t-]+")
_TIMED = re.compile(r"([FBWfbw])(\d{1,2})-*\1(?![\d])|([.\s]+)")
_WORD = re.compile(r"([FBWfbw])(\d{1,4})(?=[\s.]|$)|([.\s]+)")
_LETTER = re.compile(r"([FBWfbw])()|([.\s]+)")
# (kind, second chunk, microbatch, offset)
_Pass = tuple[str, bool, int, int]


def has_zero_bubble(text: str) -> bool:
    if "ScheduledNode(" in text:
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and bool(re.match(r"\s*[FBWfbw.]", lines[0])) and "," not in lines[0]


def read_zero_bubble(text: str, *, name: str) -> Theirs:
    """zero-bubble's printed orders.

    Raises:
        ProgramError: A line is none of its forms; the message has line and column.
    """
    if "ScheduledNode(" in text:
        return _nodes(text, name)
    lines: list[list[_Pass]] = []
    letters: list[str] = []
    offset = 0
    for line in text.splitlines(keepends=True):
        bare = line.rstrip()
        if bare.strip() and not re.match(r"(?i)\s*(longest stage time|-{5,})", bare):
            lines.append(_passes(text, bare, offset, name))
            letters.append(bare if not re.search(r"\d", bare) else "")
        offset += len(line)
    if not lines:
        raise ProgramError(f"{name}, line 1, column 1: no pass of any rank stands here.")
    shift = min((number for row in lines for _, _, number, _ in row), default=0)
    twice = {second for row in lines for _, second, _, _ in row} == {False, True}
    split = any(kind == "W" for row in lines for kind, _, _, _ in row)
    rows = []
    for rank, row in enumerate(lines):
        cells = []
        for kind, second, number, _ in row:
            stage = 2 * len(lines) - 1 - rank if second and twice else rank
            cells.append(f"{stage}{_ours(kind, split)}{number - shift}")
        rows.append(cells)
    check_size(sum(map(len, rows)), name)
    note = "computations alone" + (", two chunks in a V" if twice else "")
    notes = (note, *_widths(letters, 1 + max(n for row in lines for _, _, n, _ in row) - shift))
    return Theirs(ScheduleFile(name, as_csv(rows)), "zero-bubble", notes=notes)


def _widths(lines: Sequence[str], microbatches: int) -> Iterator[str]:
    """How lines of letters alone are read, which do not say how wide a pass is."""
    if not any(lines):
        return
    yield f"a letter is a pass, so there are {microbatches} microbatches"
    runs = [len(run[0]) for line in lines for run in re.finditer(r"([FBWfbw])\1*", line)]
    if not any(length % 2 for length in runs):
        yield (
            f"each run of letters is even: if a pass is 2 columns wide, there are "
            f"{microbatches // 2}; print it at least 3 columns wide (print_scaling), as F0-F"
        )


def _ours(kind: str, split: bool) -> str:
    """Their B is the input's gradient where W follows."""
    if kind == "BW":
        return "B"
    return "I" if kind == "B" and split else kind


def _passes(text: str, line: str, offset: int, name: str) -> list[_Pass]:
    """A line in the first form that fits it to its end."""
    reached = 0
    for form in (_TIMED, _WORD, _LETTER):
        found: list[_Pass] = []
        counts: dict[str, int] = defaultdict(int)
        at = len(line) - len(line.lstrip())
        while at < len(line) and (match := form.match(line, at)):
            if match[1]:
                number = int(match[2]) if match[2] else counts[match[1]]
                counts[match[1]] += 1
                found.append((match[1].upper(), match[1].islower(), number, offset + at))
            at = match.end()
        if at == len(line) and found:
            return found
        reached = max(reached, at if found else 0)
    bad = line[reached:]
    raise ProgramError(
        f"{name}, {place(text, offset + reached)}: {shown(bad)} is no pass of zero-bubble. A pass "
        "is F0--F (at least three columns wide: print_scaling), F1 with spaces, or f."
    )


def _nodes(text: str, name: str) -> Theirs:
    """Lists of ScheduledNode, messages kept."""
    rows: dict[int, list[tuple[str, int | None, int, int]]] = defaultdict(list)
    for match in _NODE.finditer(text):
        fields = {key: value for key, value in _FIELD.findall(match[1])}
        where = f"{name}, {place(text, match.start())}"
        kind = fields.get("type", "").rpartition(".")[2]
        number = fields.get("microbatch", fields.get("minibatch", ""))
        rank = fields.get("stage", "")
        if "POST_VALIDATION" in kind:
            continue
        if kind not in _NODES or not rank.isdecimal() or not number.isdecimal():
            raise ProgramError(
                f"{where}: {shown(match[0])} is no node that is known here: type F, B, W, BW, "
                "SEND_FORWARD, RECV_FORWARD, SEND_BACKWARD or RECV_BACKWARD, with stage and "
                "microbatch."
            )
        if fields.get("seq_split_idx", "0") != "0":
            raise ProgramError(f"{where}: microbatches that are cut along the sequence are not "
                               "known here.")  # fmt: skip
        group = fields.get("layer_group_idx", "None")
        chunk = fields.get("chunk", "0")
        stage = int(group) if group.isdecimal() else None
        rows[int(rank)].append((kind, stage, int(chunk) if chunk.isdecimal() else 0, int(number)))
    total = len(rows)
    if sorted(rows) != list(range(total)) or not total:
        raise ProgramError(f"{name} has nodes of stages {sorted(rows)[:8]}, and needs all from 0.")
    split = any(kind == "W" for row in rows.values() for kind, *_ in row)
    cells = []
    for rank in range(total):
        row = []
        for kind, known, chunk, number in rows[rank]:
            stage = known if known is not None else (rank if not chunk else 2 * total - 1 - rank)
            row.append(f"{stage}{_NODES[kind] or _ours(kind, split)}{number}")
        cells.append(row)
    check_size(sum(map(len, cells)), name)
    return Theirs(
        ScheduleFile(name, as_csv(cells)), "zero-bubble", "one_queue", True,
        ("messages side by side go as one batch",),
    )  # fmt: skip


_NODES = {
    "F": "", "B": "", "W": "", "BW": "",
    "SEND_FORWARD": "SEND_F", "RECV_FORWARD": "RECV_F",
    "SEND_BACKWARD": "SEND_B", "RECV_BACKWARD": "RECV_B",
}  # fmt: skip
