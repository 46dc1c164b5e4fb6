"""``plan=auto``: the first plan in place of what was left open."""

from __future__ import annotations

from pathlib import Path

from launcher.config import LaunchConfig, check
from launcher.planning.no_plan import refuse
from launcher.planning.one_layout import is_one_layout, tune_layout
from launcher.planning.question import Question, ask, label
from launcher.planning.report import candidate_config, candidate_words
from launcher.report.summary import format_duration
from launcher.terminal import say
from strategies.planner.layout_search import search_confirmed


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
    if is_one_layout(config, asked):
        return _one_layout(config, asked)
    answer = search_confirmed(asked.problem, asked.space, top_k=1)
    if not answer.plans:
        raise refuse(asked, answer)
    best = answer.plans[0]
    batch = asked.space.global_batch_size
    memory_gb = asked.problem.machine.hardware.memory_gb
    words = candidate_words(best.candidate, asked.shape, batch, memory_gb=memory_gb)
    say(
        f"plan=auto: {' '.join(words)} "
        f"({label(asked)}: {format_duration(best.step_time_s, 's')} per step, the best of "
        f"{answer.num_candidates} candidates, {answer.search_s:.2f} s)"
    )
    chosen = candidate_config(config, best.candidate, asked.shape, batch)
    check(chosen)
    return chosen


def _one_layout(config: LaunchConfig, asked: Question) -> LaunchConfig:
    found = tune_layout(config, asked, top_k=1)
    (best,) = found.listed
    say(
        f"plan=auto: {' '.join(best.words)} "
        f"({label(asked)}: {format_duration(best.step_time_s, 's')} per step, the best of "
        f"{found.answer.num_candidates} candidates, {found.answer.search_s:.2f} s)"
    )
    check(best.run.config)
    return best.run.config
