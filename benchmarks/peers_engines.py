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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engine import Engine
from benchmarks.list_walk import Autograd
from benchmarks.peers_model import Share, loss_of, optimizer
from benchmarks.runtime import Ours
from benchmarks.torch_pipelining import TorchPipeline
from strategies.models.stage_model import Mode
from strategies.models.unit_model import UnitModel
from strategies.plan import Options, Plan

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


def _ours(share: Share) -> Ours:
    pp, microbatches = share.ranks, share.num_microbatches
    units = tuple(map(len, share.bounds))
    return Ours(
        UnitModel(_Net(share.layers)),
        Plan(share.schedule, pp=pp, num_microbatches=microbatches, buckets=0),
        share.batch,
        options=Options(backend="shared", on_nan="ignore", units_per_stage=units),
        optimizer=optimizer,
    )


def _torch(share: Share) -> TorchPipeline:
    tokens, targets = share.batch
    return TorchPipeline(
        share.schedule,
        {number: share.stage(number) for number in share.owned},
        num_stages=share.num_stages,
        num_microbatches=share.num_microbatches,
        batch=tokens,
        target=targets,
        loss=loss_of,
        optimizer=optimizer,
    )


def _bare(share: Share) -> Autograd:
    shape = (share.size.rows, share.size.sequence, share.size.hidden)
    data = list(share.microbatches())
    return Autograd(share.schedule, share.stage, shape, data, loss_of, optimizer)


class _Peer(Engine):
    def __init__(self, share: Share) -> None:
        self._share = share


class Plain(_Peer):
    """One process, one microbatch behind the other; talks to nobody."""

    def setup(self) -> None:
        self._net = nn.Sequential(*self._share.layers)
        self._optimizer = optimizer(self._net.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        for tokens, target in self._share.microbatches():
            loss = loss_of(self._net(tokens), target) / self._share.num_microbatches
            torch.autograd.backward(loss)
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


class Megatron(_Peer):
    """megatron-core's forward_backward functions; messages as single sends, the faster way here."""

    def setup(self) -> None:
        share = self._share
        schedules = self._on_cpu()
        parallel = importlib.import_module("megatron.core.parallel_state")
        config_of: Any = importlib.import_module("megatron.core.transformer.transformer_config")
        talk: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
        collection: Any = importlib.import_module("megatron.core.process_groups_config")
        virtual = share.chunks if share.chunks > 1 else None
        parallel.destroy_model_parallel()
        parallel.initialize_model_parallel(
            pipeline_model_parallel_size=share.ranks,
            virtual_pipeline_model_parallel_size=virtual,
            create_gloo_process_groups=False,
        )
        config = config_of.TransformerConfig(
            num_layers=share.size.blocks,
            num_attention_heads=4,
            hidden_size=share.size.hidden,
            pipeline_model_parallel_size=share.ranks,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            batch_p2p_comm=False,
            overlap_p2p_comm=False,
            deallocate_pipeline_outputs=True,
        )
        self._model = [
            _Fed(share.stage(number), config, number, chunk if virtual else None)
            for chunk, number in enumerate(share.owned)
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
        data = [self._share.microbatches() for _ in self._model]
        self._run(
            forward_step_func=self._forward,
            data_iterator=data if self._share.chunks > 1 else data[0],
            model=self._model,
            num_microbatches=self._share.num_microbatches,
            # Said as lengths of a sequence and of a batch, so that nothing is transposed.
            seq_length=self._share.size.rows,
            micro_batch_size=self._share.size.sequence,
            p2p_communicator=self._talk,
            pg_collection=self._groups,
        )
        self._optimizer.step()


class DeepSpeed(_Peer):
    """DeepSpeed's PipelineModule, without ZeRO; its layers are cut where the others' are."""

    def setup(self) -> None:
        share = self._share
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(share.rank))
        deepspeed: Any = importlib.import_module("deepspeed")
        comm: Any = importlib.import_module("deepspeed.comm.torch")
        comm.build_shm_op = lambda: None  # else it compiles an all-reduce that nobody calls
        pipe: Any = importlib.import_module("deepspeed.pipe")
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        cut = share.bounds

        class Cut(pipe.PipelineModule):  # type: ignore[misc]
            def _partition_layers(self, method: str = "uniform") -> None:
                own = cut[self._topo.get_coord(self.global_rank).pipe]
                self.parts = [part.start for part in cut] + [cut[-1].stop]
                self._set_bounds(start=own.start, stop=own.stop)

        module = Cut(layers=share.layers, num_stages=share.ranks, loss_fn=loss_of)
        rows = share.size.rows
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer(module.parameters()),
            config={
                "train_batch_size": rows * share.num_microbatches,
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": share.num_microbatches,
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,
            },
        )

    def step(self) -> None:
        self._engine.train_batch(data_iter=self._share.microbatches())


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


class Colossal(_Peer):
    """ColossalAI's OneForwardOneBackwardSchedule."""

    def setup(self) -> None:
        share = self._share
        cluster: Any = importlib.import_module("colossalai.cluster")
        manager: Any = importlib.import_module("colossalai.pipeline.stage_manager")
        made: Any = importlib.import_module("colossalai.pipeline.schedule.one_f_one_b")
        mesh = cluster.ProcessGroupMesh(share.ranks)
        self._schedule = made.OneForwardOneBackwardSchedule(
            manager.PipelineStageManager(mesh, 0),
            num_microbatches=share.num_microbatches,
            microbatch_size=share.size.rows,
        )
        last = share.rank == share.ranks - 1
        self._model = _Staged(share.stage(share.rank), first=share.rank == 0, last=last)
        self._optimizer = optimizer(self._model.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._schedule.forward_backward_step(
            self._model,
            iter([self._share.batch]),
            lambda output, data: loss_of(output, data[1]),
            _Backwards(),
            return_loss=True,
        )
        self._optimizer.step()


ENGINES: dict[str, Callable[[Share], Engine]] = {
    "plain": Plain,
    "bare": _bare,
    "foldpipe": _ours,
    "torch": _torch,
    "megatron-core": Megatron,
    "deepspeed": DeepSpeed,
    "colossalai": Colossal,
}
