"""Do all ranks run the same? Compared before the first step, because the first message tells late.

A message of another size ends the receiver with SIGABRT, one of another type is silently garbage,
and two reductions in another order add up the wrong gradients without a word. So all ranks lay open
what has to agree: versions, plan, configuration, the model's weights, programs, and the shapes of
the first batch. Long values travel as hashes.
"""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from strategies.errors import PlanError, by_host, name_ranks
from strategies.ir.program import Program
from strategies.ir.text import format_rows
from strategies.runtime.messages.exchange import everybody

_PACKAGES = ("torch", "lightning", "numpy", "foldpipe")
_LONG = 60
_SHOWN = 5

Print = Mapping[str, str]


class MismatchError(PlanError):
    """Ranks that do not run the same."""


def shared_print(values: Mapping[str, object]) -> dict[str, str]:
    """What has to agree, in short: a name and a value each."""
    return {name: _short(_plain(value)) for name, value in values.items()}


def versions_print() -> dict[str, str]:
    """Versions of what decides about numbers and messages."""
    found = {"python": platform.python_version(), "byte order": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def options_print(prefix: str, options: Any) -> dict[str, str]:
    return shared_print({f"{prefix}{f.name}": getattr(options, f.name) for f in fields(options)})


def weights_print(module: nn.Module) -> dict[str, str]:
    """The uncut model's weights: of each of its parts shapes, types, and what trains."""
    parts: dict[str, list[str]] = {}
    for name, weight in module.named_parameters():
        kind = str(weight.dtype).removeprefix("torch.")
        frozen = "" if weight.requires_grad else " frozen"
        parts.setdefault(name.rpartition(".")[0], []).append(
            f"{name} {list(weight.shape)} {kind}{frozen}"
        )
    return {f"weights of {part or 'the module'}": _short("; ".join(p)) for part, p in parts.items()}


def optimizers_print(
    optimizers: Sequence[Optimizer], *, pp_rank: int, tp_rank: int
) -> dict[str, str]:
    """Classes and defaults, the same everywhere, and the groups of a pipeline rank, of replicas."""
    found = {"optimizers": ", ".join(type(each).__qualname__ for each in optimizers) or "none"}
    place = f"pipeline rank {pp_rank}" + (f", tp rank {tp_rank}" if tp_rank else "")
    for number, optimizer in enumerate(optimizers):
        for name, value in optimizer.defaults.items():
            found[f"{name} of optimizer {number}"] = _short(_number(value))
        for index, group in enumerate(optimizer.param_groups):
            shapes = [list(parameter.shape) for parameter in group["params"]]
            rest = {k: _number(v) for k, v in sorted(group.items()) if k != "params"}
            found[f"group {index} of optimizer {number} on {place}"] = _short(
                _plain({"shapes": shapes, **rest})
            )
    return found


def _number(value: object) -> str:
    """A rate may be a tensor."""
    return str(value.tolist()) if isinstance(value, torch.Tensor) else _plain(value)


def program_print(program: Program) -> str:
    """Order, messages, tags and buckets of all ranks' lists."""
    places = f"{program.schedule} {program.placement} {program.boundaries} {program.entry}"
    return _hash(f"{places}\n{program.role}\n{format_rows(program.ranks)}")


def compare(own: Print, *, what: str, partial: bool = False) -> None:
    """Lays this rank's print beside those of all others; collective over all processes.

    With ``partial`` a name concerns only the ranks that have it.

    Raises:
        MismatchError: On every rank the same, with the names that differ and who has what.
    """
    exchange = everybody()
    gathered = exchange.everyone((exchange.rank, socket.gethostname(), dict(own)))
    message = difference(gathered, what, partial=partial)
    if message is not None:
        raise MismatchError(message)


def difference(
    gathered: Sequence[tuple[int, str, Print]], what: str, *, partial: bool = False
) -> str | None:
    """What differs between the ranks (rank, host and print of each), in words; None if nothing."""
    names = dict.fromkeys(name for _, _, found in gathered for name in found)
    lines = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, _, found in gathered:
            if name in found or not partial:
                values.setdefault(found.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            shown = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in values.items())
            lines.append(f"{name}: {shown}")
    if not lines:
        return None
    places = by_host({rank: host for rank, host, _ in gathered})
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    listed = "".join(f"\n  {line}" for line in lines[:_SHOWN])
    return (
        f"the ranks do not have the same {what}, so nothing was trained:{listed}{more}\n"
        f"({places}) Give all of them the same code, packages, configuration and data."
    )


def _plain(value: object) -> str:
    """A text that is the same in every process: no addresses, no order of sets."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{f.name}={_plain(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        return str(sorted((_plain(key), _plain(inner)) for key, inner in value.items()))
    if isinstance(value, set | frozenset):
        return str(sorted(map(_plain, value)))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if value is None or isinstance(value, str | int | float | torch.dtype):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:20]}... #{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
