"""What ``compile=true`` asks of a schedule. Torch-free, so that the parent can refuse in time."""

from __future__ import annotations

from strategies.errors import PlanError
from strategies.recompute import Policy


def refuse_split_backward(schedule: str, *, own: bool, asked: bool) -> None:
    """Refuses compiled units in a program with I and W.

    A compiled unit's backward is one piece of generated code: it computes the weights' gradients
    with the inputs', so I would do all of the work and W none, which is neither what the schedule
    was made for nor what was simulated.

    Args:
        schedule: Its name.
        own: Whether it splits backwards by itself.
        asked: Whether the user wants them split.

    Raises:
        PlanError: Either.
    """
    if own or asked:
        what = f"schedule={schedule}" if own else "schedule.split_backward=true"
        fix = "schedule=1f1b, which does not split them" if own else "schedule.split_backward=false"
        raise PlanError(
            f"compile=true with {what}: the program runs every backward in two halves, I and W, "
            "but a compiled unit has one backward that cannot be cut: I would take the time of "
            f"both. Try {fix}, or compile=false."
        )


def refuse_selective(policy: Policy) -> None:
    """Refuses compiled units that are to recompute operation by operation.

    Raises:
        PlanError: ``policy`` is selective.
    """
    if policy == "selective":
        raise PlanError(
            "compile=true with recompute=selective: what is computed again is decided operation by "
            "operation, and a compiled unit hides its operations. Try recompute=full, or "
            "compile=false."
        )
