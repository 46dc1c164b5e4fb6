from __future__ import annotations

import importlib
import pickle
import queue
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.config.check_code import Code
from launcher.config.key import Args
from launcher.workloads.own_code import Offer, bound, build, load_object, load_schedule, one_line
from strategies import compile_program, schedules
from strategies.errors import DataError, ModelError, PipelineError, PlanError

NETS = """
class Base: ...
class Lit(Base):
    def __init__(self, width: int, depth=2, *, rate: float = 0.1, batch_size=32, seed=0): ...
class Other(Base):
    class Inner: ...
def make(width): ...
"""
ORDERS = """
from strategies.ir.instruction import backward, forward
from strategies.schedules import Schedule, register_schedule
def plain(shape):
    return tuple(
        tuple(one(r, m) for m in range(shape.num_microbatches) for one in (forward, backward))
        for r in range(shape.pp))
@register_schedule("by_name", virtual_stages=True)
def registered(shape):
    return plain(shape)
entry = Schedule("other", plain)
number = 3
def takes_nothing(): ...
def raises(shape):
    return shape.nope
def leaves(shape):
    raise SystemExit(3)
def ruled(shape):
    raise KeyError("no rule")
by_rule = Schedule("by_rule", plain, rule=ruled)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A working directory with modules, as a console script sees it."""
    (tmp_path / "own_nets.py").write_text(NETS)
    (tmp_path / "own_orders.py").write_text(ORDERS)
    (tmp_path / "own_single.py").write_text("from own_nets import Base, Lit\nclass Net(Lit): ...\n")
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "__init__.py").write_text("")
    (tmp_path / "own_pkg" / "deep.py").write_text("from own_nets import Lit\n")
    (tmp_path / "own_bad.py").write_text("import json\n\nimport no_such_thing\n")
    (tmp_path / "own_raises.py").write_text(
        "def f():\n    raise RuntimeError('two\\nlines')\nf()\n"
    )
    (tmp_path / "own_syntax.py").write_text("x = (\n")
    (tmp_path / "own_exits.py").write_text("import sys\nsys.exit('bye')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path()))])
    before = dict(schedules.SCHEDULES)
    yield tmp_path
    schedules.SCHEDULES.clear()
    schedules.SCHEDULES.update(before)
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("own_nets:Lit", "Lit"),
        ("own_nets.Lit", "Lit"),
        ("own_nets:Other.Inner", "Other.Inner"),
        ("own_nets.Other.Inner", "Other.Inner"),
        ("own_pkg.deep:Lit", "Lit"),
        ("own_nets.py:make", "make"),
        ("./own_pkg/deep.py:Lit", "Lit"),
        ("own_single", "Net"),
        ("own_single.py", "Net"),
    ],
)
def test_a_path_is_a_module_or_a_file_of_the_working_directory(here, path: str, name: str):
    import_base = load_object("model", "own_nets:Base")
    assert load_object("model", path, base=import_base).__qualname__ == name


@pytest.mark.parametrize(
    "name",
    ["queue", "antigravity", "torch", "wandb", "launcher", "strategies", "own_in_site"],
)
def test_a_file_takes_the_place_of_no_library(here, monkeypatch, name: str):
    site = here / "site"
    site.mkdir()
    (site / "own_in_site.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    for there in ("a", "b"):
        (here / there).mkdir()
        (here / there / f"{name}.py").write_text(
            f"import queue, own_{there}\nclass Lit: there = '{there}', own_{there}.__name__\n"
        )
        (here / there / f"own_{there}.py").write_text("")
    before = sys.modules.get(name)
    found = [load_object("model", f"{there}/{name}.py:Lit") for there in ("a", "b")]
    assert [kind.there for kind in found] == [("a", "own_a"), ("b", "own_b")]
    assert found[0] is load_object("model", f"a/../a/{name}.py")
    assert sys.modules.get(name) is before
    assert sys.modules[found[0].__module__].queue.Empty is queue.Empty
    spec = importlib.util.find_spec(name)
    assert spec is None or not (spec.origin or "").startswith((f"{here}/a/", f"{here}/b/"))
    assert pickle.loads(pickle.dumps(found)) == found
    monkeypatch.delitem(sys.modules, found[1].__module__)  # as where a process was spawned
    assert importlib.import_module(found[1].__module__).Lit.there == ("b", "own_b")
    with pytest.raises(ModelError, match=rf"a/{name}\.py:Net: {name}\.py has no Net\."):
        load_object("model", f"a/{name}.py:Net")


def test_two_files_of_one_name_are_two_modules(here, monkeypatch):
    for there in ("a", "b"):
        (here / there).mkdir()
        (here / there / "own_twin.py").write_text(f"class Lit: there = '{there}'\n")
    monkeypatch.setattr(sys, "path", [str(here / "a"), *sys.path])  # as by PYTHONPATH
    first, second = (load_object("model", f"{there}/own_twin.py:Lit") for there in ("a", "b"))
    assert (first.there, second.there) == ("a", "b")
    assert first.__module__ == "own_twin"  # stays what other files import
    assert load_object("data", "a/own_twin.py") is first
    assert load_object("data", "b/own_twin.py") is second
    del sys.modules["own_twin"]  # b stands in front of a
    assert load_object("model", "a/own_twin.py:Lit").there == "a"


def test_neighbours_of_one_name_are_refused(here):
    for there in ("a", "b"):
        (here / there).mkdir()
        (here / there / "own_help.py").write_text("def help(): ...\n")
        (here / there / f"own_{there}.py").write_text("from own_help import help\nclass Lit: ...\n")
    load_object("model", "a/own_a.py:Lit")
    told = (
        f"data.path=b/own_b.py imports own_help, which is {here}/a/own_help.py by now and not "
        f"{here}/b/own_help.py: a process has one module of a name. Try another name for one of "
        "them."
    )
    with pytest.raises(DataError, match=f"^{re.escape(told)}$"):
        load_object("data", "b/own_b.py")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "own_netz:Lit",
            "model.path=own_netz:Lit: there is no module own_netz, neither in the working "
            "directory {here} nor where Python looks (PYTHONPATH, installed packages). "
            "Did you mean model.path=own_nets:Lit?",
        ),
        (
            "own_pkg.deap:Lit",
            "model.path=own_pkg.deap:Lit: there is no module own_pkg.deap, neither in the working "
            "directory {here} nor where Python looks (PYTHONPATH, installed packages). "
            "Did you mean model.path=own_pkg.deep:Lit?",
        ),
        (
            "nowhere_at_all.py:Lit",
            "model.path=nowhere_at_all.py:Lit: there is no file {here}/nowhere_at_all.py. "
            "Try module:Class.",
        ),
        (
            "own_nets:Litt",
            "model.path=own_nets:Litt: own_nets has no Litt. Did you mean model.path=own_nets:Lit?",
        ),
        (
            "own_nets",
            "model.path=own_nets could be any of Base, Lit, Other: the module defines 3. "
            "Try model.path=own_nets:Base.",
        ),
        (
            "own_pkg",
            "model.path=own_pkg: the module defines no Base. Try model.path=own_pkg:NAME.",
        ),
        (
            "own_bad:Lit",
            "model.path=own_bad:Lit cannot be imported: ModuleNotFoundError: No module named "
            "'no_such_thing' (own_bad.py:3). Try python -c 'import own_bad', which says more.",
        ),
        (
            "own_raises.py:Lit",
            "model.path=own_raises.py:Lit cannot be imported: RuntimeError: two lines "
            "(own_raises.py:2). Try python own_raises.py, which says more.",
        ),
        (
            "own_syntax:Lit",
            "model.path=own_syntax:Lit cannot be imported: SyntaxError: '(' was never closed "
            "(own_syntax.py, line 1). Try python -c 'import own_syntax', which says more.",
        ),
        (
            "own_exits:Lit",
            "model.path=own_exits:Lit cannot be imported: SystemExit: bye (own_exits.py:2). "
            "Try python -c 'import own_exits', which says more.",
        ),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_in_one_line(here, path: str, expected: str):
    base = load_object("model", "own_nets:Base")
    with pytest.raises(ModelError) as refusal:
        load_object("model", path, base=base)
    assert str(refusal.value) == expected.format(here=here)


def test_the_place_is_the_users_where_a_library_has_replaced_what_raises(here, monkeypatch):
    from wandb.sdk.lib.exit_hooks import ExitHooks

    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ExitHooks().hook()
    with pytest.raises(ModelError, match=r"SystemExit: bye \(own_exits\.py:2\)\. Try python"):
        load_object("model", "own_exits:Lit")


def test_errors_are_of_the_kind_of_what_was_asked_for(here):
    for key, kind in (("data", DataError), ("optimizer", PlanError), ("callbacks.a", PlanError)):
        with pytest.raises(kind, match=rf"^{key}.path=own_nets:Nope: "):
            load_object(key, "own_nets:Nope")


def _call(target: object, offers: dict[str, Offer] | None = None, **args: object):
    call = bound(Code("model", "own_nets:Lit", Args(args)), target, offers or {})
    assert call is not None
    return dict(call.arguments)


def test_a_class_gets_its_arguments_and_what_it_asks_for_by_name(here):
    lit = load_object("model", "own_nets:Lit")
    run = {"batch_size": Offer(8), "seed": Offer(3, ("seed",)), "user": Offer({})}
    # A default of its own stays, unless the run's figure was set.
    assert _call(lit, run, width=64) == {"width": 64, "seed": 3}
    assert _call(lit, {"batch_size": Offer(8, ("data.microbatch_size",))}, width=1) == {
        "width": 1, "batch_size": 8,
    }  # fmt: skip
    assert _call(lambda batch_size: 0, run) == {"batch_size": 8}
    assert _call(lambda **more: 0, run, a=1) == {"more": {"a": 1}}
    assert build(Code("model", "x:y", Args({"a": [1, {"b": None}]})), dict, {}) == {
        "a": [1, {"b": None}]
    }


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"widht": 64},
            "model.args.widht=64: Lit (own_nets.py:3) takes no argument widht. Did you mean "
            "model.args.width? It takes width, depth=2, rate=0.1, batch_size=32, seed=0.",
        ),
        (
            {"width": 1, "zzz": [1, 2]},
            "model.args.zzz=[1,2]: Lit (own_nets.py:3) takes no argument zzz. It takes width, "
            "depth=2, rate=0.1, batch_size=32, seed=0. Try without model.args.zzz.",
        ),
        (
            {},
            "model.path=own_nets:Lit: Lit (own_nets.py:3) needs width. Try model.args.width=VALUE.",
        ),
        (
            {"width": "wide"},
            "model.args.width=wide: Lit (own_nets.py:3) takes width as a whole number. "
            "Try model.args.width=1.",
        ),
        (
            {"width": 1, "seed": 4},
            "model.args.seed=4, but seed makes it 3. Try without one of them.",
        ),
    ],
)
def test_arguments_that_a_class_does_not_take_are_refused(here, args, expected: str):
    lit = load_object("model", "own_nets:Lit")
    with pytest.raises(ModelError) as refusal:
        _call(lit, {"seed": Offer(3, ("seed",))}, **args)
    assert str(refusal.value) == expected


def test_what_a_constructor_raises_is_told_with_its_line(here, capsys):
    def picky(width):
        raise ValueError(f"no width {width}")

    with pytest.raises(ModelError) as refusal:
        build(Code("model", "own_nets:Lit", Args({"width": 3})), picky, {})
    text = str(refusal.value)
    assert "picky(width=3) fails with ValueError: no width 3 (" in text
    assert "test_own_code.py:" in text
    assert "Traceback" in capsys.readouterr().err  # whoever reads the log sees all of it

    def refuses():
        raise PlanError("as it is")

    with pytest.raises(PlanError, match=r"^as it is$"):
        build(Code("model", "a:b", Args()), refuses, {})
    assert one_line(KeyError()) == "KeyError"


@pytest.mark.parametrize("name", ["plain", "registered", "entry"])
def test_an_order_is_registered_under_its_path(here, name: str):
    path = f"own_orders:{name}"
    load_schedule(path)
    load_schedule(path)
    found = schedules.find_schedule(path)
    assert found.name == path
    assert found.virtual_stages == (name == "registered")


def test_what_is_no_order_is_refused(here):
    with pytest.raises(PlanError, match=r"schedule.path=own_orders:number is 3, but must be"):
        load_schedule("own_orders:number")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("takes_nothing", "takes_nothing fails with TypeError: "),
        ("raises", "raises fails with AttributeError: 'Shape' object has no attribute 'nope' (own"),
        ("leaves", "leaves fails with SystemExit: 3"),
        ("by_rule", "ruled fails with KeyError: 'no rule' (own_orders.py:"),
    ],
)
def test_an_order_that_fails_is_one_sentence(here, name: str, told: str):
    load_schedule(f"own_orders:{name}")
    with pytest.raises(PlanError) as caught:
        compile_program(schedule=f"own_orders:{name}", pp=2, num_microbatches=4)
    assert str(caught.value).startswith(f"schedule.path=own_orders:{name}: {told}")
    assert "for pp=2 and 4 microbatches" in str(caught.value)


def test_args_are_values_that_nobody_changes():
    args = Args({"a": [1, {"b": 2}], "c": None})
    args["a"].append(3)
    args.plain()["a"].clear()
    assert args == Args({"c": None, "a": [1, {"b": 2}]})
    assert hash(args) == hash(Args({"c": None, "a": [1, {"b": 2}]}))
    assert args != {"a": [1, {"b": 2}], "c": None}
    assert (len(args), list(args), SimpleNamespace(**args).c) == (2, ["a", "c"], None)
    assert issubclass(ModelError, PipelineError)
