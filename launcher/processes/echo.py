"""Progress on standard output, where no parent of ours reads what rank 0 tells."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def events_told_to(listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Hands what ``launcher.callbacks.Progress`` tells inside the block to a function.

    Args:
        listener: Called in a thread of its own; it has had every event when the block ends.
    """
    reader, writer = os.pipe()
    thread = threading.Thread(target=_read, args=(reader, listener), name="progress", daemon=True)
    thread.start()
    os.environ["FOLDPIPE_EVENTS"] = str(writer)
    try:
        yield
    finally:
        del os.environ["FOLDPIPE_EVENTS"]
        os.close(writer)
        thread.join()


def _read(reader: int, listener: Callable[[dict[str, Any]], None]) -> None:
    with os.fdopen(reader) as lines:
        for line in lines:
            listener(json.loads(line))
