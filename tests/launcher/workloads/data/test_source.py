import os
import re
import time

import pytest

from launcher.workloads.data.source import DEFAULT_SOURCE, TextSource, check_source
from launcher.workloads.data.tokens import load_tokens
from strategies.errors import DataError, PlanError


def test_the_default_source_is_good_and_checked_in_milliseconds():
    start = time.perf_counter()
    check_source(DEFAULT_SOURCE, sequence=256, batch_size=16)
    assert time.perf_counter() - start < 0.5


def text(path):
    return TextSource(kind="text", path=str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "has 0 tokens"),
        (b"short", "has 5 tokens"),
        (b"x" * 100, "has 5 training sequences of 16 tokens, but one step takes 8"),
    ],
)
def test_a_file_that_cannot_work_is_refused(tmp_path, content, message):
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        check_source(text(path), sequence=16, batch_size=8)
    assert f"data.path={path}" in str(caught.value)


def test_what_is_no_file_is_refused_without_reading_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(DataError, match="is not a regular file"):
            check_source(text(path), sequence=16)
    with pytest.raises(DataError, match="Not a directory"):
        check_source(text("/etc/passwd/x"), sequence=16)


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no text file"):
        check_source(text(tmp_path), sequence=16)


def test_token_files_are_counted_in_ids(tmp_path):
    path = tmp_path / "ids.bin"
    path.write_bytes(b"\0\0" * 33)
    check_source(TextSource(kind="tokens", path=str(path)), sequence=16)
    with pytest.raises(DataError, match="66 bytes, which is no multiple of the 4 bytes"):
        check_source(TextSource(kind="tokens", path=str(path), dtype="uint32"), sequence=16)
    with pytest.raises(DataError, match="has 16 tokens"):
        capped = TextSource(kind="tokens", path=str(path), max_bytes=32)
        check_source(capped, sequence=16)


@pytest.mark.parametrize("max_bytes", [None, 40, 45, 46, 60, 1000])
def test_the_check_counts_the_tokens_that_loading_gives(tmp_path, max_bytes):
    for name, size in (("a", 45), ("b", 10), ("c", 70)):
        (tmp_path / name).write_bytes(b"x" * size)
    source = TextSource(kind="text", path=str(tmp_path), max_bytes=max_bytes)
    num_tokens = len(load_tokens(source))
    check_source(source, sequence=num_tokens - 1, val_fraction=0)
    with pytest.raises(DataError):
        check_source(source, sequence=num_tokens, val_fraction=0)


def test_a_missing_tokenizer_is_found_first(tmp_path):
    source = TextSource(tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"data\.tokenizer=.*there is no such file"):
        check_source(source, sequence=16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "text"}, "data=text needs data.path"),
        ({"path": "x"}, "data.path=x has no meaning with data=stdlib"),
        ({"kind": "tokens", "path": "x", "tokenizer": "y"}, "data.tokenizer=y has no meaning"),
        ({"kind": "parquet"}, "data=parquet is unknown"),
        ({"dtype": "int8"}, "data.dtype=int8 is unknown"),
        ({"max_bytes": 0}, "data.max_bytes=0 is below 1"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        TextSource(**fields)
