"""Do all ranks run the same? Compared before the first step, because the first message tells late.

A message of another size ends the receiver with SIGABRT, one of another type is silently garbage,
and two reductions in another order add up the wrong gradients without a word. So all ranks lay open
what has to agree: versions, plan, configuration, the model's weights, programs, and the shapes of
the first batch. Long values travel as hashes.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from strategies.errors import PlanError, by_host, name_ranks
from strategies.ir.program import Program
from strategies.ir.text import format_rows
from strategies.runtime.messages.exchange import everybody

_PACKAGES = ("torch", "lightning", "numpy", "foldpipe-launcher")
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
    return found | {name: _installed(name) for name in _PACKAGES}


@functools.cache
def _installed(name: str) -> str:
    """A package's version; its file takes 10 ms to be read, as long as a small step."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


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
            if name in _HOW:
                continue  # follows from a rank's weights, which it may have none of
            found[f"{name} of optimizer {number}"] = _short(_number(value))
        for index, group in enumerate(optimizer.param_groups):
            shapes = [list(parameter.shape) for parameter in group["params"]]
            rest = {k: _number(v) for k, v in sorted(group.items()) if k != "params"}
            found[f"group {index} of optimizer {number} on {place}"] = _short(
                _plain({"shapes": shapes, **rest})
            )
    return found


def groups_print(
    names: Sequence[Sequence[Sequence[str]]], optimizers: Sequence[Optimizer]
) -> dict[str, str]:
    """Which parameters are in which group, and with which rates, where all ranks see all of them.

    ``names``: per optimizer and group.
    """
    found = rates(optimizers)
    for number, groups in enumerate(names):
        found[f"groups of optimizer {number}"] = str(len(groups))
        for index, group in enumerate(groups):
            ordered = sorted(group)
            ends = f", {ordered[0]} to {ordered[-1]}" if ordered else ""
            found[f"parameters of group {index} of optimizer {number}"] = (
                f"{len(ordered)}{ends} #{_hash(' '.join(ordered))}"
            )
    return found


def schedulers_print(schedulers: Sequence[Any]) -> dict[str, str]:
    """What each scheduler is, when it goes on, and its numbers; those of groups may be a rank's.

    ``schedulers``: with their ``interval`` and ``frequency``, as Lightning keeps them.
    """
    found = {}
    for number, config in enumerate(schedulers):
        each = config.scheduler
        named = f"scheduler {number}"
        found[named] = f"{type(each).__qualname__} per {config.frequency} {config.interval}"
        state = each.state_dict() if hasattr(each, "state_dict") else {}
        for name, value in _numbers(state).items():
            found[f"{name} of {named}"] = _short(str(value))
    return found


# How an optimizer computes its step, not what.
_HOW = ("foreach", "fused")

# What schedulers and callbacks change while a training goes on.
CHANGING = ("lr", "weight_decay", "momentum", "betas")


def rates(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """What may change in each group, by a name that every rank has for it."""
    return {
        f"{key} of group {index} of optimizer {number}": _short(_number(group[key]))
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for key in CHANGING
        if key in group
    }


def alike(gathered: Sequence[Print]) -> frozenset[str]:
    """Which of all ranks' rates are one and the same; none where ranks have other groups."""
    first, *others = gathered
    if any(found.keys() != first.keys() for found in others):
        return frozenset()
    return frozenset(n for n, value in first.items() if all(f[n] == value for f in others))


def tell_odd_rates(gathered: Sequence[tuple[int, str, Print]]) -> str | None:
    """What one rank has changed alone, in words; None if nothing."""
    lines = _differences(gathered, partial=True)
    if not lines:
        return None
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the ranks' optimizers differ: {'; '.join(lines[:_SHOWN])}{more}. Something has changed "
        "them on one rank alone, such as a callback that acts on one rank"
    )


def _numbers(state: object) -> dict[str, object]:
    """The plain values of nested mappings and lists of them, without rates: those are of groups."""
    if isinstance(state, list | tuple):
        state = {str(index): each for index, each in enumerate(state)}
    if not isinstance(state, Mapping):
        return {}
    found: dict[str, object] = {}
    for name, value in state.items():
        if str(name).rstrip("s").endswith("lr"):
            continue
        if value is None or isinstance(value, str | int | float):
            found[str(name)] = value
        else:
            found |= {f"{name}.{inner}": each for inner, each in _numbers(value).items()}
    return found


def _number(value: object) -> str:
    """A rate may be a tensor."""
    return str(value.tolist()) if isinstance(value, torch.Tensor) else _plain(value)


def program_print(program: Program) -> str:
    """Order, messages, tags and buckets of all ranks' lists."""
    places = f"{program.schedule} {program.placement} {program.boundaries}"
    return _hash(f"{places}\n{program.role}\n{format_rows(program.ranks)}")


def stage_print(stage: int, names: Sequence[str]) -> dict[str, str]:
    """Which weights a rank has found for a stage: a step may come to others on another replica."""
    ends = f", {names[0]} to {names[-1]}" if names else ""
    return {f"weights of stage {stage}": f"{len(names)}{ends} #{_hash(' '.join(names))}"}


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
    lines = _differences(gathered, partial=partial)
    if not lines:
        return None
    places = by_host({rank: host for rank, host, _ in gathered})
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    listed = "".join(f"\n  {line}" for line in lines[:_SHOWN])
    return (
        f"the ranks do not have the same {what}, so nothing was trained:{listed}{more}\n"
        f"({places}) Give all of them the same code, packages, configuration and data."
    )


def _differences(gathered: Sequence[tuple[int, str, Print]], *, partial: bool) -> list[str]:
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
    return lines


def _plain(value: object) -> str:
    """A text that is the same in every process: no addresses, no order of sets."""
    if is_dataclass(value) and not isinstance(value, type):
        told = [f.name for f in fields(value) if f.compare]  # caches are no part of a value
        inner = ", ".join(f"{name}={_plain(getattr(value, name))}" for name in told)
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


# ----------------------------------------------------------------------------------- replicas
# Replicas start alike and apply the same gradients, so they stay alike bit for bit, unless somebody
# changes one of them alone: a callback on rank 0, a hook with random numbers of its own. Nothing
# would ever show it but a loss that nobody can explain, and a checkpoint has one replica's weights.
# So a number or two for each weight are compared before they are kept.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN_WEIGHTS = 3

Sums = Mapping[str, tuple[int, int]]
Word = tuple[str, int, str]  # place in the pipeline, replica, digest


def checksums(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Two sums over the bits of each, made where it is; waits for the device once.

    The second goes by rows, so that a permutation shows, too.

    >>> checksums({"a": torch.zeros(2, 2), "b": torch.ones(2)})
    {'a': (0, 0), 'b': (2130706432, 3196059648)}
    """
    sums = []
    for value in parameters.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.detach().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        rows = local.shape[0] if local.dim() and flat.numel() else 1
        bits = flat.view(_INTEGERS[flat.element_size()]).reshape(rows, flat.numel() // rows)
        totals = bits.sum(dim=1, dtype=torch.int64)
        places = torch.arange(1, rows + 1, device=totals.device)
        sums.append(torch.stack([totals.sum(), (totals * places).sum()]).to("cpu"))
    found = torch.stack(sums).tolist() if sums else []
    return {name: (int(a), int(b)) for name, (a, b) in zip(parameters, found, strict=True)}


def digest(sums: Sums) -> str:
    """All of them in a word."""
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


def odd_ones(found: Sequence[Word]) -> dict[int, list[int]]:
    """Which ranks differ from most replicas of their place; per rank that they are held against.

    >>> odd_ones([("pp 0", 0, "a"), ("pp 0", 1, "a"), ("pp 0", 2, "b"), ("pp 1", 0, "c")])
    {0: [2], 3: []}
    """
    odd: dict[int, list[int]] = {}
    for place in dict.fromkeys(place for place, _, _ in found):
        ranks = [rank for rank, word in enumerate(found) if word[0] == place]
        counts = Counter(found[rank][2] for rank in ranks)
        # Of two there is no majority: then the first replica, whose weights are written.
        right = max(ranks, key=lambda rank: (counts[found[rank][2]], -rank))
        odd[right] = [rank for rank in ranks if found[rank][2] != found[right][2]]
    return odd


def tell_odd_ones(found: Sequence[Word], sums: Sequence[Sums]) -> str:
    """What differs, in words."""
    lines = []
    for right, ranks in odd_ones(found).items():
        for rank in ranks:
            names = [n for n, value in sums[right].items() if sums[rank].get(n) != value]
            more = f" and {len(names) - _SHOWN_WEIGHTS} more" if len(names) > _SHOWN_WEIGHTS else ""
            lines.append(
                f"{name_ranks([rank])} (replica {found[rank][1]}, {found[rank][0]}) has other "
                f"weights than {name_ranks([right])} (replica {found[right][1]}): "
                f"{', '.join(names[:_SHOWN_WEIGHTS])}{more}"
            )
    return (
        f"replicas differ: {'; '.join(lines)}. Something has changed one replica alone, such as a "
        "callback that acts on one rank, or random numbers that are not the same on all. Change "
        "weights on every rank alike, and go on with an earlier checkpoint."
    )
