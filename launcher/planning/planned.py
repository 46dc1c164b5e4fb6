"""``plan=auto``: the first plan in place of what was left open."""

from __future__ import annotations

from pathlib import Path

from launcher.config import LaunchConfig, check
from launcher.planning.calibration import label
from launcher.planning.chosen import chosen_config, chosen_words
from launcher.planning.no_plan import refuse
from launcher.planning.question import ask
from launcher.report.units import format_duration
from launcher.terminal import say
from strategies.planner.confirmed import search_confirmed


def planned(config: LaunchConfig, run_dir: Path) -> LaunchConfig:
    """The configuration with the planner's choice; unchanged with ``plan=manual``.

    Args:
        config: Checked.
        run_dir: The run's folder, which says what was typed.

    Raises:
        PlanError: Nothing fits; the message has the smallest change that would.
    """
    if config.plan != "auto":
        return config
    asked = ask(config, run_dir)
    answer = search_confirmed(asked.problem, asked.space, top_k=1)
    if not answer.plans:
        raise refuse(asked, answer)
    best = answer.plans[0]
    batch = asked.space.global_batch_size
    say(
        f"plan=auto: {' '.join(chosen_words(best.candidate, asked.shape, batch))} "
        f"({label(config)}: {format_duration(best.step_time_s, 's')} per step, the best of "
        f"{answer.num_candidates} candidates, {answer.search_s:.2f} s)"
    )
    chosen = chosen_config(config, best.candidate, asked.shape, batch)
    check(chosen)
    return chosen
