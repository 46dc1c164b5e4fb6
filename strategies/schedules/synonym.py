"""What schedules are called elsewhere, and what is typed for them here.

Papers and frameworks have words of their own for the same orders: ``Schedule1F1B`` is torch's,
``vpp`` Megatron's virtual pipeline, ``V``, ``X`` and ``W`` are the shapes of Mario's paper. A name
that is not ours is not taken: the message says which schedule is meant and how it is typed, so that
one word for one thing stands in commands, files and pictures.

Names are compared without case and punctuation (``ZB-H1`` is ``zb_h1``), without ``Schedule`` in
front (classes) and without the words behind that some append (``GPipeSchedule``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Synonym:
    """What is typed for the names, after ``Try`` in a message.

    Attributes:
        names: As they are spelt elsewhere, with spaces between them.
        schedule: The name here.
        more: Further words of the command line, where the name alone is not the same thing.
        origin: Whose names they are, or what is different here.
    """

    names: str
    schedule: str
    origin: str
    more: str = ""

    def typed(self) -> str:
        return f"schedule={self.schedule} {self.more}".strip()


SYNONYMS = (
    Synonym(
        "FThenB AFAB fill_drain all_forward_all_backward",
        "gpipe",
        "all forwards, then all backwards",
    ),
    Synonym(
        "PipeDream_Flush 1F1B_flush DAPPLE one_forward_one_backward TrainSchedule simple_1f1b "
        "non_interleaved_1f1b forward_backward_pipelining_without_interleaving V V_shape",
        "1f1b",
        "one forward, one backward, then a flush; the V of Mario's paper",
    ),
    Synonym(
        "1f1b_plus 1f1b_overlap_friendly early_1f1b",
        "eager_1f1b",
        "more forwards first, so that messages have time",
    ),
    Synonym(
        "VPP virtual_pipeline virtual_pipeline_parallel interleaved interleave interleaving "
        "1F1B_interleaved 1f1b_vpp PipelineParallelWithInterleave circular "
        "forward_backward_pipelining_with_interleaving W W_shape",
        "interleaved_1f1b",
        "several stages per rank, one forward, one backward; the W of Mario's paper",
    ),
    Synonym(
        "PipelineParallelWithInterleaveFthenB interleaved_fthenb vpp_fthenb interleaved_gpipe "
        "BFS breadth_first breadth_first_pipeline BFPP",
        "looped_bfs",
        "several stages per rank, all forwards before all backwards",
    ),
    Synonym(
        "InterleavedZeroBubble Interleaved1F1BZeroBubble",
        "interleaved_zb",
        "interleaved 1F1B with split backwards",
    ),
    Synonym(
        "ZB zero_bubble ZB1P H1",
        "zb_h1",
        "zero bubble within the memory of 1F1B; zb_h2 takes twice that and leaves no bubble",
    ),
    Synonym("ZB2P H2", "zb_h2", "zero bubble with twice the memory of 1F1B"),
    Synonym(
        "ZBVPP ZBVZeroBubble zero_bubble_v ZeroBubbleVPipe V_ZB",
        "zb_v",
        "zero bubble, two stages per rank in a V",
    ),
    Synonym("half_memory zbv_half", "v_half", "zero bubble in a V with half of 1F1B's memory"),
    Synonym("min_memory zbv_min", "v_min", "zero bubble in a V with a third of 1F1B's memory"),
    Synonym(
        "X X_shape chimera_direct bidirectional bidirectional_pipeline",
        "chimera",
        "two opposed pipes with two copies of the weights; the X of Mario's paper",
    ),
    Synonym(
        "chimera_doubling chimera_forward_doubling chimera_backward_halving chimera_concat",
        "chimera",
        "two opposed pipes; more microbatches are repeated basic units, with neither forward "
        "doubling nor backward halving",
    ),
    Synonym(
        "wave wave_pipeline wave_like",
        "hanayo",
        "w waves with schedule.stages_per_rank= 2w",
    ),
    Synonym("deepseek DeepSeekV3", "dualpipe", "two opposed pipes, two copies of the weights"),
    Synonym("cut_in_half", "dualpipe_v", "DualPipe with one copy of the weights, in a V"),
    Synonym("Fold3D AIAO all_in_all_out", "foldx_aiao", "each chunk for all microbatches"),
    Synonym("FIFO first_in_first_out", "foldx_fifo", "chunks in rounds of pp microbatches"),
    Synonym("fold", "foldx", "rounds of schedule.group=N microbatches, or auto"),
    Synonym("sequential model_parallel naive_mp", "naive", "one microbatch at a time"),
    Synonym(
        "weight_stashing 1f1b_async async_1f1b asynchronous pipedream_async vertical_sync",
        "pipedream",
        "1F1B without a flush, with stashed weights",
    ),
    Synonym(
        "2BW double_buffered double_buffered_weight_updates",
        "pipedream_2bw",
        "no flush, two versions of the weights",
    ),
    Synonym(
        "CSV file PipelineScheduleMulti PipelineScheduleSingle pipeline_parallel_schedule_csv",
        "custom",
        "an order of your own",
        more="schedule.file=my.csv",
    ),
)

_BEHIND = ("schedules", "scheduler", "schedule", "pipeline", "pass")


def meant_schedule(word: str, known: Iterable[str]) -> str:
    """`` It is ... here`` for a name that others have; empty for one that nobody has.

    Args:
        word: What was typed after ``schedule=``.
        known: The names that can be typed.
    """
    listed = tuple(known)
    asked = _spellings(word)
    for name in listed:
        if _plain(name) in asked:
            return f" Did you mean schedule={name}?"
    for one in SYNONYMS:
        if one.schedule in listed and asked & {_plain(name) for name in one.names.split()}:
            return f" It is {one.schedule} here ({one.origin}). Try {one.typed()}."
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
