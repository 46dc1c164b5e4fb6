"""Words of the command line that cannot be read: what is wrong with one, and what was meant."""

from __future__ import annotations

import re
import shlex
from typing import get_args

from launcher.compose.option_groups import OWN_FILES
from launcher.config.decode import did_you_mean, nearest
from launcher.config.foreign_words import meant_value, plain_letters
from launcher.config.key import Key, describe, keys_of, nodes_of, shorten, spell, typed
from launcher.config.launch import LaunchConfig, Mode
from launcher.secrets import refuse_secret
from strategies.errors import PlanError

TOOLS = ("demo", "doctor", "init")
_HELP = ("help", "?", "usage", "list", "version", "info", "run")
MAX_CHARACTERS = 16_384
NO_TARGET = "_target_ would run code from any configuration, which is not supported."
NAME_A_CLASS = (
    "Name a class of your own as model=class model.path=my_pkg.nets:LitNet model.args.width=64 "
    "(data=class, optimizer=class, schedule.path= and callbacks.NAME.path= take theirs alike)."
)


def check_word(word: str) -> None:
    """Raises where it is no ``key=value``, or no plain one."""
    name, separator, value = word.partition("=")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise PlanError(
            f"{shorten(name)}: this word has bytes that are no UTF-8, which no file of a run could "
            "hold. Try a name of other letters, or a link to it."
        ) from None
    refuse_secret(name.lstrip("+~"), value)
    if len(word) > MAX_CHARACTERS:
        raise PlanError(
            f"{shorten(name)}: {len(word)} characters; at most {MAX_CHARACTERS} are read."
        )
    if "_target_" in word:
        raise PlanError(f"{shorten(name)}: {NO_TARGET}", fix=NAME_A_CLASS)
    if name == "mode" and value in TOOLS:
        raise PlanError(f"{word}: {value} is no mode. Try python -m launcher {value}.")
    plain = plain_letters(word)
    if plain.startswith("-") and not word.startswith("-"):
        flag = plain if len(plain) == 2 else f"--{plain.lstrip('-')}"
        raise PlanError(
            f"{shorten(word)}: flags begin with -, and this is another dash. Try {flag}."
        )
    if not name or (not separator and not word.startswith("~")):
        keys = [entry.path for entry in keys_of(LaunchConfig)]
        bare = word.rstrip(":")
        near = (bare,) if bare in _CHOICES else nearest(bare, keys, limit=1)
        hint = did_you_mean(f"{path}=..." for path in near)
        mode = meant_value("mode", word, switch=False, whole=False, number=False) or word
        if word in TOOLS:
            raise PlanError(f"{word} stands first. Try python -m launcher {word}.")
        if separator or _VALUE_ALONE.fullmatch(word):
            hint = (
                " No blanks stand around the =, nor between values: try pp=4, or -m pp=1,2,4 for "
                "one run each."
            )
        elif _SCRIPT.fullmatch(word):
            hint = (
                " A script of your own is started by python itself, with PipelineStrategy in it; "
                "classes of it are named as model=class model.path=my_pkg.nets:LitNet."
            )
        elif meant := _colon(word):
            hint = f" Try {meant}."
        elif mode in get_args(Mode):
            hint = f" Did you mean mode={mode}?"
        elif word.lower() in _HELP:
            hint = ""
        elif word.endswith((".yaml", ".yml")):
            hint = f" {OWN_FILES}"
        hint = hint or " Try --help."
        raise PlanError(f"{shorten(word)}: expected key=value.{hint}")


NODES = {*nodes_of(LaunchConfig)}
_CHOICES = {*NODES, "experiment"}
_PATHS = {entry.path: describe(entry.hint) for entry in keys_of(LaunchConfig)}


def check_haste(word: str) -> None:
    """Raises where something has come along that nobody meant."""
    if meant := _in_haste(word):
        raise PlanError(f"{shorten(word)}: {meant}.")


def _in_haste(word: str) -> str | None:
    """What is wrong with a word that was pasted from a page, or has lost its neighbours' blank.

    >>> _in_haste("user.note=a;"), _in_haste("pp=2;")
    (None, 'nothing stands behind its last sign. Try pp=2')
    >>> print(_in_haste("pp=2 dp=2"))
    each key=value is a word of its own. Try pp=2 dp=2
    """
    plain = plain_letters(word)
    name, _, value = plain.strip("\"'").partition("=")
    kind = _PATHS.get(name.lstrip("+~"), "one option" if name in _CHOICES else "a text")
    if "text" in kind or "keys of your own" in kind:
        return None
    words = re.split(r"[\s;]+(?=\w[\w.]*=)", f"{name}={value}")
    if len(words) > 1 and all(one.partition("=")[0] in {*_PATHS, *_CHOICES} for one in words):
        return f"each key=value is a word of its own. Try {' '.join(map(shell_word, words))}"
    parts = [part for part in value.rstrip("; ").split(",") if part]
    if plain == word and value.rstrip("; ") == ",".join(parts):
        if value.rstrip(" ") == value.rstrip("; "):
            return None
        return f"nothing stands behind its last sign. Try {name}={','.join(parts)}"
    if not parts or {*value} & {*"[](){}$'\""}:
        return None
    sweep = "-m " if len(parts) > 1 else ""
    other = "a comma stands beside no value. "
    if plain != word:
        other = "it has letters that only look like those of a keyboard. "
    return f"{other}Try {sweep}{name}={','.join(parts)}{' for one run each' if sweep else ''}"


_VALUE_ALONE = re.compile(r"[+-]?[\d.][\w.,+-]*|[\[({].*")
_SCRIPT = re.compile(r"python[\d.]*|torchrun|[\w./-]+\.(py|sh|ipynb)")


def _colon(word: str) -> str | None:
    """``pp=4`` for ``pp:4``, ``pp: 4`` and ``pp = 4``."""
    name, sign, value = re.sub(r"\s*([:=]+)\s*", r"\1", word, count=1).partition(":")
    name, _, value = f"{name}{sign and '='}{value}".partition("=")
    names = {entry.path for entry in keys_of(LaunchConfig)} | _CHOICES
    value = value.lstrip("=").strip()
    return typed(name, value) if name in names and value else None


def unreadable(word: str) -> PlanError:
    """What to say of a word that Hydra's grammar does not take."""
    name, _, value = word.partition("=")
    if word.startswith("~"):
        return PlanError(
            f"{shorten(word)}: keys cannot be removed.",
            fix="Leave it out, or give the key another value.",
        )
    if value.startswith("=") or name != name.strip():
        meant = _colon(word)
        if meant:
            return PlanError(f"{shorten(word)}: expected key=value, with one =. Try {meant}.")
    if not _KEY_NAME.fullmatch(name.lstrip("+~")):
        plain = re.sub(r"\.+", ".", name.strip("+~.")) or "pp"
        keys = [entry.path for entry in keys_of(LaunchConfig)]
        near = nearest(plain, keys, limit=1) or nearest(plain, nodes_of(LaunchConfig), limit=1)
        return PlanError(
            f"{shorten(word)}: {shorten(name)} is no key: names joined by single dots, as in "
            f"trainer.max_steps.{did_you_mean(f'{one}=...' for one in near) or ' Try --help.'}"
        )
    if is_open(value):
        return _unclosed(word)
    entry = next((one for one in keys_of(LaunchConfig) if one.path == name.lstrip("+")), None)
    if called := _CALL.match(value):
        if called[1] not in FUNCTIONS:
            return PlanError(
                f"{shorten(word)}: {called[1]} is no function of a sweep: {', '.join(FUNCTIONS)} "
                f"are. Try -m {name}=A,B, or {typed(name, value)} for a text."
            )
        if entry is not None and "text" not in describe(entry.hint):
            example = spell(entry.example)
            return PlanError(
                f"{shorten(word)}: this {called[1]}() cannot be read. Try -m {name}={example}, or "
                f"-m {name}='choice({example})'."
            )
    elif entry is not None and "text" not in describe(entry.hint):
        return PlanError(
            f"{shorten(word)}: expected {describe(entry.hint)}. "
            f"Try {name}={meant_list(value, entry) or spell(entry.example)}."
        )
    spelt = typed(name, value.replace("${", r"\${"))
    if entry is not None and "list" in describe(entry.hint):
        items = value.removeprefix("[").removesuffix("]").replace("'", "").replace('"', "")
        listed = ",".join(f"'{item.strip()}'" for item in items.split(",") if item.strip())
        spelt = shell_word(f"{name}=[{shorten(listed)}]")
    advice = f" Try {spelt}." if len(spelt) < _PASTED else ""
    return PlanError(
        f"{shorten(word)}: this value cannot be read. Text with other characters than letters, "
        f"digits and any of - _ . / % + @ needs quotes inside the shell's quotes.{advice}"
    )


_PASTED = 600  # characters: advice that is longer is no help


_KEY_NAME = re.compile(r"[A-Za-z_][\w-]*([./@][A-Za-z_][\w-]*)*")
_CALL = re.compile(r"([a-z_]+)\(")
FUNCTIONS = ("choice", "range", "interval", "glob", "sort", "shuffle", "tag", "extend_list")


def shell_word(word: str) -> str:
    """The word in the quotes that a shell needs, where it needs any."""
    if not re.search(r"[^\w.,/%+@:=\[\]-]", word):
        return word
    return shlex.quote(word) if {*word} & {*'"$`\\!'} else f'"{word}"'


def is_open(value: str) -> bool:
    r"""Whether an interpolation in it is never closed.

    >>> is_open("${pp"), is_open("a-${oc.env:HOME,${x}}"), is_open(r"\${")
    (True, False, False)
    """
    plain = value.replace("\\${", "")
    return plain.count("${") > plain.count("}")


def _unclosed(word: str) -> PlanError:
    name, _, value = word.partition("=")
    closed = value + "}" * (value.count("${") - value.count("}"))
    fix = f"'{name}={closed}'" if re.fullmatch(r"[^']*\$\{[\w.:,/]+\}*", closed) else ""
    plain = typed(name, value.replace("${", r"\${"))
    entry = next((one for one in keys_of(LaunchConfig) if one.path == name.lstrip("+")), None)
    if entry is not None and describe(entry.hint) not in ("a text", "a text or null"):
        plain = f"{name}={spell(entry.example)}"
    return PlanError(
        f"{shorten(word)}: ${{ begins what another key holds, and nothing closes it. "
        f"Try {' or '.join(filter(None, (fix, plain)))}."
    )


def meant_list(value: str, entry: Key) -> str | None:
    """``[0.9,0.95]`` for ``(0.9,0.95)`` and ``{0.9,0.95}``, where a list is taken."""
    items = value.strip("()[]{} ").split(",")
    if "list" not in describe(entry.hint) or not all(
        _PLAIN_NUMBER.fullmatch(i.strip()) for i in items
    ):
        return None
    return f"[{','.join(item.strip() for item in items)}]"


_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
