"""The module's state on every rank of a pipeline: what steps left on the last stage goes there.

Small values travel with the loss and the logs, once per step, so that the next step sees the same
on every stage. Large ones follow at once where an earlier stage's part of the step reads them (a
codebook, a queue of keys); else (a list over an epoch, states of a metric) they stay on the last
stage's rank until hooks may look at them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from strategies.errors import ModelError
from strategies.models.contents import MISSING
from strategies.models.snapshot import Snapshot, StateRef
from strategies.runtime.messages.values import Opening, Parcel, hand_round
from strategies.runtime.step.whole_batch import Whole

_SMALL_BYTES = 512  # of a tensor
_WORDS = 4096  # characters of all that goes with the logs


class StepMirror:
    """Keeps one pipeline's modules alike.

    Args:
        state: This rank's view of the module.
        group: All ranks of the replica; None for a single one.
        source: Global rank whose steps count, that of the last stage.
        knows: Whether this rank runs the last stage.
    """

    def __init__(
        self,
        state: Snapshot,
        *,
        group: dist.ProcessGroup | None,
        source: int,
        knows: bool,
        device: torch.device,
    ) -> None:
        self._state = state
        self._group = group
        self._source = source
        self._knows = knows
        self._device = device
        self._waiting: dict[StateRef, None] = {}  # what has changed and has not been told
        self._stale = False
        self._read: dict[StateRef, bool] = {}  # whether other stages' part of the step looks at it
        self._now = False

    def message(
        self, whole: Whole, *, carries: bool, read: Callable[[StateRef], bool], drawn: Any
    ) -> dict[str, Any] | None:
        """What this rank says about a pass, JSON-ready; None if there is nothing to say.

        ``read`` tells whether stages before the last one read a place of the module; ``drawn`` is
        where random generators stand behind the step.
        """
        if not self._knows:
            return None
        if whole.refusal is not None:
            return {"refusal": whole.refusal}
        small = []
        size = 0
        for ref in sorted(whole.changed):
            words = self._small(ref)
            length = _WORDS if words is None else len(json.dumps(words))
            size += length
            if words is None or size > _WORDS:
                size -= length
                self._waiting[ref] = None
            else:
                small.append(words)
                self._waiting.pop(ref, None)
        said: dict[str, Any] = {}
        if small:
            said["small"] = small
        if self._waiting:
            said["more"] = True
            for ref in self._waiting:
                if ref not in self._read:
                    self._read[ref] = read(ref)
            if any(self._read[ref] for ref in self._waiting):
                said["now"] = True
        if carries and whole.result is not None:
            said["result"] = True
        if drawn is not None:
            said["drawn"] = drawn
        return said or None

    def take(self, said: dict[str, Any] | None) -> None:
        """Hears what the last stage's rank has said; the same on all ranks.

        Raises:
            ModelError: It says why the step cannot be run in a pipeline.
        """
        if said is None:
            return
        if "refusal" in said:
            raise ModelError(said["refusal"])
        if not self._knows:
            opening = Opening(torch.zeros(0, dtype=torch.uint8), self._device)
            for place, tree in said.get("small", ()):
                self._put(StateRef(*place), opening, tree)
        self._stale = self._stale or "more" in said
        self._now = "now" in said

    def share(self, *, now: bool = False) -> None:
        """Brings over what has not been told; collective, and nothing where nothing is missing.

        ``now``: only what the next step of other stages reads.
        """
        if now and not self._now:
            return
        self._now = False
        if not self._stale:
            return
        refs = [ref for ref in self._waiting if not now or self._read[ref]]
        self._waiting = {ref: None for ref in self._waiting if ref not in refs}
        self._stale = now
        if self._group is None:
            return
        parcel = Parcel()
        try:
            tree: Any = [[_place(ref), _packed(parcel, self._state.value(ref))] for ref in refs]
        except TypeError as error:
            tree, parcel = {"refusal": str(error)}, Parcel()
        if self._knows and isinstance(tree, dict):
            names = ", ".join(ref.name for ref in refs)
            tree["refusal"] = (
                f"steps have changed {names} on the last stage's rank, and hooks may read that on "
                f"all ranks, but {tree['refusal']}. Keep numbers, tensors, lists and dicts of "
                "them; append what other layers than the last give to a list. What goes on from "
                "batch to batch through layers (the hidden state of an LSTM) needs pp=1."
            )
        tree, content = hand_round(tree, parcel.tensors, group=self._group, source=self._source)
        if isinstance(tree, dict):
            raise ModelError(tree["refusal"])
        if not self._knows:
            opening = Opening(content, self._device)
            for place, item in tree:
                self._put(StateRef(*place), opening, item)

    def carry(self, said: dict[str, Any] | None, result: Any) -> Any:
        """What the step has returned for the batch, on every rank; collective."""
        if said is None or "result" not in said or self._group is None:
            return result
        parcel = Parcel()
        try:
            tree: Any = ["list", [parcel.pack(result)]] if self._knows else None
        except TypeError as error:
            tree, parcel = {"refusal": str(error)}, Parcel()
        tree, content = hand_round(tree, parcel.tensors, group=self._group, source=self._source)
        if isinstance(tree, dict):
            raise ModelError(
                f"a hook looks at what a step returns (on_*_batch_end), but {tree['refusal']}. "
                "Return tensors, numbers, and lists and dicts of them."
            )
        return result if self._knows else Opening(content, self._device).unpack(tree)[0]

    def _small(self, ref: StateRef) -> Any:
        """A value in few words; None where it takes more."""
        value = self._state.value(ref)
        if isinstance(value, list | dict | set) and len(value) > 32:
            return None
        parcel = Parcel(inline_bytes=_SMALL_BYTES)
        try:
            tree = _packed(parcel, value)
        except TypeError:
            return None
        return None if parcel.tensors else [_place(ref), tree]

    def _put(self, ref: StateRef, opening: Opening, tree: Any) -> None:
        if tree == ["absent"]:
            self._state.put(ref, MISSING)
        else:
            self._state.put(ref, opening.unpack(tree, self._state.value(ref)))


def _place(ref: StateRef) -> list[str]:
    return [ref.module, ref.key]


def _packed(parcel: Parcel, value: Any) -> Any:
    return ["absent"] if value is MISSING else parcel.pack(value)
