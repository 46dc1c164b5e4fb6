"""Lightning's loop around a pipeline that is not drained between two batches.

A call of ``training_step`` lets one batch in, and ``optimizer_step`` applies the update that is due
then, that of an earlier batch, with the learning rate and the other settings that were there when
its batch entered. So a schedule of learning rates means what it means elsewhere, and N batches that
have entered and left have made N updates.

Whatever looks at weights from outside drains first: what is under way is brought to its end and
every update is applied, by the same path through Lightning (hooks before the step, clipping, the
verdict on what is not finite). Behind an empty pipeline training goes on as at its beginning.

The loss that a call returns is that of its batch. It is known when the last stage has got there,
for which a rank does not wait: the tensor waits when somebody looks into it. What the step has
logged is repeated one call later, but in the same call where loggers write it, so each row has its
own batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from strategies.errors import ModelError, PlanError
from strategies.ir.kinds import Kind
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.engine.rank_passes import PassResult

if TYPE_CHECKING:
    from strategies.runtime.lightning.updating_strategy import UpdatingStrategy

# Of an optimizer's group, what a learning-rate schedule, or somebody's callback, changes.
_Settings = list[dict[str, Any]]


class AwaitedLoss(Tensor):
    """A number that is waited for when somebody looks at it; a scalar, float64."""

    _look: Callable[[], float]
    _place: torch.device

    @staticmethod
    def of(look: Callable[[], float], device: torch.device) -> AwaitedLoss:
        made = torch.zeros((), dtype=torch.float64, device=device).as_subclass(AwaitedLoss)
        made._look = look
        made._place = device
        return made

    def known(self) -> Tensor:
        """The same as a plain tensor; waits."""
        return torch.full((), self._look(), dtype=torch.float64, device=self._place)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Whatever is asked of it waits, but for what Lightning does with every loss."""
        first = args[0] if args else None
        if isinstance(first, AwaitedLoss):
            if func in (Tensor.detach, Tensor.clone) and len(args) == 1 and not kwargs:
                return AwaitedLoss.of(first._look, first._place)
            if func in _DIVISIONS and len(args) == 2 and isinstance(args[1], int):
                look, parts = first._look, args[1]
                return AwaitedLoss.of(lambda: look() / parts, first._place)

        def plain(value: Any) -> Any:
            if isinstance(value, AwaitedLoss):
                return value.known()
            if isinstance(value, list | tuple):
                return type(value)(map(plain, value))
            return value

        named = {name: plain(value) for name, value in (kwargs or {}).items()}
        return func(*map(plain, args), **named)


_DIVISIONS = (Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, operator.truediv)


class StreamLoop:
    """What a strategy keeps between the calls of Lightning's loop."""

    def __init__(self, strategy: UpdatingStrategy, engine: Engine) -> None:
        assert engine.stream is not None
        self._strategy = strategy
        self._engine = engine
        self._stream = engine.stream
        self._settings: dict[int, _Settings] = {}  # by update: as they were when its batch entered
        self._late: list[PassResult] = []  # heard where nothing can be logged
        self._busy = False  # inside a call or an update, where nothing can be drained
        self.alone = False  # whether the batch that is here runs by itself

    def listen(self) -> None:
        """Lets ranks hear of a SIGTERM with a call's other news.

        Lightning broadcasts before each batch whether rank 0 has had one, for which the first rank
        of the pipeline would wait until the last has ended its call: a flush of its own.
        """
        loop: Any = self._strategy._trainer.fit_loop.epoch_loop

        def tell() -> None:
            if self._stream.stops:
                raise SIGTERMException

        loop._broadcast_sigterm_tensor = tell

    # ---------------------------------------------------------------- batches

    def arrives(self, batch: Any, loaders: Any) -> None:
        """A batch is here, and nothing of its step has run; collective where it does not fit."""
        refuse_statistics(self._strategy.lightning_module, self._engine.plan.schedule)
        flushes = self._strategy._trainer.global_step < self._engine.options.synchronous_steps
        if flushes or not self._engine.streams(batch, loaders):
            self.drain()
        self.alone = flushes or not self._engine.streams(batch, loaders)

    def train(self, batch: Any, **options: Any) -> tuple[list[PassResult], Tensor]:
        """Runs a call; what has been heard, to be logged now, and the loss."""
        self._stream.asked_to_stop = bool(self._strategy._trainer.received_sigterm)
        heard, look = self._engine.stream_pass(batch, wait=self._logs_now, **options)
        if self._strategy._accumulating:
            self._engine.end_call()  # Nobody comes to update.

        def loss() -> float:
            value = look()
            if value is None:
                raise ModelError(
                    "training_step returned no loss; skipping a step is not supported. Return a "
                    "loss multiplied by zero to skip."
                )
            return value

        heard = [*self._late, *heard]
        self._late = []
        if any(result.loss is None for result in heard):
            loss()
        return heard, AwaitedLoss.of(loss, self._strategy.root_device)

    @property
    def _logs_now(self) -> bool:
        """Whether loggers write behind this call, or the pipeline is drained in it."""
        connector: Any = self._strategy._trainer._logger_connector
        return bool(connector.should_update_logs) or self.ends_now

    @property
    def ends_now(self) -> bool:
        """Whether something follows this call that looks at weights or at the epoch's logs."""
        trainer: Any = self._strategy._trainer
        loop = trainer.fit_loop
        _, last, _ = self._engine.ends
        if last or trainer.should_stop or self._stream.stops:
            return True
        # By the clock ranks would decide each by itself: validation then drains when it begins.
        by_time = getattr(trainer, "_val_check_time_interval", None) is not None
        return not by_time and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

    # ---------------------------------------------------------------- updates

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], apply: _Apply) -> Any:
        """Lets a batch in by ``closure`` and makes the update that is due, if there is one.

        ``apply`` is Lightning's way through a step: closure, hooks, clipping, update.
        """
        trainer: Any = self._strategy._trainer
        behind = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches
        updates = self._stream.updates_next(behind=behind)
        entered = _settings_of(optimizer)

        def enter() -> Any:
            result = closure()
            self._settings[self._stream.newest_update] = entered
            return result

        self._busy = True
        try:
            result = self._apply(optimizer, enter, apply) if updates else enter()
        finally:
            self._busy = False
        if not updates:
            self._engine.left_out()
            # Torch's schedules warn where they step before their optimizer: the first settings
            # would be lost, but here the update will be made with them.
            own: Any = getattr(optimizer, "optimizer", optimizer)
            own._opt_called = True
        if self.ends_now:
            self.drain(closes=True)
        return result

    def drain(self, *, closes: bool = False) -> bool:
        """Empties the pipeline and applies all updates; collective, and False where it is empty.

        One that accumulates over several batches and lacks some waits for them, and keeps what it
        has; where it ``closes`` there are none to come.
        """
        if self._stream.empty or self._busy:
            return False
        self._busy = True
        try:
            (optimizer,) = self._strategy.optimizers
            for program in self._stream.drains(closes=closes):

                def run(program: Any = program) -> None:
                    self._engine.run_drain(program)
                    self._engine.restore_gradients()

                if any(item.kind is Kind.STEP for row in program.ranks for item in row):
                    self._apply(optimizer, run, self._strategy._apply_update)
                else:
                    self._engine.run_drain(program)
                    self._engine.end_call()
            self._late += self._engine.hear()
            self._engine.drained()
            if self._engine.feedback is not None:
                self._engine.feedback.forget()
            self._settings.clear()
        finally:
            self._busy = False
        return True

    def _apply(self, optimizer: Optimizer, closure: Callable[[], Any], apply: _Apply) -> Any:
        now: _Settings | None = None
        then: _Settings | None = None

        def run() -> Any:
            nonlocal now, then
            result = closure()
            update = self._stream.due_update
            then = None if update is None else self._settings.pop(update, None)
            if then is not None:
                now = _settings_of(optimizer)
                _set(optimizer, then, where=now)
            self._engine.make_room()
            return result

        with self._engine.updating():
            output = apply(optimizer, run)
        if now is not None and then is not None:
            _set(optimizer, now, where=then)
        return output


_Apply = Callable[[Optimizer, Callable[[], Any]], Any]


def _settings_of(optimizer: Optimizer) -> _Settings:
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _set(optimizer: Optimizer, values: _Settings, *, where: _Settings) -> None:
    """Puts settings in place of others; what is no longer like those the optimizer has changed."""
    for group, new, old in zip(optimizer.param_groups, values, where, strict=True):
        for name, value in new.items():
            if name in group and name in old and _same(group[name], old[name]):
                if isinstance(group[name], Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        both = isinstance(first, Tensor) and isinstance(second, Tensor)
        return both and torch.equal(first, second)
    return bool(first == second)


def refuse_stream(trainer: Any, module: Any, name: str) -> None:
    """Refuses what decides about updates where a schedule without a flush does.

    Raises:
        PlanError: The trainer accumulates over batches, say.
        ModelError: The module steps by itself.
    """
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise PlanError(
            f"GradientAccumulationScheduler with schedule={name}: without a flush the program is "
            "made for one number of batches per update, and this callback changes it between "
            "epochs. Try Trainer(accumulate_grad_batches=...), or schedule=1f1b."
        )
    if not module.automatic_optimization:
        raise ModelError(
            f"automatic_optimization=False with schedule={name}: the step decides when weights are "
            "updated, and without a flush the program does. Try schedule=1f1b."
        )


def refuse_statistics(module: Any, name: str) -> None:
    """Refuses norms that change their running statistics now; frozen ones (``eval()``) do not.

    Asked of every batch: hooks freeze them when training begins, and may let them go later.

    Raises:
        ModelError: There is one.
    """
    for path, child in module.named_modules():
        if child.training and getattr(child, "track_running_stats", False):
            raise ModelError(
                f"{path} keeps running statistics, and without a flush (schedule={name}) a "
                "microbatch's backward would find those of later forwards. Try schedule=1f1b, a "
                "norm without them (GroupNorm, LayerNorm), track_running_stats=False, or eval() "
                "on a norm that is frozen."
            )


def refuse_engine(engine: Engine) -> None:
    """Refuses what only the cut model shows; all ranks come to the same.

    Raises:
        ModelError: Ranks would have to apply an update together that they apply one by one.
    """
    plan = engine.plan
    tied = [name for name, stages in engine.model.shared_parameters() if len(stages) > 1]
    if engine.applies_apart and tied:
        raise ModelError(
            f"{tied[0]} is used by several stages, and with schedule=pipedream each stage applies "
            "its gradient at a time of its own. Try schedule.vertical_sync=true, or "
            "schedule=pipedream_2bw."
        )
    if engine.options.backend == "strict" and plan.pp > 1:
        raise ModelError(
            f"backend=strict with schedule={plan.schedule}: a gradient that is sent at the end of "
            "a call is received in the next one, and this backend waits in its sends, while hooks "
            "between two calls may need all ranks. Try backend=gloo."
        )
    if engine.coordinates.exchanges_across:
        raise ModelError(
            f"ep=... with schedule={plan.schedule}: replicas exchange tokens in every forward and "
            "backward, and would have to run theirs in one order. Try ep=1, or schedule=1f1b."
        )
