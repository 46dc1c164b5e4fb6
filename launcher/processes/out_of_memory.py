"""Memory that has run out: in a rank that can still say so, or in one that was killed for it."""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.processes.failure import Failure
from strategies.errors import RunError

_VMSTAT = Path("/proc/vmstat")
# Allocators of torch on the host and on GPUs, and of everything else in C++.
_WORDS = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|Cannot allocate memory|bad_array_new_length"
)


class OutOfMemoryError(RunError):
    """A rank that has not got the memory it has asked for."""


def as_out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """The same failure with what it takes to see the reason; None if it is another one."""
    if not (isinstance(error, MemoryError) or _WORDS.search(str(error))):
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = (
        "" if limit == resource.RLIM_INFINITY else f"; address space is limited to {_gb(limit)}"
    )
    said = " ".join(str(error).split("\n")[0].split())
    return OutOfMemoryError(
        f"out of memory: {said or type(error).__name__}. At most {_gb(peak_bytes())} were resident "
        f"in this rank{limited}. Try a smaller data.microbatch_size or recompute=full; "
        "mode=validate estimates the memory of each rank."
    )


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class OomCount:
    """Kills for lack of memory that the kernel has counted since this was made."""

    _before: int = field(default_factory=lambda: _kills())

    def explain(self, failure: Failure) -> Failure:
        """Adds to a SIGKILL that the kernel has killed somebody, and the peak of the ranks."""
        if failure.kind != "SIGKILL" or _kills() == self._before:
            return failure
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return replace(
            failure,
            kind="OutOfMemory",
            message=(
                "ended by SIGKILL, and the kernel has killed a process for lack of memory "
                f"meanwhile; a rank that has ended had at most {_gb(peak)} resident"
            ),
        )


def _kills() -> int:
    """Of the whole machine, since it was started."""
    try:
        found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else int(found[1])


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
