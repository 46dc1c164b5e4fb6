"""Which of several failing ranks is the cause, where the cause may be one that has not failed."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from launcher.processes.failure import Failure, first_failure, is_consequence
from strategies.heartbeat import Beat


def blame(
    failures: Sequence[Failure], beats: Mapping[int, Beat], idle_s: Mapping[int, float]
) -> Failure:
    """The cause: a rank that was killed, one that says why, or one that all others waited for.

    A rank that has given up waiting names its neighbour, which may itself have waited for somebody
    else: who waits for whom is followed to a rank that waits for nobody.

    Args:
        failures: Of the ranks that have ended badly.
        beats: What each rank of this host has last said.
        idle_s: Of those that still run, for how long they have not gone on.
    """
    first = first_failure(list(failures))
    if not is_consequence(first):
        return first
    seen = [first.rank]
    while beats[seen[-1]].waiting:
        others = [rank for rank in beats[seen[-1]].peers or beats if rank not in seen]
        known = [rank for rank in others if rank in beats]
        if not known:
            return first
        seen.append(min(known, key=lambda rank: (beats[rank].waiting, -idle_s.get(rank, 0.0))))
    culprit = seen[-1]
    if culprit not in idle_s:
        return first  # it has ended, too, and has said nothing better
    message = (
        f"it has not gone on for {idle_s[culprit]:.1f} s, and rank {first.rank} has given up "
        f"waiting: {first.kind}: {first.message.splitlines()[0]}"
    )
    return Failure(culprit, socket.gethostname(), first.at, "no progress", message, 1)
