"""``--help``: every key with its type, its value under the given overrides, and one sentence."""

from __future__ import annotations

import textwrap
from typing import Any

from launcher.compose.flags import FLAGS_HELP
from launcher.compose.groups import Groups
from launcher.config.key import Key, describe, keys_of, nodes_of, spell
from launcher.config.launch import LaunchConfig

_WIDTH = 98
_USAGE = """\
foldpipe: pipeline-parallel training from a declaration, simulated and executed alike.

usage: python -m launcher [flags] [key=value ...]        (or: foldpipe ...)

  python -m launcher                                     train a small model on this machine
  python -m launcher schedule=foldx_fifo pp=4            the same over 4 pipeline ranks
  python -m launcher mode=simulate costs=uniform pp=4    draw a schedule's timeline
  python -m launcher -m schedule=gpipe,1f1b pp=2,4       one run per combination
"""
_FOOTER = """\
Each run writes a folder of its own below outputs/ (hydra.run.dir=PATH chooses it), each sweep one
below multirun/ (hydra.sweep.dir=PATH). Own options: --config-dir DIR with DIR/model/mine.yaml.
Exit codes: 0 done, 1 a run failed, 2 the request is wrong and nothing was started, 85 preempted.
"""


def help_text(config: LaunchConfig, groups: Groups) -> str:
    """The text of ``--help``.

    Args:
        config: Whose values are shown as defaults.
        groups: Groups and their options.
    """
    parts = [_USAGE, "Flags", *(_entry(name, text) for name, text in FLAGS_HELP), ""]
    nodes = nodes_of(LaunchConfig)
    keys = keys_of(LaunchConfig)
    parts.append("Keys: name=value, type [value unless you set it], meaning")
    parts += [_key(entry, config) for entry in keys if "." not in entry.path]
    for group in nodes:
        parts.append("")
        if group in groups.built_in:
            doc = (nodes[group].__doc__ or "").replace("``", "").split(":", 1)[-1].strip()
            parts.append(f"{group}=  {doc}")
            parts.append(_paragraph("options: " + ", ".join(groups.options(group))))
        else:
            parts.append(f"{group}.*")
        parts += [_key(entry, config) for entry in keys if entry.path.startswith(f"{group}.")]
    parts.append("")
    parts.append("experiment=  a named set of overrides, [null]")
    parts.append(_paragraph("options: " + (", ".join(groups.options("experiment")) or "none yet")))
    return "\n".join([*parts, "", _FOOTER])


def _key(entry: Key, config: LaunchConfig) -> str:
    value: Any = config
    for name in entry.path.split("."):
        value = getattr(value, name)
    return _entry(
        f"{entry.path}=", f"{describe(entry.hint)} [{spell(value) or 'empty'}]. {entry.help_text}"
    )


def _entry(name: str, text: str) -> str:
    indent = " " * 34
    body = textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    head = f"  {name}"
    if len(head) < len(indent):
        return head + body[len(head) :]
    return f"{head}\n{body}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
