from __future__ import annotations

import pytest

from strategies.compiler import compile_plan
from strategies.errors import PlanError, ProgramError
from strategies.plan import Plan
from strategies.referee import SEMANTICS, examine, judge
from strategies.referee.foreign import Asked, layout_stages, read_flags
from strategies.referee.foreign.megatron_order import interleaved
from strategies.referee.foreign.their_words import as_csv
from tests.strategies.referee.orders import order

SCRIPT = """\
#!/bin/bash
PP=4
export MBS=2
GBS=32  # --pipeline-model-parallel-size 64
ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size ${PP}
    --num-layers 16 \\
    --num-layers-per-virtual-pipeline-stage 2
    --micro-batch-size $MBS --global-batch-size ${GBS}
)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
"""


def _read(text: str, asked: Asked | None = None):
    return read_flags(text, asked or Asked(), name="x.sh")


def test_a_script_is_read_with_its_own_names_and_never_run():
    theirs = _read(SCRIPT)
    assert theirs.framework == "Megatron-LM"
    assert theirs.notes == (
        "interleaved 1F1B, 2 chunks, groups of 4, exchanges overlapped",
        "2 replicas (8 GPUs, 1 x 8), so 8 microbatches of 2",
    )
    opinion = examine(theirs.file.text, semantics=theirs.semantics, grouped=theirs.grouped)
    assert opinion.runs and opinion.asked.semantics == "per_pair"
    assert opinion.program.placement.num_stages == 8


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("pp", "chunks", "count", "group"),
    [(2, 2, 2, 2), (2, 2, 4, 2), (4, 2, 4, 4), (4, 3, 8, 4), (3, 2, 7, 4), (4, 2, 12, 6)],
)
def test_its_interleaved_exchanges_meet_and_its_order_is_ours(pp, chunks, count, group, overlap):
    program = order(as_csv(interleaved(pp, chunks, count, group, overlap=overlap)))
    for semantics in ("one_queue", "per_pair", "per_edge"):
        if pp == 2 and not overlap and count > group:
            assert judge(program, semantics, grouped=True).crossing is not None
            continue  # Known of it: its neighbours are one rank, and messages are confused.
        assert judge(program, semantics, grouped=not overlap).runs, semantics
    ours = compile_plan(Plan("interleaved_1f1b", pp, count, chunks, group=group, buckets=0)).train
    if count % group:
        return  # Megatron keeps its table for the backwards; ours does better there.
    words = [[str(item) for item in row] for row in program.compute_rows()]
    assert words == [
        [str(item) for item in row if item.microbatch is not None] for row in ours.compute_rows()
    ]


def test_without_chunks_it_is_1f1b_in_groups():
    theirs = _read("--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8")
    program = order(theirs.file.text)
    assert theirs.grouped and theirs.semantics == "one_queue"
    assert judge(program, "one_queue", grouped=True).runs
    ours = compile_plan(Plan("1f1b", 4, 8)).train
    assert [list(map(str, row)) for row in program.compute_rows()] == [
        [str(item) for item in row if item.microbatch is not None] for row in ours.compute_rows()
    ]


def test_a_layout_says_stages_and_layers():
    flags = (
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 "
        "--num-layers 16 --pipeline-model-parallel-layout 'Et|(tt|)*6,tttL' --world-size 4"
    )
    theirs = _read(flags)
    assert theirs.layers == (1, 2, 2, 2, 2, 2, 2, 3)
    assert layout_stages("Et*3|(tt|)*2,m|L", where="x") == ("Ettt", "tt", "tt", "m", "L")
    assert layout_stages("E|t|L", where="x") == ("E", "t", "L")
    assert {each for each in SEMANTICS if judge(order(theirs.file.text), each).runs}


_BASE = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8 "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--pipeline-model-parallel-size 4 --micro-batch-size 1", "--global-batch-size is not"),
        ("A=1\n  --pipeline-model-parallel-size $PP", r"line 2, column 3: .* is '\$PP'"),
        ("A=$B\nB=$A\n--pipeline-model-parallel-size $A", r"is '\$B'"),
        (_BASE + "--pipeline-model-parallel-size four", "a whole number"),
        (_BASE + "--pipeline-model-parallel-size $((2 * 4))", r"'\$\(\(2 \* 4\)\)', and the"),
        (_BASE + "--num-layers-per-virtual-pipeline-stage 2", "Try check.layers=32"),
        (_BASE + "--num-layers 9", "--num-layers 9 is no multiple of 4 ranks"),
        (_BASE + "--num-layers 9 --num-layers-per-virtual-pipeline-stage 2", "--num-layers 16"),
        (_BASE + "--num-virtual-stages-per-pipeline-rank 2 "
         "--microbatch-group-size-per-virtual-pipeline-stage 3", "between 4 ranks and 8"),
        (_BASE + "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6", "leave 2"),
        (_BASE + "--world-size 6", "no multiple of tp=1 x pp=4"),
        (_BASE + "--world-size 12", "Try --global-batch-size 9"),
        (_BASE + "--pipeline-model-parallel-layout Et|tL", "has 2 stages"),
    ],
)  # fmt: skip
def test_what_megatron_would_not_run_is_told_with_its_place(text, told):
    with pytest.raises(PlanError, match=told):
        _read(text)


def test_stages_may_have_other_numbers_of_layers_where_flags_say_so():
    _read(_BASE + "--num-layers 9 --decoder-first-pipeline-num-layers 3")


@pytest.mark.parametrize(
    "value",
    ["$((" * 100_000, "${" * 100_000, "$(( 1 + " * 50_000 + "))" * 50_000, "$A" * 1_000],
)
def test_no_value_takes_a_reader_long(value):
    with pytest.raises(PlanError):
        _read(f"A={'$A' * 1_000}\n--pipeline-model-parallel-size {value}")


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("Et|xL", "column 4 of the layout is 'x'"),
        ("t|t", "0 E"),
        ("E|tL|t", "last of all"),
        ("Et|((tt|)*2)*2L", "stands for nothing"),
        ("Et*999999|L", "more than 100000"),
    ],
)
def test_a_layout_that_says_nothing_is_told(layout, told):
    with pytest.raises(ProgramError, match=told):
        layout_stages(layout, where="x.sh")
