from dataclasses import replace

from launcher.report.ascii import draw
from launcher.report.predicted import compute_csv, schedule_text, write_schedule_files
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure
from strategies.ir.instruction import Instruction, backward, forward, overlap
from strategies.ir.kinds import Kind

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


def test_schedule_csv_spells_a_fused_pair_as_torch_does():
    """torch reads whole files of ours in tests/strategies/schedules/test_torch_accepts.py."""
    pair = replace(overlap(forward(0, 1), backward(0, 0)), after=(forward(0, 0),))
    program = compile_program(schedule="gpipe", pp=1, num_microbatches=2)
    row = (forward(0, 0), pair, backward(0, 1))
    assert compute_csv(program.with_ranks((row,))) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
