"""Rules of ``mode=plan`` and ``plan=auto`` that need no model."""

from __future__ import annotations

from launcher.config.key import keys_of, shorten, spell
from launcher.config.launch import LaunchConfig
from launcher.config.planner import PlannerConfig
from strategies.errors import PlanError

# What ``planner.explain`` may fix.
EXPLAINED = (
    "tp", "pp", "dp", "num_microbatches", "microbatch_size", "schedule", "stages_per_rank",
    "group", "overlap", "recompute",
)  # fmt: skip
_AUTO_MODES = ("train", "simulate", "validate")


def leaves_open(config: LaunchConfig) -> bool:
    """Whether degrees and schedule are still to be chosen, so that they need not fit together."""
    return config.mode == "plan" or config.plan == "auto"


def check_planner(config: LaunchConfig) -> None:
    """Refuses keys that would be ignored, and entries that say nothing.

    Raises:
        PlanError: With a spelling that works.
    """
    if config.plan == "auto" and config.mode not in (*_AUTO_MODES, "plan"):
        raise PlanError(
            f"plan=auto chooses how to train; mode={config.mode} runs a checkpoint on degrees of "
            "your own. Try plan=manual, or mode=plan."
        )
    if not leaves_open(config):
        for entry in keys_of(PlannerConfig, "planner."):
            value = getattr(config.planner, entry.path.removeprefix("planner."))
            if value != entry.default:
                raise PlanError(
                    f"{entry.path}={spell(value)} has no meaning without a planner. "
                    "Try plan=auto, or mode=plan."
                )
    planner = config.planner
    if planner.partition != "ilp" and planner.balance_ratio != PlannerConfig().balance_ratio:
        raise PlanError(
            f"planner.balance_ratio={planner.balance_ratio:g} belongs to planner.partition=ilp. "
            f"Try planner.partition=ilp planner.balance_ratio={planner.balance_ratio:g}."
        )
    if planner.explain and config.mode != "plan":
        raise PlanError(
            f"planner.explain={spell(planner.explain)} is an answer of mode=plan. Try mode=plan."
        )
    if planner.explain and planner.maximize != "throughput":
        raise PlanError(
            f"planner.explain={spell(planner.explain)} shows one layout of a search over many, and "
            f"planner.maximize={planner.maximize} keeps to one. Try without planner.explain."
        )
    for word in planner.explain:
        name, _, value = word.replace(":", "=", 1).partition("=")
        if name not in EXPLAINED or not value:
            raise PlanError(
                f"planner.explain={shorten(list(planner.explain))}: {shorten(word)} fixes nothing "
                f"that is planned. Names: {', '.join(EXPLAINED)}. Try planner.explain=[tp=4,pp=8]."
            )


def check_units_per_stage(config: LaunchConfig) -> None:
    """Refuses two cuts at once.

    Raises:
        PlanError: Both are given.
    """
    schedule = config.schedule
    if schedule.units_per_stage is not None and schedule.layers_per_stage is not None:
        raise PlanError(
            f"schedule.units_per_stage={spell(schedule.units_per_stage)} and "
            f"schedule.layers_per_stage={spell(schedule.layers_per_stage)} both cut the model. "
            "Keep one of them."
        )
