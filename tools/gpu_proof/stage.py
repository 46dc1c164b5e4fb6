"""The process of one stage: ``python -m tools.gpu_proof.stage JSON``, started by ``proof``."""

from __future__ import annotations

import sys

from tools.gpu_proof.proof import run_stage

if __name__ == "__main__":
    run_stage(sys.argv[1])
