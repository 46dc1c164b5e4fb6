"""The eight steps of DualPipe on one rank; two opposed pipes and a V share them.

DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437; https://github.com/deepseek-ai/DualPipe.

Cut between its middle ranks, DualPipe on P ranks is a V on P/2 ranks: what the opposed pipe does on
rank r is the V's way back. The steps know neither stages nor microbatches, see ``two_way.py``.
"""

from __future__ import annotations


def dual_steps(*, rank: int, num_ranks: int, per_way: int) -> list[str]:
    """The pattern of one rank of the V.

    Args:
        rank: r; in DualPipe the distance to the nearer end.
        num_ranks: R of the V; in DualPipe half of the ranks.
        per_way: N >= 2R, microbatches on each way.

    >>> print(*dual_steps(rank=0, num_ranks=2, per_way=4))
    F0 F0 F0 F1 I1 W F1 F0&B1 F1&B0 B1 F1&B0 B1 I0 W I0 W
    """
    inner = num_ranks - 1 - rank
    steps = ["F0"] * (2 * inner)
    steps += ["F0", "F1"] * (rank + 1)
    steps += ["I1", "W", "F1"] * inner
    main = ["F0&B1", "F1&B0"] * (per_way - 2 * num_ranks + rank + 1)
    if inner == 0:
        # Everybody waits for this first backward: in a pair it would end later.
        main[0:1] = ["F0", "B1"]
    steps += main
    steps += ["B1", "F1&B0"] * inner
    # The second half of the drain passes input gradients on first; weight gradients fill its gaps.
    drain = ["B1", "B0"] * (rank + 1)
    steps += drain[: rank + 1] + [step.replace("B", "I") for step in drain[rank + 1 :]]
    steps += ["W", "I0"] * inner
    steps += ["W"] * (rank + 1)
    return steps
