"""The state of a run, in and out: each rank's part under the names of the uncut module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError
from strategies.heartbeat import Phase
from strategies.manifest import MANIFEST
from strategies.plan import Plan
from strategies.runtime.checkpoint import (
    load,
    load_optimizer_state,
    name_optimizer_state,
    owned_state,
    restore_random_state,
    save,
)
from strategies.runtime.engine import Engine
from strategies.runtime.main_optimizer import MainOptimizer
from strategies.runtime.ranks_strategy import RanksStrategy
from strategies.runtime.storage.exchange import Exchange
from strategies.runtime.storage.saver import Saver
from strategies.runtime.tensor_parallel.share_pieces import Shares


class CheckpointingStrategy(RanksStrategy):
    """Lightning's hooks for checkpoints, answered by the parts that ranks hold.

    Args:
        plan: What is run; its schedule's name is written into the manifest.
        metadata: Written there, too.
        async_save: Write checkpoints of a running ``fit`` in a thread.
        ranks: See ``RanksStrategy``.
    """

    def __init__(
        self, plan: Plan, *, metadata: Mapping[str, Any] | None, async_save: bool, **ranks: Any
    ) -> None:
        super().__init__(**ranks)
        self._plan = plan
        self._metadata = dict(metadata or {})
        self._async_save = async_save
        self._engine: Engine | None = None
        self._main_optimizers: list[MainOptimizer] = []
        self._saver: Saver | None = None
        self._checkpoints: set[Path] = set()
        self._random_state: Mapping[str, Any] | None = None

    @property
    def engine(self) -> Engine:
        """The running pipeline; there from ``setup`` on."""
        assert self._engine is not None, "the strategy is set up by Trainer.fit and its kin"
        return self._engine

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Only then is the module cut, and its state can be put where it belongs."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Yes: by parameter names, in ``load_optimizer_state_dict``."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part, under the names of the uncut module."""
        assert self.lightning_module is not None
        self.engine.mains.complete()
        state = owned_state(
            self.lightning_module.state_dict(),
            every_parameter=self.engine.model.parameter_names,
            owned_parameters=set(self.engine.named_parameters()),
        )
        return self._shares(self.engine.holders(share=True)).pieces(state)

    def _shares(self, holders: Mapping[str, tuple[int, ...]]) -> Shares:
        where = self.coordinates
        first = where.dp_rank == 0
        return Shares(self.engine.model.shards, where.tp_rank, holders, first_replica=first)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part, keyed by parameter names instead of positions; collective."""
        named = self.engine.named_parameters()
        # Sharded state has been put together on the first replica.
        holders = {} if self.engine.mains.sharded else self.engine.holders(share=True)
        state = self._named_state(optimizer, named)
        return self._shares(holders).optimizer_pieces(state, named)

    def _named_state(self, optimizer: Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Any]:
        for main in self._main_optimizers:
            if main.optimizer is getattr(optimizer, "optimizer", optimizer):
                return main.named_state(named, group_of=self.engine.owners_group)
        return name_optimizer_state(optimizer, named)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """A folder with files per rank and a manifest; collective, renamed when complete.

        Inside ``fit``, with ``async_save``, it returns when the state is copied. What goes wrong
        later is raised by the next training step, save or load, or at the end of training.

        Raises:
            CheckpointError: The folder cannot be written.
        """
        self._heartbeat.phase(Phase.SAVING)
        path = Path(self.broadcast(str(filepath)))
        self._checkpoints.add(path.absolute())
        state = self._trainer.state
        holders = self.engine.holders()
        running = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        save(
            self.saver,
            checkpoint,
            path,
            coordinates=self.coordinates,
            holders=holders,
            # Sharded state has been put together on the first replica.
            optimizer_holders={} if self.engine.mains.sharded else holders,
            in_thread=self._async_save and running,
            metadata=self._metadata
            | {
                "schedule": self._plan.schedule,
                "seed": self.engine.options.seed,
                "step": checkpoint.get("global_step"),
                "parameters": sorted(self.engine.model.parameter_names),
            },
        )
        self._heartbeat.phase(Phase.BETWEEN)

    @property
    def saver(self) -> Saver:
        """Writes this rank's part of every checkpoint."""
        if self._saver is None:
            self._saver = Saver(self._exchange())
        return self._saver

    def _exchange(self) -> Exchange:
        everybody = tuple(range(self.world_size))
        return Exchange(self.engine.communicators.get("checkpoint", everybody))

    def has_checkpoint(self, filepath: str | Path) -> bool:
        """Whether this run has loaded it, or written it, or is writing it."""
        return Path(filepath).absolute() in self._checkpoints

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What this rank needs of a checkpoint, verified before anything changes.

        Raises:
            CheckpointError: It is missing, damaged, or of another model.
        """
        self.saver.finish()
        path = Path(self.broadcast(str(checkpoint_path)))
        assert self.lightning_module is not None
        self._checkpoints.add(path.absolute())
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        shares = self._shares({})
        return load(
            path,
            exchange=self._exchange(),
            coordinates=self.coordinates,
            state=shares.boxes(self.lightning_module.state_dict()),
            parameters=set(self.engine.model.parameter_names),
            optimized=shares.boxes(self.engine.named_parameters()) if fitting else {},
            strict=self.lightning_module.strict_loading,
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this rank's names."""
        assert self.lightning_module is not None
        state = self._shares({}).padded(checkpoint["state_dict"])
        self.lightning_module.load_state_dict(state, strict=strict)
        self.engine.mains.refresh()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of this rank's parameters, by name."""
        named = self.engine.named_parameters()
        shares = self._shares({})
        saved = [shares.padded_optimizer(state, named) for state in checkpoint["optimizer_states"]]
        if self._main_optimizers:
            for main, state in zip(self._main_optimizers, saved, strict=True):
                main.load(state, named)
        else:
            for optimizer, state in zip(self.optimizers, saved, strict=True):
                load_optimizer_state(optimizer, state, named)
        # configure_optimizers() may have asked for the number of steps, which makes the loaders
        # before the loops know where they are. They are made again.
        loop: Any = self._trainer.fit_loop
        loop._combined_loader = None
        self._random_state = checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Deletes a whole folder, once, and not before the one being written is committed."""
        self._checkpoints.discard(Path(filepath).absolute())
        if self.is_global_zero:
            self.saver.remove(Path(filepath))

    def _restore_random_state(self) -> None:
        """Once: the generators of the checkpoint that was loaded."""
        if self._random_state is not None:
            restore_random_state(self._random_state)
            self._random_state = None

    def _last_checkpoint(self) -> str:
        """Where to go on from after a step that could not be applied, in a sentence."""
        skip = "trainer.on_nan=skip leaves such steps out and goes on"
        try:
            self.saver.finish()
        except CheckpointError as error:
            return f"The last checkpoint failed, too: {error} Try a smaller rate; {skip}."
        there = [path for path in self._checkpoints if (path / MANIFEST).is_file()]
        if not there:
            return f"No checkpoint has been written. Try a smaller rate; {skip}."
        newest = max(there, key=lambda path: (path / MANIFEST).stat().st_mtime)
        return (
            f"The last checkpoint is {newest}: trainer.resume={newest} goes on from there, say "
            f"with a smaller rate; {skip}."
        )
