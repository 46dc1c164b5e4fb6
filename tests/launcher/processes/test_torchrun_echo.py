"""Progress that is told to a function of the same process."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from launcher.processes.torchrun import events_told_to


@pytest.mark.parametrize("fails", [False, True])
def test_every_event_has_been_told_when_the_block_ends(fails):
    heard: list[dict[str, Any]] = []

    def listen(event: dict[str, Any]) -> None:
        time.sleep(0.001)  # slower than whoever tells
        heard.append(event)

    def run() -> None:
        with events_told_to(listen):
            pipe = int(os.environ["FOLDPIPE_EVENTS"])
            for step in range(50):
                os.write(pipe, (json.dumps({"kind": "step", "step": step}) + "\n").encode())
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert [event["step"] for event in heard] == list(range(50))
    assert "FOLDPIPE_EVENTS" not in os.environ
