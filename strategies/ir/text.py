r"""Instructions and programs as text, both ways.

The spelling is that of torch.distributed.pipelining where that has one (``2F0``; ``3RECV_F0`` means
the neighbouring stage); peers, buckets, weight versions and extra edges extend it. A fused pair is
spelled as torch does:

>>> from strategies.ir.text import parse_instruction, format_instruction
>>> for text in ("2F0", "2SEND_F0>3", "3RECV_F0<2", "2REDUCE1", "2STEP", "1R0@2B0+2B1", "0F3#1"):
...     assert format_instruction(parse_instruction(text)) == text
>>> format_instruction(parse_instruction("(0F1;3B0)OVERLAP_F_B"))
'(0F1;3B0)OVERLAP_F_B'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from strategies.errors import ProgramError
from strategies.ir.instruction import Instruction, overlap
from strategies.ir.kinds import (
    BUCKET_KINDS,
    EXCHANGE_KINDS,
    MESSAGE_KINDS,
    MICROBATCH_KINDS,
    STAGE_KINDS,
    Kind,
    spellings,
)

# A fused pair has a form of its own.
_LETTERS = spellings(MICROBATCH_KINDS - {Kind.OVERLAP})
_BUCKETED = spellings(BUCKET_KINDS)
_PLAIN = spellings(STAGE_KINDS)

_NUMBER = "[0-9]{1,7}"

_PATTERN = re.compile(
    rf"(?P<stage>{_NUMBER})"
    rf"(?:(?P<message>{'|'.join(spellings(MESSAGE_KINDS))})_(?P<payload>[FB])"
    rf"(?P<message_mb>{_NUMBER})(?:(?P<arrow>[<>])(?P<peer>{_NUMBER}))?"
    rf"|(?P<bucketed>{'|'.join(_BUCKETED)})(?P<bucket>{_NUMBER})"
    rf"|(?P<plain>{'|'.join(_PLAIN)})"
    rf"|(?P<kind>{'|'.join(_LETTERS)})(?P<mb>{_NUMBER}))"
    rf"(?:#(?P<version>{_NUMBER}))?"
    r"(?:@(?P<after>.+))?"
)
_FUSED = re.compile(r"\((?P<first>[^;()]+);(?P<second>[^;()]+)\)OVERLAP_F_B(?:@(?P<after>.+))?")


def format_instruction(instruction: Instruction) -> str:
    """Spells one instruction; ``parse_instruction`` is the inverse, but for exchanges of tokens."""
    kind = instruction.kind
    after = "+".join(format_instruction(edge) for edge in instruction.after)
    edges = f"@{after}" if after else ""
    if kind is Kind.OVERLAP:
        halves = ";".join(format_instruction(half) for half in instruction.halves)
        return f"({halves}){kind.value}{edges}"
    if kind in MESSAGE_KINDS:
        assert instruction.payload is not None
        arrow = ">" if kind is Kind.SEND else "<"
        body = f"{kind.value}_{instruction.payload.value}{instruction.microbatch}{arrow}"
        body += str(instruction.peer)
    elif kind in EXCHANGE_KINDS:
        assert instruction.payload is not None
        body = f"{kind.value}_{instruction.payload.value}{instruction.microbatch}"
        body += f".{instruction.bucket}"
    elif instruction.microbatch is not None:
        body = f"{kind.value}{instruction.microbatch}"
    elif instruction.bucket is not None:
        body = f"{kind.value}{instruction.bucket}"
    else:
        body = kind.value
    version = "" if instruction.version is None else f"#{instruction.version}"
    return f"{instruction.stage}{body}{version}{edges}"


def parse_instruction(text: str) -> Instruction:
    """Reads one instruction.

    Raises:
        ProgramError: The text is no instruction; nothing after it is ignored.
    """
    fused = _FUSED.fullmatch(text.strip())
    if fused is not None:
        pair = overlap(parse_instruction(fused["first"]), parse_instruction(fused["second"]))
        return replace(pair, after=_edges(fused["after"]))
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        letters = " ".join(f"2{kind}0" for kind in _LETTERS)
        others = ", ".join([*(f"2{kind}0" for kind in _BUCKETED), *(f"2{kind}" for kind in _PLAIN)])
        raise ProgramError(
            f"{text!r} is not an instruction.",
            fix=(
                f"Write stage, letter, microbatch, as in {letters}, or 2SEND_F0>3, 3RECV_F0<2, "
                f"{others}, (2F1;3B0)OVERLAP_F_B."
            ),
        )
    part = match.groupdict()
    kind = part["message"] or part["bucketed"] or part["plain"] or part["kind"]
    payload = part["payload"]
    peer = None if part["message"] is None else _peer(text, part)
    return Instruction(
        Kind(kind),
        int(part["stage"]),
        _number(part["message_mb"] or part["mb"]),
        bucket=_number(part["bucket"]),
        payload=None if payload is None else Kind(payload),
        peer=peer,
        after=_edges(part["after"]),
        version=_number(part["version"]),
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _edges(text: str | None) -> tuple[Instruction, ...]:
    return tuple(map(parse_instruction, text.split("+"))) if text else ()


def _peer(text: str, part: Mapping[str, str]) -> int:
    """The stage at a message's other end; if it is not written, the neighbour."""
    sends = part["message"] == "SEND"
    if part["arrow"] and (part["arrow"] == ">") is not sends:
        raise ProgramError(
            f"{text!r}: a SEND points to its target with '>', a RECV to its source with '<'."
        )
    # Activations go to the next stage, gradients back.
    down = sends is (part["payload"] == "F")
    peer = int(part["peer"] or int(part["stage"]) + (1 if down else -1))
    if peer < 0:
        raise ProgramError(f"{text!r}: there is no stage before stage 0.")
    return peer


def format_rows(ranks: tuple[tuple[Instruction, ...], ...]) -> str:
    """All ranks' lists, one line per rank, instructions separated by spaces."""
    return "".join(" ".join(map(format_instruction, row)) + "\n" for row in ranks)


def parse_rows(text: str) -> tuple[tuple[Instruction, ...], ...]:
    """The inverse of ``format_rows``.

    Raises:
        ProgramError: A word is no instruction; the message names its line.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append(tuple(parse_instruction(word) for word in line.split()))
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}") from None
    return tuple(rows)


# --------------------------------------------------------------------------------------- in words
# Instructions in words, for reports that people read when a run has failed.

_PAYLOADS = {Kind.F: "act", Kind.B: "grad"}


def describe(item: Instruction) -> str:
    """What an instruction does, with its microbatch and the stage at the other end.

    >>> from strategies.ir.text import parse_instruction
    >>> words = "3RECV_F2<2 2SEND_B0>1 1F0 1REDUCE0 1STEP (0F1;3B0)OVERLAP_F_B"
    >>> for word in words.split():
    ...     print(describe(parse_instruction(word)))
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
        return " with ".join(map(describe, item.halves))
    if item.bucket is not None:
        return f"{kind.value} bucket {item.bucket} of stage {item.stage}"
    if item.microbatch is None:
        return f"{kind.value} of stage {item.stage}"
    return f"{kind.value} mb={item.microbatch} of stage {item.stage}"
