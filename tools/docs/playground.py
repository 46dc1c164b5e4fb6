"""Puts what the playground page needs beside it: ``python -m tools.docs.playground FOLDER``.

``make docs`` calls it for the site that it has built. Into FOLDER go

- ``foldpipe.zip``: the modules that ``launcher/playground.py`` imports, their assets, and the
  options of ``conf/`` as Hydra composes them;
- ``first.json``: the answer that the page shows until its own is there;
- ``pyodide/``: CPython for browsers, from its npm package, which ``npm ci`` has put into
  ``build/npm`` (package-lock.json beside this file has its version and checksum). Without it the
  page shows its first picture only, and says so; nothing is ever fetched from elsewhere.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launcher.compose.option_groups import conf_dir
from launcher.compose.session import compose_checked, hydra_session
from launcher.config import dump, from_dict
from launcher.config.pipeline import AUTO
from launcher.playground import Options, answer, choices
from strategies.errors import PipelineError

ROOT = Path(__file__).resolve().parents[2]
NPM = ROOT / "build" / "npm" / "node_modules"
ENTRY = "launcher.playground"
# What the page shows while the browser still loads Python.
FIRST = (
    "schedule=zb_v",
    "pp=4",
    "num_microbatches=8",
    "costs=uniform",
)  # as START in playground.js
_PACKAGES = ("launcher", "strategies")
_ASSETS = ("launcher/report/assets",)
_PYODIDE = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
    "package.json",
)
# One date for all entries: the same sources make the same bytes.
_DATE = (2020, 1, 1, 0, 0, 0)


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m tools.docs.playground FOLDER\n")
        return 2
    folder = Path(sys.argv[1])
    options = compose_options()
    write_archive(folder / "foldpipe.zip", options)
    first = {"words": FIRST, "choices": choices(options), "answer": answer(FIRST, options)}
    (folder / "first.json").write_text(json.dumps(first, allow_nan=False), encoding="ascii")
    if copy_pyodide(folder / "pyodide"):
        sys.stdout.write(f"playground: {folder}\n")
    else:
        sys.stdout.write(
            f"playground: {NPM / 'pyodide'} is not there, so the page shows its first picture "
            "only. With npm (and, once, network): make playground-packages\n"
        )
    return 0


_MEASURED = ("hardware", AUTO)


def compose_options() -> Options:
    """Every option of ``conf/`` as a run's configuration has it; a browser measures no machine."""
    with hydra_session():
        base = dump(compose_checked([])[0])
    groups: dict[str, dict[str, Any]] = {}
    for folder in sorted(path for path in conf_dir().iterdir() if path.name in base):
        files = sorted(f for f in folder.glob("*.yaml") if (folder.name, f.stem) != _MEASURED)
        groups[folder.name] = {file.stem: _option(folder.name, file) for file in files}
    return Options(base, groups)


def _option(group: str, file: Path) -> dict[str, Any]:
    # What Hydra would do, fifty times as fast: the files hold plain keys.
    values = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(values, dict)
    if group == "hardware" and any(str(name).startswith("peak_") for name in values):
        values = {"peak_flops": None, **values}
    node = dump(from_dict({group: values}))[group]
    assert isinstance(node, dict)
    return node


def write_archive(path: Path, options: Options) -> None:
    """The modules that the page imports, what they read, and ``options.json``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [*modules(ENTRY), *(f for name in _ASSETS for f in sorted((ROOT / name).iterdir()))]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            _add(archive, file.relative_to(ROOT).as_posix(), file.read_bytes())
        _add(archive, "options.json", json.dumps({"base": options.base, "groups": options.groups}))


def _add(archive: zipfile.ZipFile, name: str, data: str | bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)


def modules(entry: str) -> list[Path]:
    """The files of our packages that ``entry`` imports, directly or not, at once or in a function.

    A module that itself imports something else than these and the standard library (torch, Hydra,
    rich) is left out: a browser has none of them, and what is imported in a function is only
    imported where that function is used.
    """
    found: dict[str, Path] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if name in found or file is None:
            continue
        tree = ast.parse(file.read_bytes())
        if name != entry and any(_foreign(module) for module in _imports(tree.body, name)):
            continue
        found[name] = file
        parts = name.split(".")
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
        waiting += _imports(tree.body, name, functions=True)
    return sorted(found.values())


def _file(name: str) -> Path | None:
    if name.partition(".")[0] not in _PACKAGES:
        return None
    stem = ROOT.joinpath(*name.split("."))
    candidates = (stem / "__init__.py", stem.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


def _foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in _PACKAGES and top not in sys.stdlib_module_names


def _imports(body: list[ast.stmt], name: str, *, functions: bool = False) -> Iterator[str]:
    """Names that may be modules; those for type checkers are none."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = resolve_name("." * node.level + module, name.rpartition(".")[0])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            if functions or isinstance(node, ast.ClassDef):
                yield from _imports(node.body, name, functions=functions)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, name, functions=functions)
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, part, []), name, functions=functions)


def copy_pyodide(folder: Path) -> bool:
    """Whether the npm package is there; then ``folder`` has the files that a worker loads."""
    package = NPM / "pyodide"
    shutil.rmtree(folder, ignore_errors=True)
    if not all((package / name).is_file() for name in _PYODIDE):
        return False
    folder.mkdir(parents=True)
    for name in _PYODIDE:
        shutil.copyfile(package / name, folder / name)
    return True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PipelineError as error:
        sys.exit(f"error: {error}")
