"""Where the processes of a run stand, as Lightning asks for it, and how they are started."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from strategies.errors import PlanError, by_host
from strategies.heartbeat import PHASE, Heartbeat, Phase
from strategies.models.state import Generators
from strategies.plan import IDLE_RANK_BYTES, Backend, Options, Plan
from strategies.raised import raised_by
from strategies.rules import check
from strategies.runtime.lightning.common_end import (
    End,
    Rank,
    end_by,
    end_together,
    save_what_can_be,
    saves_now,
)
from strategies.runtime.lightning.last_words import Voices, speak_once
from strategies.runtime.messages.exchange import everybody
from strategies.runtime.messages.joining import (
    call_roll,
    connecting,
    gpu_backend,
    join,
    ranks_gpus,
    uuid_of,
)
from strategies.runtime.messages.meeting import Meeting, meeting
from strategies.runtime.messages.mesh import (
    Communicators,
    Coordinates,
    abort_nccl,
    check_world,
)

_LAST_PAUSE_S = 0.05
_SEEDS = 2**32  # that people give; what torch draws for itself is longer


class RanksStrategy(ParallelStrategy):
    """Processes in a grid of pipeline, replica and tensor-parallel ranks."""

    def __init__(self, plan: Plan, options: Options, *, heartbeat: Heartbeat | None) -> None:
        # The base sets the devices, for which these are needed.
        self._num_nodes = 1
        self._fills_node = False
        self._plan = plan
        self._options = options
        super().__init__()
        other: Any = sys.modules.get("pytorch_lightning.strategies")
        if other is not None:
            # Its Trainer would call this an invalid name; now it comes as far as our own answer.
            other.Strategy.register(type(self))
        self._heartbeat = heartbeat or Heartbeat()
        self._watched = heartbeat is not None  # by a launcher, which decides how a run ends
        self._hosts: dict[int, str] = {}
        self._world: dist.ProcessGroup | None = None
        self._seeded = True  # whether all ranks have drawn the same before they met
        self._gpu_backend: Backend = "nccl"  # of backend=auto; known when the ranks have joined
        self._comes: Callable[[], bool] | None = None  # whether all ranks come to save
        self._apart: str | None = None  # why ranks have ended their connections, once they have

    @property
    def is_distributed(self) -> bool:
        """Lightning asks by this name; without it every ``sync_dist`` vanishes silently."""
        return self.world_size > 1

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        if self._fills_node:  # The Trainer sets the devices first.
            self.parallel_devices = (self._parallel_devices or [])[:1]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Devices of this node; on CPU as many as there are ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        # "devices=auto" on CPU means one device; the strategy knows how many ranks it needs.
        wanted = self._pipeline * (1 if self._options.dp == "auto" else self._options.dp)
        self._fills_node = bool(
            devices and devices[0].type == "cpu" and len(devices) == 1 and wanted > 1
        )
        if devices and self._fills_node:
            devices = devices * max(1, wanted // max(1, self._num_nodes))
        self._parallel_devices = devices

    @property
    def num_processes(self) -> int:
        devices = self._parallel_devices or []
        dp = self._options.dp
        if devices and devices[0].type == "cuda" and dp != "auto":
            return max(len(devices), self._pipeline * dp // max(1, self._num_nodes))
        return len(devices)

    @property
    def _pipeline(self) -> int:
        """Ranks of one replica."""
        return self._plan.pp * self._options.tp

    @property
    def dp(self) -> int:
        if self._options.dp != "auto":
            return self._options.dp
        return max(1, self._num_nodes * self.num_processes // self._pipeline)

    @property
    def coordinates(self) -> Coordinates:
        pp, tp, ep = self._plan.pp, self._options.tp, self._options.ep
        sliced = tp if self._options.expert_tp else 1
        return Coordinates.of(super().global_rank, pp=pp, dp=self.dp, tp=tp, ep=ep, sliced=sliced)

    @property
    def inside_step(self) -> bool:
        """Whether somebody's step runs, for which all processes are the replicas."""
        return self._world is not None and dist.group.WORLD is not self._world

    @property
    def global_rank(self) -> int:
        """Inside a step the replica's number: all ranks of a replica run the same lines of it."""
        return self.coordinates.dp_rank if self.inside_step else super().global_rank

    @property
    def world_size(self) -> int:
        """Inside a step the number of replicas: in so many shares the data are dealt."""
        return self.dp if self.inside_step else super().world_size

    @property
    def root_device(self) -> torch.device:
        """This rank's device; ranks share one where there are more ranks than GPUs."""
        devices = self._parallel_devices
        assert devices
        return devices[self.local_rank % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The replica's share: all stages of a pipeline read the same samples."""
        return {"num_replicas": self.dp, "rank": self.coordinates.dp_rank}

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self._num_nodes * self.num_processes)
        decorator: Any = rank_zero_only  # Lightning keeps the rank as its attribute.
        decorator.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if type(self.accelerator).__module__.startswith("pytorch_lightning."):
            raise PlanError(
                "PipelineStrategy is for the Trainer of lightning.pytorch, and this one is of "
                "pytorch_lightning, the same code under another name, whose classes are not "
                "exchangeable with it. Write `import lightning.pytorch as pl` in place of `import "
                "pytorch_lightning as pl`, for the Trainer, the module and the callbacks alike."
            )
        # The base starts nothing, and one process would wait for the others for ever.
        processes = self._num_nodes * self.num_processes
        pp, tp = self._plan.pp, self._options.tp
        check_world(pp=pp, dp=self.dp, tp=tp, world_size=processes)
        check(self._plan, replace(self._options, dp=self.dp))
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            _refuse_crowd(processes, self.num_processes)
        if self.world_size > 1:
            if self._options.backend == "nccl" and self.root_device.type == "cpu":
                raise PlanError(
                    "backend=nccl sends between GPUs, and these ranks are on CPU. Try backend=auto."
                )
            self._launcher = _Scripts(
                self.cluster_environment, self.num_processes, self._num_nodes, self._together
            )

    def setup_environment(self) -> None:
        """Joins the processes; runs before the module's own ``setup``."""
        super().setup_environment()
        self.set_world_ranks()
        if self.world_size > 1:
            assert self.cluster_environment is not None
            device, rank = self.root_device, self.global_rank
            compares = self._options.backend == "auto" and device.type == "cuda"
            self._heartbeat.phase(Phase.JOINING)
            met, store = meeting(), None
            if not dist.is_initialized():
                store, self._hosts = self._join(met)
                if len(set(self._hosts.values())) > 1:
                    self._heartbeat.others(by_host(self._hosts))
                if compares:
                    gpus = ranks_gpus(store, device, rank=rank, world_size=self.world_size)
                    self._gpu_backend = gpu_backend(gpus, rank=rank)
                # The default group serves Lightning's own object broadcasts; ours are made from it.
                backend = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo"
                timeout = timedelta(seconds=self._options.timeout_s)
                met.begins()
                with connecting(), nullcontext() if self._watched else speak_once().outermost():
                    _init_dist_connection(
                        self.cluster_environment, backend, timeout=timeout, store=store
                    )
                self._speak(store)
            elif compares:
                gpus = everybody().everyone(uuid_of(device))
                self._gpu_backend = gpu_backend(gpus, rank=rank)
            _pause_at_exit()
            met.has_begun(store)
            self._heartbeat.phase(Phase.SETTING_UP)
            self._world, self._apart = dist.group.WORLD, None
            self._draw_alike()

    def _draw_alike(self) -> None:
        """As under stock Lightning on one device, unless ranks would draw different numbers."""
        own = Generators.now().mark(), "PL_GLOBAL_SEED" in os.environ
        said: list[tuple[int, bool]] = everybody().everyone(own)
        alike, seeded = len({mark for mark, _ in said}) == 1, all(seeded for _, seeded in said)
        self._seeded = alike or seeded
        if alike:
            return
        if seeded:
            reset_seed()
            return
        drawn = everybody().everyone((torch.initial_seed(), Generators.now()))
        seeds = [seed for seed, _ in drawn]
        # Whoever seeds each process by hand wants other numbers in each replica.
        by_hand = len(set(seeds)) > 1 and max(seeds) < _SEEDS
        first = self.coordinates.replica(self.coordinates.dp_rank)[0] if by_hand else 0
        drawn[first][1].put_back()

    def _join(self, met: Meeting) -> tuple[Store, dict[int, str]]:
        """Meets the other ranks: for the first time, or where they have met before."""
        rank, world_size = self.global_rank, self.world_size
        timeout_s, store = self._options.timeout_s, met.again()
        if store is not None:
            hosts = call_roll(store, rank=rank, world_size=world_size, timeout_s=timeout_s)
            return store, hosts
        assert self.cluster_environment is not None
        return join(
            rank=rank,
            world_size=world_size,
            address=self.cluster_environment.main_address,
            port=self.cluster_environment.main_port,
            timeout_s=timeout_s,
        )

    @contextmanager
    def _together(self, trainer: pl.Trainer) -> Iterator[None]:
        """Around a fit or its kin: all ranks return from it, or all raise the same.

        Raises:
            BaseException: What this rank has raised, or another one.
        """
        met = meeting()
        try:
            yield
            if met.is_on:
                end_together()
        except _TunerExitException:
            raise  # All ranks do; the Trainer takes it for an end without a failure.
        except BaseException as error:
            beat = self._heartbeat.beat()
            state = beat.mark[1]
            here = Rank(
                rank=super().global_rank,
                world_size=super().world_size,
                step=trainer.global_step,
                beat=beat,
                place=state if state & PHASE or self._pipeline == 1 else None,
                timeout_s=self._options.timeout_s,
                watched=self._watched,
            )
            end = end_by(error, here, met, saves=saves_now(trainer), settle=self._settle_saves)
            self._part(trainer, end)
            if end.error is error:
                raise
            raise end.error from error

    def _part(self, trainer: pl.Trainer, end: End) -> None:
        """The ranks have ended their connections, or all have failed alike."""
        self._comes = end.comes
        if end.why is not None:
            self._world, self._apart = None, end.why
        save_what_can_be(trainer, aloud=raised_by(end.error) is None)

    def on_exception(self, exception: BaseException) -> None:
        """Callbacks have saved what they could."""
        self._comes = None

    def _settle_saves(self, most_s: float) -> None:
        """Waits so long for a checkpoint that is being written."""

    def _speak(self, store: Store) -> None:
        """What nobody catches is told by one rank, unless a launcher does that."""
        if not self._watched:
            children = getattr(self._launcher, "procs", [])
            self._voices = Voices(store, self.global_rank, self.world_size, children)
            speak_once().follow(self._voices)

    @property
    def backend(self) -> Backend:
        """How tensors travel between ranks; ``auto`` is settled in ``setup_environment``."""
        if self._options.backend != "auto":
            return self._options.backend
        if self.root_device.type == "cpu":
            return "shared"
        return self._gpu_backend

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Plain data and tensors, see ``Exchange``; the base would unpickle what is sent."""
        return everybody(self.root_device if self.parallel_devices else None).says(obj, source=src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all processes; the base would compare a sum over replicas with the world size."""
        if not dist.is_initialized():
            return decision
        value = torch.tensor(int(decision))
        # MIN is "all", MAX is "any".
        dist.all_reduce(value, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(value.item())


class _Scripts(_SubprocessScriptLauncher):
    """Lightning's, which runs the script once more for each other rank: where there is one.

    Args:
        together: Goes around what all ranks then run.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        together: Callable[[pl.Trainer], AbstractContextManager[None]],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._around = together

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        assert trainer is not None
        with self._around(trainer):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        if not _can_be_started_again():
            raise PlanError(
                f"{self.num_processes} processes are to run this script, and it is no file that "
                "they could be started with: python -, python -c and notebooks have none, nor "
                "have folders, archives, /dev/fd and -m cProfile. Try it as a file, python "
                "train.py (in a notebook: %%writefile train.py, then !python train.py)."
            )
        vars(sys.modules["__main__"]).setdefault("__spec__", None)  # Python's debugger sets none.
        super()._call_children_scripts()


def _can_be_started_again() -> bool:
    """Whether Lightning's command for the other processes starts what runs here."""
    main, script = sys.modules["__main__"], os.path.abspath(sys.argv[0])
    spec = getattr(main, "__spec__", None)
    if spec is None:  # python train.py
        passed_on = script.startswith(("/dev/", "/proc/"))  # a descriptor, which they do not have
        return hasattr(main, "__file__") and os.path.isfile(script) and not passed_on
    if spec.name == "__main__":
        return False  # a folder, or an archive
    # python -m module; a module that runs another file, as profilers do, names that.
    own = spec.origin is None or os.path.realpath(script) == os.path.realpath(spec.origin)
    return own or not os.path.isfile(script)


def make_device_mesh(
    where: Coordinates, communicators: Communicators, device: torch.device
) -> DeviceMesh:
    """A mesh ``[pp, dp, tp]`` over the groups that the pipeline has already.

    No rank waits for another, and no group of several processes is made. The pipeline's own traffic
    goes over the same groups: use them between steps, on all members alike.
    """
    replicas = where.replicas((where.pp_rank,))
    # Those of gradients are on the fast backend, but stages with two owners reduce over both.
    purpose = "reduce" if communicators.has("reduce", replicas) else "metrics"
    groups: list[dist.ProcessGroup] = []
    for kind, members in (
        ("messages", where.pipeline(where.dp_rank)),
        (purpose, replicas),
        ("tensor", where.sharers(where.pp_rank, where.dp_rank)),
    ):
        group = communicators.get(kind, members)
        groups.append(communicators.alone() if group is None else group)
    ranks = torch.arange(where.world_size).view(where.pp, where.dp, where.tp)
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("pp", "dp", "tp"))


def _refuse_crowd(world_size: int, here: int) -> None:
    """Refuses more processes than this machine has memory for, before the first is started."""
    free = psutil.virtual_memory().available
    if (here - 1) * IDLE_RANK_BYTES <= free:  # this process is one of them, and there already
        return
    raise PlanError(
        f"pp * dp * tp = {world_size} processes, {here} of them on this machine, need "
        f"{(here - 1) * IDLE_RANK_BYTES / 1e9:.1f} GB beside this one before they hold anything "
        f"({IDLE_RANK_BYTES / 1e9:.2f} GB each), and {free / 1e9:.1f} GB are free. Use a smaller "
        f"pp, dp or tp: {1 + free // IDLE_RANK_BYTES} at most."
    )


@cache
def _pause_at_exit() -> None:
    """Lets this process end a moment later, once, and then without NCCL's communicators.

    Gloo's threads drop the tensors of the last messages, for which they need Python's lock. One
    that asks for it while Python ends takes the process with it ("terminate called without an
    active exception", SIGABRT).
    """
    atexit.register(abort_nccl)
    atexit.register(time.sleep, _LAST_PAUSE_S)  # is called first
