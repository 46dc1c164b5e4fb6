"""All ranks begin with one module: compared by its digest, and refused with the names that differ.

Every process runs the user's script, and what it draws there, or takes in the order of a set, is
its own. Buffers go from rank 0 to all, as under DDP; all else has to be the same.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from strategies.errors import ModelError, by_host, name_ranks
from strategies.runtime.lightning.agreement.module_digest import (
    BUFFER,
    HOOKS,
    KEYS,
    NONE,
    PARTS,
    WHOLE,
    ModuleDigest,
    is_object,
    is_own,
)
from strategies.runtime.lightning.agreement.read_names import ReadNames, reads_parameters
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.fingerprint import MismatchError, checksums

_log = logging.getLogger(__name__)

_SHOWN = 5
_EMPTY = ("[]", "{}")
# A number under such a name is the process's own.
_RANKS = re.compile("rank|main|master|primary|chief|root|zero|local|node|world|verbose|device|gpu")
# What a training leaves in a module's layers is their stage's own; it is compared before that.
_compared: weakref.WeakSet[Any] = weakref.WeakSet()


class _Said(NamedTuple):
    """What a rank says of its module at first."""

    host: str
    mark: str
    cut: bool
    known: bool  # whether it has been compared before
    buffers: dict[str, Any]


def agree_on_module(
    module: nn.Module, device: torch.device, *, callbacks: Iterable[Any], seeded: bool
) -> dict[str, str]:
    """Gives all ranks rank 0's buffers, and refuses modules that differ; collective.

    Args:
        module: As the user's script has made it on this rank.
        device: Where this rank computes.
        callbacks: The Trainer's. What hooks read of the user's own ones is compared, too.
        seeded: Whether all ranks have drawn the same so far.

    Returns:
        Hooks of modules that not all ranks have and that read parameters, in words, by module.

    Raises:
        MismatchError: On every rank the same, with the names that differ and who has what.
    """
    exchange = everybody(device)
    if exchange.size == 1:
        return {}
    digest = ModuleDigest(module)
    reads = ReadNames.of(digest.kinds)
    reads.callbacks = _take_callbacks(digest, callbacks)
    for place, value in reads.constants.items():
        digest.take(place, value, type(module))
    own = _Said(
        socket.gethostname(), digest.mark, digest.cut, module in _compared, _checksums_of(module)
    )
    said = [_Said(*each) for each in exchange.everyone(tuple(own))]
    _share_buffers(module, said, device)
    if digest.untaken and exchange.rank == 0:
        _tell_untaken(digest.untaken, reads)
    hooks: dict[str, str] = {}
    if not all(each.known for each in said) and len({each.mark for each in said}) > 1:
        hooks = _compare_entries(digest, reads, said, seeded=seeded)
    if not hooks:
        _compared.add(module)
    return hooks


def _take_callbacks(digest: ModuleDigest, callbacks: Iterable[Any]) -> set[str]:
    """Takes what they keep, and returns the names that their code reads.

    What they keep of earlier trainings is each rank's own, so only new ones are looked at.
    """
    kinds, digest.kinds = digest.kinds, set()
    for number, callback in enumerate(callbacks):
        kind = type(callback)
        if not is_own(kind.__module__) or callback in _compared:
            continue
        _compared.add(callback)
        digest.kinds.add(kind)
        for key, value in list(vars(callback).items()):
            digest.take(f"{kind.__name__} (callback {number}).{key}", value, callback)
    found = ReadNames.of(digest.kinds)
    digest.kinds = kinds
    return found.steps | found.hooks


def _tell_untaken(untaken: Mapping[str, str], reads: ReadNames) -> None:
    """One warning for all objects that cannot be compared."""
    listed = ", ".join(
        f"{place} ({kind})" for place, kind in untaken.items() if _is_in(place, reads.steps)
    )
    if listed:
        _log.warning(
            "the ranks cannot compare %s: an object without attributes does not show whether "
            "it is the same in every process. See that it is.",
            listed,
        )


# ------------------------------------------------------------------------------------- buffers


def _checksums_of(module: nn.Module) -> dict[str, Any]:
    """Of each buffer, persistent or not, its form and two sums of its bits."""
    found = {
        name: buffer
        for name, buffer in module.named_buffers()
        if not buffer.is_meta and buffer.layout == torch.strided and not buffer.is_quantized
    }
    sums = checksums(found)
    return {
        name: [str(buffer.dtype), list(buffer.shape), *sums[name]] for name, buffer in found.items()
    }


def _share_buffers(module: nn.Module, said: Sequence[_Said], device: torch.device) -> None:
    """Rank 0's, where any rank has other numbers in a buffer of the same form; collective."""
    first = said[0].buffers
    odd = [
        name
        for name, form in first.items()
        if any(each.buffers.get(name) != form for each in said)
        and all(each.buffers.get(name, [None])[:2] == form[:2] for each in said)
    ]
    if not odd:
        return
    own = dict(module.named_buffers())
    values: dict[str, Tensor] = everybody(device).first_says({name: own[name] for name in odd})
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


# ------------------------------------------------------------------------------------- values


def _compare_entries(
    digest: ModuleDigest,
    reads: ReadNames,
    said: Sequence[_Said],
    *,
    seeded: bool,
) -> dict[str, str]:
    """Names what differs and counts, and returns what does of hooks; collective."""
    exchange = everybody()
    entries: list[dict[str, str]] = exchange.everyone(digest.entries)
    partial = any(each.cut for each in said)
    names = dict.fromkeys(name for found in entries for name in found)
    differing: dict[str, list[str]] = {}
    for name in names:
        texts = [found.get(name) for found in entries]
        if None in texts and (partial or not name.startswith((PARTS, BUFFER, HOOKS))):
            continue  # of an object that a rank does not have, whose place says so
        if len(set(texts)) > 1:
            differing[name] = [text or "nothing" for text in texts]
    own = {
        name: [_counts(name, texts, digest, reads), digest.shuffled(name)]
        for name, texts in differing.items()
    }
    found = exchange.everyone(own)
    counted = {n: t for n, t in differing.items() if any(each[n][0] for each in found)}
    hooks = {n: counted.pop(n) for n in list(counted) if n.startswith(HOOKS)}
    if not counted:
        return {name.removeprefix(HOOKS): _line(name, texts) for name, texts in hooks.items()}
    permuted = all(
        n.startswith((PARTS, KEYS)) or (found[0][n][1] and len({each[n][1] for each in found}) == 1)
        for n in counted
    )
    raise _refusal(counted, said, permuted=permuted, seeded=seeded)


def _counts(place: str, texts: Sequence[str], digest: ModuleDigest, reads: ReadNames) -> bool:
    """Whether a step, or a hook between steps, may come to other numbers by this difference."""
    if place.startswith((PARTS, BUFFER)):
        return True
    if place.startswith(HOOKS):
        return any(map(reads_parameters, digest.value(place) or ()))
    if NONE in texts and any(is_object(text) for text in texts):
        return False  # a writer, a logger that one rank alone has
    if any(text in _EMPTY for text in texts):
        return False  # what one rank alone collects
    name = place.removeprefix(KEYS)
    value = digest.value(place)
    if isinstance(value, int) and _RANKS.search(name.rpartition(".")[2].lower()):
        return False
    holder = digest.holder(place)
    if isinstance(holder, nn.Module) and not is_own(type(holder).__module__):
        return not name.rpartition(".")[2].startswith("_")  # else a library's own
    if isinstance(holder, pl.Callback):  # Texts and flags say where it writes, and whether.
        return not isinstance(value, str | PurePath | bool) and _is_in(name, reads.callbacks)
    alone = isinstance(value, bool) and len(set(texts[1:])) == 1
    if isinstance(value, str | PurePath) or alone:
        return _is_in(name, reads.steps)
    return _is_in(name, reads.steps | reads.hooks)


def _is_in(place: str, names: set[str]) -> bool:
    return any(part in names for part in place.split(".") if part != "hparams")


def _line(name: str, texts: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return f"{name}: " + ", ".join(f"{text} on {name_ranks(r)}" for text, r in ranks.items())


def agree_on_cut(
    units: Sequence[str], refused: ModelError | None, *, hooks: Mapping[str, str]
) -> None:
    """Before ranks make groups that one of them would not come to; collective.

    Args:
        units: Names of what this rank has found to be cut.
        refused: Why it has found nothing.
        hooks: As ``agree_on_module`` has returned them.

    Raises:
        ModelError: This rank has refused the module, or another one.
        MismatchError: A hook reads parameters of several units, and not all ranks have it.
    """
    around = [
        line
        for name, line in hooks.items()
        if name == WHOLE or sum(unit.startswith(f"{name}.") for unit in units) > 1
    ]
    said = everybody().everyone((None if refused is None else str(refused), around))
    if refused is not None:
        raise refused
    why = next((each for each, _ in said if each is not None), None)
    if why is not None:
        raise ModelError(why)
    lines = dict.fromkeys(line for _, each in said for line in each)
    if lines:
        raise MismatchError(
            "some ranks alone have a hook that reads parameters of several layers, and each rank "
            f"has a part of them: {'; '.join(list(lines)[:_SHOWN])}.",
            fix="Try on_train_batch_start or on_before_optimizer_step of a callback, where every "
            "rank has all parameters (WandbLogger.watch: log='gradients', log_graph=False).",
        )


def _refusal(
    counted: Mapping[str, Sequence[str]], said: Sequence[_Said], *, permuted: bool, seeded: bool
) -> MismatchError:
    lines = [f"\n  {_line(*each)}" for each in list(counted.items())[:_SHOWN]]
    if len(counted) > _SHOWN:
        lines.append(f"\n  and {len(counted) - _SHOWN} more")
    places = by_host({rank: each.host for rank, each in enumerate(said)})
    order = f"PYTHONHASHSEED=0 python {os.path.basename(sys.argv[0] or 'train.py')}"
    seed = "pl.seed_everything(0) before the module is made"
    sets = os.environ.get("PYTHONHASHSEED", "random") == "random"
    if seeded and sets:
        why = "All processes have one seed: these follow the order of a set, or own generators."
        fix = f"Try {order}, or sorted(...) where the set is read."
    elif permuted and sets:
        why = "Each process has made these for itself: by the order of a set, or at random."
        fix = f"Try {order}, or sorted(...) where a set is read; if they are drawn, {seed}."
    else:
        why = "Each process has made these for itself."
        fix = f"Try {seed}, or draw them in setup(), where all ranks draw the same"
        fix += f"; if the order of a set decides, {order}." if sets else "."
    return MismatchError(
        "the ranks do not have the same module, so nothing was trained:"
        f"{''.join(lines)}\n({places}) {why}",
        fix=fix,
    )
