"""Stages that go wrong, each in its own way, and one that does not."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from tools.gpu_proof.proof import Setting


def good(setting: Setting) -> dict[str, Any]:
    return {"answer": 42, "told": setting.earlier("first").get("answer")}


def hangs(setting: Setting) -> dict[str, Any]:
    setting.keep({"so_far": 1})
    time.sleep(60)
    return {}


def crashes(setting: Setting) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def raises(setting: Setting) -> dict[str, Any]:
    raise ValueError("that was wrong")


def runs_out_of_memory(setting: Setting) -> dict[str, Any]:
    return {"size": np.ones(1 << 46).size}


def finds_fault(setting: Setting) -> dict[str, Any]:
    return {"seen": 3, "failed": "3 is not 4"}
