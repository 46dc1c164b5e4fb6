"""Boundary tensors on their way: shapes, buffers, and handles of one pipeline rank.

Shapes travel once: the first message of a boundary for a new signature (shapes and types of the
microbatch, known on every rank) is preceded by a header; afterwards both ends know. A boundary
whose shapes change while the batch's do not is refused, never received into the wrong buffer.

A stage may have no gradient for a tensor that wants one: it is detached behind the cut, or has no
part in the loss. Zeros travel then, and the first gradients of a signature are preceded by which of
them are none. Weights before the cut get no gradient from those, as without a cut; zeros would
let weight decay and momentum go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from strategies.errors import ModelError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Program
from strategies.runtime.messages.transport import Arrival, Handle, Transport

Values = tuple[Tensor | None, ...]  # None is a gradient that a stage does not have

_HEADER_BYTES = 4096
_TENSORS = 64  # tags per message; the last one is the header's
_Signature = tuple[Any, ...]
_Key = tuple[int, int, int]  # both stages, the earlier first; number of the mode and signature


@dataclass(frozen=True, slots=True)
class _Spec:
    """The tensors of one boundary: shape, dtype, and whether a gradient comes back.

    Those of ``on_host`` stay there, as lengths of sequences do, although ranks are on GPUs.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    flags: tuple[bool, ...]
    on_host: tuple[bool, ...]

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        return len(tensors) == len(self.shapes) and all(
            [
                tensor.shape == shape
                and tensor.dtype == dtype
                and tensor.requires_grad == flag
                and (tensor.device.type == "cpu") == on_host
                for tensor, shape, dtype, flag, on_host in zip(
                    tensors, self.shapes, self.dtypes, self.flags, self.on_host, strict=True
                )
            ]
        )

    def to_bytes(self) -> bytes:
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return json.dumps([self.shapes, names, self.flags, self.on_host]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Spec:
        shapes, names, flags, on_host = json.loads(data)
        return cls(
            tuple(tuple(shape) for shape in shapes),
            tuple(getattr(torch, name) for name in names),
            tuple(flags),
            tuple(on_host),
        )


@dataclass
class _Incoming:
    """A posted receive; without a header known yet, the tensors are posted later."""

    key: _Key
    peer: int
    tag: int
    header: tuple[Tensor, Handle] | None = None
    given: tuple[Tensor, Handle] | None = None  # of gradients: which of them are none
    arrivals: list[Arrival | Tensor] | None = None  # of its tensors; empty ones do not travel


class Mailbox:
    """All messages of one rank."""

    def __init__(self, transport: Transport | None, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._specs: dict[_Key, _Spec] = {}
        self._announced: set[tuple[_Key, int]] = set()  # headers sent, by peer
        self._awaited: set[tuple[_Key, int]] = set()  # headers received or being received
        # Of gradients, by peer: which are none, as told to it and by it (None: on its way).
        self._told: dict[tuple[_Key, int], tuple[bool, ...]] = {}
        self._heard: dict[tuple[_Key, int], tuple[bool, ...] | None] = {}
        self._incoming: dict[Instruction, _Incoming] = {}
        self._taken: set[Instruction] = set()  # RECVs of this pass whose message has been used
        self._sent: dict[Instruction, list[tuple[Handle, Tensor]]] = {}
        self._previous: list[tuple[Handle, Tensor]] = []
        self._program: Program | None = None
        self._boundaries: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple[str, _Signature], int] = {}
        self._shapes: dict[int, int] = {}  # microbatch -> number of its mode and signature
        self._known: frozenset[_Key] = frozenset()
        self.bytes_sent = 0
        # Stages that have lost a gradient which they had at their first microbatch of a kind.
        self.lost: set[int] = set()

    @property
    def alone(self) -> bool:
        return self._transport is None

    @property
    def ordered(self) -> bool:
        """Whether messages are matched by order, so that none may be posted ahead."""
        return self._transport is not None and self._transport.ordered

    @property
    def copies(self) -> bool:
        """Whether the rank copies what it sends, so that it matters what it does next."""
        return self._transport is not None and self._transport.copies

    def are_here(self, items: Iterable[Instruction]) -> bool:
        """Whether what these RECVs bring is known to have come, all of it."""
        for item in items:
            incoming = self._incoming.get(item)
            if incoming is None or incoming.arrivals is None:
                return False
            for arrival in incoming.arrivals:
                if not isinstance(arrival, Tensor) and not arrival.is_here():
                    return False
        return True

    def begin(self, program: Program, mode: str, signatures: Mapping[int, _Signature]) -> None:
        """Begins a list; ``signatures`` are those of the microbatches whose forwards it runs."""
        self.go_on(program)
        role = f"{mode}:{program.role == 'forward'}"
        # Hashed here, once per pass: keys are looked up several times per instruction.
        for microbatch, signature in signatures.items():
            number = self._numbers.setdefault((role, tuple(signature)), len(self._numbers))
            self._shapes[microbatch] = number

    def go_on(self, program: Program) -> None:
        """Begins a list that lets no new microbatch in."""
        if self._program is None or program.boundaries is not self._program.boundaries:
            ends = ((b.source, b.target) for b in program.boundaries)
            self._boundaries = {pair: number for number, pair in enumerate(ends)}
        self._program = program
        self._known = frozenset(self._specs)
        self._taken.clear()

    def describe(
        self, stage: int, target: int, microbatch: int, tensors: tuple[Tensor, ...]
    ) -> None:
        """Notes what ``stage`` hands to ``target``."""
        key = self._key(stage, target, microbatch)
        if key in self._specs and self._specs[key].fits(tensors):
            return
        spec = _Spec(
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            tuple(tensor.device.type == "cpu" for tensor in tensors),
        )
        if self._transport is not None and key not in self._specs:
            self._transport.check_whole(stage, tensors)
        known = self._specs.setdefault(key, spec)
        if known != spec and known == replace(spec, flags=known.flags):
            raise ModelError(
                f"which tensors behind stage {stage} need a gradient has changed during training: "
                "parameters before the cut were frozen or unfrozen. Freeze them before fit(), or "
                "use pp=1."
            )
        if known != spec:
            raise ModelError(
                f"stage {stage} hands on tensors of {spec.shapes}, but handed on {known.shapes} "
                "for an earlier microbatch of the same shape. Shapes between stages may depend on "
                "the batch's shape only; pad (pad_packed_sequence(total_length=x.size(1))), or "
                "cut elsewhere with schedule.layers_per_stage."
            )

    def gradient_flags(self, stage: int, target: int, microbatch: int) -> tuple[bool, ...]:
        """Which of the tensors that ``stage`` hands to ``target`` want a gradient."""
        return self._specs[self._key(stage, target, microbatch)].flags

    def post(self, item: Instruction) -> None:
        """Starts the RECV (and ends it where the backend matches by order and blocks)."""
        assert self._transport is not None
        if item in self._incoming:
            return  # It has been, by a list that was given up before its message left.
        key, peer, tag = self._address(item)
        incoming = _Incoming(key, peer, tag)
        self._incoming[item] = incoming
        # A rank may know the shapes already, from the other weight copy; its peer cannot know that.
        if item.payload is Kind.F and (key, peer) not in self._awaited:
            self._awaited.add((key, peer))
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._device)
            handle = self._transport.receive(header, peer, tag + _TENSORS - 1)
            incoming.header = (header, handle)
        if item.payload is Kind.B and (key, peer) not in self._heard:
            # How many gradients there will be need not be known yet.
            self._heard[key, peer] = None
            marks = torch.empty(_TENSORS, dtype=torch.uint8, device=self._device)
            handle = self._transport.receive(marks, peer, tag + _TENSORS - 1)
            incoming.given = (marks, handle)
        if self.ordered:
            self._open_header(incoming)
        if key in self._specs:
            self._post_tensors(item, incoming)

    def wait(self, item: Instruction) -> Values:
        incoming = self._incoming.pop(item, None)
        if incoming is None:
            self.post(item)
            incoming = self._incoming.pop(item)
        self._open_header(incoming)
        if incoming.arrivals is None:
            if incoming.key not in self._specs:
                # Another microbatch of this shape carries the header.
                for other in self._incoming.values():
                    if other.key == incoming.key:
                        self._open_header(other)
            self._post_tensors(item, incoming)
        assert incoming.arrivals is not None
        tensors = tuple(
            arrival if isinstance(arrival, Tensor) else arrival.wait()
            for arrival in incoming.arrivals
        )
        self._taken.add(item)
        return self._gradients(incoming, tensors) if item.payload is Kind.B else tensors

    def _gradients(self, incoming: _Incoming, tensors: tuple[Tensor, ...]) -> Values:
        """What has arrived, without those that the other end has said to be none."""
        here = incoming.key, incoming.peer
        self._open_marks(incoming)
        if self._heard[here] is None:
            # Another microbatch of this kind carries the marks.
            for other in self._incoming.values():
                if (other.key, other.peer) == here:
                    self._open_marks(other)
        given = self._heard[here]
        assert given is not None
        if all(given):
            return tensors
        # What was none at first and is more than zeros has got a gradient since.
        return tuple(
            tensor if known or bool(tensor.any()) else None
            for tensor, known in zip(tensors, given, strict=False)
        )

    def _open_marks(self, incoming: _Incoming) -> None:
        if incoming.given is not None:
            marks, handle = incoming.given
            incoming.given = None
            handle.wait()
            self._heard[incoming.key, incoming.peer] = tuple(map(bool, marks.tolist()))

    def discard(self, item: Instruction) -> None:
        """Receives what a list that is given up does not use, unless it has used it already."""
        if item not in self._taken:
            self.wait(item)

    def send(self, item: Instruction, tensors: Values, *, busy: bool = False) -> None:
        """Starts the SEND; the tensors are kept until it has ended.

        ``busy``: the rank has something to compute now.
        """
        assert self._transport is not None
        send = self._transport.send_meanwhile if busy else self._transport.send
        key, peer, tag = self._address(item)
        kept = self._sent.setdefault(item, [])
        if item.payload is Kind.F and (key, peer) not in self._announced:
            self._announced.add((key, peer))
            header = self._header(self._specs[key])
            kept.append((self._transport.send(header, peer, tag + _TENSORS - 1), header))
        if item.payload is Kind.B:
            given = tuple(tensor is not None for tensor in tensors)
            told = self._told.get((key, peer))
            if told is None:
                self._told[key, peer] = given
                padded = [*given, *[True] * (_TENSORS - len(given))]
                marks = torch.tensor(padded, dtype=torch.uint8, device=self._device)
                kept.append((self._transport.send(marks, peer, tag + _TENSORS - 1), marks))
            elif told != given and any(
                was and not now for was, now in zip(told, given, strict=True)
            ):
                self.lost.add(item.stage)
        for index, tensor in enumerate(tensors):
            data = self._nothing(key, index) if tensor is None else tensor.contiguous()
            if data.numel():
                kept.append((send(data, peer, tag + index), data))
                sent = -(-data.numel() // self._transport.slices)
                self.bytes_sent += sent * data.element_size()

    def _nothing(self, key: _Key, index: int) -> Tensor:
        """What travels for a gradient that is none, at its place among the boundary's gradients."""
        spec = self._specs[key]
        wanted = [place for place, flag in enumerate(spec.flags) if flag]
        place = wanted[index]
        device = self._place(spec.on_host[place])
        return torch.zeros(spec.shapes[place], dtype=spec.dtypes[place], device=device)

    def _place(self, on_host: bool) -> torch.device:
        return torch.device("cpu") if on_host else self._device

    def release(self, item: Instruction) -> None:
        """Lets go of a SEND that is known to have ended.

        The proof takes receives for posted at their place. With shapes that are new in this pass,
        tensors are posted only when they are used: those sends end with the next pass.
        """
        assert item.peer is not None
        assert item.microbatch is not None
        if self._key(item.stage, item.peer, item.microbatch) not in self._known:
            return
        for handle, _ in self._sent.pop(item, ()):
            handle.wait()

    def finish(self) -> None:
        """Ends a pass: sends of the pass before have ended by now, this one's are kept."""
        self._wait_previous()
        for kept in self._sent.values():
            self._previous.extend(kept)
        self._sent.clear()

    def forget(self) -> None:
        """Lets shapes travel anew with the next messages; all ranks do so between two passes."""
        self._specs.clear()
        self._announced.clear()
        self._awaited.clear()
        self._told.clear()
        self._heard.clear()

    def drain(self) -> None:
        """Waits for everything sent; the peers have posted all receives or will without us."""
        self.finish()
        self._wait_previous()
        if self._transport is not None:
            self._transport.drain()

    def close(self) -> None:
        """Gives back what peers have mapped; drained, and all ranks call it."""
        if self._transport is not None:
            self._transport.close()

    def _wait_previous(self) -> None:
        for handle, _ in self._previous:
            handle.wait()
        self._previous.clear()

    def _key(self, stage: int, peer: int, microbatch: int) -> _Key:
        shapes = self._shapes[microbatch]
        return (stage, peer, shapes) if stage < peer else (peer, stage, shapes)

    def _address(self, item: Instruction) -> tuple[_Key, int, int]:
        """What a message is of, the pipeline rank at its other end, and its first tag."""
        assert self._program is not None
        assert item.peer is not None
        assert item.microbatch is not None
        key = self._key(item.stage, item.peer, item.microbatch)
        peer = self._program.placement.rank_of(item.peer, item.microbatch)
        message = self._boundaries[key[:2]] * self._program.num_microbatches + item.microbatch
        return key, peer, (message * 2 + (item.payload is Kind.B)) * _TENSORS + 1

    def _header(self, spec: _Spec) -> Tensor:
        data = spec.to_bytes()
        if len(data) + 4 > _HEADER_BYTES or len(spec.shapes) >= _TENSORS:
            raise ModelError(
                f"a stage hands on {len(spec.shapes)} tensors; at most {_TENSORS - 1} fit one "
                "boundary. Cut elsewhere with schedule.layers_per_stage."
            )
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        framed = len(data).to_bytes(4, "little") + data
        header[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        return header.to(self._device)

    def _open_header(self, incoming: _Incoming) -> None:
        if incoming.header is None:
            return
        header, handle = incoming.header
        incoming.header = None
        handle.wait()
        data = bytes(header.cpu().numpy().tobytes())
        size = int.from_bytes(data[:4], "little")
        self._specs[incoming.key] = _Spec.from_bytes(data[4 : 4 + size])

    def _post_tensors(self, item: Instruction, incoming: _Incoming) -> None:
        if incoming.arrivals is not None:
            return
        transport = self._transport
        assert transport is not None
        spec = self._specs[incoming.key]
        incoming.arrivals = []
        kinds = zip(spec.shapes, spec.dtypes, spec.flags, spec.on_host, strict=True)
        for shape, dtype, flag, on_host in kinds:
            if item.payload is Kind.F or flag:
                device = self._place(on_host)
                tag = incoming.tag + len(incoming.arrivals)
                incoming.arrivals.append(
                    transport.expect(shape, dtype, device, incoming.peer, tag)
                    if prod(shape)
                    else torch.empty(shape, dtype=dtype, device=device)
                )
