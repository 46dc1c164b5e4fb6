"""Instructions in words, for reports that people read when a run has failed."""

from __future__ import annotations

from strategies.ir.instruction import Instruction, Kind

_PAYLOADS = {Kind.F: "act", Kind.B: "grad"}


def spoken(item: Instruction) -> str:
    """What an instruction does, with its microbatch and the stage at the other end.

    >>> from strategies.ir.text import parse_instruction
    >>> words = "3RECV_F2<2 2SEND_B0>1 1F0 1REDUCE0 1STEP (0F1;3B0)OVERLAP_F_B"
    >>> for word in words.split():
    ...     print(spoken(parse_instruction(word)))
    RECV act mb=2 from stage 2
    SEND grad mb=0 to stage 1
    F mb=0 of stage 1
    REDUCE bucket 0 of stage 1
    STEP of stage 1
    F mb=1 of stage 0 with B mb=0 of stage 3
    """
    kind = item.kind
    if kind is Kind.RECV or kind is Kind.SEND:
        assert item.payload is not None
        way = "from" if kind is Kind.RECV else "to"
        return (
            f"{kind.value} {_PAYLOADS[item.payload]} mb={item.microbatch} {way} stage {item.peer}"
        )
    if kind is Kind.OVERLAP:
        return " with ".join(map(spoken, item.halves))
    if kind is Kind.REDUCE:
        return f"REDUCE bucket {item.bucket} of stage {item.stage}"
    if item.microbatch is None:
        return f"{kind.value} of stage {item.stage}"
    return f"{kind.value} mb={item.microbatch} of stage {item.stage}"
