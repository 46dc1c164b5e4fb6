from __future__ import annotations

import pytest

from strategies.compiler import compile_plan
from strategies.errors import ProgramError
from strategies.plan import Plan
from strategies.referee import examine, judge
from strategies.referee.foreign.instruction_lists import (
    has_instructions,
    has_zero_bubble,
    read_deepspeed,
    read_zero_bubble,
)
from tests.strategies.referee.orders import order

# What DeepSpeed's TrainSchedule(2, 2, stage) yields, printed step by step.
DEEPSPEED = """\
rank 0: [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]
rank 0: [SendActivation(buffer_id=0)]
rank 0: [LoadMicroBatch(buffer_id=1), ForwardPass(buffer_id=1)]
rank 0: [RecvGrad(buffer_id=0), SendActivation(buffer_id=1), BackwardPass(buffer_id=0)]
rank 0: []
rank 0: [RecvGrad(buffer_id=1), BackwardPass(buffer_id=1), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
rank 1: []
rank 1: [RecvActivation(buffer_id=0), LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]
rank 1: [BackwardPass(buffer_id=0)]
rank 1: [SendGrad(buffer_id=0), RecvActivation(buffer_id=1), LoadMicroBatch(buffer_id=1), ForwardPass(buffer_id=1)]
rank 1: [BackwardPass(buffer_id=1)]
rank 1: [SendGrad(buffer_id=1), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
"""  # noqa: E501


def _rows(text: str) -> list[list[str]]:
    return [line.split(",") for line in text.splitlines()]


def test_deepspeeds_instructions_become_an_order_with_its_messages():
    theirs = read_deepspeed(DEEPSPEED, name="ds.txt")
    assert _rows(theirs.file.text) == [
        ["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0SEND_F1", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    opinion = examine(theirs.file.text, semantics=theirs.semantics)
    assert opinion.runs and theirs.semantics == "rendezvous"


def test_ranks_are_told_apart_without_names():
    bare = DEEPSPEED.replace("rank 0: ", "").replace("rank 1: ", "")
    assert read_deepspeed(bare, name="x").file.text == read_deepspeed(DEEPSPEED, name="x").file.text


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[SendActivation(buffer_id=0)]", "[Send(buffer_id=0)]", r"line 2, column 10: 'Send'"),
        ("[SendActivation(buffer_id=0)]", "[SendActivation()]", "names no buffer_id"),
        ("[SendActivation(buffer_id=0)]", "[SendActivation(buffer_id=7)]", "buffer 7 of rank 0"),
        ("rank 1", "rank 2", "nothing of rank 1"),
        ("buffer_id=1), ForwardPass(buffer_id=1)]\nrank 0: [R",
         "buffer_id=0), ForwardPass(buffer_id=0)]\nrank 0: [R", "overwrites buffer 0"),
    ],
)  # fmt: skip
def test_what_is_no_instruction_of_deepspeed_is_told_with_its_place(old, new, told):
    assert old in DEEPSPEED
    with pytest.raises(ProgramError, match=told):
        read_deepspeed(DEEPSPEED.replace(old, new), name="ds.txt")


def _of_ours(name: str, pp: int, count: int) -> list[list[str]]:
    program = compile_plan(Plan(name, pp, count)).train
    return [
        [str(item) for item in row if item.microbatch is not None] for row in program.compute_rows()
    ]


def _zero_bubble(rows: list[list[str]], pp: int, form: str) -> str:
    """Our rows as zero-bubble prints them."""
    text = ""
    for row in rows:
        for cell in row:
            kind = next(letter for letter in cell if letter in "FIW")
            stage, _, number = cell.partition(kind)
            letter = {"F": "F", "I": "B", "W": "W"}[kind]
            letter = letter if int(stage) < pp else letter.lower()
            if form == "timed":
                text += f".{letter}{number}-{letter}"
            elif form == "words":
                text += f"{letter}{int(number) + 1}  "
            else:
                text += letter
        text += "\n"
    return text + ("Longest stage time:  42\n" if form == "timed" else "")


@pytest.mark.parametrize("form", ["timed", "words", "letters"])
@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_what_zero_bubble_prints_is_read_in_each_of_its_forms(name: str, form: str):
    rows = _of_ours(name, 3, 6)
    text = _zero_bubble(rows, 3, form)
    assert has_zero_bubble(text) and not has_instructions(text)
    assert _rows(read_zero_bubble(text, name="zb.txt").file.text) == rows


def test_its_nodes_keep_their_messages():
    nodes = [
        (0, "F", 0), (0, "SEND_FORWARD", 0), (0, "RECV_BACKWARD", 0), (0, "B", 0), (0, "W", 0),
        (1, "RECV_FORWARD", 0), (1, "F", 0), (1, "B", 0), (1, "SEND_BACKWARD", 0), (1, "W", 0),
    ]  # fmt: skip
    text = "\n".join(
        f"ScheduledNode(type={kind}, stage={stage}, microbatch={m}, chunk=0, seq_split_idx=0, "
        f"layer_group_idx={stage}, comm_direction=<CommDirection.NEXT: 0>)"
        for stage, kind, m in nodes
    )
    theirs = read_zero_bubble(text, name="zb.txt")
    assert _rows(theirs.file.text)[1] == ["1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0"]
    assert judge(order(theirs.file.text), theirs.semantics, grouped=theirs.grouped).runs


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("F0-F?\n", r"line 1, column 5: '\?'"),
        ("F1 B1\nF1 X1\n", r"line 2, column 4: 'X1'"),
        ("ScheduledNode(type=SEND_ALL, stage=0, microbatch=0)", "line 1, column 1: .*no node"),
        ("ScheduledNode(type=F, stage=1, microbatch=0)", "needs all from 0"),
        ("ScheduledNode(" + "<a>" * 100_000, "needs all from 0"),
    ],
)
def test_what_zero_bubble_never_prints_is_told_with_its_place(text: str, told: str):
    with pytest.raises(ProgramError, match=told):
        read_zero_bubble(text, name="zb.txt")


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("F0-FB0-B\n", ("computations alone",)),
        (
            "FFBWBW\nFBFBWW\n",
            ("computations alone", "a letter is a pass, so there are 2 microbatches"),
        ),
        (
            "FFFFBBWWBBWW\n..FFBBFFBBWWWW\n",
            (
                "computations alone",
                "a letter is a pass, so there are 4 microbatches",
                "each run of letters is even: if a pass is 2 columns wide, there are 2; print it "
                "at least 3 columns wide (print_scaling), as F0-F",
            ),
        ),
    ],
    ids=["with numbers", "one column a pass", "perhaps two"],
)
def test_letters_alone_say_how_many_microbatches_were_read(text: str, notes: tuple[str, ...]):
    assert read_zero_bubble(text, name="zb.txt").notes == notes
