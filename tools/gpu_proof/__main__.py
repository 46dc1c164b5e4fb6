"""``python -m tools.gpu_proof``: what one GPU can show, in two parts of five minutes at most.

make gpu-proof                      # both parts; the file is gpu-proof.json
make gpu-proof ARGS=--rehearse      # everything on CPU with the smallest sizes
bash tools/gpu_proof/offline.sh     # on a machine without network, see make gpu-wheels
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_proof.proof import Stage, import_all, look, prove

PART_S = 270.0
# In the order of their value; those of one line run side by side.
GROUPS: tuple[tuple[Stage, ...], ...] = (
    (Stage("card", "tools.gpu_proof.facts:card", 30),),
    (
        Stage("launches", "tools.gpu_proof.launches:launches", 75, needs_gb=8),
        Stage("fork", "tools.gpu_proof.facts:fork", 75, needs_gb=2),
        Stage("nccl_one", "tools.gpu_proof.links:nccl_one", 45, needs_gb=3),
        Stage("nccl_two", "tools.gpu_proof.links:nccl_two", 60, needs_gb=4),
        Stage("nccl_refused", "tools.gpu_proof.links:nccl_refused", 45, needs_gb=2),
        Stage("staged", "tools.gpu_proof.links:staged", 45, needs_gb=2),
        Stage("ipc", "tools.gpu_proof.links:ipc", 45, needs_gb=2),
    ),
    (Stage("numerics", "tools.gpu_proof.numerics:numerics", 120, needs_gb=20),),
    (Stage("configurations", "tools.gpu_proof.configurations:configurations", 90, needs_gb=60),),
    (Stage("kernels", "tools.gpu_proof.kernels:kernels", 50, part=2, needs_gb=20),),
    (Stage("speed", "tools.gpu_proof.speed:speed", 100, part=2, needs_gb=60),),
    (Stage("profile", "tools.gpu_proof.calibration:profile", 60, part=2, needs_gb=60),),
    (Stage("shared_card", "tools.gpu_proof.speed:shared_card", 60, part=2, needs_gb=40),),
    (Stage("costs", "tools.gpu_proof.facts:costs", 30, part=2, needs_gb=8),),
    (Stage("doctor", "tools.gpu_proof.facts:doctor", 45, part=2, needs_gb=2),),
)


def main(words: Sequence[str] | None = None) -> int:
    """Runs what is asked for.

    Returns:
        0 if everything that ran has passed, 1 if something has not, 2 if nothing could run.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_proof", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on CPU, with the smallest sizes")
    parser.add_argument("--part", type=int, choices=(1, 2), help="only this part")
    parser.add_argument("--stages", default="", help="only these, separated by commas")
    parser.add_argument("--again", action="store_true", help="also stages that have passed before")
    parser.add_argument("--out", type=Path, default=Path("gpu-proof.json"), help="the file")
    parser.add_argument("--predict", action="store_true", help="write predicted.json, and end")
    parser.add_argument("--page", type=Path, help="write this page from the file, and end")
    asked = parser.parse_args(words)
    if asked.predict:
        from tools.gpu_proof.configurations import PREDICTED, predict

        PREDICTED.write_text(json.dumps(predict(), indent=1) + "\n")
        return 0
    if asked.page is not None:
        from tools.gpu_proof.page import write_page

        return write_page(asked.out, asked.page)
    names = set(filter(None, asked.stages.split(",")))
    unknown = names - {stage.name for group in GROUPS for stage in group}
    if unknown:
        known = ", ".join(stage.name for group in GROUPS for stage in group)
        parser.error(f"--stages {','.join(sorted(unknown))}: there are {known}")
    card = look(rehearse=asked.rehearse)
    if card is None:
        _say(
            "torch sees no GPU on this machine, so nothing was run. Try make gpu-proof "
            "ARGS=--rehearse, which runs all stages on the CPU."
        )
        return 2
    _say(f"{card.name}, torch {card.torch}")
    if card.total_gb - card.free_gb > 1.5:
        _say(
            f"others use {card.total_gb - card.free_gb:.1f} of {card.total_gb:.1f} GB of this GPU: "
            "times are not those of a GPU of one's own"
        )
    # Who ends it keeps what has been found.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    passed = True
    try:
        parts = [[part] for part in (1, 2) if asked.part in (None, part)]
        for part in [[1, 2]] if asked.rehearse and len(parts) == 2 else parts:
            groups = [
                [s for s in group if s.part in part and (not names or s.name in names)]
                for group in GROUPS
            ]
            if asked.rehearse:  # Times mean nothing: all at once.
                groups = [[stage for group in groups for stage in group]]
                import_all(groups)
            passed &= prove(
                groups, card, asked.out, limit_s=PART_S * (10 if asked.rehearse else 1),
                quick=asked.rehearse, again=asked.again, say=_say,
            )  # fmt: skip
    except KeyboardInterrupt:
        _say(f"{asked.out}: stopped; what has been found so far is in it")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    _say(f"{asked.out}: " + ("all passed" if passed else "not everything has passed"))
    return 0 if passed else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
