"""Independent: torch's own loader, validator, lowering and dry run take what schedule.csv says.

Nothing of ours judges here; only what torch lowers (``compute_comms``) is read back by us. torch
refuses a stage on two ranks, so schedules with two weight copies stay out.
"""

import random
import re

import pytest

from launcher.report.predicted import compute_csv
from strategies import compile_program
from strategies.errors import PlanError, ProgramError
from strategies.ir.kinds import MICROBATCH_KINDS
from strategies.plan import Plan, ScheduleFile
from strategies.schedules import SCHEDULES
from strategies.schedules.custom import from_file

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

DEGREES = ((1, 2), (2, 4), (2, 7), (4, 8), (4, 5), (8, 16))
ONE_COPY = [
    name
    for name, schedule in SCHEDULES.items()
    if schedule.weight_copies == 1 and schedule.synchronous
]


def takes(name, pp, microbatches):
    try:
        SCHEDULES[name].resolve(Plan(name, pp, microbatches))
    except PlanError:
        return False
    return True


# By name: whatever collects the tests need not compile them.
PROGRAMS = [
    pytest.param(name, pp, microbatches, id=f"{name}-pp{pp}-m{microbatches}")
    for name in ONE_COPY
    for pp, microbatches in DEGREES
    if takes(name, pp, microbatches)
]


@pytest.fixture
def program(name, pp, microbatches):
    return compile_program(schedule=name, pp=pp, num_microbatches=microbatches)


class Torch:
    """torch's runtime schedule, without stages and process groups: only what handles the order."""

    def __init__(self, path, *, ranks, stages, microbatches):
        runtime_class = torch_schedules._PipelineScheduleRuntime
        runtime = runtime_class.__new__(runtime_class)
        runtime.pipeline_order = {}
        runtime.pp_group_size = ranks
        runtime._num_stages = stages
        runtime._n_microbatches = microbatches
        runtime._stages = []
        runtime._defer_pp_recv = False
        # Reads, validates and lowers: UNSHARD, RESHARD, REDUCE_GRAD, then SEND and RECV.
        runtime._load_csv(str(path), format="compute_only")
        self.stages = stages
        self.rank_of = runtime.stage_index_to_group_rank
        self.compute = runtime.pipeline_order
        self.lowered = runtime.pipeline_order_with_comms
        self.dump = runtime._dump_csv

    def dry_run(self):
        """Its rendezvous-free walk; it knows neither shards nor pairs, so these are unfolded."""
        names = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        plain = {
            rank: [
                part
                for action in row
                if action.computation_type.value not in names
                for part in (action.sub_actions or (action,))
            ]
            for rank, row in self.lowered.items()
        }
        return torch_schedules._simulate_comms_compute(
            plain, lambda stage: self.rank_of[stage], self.stages
        )


def load(program, path):
    path.write_text(compute_csv(program), encoding="ascii", newline="")
    return Torch(
        path,
        ranks=program.placement.num_ranks,
        stages=program.placement.num_stages,
        microbatches=program.num_microbatches,
    )


def compute_rows(program):
    return tuple(
        tuple(item for item in row if item.kind in MICROBATCH_KINDS) for row in program.ranks
    )


def test_every_schedule_with_one_weight_copy_is_among_them():
    assert {param.id.split("-pp")[0] for param in PROGRAMS} == set(ONE_COPY)


@pytest.mark.parametrize(("name", "pp", "microbatches"), PROGRAMS)
def test_torch_reads_validates_lowers_and_walks_our_csv(program, tmp_path):
    theirs = load(program, tmp_path / "schedule.csv")
    assert {rank: [str(action) for action in row] for rank, row in theirs.compute.items()} == {
        rank: [str(item) for item in row] for rank, row in enumerate(compute_rows(program))
    }
    assert theirs.rank_of == dict(enumerate(program.placement.copies[0]))
    if program.placement.num_ranks > 1:
        assert any("SEND" in str(action) for row in theirs.lowered.values() for action in row)
    done = [str(action) for row in theirs.dry_run().values() for action in row if action]
    wanted = [str(part) for row in compute_rows(program) for item in row for part in item.parts]
    assert sorted(word for word in done if "_" not in word) == sorted(wanted)


@pytest.mark.parametrize(("name", "pp", "microbatches"), PROGRAMS)
def test_what_torch_writes_is_read_back_in_both_formats(program, tmp_path):
    theirs = load(program, tmp_path / "schedule.csv")
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        theirs.dump(str(path), format=form)
        file = ScheduleFile(form, path.read_bytes().decode())
        _, microbatches, rows = from_file(file, pp=program.placement.num_ranks)
        assert (microbatches, rows) == (program.num_microbatches, compute_rows(program))


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_a_message_that_is_lost_from_torchs_lowered_file_is_missed(name, tmp_path):
    """torch's own loader takes such a file, and the run hangs."""
    program = compile_program(schedule=name, pp=4, num_microbatches=8)
    path = tmp_path / "lowered.csv"
    load(program, tmp_path / "schedule.csv").dump(str(path), format="compute_comms")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    messages = [
        (line, column)
        for line, row in enumerate(rows)
        for column, cell in enumerate(row)
        if "SEND_" in cell or "RECV_" in cell
    ]
    for line, column in random.Random(0).sample(messages, 20):
        lost = rows[line][column]
        broken = [list(row) for row in rows]
        broken[line][column] = ""
        text = "\n".join(map(",".join, broken))
        with pytest.raises(ProgramError) as error:
            from_file(ScheduleFile("lowered.csv", text), pp=4)
        message = str(error.value)
        assert re.match(r"lowered\.csv, line \d, column \d+: ", message)
        assert f"has no matching {lost}: " in message or f"needs {lost}, which no " in message


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (",1B3", "", "Invalid backward microbatches for stage 1"),
        ("1F0,1B0", "1B0,1F0", "without first running Forward"),
        ("1F3,1B3", "0F3,1B3", "assigned to both rank"),
        ("0F0,0F1,0B0", "0F1,0B0,0F0", "without first running Forward"),
    ],
)
def test_the_judge_does_refuse(old, new, reason, tmp_path):
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4)
    text = compute_csv(program)
    assert old in text
    path = tmp_path / "schedule.csv"
    path.write_text(text.replace(old, new), encoding="ascii")
    with pytest.raises(AssertionError, match=reason):
        Torch(path, ranks=2, stages=2, microbatches=4)
