"""What one rank has raised, made again on another."""

from __future__ import annotations

import json

import pytest

from strategies.errors import ModelError, RunError
from strategies.raised import has_lost, in_plain_data, is_late, raised_by, rebuilt


class TwoPartsError(ValueError):
    def __init__(self, name: str, *, size: int) -> None:
        super().__init__(f"{name} has {size}")
        self.name, self.size = name, size


class SilentError(Exception):
    """Its text is made of what cannot travel."""

    def __init__(self) -> None:
        self.cause = object()

    def __str__(self) -> str:
        return f"because of {type(self.cause).__name__}"


def again(error: BaseException) -> BaseException:
    return rebuilt(json.loads(json.dumps(in_plain_data(error))), rank=3, step=7)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory"),
        KeyError("name"),
        FileNotFoundError(2, "No such file or directory", "data.bin"),
        KeyboardInterrupt(),
        SystemExit(4),
        TwoPartsError("x", size=2),
        ModelError("a layer is odd. Try pp=1."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_has_its_class_text_and_values(error: BaseException) -> None:
    found = again(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    notes = found.__dict__.pop("__notes__")
    assert notes == ["Raised by rank 3 at step 7; the other ranks of its pipeline end with it."]
    assert raised_by(found) == 3 and raised_by(error) is None
    assert getattr(found, "code", None) == getattr(error, "code", None)
    assert getattr(found, "filename", None) == getattr(error, "filename", None)
    assert getattr(found, "size", None) == getattr(error, "size", None)
    assert getattr(found, "fix", None) == getattr(error, "fix", None)


def test_what_cannot_be_made_again_is_named() -> None:
    class LocalError(Exception):
        pass

    for error, text in (
        (LocalError("no"), "rank 3 at step 7 failed: LocalError: no"),
        (SilentError(), "rank 3 at step 7 failed: SilentError: because of object"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "rank 3 at step 7 failed: Unicode"),
    ):
        found = again(error)
        assert type(found) is RunError
        assert str(found).startswith(text)


def test_nothing_is_imported_and_no_constructor_called_for_a_name_that_came() -> None:
    told = {"said": "no", "args": ["no"], "held": {}}
    for kind in ("os:system", "nowhere:Error", "builtins:eval", "subprocess:Popen", "json:"):
        assert type(rebuilt({**told, "kind": kind}, rank=1, step=0)) is RunError


def test_consequences_are_told_from_causes() -> None:
    closed = RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    late = RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms")
    passive = RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Application timeout caused pair ...")
    assert has_lost(closed) and not is_late(closed)
    assert has_lost(late) and is_late(late)
    assert has_lost(passive) and not is_late(passive)
    assert not has_lost(RuntimeError("Connection refused by the database"))
    assert not has_lost(ModelError("a loss. Timed out"))
    try:
        try:
            raise closed
        except RuntimeError as error:
            raise ValueError("mine") from error
    except ValueError as error:
        assert has_lost(error)
    assert has_lost(again(ValueError("theirs")))
