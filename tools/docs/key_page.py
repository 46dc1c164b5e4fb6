"""The tables of docs/reference/keys.md, from the declarations that `--help` is printed from."""

from __future__ import annotations

from functools import cache

from launcher.compose.help_text import FLAGS_HELP, first_comment, value_range
from launcher.compose.option_groups import Groups, find_groups
from launcher.compose.session import compose_checked, hydra_session
from launcher.config import LaunchConfig
from launcher.config.key import Key, describe, keys_of, nodes_of, spell, value_at


def key_tables() -> str:
    """The top level, then a part per group: what can be chosen, and every key."""
    nodes = nodes_of(LaunchConfig)
    groups = find_groups(None)
    keys = keys_of(LaunchConfig)
    parts = ["## Top level", _table([key for key in keys if "." not in key.path])]
    for group, schema in nodes.items():
        parts.append(f"## {group}")
        if group in groups.built_in:
            doc = " ".join((schema.__doc__ or "").split()).partition(":")[2].strip()
            parts.append(f"`{group}=` chooses {doc[:1]}{doc[1:]}".replace("``", "`"))
            options = [option for option in groups.options(group) if option != "schema"]
            parts.append("\n".join(_option(groups, group, option) for option in options))
        parts.append(_table([key for key in keys if key.path.startswith(f"{group}.")]))
    return "\n\n".join(parts)


def flag_table() -> str:
    """The flags beside `key=value`."""
    rows = ["| flag | what it does |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {_cell(text)} |" for name, text in FLAGS_HELP])


@cache
def _defaults() -> LaunchConfig:
    with hydra_session():
        return compose_checked([])[0]


def _option(groups: Groups, group: str, option: str) -> str:
    said = first_comment(groups, group, option)
    return f"- `{option}`" + (f": {said}" if said else "")


def _table(keys: list[Key]) -> str:
    rows = ["| key | value | unless you set it | meaning |", "|---" * 4 + "|"]
    for key in keys:
        default = spell(value_at(_defaults(), key.path)) or "empty"
        value = _cell(describe(key.hint)) + value_range(key)
        rows.append(f"| `{key.path}` | {value} | `{default}` | {_cell(key.help_text)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
