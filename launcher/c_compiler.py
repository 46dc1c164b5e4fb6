"""``compile=true`` makes C++ or Triton code, for which the machine needs a compiler of its own."""

from __future__ import annotations

import os
import shutil

from strategies.errors import PlanError


def check_compiler(*, gpu: bool) -> None:
    """Refuses where torch.compile would fail at its first call.

    Args:
        gpu: Whether ranks run on GPUs: Triton wants a C compiler, code for CPUs a C++ one.

    Raises:
        PlanError: There is none.
    """
    variable, names = ("CC", ("gcc", "clang", "cc")) if gpu else ("CXX", ("g++",))
    given = os.environ.get(variable)
    if not any(shutil.which(name) for name in ((given,) if given else names)):
        wanted = f"{variable}={given}" if given else " or ".join(names)
        raise PlanError(
            f"compile=true: torch.compile needs {wanted} on this machine, and it is not in PATH. "
            f"Install it (apt install g++), set {variable} to another one, or use compile=false."
        )
