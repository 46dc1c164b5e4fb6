"""Operators of real modules, found on shapes, and the plans that come of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from strategies.costs.hardware import Hardware
from strategies.errors import ModelError
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.sharding_plan import ShardingPlan, matches
from strategies.tracing.operator_shardings import Shardings
from strategies.tracing.operator_trace import trace_operators
from strategies.tracing.trace import empty_weights

# Computes slowly and sends fast: whatever can be cut is worth it.
SLOW = Hardware("slow", 1e9, 1.0, 100.0, 1e10, 1e10, 1e-7, 1e10, 1e-7, 8)


def found(module: nn.Module, batch, *, tp: int = 2, machine: Hardware = SLOW) -> ShardingPlan:
    (graph,) = trace_operators(module, batch, len(batch[0]), [tp])
    return Planner(graph, Prices(machine, tp)).found()


def styles(plan: ShardingPlan) -> dict[str, str]:
    """Of what is cut, by pattern."""
    return {row.pattern: row.style for row in plan.layers if row.style != "replicated"}


def tokens(vocabulary: int, rows: int = 4, length: int = 16):
    return torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, *, fused: bool = False) -> None:
        super().__init__()
        self.head = width // heads
        self.groups = heads // kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.query = nn.Linear(width, width)
            self.key = nn.Linear(width, kv_heads * self.head)
            self.value = nn.Linear(width, kv_heads * self.head)
        self.output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        y = self.norm1(x)
        if self.fused:
            parts = self.qkv(y).chunk(3, dim=-1)
        else:
            parts = (self.query(y), self.key(y), self.value(y))
        q, k, v = (p.view(rows, length, -1, self.head).transpose(1, 2) for p in parts)
        if self.groups > 1:
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self, vocabulary=512, width=64, layers=3, tied=False, **block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def training_step(self, batch, batch_idx):
        x = self.embedding(batch[0])
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), batch[1].view(-1))


MEGATRON = {
    "layers.*.query": "column",
    "layers.*.key": "column",
    "layers.*.value": "column",
    "layers.*.output": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head": "vocabulary",
}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_transformer_gets_megatrons_plan(tp):
    plan = found(Language(heads=4, kv_heads=4), tokens(512), tp=tp)
    assert MEGATRON.items() <= styles(plan).items()
    assert plan.layer("layers.1.up").count == 3
    assert plan.seconds < plan.seconds_whole / tp * 1.4


def test_tied_matrices_are_cut_alike():
    plan = found(Language(heads=4, kv_heads=4, tied=True), tokens(512))
    assert (MEGATRON | {"embedding": "vocabulary"}).items() == styles(plan).items()


def test_a_vocabulary_that_does_not_come_out_even_is_cut_all_the_same():
    linked = replace(SLOW, intra_bandwidth=2e8)
    model = Language(heads=4, kv_heads=4, vocabulary=515, tied=True)
    plan = found(model, tokens(515), machine=linked)
    assert styles(plan)["head"] == styles(plan)["embedding"] == "vocabulary"


def test_queries_keys_and_values_of_one_matrix_are_three_parts():
    plan = found(Language(heads=4, kv_heads=4, fused=True), tokens(512))
    assert styles(plan)["layers.*.qkv"] == "column"
    assert plan.layer("layers.0.qkv").segments == 3
    assert styles(plan)["layers.*.output"] == "row"


def test_an_attention_whose_heads_do_not_come_out_even_stays_whole():
    plan = found(Language(width=60, heads=3, kv_heads=3), tokens(512))
    assert plan.layer("layers.0.output").whole_input
    assert not {"layers.*.query", "layers.*.key"} & {
        row.pattern for row in plan.layers if not row.whole_output
    }
    assert styles(plan)["layers.*.up"] == "column"


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


def test_a_table_that_a_layer_looks_up_by_itself_stays_whole_and_feeds_what_is_cut():
    model = Language(heads=4, kv_heads=4)
    model.embedding = Scaled(512, 64)
    plan = found(model, tokens(512))
    assert MEGATRON.items() <= styles(plan).items()
    assert "embedding" not in styles(plan)
    assert plan.weight_bytes > 512 * 64 * 4


def test_a_layer_whose_weight_is_computed_stays_whole():
    model = Language(heads=4, kv_heads=4)
    for layer in model.layers:
        layer.up = nn.utils.parametrizations.weight_norm(layer.up)
    cut = styles(found(model, tokens(512)))
    assert "layers.*.up" not in cut
    assert cut["layers.*.output"] == "row"


def test_few_heads_of_keys_keep_their_attention_whole_and_nothing_else():
    plan = found(Language(heads=4, kv_heads=2), tokens(512), tp=4)
    assert plan.layer("layers.0.key").whole_output
    assert styles(plan)["layers.*.up"] == "column"
    assert styles(found(Language(heads=4, kv_heads=2), tokens(512)))["layers.*.key"] == "column"


BY_HAND = {pattern: (style,) for pattern, style in MEGATRON.items()} | {
    "embedding": ("vocabulary",)
}


@pytest.mark.parametrize(
    ("vocabulary", "kv_heads"), [(512, 4), (8192, 2)], ids=["megatrons", "few_heads_large_table"]
)
@pytest.mark.parametrize("link", [1e8, 1e10])
def test_no_plan_by_hand_is_better_than_the_found_one(vocabulary, kv_heads, link):
    model = Language(vocabulary=vocabulary, heads=4, kv_heads=kv_heads)
    (graph,) = trace_operators(model, tokens(vocabulary), 4, [2])
    planner = Planner(graph, Prices(replace(SLOW, intra_bandwidth=link), 2))
    names = {operator.name for operator in graph.operators if operator.kind is not None}
    styles = {n: how for n in names for pattern, how in BY_HAND.items() if matches(pattern, n)}
    by_hand = planner.priced(styles)
    assert {row.style for row in by_hand.layers} == {"column", "row", "vocabulary", "replicated"}
    assert planner.found().seconds <= by_hand.seconds * (1 + 1e-9)


class Vgg(nn.Module):
    """VGG-19 (Simonyan and Zisserman, 2015), of a share of its width."""

    def __init__(self, classes: int, part: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for times, wide in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
            for _ in range(times):
                layers += [nn.Conv2d(channels, wide // part, 3, padding=1), nn.ReLU(inplace=True)]
                channels = wide // part
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        inner = 4096 // part
        self.classifier = nn.Sequential(
            nn.Linear(channels * 49, inner), nn.ReLU(True), nn.Dropout(),
            nn.Linear(inner, inner), nn.ReLU(True), nn.Dropout(), nn.Linear(inner, classes),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        scores = self.classifier(torch.flatten(self.features(batch[0]), 1))
        return F.cross_entropy(scores, batch[1])


@pytest.mark.parametrize("link", [1e9, 2e10, 1.5e11])
def test_vgg_with_a_million_classes_is_cut_in_its_last_layer_alone(link):
    with empty_weights():
        vgg = Vgg(1_000_000)
    card = Hardware("card", 1.57e13, 0.76, 34.0, 9e11, link, 5e-6, link, 5e-6, 8)
    batch = torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)
    plan = found(vgg, batch, machine=card)
    assert styles(plan) == {"classifier.6": "vocabulary"}
    assert plan.weight_bytes < 0.52 * plan.weight_bytes_whole


def test_where_nothing_is_worth_cutting_the_plan_says_so():
    far = Hardware("far", 1e13, 1.0, 100.0, 1e12, 1e6, 1e-2, 1e6, 1e-2, 8)
    plan = found(Language(heads=4, kv_heads=4), tokens(512), machine=far)
    assert not plan.worth
    assert "tp=1 is as good" in plan.reasons[0]


@torch.library.custom_op("sharding_test::halved", mutates_args=())
def halved(values: torch.Tensor) -> torch.Tensor:
    return values / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, gradient: gradient / 2)


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def training_step(self, batch, batch_idx):
        return self.down(halved(self.up(batch[0]))).square().mean()


def test_an_operator_without_known_shardings_is_named_with_its_price():
    plan = found(Strange(), (torch.zeros(4, 32),))
    assert any("halved" in operation for operation, _, _ in plan.unknown)
    assert any("no known shardings" in reason and " us" in reason for reason in plan.reasons)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5000, 32) for _ in range(3))
        self.bag = nn.EmbeddingBag(5000, 32, mode="sum")
        self.scores = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        found = [table(batch[0][:, n]) for n, table in enumerate(self.tables)]
        scores = self.scores(torch.cat([*found, self.bag(batch[0])], dim=1))[:, 0]
        return F.binary_cross_entropy_with_logits(scores, batch[1])


def test_a_recommenders_tables_are_cut_and_gathered_before_they_are_joined():
    plan = found(Recommender(), (torch.zeros(64, 3, dtype=torch.long), torch.zeros(64)))
    assert styles(plan) == {"tables.*": "column", "bag": "column"}
    assert plan.layer("bag").whole_output
    assert plan.weight_bytes < 0.55 * plan.weight_bytes_whole


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        chosen = batch[0][torch.nonzero(batch[0][:, 0])]
        return self.inner(chosen).mean()


def test_shapes_that_depend_on_values_are_refused_by_name():
    with pytest.raises(ModelError, match="Chooser cannot be looked at for tensor parallelism"):
        found(Chooser(), (torch.zeros(4, 8),))


class Experts(nn.Module):
    """Each row goes to one of two layers, as its content says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        made = torch.zeros_like(x)
        for expert, chosen in ((self.first, x[:, 0] > 0), (self.second, x[:, 0] <= 0)):
            rows = torch.nonzero(chosen)[:, 0]
            made = made.index_add(0, rows, expert(x[rows]))
        return made


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.experts = nn.Linear(32, 128), nn.Linear(128, 32), Experts()

    def training_step(self, batch, batch_idx):
        return self.experts(self.down(torch.relu(self.up(batch[0])))).sum()


def test_a_module_whose_shapes_depend_on_values_stays_whole_and_the_rest_is_cut():
    plan = found(Mixture(), (torch.zeros(4, 32),))
    assert styles(plan) == {"up": "column", "down": "row"}
    assert plan.unknown[0][:2] == ("Experts", "experts")


def test_a_convolution_hands_its_channels_to_the_next_through_norm_and_pooling():
    net = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16),
        nn.GroupNorm(4, 16), nn.MaxPool2d(2), nn.Conv2d(16, 8, 1), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).sum()

    net(torch.zeros(2, 8, 12, 12))
    plan = found(Net(), (torch.zeros(4, 8, 12, 12),))
    assert [plan.layer(f"net.{n}").style for n in (0, 1, 3, 4, 6)] == [
        "column", "column", "column", "column", "row",
    ]  # fmt: skip
    assert not plan.layer("net.1").whole_input


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(16, 32, batch_first=True)
        self.look = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, batch):
        x, _ = self.body(batch[0])
        x = x + self.look(x, x, x, need_weights=False)[0]
        return F.cross_entropy(self.narrow(self.wide(x[:, -1]).relu()), batch[1])


def test_weights_that_a_module_uses_by_itself_stay_whole_with_their_price():
    plan = found(Recurrent(), (torch.zeros(4, 8, 16), torch.zeros(4, dtype=torch.long)))
    assert styles(plan) == {"wide": "column", "narrow": "row"}
    recurrence, attention = plan.reasons
    assert "in body has no known shardings: every rank does the whole of it, " in recurrence
    size = 4 * (4 * 32 * 32 + 4 * 32)
    words = f"look uses {size / 1e6:.3g} MB of weights by itself: every rank has them whole and "
    assert attention.startswith(words)
    assert all(float(told.rpartition(", ")[2].removesuffix(" us")) > 0 for told in plan.reasons)


@pytest.mark.parametrize("dim", [-1, 2])
@pytest.mark.parametrize("scan", [torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default])
def test_a_running_sum_is_taken_of_shares_along_other_dimensions_alone(scan, dim):
    x = torch.empty(4, 6, 8, device="meta")
    free = [(x, ["R", "S1", "S2"])]
    choices = Shardings(2).choices(scan, (x, dim), {}, free, [scan(x, dim)], lambda tensor: False)
    assert [(choice.inputs, choice.outputs) for choice in choices] == [
        (("R",), ("R",)),
        (("S1",), ("S1",)),
    ]


class Weighted(nn.Module):
    """A product with a vector loses a dimension in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def training_step(self, batch, batch_idx):
        y = self.up(batch[0])
        return self.down(torch.ones(len(y)) @ y).square().mean()


def test_a_value_that_loses_a_dimension_in_place_is_whole():
    plan = found(Weighted(), (torch.zeros(4, 64),))
    assert [(row.pattern, row.style, row.whole_output) for row in plan.layers] == [
        ("up", "column", True),
        ("down", "row", True),
    ]
