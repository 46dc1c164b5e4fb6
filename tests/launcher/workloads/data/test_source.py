from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from launcher.workloads.data import source as vocabulary
from launcher.workloads.data.source import (
    DEFAULT_SOURCE,
    Split,
    TextSource,
    check_source,
    split_blocks,
    stdlib_files,
    text_files,
    vocab_size,
)
from launcher.workloads.data.tokens import load_tokens
from strategies.errors import DataError, PlanError


def test_the_default_source_is_good_and_checked_in_milliseconds():
    check_source(DEFAULT_SOURCE, sequence=256, batch_size=16)


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


def test_validation_is_the_end_and_one_token_is_only_a_target():
    assert split_blocks(101, sequence=10) == Split(range(9), range(9, 10))
    assert split_blocks(100, sequence=10, val_fraction=0.3) == Split(range(6), range(6, 9))
    assert split_blocks(101, sequence=10, val_fraction=0) == Split(range(10), range(10, 10))


@pytest.mark.parametrize(
    ("num_tokens", "options", "message"),
    [
        (
            0,
            {},
            "corpus has 0 tokens, but one sequence with its targets takes model.sequence + 1 "
            "= 33. Try a longer text, or data=stdlib.",
        ),
        (
            32,
            {},
            "corpus has 32 tokens, but one sequence with its targets takes model.sequence + 1 "
            "= 33. Try model.sequence=15,",
        ),
        (
            97,
            {"batch_size": 4},
            "corpus has 2 training sequences of 32 tokens, but one step takes 4 "
            "(4 per replica * dp=1). Try model.sequence=2,",
        ),
        (
            641,
            {"batch_size": 2, "num_replicas": 2},
            "corpus has 2 validation sequences of 32 tokens (data.val_fraction=0.1 of 20), but one "
            "batch takes 4 (2 per replica * dp=2). Try data.val_fraction=0.2.",
        ),
        (257, {"batch_size": 6}, "Try model.sequence=4,"),
        (257, {"batch_size": 6, "val_fraction": 0}, None),
    ],
)
def test_too_little_data_is_refused_with_what_would_work(num_tokens, options, message):
    if message is None:
        assert len(split_blocks(num_tokens, sequence=32, **options).train) == 8
        return
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        split_blocks(num_tokens, sequence=32, label="corpus", **options)
    tried = re.search(r"Try (?:model|data)[.](\w+)=([0-9.]*[0-9])", str(caught.value))
    if tried:
        value = float(tried[2]) if "." in tried[2] else int(tried[2])
        split_blocks(num_tokens, **{"sequence": 32, **options, tried[1]: value})


def test_an_incomplete_validation_batch_is_fine_when_asked_for():
    options = {"sequence": 32, "batch_size": 4}
    with pytest.raises(DataError):
        split_blocks(641, **options)
    assert len(split_blocks(641, full_batches=False, **options).validation) == 2


def test_numbers_out_of_range_are_refused():
    for options in ({"val_fraction": 1.0}, {"val_fraction": -0.1}, {"batch_size": 0}):
        with pytest.raises(PlanError):
            split_blocks(1000, sequence=10, **options)
    with pytest.raises(PlanError, match=r"model\.sequence=0"):
        split_blocks(1000, sequence=0)


@given(
    st.integers(0, 5000),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(1, 4),
    st.floats(0, 0.9),
)
def test_both_parts_are_disjoint_and_fill_a_batch_or_it_is_refused(
    n, sequence, batch, dp, fraction
):
    try:
        split = split_blocks(
            n, sequence=sequence, batch_size=batch, num_replicas=dp, val_fraction=fraction
        )
    except DataError:
        return
    assert split.train.start == 0
    assert split.train.stop == split.validation.start
    assert split.validation.stop * sequence + 1 <= n
    assert len(split.train) >= batch * dp
    assert len(split.validation) >= batch * dp or not fraction


def test_the_library_is_read_in_sorted_order_without_tests_and_installed_packages():
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(folder).as_posix() for file in stdlib_files()]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert names == sorted(names, key=lambda name: name.split("/"))


def test_hidden_and_binary_files_are_left_out_and_links_to_folders_not_followed(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("c.md", "b/deep/z.txt", "b/a.txt", "a.txt", ".hidden", ".git/config"):
        (tmp_path / name).write_text("text")
    (tmp_path / "b/picture.txt").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "absent")
    names = [file.relative_to(tmp_path).as_posix() for file in text_files(tmp_path)]
    assert names == ["a.txt", "b/a.txt", "b/deep/z.txt", "c.md", "link.txt"]


def test_a_python_without_sources_is_told_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="Try data=text"):
        stdlib_files()


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="absent cannot be read: No such file"):
        list(text_files(tmp_path / "absent"))


def test_bytes_have_256_values():
    assert vocab_size(DEFAULT_SOURCE) == 256


def test_added_tokens_of_a_tokenizer_count(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_tokens([AddedToken("<end>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert vocab_size(TextSource(tokenizer=str(tmp_path / "tokenizer.json"))) == 3


@pytest.mark.parametrize("scanned", [1, 2, 100])
def test_a_token_file_is_searched_for_its_largest_id(tmp_path, monkeypatch, scanned):
    monkeypatch.setattr(vocabulary, "_SCANNED_IDS", scanned)
    path = tmp_path / "ids.bin"
    np.array([3, 70_000, 5, 80_000], "<u4").tofile(path)
    source = TextSource(kind="tokens", path=str(path), dtype="uint32")
    assert vocab_size(source) == 80_001
    used = TextSource(kind="tokens", path=str(path), dtype="uint32", max_bytes=15)
    assert vocab_size(used) == 70_001
    path.write_bytes(b"")
    with pytest.raises(DataError, match="holds no token id"):
        vocab_size(source)
