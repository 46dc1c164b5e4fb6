"""Classes and functions of the user's own: found by the path that he types, called by names.

``my_pkg.nets:LitNet`` is looked for in the working directory and then wherever Python looks. What
is found gets the arguments of ``model.args`` and its like, and of the run's own figures those that
its signature asks for by name; never the launcher's configuration. Every mistake is one sentence.

Free of torch itself, not so what it imports.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from launcher import TAKEN_NAMES, file_module
from launcher.config.check_code import Code
from launcher.config.decode import did_you_mean, nearest
from launcher.config.key import require_name, shorten, spell
from strategies.errors import DataError, ModelError, PipelineError, PlanError
from strategies.schedules import SCHEDULES, Schedule, register_schedule
from strategies.schedules.schedule import Shape

_MOST_WORDS = 400
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Offer:
    """A figure of the run that a class may ask for by name.

    Attributes:
        set_by: The keys that it comes from and that were set; with none, a default of the class's
            own stays.
    """

    value: Any
    set_by: tuple[str, ...] = ()


Offers = Mapping[str, Offer]


def load_object(key: str, path: str, *, base: type | None = None) -> Any:
    """What a path leads to.

    Args:
        key: What its keys begin with, for messages: ``model``.
        path: ``module:Name``, ``module.Name``, ``file.py:Name``, or a module with one candidate.
        base: Candidates are the classes below it that the module itself defines.

    Raises:
        PipelineError: It cannot be imported, is not there, or several could be meant: a ModelError
            for ``model``, a DataError for ``data``, else a PlanError.
    """
    place, _, name = path.partition(":")
    _search_here()
    module, rest = _module(key, path, place)
    for part in filter(None, (rest, name)):
        found: Any = module
        for word in part.split("."):
            if not hasattr(found, word):
                raise _missing(key, path, found, word, base)
            found = getattr(found, word)
        return found
    return _only_candidate(key, path, module, base)


def bound(code: Code, target: Callable[..., Any], offers: Offers) -> inspect.BoundArguments | None:
    """The call that ``build`` makes; None for what has no signature (some classes in C).

    Raises:
        PipelineError: Arguments that the target does not take, or misses; as ``load_object``.
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None
    parameters = signature.parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    given = code.args.plain()
    unknown = [name for name in given if name not in named]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise _unknown_argument(code, target, unknown[0], named)
    _check_types(code, target, given)
    taken = {name: value for name, value in given.items() if name in named}
    for name, parameter in named.items():
        offer = offers.get(name)
        if offer is None:
            continue
        if name in given:
            _check_contradiction(code, name, given[name], offer)
        elif parameter.default is parameter.empty or offer.set_by:
            taken[name] = offer.value
    missing = [
        name
        for name, parameter in named.items()
        if name not in taken and parameter.default is parameter.empty
    ]
    if missing:
        raise _error(code.key)(
            f"{code.key}.path={code.path}: {described(target)} needs {', '.join(missing)}. "
            f"Try {' '.join(f'{code.key}.args.{name}=VALUE' for name in missing)}."
        )
    call = signature.bind_partial()
    for name, parameter in parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            call.arguments[name] = {key: given[key] for key in unknown}
        elif name in taken:
            call.arguments[name] = taken[name]
    return call


def build(code: Code, target: Callable[..., Any], offers: Offers) -> Any:
    """Calls it.

    Raises:
        PipelineError: As ``bound``; or what its own code has raised, with the line.
    """
    call = bound(code, target, offers)
    try:
        if call is None:
            return target(**code.args.plain())
        return target(*call.args, **call.kwargs)
    except (PipelineError, MemoryError):
        raise
    except Exception as reason:
        traceback.print_exc()  # the log has all of it
        given = ", ".join(f"{name}={shorten(value, 40)}" for name, value in code.args.items())
        raise _error(code.key)(
            f"{code.key}.path={code.path}: {_name(target)}({given}) fails with {one_line(reason)}. "
            f"Correct it there, or other {code.key}.args."
        ) from reason


def load_schedule(path: str) -> None:
    """Puts the order that a path leads to into the registry, under the path as its name.

    A function ``Shape -> rows``, with or without ``register_schedule``, or a ``Schedule``.

    Raises:
        PlanError: It is none.
    """
    if path in SCHEDULES:
        return
    found = load_object("schedule", path)
    registered = next((entry for entry in SCHEDULES.values() if entry.order is found), found)
    if isinstance(registered, Schedule):
        place, rule = registered.placement, registered.rule
        SCHEDULES[path] = replace(
            registered,
            name=path,
            order=_told(path, registered.order),
            placement=_told(path, place) if callable(place) else place,
            rule=None if rule is None else _told(path, rule),
        )
    elif callable(found) and not isinstance(found, type):
        register_schedule(path)(_told(path, found))
    else:
        raise PlanError(
            f"schedule.path={path} is {shorten(found)}, but must be a function from a Shape to "
            "rows of instructions, or a Schedule. Try the name of a function there."
        )


def _told(path: str, function: Callable[[Shape], _Found]) -> Callable[[Shape], _Found]:
    """The same, which says in one sentence what is wrong with it, and in which line."""

    @functools.wraps(function)
    def call(shape: Shape) -> _Found:
        try:
            return function(shape)
        except (PipelineError, MemoryError):
            raise
        except (Exception, SystemExit) as reason:
            raise PlanError(
                f"schedule.path={path}: {_name(function)} fails with {one_line(reason)} for "
                f"pp={shape.pp} and {shape.num_microbatches} microbatches. It is called with one "
                "Shape.",
                fix="Correct it there, or try schedule=1f1b.",
            ) from reason

    return call


def described(target: Callable[..., Any]) -> str:
    """Its name, and where it is defined."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(target))
        line = inspect.getsourcelines(inspect.unwrap(target))[1]
    except (OSError, TypeError):
        return _name(target)
    return f"{_name(target)} ({_shown(file or '?')}:{line})"


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def one_line(error: BaseException) -> str:
    """An exception of a user's code in one line, with the last line of it that it came through.

    >>> one_line(ValueError("no good"))
    'ValueError: no good'
    """
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {shorten(said, _MOST_WORDS)}" if said else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # names file and line itself
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and "importlib" not in frame.filename
    ]
    frames = [frame for frame in frames if frame.filename != __file__]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f"{text} ({_shown(own[-1].filename)}:{own[-1].lineno})" if own else text


def require_place(key: str, path: str) -> None:
    """Refuses a path whose file or outermost module is nowhere; imports nothing.

    Raises:
        PipelineError: As ``load_object``; or a library's name hides the file that is meant.
    """
    place = path.partition(":")[0]
    if place.endswith(".py"):
        require_name(f"{key}.path=", place)
        return _require_file(key, path, Path(place).expanduser().absolute())
    _search_here()
    outer = place.partition(".")[0]
    if outer in TAKEN_NAMES and Path(f"{outer}.py").is_file():
        raise _error(key)(
            f"{key}.path={path}: {outer} is the name of a module of Python's or of a library, "
            f"which is found before {outer}.py in this folder. Try {key}.path=my_{path} after "
            f"renaming the file to my_{outer}.py."
        )
    try:
        found = outer in sys.modules or importlib.util.find_spec(outer) is not None
    except (ImportError, ValueError):  # __main__ and its like
        return
    if not found:
        raise _no_module(key, path, place, outer)


def source_files(path: str) -> tuple[Path, ...]:
    """The files of the outermost package or module that a path names; nothing is imported."""
    place = path.partition(":")[0]
    _search_here()
    if place.endswith(".py"):
        return (Path(place).expanduser().absolute(),)
    try:
        # The outermost package alone: looking for one inside of it would import it.
        spec = importlib.util.find_spec(place.partition(".")[0])
    except (ImportError, ValueError):
        return ()
    if spec is None:
        return ()
    folders = list(spec.submodule_search_locations or ())
    if not folders:
        return (Path(spec.origin),) if spec.origin else ()
    return tuple(file for folder in folders for file in sorted(Path(folder).rglob("*.py")))


def _search_here() -> None:
    """``python -m launcher`` looks in the working directory; a console script does not."""
    if "" not in sys.path:
        _search_in(str(Path.cwd()))


_FOLDERS: set[str] = set()  # of the user's, where Python looks


def _search_in(folder: str, hides: bool = False) -> None:
    """Python looks there: first, or last where a file of the folder would hide a library."""
    hides |= not TAKEN_NAMES.isdisjoint(module.name for module in pkgutil.iter_modules([folder]))
    if hides and folder in sys.path:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.insert(len(sys.path) if hides else 0, folder)
    _FOLDERS.add(folder)


def _module(key: str, path: str, place: str) -> tuple[ModuleType, str]:
    """The module of a path, and what of the path lies inside of it."""
    if place.endswith(".py"):
        return _file(key, path, Path(os.path.abspath(Path(place).expanduser()))), ""
    known, rest = place, ""
    while True:
        try:
            return importlib.import_module(known), rest
        except ModuleNotFoundError as reason:
            lacks = reason.name is not None and f"{known}.".startswith(f"{reason.name}.")
            outer, _, last = known.rpartition(".")
            if lacks and outer and ":" not in path:
                known, rest = outer, f"{last}.{rest}" if rest else last  # module.Class
                continue
            if reason.name is not None and place.split(".")[0] == reason.name.split(".")[0]:
                raise _no_module(key, path, place, reason.name) from reason
            raise _not_imported(key, path, reason) from reason
        except (Exception, SystemExit) as reason:  # whatever somebody's module does
            raise _not_imported(key, path, reason) from reason


def _file(key: str, path: str, file: Path) -> ModuleType:
    _require_file(key, path, file)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(_module_name(file))
    except (Exception, SystemExit) as reason:
        raise _not_imported(key, path, reason) from reason
    for value in vars(module).values():
        name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        _check_neighbour(key, path, file, str(name).partition(".")[0])
    return module


def _module_name(file: Path) -> str:
    """The file's own, where that means this file alone; else one that is made of its path."""
    name, folder = file.stem, str(file.parent)
    own = {"", str(Path.cwd()), folder, *_FOLDERS}
    library = PathFinder.find_spec(name, [place for place in sys.path if place not in own])
    hides = name in TAKEN_NAMES or (library is not None and library.origin is not None)
    _search_in(folder, hides)  # as for a script: its neighbours are importable
    known = sys.modules.get(name)
    found = PathFinder.find_spec(name) if known is None else getattr(known, "__spec__", None)
    same = found is not None and os.path.realpath(found.origin or "") == str(file.resolve())
    return name if same and not hides else file_module(str(file))


def _check_neighbour(key: str, path: str, file: Path, name: str) -> None:
    """Refuses a neighbour whose name another folder of the user's has given away already."""
    known = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if known.name == "__init__.py":
        known = known.parent
    own = file.parent / known.name
    if str(known.parent) in _FOLDERS and known.parent != file.parent and own.exists():
        raise _error(key)(
            f"{key}.path={path} imports {name}, which is {known} by now and not {own}: a process "
            "has one module of a name. Try another name for one of them."
        )


def _require_file(key: str, path: str, file: Path) -> None:
    if not file.is_file():
        near = nearest(file.name, [other.name for other in file.parent.glob("*.py")], limit=1)
        hint = did_you_mean(
            f"{key}.path={file.with_name(other)}{path[len(path.partition(':')[0]) :]}"
            for other in near
        )
        raise _error(key)(
            f"{key}.path={path}: there is no file {file}.{hint or ' Try module:Class.'}"
        )


def _not_imported(key: str, path: str, reason: BaseException) -> PipelineError:
    if key != "schedule":  # into the log of a process of its own; orders are read by the launcher
        traceback.print_exception(reason)
    place = path.partition(":")[0]
    way = place if place.endswith(".py") else f"-c 'import {place}'"
    return _error(key)(
        f"{key}.path={path} cannot be imported: {one_line(reason)}. "
        f"Try python {way}, which says more."
    )


def _no_module(key: str, path: str, place: str, missing: str) -> PipelineError:
    outer = missing.rpartition(".")[0]
    folders = list(getattr(sys.modules.get(outer), "__path__", ())) if outer else [str(Path.cwd())]
    names = [module.name for module in pkgutil.iter_modules(folders)]
    near = nearest(missing.rpartition(".")[2], names, limit=1)
    rest = path.removeprefix(missing)
    close = did_you_mean(f"{key}.path={outer}{'.' if outer else ''}{other}{rest}" for other in near)
    return _error(key)(
        f"{key}.path={path}: there is no module {missing}, neither in the working directory "
        f"{Path.cwd()} nor where Python looks (PYTHONPATH, installed packages)."
        f"{close or ' Try it from the folder that holds it, or as FILE.py:NAME.'}"
    )


def _missing(key: str, path: str, holder: object, word: str, base: type | None) -> PipelineError:
    names = [name for name in vars(holder) if not name.startswith("_")] if hasattr(
        holder, "__dict__") else []  # fmt: skip
    place = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    near = nearest(word, names) or (
        _candidates(holder, base) if isinstance(holder, ModuleType) else ()
    )
    close = did_you_mean(f"{key}.path={place}:{name}" for name in near)
    owner = getattr(holder, "__name__", type(holder).__name__)
    if isinstance(holder, ModuleType) and place.endswith(".py"):
        owner = Path(place).name
    return _error(key)(
        f"{key}.path={path}: {owner} has no {word}.{close or f' Try {key}.path={place}:NAME.'}"
    )


def _only_candidate(key: str, path: str, module: ModuleType, base: type | None) -> Any:
    names = _candidates(module, base)
    if len(names) == 1:
        return getattr(module, names[0])
    kind = "class" if base is None else base.__name__
    if not names:
        raise _error(key)(
            f"{key}.path={path}: the module defines no {kind}. Try {key}.path={path}:NAME."
        )
    raise _error(key)(
        f"{key}.path={path} could be any of {', '.join(names)}: the module defines {len(names)}. "
        f"Try {key}.path={path}:{names[0]}."
    )


def _candidates(module: ModuleType, base: type | None) -> tuple[str, ...]:
    return tuple(
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and issubclass(value, base or object)
        and not name.startswith("_")
    )


def _unknown_argument(
    code: Code, target: Callable[..., Any], name: str, known: Mapping[str, inspect.Parameter]
) -> PipelineError:
    close = did_you_mean(f"{code.key}.args.{near}" for near in nearest(name, known))
    takes = ", ".join(
        f"{other}" if p.default is p.empty else f"{other}={shorten(p.default, 30)}"
        for other, p in known.items()
    )
    return _error(code.key)(
        f"{code.key}.args.{name}={shorten(code.args[name])}: {described(target)} takes no argument "
        f"{name}.{close} It takes {takes or 'none'}."
        + ("" if close else f" Try without {code.key}.args.{name}.")
    )


def _check_types(code: Code, target: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Numbers and switches that are none, where the signature names the type."""
    try:
        where: Any = vars(target).get("__init__", target) if isinstance(target, type) else target
        hints = typing.get_type_hints(where)
    except Exception:  # names that are there for type checkers only
        return
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    for name, value in given.items():
        hint = hints.get(name)
        if hint not in words or value is None:
            continue
        fits = isinstance(value, bool if hint is bool else int | float)
        if hint is int and isinstance(value, float) and not value.is_integer():
            fits = False
        if not fits:
            raise _error(code.key)(
                f"{code.key}.args.{name}={shorten(value)}: {described(target)} takes {name} as "
                f"{words[hint]}. Try {code.key}.args.{name}={1 if hint is not bool else 'true'}."
            )


def _check_contradiction(code: Code, name: str, given: object, offer: Offer) -> None:
    if offer.set_by and given != offer.value:
        key = offer.set_by[0]
        raise _error(code.key)(
            f"{code.key}.args.{name}={shorten(given)}, but {key} makes it {spell(offer.value)}. "
            f"Try without one of them."
        )


def _name(target: object) -> str:
    return getattr(target, "__qualname__", None) or type(target).__name__


def _shown(file: str) -> str:
    here, there = Path.cwd(), Path(file)
    return str(there.relative_to(here)) if there.is_relative_to(here) else file


def _error(key: str) -> type[PipelineError]:
    return {"model": ModelError, "data": DataError}.get(key, PlanError)
