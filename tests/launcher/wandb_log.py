"""Reads what wandb writes locally: the ``.wandb`` file of an offline run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768


def read_records(file: Path) -> list[Any]:
    """The transaction log as wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for content in _records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        found.append(record)
    return found


def rows_and_run(records: list[Any]) -> tuple[list[dict[str, Any]], Any]:
    """Rows as logged, and the record that describes the run."""
    rows = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    return rows, runs[-1]


def summary_of(records: list[Any]) -> dict[str, Any]:
    """What the run's summary has become."""
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }


def config_of(run: Any) -> dict[str, Any]:
    """The run's configuration."""
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def _records(file: Path) -> Iterator[bytes]:
    """The file: a 7-byte header, then blocks of LevelDB's log format."""
    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
