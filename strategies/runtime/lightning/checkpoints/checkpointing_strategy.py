"""The state of a run, in and out: each rank's part under the names of the uncut module."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.errors import CheckpointError, NotFiniteError
from strategies.heartbeat import Heartbeat, Phase
from strategies.manifest import NOT_FINITE, committed, read_manifest
from strategies.models.unit_model import HasUnits
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine
from strategies.runtime.lightning.checkpoints import stock_file
from strategies.runtime.lightning.checkpoints.known_checkpoints import (
    KnownCheckpoints,
    LastingState,
    first_problem,
)
from strategies.runtime.lightning.checkpoints.rank_folder import (
    DATA_HYPER_PARAMETERS,
    configs_in,
    is_plain,
    layout_of,
    load,
    load_state_dict,
    name_optimizer_state,
    random_state,
    save,
    set_random_state,
    without_configs,
)
from strategies.runtime.lightning.checkpoints.stock_file import (
    CONFIGS,
    HYPER_PARAMETERS,
    RANDOM,
    Order,
    boxed,
)
from strategies.runtime.lightning.checkpoints.whole_state import (
    StateOnSight,
    WholeModule,
    bring_together,
    fits,
    has_unseen,
    without_sights,
)
from strategies.runtime.lightning.hooks.parameter_hooks import ParameterHooks
from strategies.runtime.lightning.ranks_strategy import RanksStrategy
from strategies.runtime.messages.exchange import Exchange, everybody
from strategies.runtime.messages.fingerprint import (
    checksums,
    digest,
    odd_ones,
    rates,
    tell_odd_ones,
    tell_odd_rates,
)
from strategies.runtime.storage.commit import Saver
from strategies.runtime.storage.share_pieces import Shares
from strategies.runtime.update.main_optimizer import MainOptimizer

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
        self._loaded = Path()  # what has been loaded last
        self.from_file = False  # whether what has been loaded last is a file
        self._loaded_whole = False  # and whether each rank has all of it
        self._fits_rank_0: bool | None = None  # whether one rank can have all state
        self._told_objects = False
        self._orders: list[Order] | None = None  # as ``configure_optimizers()`` has said
        self._hooks: ParameterHooks | None = None
        self._begun = time.time()
        self._sight: StateOnSight | None = None  # what hooks find in a checkpoint being made
        self._parts: dict[str, Any] = {}  # this rank's of its state
        self._alike: frozenset[str] = frozenset()  # rates that all ranks have begun with

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
        state: Any = self.lightning_module_state_dict()
        state = without_sights(state, None)
        where, experts = self.coordinates, self.engine.model.experts
        if where.dp_rank > 0:
            first = where.holds_first
            state = {n: value for n, value in state.items() if first and n in experts}
        found = bring_together(state, everywhere=everywhere)
        known = {name: found[name] for name in self.whole.names if name in found}
        return known | found

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

    def _note_cut(self) -> None:
        """The module has been cut, and its buffers are the same on all ranks."""
        names = self.engine.model.parameter_names
        free = owned_state(self.whole.part(), every_parameter=names, owned_parameters=set())
        self.whole.cut(free.keys() - set(names))
        self._lasting = LastingState(self.whole.module)

    def _make_whole(self) -> None:
        """After training, all weights on every rank, if that is asked for and fits; collective."""
        asked, copies = self._options.whole_after, self.num_processes
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
        """A file as stock Lightning's, or a folder with files per rank; collective.

        Either has its name when it is complete. Inside ``fit``, with ``async_save``, a folder is
        written later: it returns when the state is copied. What goes wrong then is raised by the
        next training step, save or load, or at the end of training.

        Raises:
            CheckpointError: It cannot be written.
            NotFiniteError: It would hold what is not finite; not with ``on_nan="ignore"``.
        """
        self._heartbeat.phase(Phase.SAVING)
        self._compare_replicas()
        path = Path(self.broadcast(str(filepath)))
        problem = self._not_finite(moments="optimizer_states" in checkpoint)
        self._refuse_not_finite(path, problem)
        self._checkpoints.add(path, problem)
        for key in (HYPER_PARAMETERS, DATA_HYPER_PARAMETERS):
            if key in checkpoint:
                configs = configs_in(checkpoint[key])
                if configs:
                    checkpoint.setdefault(CONFIGS, {})[key] = configs
                checkpoint[key] = without_configs(checkpoint[key])
        for key in ("hparams_type", "datamodule_hparams_type"):
            checkpoint.pop(key, None)  # of omegaconf's containers
        if self._as_file(checkpoint):
            self.saver.finish()
            self._save_file(self._of_hooks(checkpoint, self._seen_whole), path)
        else:
            self._save_folder(self._of_hooks(checkpoint, self._seen_parts), path, problem)
        self._heartbeat.phase(Phase.BETWEEN)

    def _not_finite(self, *, moments: bool = True) -> str | None:
        """What of the state that stays is not finite on any rank, in words; collective."""
        assert self._lasting is not None
        own = self._lasting.problem(self.engine, self.optimizers, moments=moments)
        return first_problem(everybody().everyone, own)

    def _refuse_not_finite(self, path: Path, problem: str | None) -> None:
        """The same on all ranks."""
        if problem is None:
            return
        if self._options.on_nan != "ignore":
            raise NotFiniteError(
                f"step {int(self._trainer.global_step)}: {problem}, so {path} was not written: "
                f"training cannot go on from it. {self._last_checkpoint(skips=False)}"
            )
        if self.is_global_zero:
            _log.warning(
                "%s is not finite: %s. It is written because of trainer.on_nan=ignore; "
                "no run with stop or skip goes on from it.",
                path,
                problem,
            )

    def _of_hooks(
        self, checkpoint: dict[str, Any], plain: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """What hooks have made of a checkpoint, as plain data; collective where they could."""
        sight, self._sight = self._sight, None
        if sight is None:
            return checkpoint
        self._parts = sight.parts
        return plain(checkpoint)

    def _seen_whole(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """For a file: what rank 0 has. Where nobody has looked, each rank has its part."""
        state = checkpoint["state_dict"]
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        unseen, moved = everybody().first_says([has_unseen(state), has_unseen(rest)])
        whole: dict[str, Any] = {}
        if moved:
            found = bring_together(self._first_parts(), everywhere=False)
            whole = {name: found[name] for name in self.whole.names if name in found}
        if unseen:
            state = self._parts
        else:
            state = without_sights(state, whole) if self.is_global_zero else {}
        return {**without_sights(rest, whole), "state_dict": state}

    def _first_parts(self) -> dict[str, Any]:
        return self._parts if self.coordinates.dp_rank == 0 else {}

    def _seen_parts(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """For a folder: of what hooks have made of the whole state, this rank's part."""
        plain: dict[str, Any] = without_sights(checkpoint, None)
        known = set(self.whole.names)
        plain["state_dict"] = {
            name: value
            for name, value in plain["state_dict"].items()
            if name in self._parts or (name not in known and self.is_global_zero)
        }
        return plain

    def _as_file(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether this is to be a file, the same on all ranks; collective when first asked."""
        asked = self._options.checkpoints
        if asked != "auto":
            return asked == "file"
        if isinstance(self.lightning_module, HasUnits):
            return False
        reason = None
        objects = [
            name
            for key in (HYPER_PARAMETERS, DATA_HYPER_PARAMETERS)
            for name, value in checkpoint.get(key, {}).items()
            if not is_plain(value)
        ]
        if self._fits_rank_0 is None:
            # Weights and two values of an optimizer for each.
            enough, figures = fits(3 * self.whole.num_bytes, copies=1)
            self._fits_rank_0 = bool(everybody().first_says(enough))
            reason = None if self._fits_rank_0 else f"a file would take {figures}"
        if objects and not self._told_objects:
            self._told_objects = True
            reason = f"the hyper-parameters {', '.join(objects)} are objects, and no file with such"
            reason += " is loaded here (save_hyperparameters(ignore=[...]) leaves them out)"
        if reason is not None and self.is_global_zero:
            _log.warning(
                "checkpoints are folders: %s. load_from_checkpoint() reads them where strategies "
                "has been imported; PipelineStrategy(checkpoints='file') writes files.",
                reason,
            )
        return self._fits_rank_0 and not objects

    def _save_file(self, checkpoint: dict[str, Any], path: Path) -> None:
        orders = self._stock_orders() if "optimizer_states" in checkpoint else []
        where = self.coordinates
        stock_file.write(
            checkpoint,
            path,
            orders=orders,
            names=self.whole.names,
            first_replica=where.dp_rank == 0,
            own={RANDOM: random_state(), "layout": layout_of(where)},
        )

    def _stock_orders(self) -> list[Order]:
        """The parameters of the optimizers as they are now, in the whole module; collective."""
        if self._hooks is not None:
            found = self._hooks.group_names()
        elif self.coordinates.pp == 1:
            found = self._own_groups()
        else:
            return self._asked_orders()
        aliases = self.whole.aliases
        return [
            [[aliases.get(name, [name]) for name in group] for group in groups] for groups in found
        ]

    def _own_groups(self) -> list[list[list[str]]]:
        """Per optimizer and group the names of what is updated on this rank."""
        assert self.lightning_module is not None
        module = self.lightning_module.named_parameters(remove_duplicate=False)
        names = {id(parameter): name for name, parameter in module}
        names |= {id(p): name for name, p in self.engine.named_parameters().items()}
        return [
            [[names.get(id(p), "") for p in group] for group in main.groups]
            for main in self._updaters()
        ]

    def _updaters(self) -> list[MainOptimizer]:
        return self._main_optimizers or [MainOptimizer.plain(each) for each in self.optimizers]

    def _asked_orders(self) -> list[Order]:
        """Of ranks that have their own parameters alone: as ``configure_optimizers()`` says.

        Asked once, before the first step: later it may say something else. Groups that were added
        since have their parameters in the order of the module.
        """
        if self._orders is None:
            module = self.lightning_module
            assert module is not None
            with self.whole.shown(self.engine.model):
                self._orders = stock_file.stock_orders(module)
        added = [
            groups[len(order) :]
            for groups, order in zip(self._own_groups(), self._orders, strict=True)
        ]
        told = everybody().everyone(added)
        aliases = self.whole.aliases
        orders: list[Order] = []
        for index, order in enumerate(self._orders):
            there = zip(*(theirs[index] for theirs in told), strict=True)
            members = [{name for names in group for name in names} for group in there]
            more = [[aliases[n] for n in self.whole.names if n in group] for group in members]
            orders.append([*order, *more])
        return orders

    def _check_groups(self, *, saves: bool) -> None:
        """Refuses optimizers that a checkpoint could not hold, before the first step; collective.

        Raises:
            CheckpointError: The same on all ranks.
        """
        problem = None
        own = self._own_groups()
        try:
            if saves:
                for optimizer in self.optimizers:
                    name_optimizer_state(optimizer, self.engine.named_parameters())
        except CheckpointError as error:
            problem = str(error)
        asked = self._options.checkpoints
        as_files = asked == "file" or (
            asked == "auto" and not isinstance(self.lightning_module, HasUnits)
        )
        if saves and as_files and self._hooks is None and self.coordinates.pp > 1:
            for groups, order in zip(own, self._asked_orders(), strict=True):
                for names, members in zip(groups, order, strict=True):
                    known = {alias for aliases in members for alias in aliases}
                    for name in names:
                        if name not in known:
                            problem = problem or stock_file.tell_unordered(name)
        problems = [said for said in everybody().everyone(problem) if said is not None]
        if problems:
            raise CheckpointError(problems[0])

    def _save_folder(self, checkpoint: dict[str, Any], path: Path, problem: str | None) -> None:
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
                "begun": self._begun,
                "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
                "parameters": sorted(self.engine.model.parameter_names),
            }
            | ({} if problem is None else {NOT_FINITE: problem}),
        )

    def _compare_replicas(self) -> None:
        """Refuses to keep what replicas have not got alike, or ranks their rates; collective."""
        where = self.coordinates
        self._compare_rates(f"pipeline rank {where.pp_rank}, tp rank {where.tp_rank}")
        if where.dp == 1:
            return
        experts = self.engine.model.experts
        named = self.engine.named_parameters()
        place = f"pipeline rank {where.pp_rank}, tp rank {where.tp_rank}"
        self._compare_copies({n: p for n, p in named.items() if n not in experts}, place)
        if experts:
            place = f"pipeline rank {where.pp_rank}, ep rank {where.ep_rank}"
            self._compare_copies({n: p for n, p in named.items() if n in experts}, place)

    def _compare_rates(self, place: str) -> None:
        """What was alike everywhere at the beginning is so everywhere; else among replicas."""
        found = rates(self.optimizers)
        own = {
            name if name in self._alike else f"{name} on {place}": v for name, v in found.items()
        }
        exchange = everybody()
        gathered = exchange.everyone((exchange.rank, "", own))
        odd = tell_odd_rates(gathered)
        if odd is not None:
            raise CheckpointError(
                f"no checkpoint was written: {odd}. Change rates on every rank alike, and go on "
                "with an earlier checkpoint."
            )

    def _compare_copies(self, parameters: Mapping[str, Tensor], place: str) -> None:
        """Refuses to keep what ranks of one ``place`` have not got alike; collective."""
        where = self.coordinates
        sums = checksums(parameters)
        exchange = everybody()
        found = exchange.everyone((place, where.dp_rank, digest(sums)))
        if not any(odd_ones(found).values()):
            return
        details = exchange.everyone(sums)
        raise CheckpointError(f"no checkpoint was written: {tell_odd_ones(found, details)}")

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
        self._checkpoints.add(path)
        self._loaded = path
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        shares = self._shares({})
        self.from_file = bool(everybody().first_says(committed(path).is_file()))
        self._loaded_whole = self.from_file or self._hook_loads
        if self.from_file:
            return self._load_file(path)
        found = load(
            path,
            exchange=self._exchange(),
            coordinates=self.coordinates,
            state=shares.boxes(self.whole.part()),
            parameters=set(self.engine.model.parameter_names),
            optimized=shares.boxes(self.engine.named_parameters()) if fitting else {},
            strict=self.lightning_module.strict_loading,
            whole=self._loaded_whole,
        )
        if fitting:
            self._go_on_from(committed(path))
        return found

    def _go_on_from(self, path: Path) -> None:
        """Refuses the state of other optimizers; this run is younger than the one it goes on."""
        written = read_manifest(path)["metadata"]
        self._begun = max(self._begun, (written.get("begun") or 0.0) + 1e-3)
        then, now = written.get("optimizers"), [type(each).__name__ for each in self.optimizers]
        if then and then != now:
            raise CheckpointError(
                f"{path} was written with the optimizer {', '.join(then)}, and this module is "
                f"trained by {', '.join(now) or 'none'}: the state of one is of no use to the "
                "other. Use the optimizer it was written with, or train anew."
            )

    def _load_file(self, path: Path) -> dict[str, Any]:
        """A file of stock Lightning's, or one of ours, whole; nothing of it has been read yet."""
        exchange, found, problem = self._exchange(), {}, None
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
            where = self.coordinates
            old = ranks[0]["layout"]
            same = old == layout_of(where)
            source = where.dp_rank % old["dp"] * old["tp"]
            found[RANDOM] = ranks[self.global_rank if same else source][RANDOM]
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.engine.late.settle()  # Learning rate finders put the state back behind a step.
        shares, state = self._shares({}), checkpoint["state_dict"]
        if self._loaded_whole:
            if strict:
                self._check_alike(state)
            wanted = shares.boxes(self.whole.part())
            state = {n: boxed(state[n], box) for n, box in wanted.items() if n in state}
        self.lightning_module.load_state_dict(shares.padded(state), strict=strict)
        self.engine.mains.refresh()

    def _check_alike(self, state: Mapping[str, Any]) -> None:
        """Refuses another model's state, on all ranks alike: hooks may have changed it on some."""
        problem = None
        try:
            self.whole.check(state)
        except CheckpointError as error:
            problem = str(error)
        problems = [said for said in everybody().everyone(problem) if said is not None]
        if problems:
            raise CheckpointError(problems[0])

    @property
    def _hook_loads(self) -> bool:
        """Whether the module's ``on_load_checkpoint`` is to find the whole state."""
        return self._has_sights and is_overridden("on_load_checkpoint", self.lightning_module)

    @property
    def _has_sights(self) -> bool:
        """Whether hooks find the whole state in checkpoints; else this rank's part."""
        return self.coordinates.pp > 1 and self._options.tp == self._options.ep == 1

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            # Its groups of before. Lightning has called this when its state was not loaded yet.
            if isinstance(callback, BaseFinetuning) and callback._restarting:
                callback.on_fit_start(self._trainer, self._trainer.lightning_module)
        named = self.engine.named_parameters()
        shares = self._shares({})
        states = checkpoint["optimizer_states"]
        if self.from_file:
            wanted = shares.boxes(named)
            orders = zip(states, self._stock_orders(), strict=True)
            states = [stock_file.by_names(state, order, wanted) for state, order in orders]
        saved = [shares.padded_optimizer(state, named) for state in states]
        for main, state in zip(self._updaters(), saved, strict=True):
            main.load(state, named)
        # configure_optimizers() may have asked for the number of steps, which makes the loaders
        # before the loops know where they are. They are made again.
        loop: Any = self._trainer.fit_loop
        loop._combined_loader = None
        self._random_state = checkpoint
        self._refuse_ruined(self._loaded)

    def _refuse_ruined(self, path: Path) -> None:
        """Refuses to go on from a state that is not finite; collective."""
        problem = self._not_finite()
        self._checkpoints.add(path, problem)
        if problem is None or self._options.on_nan == "ignore":
            return
        raise CheckpointError(
            f"{path} is not finite: {problem}, and so would be every step after it. Use an earlier "
            "checkpoint, or train anew."
        )

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
