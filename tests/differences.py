"""Writes the tables of docs/differences.md from the code: `make docs-page`.

What a pipeline refuses is said where it is refused: each message tells what was met, the rule and
the way out. The page has no list of its own. All errors of these kinds are found in the source of
the folders below, and a file that raises one must stand under a heading, or among those whose
errors are about machines and files. What stands above the marker on the page is written by hand.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "differences.md"
MARKER = "<!-- From here on written by `make docs-page`, from the messages in the code. -->"
FOLDERS = ("strategies/models", "strategies/runtime")
KINDS = ("ModelError", "PlanError", "DataError", "CheckpointError")

# Headings, and the files whose refusals stand under them.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "The step and its layers": (
        "models/replay/probe.py",
        "models/replay/probing.py",
        "models/replay/unit_search.py",
        "models/replay/rows/packed_rows.py",
        "models/replay/hole.py",
        "models/replay/gate.py",
        "models/replay/shape_mode.py",
        "models/replay/layout.py",
        "models/replay/path.py",
        "models/replay/stage_run.py",
        "models/replay/cut_module.py",
        "models/replay/step_paths.py",
        "models/replay/replay_model.py",
        "models/collectives.py",
        "runtime/messages/mailbox.py",
    ),
    "Metrics, logs and what a step leaves": (
        "models/logs.py",
        "models/step_state.py",
        "runtime/messages/values.py",
        "runtime/messages/exchange.py",
        "runtime/step/step_mirror.py",
    ),
    "Manual optimization": (
        "runtime/lightning/manual_optimization.py",
        "models/manual/dataflow.py",
        "models/manual/flow_layout.py",
        "models/manual/doors.py",
        "models/manual/row_check.py",
        "models/manual/divided_step.py",
        "models/manual/flow_run.py",
        "models/manual/segments.py",
    ),
    "Callbacks, hooks and optimizers": (
        "runtime/lightning/refusals.py",
        "runtime/lightning/hooks/hook_watch.py",
        "runtime/lightning/hooks/parameter_hooks.py",
        "runtime/lightning/hooks/whole_parameters.py",
        "runtime/lightning/checkpoints/whole_state.py",
        "runtime/update/main_optimizer.py",
        "runtime/update/main_weights.py",
    ),
    "Batches and loaders": (
        "models/replay/rows/value_plan.py",
        "models/replay/rows/whole_values.py",
        "runtime/step/microbatch.py",
        "runtime/engine/rank_engine.py",
        "runtime/engine/rank_passes.py",
        "runtime/engine/rank_setup.py",
        "runtime/lightning/data_order.py",
        "runtime/lightning/hooks/hook_state.py",
    ),
    "One loss of the whole batch": ("models/replay/rows/batch_rows.py",),
    "Modules that declare units": (
        "models/held_units.py",
        "models/unit_model.py",
        "models/stage_model.py",
    ),
    "Recomputation and tensor parallelism": (
        "models/selective/policy.py",
        "models/selective/region.py",
        "models/state.py",
        "models/expert_parallel/expert_shares.py",
        "models/tensor_parallel/plan_check.py",
        "models/tensor_parallel/plan_sharding.py",
        "models/tensor_parallel/regions.py",
        "models/tensor_parallel/share_values.py",
        "models/tensor_parallel/unit_sharding.py",
        "models/tensor_parallel/sharding.py",
        "runtime/step/recompute.py",
        "runtime/messages/transport_choice.py",
    ),
    "Checkpoints": (
        "runtime/lightning/checkpoints/stock_file.py",
        "runtime/lightning/checkpoints/checkpointing_strategy.py",
        "runtime/lightning/checkpoints/rank_folder.py",
        "runtime/storage/part.py",
        "runtime/storage/share_pieces.py",
    ),
    "The Trainer and the strategy": (
        "runtime/lightning/ranks_strategy.py",
        "runtime/lightning/setup_strategy.py",
        "runtime/lightning/strategy.py",
        "runtime/lightning/stream_loop.py",
        "runtime/lightning/request.py",
        "runtime/messages/mesh.py",
    ),
}

# Files whose errors are about machines and files: ports, disks, settings of torch.
ELSEWHERE = frozenset(
    {
        "runtime/messages/joining.py",
        "runtime/storage/commit.py",
        "runtime/storage/opened.py",
        "runtime/storage/tensor_files.py",
        "runtime/update/reduction.py",
    }
)

# A way out begins with one of these, as a sentence of its own or behind a colon.
WAYS = frozenset(
    {
        "Begin",
        "Build",
        "Call",
        "Change",
        "Choose",
        "Compile",
        "Compute",
        "Cut",
        "Declare",
        "Define",
        "Do",
        "Fill",
        "Freeze",
        "Give",
        "Go",
        "If",
        "Keep",
        "Leave",
        "Let",
        "Log",
        "Look",
        "Make",
        "Move",
        "Pad",
        "Pass",
        "Prune",
        "Put",
        "Remove",
        "Rename",
        "Replace",
        "Return",
        "Scale",
        "Set",
        "Shuffle",
        "Take",
        "Toggle",
        "Try",
        "Untoggle",
        "Update",
        "Use",
        "Write",
    }
)
# Or it is the rule itself, where that says what to write instead.
RULE = re.compile(r"\b(must|may|are loaded by)\b")

# Messages that end a run without a way out: what this program owes itself, and echoes of a refusal.
ECHOES = frozenset(
    {
        "a stage of STEP got LEN tensors, its cut has LEN.",
        "a value that has to cross a cut was never computed on its stage; the step took another "
        "path than in the probe.",
        "VALUE runs microbatches only.",
        "VALUE cannot be made whole: whole_after=False.",
        "VALUE has not been made whole.",
        "VALUE cannot recompute inside units: recompute=full.",
        "what the last layer gives for microbatches (JOIN) does not add up to what it gives for "
        "the batch (SHAPE).",
        "loss_over=batch: another rank has refused its first batch.",
        "no checkpoint was written: TELL_ODD_ONES",
        "checkpoint PATH was not written: RSTRIP. Earlier checkpoints are whole.",
        "of NAME, SHAPE, the ranks have FILLED of NUMEL elements together.",
        "a PAYLOAD cannot be sent to the other ranks: ERROR.",
        "PATH cannot be read as a checkpoint of Lightning: SPLITLINES",
    }
)

# Words for what a message fills in, where the name of the variable says too little.
WORDS = {
    "STEP_NAMES[mode]": "STEP",
    "STEP_NAMES[self._mode]": "STEP",
    "STEP_NAMES[which[0]]": "STEP",
    "STEP_NAMES[self._first[0]]": "STEP",
    "self._step": "STEP",
    "type(error).__name__": "ERROR",
    "type(module).__name__": "MODULE",
    "type(self._module).__name__": "MODULE",
    "type(self.module).__name__": "MODULE",
    "error_line(error.__traceback__)": "LINE",
    "user_line()": "LINE",
    "call.line": "LINE",
    "node.line": "LINE",
    "why": "WHY",
    "example": " Try NAME=DEFAULT.",
    "self.record.deferred[0][1]": "WHAT",
}


@dataclass(frozen=True)
class Refusal:
    """One message: what is refused and why, and what to do instead."""

    file: str
    line: int
    reason: str
    way: str


def refusals() -> Iterator[Refusal]:
    """All that the folders can raise, in the order of their files and lines."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT / "strategies").as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for line, text in sorted(set(_messages(tree))):
                if text:
                    yield Refusal(file, line, *_divided(text))


def tables() -> str:
    """The part of the page that the code decides."""
    found = list(refusals())
    parts = []
    for heading, files in SECTIONS.items():
        rows: dict[str, None] = {}
        for file in files:
            for refusal in found:
                if refusal.file == file and refusal.reason not in ECHOES:
                    rows[f"| {_cell(refusal.reason)} | {_cell(refusal.way)} |"] = None
        parts.append("\n".join([f"### {heading}", "", "| refused | way out |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The page as it should be: what is written by hand, then the tables."""
    by_hand, marker, _ = PAGE.read_text(encoding="ascii").partition(MARKER)
    if not marker:
        raise SystemExit(f"{PAGE} has lost its marker: {MARKER}")
    return f"{by_hand}{MARKER}\n\n{tables()}"


# -- messages of a file ----------------------------------------------------------------------------


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each error; of those handed on by a variable, nothing."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            if node.func.id in KINDS and _innermost(function, node):
                for text, known in _texts(node.args[0], function, functions):
                    yield node.lineno, _filled(text, known)


def _innermost(function: ast.FunctionDef, node: ast.AST) -> bool:
    nested = (n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function)
    return not any(node in ast.walk(inner) for inner in nested)


def _texts(
    argument: ast.expr, function: ast.FunctionDef, functions: list[ast.FunctionDef]
) -> Iterator[tuple[ast.expr, Mapping[str, ast.expr]]]:
    """The literals that an argument can be, with the texts of variables in them."""
    if isinstance(argument, ast.Constant | ast.JoinedStr):
        known = _assigned(function)
        choices = _arguments(argument, function, functions)
        for choice in choices or [{}]:
            yield argument, {**known, **choice}
    elif isinstance(argument, ast.Call):
        called = argument.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        for other in functions:
            if other.name == name:
                for node in ast.walk(other):
                    if isinstance(node, ast.Return) and node.value is not None:
                        yield from _texts(node.value, other, functions)


def _assigned(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Texts that a function gives to a variable, once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {
        name: values[0]
        for name, values in found.items()
        if len(values) == 1 and isinstance(values[0], ast.Constant | ast.JoinedStr)
    }


def _arguments(
    message: ast.expr, function: ast.FunctionDef, functions: list[ast.FunctionDef]
) -> list[dict[str, ast.expr]]:
    """What callers of a small function that makes messages give it, where that is text."""
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    used = {
        node.value.id
        for node in ast.walk(message)
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name)
    }
    if len(names) != 1 or names[0] not in used:
        return []
    found = []
    for other in functions:
        for node in ast.walk(other):
            if isinstance(node, ast.Call) and len(node.args) == 1:
                called = node.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                if name == function.name and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                    found.append({names[0]: node.args[0]})
    return found


def _filled(text: ast.expr, known: Mapping[str, ast.expr]) -> str:
    """A literal as text, with capitals for what is filled in."""
    if isinstance(text, ast.Constant):
        return str(text.value)
    assert isinstance(text, ast.JoinedStr)
    parts = []
    for part in text.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            value = part.value
            if isinstance(value, ast.Name) and value.id in known:
                parts.append(_filled(known[value.id], {}))
            else:
                parts.append(_word(value))
    return "".join(parts)


def _word(value: ast.expr) -> str:
    written = ast.unparse(value)
    if written in WORDS:
        return WORDS[written]
    names = [n.attr if isinstance(n, ast.Attribute) else n.id for n in _named(value)]
    plain = [name.strip("_") for name in names if name not in ("self", "type", "__name__")]
    return (plain[0] if plain else "value").upper()


def _named(value: ast.expr) -> list[ast.Attribute | ast.Name]:
    found = [n for n in ast.walk(value) if isinstance(n, ast.Attribute | ast.Name)]
    return [n for n in found if not (isinstance(n, ast.Name) and n.id in ("list", "join", "tuple"))]


def _divided(text: str) -> tuple[str, str]:
    """Reason and way out: from the first clause that says what to do, or the sentence of a rule."""
    for shown, better in (
        (r"^LINE: ", ""),
        (r"^WHAT on a value", "A collective on a value"),
        (r"^WHAT\b", "A look at a value"),
        (r"\.WHY ", ". "),
    ):
        text = re.sub(shown, better, text.strip())
    clauses = re.split(r"(?<=[.:;]) ", text)
    for number, clause in enumerate(clauses[1:], start=1):
        if re.split(r"\W", clause)[0].capitalize() in WAYS:
            return _joined(clauses, number)
    sentences = re.split(r"(?<=\.) ", text)
    for number, sentence in enumerate(sentences):
        if RULE.search(sentence):
            return _joined(sentences, number) if number else ("", text)
    return text, ""


def _joined(parts: list[str], number: int) -> tuple[str, str]:
    return " ".join(parts[:number]).rstrip(":;"), " ".join(parts[number:])


def _cell(text: str) -> str:
    """Markdown; a sentence begins with a capital, a name as it is written."""
    first = text.split(" ", 1)[0]
    plain = re.fullmatch(r"[a-z]+,?", first) is not None
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text[:1].upper() + text[1:] if plain else text


if __name__ == "__main__":
    text = page()
    PAGE.write_text(text, encoding="ascii", newline="\n")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {text.count(chr(10))} lines\n")
