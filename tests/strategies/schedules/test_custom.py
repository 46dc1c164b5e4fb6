"""Schedules from a file: placement, degrees, orders that cannot run, and the way there and back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.predicted import compute_csv
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.memory import peak_activations
from strategies.compiler import compile_plan, schedule_of
from strategies.errors import PipelineError, PlanError, ProgramError
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.ir.program import Placement, bidirectional, loop, v
from strategies.ir.text import format_rows
from strategies.plan import Plan, ScheduleFile, read_schedule_file
from strategies.schedules import SCHEDULES, find_schedule
from strategies.schedules.custom import custom_schedule, from_file
from tests.strategies.programs import ALL_SCHEDULES, compute_texts

PLAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def own(text, placement=None):
    return ScheduleFile("my.csv", text, placement)


def refusal(text, *, pp=2, placement=None):
    with pytest.raises(PipelineError) as error:
        from_file(own(text, placement), pp=pp)
    return str(error.value)


def compute_rows(program):
    return tuple(
        tuple(item for item in row if item.kind in MICROBATCH_KINDS) for row in program.ranks
    )


def allowed(name, pp, microbatches):
    try:
        SCHEDULES[name].resolve(Plan(name, pp, microbatches))
    except PlanError:
        return False
    return True


CASES = [
    pytest.param(name, pp, microbatches, id=f"{name}-pp{pp}-m{microbatches}")
    for name in ALL_SCHEDULES
    for pp, microbatches in ((1, 2), (2, 4), (2, 5), (4, 3), (4, 8), (4, 11))
    if allowed(name, pp, microbatches)
]


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_some_degrees_are_tried_for_every_schedule(name):
    assert any(case.values[0] == name for case in CASES)


@pytest.mark.parametrize(("name", "pp", "microbatches"), CASES)
def test_every_schedule_survives_the_way_through_its_csv(name, pp, microbatches):
    program = compile_program(schedule=name, pp=pp, num_microbatches=microbatches)
    again = compile_program(schedule="custom", pp=pp, file=own(compute_csv(program)))
    assert compute_rows(again) == compute_rows(program)
    assert again.placement.copies == program.placement.copies
    if pp > 1:
        assert again.placement == program.placement
    assert again.num_microbatches == microbatches
    assert compute_csv(again) == compute_csv(program)


def test_the_whole_program_comes_back_also_messages_reductions_and_times():
    program = compile_program(schedule="foldx_fifo", pp=4, num_microbatches=8, buckets=2)
    again = compile_program(schedule="custom", pp=4, file=own(compute_csv(program)), buckets=2)
    assert again.ranks == program.ranks
    costs = UniformCosts(grad_reduce=3, p2p=0.25)
    assert simulate(again, costs).start == simulate(program, costs).start


@given(data=st.data())
def test_any_order_of_the_lists_is_either_the_program_or_refused_with_its_place(data):
    """Whatever somebody does to two cells of a sound file."""
    rows = [line.split(",") for line in compute_csv(compile_program(
        schedule=data.draw(st.sampled_from(["1f1b", "interleaved_1f1b", "zb_v"])),
        pp=data.draw(st.integers(1, 3)), num_microbatches=data.draw(st.integers(1, 5)),
    )).splitlines()]  # fmt: skip
    ends = [
        (line, data.draw(st.integers(0, len(rows[line]) - 1)))
        for line in (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
    ]
    change = data.draw(st.sampled_from(["swap", "drop", "repeat", "garble"]))
    (a, i), (b, j) = ends
    if change == "swap":
        rows[a][i], rows[b][j] = rows[b][j], rows[a][i]
    elif change == "drop":
        rows[a][i] = ""
    elif change == "repeat":
        rows[a].insert(i, rows[b][j])
    else:
        rows[a][i] += "x"
    text = "".join(",".join(row) + "\n" for row in rows)
    try:
        program = compile_program(schedule="custom", pp=len(rows), file=own(text))
    except ProgramError as error:
        assert re.match(r"my\.csv, line \d+, column \d+: ", str(error))
    else:
        assert change == "swap"
        assert compute_csv(program) == text


@given(
    text=st.text()
    | st.lists(
        st.sampled_from(["0F0", "0B0", "1F0", "1B0", "0F1", "0I0", "0W0", "0SEND_F0", "1RECV_F0",
                         "(1F0;0B1)OVERLAP_F_B", "0UNSHARD", "2F0", ",", ",", ",", "\n", '"', "7"])
    ).map("".join),
    pp=st.integers(1, 3),
    placement=st.sampled_from([None, "loop", "v", "bidirectional"]),
)  # fmt: skip
def test_no_text_is_anything_but_a_program_or_refused(text, pp, placement):
    try:
        _, microbatches, rows = from_file(own(text, placement), pp=pp)
    except PipelineError as error:
        assert "my.csv" in str(error)
    else:
        assert len(rows) == pp
        assert sum(len(item.parts) for row in rows for item in row) >= 2 * microbatches


@pytest.mark.parametrize(
    ("text", "pp", "expected"),
    [
        (PLAIN, 2, loop(2, 1)),
        ("0F0,1F0,1B0,0B0\n", 1, loop(1, 2)),
        ("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", 2, loop(2, 2)),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", 2, v(2, 2)),
        ("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n", 2, bidirectional(2)),
        # Of one microbatch nobody sees a second copy.
        ("0F0,0B0\n1F0,1B0\n", 2, loop(2, 1)),
        # None of the three: turned round, a stage more on one rank, neighbours together.
        ("1F0,1B0\n0F0,0B0\n", 2, Placement("custom", 2, ((1, 0),))),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", 2, Placement("custom", 2, ((0, 1, 0),))),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", 2, Placement("custom", 2, ((0, 0, 1, 1),))),
    ],
)
def test_the_placement_is_taken_from_the_rows(text, pp, expected):
    placement, _, _ = from_file(own(text), pp=pp)
    assert placement == expected
    program = compile_program(schedule="custom", pp=pp, file=own(text))
    assert simulate(program, UniformCosts()).makespan > 0


def test_unequal_numbers_of_stages_keep_the_work_of_a_microbatch():
    """forward=1 is per rank and microbatch: with three stages on two ranks a stage takes 2/3."""
    text = "0F0,2F0,2B0,0B0\n1F0,1B0\n"
    program = compile_program(schedule="custom", pp=2, file=own(text), buckets=1)
    table = UniformCosts(grad_reduce=3).table(program)
    assert sum(table.forward) == pytest.approx(2)
    assert sum(map(sum, table.reduce)) == pytest.approx(2 * 3)
    assert peak_activations(program) == pytest.approx((4 / 3, 2 / 3))


def test_a_placement_that_was_asked_for_must_be_that_of_the_rows():
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    assert from_file(own(text, "v"), pp=2)[0] == v(2, 2)
    assert refusal(text, placement="loop") == (
        "my.csv, line 1, column 2: 3F0 stands on rank 0, but the loop placement has it on rank 1. "
        "Try schedule.placement=null: the file's own."
    )
    assert refusal(PLAIN, placement="bidirectional").startswith(
        "my.csv, line 1, column 2: 0F1 stands on rank 0, but the bidirectional placement has it"
    )
    assert refusal("0F0,0B0,2F0,2B0\n1F0,1B0\n", placement="v").startswith(
        "schedule.placement=v needs a multiple of pp stages, but my.csv has 3 stages on 2 ranks."
    )
    assert "needs a stage per rank, at least two" in refusal(
        "0F0,0B0\n", pp=1, placement="bidirectional"
    )
    assert refusal(PLAIN, placement="ring").startswith("schedule.placement=ring is unknown.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The backward where the forward is not.
        ("0F0,1F0,0B0\n1B0\n", "line 2, column 1: 1B0 stands on rank 1, but the custom placement "
         "has its stage on rank 0. Move it there."),
        # Copies by halves of the batch instead of odd and even.
        ("0F0,0F1,1F2,1F3,1B2,1B3,0B0,0B1\n0F2,0F3,1F0,1F1,1B0,1B1,0B2,0B3\n",
         "line 1, column 3: 1F2 stands on rank 0, but rank 1 runs its stage (1F0 in line 2, "
         "column 3). Put a stage on one rank, or on two: even microbatches on the one, odd ones on "
         "the other."),
    ],
)  # fmt: skip
def test_a_stage_on_two_ranks_keeps_even_and_odd_microbatches_apart(text, expected):
    assert refusal(text) == f"my.csv, {expected}"


def test_a_line_is_a_rank():
    assert refusal(PLAIN, pp=1) == (
        "my.csv, line 2, column 1: a line is a rank, and pp=1 has none for this one; the file has "
        "2 lines. Try pp=2."
    )
    assert refusal(PLAIN, pp=4) == (
        "my.csv, line 2, column 1: this is the last line, for rank 1, but pp=4 needs 4 lines. "
        "Try pp=2."
    )


def test_an_order_that_cannot_run_is_shown_as_a_grid_with_its_places():
    assert refusal("0F0,,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n") == (
        "my.csv, line 2, column 1: 1B0 on rank 1 stands before 1F0, which it needs: the program "
        "deadlocks.\n"
        "rank 0 | 0F0 [0B0] 0F1 0B1  <-- waits for step 1B0\n"
        "rank 1 | [1B0] 1F0 1F1 1B1  <-- waits for step 1F0"
    )


def test_fused_pairs_count_as_cells_in_the_grid():
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B1,1B0\n"
    assert refusal(text).startswith(
        "my.csv, line 1, column 2: (0F1;0B0)OVERLAP_F_B on rank 0 never"
    )


def test_a_file_names_no_versions():
    assert refusal(PLAIN.replace("1F1", "1F1#2")) == (
        "my.csv, line 2, column 3: 1F1#2 on rank 1 names version 2 of the weights in a program "
        "with one update. Leave it out, or set schedule=pipedream_2bw or schedule=pipedream, whose "
        "microbatches read several versions of the weights."
    )


def test_a_file_is_a_schedule_for_its_own_degrees_only():
    schedule = custom_schedule(own(PLAIN), pp=2)
    assert (schedule.name, schedule.num_microbatches, schedule.weight_copies) == ("custom", 2, 1)
    assert not schedule.splits_backward
    with pytest.raises(PlanError) as error:
        compile_plan(Plan("custom", 2, 3, file=own(PLAIN)))
    assert str(error.value) == (
        "num_microbatches=3, but my.csv has 2. Try num_microbatches=2, or num_microbatches=auto."
    )
    split = custom_schedule(own("0F0,0I0,0W0\n"), pp=1)
    assert split.splits_backward
    copies = custom_schedule(own("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n"), pp=2)
    assert (copies.weight_copies, copies.stages_per_rank) == (2, 2)


def test_a_file_and_the_name_custom_belong_together():
    with pytest.raises(PlanError) as error:
        find_schedule("custom")
    assert str(error.value).endswith("Try schedule=custom schedule.file=my.csv.")
    with pytest.raises(PlanError) as error:
        find_schedule("gpipe", file=own(PLAIN), pp=2)
    assert str(error.value) == (
        "schedule.file=my.csv belongs to schedule=custom, but schedule=gpipe. "
        "Try schedule=custom schedule.file=my.csv."
    )


def test_a_short_last_batch_leaves_the_later_microbatches_out():
    plan = Plan("custom", 2, 2, file=own(PLAIN))
    assert schedule_of(plan).num_microbatches == 2
    assert compute_texts(compile_plan(plan, 1).train) == ["0F0 0B0", "1F0 1B0"]


def test_a_plan_with_a_file_is_hashable_and_hides_the_text():
    plan = Plan("custom", 2, 2, file=own(PLAIN))
    assert hash(plan) == hash(Plan("custom", 2, 2, file=own(PLAIN)))
    assert plan != Plan("custom", 2, 2, file=own(PLAIN + "\n"))
    assert PLAIN not in repr(plan)


def test_the_backwards_of_a_file_can_be_split():
    plan = Plan("custom", 2, 2, file=own(PLAIN), split_backward=True)
    texts = compute_texts(compile_plan(plan).train)
    assert "B" not in " ".join(texts)
    assert [text.count("W") for text in texts] == [2, 2]


def test_a_file_is_read_as_utf_8_with_or_without_a_mark(tmp_path):
    path = tmp_path / "my.csv"
    path.write_bytes(b"\xef\xbb\xbf" + PLAIN.encode())
    file = read_schedule_file(str(path), placement="loop")
    assert (file.name, file.text, file.placement) == (str(path), PLAIN, "loop")


def test_what_cannot_be_read_is_refused(tmp_path):
    excel = tmp_path / "excel.csv"
    excel.write_bytes(PLAIN.encode("utf-16"))
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as stream:
        stream.truncate((1 << 24) + 1)
    for path, expected in (
        (tmp_path / "none.csv", "does not exist in"),
        (tmp_path, "cannot be read: it is a folder and no regular file. Save it as CSV"),
        ("/dev/zero", "cannot be read: it is a pipe, a device or a socket"),
        (excel, "it is not UTF-8 at byte 0. Save it as CSV (comma separated, UTF-8), or"),
        (huge, "it has more than 16,777,216 bytes, which is the most."),
        ("a\0b", "schedule.file="),
        ("x" * 5000, "schedule.file="),
    ):
        with pytest.raises(PlanError) as error:
            read_schedule_file(str(path))
        assert expected in str(error.value)


def test_rows_are_the_cells_in_their_order():
    _, microbatches, rows = from_file(own(PLAIN.replace(",", ",,")), pp=2)
    assert microbatches == 2
    assert format_rows(rows) == PLAIN.replace(",", " ")
