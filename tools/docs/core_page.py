"""The table of kinds of instructions on ``strategies/README.md``."""

from __future__ import annotations

from collections.abc import Iterable

from strategies.ir.kinds import EXCHANGE_KINDS, KINDS, MESSAGE_KINDS, Kind, Value


def kinds_table() -> str:
    """A row per kind, from the table that the code reads."""
    rows = ["| kind | what it does | uses | makes | occupies |", "|---" * 5 + "|"]
    for kind, spec in KINDS.items():
        carried = kind in MESSAGE_KINDS
        uses = "what it carries" if carried else _listed(spec.uses)
        makes = "the same on the other rank" if carried else _listed(spec.makes)
        if kind is Kind.OVERLAP:
            uses = makes = "those of its halves"
        if kind in EXCHANGE_KINDS:
            continue
        rows.append(f"| `{kind.value}` | {spec.word} | {uses} | {makes} | {spec.occupies} |")
    return "\n".join(rows)


def _listed(values: Iterable[Value]) -> str:
    return ", ".join(value.value for value in values) or "nothing"
