import pytest

from launcher.report.ascii import draw
from launcher.report.schedule_files import compute_csv, schedule_text, write_schedule_files
from strategies import UniformCosts, compile_program, simulate
from strategies.ir.instruction import Instruction, Kind
from strategies.ir.program import Program
from strategies.metrics import measure
from strategies.schedules import SCHEDULES

COSTS = UniformCosts(grad_reduce=8)


def test_schedule_txt_has_the_key_figures_above_the_timeline(tmp_path):
    timeline = simulate(compile_program(schedule="foldx_fifo", pp=2, num_microbatches=2), COSTS)
    write_schedule_files(tmp_path, timeline, measure(timeline, COSTS))
    text = (tmp_path / "schedule.txt").read_text(encoding="ascii")
    assert text == schedule_text(timeline, measure(timeline, COSTS))
    head, _, body = text.partition("\n\n")
    assert body == draw(timeline) + "\n"
    assert head.splitlines() == [
        "# foldx_fifo: 2 ranks, 4 stages (loop), 2 microbatches",
        "# simulated, uniform costs: makespan 13.5 F, period 13.5 F, bubble ratio 55.6 %",
        "# lower bound 7.5 F (LB1 rank 1), 80.0 % above it; exposed reduction 6 F",
        "# peak activations per rank, in microbatches: 2 2",
        "# a slot is 0.5 F; 2F0: stage 2, forward, microbatch 0; -: still running; .: idle; "
        "comm: 2.0 reduces stage 2, bucket 0",
    ]


def test_schedule_csv_is_a_row_of_compute_per_rank(tmp_path):
    timeline = simulate(compile_program(schedule="1f1b", pp=2, num_microbatches=2), COSTS)
    write_schedule_files(tmp_path, timeline, measure(timeline, COSTS))
    text = (tmp_path / "schedule.csv").read_text(encoding="ascii")
    assert text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_schedule_csv_keeps_split_backwards_and_leaves_out_what_torch_has_no_word_for():
    program = compile_program(schedule="1f1b", pp=1, num_microbatches=1)
    kinds = (Kind.F, Kind.R, Kind.I, Kind.W)
    row = tuple(Instruction(kind, 0, 0) for kind in kinds)
    row += (Instruction(Kind.REDUCE, 0, bucket=0), Instruction(Kind.STEP, 0))
    assert compute_csv(program.with_ranks((row,))) == "0F0,0I0,0W0\n"


def load_with_torch(path, program: Program):
    """ORACLE: torch's own CSV loader, validator, lowering and dry run; none of it is ours."""
    from torch.distributed.pipelining import schedules as oracle

    runtime = oracle._PipelineScheduleRuntime.__new__(oracle._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime.pp_group_size = program.placement.num_ranks
    runtime._num_stages = program.placement.num_stages
    runtime._n_microbatches = program.num_microbatches
    runtime._stages = []
    runtime._defer_pp_recv = False
    runtime._load_csv(str(path), format="compute_only")
    rank_of = runtime.stage_index_to_group_rank
    loaded = {rank: [str(action) for action in row] for rank, row in runtime.pipeline_order.items()}
    lowered = oracle._add_send_recv(
        runtime.pipeline_order,
        stage_to_rank=lambda stage: rank_of[stage],
        num_stages=runtime._num_stages,
    )
    oracle._simulate_comms_compute(lowered, lambda stage: rank_of[stage], runtime._num_stages)
    return loaded


ONE_OWNER = [name for name, schedule in SCHEDULES.items() if schedule.weight_copies == 1]


@pytest.mark.parametrize("name", ONE_OWNER)
def test_torch_loads_validates_and_dry_runs_schedule_csv(name, tmp_path):
    program = compile_program(schedule=name, pp=2, num_microbatches=4)
    path = tmp_path / "schedule.csv"
    path.write_text(compute_csv(program), encoding="ascii")
    loaded = load_with_torch(path, program)
    wanted = {Kind.F, Kind.B, Kind.I, Kind.W}
    assert loaded == {
        rank: [str(item) for item in row if item.kind in wanted]
        for rank, row in enumerate(program.ranks)
    }


def test_the_oracle_refuses_a_csv_that_lost_a_backward(tmp_path):
    program = compile_program(schedule="1f1b", pp=2, num_microbatches=4)
    path = tmp_path / "schedule.csv"
    path.write_text(compute_csv(program).replace(",1B3", ""), encoding="ascii")
    with pytest.raises(AssertionError, match="Invalid backward microbatches for stage 1"):
        load_with_torch(path, program)
