"""``python -m launcher demo``: three schedules simulated, one trained, one picture, in 20 seconds.

Further words go to the training run, which is an ordinary one: what is printed above it is the
command that repeats it.
"""

from __future__ import annotations

import shlex
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.config.key import shorten
from launcher.report.ascii import draw
from launcher.report.summary import format_percent
from launcher.terminal import say, terminal_width
from strategies.analysis.metrics import measure
from strategies.compiler import compile_program
from strategies.costs.uniform import UniformCosts
from strategies.errors import PlanError
from strategies.simulator.engine import simulate

_PP, _MICROBATCHES = 2, 4
_SCHEDULES = (
    ("gpipe", "all forwards, then all backwards: every activation is held"),
    ("1f1b", "a backward as soon as there is one: as fast, with less memory"),
    ("zb_h1", "weights' gradients (W) wait for where a rank would be idle"),
)
_TRAINED = "zb_h1"
_OPEN = "--open"


def run(words: Sequence[str], launch: Callable[[Sequence[str]], int]) -> int:
    """Shows it.

    Args:
        words: ``--open``, which opens the picture in a browser, and overrides of the training run.
        launch: Runs one command line and returns its exit code.

    Raises:
        PlanError: Another flag.
    """
    given, opens = [word for word in words if word != _OPEN], _OPEN in words
    stray = next((word for word in given if word.startswith("-")), None)
    if stray is not None:
        raise PlanError(
            f"{shorten(stray)} is not a flag of demo. Try --open, or overrides: "
            "demo trainer.max_steps=20."
        )
    since = time.monotonic()
    say(
        f"1. Three schedules, simulated: {_PP} ranks, {_MICROBATCHES} microbatches, B twice as "
        "long as F.\n   0F1: stage 0, forward, microbatch 1; B backward, I and W its halves; "
        ". idle"
    )
    for name, remark in _SCHEDULES:
        say(f"\n{_simulated(name)}\n{remark}")
    words = trained_words(given)
    folder = Path(f"outputs/{time.strftime('%Y-%m-%d/%H-%M-%S')}_demo")
    place = next((w.partition("=")[2] for w in given if w.startswith("hydra.run.dir=")), None)
    say(f"\n2. One of them, trained: {shlex.join(['python', '-m', 'launcher', *words])}\n")
    code = launch(words if place else [*words, f"hydra.run.dir={folder}"])
    if code:
        return code
    page = (Path(place.strip("'\"")) if place else folder).absolute() / "timeline.html"
    say(f"\n3. The picture, predicted above measured ({time.monotonic() - since:.0f} s in all):")
    say(f"   {page.as_uri()}")
    if opens:
        webbrowser.open(page.as_uri())
    return 0


def trained_words(given: Sequence[str]) -> list[str]:
    """What the second part runs: its own words, and those that replace or join them."""
    named = [f"schedule={_TRAINED}", f"pp={_PP}", "trainer.max_steps=40", "experiment_name=demo"]
    keys = {word.partition("=")[0] for word in given}
    return [*(word for word in named if word.partition("=")[0] not in keys), *given]


def _simulated(schedule: str) -> str:
    program = compile_program(schedule=schedule, pp=_PP, num_microbatches=_MICROBATCHES)
    costs = UniformCosts()
    timeline = simulate(program, costs)
    metrics = measure(timeline, costs)
    figures = (
        f"{schedule}: {metrics.makespan:g} F, {format_percent(metrics.bubble_ratio)} idle, "
        f"{max(metrics.peak_activations):g} microbatches held"
    )
    return f"{figures}\n{draw(timeline, width=terminal_width())}"
