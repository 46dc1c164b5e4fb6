import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from launcher.workloads.data.source import DEFAULT_SOURCE, TextSource, load_tokenizer, stdlib_files
from launcher.workloads.data.tokens import load_tokens
from strategies.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        ["def f(x): return x + 1\n" * 20],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return path


def test_bytes_are_the_library_text_itself_and_quick():
    tokens = load_tokens(DEFAULT_SOURCE)
    assert (tokens.dtype, len(tokens)) == (np.uint8, 4_000_000)
    first = next(iter(stdlib_files())).read_bytes()
    assert tokens[: len(first)].tobytes() == first
    assert tokens[len(first)] == 0
    assert np.array_equal(tokens, load_tokens(DEFAULT_SOURCE))


def test_folders_are_joined_by_a_nul_byte_and_capped(tmp_path):
    (tmp_path / "b").write_text("world")
    (tmp_path / "a").write_text("hello")

    def read(max_bytes):
        source = TextSource(kind="text", path=str(tmp_path), max_bytes=max_bytes)
        return load_tokens(source).tobytes()

    assert read(None) == b"hello\0world"
    assert [read(n) for n in (3, 5, 6, 7)] == [b"hel", b"hello", b"hello", b"hello\0w"]


def test_token_files_are_mapped_not_read(tmp_path):
    path = tmp_path / "ids.bin"
    np.array([3, 70_000, 5], "<u4").tofile(path)
    source = TextSource(kind="tokens", path=str(path), dtype="uint32")
    tokens = load_tokens(source)
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == [3, 70_000, 5]
    path.write_bytes(b"")
    assert len(load_tokens(source)) == 0


def test_a_tokenizer_encodes_all_text_and_marks_the_ends_of_documents(tokenizer, tmp_path):
    text = "def f(x): return x + 1\n" * 9000  # longer than one piece
    (tmp_path / "a").write_text(text)
    (tmp_path / "b").write_text("x \u00e9\n")
    source = TextSource(kind="text", path=str(tmp_path), tokenizer=str(tokenizer))
    tokens = load_tokens(source)
    known = load_tokenizer(str(tokenizer))
    end = known.token_to_id("<|endoftext|>")
    (cut,) = np.flatnonzero(tokens == end)
    assert tokens[:cut].tolist() == known.encode(text).ids
    assert tokens[cut + 1 :].tolist() == known.encode("x \u00e9\n").ids
    assert tokens.dtype == np.uint16
    assert tokens.max() < known.get_vocab_size()


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"is no tokenizer\.json.*Try data\.tokenizer=null"):
        load_tokens(TextSource(tokenizer=str(path)))
