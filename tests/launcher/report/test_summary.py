import io
from textwrap import dedent

from launcher.report.result import metrics_mapping
from launcher.report.summary import print_summary, summary
from strategies import UniformCosts, compile_program, simulate
from strategies.analysis.metrics import measure

COSTS = UniformCosts(grad_reduce=8)
RESULT = {
    "schedule": "foldx_fifo",
    "pp": 2,
    "dp": 1,
    "tp": 1,
    "stages_per_rank": 2,
    "num_microbatches": 4,
    "recompute": "none",
    "overlap": "grad_reduce",
}


def simulated():
    program = compile_program(schedule="foldx_fifo", pp=2, num_microbatches=4)
    return RESULT | metrics_mapping(measure(simulate(program, COSTS), COSTS))


def test_a_simulated_step():
    headline = (
        "foldx_fifo  pp=2  dp=1  tp=1  2 stages per rank  4 microbatches  recompute=none  "
        "overlap=grad_reduce\n"
    )
    assert summary(simulated()) == headline + dedent(
        """\
        one step, predicted
          makespan             19.5  F
          period               19.5  F
          lower bound          13.5  F  LB1 rank 1
          above the bound      44.4  %
          above the ideal      62.5  %
          bubble ratio         38.5  %
          exposed reduction       6  F
          throughput         0.2051  microbatches per F
          messages               24
          peak activations      2.5  microbatches  rank 0, rank 1 least"""
    )


def test_a_training_run():
    figures = {
        "num_parameters": 1234567,
        "loss_last": 2.34567,
        "val_loss": None,
        "step_time_s": 0.412,
        "tokens_per_s": 12345.6,
        "mfu": 0.5,
    }
    assert summary(figures | {"schedule": "1f1b"}) == dedent(
        """\
        1f1b
        training
          parameters               1,234,567
          last loss                   2.3457
          step time, median              412  ms
          tokens per second           12,346
          model FLOPs utilisation       50.0  %"""
    )


def test_the_share_of_the_peak_says_of_which():
    figures = {"mfu": 0.5, "peak_flops": 3.12e14, "peak_format": "bf16"}
    last = summary(figures | {"schedule": "1f1b"}).splitlines()[-1]
    assert " ".join(last.split()) == "model FLOPs utilisation 50.0 % of 312 TFLOPS bf16"


def test_names_are_no_markup_and_memory_is_per_rank():
    text = summary({"schedule": "[red]x", "peak_memory_bytes": [2**30, 3 * 2**30, None]})
    assert text == dedent(
        """\
        [red]x
        one step, predicted
          peak memory, predicted  3  GiB  rank 1, rank 0 least"""
    )


def test_it_fits_on_one_screen_and_is_plain_when_it_is_no_terminal():
    file = io.StringIO()
    print_summary(simulated() | {"loss_last": 1.0}, file=file)
    assert "\x1b" not in file.getvalue()
    assert len(file.getvalue().splitlines()) <= 24


def test_headings_are_bold_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    file = Terminal()
    print_summary(simulated(), file=file)
    assert "\x1b[1m" in file.getvalue()


def test_a_narrow_terminal_shows_every_number(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    file = Terminal()
    print_summary(simulated(), file=file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 + len("\x1b[1m\x1b[0m") * 2
    assert any("makespan" in line and "19.5" in line for line in lines)
    assert "microbatches rank 0, rank 1 least" in " ".join(file.getvalue().split())


def test_measured_and_predicted_memory_are_told_apart():
    both = {"dp": 1, "peak_memory_bytes": [3 * 2**30], "measured_peak_memory_bytes": [3 * 2**30],
            "predicted_peak_memory_bytes": [2**30], "steps": 4,
            "predicted_memory_breakdown": [{"activations": 2**30, "total": 2**30}],
            "measured_memory_kind": "resident_growth"}  # fmt: skip
    lines = [" ".join(line.split()) for line in summary(both).splitlines()[1:]]
    assert [line for line in lines if "memory" in line or "parts" in line] == [
        "peak memory, predicted 1 GiB rank 0",
        "its parts, predicted GiB activations 1",
        "peak memory, measured 3 GiB rank 0; growth of the resident size",
    ]
    assert "GiB  rank 0\n" in summary(both | {"measured_memory_kind": None}) + "\n"


def test_one_replica_has_no_reduction_to_expose():
    assert "exposed" not in summary({"dp": 1, "makespan": 2.0, "exposed_grad_reduce": 0.0})
    assert "exposed" in summary({"dp": 2, "makespan": 2.0, "exposed_grad_reduce": 0.0})
    assert "exposed" in summary({"dp": 1, "makespan": 2.0, "exposed_grad_reduce": 1.0})


def test_names_of_others_reach_no_terminal_as_commands():
    file = io.StringIO()
    print_summary({"schedule": "mine\x1b[2J", "loss_last": 1.0}, file=file)
    assert file.getvalue().startswith("mine\\x1b[2J\n")
