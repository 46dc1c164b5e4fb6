"""Holes: tensors of another stage, known by shape, dtype and device only.

A hole can be carried through the user's Python code like any tensor. It holds no data: operations
on it are answered by ``shape_mode.py`` while a step is replayed, and refused everywhere else. Once
the value arrives, the hole is *filled*: the very object in the user's frames becomes that tensor.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributions
import torch.utils.checkpoint
from torch import Tensor

from strategies.errors import ModelError

# A call, as function modes see it.
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


WHOLE_SHAPE = "_whole_shape"  # attribute of a parameter of which a rank has a share


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a tensor without its data.

    Attributes:
        stride: Strides in elements, one per dimension.
        device: Where the real value lives (never ``meta``, unless the module itself is there).
        requires_grad: Whether a gradient flows into the value.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None) -> Spec:
        """Describes ``tensor``; ``device`` replaces its own one (used for meta tensors)."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device if device is None else device,
            tensor.requires_grad,
        )

    @classmethod
    def of_parameter(cls, parameter: Tensor, device: torch.device | None = None) -> Spec:
        """The same of the whole of a parameter, of which this rank may have a share."""
        spec = cls.of(parameter, device)
        shape = vars(parameter).get(WHOLE_SHAPE)
        if shape is None:
            return spec
        stride = torch.empty(shape, device="meta").stride()
        return replace(spec, shape=shape, stride=tuple(stride))

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A fresh meta tensor of this description; not a leaf where it requires grad."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.requires_grad:
            # In-place operations are allowed on the real value, hence no leaf here.
            with torch.enable_grad():
                return tensor.requires_grad_().clone()
        return tensor

    def zeros(self) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.fill_(0)


# Answered from the shell alone, without any data; ``numel`` and friends also exist in ``torch.``.
_QUESTIONS = """
    size dim ndimension numel nelement stride __len__ is_floating_point is_complex element_size
    is_contiguous __hash__ storage_offset get_device is_signed is_same_size is_inference
    result_type can_cast is_nonzero_size
"""
_PROPERTIES = """
    shape dtype device ndim layout itemsize nbytes is_cuda is_cpu is_meta is_sparse is_mkldnn
    is_xpu is_mps is_xla is_hpu is_maia is_ipu is_vulkan is_mtia is_quantized is_nested
    is_sparse_csr name names output_nr
"""
_DATALESS = frozenset(_QUESTIONS.split())
_DATALESS_PROPERTIES = frozenset(_PROPERTIES.split())


class Hole(Tensor):
    """A value that this stage does not have (yet).

    Attributes:
        spec: Its description.
        value: Number of the value in the probe's record; None outside a probe.
        unit: Index of the unit call that made it, None where made between units.
        parameter: Global name, for holes that stand for a parameter of another rank.
        owner: The shape mode that answers operations which reach the hole below Python.
        left: Attribute of the module in which a step has left the value, which no rank has whole.
    """

    spec: Spec
    value: int | None
    unit: int | None
    parameter: str | None
    owner: Any
    left: str | None
    _meta: Tensor | None

    def __new__(cls, spec: Spec, meta: Tensor | None = None, owner: Any = None) -> Hole:
        hole: Hole = torch.Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=spec.device
        )
        hole.spec = spec
        hole.value = hole.unit = hole.parameter = hole.left = None
        hole.owner = owner
        hole._meta = meta
        return hole

    def shape_tensor(self) -> Tensor:
        """The meta tensor that stands for the value in shape computations."""
        if self._meta is None:
            self._meta = self.spec.meta()
        return self._meta

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<value of another pipeline stage, shape {list(self.spec.shape)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Hole:
        copied = Hole(self.spec)
        copied.parameter, copied.left = self.parameter, self.left
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known, answer = dataless(func, args, kwargs or {})
        if known:
            return answer
        if func is Tensor.detach and args[0].parameter is not None:
            return args[0]  # A layer's own state_dict() asks for it; it is left out there.
        raise _unreachable(func, args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls: type[Hole], func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only code below Python's torch functions (TorchScript, functorch) comes this way.
        for item in args:
            for leaf in item if isinstance(item, list | tuple) else (item,):
                if isinstance(leaf, Hole) and leaf.owner is not None:
                    return leaf.owner.escaped(func, args, kwargs or {})
        raise _unreachable(func, args)


def exchange(first: Tensor, second: Tensor) -> None:
    """Exchanges what two tensor objects are.

    Raises:
        ModelError: If something below Python (an autograd function) keeps one of them.
    """
    try:
        torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ModelError(
            f"{user_line()}: a value that crosses stages is kept by a custom autograd function or "
            f"a weak reference ({error}). Call the function inside a layer with parameters."
        ) from error


def is_question(func: Function) -> bool:
    """Whether a function asks for shape, dtype, device and the like, which need no data."""
    name = func.__name__
    if name == "__get__":
        prop = getattr(getattr(func, "__self__", None), "__name__", "")
        return prop in _DATALESS_PROPERTIES or prop in ("requires_grad", "is_leaf")
    return name in _DATALESS


def dataless(func: Function, args: Args, kwargs: Kwargs) -> tuple[bool, Any]:
    """Answers a question about shape, dtype, device and the like; (False, None) if it is none."""
    name = func.__name__
    if name == "__get__":
        prop = getattr(getattr(func, "__self__", None), "__name__", "")
        first = args[0]
        if prop in _DATALESS_PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return True, func(*args, **kwargs)
        if isinstance(first, Hole):
            if prop == "requires_grad":
                return True, first.spec.requires_grad
            if prop == "is_leaf":
                return True, not first.spec.requires_grad
            if prop == "grad_fn":
                return True, first.shape_tensor().grad_fn
            if prop in ("grad", "_base", "_backward_hooks"):
                return True, None
        elif prop in ("requires_grad", "is_leaf", "grad_fn", "grad"):
            return True, func(*args, **kwargs)
        return False, None
    if name in _DATALESS:
        with torch._C.DisableTorchFunctionSubclass():
            return True, func(*args, **kwargs)
    if name in ("__repr__", "__format__", "__str__"):
        return True, repr(args[0]) if isinstance(args[0], Hole) else func(*args, **kwargs)
    if isinstance(args[0] if args else None, Hole):
        if name == "register_hook":
            return True, torch.utils.hooks.RemovableHandle(OrderedDict())
        if name == "retain_grad":
            return True, None
    return False, None


def _unreachable(func: Function, args: Args) -> ModelError:
    holes = [item for item in args if isinstance(item, Hole)]
    left = next((hole.left for hole in holes if hole.left), None)
    if left is not None:
        return ModelError(
            f"{user_line()}: self.{left} was left by a step with manual optimization, and each "
            "stage and microbatch has a part of it. Log it in the step (self.log takes means and "
            "sums over the batch), or make it anew in the hook."
        )
    name = next((hole.parameter for hole in holes if hole.parameter), None)
    what = f"parameter {name} of another pipeline stage" if name else "a value of another stage"
    return ModelError(
        f"{user_line()}: {getattr(func, '__name__', func)} needs {what}, which is not on this "
        "rank. Keep such work inside the step, between calls of layers, or in the stage's own "
        "layers; vmap and custom C++ operations on values of several stages cannot be cut: use "
        "pp=1 for them."
    )


# -- where in the user's code we are: lines for messages, checkpoint regions for cuts --------------

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_MODELS = str(Path(__file__).parents[1])
_OURS = str(Path(__file__).parents[2]) + "/"
_FOLDER = Path(torch.distributions.__file__).parent
_DISTRIBUTIONS = frozenset(
    str(_FOLDER / f"{name}.py")
    for name in ("distribution", "constraints", "continuous_bernoulli", "geometric")
)
_CHECKS = frozenset({"__init__", "_validate_sample", "check"})
_LIBRARY = sysconfig.get_paths()["stdlib"]


def user_line() -> str:
    """``file:line`` of the innermost user frame; a library's own frame if there is none."""
    return _best_line((frame.f_code.co_filename, frame.f_lineno) for frame in _frames())


def error_line(traceback: TracebackType | None) -> str:
    """The same for an exception: the innermost user line of its traceback."""
    places = []
    while traceback is not None:
        places.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _best_line(reversed(places))


def operation_name(func: Function) -> str:
    """Readable name of a torch function; the property's own name for getters such as ``T``."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def checkpoint_region(stop: Any) -> tuple[FrameType | None, bool]:
    """The outermost activation-checkpoint call we are in, and whether it is a reentrant one.

    ``stop`` is the code object of the frame at which to stop looking outwards.
    """
    region: FrameType | None = None
    reentrant = False
    for frame in _frames():
        if frame.f_code is stop:
            break
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            if frame.f_code.co_name == "checkpoint":
                region = frame
            reentrant = reentrant or frame.f_code.co_qualname == "CheckpointFunction.forward"
    return region, reentrant


def checks_arguments() -> bool:
    """Whether ``torch.distributions`` is asking if the values that it was given are valid."""
    for frame in _frames():
        code = frame.f_code
        if not code.co_filename.startswith(_MODELS):
            return code.co_filename in _DISTRIBUTIONS and code.co_name in _CHECKS
    return False


def reads_gradient() -> bool:
    """Whether a gradient is looked at for itself, not to move a module to another device."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(_MODELS):
            return frame.f_code is not torch.nn.Module._apply.__code__
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _best_line(places: Iterator[tuple[str, int]]) -> str:
    fallback = "unknown line"
    for file, line in places:
        if file.startswith(("<", _OURS)):
            continue
        if not file.startswith(_LIBRARY) and "site-packages" not in file:
            return f"{file}:{line}"
        if fallback == "unknown line" and "/torch/" not in file and "/lightning/" not in file:
            fallback = f"{file}:{line}"
    return fallback
