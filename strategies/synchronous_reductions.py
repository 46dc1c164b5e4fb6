"""What to say where reductions wait inside their calls. Torch-free: the parent can say it first."""

from __future__ import annotations

from collections.abc import Mapping


def torch_waits(environment: Mapping[str, str]) -> bool:
    """Whether torch is told to compare every collective over its members before it starts."""
    return environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def synchronous_reductions(environment: Mapping[str, str]) -> str:
    """The message, with the cause where the environment shows it."""
    if torch_waits(environment):
        return (
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch wait for all members inside the call of "
            "every collective: gradients would be reduced in the middle of the backward instead of "
            "under it. Try TORCH_DISTRIBUTED_DEBUG=INFO, or overlap=none."
        )
    return (
        "a gradient reduction that was started did not return before all its members had come: it "
        "would stand in the backward instead of hiding under it. Look for settings that make "
        "collectives wait (CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG), or try overlap=none."
    )
