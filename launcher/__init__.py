"""Command line, schema, workloads, processes, tracking and reports."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from types import TracebackType

if sys.version_info < (3, 11) and sys.argv[:1] == ["-m"]:  # what pip would refuse
    sys.stderr.write(
        f"error: foldpipe needs Python 3.11 or newer, and {sys.executable} is "
        f"{sys.version.split()[0]}. Try make install PYTHON=python3.11.\n"
    )
    sys.exit(2)

# What the launcher and its ranks import, beside Python's own modules.
_LIBRARIES = """strategies hydra omegaconf yaml antlr4 torch lightning pytorch_lightning
    torchmetrics lightning_utilities numpy safetensors tokenizers transformers wandb tensorboard
    matplotlib scipy
    optuna psutil rich tqdm packaging typing_extensions"""
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TAKEN_NAMES = frozenset(_LIBRARIES.split()) | sys.stdlib_module_names


class _LibrariesFirst:
    """Finds these elsewhere than in the working directory, which ``python -m`` searches first.

    A ``yaml.py`` or a ``queue.py`` beside somebody's data is not the library, and nobody meant it.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if path is not None or name not in TAKEN_NAMES:
            return None
        if name == "strategies":  # of the same foldpipe: another one may be installed
            return PathFinder.find_spec(name, [_HOME])
        try:
            here = {"", os.getcwd()}
        except OSError:  # a folder that is gone
            here = {""}
        # None leaves it to Python's own search: of a checkout in which one stands.
        return PathFinder.find_spec(name, [place for place in sys.path if place not in here])


def file_module(path: str) -> str:
    """The name of a module that is nothing but this file, wherever Python looks.

    >>> file_module("/x/queue.py")
    '_file_2fx_2fqueue_2epy'
    """
    name = re.sub(rb"[^a-zA-Z0-9]", lambda found: b"_%02x" % ord(found[0]), os.fsencode(path))
    return f"_file{name.decode()}"


class _Files:
    """Finds such a module again: in a loader's process that is spawned, say."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("_file_2f"):
            return None
        text = name.removeprefix("_file").encode()
        file = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), text)
        return spec_from_file_location(name, os.fsdecode(file))


sys.meta_path.append(_Files)


def _while_importing(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ctrl-C while all of this is still imported, for seconds on a cold disk; or another Python."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(130)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing not in TAKEN_NAMES - sys.stdlib_module_names:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(
        f"error: this Python ({sys.executable}) has no {missing}, which foldpipe needs. "
        "`make install` puts everything into .venv: try source .venv/bin/activate in the checkout, "
        "or pip install . for this Python.\n"
    )
    sys.stderr.flush()
    os._exit(2)


if ("-m", "launcher") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    sys.excepthook = _while_importing
if sys.argv[:1] == ["-m"]:  # python -m launcher, and no script that imports something of it
    sys.meta_path.insert(0, _LibrariesFirst)
