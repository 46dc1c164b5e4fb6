"""The state of a run, in and out: each rank's part under the names of the uncut module."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError
from strategies.heartbeat import Heartbeat, Phase
from strategies.manifest import MANIFEST, committed, find_damage, read_manifest
from strategies.plan import Options, Plan
from strategies.runtime.lightning.ranks_strategy import RanksStrategy
from strategies.runtime.lightning.whole_state import WholeModule, bring_together, fits
from strategies.runtime.messages.exchange import Exchange
from strategies.runtime.messages.mesh import Coordinates
from strategies.runtime.step.rank_engine import Engine
from strategies.runtime.storage.opened import Opened
from strategies.runtime.storage.part import Part, Piece, flatten, split
from strategies.runtime.storage.saver import Saver
from strategies.runtime.storage.share_pieces import Shares
from strategies.runtime.update.main_optimizer import MainOptimizer

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
        self._checkpoints: set[Path] = set()
        self._random_state: Mapping[str, Any] | None = None
        self._whole: WholeModule | None = None

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
        state = self.lightning_module_state_dict()
        first = self.coordinates.dp_rank == 0
        found = bring_together(state if first else {}, everywhere=everywhere)
        known = {name: found[name] for name in self.whole.names if name in found}
        return known | found

    @property
    def whole(self) -> WholeModule:
        assert self._whole is not None
        return self._whole

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Without what is another rank's; collective."""
        self.engine.mains.complete()
        where = self.coordinates
        own = owned_state(
            state,
            every_parameter=self.engine.model.parameter_names,
            owned_parameters=set(self.engine.named_parameters()),
        )
        foreign = self.whole.foreign(speaks=where.dp_rank == where.tp_rank == 0)
        return {name: value for name, value in own.items() if name not in foreign}

    def _note_cut(self) -> None:
        """The module has been cut, and its buffers are the same on all ranks."""
        names = self.engine.model.parameter_names
        free = owned_state(self.whole.part(), every_parameter=names, owned_parameters=set())
        self.whole.cut(free.keys() - set(names))

    def _make_whole(self) -> None:
        """After training, all weights on every rank, if that is asked for and fits; collective."""
        asked, copies = self._options.whole_after, self.num_processes
        reason = "tp > 1 has cut its matrices" if self._options.tp > 1 else None
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
        return _name_optimizer_state(optimizer, named)

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
            in_thread=self._options.async_save and running,
            metadata=self._metadata
            | {
                "schedule": self._plan.schedule,
                "seed": self.engine.seed,
                "step": checkpoint.get("global_step"),
                "parameters": sorted(self.engine.model.parameter_names),
            },
        )
        self._heartbeat.phase(Phase.BETWEEN)

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
        assert self.lightning_module is not None
        state = self._shares({}).padded(checkpoint["state_dict"])
        self.lightning_module.load_state_dict(state, strict=strict)
        self.engine.mains.refresh()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        named = self.engine.named_parameters()
        shares = self._shares({})
        saved = [shares.padded_optimizer(state, named) for state in checkpoint["optimizer_states"]]
        mains = self._main_optimizers or [MainOptimizer.plain(each) for each in self.optimizers]
        for main, state in zip(mains, saved, strict=True):
            main.load(state, named)
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
        if self._random_state is not None:
            _set_random_state(self._random_state)
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


# -------------------------------------------------------------------------------------- checkpoint
# Names are those of the uncut module and optimizer state is keyed by them, so a checkpoint of one
# layout can be read by another.

_HYPER_PARAMETERS = "hyper_parameters"
_RANDOM = "foldpipe_random_state"


def save(
    saver: Saver,
    checkpoint: Mapping[str, Any],
    path: Path,
    *,
    coordinates: Coordinates,
    holders: Mapping[str, tuple[int, ...]],
    optimizer_holders: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, Any],
    in_thread: bool,
) -> None:
    """Writes all ranks' parts and commits them together; collective.

    Tensors in what Lightning has collected may be plain and whole, DTensors, or pieces of a sharded
    tensor. Per parameter ``holders`` are the global ranks that hold the same of it, and
    ``optimizer_holders`` of its optimizer state; {} where the first replica has it all.

    Raises:
        CheckpointError: Some rank cannot write; nothing is committed then.
    """

    def collect() -> Part:
        part = dict(checkpoint)
        if _HYPER_PARAMETERS in part:
            part[_HYPER_PARAMETERS] = _plain_values(part[_HYPER_PARAMETERS])
        part[_RANDOM] = _random_state()
        return split(
            part,
            rank=coordinates.global_rank(coordinates.pp_rank, coordinates.dp_rank),
            holders=holders,
            optimizer_holders=optimizer_holders,
            first_replica=coordinates.dp_rank == coordinates.tp_rank == 0,
        )

    saver.save(
        path, collect, layout=_layout_of(coordinates), metadata=metadata, in_thread=in_thread
    )


def _layout_of(coordinates: Coordinates) -> dict[str, int]:
    return {"pp": coordinates.pp, "dp": coordinates.dp, "tp": coordinates.tp}


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters as they can be written: an object goes in as its text, for people."""
    plain = {}
    for key, value in values.items():
        try:
            flatten(value)
            plain[key] = value
        except CheckpointError:
            plain[key] = repr(value)
    return plain


def load(
    path: Path,
    *,
    exchange: Exchange,
    coordinates: Coordinates,
    state: Mapping[str, Any],
    parameters: set[str],
    optimized: Mapping[str, Tensor | Piece],
    strict: bool,
) -> dict[str, Any]:
    """What one rank needs of a checkpoint, read when all of it is verified; collective.

    Of the module's ``state`` and the ``optimized`` parameters this rank wants the boxes given. With
    ``strict`` the checkpoint may have neither more nor fewer ``parameters`` than the whole model.

    Raises:
        CheckpointError: It is damaged, or of another model. All ranks raise.
    """
    path = committed(path)
    manifest = _verified(path, exchange)
    opened: Opened | None = None
    try:
        opened = Opened.of(path, manifest)
        problem = opened.misfit(state, parameters=parameters, strict=strict)
    except CheckpointError as error:
        problem = str(error)
    problems = [said for said in exchange.everyone(problem) if said is not None]
    if problems or opened is None:
        raise CheckpointError(problems[0])
    now = _layout_of(coordinates)
    same = all(manifest[degree] == size for degree, size in now.items())
    # In another layout: the replica's own, if there was one. What is drawn from its generators
    # (its data) continues; what is drawn inside the model does not depend on them.
    source = exchange.rank if same else coordinates.dp_rank % manifest["dp"] * manifest["tp"]
    return opened.read(rank=source, state=state, optimized=optimized)


def _verified(path: Path, exchange: Exchange) -> dict[str, Any]:
    """The manifest, when each file's hash has been compared by some rank."""
    manifest: dict[str, Any] | None = None
    problem: str | None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = str(error)
    else:
        problem = find_damage(path, manifest, _own_files(manifest, exchange))
    problems = [said for said in exchange.everyone(problem) if said is not None]
    if problems or manifest is None:
        raise CheckpointError(problems[0])
    return manifest


def _own_files(manifest: Mapping[str, Any], exchange: Exchange) -> set[str]:
    """A rank's share of the files, about as many bytes as any other's."""
    loads = [0] * exchange.size
    own = set()
    files = manifest["files"]
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        rank = loads.index(min(loads))
        loads[rank] += files[name]["bytes"]
        if rank == exchange.rank:
            own.add(name)
    return own


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights of the whole model, for a single process.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    path = committed(path)
    return Opened.of(path, _verified(path, Exchange(None))).whole_model()


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


def _name_optimizer_state(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """An optimizer's state keyed by parameter names."""
    names = {id(parameter): name for name, parameter in named.items()}
    plain = getattr(optimizer, "optimizer", optimizer)
    groups = []
    for group in plain.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise CheckpointError(
                "the optimizer updates a parameter that is no part of the module, so it has no "
                "name in a checkpoint. Build optimizers from self.parameters()."
            )
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [names[id(p)] for p in group["params"]]})
    state = {names[id(parameter)]: dict(entry) for parameter, entry in plain.state.items()}
    return {"state": state, "param_groups": groups}


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(checkpoint: Mapping[str, Any]) -> None:
    state = checkpoint.get(_RANDOM)
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
