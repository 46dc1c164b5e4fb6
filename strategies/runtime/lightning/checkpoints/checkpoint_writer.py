"""A checkpoint written: a file as stock Lightning's, or a folder with files per rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn

from strategies.errors import CheckpointError, ModelError, NotFiniteError, name_ranks
from strategies.heartbeat import Phase
from strategies.manifest import NOT_FINITE
from strategies.models.unit_model import HasUnits
from strategies.runtime.lightning.checkpoints import stock_file
from strategies.runtime.lightning.checkpoints.rank_folder import (
    DATA_HYPER_PARAMETERS,
    configs_in,
    is_plain,
    layout_of,
    random_state,
    save,
    without_configs,
)
from strategies.runtime.lightning.checkpoints.stock_file import (
    CONFIGS,
    HYPER_PARAMETERS,
    RANDOM,
)
from strategies.runtime.lightning.checkpoints.whole_state import (
    StateOnSight,
    bring_together,
    fits,
    has_unseen,
    without_sights,
)
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.fingerprint import (
    checksums,
    digest,
    odd_ones,
    rates,
    tell_odd_ones,
    tell_odd_rates,
)
from strategies.runtime.storage.part import Piece

if TYPE_CHECKING:
    from strategies.runtime.lightning.checkpoints.checkpointing_strategy import (
        CheckpointingStrategy,
    )

_log = logging.getLogger(__name__)
_SAVES = "saves"


def networks_in(module: pl.LightningModule) -> list[str]:
    """Names of its hyper-parameters that hold layers of the module itself, with weights."""
    own = {id(layer) for layer in module.modules() if any(True for _ in layer.parameters())}

    def holds(value: Any, depth: int = 3) -> bool:
        if isinstance(value, nn.Module):
            return any(id(layer) in own for layer in value.modules())
        if not depth:
            return False
        if isinstance(value, Mapping):
            return any(holds(item, depth - 1) for item in value.values())
        inside = value if isinstance(value, list | tuple | set) else _attributes(value)
        return any(holds(item, depth - 1) for item in inside)

    return [str(name) for name, value in dict(module.hparams).items() if holds(value)]


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []


class CheckpointWriter:
    """Writes what Lightning has collected on all ranks, if it is finite and the same on replicas.

    Attributes:
        sight: What hooks find in a checkpoint being made.
    """

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self.sight: StateOnSight | None = None
        self._parts: dict[str, Any] = {}  # this rank's of its state
        self._fits_rank_0: bool | None = None  # whether one rank can have all state
        self._told_objects = False

    def write(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        """A file as stock Lightning's, or a folder with files per rank; collective.

        Either has its name when it is complete. Inside ``fit``, with ``async_save``, a folder is
        written later: it returns when the state is copied. What goes wrong then is raised by the
        next training step, save or load, or at the end of training.

        Raises:
            CheckpointError: It cannot be written.
            NotFiniteError: It would hold what is not finite; not with ``on_nan="ignore"``.
        """
        self._strategy._heartbeat.phase(Phase.SAVING)
        self._compare_replicas()
        path = Path(self._strategy.broadcast(str(filepath)))
        problem = self._strategy._not_finite(moments="optimizer_states" in checkpoint)
        self._refuse_not_finite(path, problem)
        self._strategy._checkpoints.add(path, problem)
        for key in (HYPER_PARAMETERS, DATA_HYPER_PARAMETERS):
            if key in checkpoint:
                configs = configs_in(checkpoint[key])
                if configs:
                    checkpoint.setdefault(CONFIGS, {})[key] = configs
                checkpoint[key] = without_configs(checkpoint[key])
        for key in ("hparams_type", "datamodule_hparams_type"):
            checkpoint.pop(key, None)  # of omegaconf's containers
        if self._as_file(checkpoint):
            self._strategy.saver.finish()
            self._save_file(self._of_hooks(checkpoint, self._seen_whole), path)
        else:
            self._save_folder(self._of_hooks(checkpoint, self._seen_parts), path, problem)
        self._strategy._heartbeat.phase(Phase.BETWEEN)

    def refuse_networks(self, module: pl.LightningModule) -> None:
        """Refuses, before a step is made, to write files that would need layers of other ranks.

        Raises:
            ModelError: A hyper-parameter holds them.
        """
        found = networks_in(module) if self._strategy._options.checkpoints == "file" else []
        if found:
            names = ", ".join(found)
            raise ModelError(
                f"PipelineStrategy(checkpoints='file') writes the hyper-parameters, and {names} "
                f"{'holds' if len(found) == 1 else 'hold'} layers of {type(module).__name__}, of "
                f"which each rank has a part. Use self.save_hyperparameters(ignore={found}) and "
                f"load_from_checkpoint(path, {found[0]}=...), or checkpoints='folder', which "
                "notes their class alone."
            )

    def _refuse_not_finite(self, path: Path, problem: str | None) -> None:
        """The same on all ranks."""
        if problem is None:
            return
        if self._strategy._options.on_nan != "ignore":
            step = int(self._strategy._trainer.global_step)
            raise NotFiniteError(
                f"step {step}: {problem}, so {path} was not written: "
                f"training cannot go on from it. {self._strategy._last_checkpoint(skips=False)}"
            )
        if self._strategy.is_global_zero:
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
        sight, self.sight = self.sight, None
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
            found = bring_together(self._strategy._first_replica(self._parts), everywhere=False)
            whole = {name: found[name] for name in self._strategy.whole.names if name in found}
        if unseen:
            state = self._parts
        else:
            state = without_sights(state, whole) if self._strategy.is_global_zero else {}
        return {**without_sights(rest, whole), "state_dict": state}

    def _seen_parts(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """For a folder: of what hooks have made of the whole state, this rank's part."""
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        # What hooks keep of the state beside it is this rank's part, as plain tensors.
        parts = {n: v.tensor if isinstance(v, Piece) else v for n, v in self._parts.items()}
        plain: dict[str, Any] = without_sights(rest, parts)
        plain["state_dict"] = without_sights(checkpoint["state_dict"], None)
        known = set(self._strategy.whole.names)
        state = {
            name: value
            for name, value in plain["state_dict"].items()
            if name in self._parts or (name not in known and self._strategy.is_global_zero)
        }
        whole = {
            name: value
            for name, value in state.items()
            if isinstance(self._parts.get(name), Piece) and not isinstance(value, Piece)
        }
        shares = self._strategy._shares(self._strategy.engine.holders(share=True))
        plain["state_dict"] = state | shares.pieces_of_whole(whole)
        return plain

    def _as_file(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether this is to be a file, the same on all ranks; collective when first asked."""
        asked = self._strategy._options.checkpoints
        if asked != "auto":
            return asked == "file"
        if isinstance(self._strategy.lightning_module, HasUnits):
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
            enough, figures = fits(3 * self._strategy.whole.num_bytes, copies=1)
            self._fits_rank_0 = bool(everybody().first_says(enough))
            reason = None if self._fits_rank_0 else f"a file would take {figures}"
        if objects and not self._told_objects:
            self._told_objects = True
            reason = f"the hyper-parameters {', '.join(objects)} are objects, and no file with such"
            reason += " is loaded here (save_hyperparameters(ignore=[...]) leaves them out)"
        if reason is not None and self._strategy.is_global_zero:
            files = "; PipelineStrategy(checkpoints='file') writes files"
            module = self._strategy.lightning_module
            assert module is not None
            _log.warning(
                "checkpoints are folders: %s. load_from_checkpoint() reads them where strategies "
                "has been imported%s.",
                reason,
                "" if networks_in(module) else files,
            )
        return self._fits_rank_0 and not objects

    def _save_file(self, checkpoint: dict[str, Any], path: Path) -> None:
        orders = self._strategy._groups.stock_orders() if "optimizer_states" in checkpoint else []
        where = self._strategy.coordinates
        stock_file.write(
            checkpoint,
            path,
            orders=orders,
            names=self._strategy.whole.names,
            first_replica=where.dp_rank == 0,
            own={RANDOM: random_state(), "layout": layout_of(where)},
        )

    def _save_folder(self, checkpoint: dict[str, Any], path: Path, problem: str | None) -> None:
        state = self._strategy._trainer.state
        holders = self._strategy.engine.holders()
        running = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        save(
            self._strategy.saver,
            checkpoint,
            path,
            coordinates=self._strategy.coordinates,
            holders=holders,
            # Sharded state has been put together on the first replica.
            optimizer_holders={} if self._strategy.engine.mains.sharded else holders,
            in_thread=self._strategy._options.async_save and running,
            metadata=self._strategy._metadata
            | {
                "schedule": self._strategy._plan.schedule,
                "seed": self._strategy.engine.seed,
                "step": checkpoint.get("global_step"),
                "begun": self._strategy._begun,
                "optimizers": [type(optimizer).__name__ for optimizer in self._strategy.optimizers],
                "parameters": sorted(self._strategy.engine.model.parameter_names),
            }
            | ({} if problem is None else {NOT_FINITE: problem}),
        )

    def _compare_replicas(self) -> None:
        """Refuses to keep what replicas have not got alike, or ranks their rates; collective."""
        where = self._strategy.coordinates
        place = f"pipeline rank {where.pp_rank}, tp rank {where.tp_rank}"
        self._compare_steps(place)
        if where.dp == 1:
            return
        experts = self._strategy.engine.model.experts
        named = self._strategy.engine.named_parameters()
        self._compare_copies({n: p for n, p in named.items() if n not in experts}, place)
        if experts:
            place = f"pipeline rank {where.pp_rank}, ep rank {where.ep_rank}"
            self._compare_copies({n: p for n, p in named.items() if n in experts}, place)

    def _compare_steps(self, place: str) -> None:
        """Steps, updates and rates: a checkpoint is of one step.

        Rates that were alike everywhere at the beginning are so everywhere; else among replicas.
        """
        strategy = self._strategy
        shared = frozenset() if strategy._rates is None else strategy._rates.names
        own = {
            name if name in shared else f"{name} on {place}": value
            for name, value in rates(strategy.optimizers).items()
        }
        step = str(int(strategy._trainer.global_step))
        if strategy.engine.stream is None:  # else updates follow, and all have been made here
            step += f", {strategy._updates} updates applied"
            step += " and one begun" if strategy._updating else ""
        exchange = everybody()
        said = exchange.everyone((_SAVES, step, strategy._updating, own))
        # Behind an error of people's hooks a rank may be at another exchange.
        midst: tuple[Any, ...] = (_SAVES, "in its midst", True, {})
        said = [s if isinstance(s, tuple) and s[:1] == (_SAVES,) else midst for s in said]
        if len({each[1] for each in said}) > 1 or any(each[2] for each in said):
            steps: dict[str, list[int]] = {}
            for rank, (_, each, *_) in enumerate(said):
                steps.setdefault(each, []).append(rank)
            shown = "; ".join(f"{name_ranks(where)}: step {each}" for each, where in steps.items())
            raise CheckpointError(
                f"no checkpoint was written, and the one before stays: it would hold weights of "
                f"two steps ({shown}).",
                fix="Go on with the last checkpoint; save where all ranks are between two steps.",
            )
        odd = tell_odd_rates([(rank, "", each[3]) for rank, each in enumerate(said)])
        if odd is not None:
            raise CheckpointError(
                f"no checkpoint was written: {odd}. Change rates on every rank alike, and go on "
                "with an earlier checkpoint."
            )

    def _compare_copies(self, parameters: Mapping[str, Tensor], place: str) -> None:
        """Refuses to keep what ranks of one ``place`` have not got alike; collective."""
        where = self._strategy.coordinates
        sums = checksums(parameters)
        exchange = everybody()
        found = exchange.everyone((place, where.dp_rank, digest(sums)))
        if not any(odd_ones(found).values()):
            return
        details = exchange.everyone(sums)
        raise CheckpointError(f"no checkpoint was written: {tell_odd_ones(found, details)}")
