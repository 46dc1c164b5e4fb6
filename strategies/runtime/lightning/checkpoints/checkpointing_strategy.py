"""The state of a run, in and out: each rank's part under the names of the uncut module."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from strategies.errors import CheckpointError, ModelError
from strategies.heartbeat import Heartbeat
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.checkpoints.checkpoint_reader import CheckpointReader
from strategies.runtime.lightning.checkpoints.checkpoint_writer import CheckpointWriter
from strategies.runtime.lightning.checkpoints.known_checkpoints import (
    KnownCheckpoints,
    LastingState,
    first_problem,
)
from strategies.runtime.lightning.checkpoints.optimizer_groups import OptimizerGroups
from strategies.runtime.lightning.checkpoints.rank_folder import (
    load_state_dict,
    save,
    set_random_state,
)
from strategies.runtime.lightning.checkpoints.whole_state import (
    LEFT,
    WayBack,
    WholeModule,
    bring_together,
    fits,
    without_sights,
)
from strategies.runtime.lightning.common_end import ApartError, End
from strategies.runtime.lightning.hooks.parameter_hooks import ParameterHooks
from strategies.runtime.lightning.ranks_strategy import RanksStrategy
from strategies.runtime.messages.exchange import Exchange, everybody
from strategies.runtime.messages.meeting import meeting
from strategies.runtime.storage.commit import Saver
from strategies.runtime.storage.share_pieces import Shares
from strategies.runtime.update.main_optimizer import MainOptimizer
from strategies.runtime.update.shared_rates import SharedRates

# Two of them can be imported from here as from where they are.
__all__ = ["CheckpointingStrategy", "load_state_dict", "owned_state", "save"]

_log = logging.getLogger(__name__)


class CheckpointingStrategy(RanksStrategy):
    """Lightning's hooks for checkpoints; ``metadata`` is written into their manifests."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        *,
        metadata: Mapping[str, Any] | None,
        heartbeat: Heartbeat | None,
    ) -> None:
        super().__init__(plan, options, heartbeat=heartbeat)
        self._metadata = dict(metadata or {})
        self._engine: Engine | None = None
        self._main_optimizers: list[MainOptimizer] = []
        self._saver: Saver | None = None
        self._checkpoints = KnownCheckpoints()
        self._lasting: LastingState | None = None
        self._random_state: Mapping[str, Any] | None = None
        self._whole: WholeModule | None = None
        self._hooks: ParameterHooks | None = None
        self._begun = time.time()
        self._groups = OptimizerGroups(self)
        self._writer = CheckpointWriter(self)
        self._reader = CheckpointReader(self)
        self._rates: SharedRates | None = None
        self._updates = 0  # that this rank has applied
        self._updating = False  # whether one has begun, and not ended
        self._met = 0  # in which group of all processes the engine was made

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
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part, under the names of the uncut module; collective."""
        return self._shares(self.engine.holders(share=True)).pieces(self._own(self.whole.part()))

    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Any]:
        """The whole module's ``state_dict``, in host memory; collective.

        From ``setup`` on: in a hook that runs on all ranks, or after training.

        Args:
            everywhere: Whether every rank gets it; else rank 0 does, and the others get {}.
        """
        self._refuse_apart()
        state: Any = self.lightning_module_state_dict()
        state = without_sights(state, None)
        found = bring_together(self._first_replica(state), everywhere=everywhere)
        known = {name: found[name] for name in self.whole.names if name in found}
        return known | found

    def _first_replica(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a state is there once: the first replica's, and others' experts."""
        where, experts = self.coordinates, self.engine.model.experts
        if where.dp_rank == 0:
            return state
        return {n: value for n, value in state.items() if where.holds_first and n in experts}

    @property
    def whole(self) -> WholeModule:
        assert self._whole is not None
        return self._whole

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Without what is another rank's; collective."""
        self.engine.complete()
        where = self.coordinates
        own = owned_state(
            state,
            every_parameter=self.engine.model.parameter_names,
            owned_parameters=set(self.engine.named_parameters()),
        )
        foreign = self.whole.foreign(speaks=where.dp_rank == where.tp_rank == 0)
        return {name: value for name, value in own.items() if name not in foreign}

    def _refuse_apart(self) -> None:
        """Refuses to bring together what ranks hold that have ended their connections.

        Raises:
            ApartError: They have, since one of them has failed; or nothing is there yet.
        """
        if self._engine is None:
            raise ApartError("no checkpoint was written: training had not begun.")
        if self._comes is not None and not self._comes():
            self._world, self._apart = None, "another rank has failed, and does not come to save"
            self._comes = None
            meeting().end()
        if self._apart is not None:
            raise ApartError(
                f"no checkpoint was written: {self._apart}, and the ranks have ended their "
                "connections, so their state cannot be brought together. Earlier checkpoints stay."
            )

    def _settle_saves(self, most_s: float) -> None:
        if self._saver is not None:
            self._saver.wait(most_s)

    def _part(self, trainer: pl.Trainer, end: End) -> None:
        super()._part(trainer, end)
        if self._engine is not None and self._lasting is not None and self._pipeline > 1:
            # Its next Trainer makes it whole: there the ranks have connections again.
            again = partial(self._make_whole_again, self._engine, trainer.global_step)
            vars(self.whole.module)[LEFT] = WayBack(again)

    def _make_whole_again(self, engine: Engine, step: int) -> None:
        """Makes a module whole that a fit has left cut that failed; collective."""
        steps = everybody().everyone(step)
        if engine is not self._engine or self.whole.restored:
            return
        if engine.mains.sharded or engine.late.open:
            return
        if len({*steps}) > 1:
            raise ModelError(
                f"the fit before has failed, and its ranks were at different steps: "
                f"{', '.join(map(str, steps))}. So were the weights of "
                f"{type(self.whole.module).__name__}. Make a new module, and load a checkpoint "
                "into it."
            )
        self._make_whole(asked="auto")

    def _note_cut(self) -> None:
        """The module has been cut, and its buffers are the same on all ranks."""
        names = self.engine.model.parameter_names
        free = owned_state(self.whole.part(), every_parameter=names, owned_parameters=set())
        self.whole.cut(free.keys() - set(names))
        self._lasting = LastingState(self.whole.module)

    def _make_whole(self, *, asked: bool | Literal["auto"]) -> None:
        """After training, all weights on every rank, if that is asked for and fits; collective."""
        copies = self.num_processes
        reason = "ep > 1 has spread its experts" if self._options.ep > 1 else None
        if self._options.tp > 1:
            reason = "tp > 1 has cut its matrices"
        if asked is False or self.whole.restored:
            reason = ""
        elif asked == "auto" and reason is None:
            enough, figures = fits(self.whole.num_bytes, copies=copies)
            if not self.reduce_boolean_decision(enough):
                reason = f"it would take {figures}"
        if reason is None:
            self.whole.restore(self.engine.model, self._own(self.whole.tensors(self.engine)))
            return
        self.whole.leave(cut=not self.whole.restored)
        if reason and self.is_global_zero:
            _log.warning(
                "%s stays cut over the ranks: %s. trainer.strategy.full_state_dict() on all ranks "
                "brings the weights to rank 0; checkpoints have all of them.",
                type(self.lightning_module).__name__,
                reason,
            )

    def _shares(self, holders: Mapping[str, tuple[int, ...]]) -> Shares:
        where = self.coordinates
        first = where.dp_rank == 0
        model = self.engine.model
        return Shares(
            model.shards,
            where.tp_rank,
            holders,
            first_replica=first,
            experts=model.experts,
            expert_rank=where.ep_rank,
            first_experts=where.holds_first,
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part, keyed by parameter names instead of positions; collective."""
        return self._groups.state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """As a file or a folder, see ``CheckpointWriter.write``; collective."""
        self._writer.write(checkpoint, filepath)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self._reader.read(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._reader.load_model(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._reader.load_optimizers(checkpoint)

    @property
    def from_file(self) -> bool:
        """Whether what has been loaded last is a file."""
        return self._reader.from_file

    def _not_finite(self, *, moments: bool = True) -> str | None:
        """What of the state that stays is not finite on any rank, in words; collective."""
        assert self._lasting is not None
        own = self._lasting.problem(self.engine, self.optimizers, moments=moments)
        return first_problem(everybody().everyone, own)

    @property
    def saver(self) -> Saver:
        if self._saver is None:
            self._saver = Saver(self._exchange())
        return self._saver

    def _exchange(self) -> Exchange:
        everybody = tuple(range(self.world_size))
        return Exchange(self.engine.communicators.get("checkpoint", everybody))

    def has_checkpoint(self, filepath: str | Path) -> bool:
        """Whether this run has loaded it, or written it, or is writing it."""
        return Path(filepath) in self._checkpoints

    @property
    def _hook_loads(self) -> bool:
        """Whether the module's ``on_load_checkpoint`` is to find the whole state."""
        where = self.coordinates
        whole = self._has_sights or where.tp == where.ep == 1
        return whole and is_overridden("on_load_checkpoint", self.lightning_module)

    @property
    def _has_sights(self) -> bool:
        """Whether hooks find the whole state in checkpoints; else this rank's part."""
        where = self.coordinates
        if where.tp == where.ep == 1:
            return where.pp > 1
        return where.pp == 1 or self.engine.model.table is not None

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Deletes a whole folder, once, and not before the one being written is committed.

        The last finite one stays where all others are not finite.
        """
        path = Path(filepath)
        if self._checkpoints.keeps(path):
            if self.is_global_zero:
                _log.warning("%s stays: it is the last finite checkpoint.", path)
            return
        self._checkpoints.discard(path)
        if self.is_global_zero:
            self.saver.remove(Path(filepath))

    def _repeat_random_state(self) -> None:
        if self._random_state is not None:
            set_random_state(self._random_state)

    def _restore_random_state(self) -> None:
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def _last_checkpoint(self, *, skips: bool = True) -> str:
        """Where to go on from after a step that could not be applied, in a sentence.

        ``skips``: whether it would help to leave such steps out.
        """
        skip = "; trainer.on_nan=skip leaves such steps out and goes on" if skips else ""
        try:
            self.saver.finish()
        except CheckpointError as error:
            return f"The last checkpoint failed, too: {error} Try a smaller rate{skip}."
        newest = self._checkpoints.last_finite()
        if newest is None:
            return f"No checkpoint has been written. Try a smaller rate{skip}."
        return (
            f"The last checkpoint is {newest}: trainer.resume={newest} goes on from there, say "
            f"with a smaller rate{skip}."
        )


def owned_state(
    state: Mapping[str, Tensor], *, every_parameter: Sequence[str], owned_parameters: set[str]
) -> dict[str, Tensor]:
    """A rank's state without buffers that follow another rank's parameters.

    Such a buffer (a foreign BatchNorm's statistics, say) stays on this rank but goes stale. A
    buffer belongs to the parameters of its module, or of the nearest module around it that has any.

    >>> from torch import zeros
    >>> full = {"a.weight": zeros(1), "a.mean": zeros(1), "b.mean": zeros(1), "scale": zeros(1)}
    >>> list(owned_state(full, every_parameter=["a.weight", "b.weight"],
    ...                  owned_parameters={"a.weight"}))
    ['a.weight', 'a.mean', 'scale']
    """
    parameters = set(every_parameter)

    def stays(name: str) -> bool:
        prefix = name.rpartition(".")[0]
        while prefix:
            around = [known for known in parameters if known.startswith(prefix + ".")]
            if around:
                return any(known in owned_parameters for known in around)
            prefix = prefix.rpartition(".")[0]
        return True

    return {key: value for key, value in state.items() if key in parameters or stays(key)}
