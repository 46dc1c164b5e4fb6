"""What ranks say to each other arrives as it was, and is never code."""

from __future__ import annotations

import ast
import json
import pickle
import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from strategies.errors import ModelError, RunError
from strategies.runtime.messages.exchange import Exchange, pack, unpack

REPOSITORY = Path(__file__).resolve().parents[4]
# Each unpickles what another process, or a file, has given it.
PICKLING = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "cloudpickle", "dill", "joblib", "marshal", "shelve",
}  # fmt: skip


class Pair(NamedTuple):
    first: int
    second: Any


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    values: tuple[float, ...]


class Own:
    pass


def test_plain_data_arrive_as_they_were() -> None:
    said = {
        "a": [1, 2.5, None, True, "x\udc80", float("inf")],
        "b": (1, (2,), []),
        "c": Pair(1, Figure("f", (1.0, 2.0))),
        3: {1, 2},
        (1, 2): frozenset({"x"}),
        "d": [Path("/a/b"), b"\0\1", 1 + 2j, torch.Size([1, 2]), torch.bfloat16],
        "e": {"__kind__": "tuple", "value": 1},
        "f": OrderedDict(b=1, a=2),
        "g": np.float32(0.1),
    }
    found = unpack(pack(said))
    assert found == said
    assert type(found["c"]) is Pair
    assert type(found["f"]) is OrderedDict
    assert type(found["g"]) is np.float32


@dataclass
class Output(OrderedDict[str, Any]):
    """As those of transformers: a dict whose entries are attributes, too."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


def test_dicts_of_ones_own_keep_their_class() -> None:
    found = unpack(pack([Output(logits=torch.ones(2)), defaultdict(list, a=[1])]))
    assert type(found[0]) is Output
    assert found[0].logits is found[0]["logits"]
    assert found[0].loss is None
    assert list(found[0]) == ["logits"]
    assert type(found[1]) is defaultdict
    assert found[1] == {"a": [1]}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_tensors_arrive_with_type_and_shape(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0), (5, 3)):
        value = torch.ones(shape).to(dtype)
        found = unpack(pack([b"odd", value.t() if value.dim() == 2 else value]))[1]
        assert found.dtype == dtype
        assert found.shape == (shape[::-1] if len(shape) == 2 else shape)
        assert torch.equal(
            found.float() if dtype.itemsize == 1 else found,
            torch.ones_like(found.float() if dtype.itemsize == 1 else found),
        )


@pytest.mark.parametrize("array", [
    np.arange(6).reshape(2, 3), np.array(["a", "bcd"]), np.array("2026-01-01", "datetime64[D]"),
    np.zeros((0, 2), np.uint16), np.array(1.5, np.longdouble),
])  # fmt: skip
def test_arrays_arrive_with_type_and_shape(array: np.ndarray[Any, Any]) -> None:
    found = unpack(pack(array))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert (found == array).all()


@pytest.mark.parametrize("said", [
    Own(), [Own], {"a": lambda: 0}, np.array([Own()], object), torch.eye(2).to_sparse(), iter([]),
])  # fmt: skip
def test_what_is_no_data_is_refused_by_name(said: object) -> None:
    with pytest.raises(ModelError, match=r"cannot be sent to the other ranks: tensors, NumPy"):
        pack(said)


def test_what_nobody_else_can_make_is_refused() -> None:
    @dataclass
    class Inner:
        a: int

    with pytest.raises(ModelError, match="made inside a function"):
        pack(Inner(1))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ModelError, match="cannot be sent to the other ranks"):
        pack(endless)


RAN: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("unpickled",)


def _framed(text: bytes, tail: bytes = b"") -> torch.Tensor:
    data = len(text).to_bytes(8, "little") + text + tail
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _said(kind: str, value: object, tail: bytes = b"") -> torch.Tensor:
    sizes = [len(tail)] if tail else []
    text = json.dumps({"value": {"__kind__": kind, "value": value}, "sizes": sizes})
    return _framed(text.encode(), tail)


@pytest.mark.parametrize("message", [
    torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8),
    _framed(pickle.dumps(Bomb())),
    torch.empty(0, dtype=torch.uint8),
    _framed(b"[" * 200_000),
    _framed(b"[]"),
    _framed(b'{"value": 1}'),
    _said("tensor", ["torch.float32", [9], 0, True], b"abcd"),
    _said("tensor", ["torch.load", [1], 0, True], b"abcd"),
    _framed(b'{"value": 1, "sizes": [-4]}'),
    _framed(b'{"value": 1, "sizes": [1000000000000]}'),
    _said("array", ["O", [1], 0, False], b"12345678"),
    _said("data", ["os:system", {}]),
    _said("data", ["subprocess:Popen", {"args": "x"}]),
    _said("named", ["antigravity:x", []]),
    _said("named", ["builtins:tuple", []]),
    _said("dict", ["os:system", []]),
    _said("no such kind", 1),
])  # fmt: skip
def test_what_a_stranger_sends_is_no_message_and_runs_nothing(message: torch.Tensor) -> None:
    with pytest.raises(RunError, match="is no message of this program"):
        unpack(message)
    assert RAN == []


def test_alone_an_exchange_says_what_it_hears() -> None:
    alone, said = Exchange(None), Own()
    assert alone.everyone(said) == alone.first_hears(said) == [said]
    assert alone.says(said, source=0) is said


def _pickling(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for alias in node.names for part in alias.name.split(".")]
            names += (getattr(node, "module", None) or "").split(".")
        found += [name for name in names if name in PICKLING]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            errors = node.attr in ("PicklingError", "UnpicklingError")
            found += ["pickle"] if node.value.id == "pickle" and not errors else []
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            found.append("pickle")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            safe = any(
                word.arg == "weights_only"
                and isinstance(word.value, ast.Constant)
                and word.value.value is True
                for word in node.keywords
            )
            base = node.func.value
            if node.func.attr == "load" and isinstance(base, ast.Name) and base.id == "torch":
                found += [] if safe else ["torch.load"]
            allowed = any(word.arg == "allow_pickle" for word in node.keywords)
            found += ["allow_pickle"] if allowed else []
    return found


def test_nothing_in_the_project_unpickles() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in ("strategies", "launcher"):
            for file in sorted((REPOSITORY / package).rglob("*.py")):
                assert _pickling(ast.parse(file.read_text())) == [], file


@pytest.mark.parametrize("code", [
    "dist.all_gather_object(a, b)", "from torch.distributed import broadcast_object_list",
    "pickle.loads(a)", "from pickle import loads", "torch.load(f)",
    "torch.load(f, weights_only=False)",
    "np.load(f, allow_pickle=True)",
])  # fmt: skip
def test_the_search_finds_what_unpickles(code: str) -> None:
    assert _pickling(ast.parse(code))
