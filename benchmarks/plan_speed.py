"""CPU time of the planner's answers, and whether they are still as good.

    python -m benchmarks.plan_speed [--json OUT.json] [--against BEFORE.json] [NAME ...]

Every question is a command of its own, start-up, report and pictures included, as a user types it.
Printed: its CPU seconds (user and system, of all its processes: other programs disturb them less
than the clock's), candidates, how many were simulated, and the first plan with its predicted step
time, or how far ``planner.maximize`` gets. ``--json`` keeps the figures; ``--against`` prints those
of another version beside them. Plans are compared by what each version predicts, so only where the
costs are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_GPT = "model=gpt3_175b"
_A100 = "hardware=a100_80g trainer.precision=bf16-true planner.num_gpus="
_530B = f"{_GPT} model.layers=105 model.hidden=20480 model.heads=128 model.ffn=81920 {_A100}"
_1T = f"{_GPT} model.layers=128 model.hidden=25600 model.heads=160 model.ffn=102400 {_A100}"
_405B = (
    "model=llama2_7b model.layers=126 model.hidden=16384 model.heads=128 model.kv_heads=8 "
    "model.ffn=53248 model.vocab=128256 model.sequence=8192 hardware=h100 "
    "trainer.precision=bf16-true planner.num_gpus="
)
_176B = f"{_GPT} model.layers=70 model.hidden=14336 model.heads=112 model.ffn=57344 {_A100}"
_ONE = (
    "pp=4 dp=2 tp=1 schedule=1f1b model=llama2_13b hardware=a100_80g planner.num_gpus=8 "
    "trainer.precision=bf16-mixed planner.maximize="
)
_13B = "model=llama2_13b hardware=a100_40g planner.num_gpus="

QUESTIONS = {
    "13B-on-64": f"{_13B}64",
    "13B-on-4096": f"{_13B}4096 planner.global_batch_size=4096",
    "13B-on-64-chimera": f"{_13B}64 schedule=chimera",
    "176B-on-384": f"{_176B}384 planner.global_batch_size=2048",
    "530B-on-280": f"{_530B}280 planner.global_batch_size=280",
    "530B-on-2240": f"{_530B}2240 planner.global_batch_size=1920",
    "1T-on-3072": f"{_1T}3072 planner.global_batch_size=3072",
    "405B-on-8192": f"{_405B}8192 planner.global_batch_size=2048",
    "mixtral-on-64": "model=mixtral_8x7b hardware=h100 planner.num_gpus=64",
    "throughput": f"{_ONE}throughput",
    "sequence_length": f"{_ONE}sequence_length",
    "model_size": f"{_ONE}model_size",
}
"""What is asked, after ``python -m launcher mode=plan``."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One question's answer.

    Attributes:
        cpu_s: Of the whole command.
        step_s: The first plan's predicted step time; None where there is no plan.
        plan: Its overrides, or the message of what found none.
    """

    name: str
    cpu_s: float
    search_s: float | None
    candidates: int | None
    simulated: int | None
    step_s: float | None
    plan: str


def answer(name: str, words: Sequence[str]) -> Answered:
    """Runs one command of this tree, whatever is installed, in a folder of its own."""
    before = _children_s()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "mode=plan", *words, f"hydra.run.dir={folder}/out"],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        cpu_s = _children_s() - before
        file = Path(folder, "out", "result.json")
        result = json.loads(file.read_text()) if file.is_file() else {}
    if not result.get("plans"):
        return Answered(name, cpu_s, None, None, None, None, done.stderr.strip()[-300:])
    first = result["plans"][0]
    return Answered(
        name,
        cpu_s,
        result["search_s"],
        result["num_candidates"],
        result["num_simulated"],
        first["predicted_step_time_s"],
        " ".join(_chosen(first["overrides"], words)),
    )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _chosen(overrides: Sequence[str], asked: Sequence[str]) -> list[str]:
    """What the planner has added."""
    return [word for word in overrides if word not in asked and not word.startswith("planner.")]


def line(now: Answered, before: Answered | None) -> str:
    """A question in one line, and the answer of before under it."""
    told = [f"{now.name:20} {now.cpu_s:7.1f} s CPU"]
    if now.step_s is None:
        return f"{told[0]}  {now.plan}"
    told.append(f"search {now.search_s:6.2f} s, {now.simulated}/{now.candidates}")
    told.append(f"step {now.step_s:.5g} s")
    if before is not None and before.step_s is not None:
        told.append(
            f"before {before.cpu_s:.1f} s CPU, step {before.step_s:.5g} s "
            f"({100 * (now.step_s / before.step_s - 1):+.2f} %)"
        )
    return "  ".join(told) + f"\n{'':22}{now.plan}"


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the planner's answers.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(QUESTIONS)}; all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in QUESTIONS]
    if unknown:
        parser.error(f"no question {unknown[0]!r}; there are {', '.join(QUESTIONS)}")
    before = {}
    if given.against is not None:
        rows = json.loads(given.against.read_text())
        before = {row["name"]: Answered(**row) for row in rows}
    answers = []
    for name in given.names or QUESTIONS:
        answers.append(answer(name, QUESTIONS[name].split()))
        sys.stdout.write(f"{line(answers[-1], before.get(name))}\n")
        sys.stdout.flush()
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(each) for each in answers], indent=1))


if __name__ == "__main__":
    main()
