"""Everything a user can cause, as one exception tree.

Every message tells what was asked, the rule with its numbers, and the fix in command-line spelling.
The command line prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Root of all errors that a user's input, data or machine can cause."""

    exit_code = 2


class PlanError(PipelineError):
    """Degrees, batch sizes or a stage cut that cannot work together."""


class ProgramError(PipelineError):
    """A program that breaks a rule of the instruction set; the message shows the place."""


class DeadlockError(ProgramError):
    """Lists of instructions in an order that cannot run.

    Attributes:
        stuck: Per rank, the index of the instruction that never begins; the length of the list
            for a rank that gets through.
    """

    def __init__(self, message: str, stuck: tuple[int, ...]) -> None:
        super().__init__(message)
        self.stuck = stuck


class CostError(PipelineError):
    """Costs, hardware figures or a profile that cannot be used."""


class ModelError(PipelineError):
    """A model that cannot be cut, or a step that took another path than its cut allows."""


class DataError(PipelineError):
    """Missing, empty or unsuitable data, or stages that see different batches."""


class CheckpointError(PipelineError):
    """A checkpoint that is missing, damaged, or of another model."""


class RunError(PipelineError):
    """A run that started and failed; the first failing rank is named."""

    exit_code = 1


class NotFiniteError(RunError):
    """A loss or gradient that is not finite; no rank has applied the step."""
