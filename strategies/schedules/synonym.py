"""What schedules are called elsewhere, and what is typed for them here.

``Schedule1F1B`` is torch's name for 1F1B, ``vpp`` is Megatron's for interleaved 1F1B, and ``V``,
``X`` and ``W`` are the shapes of Mario's paper. Such a name is not accepted: the message says what
to type, so that commands, files and pictures use one name.

Names are compared without case and punctuation (``ZB-H1`` is ``zb_h1``), without ``Schedule`` in
front (classes) and without the words behind that some append (``GPipeSchedule``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAMES = {
    "gpipe": "FThenB AFAB fill_drain all_forward_all_backward",
    "1f1b": (
        "PipeDream_Flush 1F1B_flush DAPPLE one_forward_one_backward TrainSchedule simple_1f1b "
        "non_interleaved_1f1b forward_backward_pipelining_without_interleaving V V_shape"
    ),
    "eager_1f1b": "1f1b_plus 1f1b_overlap_friendly early_1f1b",
    "interleaved_1f1b": (
        "VPP virtual_pipeline virtual_pipeline_parallel interleaved interleave interleaving "
        "1F1B_interleaved 1f1b_vpp PipelineParallelWithInterleave circular "
        "forward_backward_pipelining_with_interleaving W W_shape"
    ),
    "looped_bfs": (
        "PipelineParallelWithInterleaveFthenB interleaved_fthenb vpp_fthenb interleaved_gpipe "
        "BFS breadth_first breadth_first_pipeline BFPP"
    ),
    "interleaved_zb": "InterleavedZeroBubble Interleaved1F1BZeroBubble",
    "zb_h1": "ZB zero_bubble ZB1P H1",
    "zb_h2": "ZB2P H2",
    "zb_v": "ZBVPP ZBVZeroBubble zero_bubble_v ZeroBubbleVPipe V_ZB",
    "v_half": "half_memory zbv_half",
    "v_min": "min_memory zbv_min",
    "chimera": (
        "X X_shape chimera_direct bidirectional bidirectional_pipeline chimera_doubling "
        "chimera_forward_doubling chimera_backward_halving chimera_concat"
    ),
    "hanayo": "wave wave_pipeline wave_like",
    "dualpipe": "deepseek DeepSeekV3",
    "dualpipe_v": "cut_in_half",
    "foldx_aiao": "Fold3D AIAO all_in_all_out",
    "foldx_fifo": "FIFO first_in_first_out",
    "foldx": "fold",
    "naive": "sequential model_parallel naive_mp",
    "pipedream": "weight_stashing 1f1b_async async_1f1b asynchronous pipedream_async vertical_sync",
    "pipedream_2bw": "2BW double_buffered double_buffered_weight_updates",
    "custom schedule.file=my.csv": (
        "CSV file PipelineScheduleMulti PipelineScheduleSingle pipeline_parallel_schedule_csv"
    ),
}
SYNONYMS = {name: typed for typed, names in _NAMES.items() for name in names.split()}
"""Name elsewhere -> what is typed here behind ``schedule=``."""

_BEHIND = ("schedules", "scheduler", "schedule", "pipeline", "pass")


def meant_schedule(word: str, known: Iterable[str]) -> str:
    """A hint for a name that others use, or that is spelt otherwise here; empty for any other.

    Args:
        word: What was typed after ``schedule=``.
        known: The names that can be typed.
    """
    listed = tuple(known)
    spellings = _spellings(word)
    for name in listed:
        if _plain(name) in spellings:
            return f" Did you mean schedule={name}?"
    for name, typed in SYNONYMS.items():
        if typed.split()[0] in listed and _plain(name) in spellings:
            return f" Here it is called {typed.split()[0]}. Try schedule={typed}."
    return ""


def _spellings(word: str) -> set[str]:
    """The name as it stands, and without what classes and functions have around it."""
    plain = _plain(word[:200])
    found = {plain, plain.removeprefix("pipeline").removeprefix("schedule")}
    for end in _BEHIND:
        found |= {one.removesuffix(end) for one in found}
    return found - {""}


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())
