"""A device without a device: streams, events and copies with CUDA's promises and no others.

    with emulated_device() as device: ...

Inside, ``torch.device("cuda")`` is a place whose tensors say that they are on it. Work given to it
is only written down, and done when somebody waits: for an event, a stream, the device, or a number
(``float``, ``cpu``, a copy that blocks). What has not been done reads as NaN, or as nonsense in
types without NaN: in the device's own new memory, and in host memory that an asynchronous copy is
on its way to. A copy to the device reads its source when it is done, not when it is asked for. So
whoever forgets to wait gets NaN, and not only when the device happens to be late.

The kernels are the host's, so results are those of the host bit for bit. What it does not show:
speed, memory, random numbers on the device, NCCL. Gloo reduces and broadcasts the device's tensors
as it does a GPU's: through the host, on a stream of its own, nonsense until waited for.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
# The device's clock has nothing to do with the host's.
_CLOCK_AHEAD_S = 1e6


class Stream:
    """Work in order; done when somebody waits for it."""

    def __init__(self, device: object = None) -> None:
        self._left: deque[Callable[[], object]] = deque()
        self.given = self._done = 0
        self.done_by: Counter[int] = Counter()  # By the thread that has waited for it.
        self._lock = threading.RLock()

    def give(self, work: Callable[[], object]) -> int:
        """Returns the work's number, for ``advance``."""
        with self._lock:
            self._left.append(work)
            self.given += 1
            return self.given

    def advance(self, number: int) -> None:
        """Does everything up to that work, in the calling thread."""
        with self._lock, torch.no_grad():
            while self._done < number:
                self._done += 1
                self.done_by[threading.get_ident()] += 1
                self._left.popleft()()

    def synchronize(self) -> None:
        self.advance(self.given)

    def wait_event(self, event: Event) -> None:
        self.give(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """A place in a stream, and when the device came by."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timed = enable_timing
        self._stream: Stream | None = None
        self._number = 0
        self._passed: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._passed = None
        self._number = self._stream.give(self._pass)

    def _pass(self) -> None:
        self._passed = time.perf_counter() + _CLOCK_AHEAD_S

    def query(self) -> bool:
        return self._stream is None or self._passed is not None

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.advance(self._number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds; as on CUDA nothing is waited for."""
        if not self._timed or not later._timed:
            raise ValueError("both events must be made with enable_timing=True")
        if self._passed is None or later._passed is None:
            raise RuntimeError("device not ready: an event has not been passed yet")
        return (later._passed - self._passed) * 1e3


class EmulatedDevice:
    """What has been asked of it.

    Attributes:
        default: The stream of whoever has chosen none; all threads share it.
        pinned_bytes: Host memory asked for with ``pin_memory=True``, or registered.
        peak_bytes: What its allocator calls its peak.
        chosen_by: Names of the threads that have made it theirs.
    """

    def __init__(self) -> None:
        self.default = Stream()
        self.pinned_bytes = 0
        self.peak_bytes = 1
        self.registered: dict[int, int] = {}  # Host memory, from and to.
        self.chosen_by: set[str] = set()
        self.groups: dict[object, ThreadPoolExecutor] = {}
        self._chosen = threading.local()

    @property
    def current(self) -> Stream:
        return getattr(self._chosen, "stream", None) or self.default

    def forget_peak(self, _: object = None) -> None:
        self.peak_bytes = 1

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self._chosen.stream = stream or before
        try:
            yield
        finally:
            self._chosen.stream = before


_devices: list[EmulatedDevice] = []


def current_stream(device: object = None) -> Stream:
    return _devices[-1].current


@contextlib.contextmanager
def emulated_device() -> Iterator[EmulatedDevice]:
    """A new device, in this thread; other threads may wait for its events."""
    device = EmulatedDevice()
    _devices.append(device)
    try:
        with (
            mock.patch.multiple(
                torch.cuda,
                Stream=Stream,
                Event=Event,
                current_stream=current_stream,
                stream=device.stream,
                cudart=lambda: _Runtime(device),
                set_device=lambda _: device.chosen_by.add(threading.current_thread().name),
                synchronize=lambda _=None: device.default.synchronize(),
                max_memory_allocated=lambda _=None: device.peak_bytes,
                init=lambda: None,
                reset_peak_memory_stats=device.forget_peak,
            ),
            mock.patch.object(dist, "all_reduce", partial(_collective, dist.all_reduce)),
            mock.patch.object(dist, "broadcast", partial(_collective, dist.broadcast)),
            _Door(device),
        ):
            yield device
    finally:
        for calls in device.groups.values():
            calls.shutdown()
        _devices.pop()


class _Runtime:
    """CUDA's own functions, as torch hands them on: codes in place of exceptions."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        registered = self._device.registered
        if not size or any(
            low < pointer + size and pointer < high for low, high in registered.items()
        ):
            return 712 if size else 1
        registered[pointer] = pointer + size
        self._device.pinned_bytes += size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        if pointer not in self._device.registered:
            return 713
        self._device.pinned_bytes -= self._device.registered.pop(pointer) - pointer
        return 0


@contextlib.contextmanager
def trainer_on_it() -> Iterator[EmulatedDevice]:
    """``emulated_device`` for a Trainer with accelerator=cpu, whose ranks then believe in it."""
    # Here: Lightning takes seconds, and most users of this file need none of it.
    from lightning.pytorch.accelerators import CPUAccelerator

    from strategies.runtime.lightning.ranks_strategy import RanksStrategy

    with (
        emulated_device() as device,
        mock.patch.object(RanksStrategy, "root_device", CUDA),
        mock.patch.object(CPUAccelerator, "setup_device", lambda *_: None),
    ):
        yield device


def nonsense(tensor: Tensor) -> Tensor:
    """Fills it with what nobody could take for a result."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(math.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


class DeviceTensor(Tensor):
    """A tensor on the device.

    Attributes:
        memory: What is there; nonsense until the device has come to it.
    """

    memory: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        # For C++ it is on the CPU, so that autograd needs no driver.
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device="cpu",
        )
        made.memory = memory
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def data(self) -> DeviceTensor:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, other: DeviceTensor) -> None:
        assert self.shape == other.shape
        self.memory = other.memory

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    # Modules swap parameters of such types when they move, instead of setting their data.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["memory"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> DeviceTensor:
        return DeviceTensor(inner["memory"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k not in ("device", "pin_memory")}
        if func is aten.copy_.default and not all(isinstance(t, cls) for t in args[:2]):
            return _copy(*args, **kwargs)
        if func in _READS:
            current_stream().synchronize()
            return func(*_memory(args), **_memory(kwargs))
        returns, writes = _aliases(func)
        if not writes and any(returns):
            out = func(*_memory(args), **_memory(kwargs))  # A view: no memory is looked at.
            out = _mapped(Tensor, DeviceTensor, out)
        else:
            inputs = _memory(_mapped(Tensor, _at_once, args))
            options = _memory(_mapped(Tensor, _at_once, kwargs))
            if writes:
                assert torch.Tag.inplace_view not in func.tags, f"{func} is not emulated"
                assert all(r is not None and r.is_write for r in returns), f"{func}: not emulated"
                current_stream().give(lambda: func(*inputs, **options))
                if not returns:
                    return None
                out = tuple(args[0] for _ in returns) if len(returns) > 1 else args[0]
            else:
                out = _later(func, inputs, options)
        return return_and_correct_aliasing(func, args, kwargs, out)


@functools.cache
def _aliases(func: Any) -> tuple[list[Any], bool]:
    """What an operator's results are views of, and whether it writes to an argument."""
    writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
    return [value.alias_info for value in func._schema.returns], writes


def _mapped(kind: type, change: Callable[[Any], Any], values: Any) -> Any:
    """torch's ``tree_map_only`` for what operators take and give: a third of a step's time."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, tuple | list):
        return type(values)(_mapped(kind, change, value) for value in values)
    if isinstance(values, dict):
        return {name: _mapped(kind, change, value) for name, value in values.items()}
    return values


def _memory(values: Any) -> Any:
    return _mapped(DeviceTensor, lambda t: t.memory, values)


def _at_once(tensor: Tensor) -> Tensor:
    """Host scalars go with the kernel, as they are when it is started; nothing else may."""
    if isinstance(tensor, DeviceTensor):
        return tensor
    if tensor.dim():
        raise RuntimeError("expected all tensors to be on the same device, found cuda:0 and cpu")
    return tensor.clone()


_SHAPES: dict[Any, Any] = {}  # What an operator makes of what: asking torch takes half of a step.


def _key(values: Any) -> Any:
    """Of equal keys an operator makes tensors of equal shapes, strides and types."""
    if isinstance(values, Tensor):
        return values.shape, values.stride(), values.dtype
    if isinstance(values, tuple | list):
        return tuple(map(_key, values))
    if isinstance(values, dict):
        return tuple((name, _key(value)) for name, value in values.items())
    return type(values), values


def _later(func: Any, inputs: Any, options: Any) -> Any:
    """New tensors, filled when the stream comes to it."""

    def shape(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def allocate(tensor: Tensor) -> Tensor:
        return nonsense(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))

    key = (func, _key(inputs), _key(options))
    if (described := _SHAPES.get(key)) is None:
        metas = _mapped(Tensor, shape, (inputs, options))
        described = func(*metas[0], **metas[1])
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            # In torch 2.11 the shape of the second has float32, whatever the kernel writes.
            described = (
                described[0],
                described[1].to(torch.promote_types(torch.float32, described[0].dtype)),
            )
        _SHAPES[key] = described
    made = _mapped(Tensor, allocate, described)

    def work() -> None:
        found = func(*inputs, **options)
        several = isinstance(made, list | tuple)
        for target, value in zip(made, found, strict=True) if several else [(made, found)]:
            if isinstance(target, Tensor):
                target.copy_(value)

    current_stream().give(work)
    return _mapped(Tensor, DeviceTensor, made)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between the device and the host."""
    if not isinstance(target, DeviceTensor):
        nonsense(target.detach())
    there, here = _memory((target, source))
    current_stream().give(lambda: there.detach().copy_(here.detach()))
    if not non_blocking:
        current_stream().synchronize()
    return target


class Collective:
    """What gloo does with a GPU's tensor; the result lands when somebody waits for it."""

    def __init__(self, call: Callable[[Tensor], object], tensor: DeviceTensor, calls: Any) -> None:
        self._side = Stream()
        self._side.wait_stream(current_stream())
        memory = tensor.memory.detach()
        host = nonsense(torch.empty_like(memory))
        self._side.give(lambda: host.copy_(memory))
        self._side.give(lambda: nonsense(memory))

        def run() -> None:
            self._side.synchronize()
            call(host)

        self._ended: Future[None] = calls.submit(run)
        self._landing: Callable[[], object] = lambda: memory.copy_(host)

    def is_completed(self) -> bool:
        return self._ended.done()

    def get_future(self) -> Future[None]:
        return self._ended

    def wait(self) -> None:
        self._ended.result()
        self._side.give(self._landing)
        current_stream().wait_stream(self._side)


def _collective(
    call: Callable[..., Any], tensor: Tensor, *args: Any, async_op: bool = False, **options: Any
) -> Any:
    if not isinstance(tensor, DeviceTensor):
        return call(tensor, *args, async_op=async_op, **options)
    # Members of a group call in one order; another group's may differ.
    calls = _devices[-1].groups.setdefault(options.get("group"), ThreadPoolExecutor(1))
    work = Collective(lambda host: call(host, *args, **options), tensor, calls)
    if async_op:
        return work
    work.wait()
    return None


class _Door(TorchFunctionMode):
    """What C++ would refuse before anybody is asked: other devices' names, and pinned memory."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            return _moved(*args, **kwargs)
        if func is Tensor.cpu:
            return _moved(args[0], "cpu")
        if func is Tensor.cuda:
            return _moved(args[0], CUDA)
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            return _moved(args[0], "cpu").tolist()
        pinned = kwargs.pop("pin_memory", False)
        place = kwargs.get("device")
        if place is not None and torch.device(place).type == "cuda":
            del kwargs["device"]
            made = func(*args, **kwargs)
            if not isinstance(made, DeviceTensor):
                needs = made.requires_grad
                made = DeviceTensor(made.detach()).requires_grad_(needs)
            return made
        made = func(*args, **kwargs)
        if pinned:
            self._device.pinned_bytes += nonsense(made).nbytes
        return made


def _moved(tensor: Tensor, *words: Any, copy: bool = False, **options: Any) -> Tensor:
    """``tensor.to``."""
    if words and isinstance(words[0], Tensor):
        options |= {"device": words[0].device, "dtype": words[0].dtype}
        words = words[1:]
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*words, **options)
    dtype = dtype or tensor.dtype
    if (
        device is None
        or device.type == tensor.device.type
        or "meta"
        in (
            device.type,
            tensor.device.type,
        )
    ):
        target = {"device": device} if device is not None and device.type == "meta" else {}
        return Tensor.to(tensor, dtype=dtype, copy=copy, memory_format=layout, **target)
    assert not (tensor.requires_grad and torch.is_grad_enabled()), "not emulated"
    tensor = Tensor.to(tensor.detach(), dtype=dtype)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    if device.type == "cuda":
        made = DeviceTensor(nonsense(made))
    return made.copy_(tensor, non_blocking=non_blocking)
