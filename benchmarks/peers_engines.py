"""Pipeline engines on one small GPT: ours, torch's, and others' where they are installed.

Each is used as its own documentation does, on CPU, in 32 bits, without replicas; all but ours,
whose ranks share memory, go by gloo. Those that ask for CUDA are told where the CPU is; nothing
else in them is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

from benchmarks import overhead_torch
from benchmarks.peers_floors import Bare, Peer, Plain
from benchmarks.peers_model import bounds, loss_of, optimizer
from strategies.models.stage_model import Mode
from strategies.models.unit_model import UnitModel
from strategies.plan import Options, Plan
from strategies.runtime.engine.rank_engine import Engine as Runtime
from strategies.runtime.messages.mesh import Coordinates

# Per engine, the package that must be there, and its schedules by our names.
PEERS = {
    "bare": (None, ("1f1b", "interleaved_1f1b")),
    "foldpipe": (None, ("1f1b", "interleaved_1f1b", "interleaved_zb", "zb_v")),
    "torch": (None, ("1f1b", "interleaved_1f1b", "interleaved_zb", "zb_v")),
    "megatron-core": ("megatron.core", ("1f1b", "interleaved_1f1b")),
    "deepspeed": ("deepspeed", ("1f1b",)),
    "colossalai": ("colossalai", ("1f1b",)),
}


def installed(engine: str) -> bool:
    package = PEERS[engine][0]
    if package is None:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of what the package lies in
        return False


class _Net(nn.Module):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        return [(f"parts.{i}", part) for i, part in enumerate(self.parts)]

    def pipeline_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return (batch[0],)

    def pipeline_result(
        self, tensors: tuple[Tensor, ...], batch: Any, batch_idx: int, mode: Mode
    ) -> Tensor:
        return loss_of(tensors[0], batch[1])


class Ours(Peer):
    """The engine of this project, without Lightning's loop."""

    @property
    def owned(self) -> list[int]:
        return list(self._runtime.placement.stages_of(self.rank))

    def build(self) -> None:
        self._runtime = Runtime(
            model=UnitModel(_Net(self.layers)),
            plan=Plan(
                self.schedule, pp=self.ranks, num_microbatches=self.num_microbatches, buckets=0
            ),
            options=Options(
                backend="shared",
                on_nan="ignore",
                units_per_stage=tuple(map(len, bounds(self.size, self.num_stages))),
            ),
            coordinates=Coordinates(self.ranks, 1, self.rank, 0),
            device=torch.device("cpu"),
        )
        self._runtime.build_gradients()
        self._optimizer = optimizer(self._runtime.updated_parameters())
        self._steps = 0

    def step(self) -> None:
        runtime = self._runtime
        runtime.train_pass(self.batch, batch_idx=0, step=self._steps, accumulation=1, update=True)
        runtime.restore_gradients()
        runtime.flush()
        self._optimizer.step()
        runtime.stepped()
        self._steps += 1

    def close(self) -> None:
        self._runtime.close()


class Torch(Peer):
    """torch.distributed.pipelining."""

    @property
    def owned(self) -> list[int]:
        if self.schedule == "zb_v":
            return [self.rank, self.num_stages - 1 - self.rank]
        return super().owned

    def build(self) -> None:
        modules = {number: self.stage(number) for number in self.owned}
        stages = [
            pipelining.PipelineStage(module, number, self.num_stages, torch.device("cpu"))
            for number, module in modules.items()
        ]
        made: Any = overhead_torch.SCHEDULES[self.schedule]
        own = stages[0] if self.chunks == 1 else stages
        self._schedule = made(own, n_microbatches=self.num_microbatches, loss_fn=loss_of)
        self._optimizer = optimizer(p for module in modules.values() for p in module.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        tokens, target = self.batch
        last = self.num_stages - 1 in self.owned
        self._schedule.step(
            *((tokens,) if 0 in self.owned else ()),
            **({"target": target} if last else {}),
            return_outputs=False,
        )
        self._optimizer.step()


class _Fed(nn.Module):
    """What megatron-core calls a model: its input is put into it."""

    def __init__(self, stage: nn.Module, config: Any, number: int, chunk: int | None) -> None:
        super().__init__()
        self.stage, self.config, self.number, self.vp_stage = stage, config, number, chunk
        kinds: Any = importlib.import_module("megatron.core.enums")
        self.model_type = kinds.ModelType.encoder_or_decoder
        self.given: Tensor | None = None

    def set_input_tensor(self, given: Sequence[Tensor]) -> None:
        self.given = given[0]


class Megatron(Peer):
    """megatron-core's forward_backward functions; messages as single sends, the faster way here."""

    def build(self) -> None:
        schedules = self._on_cpu()
        parallel = importlib.import_module("megatron.core.parallel_state")
        config_of: Any = importlib.import_module("megatron.core.transformer.transformer_config")
        talk: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
        collection: Any = importlib.import_module("megatron.core.process_groups_config")
        virtual = self.chunks if self.chunks > 1 else None
        parallel.destroy_model_parallel()
        parallel.initialize_model_parallel(
            pipeline_model_parallel_size=self.ranks,
            virtual_pipeline_model_parallel_size=virtual,
            create_gloo_process_groups=False,
        )
        config = config_of.TransformerConfig(
            num_layers=self.size.blocks,
            num_attention_heads=4,
            hidden_size=self.size.hidden,
            pipeline_model_parallel_size=self.ranks,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            batch_p2p_comm=False,
            overlap_p2p_comm=False,
            deallocate_pipeline_outputs=True,
        )
        self._model = [
            _Fed(self.stage(number), config, number, chunk if virtual else None)
            for chunk, number in enumerate(self.owned)
        ]
        groups = collection.ProcessGroupCollection()
        groups.tp = parallel.get_tensor_model_parallel_group()
        groups.cp = parallel.get_context_parallel_group()
        groups.pp = parallel.get_pipeline_model_parallel_group()
        groups.embd = groups.pos_embd = None
        groups.dp_cp = parallel.get_data_parallel_group(with_context_parallel=True)
        self._groups, self._talk = groups, talk.P2PCommunicator(pp_group=groups.pp, config=config)
        kind = "with" if virtual else "without"
        self._run = getattr(schedules, f"forward_backward_pipelining_{kind}_interleaving")
        self._optimizer = optimizer(p for part in self._model for p in part.parameters())

    @staticmethod
    def _on_cpu() -> Any:
        """Its module of schedules, which asks CUDA for a device and for zeros."""
        schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        cuda: Any = torch.cuda
        cuda.current_device, cuda.synchronize = (lambda: "cpu"), (lambda *_, **__: None)
        if isinstance(schedules.torch, types.ModuleType) and schedules.torch is torch:
            ours = types.ModuleType("torch on cpu")
            ours.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]

            def zeros(*shape: Any, **options: Any) -> Tensor:
                made: Tensor = torch.zeros(*shape, **options | {"device": "cpu"})
                return made

            ours.zeros = zeros  # type: ignore[attr-defined]
            schedules.torch = ours
        return schedules

    def _forward(self, data: Iterator[tuple[Tensor, Tensor]], model: _Fed) -> Any:
        tokens, target = next(data)
        output = model.stage(tokens if model.number == 0 else model.given)
        return output, lambda out: (loss_of(out, target), {"loss": None})

    def step(self) -> None:
        self._optimizer.zero_grad()
        data = [self.microbatches() for _ in self._model]
        self._run(
            forward_step_func=self._forward,
            data_iterator=data if self.chunks > 1 else data[0],
            model=self._model,
            num_microbatches=self.num_microbatches,
            # Said as lengths of a sequence and of a batch, so that nothing is transposed.
            seq_length=self.size.rows,
            micro_batch_size=self.size.sequence,
            p2p_communicator=self._talk,
            pg_collection=self._groups,
        )
        self._optimizer.step()


class DeepSpeed(Peer):
    """DeepSpeed's PipelineModule, without ZeRO; its layers are cut where the others' are."""

    def build(self) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(self.rank))
        deepspeed: Any = importlib.import_module("deepspeed")
        comm: Any = importlib.import_module("deepspeed.comm.torch")
        comm.build_shm_op = lambda: None  # else it compiles an all-reduce that nobody calls
        pipe: Any = importlib.import_module("deepspeed.pipe")
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        cut = bounds(self.size, self.ranks)

        class Cut(pipe.PipelineModule):  # type: ignore[misc]
            def _partition_layers(self, method: str = "uniform") -> None:
                own = cut[self._topo.get_coord(self.global_rank).pipe]
                self.parts = [part.start for part in cut] + [cut[-1].stop]
                self._set_bounds(start=own.start, stop=own.stop)

        module = Cut(layers=self.layers, num_stages=self.ranks, loss_fn=loss_of)
        rows = self.size.rows
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer(module.parameters()),
            config={
                "train_batch_size": rows * self.num_microbatches,
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": self.num_microbatches,
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,
            },
        )

    def step(self) -> None:
        self._engine.train_batch(data_iter=self.microbatches())


class _Staged(nn.Module):
    """What ColossalAI calls a model: a dict between stages."""

    def __init__(self, stage: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self.first, self.last = stage, first, last

    def forward(self, tokens: Tensor, target: Tensor, hidden: Tensor | None = None) -> Any:
        output = self.stage(tokens if self.first else hidden)
        return output if self.last else {"hidden": output}


class _Backwards:
    """Of ColossalAI's wrapped optimizers, what its schedule calls."""

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        torch.autograd.backward(tensor, grad)


class Colossal(Peer):
    """ColossalAI's OneForwardOneBackwardSchedule."""

    def build(self) -> None:
        cluster: Any = importlib.import_module("colossalai.cluster")
        manager: Any = importlib.import_module("colossalai.pipeline.stage_manager")
        made: Any = importlib.import_module("colossalai.pipeline.schedule.one_f_one_b")
        mesh = cluster.ProcessGroupMesh(self.ranks)
        self._schedule = made.OneForwardOneBackwardSchedule(
            manager.PipelineStageManager(mesh, 0),
            num_microbatches=self.num_microbatches,
            microbatch_size=self.size.rows,
        )
        last = self.rank == self.ranks - 1
        self._model = _Staged(self.stage(self.rank), first=self.rank == 0, last=last)
        self._optimizer = optimizer(self._model.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._schedule.forward_backward_step(
            self._model,
            iter([self.batch]),
            lambda output, data: loss_of(output, data[1]),
            _Backwards(),
            return_loss=True,
        )
        self._optimizer.step()


CLASSES: dict[str, type[Peer]] = {
    "plain": Plain,
    "bare": Bare,
    "foldpipe": Ours,
    "torch": Torch,
    "megatron-core": Megatron,
    "deepspeed": DeepSpeed,
    "colossalai": Colossal,
}
