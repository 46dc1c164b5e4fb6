"""A checkpoint read: of any layout, and of stock Lightning, into the parts of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn

from strategies.errors import CheckpointError
from strategies.manifest import committed, read_manifest
from strategies.runtime.lightning.checkpoints import stock_file
from strategies.runtime.lightning.checkpoints.rank_folder import (
    layout_of,
    load,
)
from strategies.runtime.lightning.checkpoints.stock_file import (
    RANDOM,
    boxed,
)
from strategies.runtime.messages.exchange import everybody

if TYPE_CHECKING:
    from strategies.runtime.lightning.checkpoints.checkpointing_strategy import (
        CheckpointingStrategy,
    )


class CheckpointReader:
    """Reads what this rank needs of a checkpoint, and gives it to the model and the optimizers.

    Attributes:
        from_file: Whether what has been read last is a file.
    """

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self.from_file = False
        self._loaded = Path()  # what has been read last
        self._loaded_whole = False  # and whether each rank has all of it

    def read(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """What this rank needs of a checkpoint, verified before anything changes.

        Raises:
            CheckpointError: It is missing, damaged, or of another model.
        """
        self._strategy.saver.finish()
        path = Path(self._strategy.broadcast(str(checkpoint_path)))
        assert self._strategy.lightning_module is not None
        self._strategy._checkpoints.add(path)
        self._loaded = path
        fitting = self._strategy._trainer.state.fn == TrainerFn.FITTING
        shares = self._strategy._shares({})
        self.from_file = bool(everybody().first_says(committed(path).is_file()))
        self._loaded_whole = self.from_file or self._strategy._hook_loads
        if self.from_file:
            return self._load_file(path)
        found = load(
            path,
            exchange=self._strategy._exchange(),
            coordinates=self._strategy.coordinates,
            state=shares.boxes(self._strategy.whole.part()),
            parameters=set(self._strategy.engine.model.parameter_names),
            optimized=shares.boxes(self._strategy.engine.named_parameters()) if fitting else {},
            strict=self._strategy.lightning_module.strict_loading,
            whole=self._loaded_whole,
        )
        if fitting:
            self._go_on_from(committed(path))
        return found

    def _go_on_from(self, path: Path) -> None:
        """Refuses the state of other optimizers; this run is younger than the one it goes on."""
        written = read_manifest(path)["metadata"]
        self._strategy._begun = max(self._strategy._begun, (written.get("begun") or 0.0) + 1e-3)
        then, now = (
            written.get("optimizers"),
            [type(each).__name__ for each in self._strategy.optimizers],
        )
        if then and then != now:
            raise CheckpointError(
                f"{path} was written with the optimizer {', '.join(then)}, and this module is "
                f"trained by {', '.join(now) or 'none'}: the state of one is of no use to the "
                "other. Use the optimizer it was written with, or train anew."
            )

    def _load_file(self, path: Path) -> dict[str, Any]:
        """A file of stock Lightning's, or one of ours, whole; nothing of it has been read yet."""
        exchange, found, problem = self._strategy._exchange(), {}, None
        try:
            found = stock_file.read(path)
        except CheckpointError as error:
            problem = str(error)
        problems = [said for said in exchange.everyone(problem) if said is not None]
        if problems:
            raise CheckpointError(problems[0])
        own = found.pop(stock_file.OWN, {})
        found = stock_file.with_loaders(found, own.get("loaders", []))
        ranks = own.get("ranks", {})
        if ranks:
            where = self._strategy.coordinates
            old = ranks[0]["layout"]
            same = old == layout_of(where)
            source = where.dp_rank % old["dp"] * old["tp"]
            found[RANDOM] = ranks[self._strategy.global_rank if same else source][RANDOM]
        return found

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self._strategy.lightning_module is not None
        # Learning rate finders put the state back behind a step.
        self._strategy.engine.late.settle()
        shares, state = self._strategy._shares({}), checkpoint["state_dict"]
        if self._loaded_whole:
            if strict:
                self._check_alike(state)
            wanted = shares.boxes(self._strategy.whole.part())
            state = {n: boxed(state[n], box) for n, box in wanted.items() if n in state}
        self._strategy.lightning_module.load_state_dict(shares.padded(state), strict=strict)
        self._strategy.engine.mains.refresh()

    def _check_alike(self, state: Mapping[str, Any]) -> None:
        """Refuses another model's state, on all ranks alike: hooks may have changed it on some."""
        problem = None
        try:
            self._strategy.whole.check(state)
        except CheckpointError as error:
            problem = str(error)
        problems = [said for said in everybody().everyone(problem) if said is not None]
        if problems:
            raise CheckpointError(problems[0])

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        for callback in self._strategy._trainer.callbacks:  # type: ignore[attr-defined]
            # Its groups of before. Lightning has called this when its state was not loaded yet.
            if isinstance(callback, BaseFinetuning) and callback._restarting:
                callback.on_fit_start(
                    self._strategy._trainer, self._strategy._trainer.lightning_module
                )
        named = self._strategy.engine.named_parameters()
        shares = self._strategy._shares({})
        states = checkpoint["optimizer_states"]
        if self.from_file:
            wanted = shares.boxes(named)
            orders = zip(states, self._strategy._groups.stock_orders(), strict=True)
            states = [stock_file.by_names(state, order, wanted) for state, order in orders]
        saved = [shares.padded_optimizer(state, named) for state in states]
        for main, state in zip(self._strategy._groups.updaters(), saved, strict=True):
            main.load(state, named)
        # configure_optimizers() may have asked for the number of steps, which makes the loaders
        # before the loops know where they are. They are made again.
        loop: Any = self._strategy._trainer.fit_loop
        loop._combined_loader = None
        self._strategy._random_state = checkpoint
        self._refuse_ruined(self._loaded)

    def _refuse_ruined(self, path: Path) -> None:
        """Refuses to go on from a state that is not finite; collective."""
        problem = self._strategy._not_finite()
        self._strategy._checkpoints.add(path, problem)
        if problem is None or self._strategy._options.on_nan == "ignore":
            return
        raise CheckpointError(
            f"{path} is not finite: {problem}, and so would be every step after it. Use an earlier "
            "checkpoint, or train anew."
        )
