"""docs/reference/lightning.md: what of Lightning works in a pipeline, as the tests' markers say.

A test that shows a flag, a callback, a logger or a hook has the marker ``lightning_feature(kind,
*names)``, with ``refused=`` and ``fix=`` where it shows a refusal: the test's fixture ``refusal``
compares both with the message. The markers are read from the sources, so nothing is imported. What
there is to show, Lightning says itself: what no test shows is on the page as not tried.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.docs.pages import ROOT

_MARKER = "lightning_feature"
_SECTIONS = {
    "flag": "Flags of the Trainer",
    "callback": "Callbacks",
    "logger": "Loggers",
    "module hook": "Hooks of a LightningModule",
    "callback hook": "Hooks of a callback",
}
_HEAD = """\
# Lightning features

Each flag of Lightning's Trainer, each of its callbacks and loggers, and each hook: in a pipeline it
gives what it gives under stock Lightning on one device, or foldpipe refuses it. The rows come from
the tests that show it. [What is different in a pipeline](../differences.md) has the rest.

"As stock" means the same weights, metrics, predictions, calls and files, in double precision up to
rounding.
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a test shows of a feature.

    Attributes:
        kind: A key of the page's sections.
        name: As Lightning spells it.
        test: ``tests/a/test_b.py::test_c``.
        refused: The reason in the message; empty for a feature that works as in stock Lightning.
        fix: The way out in it.
        note: What the row says beside the outcome.
    """

    kind: str
    name: str
    test: str
    refused: str = ""
    fix: str = ""
    note: str = ""


def shown(tests: Path = ROOT / "tests") -> Iterator[Shown]:
    """What the markers of all tests say.

    Raises:
        ValueError: A marker says something that the page has no place for.
    """
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"mark.{_MARKER}" not in text:
            continue
        place = path.relative_to(tests.parent).as_posix()
        for test in ast.parse(text).body:
            if isinstance(test, ast.FunctionDef):
                for decorator in test.decorator_list:
                    yield from _marks(decorator, f"{place}::{test.name}", test)


def _marks(decorator: ast.expr, place: str, test: ast.FunctionDef) -> Iterator[Shown]:
    for call in ast.walk(decorator):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == _MARKER):
            continue
        kind, *names = (ast.literal_eval(argument) for argument in call.args)
        said = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        compared = "refusal" in {argument.arg for argument in test.args.args}
        if kind not in _SECTIONS or not names or not set(said) <= {"refused", "fix", "note"}:
            raise ValueError(f"{place}: {_MARKER}({kind!r}, {names}, {sorted(said)})")
        if ("refused" in said) != ("fix" in said) or (("refused" in said) and not compared):
            raise ValueError(f"{place}: refused= needs fix= and a test with the fixture refusal")
        for name in names:
            yield Shown(kind, name, place, **said)


def features() -> Mapping[str, Sequence[str]]:
    """All that Lightning has, by kind."""
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks, loggers
    from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

    def public(*owners: type) -> list[str]:
        return sorted(
            name
            for owner in owners
            for name, value in vars(owner).items()
            if inspect.isfunction(value) and name[0] != "_" and name != "configure_sharded_model"
        )  # That one is the old name of configure_model.

    of_module = "backward configure_callbacks configure_gradient_clipping configure_optimizers"
    of_module += " lr_scheduler_step optimizer_step optimizer_zero_grad"
    return {
        "flag": sorted([*inspect.signature(pl.Trainer.__init__).parameters][1:]),
        "callback": sorted(callbacks.__all__),
        "logger": sorted(loggers.__all__),
        "module hook": sorted(
            [*public(ModelHooks, DataHooks, CheckpointHooks), *of_module.split()]
        ),
        "callback hook": public(pl.Callback),
    }


def page(found: Sequence[Shown], there: Mapping[str, Sequence[str]]) -> str:
    """The page.

    Raises:
        ValueError: A test's marker names something that Lightning does not have.
    """
    unknown = [each for each in found if each.name not in there[each.kind]]
    if unknown:
        raise ValueError(f"Lightning has no such thing: {unknown[0]}")
    parts = [_HEAD]
    for kind, title in _SECTIONS.items():
        rows = ["| feature | in a pipeline | reason and fix | test |", "|---|---|---|---|"]
        for name in there[kind]:
            rows.extend(_rows(name, [e for e in found if (e.kind, e.name) == (kind, name)]))
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _rows(name: str, found: Sequence[Shown]) -> Iterator[str]:
    if not found:
        yield f"| `{name}` | not tried | | |"
    outcomes = sorted({(each.refused, each.fix, each.note) for each in found})
    for refused, fix, note in outcomes:
        tests = [e.test for e in found if (e.refused, e.fix, e.note) == (refused, fix, note)]
        outcome = "refused" if refused else "as stock"
        reason = f"{refused.rstrip('.')}. {fix.rstrip('.')}." if refused else ""
        where = "<br>".join(f"`{test}`" for test in tests)
        yield f"| `{name}` | {outcome}{f', {note}' if note else ''} | {reason} | {where} |"


def lightning_page() -> str:
    return page(list(shown()), features())
