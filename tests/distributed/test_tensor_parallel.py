"""Ranks that share matrices give what a single process gives: losses, weights, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from strategies.errors import DataError, ModelError
from tests.distributed.test_checkpoint import train_and_save, train_resumed
from tests.ranks.fit import fit
from tests.ranks.pool import Ranks
from tests.ranks.training import (
    SEQUENCE,
    VOCAB,
    Case,
    Sentences,
    evaluate,
    evaluated,
    reference,
    small_shape,
    train,
)

TOLERANCE = 1e-10
FULL_EIGHT = pytest.param(2, 2, 2, 3, marks=pytest.mark.full)
WHOLE_OR_CUT = pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, marks=pytest.mark.full, id="whole"), pytest.param(True, id="sequence")],
)

pytestmark = pytest.mark.distributed

# 17 token ids: no tp divides them. Heads and inner width go up to tp=4.
GROUPED = small_shape(layers=2, hidden=16, heads=4, kv_heads=4, ffn=12)
TIED = small_shape(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=4,
    ffn=12,
    tie_embeddings=True,
    norm="layernorm",
    activation="gelu",
    position="learned",
)


def check(case: Case, ranks: Callable[[int], Ranks]) -> list[dict[str, Any]]:
    return compare(case, ranks(case.pp * case.dp * case.tp).run(train, case=case))


def compare(case: Case, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Holds what the ranks have come to against plain torch."""
    losses, parameters = reference(case)
    for result in results:
        for batch, expected in enumerate(losses):
            mean = sum(
                other["losses"][batch]
                for other in results
                if (other["pp_rank"], other["tp_rank"]) == (result["pp_rank"], result["tp_rank"])
            )
            assert mean / case.dp == pytest.approx(expected, abs=TOLERANCE), f"loss of {batch}"
    copies: dict[tuple[str, int], torch.Tensor] = {}
    seen = set()
    for result in results:
        for name, value in result["parameters"].items():
            shard = result["shards"].get(name)
            rank = result["tp_rank"]
            expected = parameters[name] if shard is None else shard.local(parameters[name], rank)
            difference = (value - expected).abs().max().item()
            assert difference < TOLERANCE, f"{name} on tp rank {rank}: {difference}"
            # A whole weight is the same on all, a share on all replicas.
            copy = copies.setdefault((name, 0 if shard is None else rank), value)
            assert torch.equal(value, copy), f"copies differ in {name}"
            seen.add(name)
    tied = {"net.head.projection.weight"} if case.shape.tie_embeddings else set()
    assert seen >= set(parameters) - tied
    assert any(result["shards"] for result in results)
    return results


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "steps"),
    [
        pytest.param(1, 1, 2, 10, marks=pytest.mark.full),
        (2, 1, 2, 4),
        pytest.param(1, 2, 2, 4, marks=pytest.mark.full),
        pytest.param(1, 1, 4, 4, marks=pytest.mark.full),
        FULL_EIGHT,
    ],
)
@pytest.mark.parametrize(
    "shape", [GROUPED, pytest.param(TIED, marks=pytest.mark.full)], ids=["untied", "tied"]
)
def test_training_equals_a_single_process(
    pp: int, dp: int, tp: int, steps: int, shape: Any, ranks: Callable[[int], Ranks]
) -> None:
    case = Case(pp=pp, dp=dp, tp=tp, steps=steps, shape=shape, clip=0.05, accumulation=2)
    check(replace(case, rows=4, microbatches=2), ranks)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("foldx_fifo", pp=2, tp=2), marks=pytest.mark.full),
        pytest.param(Case("zb_h1", pp=2, tp=2, backend="strict"), marks=pytest.mark.full),
        Case("chimera", pp=2, tp=2),
        pytest.param(
            Case("1f1b", pp=2, tp=2, split_backward=True, accumulation=2), marks=pytest.mark.full
        ),
        # 3 * 6 * 16 numbers do not come out even in slices of a third; the last batch is short.
        Case("1f1b", pp=2, tp=2, rows=5, microbatches=2, short_last=True),
    ],
    ids=["foldx_fifo", "zb_h1-strict", "chimera", "split", "ragged"],
)
def test_schedules_keep_parity(case: Case, ranks: Callable[[int], Ranks]) -> None:
    check(replace(case, steps=4, shape=TIED, clip=0.05), ranks)


def test_a_boundary_tensor_travels_in_slices(ranks: Callable[[int], Ranks]) -> None:
    # [rows / M, sequence, hidden] in fp64; what travels ahead of it once per shape is no tensor.
    case = Case("1f1b", pp=2, tp=2, steps=2, rows=4, microbatches=2, shape=TIED)
    whole = case.steps * case.rows * SEQUENCE * TIED.hidden * 8
    sent = [result["bytes_sent"] for result in ranks(4).run(train, case=case)]
    assert sent == [whole // 2] * 4
    # A stream that is cut along the sequence is a share already.
    sent = [
        r["bytes_sent"] for r in ranks(4).run(train, case=replace(case, sequence_parallel=True))
    ]
    assert sent == [whole // 2] * 4


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "sequence_parallel"),
    [
        (2, 1, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((1, 2, 2, False), (1, 2, 2, True), (2, 1, 2, False), (2, 2, 2, False))
        ),
    ],
)
def test_sharded_optimizers_keep_parity(
    pp: int, dp: int, tp: int, sequence_parallel: bool, ranks: Callable[[int], Ranks]
) -> None:
    case = Case(pp=pp, dp=dp, tp=tp, steps=4, shape=TIED, clip=0.05, rows=4, overlap="zero1")
    check(replace(case, microbatches=2, sequence_parallel=sequence_parallel), ranks)


def test_both_copies_of_a_stage_share_its_optimizer_and_its_matrices(
    ranks: Callable[[int], Ranks],
) -> None:
    case = Case("chimera", pp=2, tp=2, steps=4, shape=GROUPED, clip=0.05, overlap="zero1")
    results = check(replace(case, accumulation=2, sequence_parallel=True), ranks)
    assert all(any("GATHER" in word for word in result["program"]) for result in results)


@pytest.mark.parametrize(
    "shape",
    [GROUPED, pytest.param(TIED, marks=pytest.mark.full)],
    ids=["untied", "tied"],
)
@pytest.mark.parametrize(
    ("pp", "dp", "tp"),
    [*(pytest.param(pp, 1, 2, marks=pytest.mark.full) for pp in (1, 2)), (1, 2, 2)],
)
def test_a_stream_cut_along_the_sequence_keeps_parity(
    pp: int, dp: int, tp: int, shape: Any, ranks: Callable[[int], Ranks]
) -> None:
    case = Case(pp=pp, dp=dp, tp=tp, steps=3, shape=shape, clip=0.05, accumulation=2, rows=4)
    check(replace(case, microbatches=2, sequence_parallel=True), ranks)


@WHOLE_OR_CUT
def test_dropout_does_not_depend_on_the_number_of_sharers(
    sequence_parallel: bool, ranks: Callable[[int], Ranks]
) -> None:
    shape = replace(GROUPED, dropout=0.3)
    (alone,) = ranks(1).run(train, case=Case(steps=3, shape=shape, schedule="gpipe"))
    case = Case(tp=2, steps=3, shape=shape, sequence_parallel=sequence_parallel)
    for result in ranks(2).run(train, case=case):
        assert result["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)


@WHOLE_OR_CUT
def test_evaluation_and_predictions_are_those_of_a_single_process(
    sequence_parallel: bool, ranks: Callable[[int], Ranks]
) -> None:
    case = Case(pp=2, tp=2, steps=3, shape=GROUPED, sequence_parallel=sequence_parallel)
    loss, chances = evaluated(case)
    for result in ranks(4).run(evaluate, case=case):
        assert result["val_loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert (result["predictions"] - chances).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("overlap", [pytest.param("grad_reduce", marks=pytest.mark.full), "zero1"])
def test_a_checkpoint_goes_to_one_process_and_back_bit_for_bit(
    overlap: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = Case(pp=2, tp=2, steps=4, shape=TIED, clip=0.05, overlap=overlap)
    if overlap == "zero1":
        case = replace(case, pp=1, dp=2)
    first, second, third = (tmp_path / name for name in ("a.ckpt", "b.ckpt", "c.ckpt"))
    whole = ranks(4).run(train_and_save, case=case, step=2, path=str(first))
    alone = replace(case, pp=1, dp=1, tp=1, schedule="gpipe", overlap="grad_reduce")
    ranks(1).run(resume_and_save, case=alone, source=str(first), path=str(second))
    ranks(4).run(resume_and_save, case=case, source=str(second), path=str(third))
    _same_state(first, second)
    _same_state(first, third)
    # And it goes on from there as if nothing had happened.
    resumed = ranks(4).run(train_resumed, case=case, path=str(third))
    for one, other in zip(whole, resumed, strict=True):
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name


def resume_and_save(case: Case, source: str, path: str) -> None:
    """Loads and saves, before any step."""
    train(case, resume=source, callbacks=[_SaveAtOnce(path)])


class _SaveAtOnce(Callback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self._path)


def _state(path: Path) -> dict[str, torch.Tensor]:
    """All weights and all of the optimizer's state, put together from all files."""
    from strategies.manifest import read_manifest
    from strategies.runtime.storage.opened import Opened

    opened = Opened.of(path, read_manifest(path))
    names = opened.metadata.state_dict_metadata
    pieces = {name: opened._target(name, None) for name in names if not name.startswith("tree.")}
    opened._fill(pieces)
    return {name: piece.tensor for name, piece in pieces.items()}


def _same_state(one: Path, other: Path) -> None:
    before, after = _state(one), _state(other)
    names = {"model:net.head.projection.weight"}  # Written where it lies on another rank only.
    assert before.keys() | names == after.keys() | names
    assert any(key.startswith("optimizer.0.exp_avg:") for key in before)
    for key in before.keys() & after.keys():
        assert torch.equal(before[key], after[key]), key


def test_all_layouts_start_from_the_same_bits(ranks: Callable[[int], Ranks]) -> None:
    (alone,) = ranks(1).run(initial_weights, case=Case(shape=TIED, schedule="gpipe"))
    for pp, dp, tp in ((1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4)):
        results = ranks(pp * dp * tp).run(
            initial_weights, case=Case(pp=pp, dp=dp, tp=tp, shape=TIED)
        )
        for rank, result in enumerate(results):
            for name, (value, shard) in result.items():
                whole = alone.get(name, alone["net.embedding.tokens.weight"])[0]
                expected = whole if shard is None else shard.local(whole, rank % tp)
                assert torch.equal(value, expected), f"{name} at {(pp, dp, tp)}"


def initial_weights(case: Case) -> dict[str, Any]:
    """Cuts a model on the meta device; no training."""
    from launcher.workloads.language_model import LanguageModel
    from strategies.models.unit_model import UnitModel
    from strategies.plan import Options, Plan
    from strategies.runtime.engine.rank_engine import Engine
    from strategies.runtime.messages.mesh import Coordinates

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with torch.device("meta"):
        module = LanguageModel(case.shape, seed=7)
    engine = Engine(
        model=UnitModel(module),
        plan=Plan(case.schedule, case.pp, 2, buckets=1),
        options=Options(backend="gloo", timeout_s=60, on_nan="ignore"),
        coordinates=Coordinates.of(rank, pp=case.pp, dp=case.dp, tp=case.tp),
        device=torch.device("cpu"),
    )
    shards = engine.model.shards
    found = {
        name: (value.detach().clone(), shards.get(name))
        for name, value in module.named_parameters()
    }
    engine.close()
    return found


class Words(pl.LightningModule):
    """A user's module that knows no layers of ours: an MLP over token vectors, words as plan."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 18)
        self._plan = plan

    def pipeline_units(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("table", self.table), *blocks, ("head", self.head)]

    def unit_costs(self) -> list[float]:
        return [1.0, 1.0, 1.0, 1.0]

    def pipeline_inputs(self, batch: Any) -> tuple[torch.Tensor, ...]:
        return (batch["tokens"],)

    def pipeline_result(self, tensors: Any, batch: Any, batch_idx: int, mode: Any) -> Any:
        return functional.cross_entropy(tensors[0].flatten(0, 1), batch["targets"].flatten())

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return self._plan

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tensors = self.pipeline_inputs(batch)
        for _, unit in self.pipeline_units():
            tensors = (unit(*tensors),)
        return self.pipeline_result(tensors, batch, batch_idx, "train")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


WORDS = {
    "table": "embedding_rowwise",
    "blocks.*.0": "colwise",
    "blocks.*.2": "rowwise",
    "head": "colwise_gather_output",
}


def train_words(
    plan: dict[str, Any], pp: int, tp: int, rows: int = 8, spoil: int | None = None
) -> dict[str, Any]:
    model = Words(plan)
    strategy = {"pp": pp, "tp": tp, "num_microbatches": 2, "seed": 0}
    data = Sentences(3 * rows)
    if spoil is not None and strategy_rank() == spoil:
        data.tokens = data.tokens.roll(1, 0)
    with fit(model, DataLoader(data, batch_size=rows), strategy=strategy, max_steps=3) as run:
        return {name: (value, run.shards.get(name)) for name, value in run.weights.items()}


def strategy_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def test_a_users_module_with_words_for_its_layers_keeps_parity(
    ranks: Callable[[int], Ranks],
) -> None:
    (alone,) = ranks(1).run(train_words, plan=WORDS, pp=1, tp=1)
    for rank, result in enumerate(ranks(4).run(train_words, plan=WORDS, pp=2, tp=2)):
        assert result
        for name, (value, shard) in result.items():
            whole = alone[name][0]
            expected = whole if shard is None else shard.local(whole, rank % 2)
            assert (value - expected).abs().max().item() < TOLERANCE, name


def test_a_boundary_that_differs_between_sharers_is_refused(ranks: Callable[[int], Ranks]) -> None:
    # The first stage ends with a layer that gives each sharer other columns.
    plan = {"blocks.0.2": "colwise"}
    with pytest.raises(ModelError, match=r"tp=2: stage 0 hands on a tensor .* differs between"):
        ranks(4).run(train_words, plan=plan, pp=2, tp=2)


def test_sharers_that_see_different_batches_are_told_so(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(DataError, match=r"see different batches .*rank 1 tp 1: [0-9a-f]{8}"):
        ranks(4).run(train_words, plan=WORDS, pp=2, tp=2, spoil=1)


def test_a_module_that_is_cut_by_nobody_is_refused(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(ModelError, match=r"tp=2: no layer of Plain is worth"):
        ranks(2).run(train_plain)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["tokens"][:, :1].to(self.net[0].weight.dtype)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_plain() -> None:
    loader = DataLoader(Sentences(4), batch_size=4)
    with fit(Plain(), loader, strategy={"tp": 2, "num_microbatches": 1}, max_steps=1):
        pass


@pytest.mark.full
def test_dtensors_do_not_wait_in_a_split_backward(ranks: Callable[[int], Ranks]) -> None:
    for deferred, collectives, error in ranks(2).run(split_dtensors):
        # Torch's own tensor-parallel layers do all their work in I, and do it right.
        assert (deferred, collectives) == (0, 0)
        assert error < 1e-14


def split_dtensors() -> tuple[int, int, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from strategies.models.split_backward.input_step import input_backward

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        return [p.grad.full_tensor() for p in net.parameters()] + [data.grad]  # type: ignore[union-attr]

    net(data).square().sum().backward()
    expected = [gradient.clone() for gradient in gradients()]
    net.zero_grad()
    data.grad = None
    loss = net(data).square().sum()
    pending = input_backward([loss], [None], [data])
    with CommDebugMode() as collectives:
        count = len(pending.parameters)
        pending.run()
    error = max(
        (one - other).abs().max().item() for one, other in zip(expected, gradients(), strict=True)
    )
    return count, collectives.get_total_counts(), error
