"""Plans of modules: what they may say, and what becomes of the layers."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional

from strategies.errors import ModelError
from strategies.models.tensor_parallel import share_values
from strategies.models.tensor_parallel.layer_plan import (
    Column,
    Replicated,
    Row,
    Split,
    Stream,
    Vocabulary,
    declared_plan,
    plan_by_sizes,
    read_style,
)
from strategies.models.tensor_parallel.sharded_layers import (
    ColumnLinear,
    RowLinear,
    SequenceDropout,
    VocabularyEmbedding,
)
from strategies.models.tensor_parallel.sharding import Sharding, _kind
from strategies.models.unit_model import UnitModel
from strategies.sharding_plan import LayerSharding
from tests.strategies.models.tensor_parallel.fake_ranks import FakeRanks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.dropout = nn.Dropout(0.5)


class Net(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self._plan = plan

    def tensor_parallel_plan(self):
        return self._plan

    def pipeline_units(self):
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("table", self.table), *blocks, ("head", self.head)]

    def pipeline_inputs(self, batch):
        return (batch,)

    def pipeline_result(self, tensors, batch, batch_idx, mode):
        return tensors[0].sum()


def cut(net, within, ranks=None):
    ranks = ranks or FakeRanks()
    sharding = Sharding(net, declared_plan(net, ranks.size), ranks)
    sharding.apply(within)
    return sharding


def sharded(net, ranks=None):
    model, ranks = UnitModel(net), ranks or FakeRanks()
    model.shard(ranks, model.sharding_plan(ranks.size, None))
    return model


PLANS = {
    "ours": {
        "table": Vocabulary(),
        "blocks.*.norm": Stream(),
        "blocks.*.dropout": Stream(),
        "blocks.*.up": Column(),
        "blocks.*.down": Row(),
        "head": Vocabulary(),
    },
    "words": {
        "table": "embedding_rowwise",
        "blocks.*.norm": "sequence_parallel",
        "blocks.*.dropout": "sequence_parallel",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": Vocabulary(),
    },
    "torch": {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.dropout": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": Vocabulary(),
    },
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_keep_their_names_and_a_share_of_their_weights(plan, sequence):
    net = Net(plan)
    whole = {name: value.detach().clone() for name, value in net.state_dict().items()}
    model = sharded(net, FakeRanks(sequence=sequence))
    model.cut([range(4)], [0])
    assert net.state_dict().keys() == whole.keys()
    for name, value in net.state_dict().items():
        shard = model.shards.get(name)
        assert torch.equal(value, whole[name] if shard is None else shard.local(whole[name], 0))
    assert set(model.shards) == {
        "table.weight",
        "head.weight",
        *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("up.weight", "up.bias", "down.weight")),
    }
    assert isinstance(net.table, VocabularyEmbedding)
    assert isinstance(net.blocks[1].up, ColumnLinear)
    assert isinstance(net.blocks[1].down, RowLinear)
    assert isinstance(net.head, ColumnLinear)
    assert net.head.weight is net.table.weight
    partial = {f"blocks.{i}.{n}" for i in (0, 1) for n in ("norm.weight", "norm.bias", "down.bias")}
    assert set(model.partial_parameters) == (partial if sequence else set())
    assert isinstance(net.blocks[0].dropout, SequenceDropout) == sequence


def test_a_gathered_column_layer_gives_all_outputs():
    net = Net({"blocks.*.up": "colwise_gather_output"})
    cut(net, "blocks.0")
    assert net.blocks[0].up(torch.ones(2, 4)).shape == (2, 6)
    assert net.blocks[0].up.weight.shape == (3, 4)
    assert read_style("up", ColwiseParallel(output_layouts=Replicate())) == Column(gather=True)


def test_weights_trained_on_a_share_of_the_heads_are_added_up():
    net = Net({"blocks.*.norm": "replicated_with_grad_allreduce"})
    assert cut(net, "blocks.1").partial == {"blocks.1.norm.weight", "blocks.1.norm.bias"}


def test_a_split_module_hands_on_its_share_of_the_sequence():
    net = Net({"table": Split()})
    cut(net, "table", FakeRanks(sequence=True))
    assert net.table(torch.zeros(3, 8, dtype=torch.int64)).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("plan", "tp", "message"),
    [
        ({"blocks.*.uup": "colwise"}, 2, "names 'blocks.*.uup', and Net has no module"),
        (
            {"blocks.*.up": "colwise"},
            4,
            "tp=4: tensor_parallel_plan() has Column() for blocks.0.up, but its 6 do not come out "
            "even over 4 ranks. Try tp=3.",
        ),
        (
            {"blocks.*.up": Column(block=2)},
            2,
            "Column() for blocks.0.up, but its 6 do not come out even over 2 ranks in blocks of 2. "
            "Try tp=1.",
        ),
        ({"blocks.*.down": "rowwise"}, 4, "Row() for blocks.0.down, but its 6 do not come out"),
        (
            {"blocks.*.norm": "colwise"},
            2,
            "for blocks.0.norm, but LayerNorm is computed whole on every rank. Leave it out of",
        ),
        ({"table": "rowwise"}, 2, "Row() for table, but Embedding has no inputs to be cut by."),
        ({"table": "embedding_rowwise"}, 2, "for table, but its weight is that of head, too. L"),
        ({"blocks.*.up": "columns"}, 2, "has 'columns' for blocks.*.up. Use Column()"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_entry(plan, tp, message):
    net = Net(plan)
    with pytest.raises(ModelError, match=re.escape(message)):
        cut(net, "blocks.0", FakeRanks(tp))


class Silent(Net):
    tensor_parallel_plan = None


PAIR = {"up": "column", "down": "row"}


def test_a_module_without_a_plan_gets_one_by_its_layers_sizes():
    net = Silent({})
    found = UnitModel(net).sharding_plan(2, None)
    assert found == plan_by_sizes(net, 2)
    assert not found.written_for_shares
    assert {row.pattern: row.style for row in found.layers} == {
        "head": "vocabulary",
        **{f"blocks.{i}.{name}": style for i in (0, 1) for name, style in PAIR.items()},
    }


def test_a_unit_that_is_a_layer_itself_is_replaced_where_it_runs():
    net = Net({"table": "embedding_rowwise", "head": "colwise_gather_output"})
    net.head = nn.Linear(4, 6)
    model = sharded(net)
    model.cut([range(1), range(1, 3), range(3, 4)], [0, 1, 2])
    assert model.stage_parameters(0).__next__()[1] is net.table.weight
    assert net.table.weight.shape == (3, 4)
    ids = torch.tensor([[0, 4]])
    out = model.forward(0, (), batch=ids, batch_idx=0, microbatch=0, mode="predict", seed=None)
    # Id 4 is the other rank's.
    assert torch.equal(out.tensors[0][0, 0], net.table.weight[0])
    assert out.tensors[0][0, 1].abs().sum() == 0


def test_a_padding_id_gets_no_gradient_on_the_rank_that_has_it():
    net = Net({"table": "embedding_rowwise"})
    net.table = nn.Embedding(6, 4, padding_idx=1)
    net.head = nn.Linear(4, 5)
    cut(net, "table")
    net.table(torch.tensor([0, 1, 2, 5])).sum().backward()
    # Ids 0, 1 and 2 are here; 5 is the other rank's.
    assert net.table.weight.grad.sum(1).tolist() == [4, 0, 4]


def test_a_layer_stays_the_same_object_with_its_hooks():
    net = Net({"blocks.*.up": "colwise"})
    layer, called = net.blocks[0].up, []
    layer.register_forward_hook(lambda *_: called.append(1))
    cut(net, "blocks.0")
    assert net.blocks[0].up is layer
    assert layer(torch.ones(2, 4)).shape == (2, 3)
    assert called == [1]


def test_a_layer_of_two_names_is_cut_once():
    net = Net({"blocks.*.up": "colwise"})
    net.first = net.blocks[0].up
    sharding = cut(net, "blocks.0")
    assert net.first.weight.shape == (3, 4)
    assert {"blocks.0.up.weight", "first.weight"} <= set(sharding.shards)


def test_convolutions_of_code_for_shares_give_their_own_channels_or_sums():
    net = Net({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    block = net.blocks[0]
    block.up, block.down = nn.Conv2d(4, 6, 3, padding=1), nn.ConvTranspose2d(6, 4, 2, stride=2)
    whole = block.down.weight.detach().clone()
    cut(net, "blocks.0")
    image = torch.randn(2, 4, 5, 5)
    assert block.up(image).shape == (2, 3, 5, 5)
    expected = functional.conv_transpose2d(block.up(image), whole[:3], block.down.bias, stride=2)
    assert torch.allclose(block.down(block.up(image)), expected)


def test_of_two_patterns_the_later_one_holds():
    plan = declared_plan(Net({"blocks.*.up": Column(), "blocks.0.up": Replicated()}), 2)
    assert plan is not None
    styles = [plan.layer(f"blocks.{number}.up").style for number in range(2)]
    assert styles == ["replicated", "column"]


@pytest.mark.parametrize(("block", "parts", "cut"), [(3, 2, True), (2, 2, False), (2, 3, True)])
def test_what_must_stay_together_is_not_cut_apart(block: int, parts: int, cut: bool):
    row = LayerSharding("up", "column", "linear", 0, block=block)
    answer = _kind(nn.Linear(4, 6), row, parts, even=False)
    assert isinstance(answer, type) == cut
    assert cut or answer == "its 6 do not come out even over 2 ranks in blocks of 2"


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "writes"),
    [
        (torch.Tensor.mean, (-1,), {"keepdim": True}, False),
        (functional.dropout, (0.5, True), {}, False),
        (functional.dropout, (0.5, True, True), {}, True),
        (functional.relu, (), {"inplace": True}, True),
        (torch.Tensor.add_, (1,), {}, True),
    ],
)
def test_only_what_writes_into_a_value_is_taken_for_that(func, args, kwargs, writes: bool):
    assert share_values._writes(func, (torch.ones(2), *args), kwargs) == writes
