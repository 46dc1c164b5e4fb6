"""Runs a step whole and cut on the same numbers, and compares, before anything is trained.

A plan is made from shapes. What a module does with its shares (a sum over the cut dimension, a
shape that it has written down) shows in numbers: so the loss and all gradients of one real
microbatch are computed on the uncut module and, by all ranks together, on the cut one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.errors import ModelError
from strategies.models.nested import tensors
from strategies.models.replay.hole import error_line, user_line
from strategies.models.tensor_parallel.share_values import WholeShapeValues
from strategies.models.tensor_parallel.tensor_ranks import Shard, TensorRanks

_SEED = 20_211


@dataclass
class StepNumbers:
    """What one run of a step came to.

    Attributes:
        loss: None where the step gives none.
        outputs: Name of a layer -> its first output, on the host, in order of the calls.
        gradients: By the first name of a parameter.
        foreign: Parameters that other code than their own layer's used -> where.
    """

    loss: Tensor | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)


def run_step(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    around: AbstractContextManager[Any],
    whole: Callable[[Any], Any],
    uses: bool = False,
) -> StepNumbers:
    """Forward and backward of one step, with random numbers of its own.

    Args:
        module: Its parameters have no gradients; nor afterwards.
        step: Calls it; gives the loss, a dict with it, or something else.
        around: Where forward and backward run.
        whole: Makes whole values of shares.
        uses: Whether to note who uses which parameters.
    """
    numbers = StepNumbers()
    parameters = dict(module.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    noted = _Uses(module, numbers.foreign)
    torch.manual_seed(_SEED)
    try:
        with around, watched(module, numbers, whole):
            if uses:
                with noted.watching():
                    result = step()
            else:
                result = step()
            loss = result.get("loss") if isinstance(result, dict) else result
            if isinstance(loss, Tensor):
                loss = whole(loss)
                if loss.numel() == 1 and loss.requires_grad and torch.is_grad_enabled():
                    loss.backward()
                numbers.loss = loss.detach().clone()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                numbers.gradients[name] = parameter.grad.detach()
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    return numbers


@contextmanager
def watched(
    module: nn.Module, numbers: StepNumbers, whole: Callable[[Any], Any], prefix: str = ""
) -> Iterator[None]:
    """Keeps the outputs of all layers inside a module, whole ones."""
    handles = [
        child.register_forward_hook(_keeper(numbers, name, whole))
        for name, child in module.named_modules(prefix=prefix)
        if child is not module
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(numbers: StepNumbers, name: str, whole: Callable[[Any], Any]) -> Callable[..., None]:
    def keep(layer: nn.Module, args: Any, output: Any) -> None:
        found = tensors(output)
        if found and name not in numbers.outputs:
            numbers.outputs[name] = whole(found[0].detach()).clone()

    return keep


class _Uses(TorchFunctionMode):
    """Notes parameters that are used outside of the forward of the layer that has them."""

    def __init__(self, module: nn.Module, foreign: dict[str, str]) -> None:
        super().__init__()
        self._module = module
        self._foreign = foreign
        self._running: list[nn.Module] = []
        self._owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, child in module.named_modules():
            for own, parameter in child._parameters.items():
                name = f"{path}.{own}" if path else own
                self._owners.setdefault(id(parameter), []).append((name, child))

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for child in self._module.modules():
            handles.append(child.register_forward_pre_hook(self._begin))
            handles.append(child.register_forward_hook(self._end, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, child: nn.Module, args: Any) -> None:
        self._running.append(child)

    def _end(self, child: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        for leaf in tensors((args, kwargs)) if name != "__get__" else ():
            owners = self._owners.get(id(leaf), [])
            running = self._running[-1] if self._running else None
            if not any(owner is running for _, owner in owners):
                for owned, _ in owners:
                    self._foreign.setdefault(owned, user_line())
        return func(*args, **kwargs)


# Libraries compute norms and rotary tables in 32 bits whatever the weights are.
_TOLERANCES = {torch.float64: 2e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 6e-2}


def compare_steps(
    whole: StepNumbers,
    cut: StepNumbers,
    shards: Mapping[str, Shard],
    rank: int,
    *,
    kind: torch.dtype,
) -> str | None:
    """Where two runs differ by more than their precision, in words; None if nowhere."""
    tolerance = _TOLERANCES.get(kind, 1e-4)
    for name, output in whole.outputs.items():
        other = cut.outputs.get(name)
        if other is None:
            continue
        if other.shape != output.shape:
            return f"{name} gives {list(other.shape)} instead of {list(output.shape)}"
        if (error := _error(output, other)) > tolerance:
            return f"what {name} gives differs by {error:.1e} of its size"
    if whole.loss is not None and cut.loss is not None and cut.loss.numel() == 1:
        error = _error(whole.loss, cut.loss)
        if error > tolerance:
            return f"the loss is {float(cut.loss):.6g} instead of {float(whole.loss):.6g}"
    largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0)
    for name, gradient in whole.gradients.items():
        other = cut.gradients.get(name)
        expected = shards[name].local(gradient, rank) if name in shards else gradient
        if other is None or other.shape != expected.shape:
            return f"{name} has no gradient of its shape"
        scale = max(float(gradient.abs().max()), 1e-3 * largest) if gradient.numel() else 0.0
        difference = float((other - expected).abs().max()) if expected.numel() else 0.0
        if difference > 10 * tolerance * scale:
            return f"the gradient of {name} differs by {difference / scale:.1e} of its size"
    return None


def _error(first: Tensor, second: Tensor) -> float:
    """The largest difference, of the largest value."""
    if not first.numel():
        return 0.0
    if not first.is_floating_point():
        return float(not torch.equal(first, second))
    one, other = first.double(), second.double()
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return float("inf")
    difference = (one - other).masked_fill(~finite, 0).abs().max()
    scale = one.masked_fill(~finite, 0).abs().max()
    return float(difference / scale) if float(scale) > 0 else float(difference)


_NO_BACKWARD = re.compile(r"Operator aten\.(\w+?)_backward\.\w+ does not have a sharding strategy")


def run_with_fallbacks(
    step: Callable[[], StepNumbers],
    values: WholeShapeValues,
    unchanged: Callable[[], AbstractContextManager[Any]],
) -> StepNumbers:
    """The first run of a cut step; what cannot run on shares is noted, and runs on whole values.

    DTensor knows forwards whose backwards it does not know, or which end in shapes that autograd
    refuses: such an operation takes whole values from then on; where it has no name, all do.
    Ranks tell each other how it ended; unless it did so for all in one way, all refuse.

    Raises:
        ModelError: It cannot run on whole values, either, or on some ranks only; names the line.
    """
    ranks = values.ranks
    while True:
        found, problem = _attempt(step, values, unchanged)
        if problem is None:
            _all_alike(ranks, "ran", "")
            assert found is not None
            return found
        if isinstance(problem, ModelError):
            _all_alike(ranks, "refused", str(problem))
            raise problem
        missing = _NO_BACKWARD.search(str(problem))
        name = missing.group(1) if missing else None
        line = error_line(problem.__traceback__)
        what = f"{line} ends with {type(problem).__name__}: {problem}"
        _all_alike(ranks, f"without {name}", what)
        if name is not None and name not in values.unsharded_ops:
            values.unsharded_ops |= {name, f"{name}_"}
        elif not values.unshard_everything:
            values.unshard_everything = True
            rank_zero_info(
                f"tp={ranks.size}: an operation between layers does not run on shares "
                f"({type(problem).__name__}: {' '.join(str(problem).split())[:120]}), so values "
                "are put together behind every layer: right, but slower than priced."
            )
        else:
            raise refusal(ranks.size, what) from problem


def _attempt(
    step: Callable[[], StepNumbers],
    values: WholeShapeValues,
    unchanged: Callable[[], AbstractContextManager[Any]],
) -> tuple[StepNumbers | None, Exception | None]:
    values.noting = True
    try:
        with unchanged():
            return step(), None
    except Exception as error:
        return None, error
    finally:
        values.noting = False


def _all_alike(ranks: TensorRanks, how: str, what: str) -> None:
    """Raises unless a run ended alike for all that share matrices; ``what`` went wrong here.

    Raises:
        ModelError: Some rank ended otherwise, or is still in the run.
    """
    said = ranks.told(f"{how}: {what}")
    if all(answer is not None and answer.partition(":")[0] == how for answer in said):
        return
    for rank, answer in enumerate(said):
        kind, _, wrong = (answer or "").partition(": ")
        if answer is not None and kind != "ran":
            raise refusal(ranks.size, f"on rank {rank} of {ranks.size} alone {wrong}")
    silent = [rank for rank, answer in enumerate(said) if answer is None]
    raise refusal(ranks.size, f"rank {silent[0]} of {ranks.size} does not come to its end")


def refuse_if_different(ranks: TensorRanks, difference: str | None) -> None:
    """Refuses a cut that computes something else on any of the ranks, on all of them.

    Raises:
        ModelError: There is a difference, here or elsewhere.
    """
    said = [answer or "" for answer in ranks.told(difference or "")]
    found = difference or next(filter(None, said), None)
    if found is not None:
        raise refusal(ranks.size, found)


def refusal(tp: int, what: str) -> ModelError:
    return ModelError(
        f"tp={tp}: on the first microbatch the cut module computes other numbers than the whole "
        f"one: {what}. Leave that layer whole by a tensor_parallel_plan() of your own, or use tp=1."
    )
