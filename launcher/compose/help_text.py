"""What can be typed: the pages of ``--help``, and what a shell completes.

Both read the declarations of the keys and the files of ``conf/``, so neither can name what is not
there. Nothing is composed for a completion.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.compose.option_groups import Groups, find_groups
from launcher.compose.wrong_word import TOOLS
from launcher.config.decode import nearest, nearest_keys
from launcher.config.foreign_words import meant_key
from launcher.config.key import Key, choices, describe, keys_of, nodes_of, shorten, spell, value_at
from launcher.config.launch import MODES, LaunchConfig
from launcher.terminal import shortened
from strategies.errors import PlanError

FLAGS_HELP: tuple[tuple[str, str], ...] = (
    ("-h, --help [WORD]", "this page; or what a group, key or option means"),
    ("-m, --multirun", "one job per combination of values"),
    ("-c, --cfg {job,hydra,all}", "print the composed configuration and end"),
    ("--resolve", "with --cfg: resolve interpolations"),
    ("-p, --package NODE", "with --cfg: only this node"),
    ("-cd, --config-dir DIR", "your own option files, e.g. DIR/model/mine.yaml"),
    ("-i, --info [WHAT]", "Hydra's report on where the configuration comes from"),
    ("-sc, --shell-completion", 'eval "$(foldpipe -sc install=bash)"; also zsh, fish'),
    ("--verbose", "print every figure of a training run"),
    ("--version", "print the version"),
)
_OVERVIEW = """\
foldpipe: pipeline-parallel training, predicted, planned and run from one declaration.

usage: python -m launcher [flags] [KEY=VALUE ...]      (or: foldpipe ...)
       python -m launcher --help WORD                  a group, a key, an option, or all
       python -m launcher demo | doctor | init FOLDER | check FILE.csv | explain TRACES

examples
  python -m launcher                                   train a small model on 2 ranks
  python -m launcher schedule=foldx_fifo pp=4          the same on 4 ranks
  python -m launcher mode=simulate costs=uniform pp=4  draw a timeline, start nothing
  python -m launcher mode=plan model=llama2_13b hardware=a100_80g planner.num_gpus=64
  python -m launcher -m schedule=gpipe,1f1b pp=2,4     one run per combination

modes (mode=NAME)
{modes}

keys people type
  schedule=                   {schedules} options, e.g. 1f1b, zb_v, foldx_fifo
  pp= tp= dp= ep=             size of pipeline, tensor, data and expert parallelism
  num_microbatches=           microbatches per step and replica
  overlap= recompute=         gradient sync under compute; activations computed again
  model=                      {models} options; model=hf: a folder; model=class: your module
  data= data.global_batch_size= optimizer.lr= trainer.max_steps= trainer.precision=
  trainer.resume=auto         continue from the newest checkpoint
  hardware= costs=            the machine that predictions assume
  tracking= cluster=          csv, wandb, tensorboard; local, slurm, torchrun

groups (--help GROUP)
{groups}

flags
{flags}

A run writes a folder below outputs/, a sweep below multirun/. Exit codes: 0 done, 1 a
run failed, 2 wrong request, nothing started, 85 preempted, with a checkpoint.
"""
_WIDTH = 88
_INDENT = 30
_EVERY = "all"


def help_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What ``--help`` is asked about, and the overrides beside it.

    >>> help_words(["schedule", "planner.*", "pp=4"])
    (('schedule', 'planner'), ('pp=4',))
    """
    asked = [word for word in words if not re.search(r"=.|^[+~]", word)]
    return (
        tuple(re.sub(r"(\.\*?|=)$", "", word) for word in asked),
        tuple(word for word in words if word not in asked),
    )


def help_text(topics: Sequence[str], config: LaunchConfig, groups: Groups) -> str:
    """The page of ``--help``; ``config`` has the values that are shown as defaults.

    Raises:
        PlanError: A topic that is no group, key, option or mode.
    """
    if not topics:
        return _overview(groups)
    if _EVERY in topics:
        topics = [entry.path for entry in keys_of(LaunchConfig) if "." not in entry.path]
        topics += [*nodes_of(LaunchConfig), "experiment"]
        return "\n".join(line for topic in topics for line in _page(topic, config, groups, True))
    pages = [_page(topic, config, groups) for topic in topics]
    for topic, page in zip(topics, pages, strict=True):
        if not page:
            raise _unknown(topic, groups)
    return "\n".join(line for page in pages for line in page) + "\n"


def _overview(groups: Groups) -> str:
    names = [f"{name}{'=' if name in groups.built_in else '.*'}" for name in _groups(groups)]
    return _OVERVIEW.format(
        modes="\n".join(_entry(name, text) for name, text in MODES.items()),
        schedules=len(groups.options("schedule")),
        models=len(groups.options("model")),
        groups=_paragraph(" ".join(names)),
        flags="\n".join(_entry(name, text) for name, text in FLAGS_HELP),
    )


def _groups(groups: Groups) -> list[str]:
    nodes = nodes_of(LaunchConfig)
    return [*nodes, *(group for group in groups.names() if group not in nodes)]


def _page(topic: str, config: LaunchConfig, groups: Groups, whole: bool = False) -> list[str]:
    """All that has this name; empty where nothing has. ``whole``: of ``--help all``."""
    keys = keys_of(LaunchConfig)
    lines: list[str] = []
    if topic in MODES and not whole:
        lines += [f"mode={topic}", _paragraph(MODES[topic]), ""]
    if topic in _groups(groups) and (topic in nodes_of(LaunchConfig) or groups.options(topic)):
        lines += [*_group(topic, groups), ""]
    inside = [entry for entry in keys if entry.path.startswith(f"{topic}.")]
    named = [entry for entry in keys if topic in (entry.path, entry.path.rpartition(".")[2])]
    exact = [entry for entry in named if entry.path == topic]
    for entry in exact or inside or named:
        lines.append(_key(entry, config))
    if lines and lines[-1] and not whole:
        lines.append("")
    for group in () if exact or inside else groups.names():
        if topic in groups.options(group):
            lines += [*_option(group, topic, groups), ""]
    return lines


def _group(group: str, groups: Groups) -> list[str]:
    schema = nodes_of(LaunchConfig).get(group)
    doc = " ".join((schema.__doc__ or "").split()).replace("``", "") if schema else ""
    said = doc.partition(": ")[2] or "named sets of keys; your own with --config-dir."
    if group not in groups.built_in:
        return [f"{group}.*  {said}"]
    options = groups.options(group)
    return [
        f"{group}=  {said}",
        "",
        *(_entry(f"{group}={option}", first_comment(groups, group, option)) for option in options),
    ]


def first_comment(groups: Groups, group: str, option: str) -> str:
    """What an option is: the first line of its file, where that is a comment."""
    file = groups.file(group, option)
    first = file.read_text(encoding="utf-8").split("\n", 2)[:2] if file is not None else []
    said = next((line for line in first if line.startswith("# ") and "@package" not in line), "# ")
    return said.removeprefix("# ")


def _option(group: str, option: str, groups: Groups) -> list[str]:
    file = groups.file(group, option)
    text = file.read_text(encoding="utf-8") if file is not None else "of an installed package"
    lines = [f"{group}={option}", *(f"  {line}".rstrip() for line in text.rstrip().split("\n"))]
    if group == "schedule" and option != "custom":
        lines.append(f"see python -m launcher mode=simulate costs=uniform schedule={option} pp=4")
    return [*lines, f"see python -m launcher --help {group}"]


def _key(entry: Key, config: LaunchConfig) -> str:
    value = spell(value_at(config, entry.path)) or "empty"
    kind = f"{describe(entry.hint)}{value_range(entry)}"
    return _entry(f"{entry.path}=", f"{kind} [{value}]. {entry.help_text}")


def value_range(entry: Key) -> str:
    """``, at least 1, at most 8`` behind what a key takes; empty where it has no bounds."""
    low = f"at least {_number(entry.low)}" if entry.low is not None else ""
    low = f"above {_number(entry.above)}" if entry.above is not None else low
    high = f"at most {_number(entry.high)}" if entry.high is not None else ""
    return "".join(f", {part}" for part in (low, high) if part)


def _number(value: float) -> str:
    return f"{value:g}" if value != int(value) or value > 1e10 else f"{int(value):,}"


def _entry(name: str, text: str) -> str:
    indent = " " * _INDENT
    body = textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    head = f"  {name}"
    if len(head) < len(indent):
        return (head + body[len(head) :]).rstrip()
    return f"{head}\n{body}".rstrip()


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _unknown(topic: str, groups: Groups) -> PlanError:
    if topic in TOOLS:
        return PlanError(
            f"--help {topic}: {topic} is a command of its own. Try python -m launcher {topic} "
            "--help."
        )
    keys = [entry.path for entry in keys_of(LaunchConfig)]
    names = [*_groups(groups), *keys, *MODES]
    options = [option for group in groups.names() for option in groups.options(group)]
    ours = re.match(r" Try ([a-z_]+(\.[a-z_]+)*)=", meant_key(topic))
    near = [ours[1]] if ours and ours[1] in names else [*nearest(topic, [*names, *options])]
    near = near or [*nearest_keys(topic, names)]
    fix = f"Try --help {near[0]}." if near else "Try --help, which lists the groups."
    return PlanError(
        f"--help {shortened(shorten(topic), 60)}: there is no group, key, option or mode of that "
        f"name. {fix}"
    )


# What a shell completes. It asks with ``-sc query=bash`` and the line so far in COMP_LINE.

_SHELLS = ("bash", "zsh", "fish")
_TAKES_FILES = ("check", "explain", "init")
_OUR_HYDRA = ("hydra.run.dir=", "hydra.sweep.dir=", "hydra.sweep.subdir=")


def require_completion(words: Sequence[str]) -> None:
    """Refuses what stands behind ``-sc`` and says nothing to Hydra.

    Raises:
        PlanError: It is not one of install, uninstall and query, with a shell that it knows.
    """
    known = {f"{what}={shell}" for what in ("install", "uninstall", "query") for shell in _SHELLS}
    if len(words) != 1 or words[0] not in known:
        given = " ".join(words) or "nothing"
        raise PlanError(
            f"-sc {shortened(given, 80)}: expected install= or uninstall= with one of "
            f"{', '.join(_SHELLS)}. Try -sc install=bash."
        )


def completion_script() -> str:
    """What bash evaluates to complete this program's command lines."""
    return Path(__file__).with_name("completion.bash").read_text(encoding="utf-8")


def completions(line: str) -> list[str]:
    """What the last word of a command line can become, its beginning included."""
    words = line.split()
    word = "" if line[-1:].isspace() or not words else words.pop()
    before = words[1:]
    groups = _groups_of(before)
    if before[-1:] in (["--config-dir"], ["-cd"]):
        return _files(word)
    if word.startswith("-"):
        flags = (flag for names, _ in FLAGS_HELP for flag in re.findall(r"--?[a-z-]+", names))
        return sorted(flag for flag in flags if flag.startswith(word))
    if {"-h", "--help"} & {*before}:
        topics = {*_groups(groups), *(entry.path for entry in keys_of(LaunchConfig)), *MODES}
        options = {option for group in groups.names() for option in groups.options(group)}
        return sorted(one for one in topics | options if one.startswith(word))
    name, equals, value = word.partition("=")
    if equals:
        past, comma, last = value.rpartition(",")
        begun = f"{name}={past}{comma}"
        return sorted({f"{begun}{one}" for one in _values(name, last, groups)})
    found = [*_names(word, groups), *(TOOLS if not before else ())]
    found += _files(word) if before[:1] and before[0] in _TAKES_FILES else []
    return sorted({one for one in found if one.startswith(word)})


def _groups_of(words: Sequence[str]) -> Groups:
    for flag, folder in itertools.pairwise(words):
        if flag in ("--config-dir", "-cd"):
            with contextlib.suppress(PlanError):
                return find_groups(Path(folder).expanduser())
    return find_groups(None)


def _names(word: str, groups: Groups) -> Iterator[str]:
    """``schedule=``, ``schedule.`` and ``pp=``; with a dot in the word the keys of its group."""
    if "." in word:
        yield from (f"{entry.path}=" for entry in keys_of(LaunchConfig))
        yield from _OUR_HYDRA
        return
    yield from (f"{entry.path}=" for entry in keys_of(LaunchConfig) if "." not in entry.path)
    yield from (f"{group}=" for group in groups.names())
    yield from (f"{node}." for node in nodes_of(LaunchConfig))


def _values(name: str, begun: str, groups: Groups) -> Iterable[str]:
    """Options, choices, files for a text, or a value that works."""
    if name in groups.built_in:
        known = groups.options(name)
    else:
        entry = next((one for one in keys_of(LaunchConfig) if one.path == name), None)
        if entry is None:
            return _files(begun) if f"{name}=" in _OUR_HYDRA else ()
        known = choices(entry.hint)
        if "text" in describe(entry.hint):
            word = spell(entry.example)  # auto, say: no path that only its help means
            known = (*known, *_files(begun), *([word] if word.isidentifier() else ()))
        elif not known:
            known = (spell(entry.example),)
    return (one for one in known if one.startswith(begun) and _PLAIN.fullmatch(one))


def _files(begun: str) -> list[str]:
    """What lies in a folder, by names that a shell takes without quotes; folders end with /."""
    folder, slash, start = begun.rpartition("/")
    found = []
    with contextlib.suppress(OSError, RuntimeError):
        for entry in Path(folder + slash or ".").expanduser().iterdir():
            hidden = entry.name.startswith(".") and not start.startswith(".")
            if entry.name.startswith(start) and not hidden and _PLAIN.fullmatch(entry.name):
                found.append(f"{folder}{slash}{entry.name}{'/' * entry.is_dir()}")
    return sorted(found)


_PLAIN = re.compile(r"[\w.@%+/~-]+")
