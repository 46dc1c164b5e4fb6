import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models

from launcher.workloads.data import vocabulary
from launcher.workloads.data.source import DEFAULT_SOURCE, TextSource
from launcher.workloads.data.vocabulary import vocab_size
from strategies.errors import DataError


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
