"""What a layer keeps and what it computes again, and how often."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.errors import ModelError
from strategies.models.selective.policy import Selection
from strategies.models.selective.region import SelectiveLayer
from strategies.models.split_backward.input_step import input_backward

DEFAULT = frozenset({"attention", "norm", "activation"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + functional.dropout(self.out(mixed), 0.3)
        return x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.3)


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_products_run_once_and_the_rest_once_more(split):
    torch.manual_seed(0)
    block = Block()
    layer = SelectiveLayer(block, DEFAULT)
    x = torch.randn(2, 5, 8, requires_grad=True)

    def backward(y):
        if split:
            input_backward([y], [torch.ones_like(y)], [x]).run()
        else:
            y.backward(torch.ones_like(y))

    backward(layer.run(block, (x,), {}))  # the first time more is looked at
    y = layer.run(block, (x,), {})
    counts = Counts()
    with counts:
        backward(y)
    attention = sum(count for name, count in counts.calls.items() if name.endswith("_for_cpu"))
    assert counts.calls["addmm"] == 0
    assert attention == counts.calls["gelu"] == counts.calls["native_layer_norm"] == 1
    assert counts.calls["bernoulli_"] == 2


def test_matrix_products_can_be_recomputed_too():
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    layer = SelectiveLayer(block, DEFAULT | {"matmul"})
    x = torch.randn(3, 8, requires_grad=True)
    y = layer.run(block, (x,), {})
    counts = Counts()
    with counts:
        y.sum().backward()
    assert counts.calls["addmm"] == 1  # nothing is missing behind the tanh


@pytest.mark.parametrize("inplace", [False, True], ids=["plain", "in-place"])
def test_layers_may_change_what_they_are_given_and_what_they_made(inplace):
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.ReLU(inplace), nn.Linear(6, 6), nn.ReLU(inplace), nn.Linear(6, 6))
        for _ in range(2)
    ]
    plain = [nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in (0, 1)]
    for mine, other in zip(layers, plain, strict=True):
        other.load_state_dict(mine.state_dict())
    selective = [SelectiveLayer(layer, DEFAULT) for layer in layers]
    for _ in range(2):
        x = torch.randn(4, 6)
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        stream, expected = leaf * 1, other * 1
        for layer, run, mine in zip(layers, selective, plain, strict=True):
            stream = run.run(layer, (stream,), {})
            expected = mine(expected)
        assert torch.equal(stream, expected)
        stream.sum().backward()
        expected.sum().backward()
        assert torch.equal(leaf.grad, other.grad)
    for mine, other in zip(layers, plain, strict=True):
        for first, second in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(first.grad, second.grad)


def test_the_second_run_updates_no_statistics_and_leaves_the_generators_alone():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh())
    layer = SelectiveLayer(module, DEFAULT)
    x = torch.randn(4, 6, requires_grad=True)
    y = layer.run(module, (x,), {})
    mean, state = module[1].running_mean.clone(), torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(module[1].running_mean, mean)
    assert module[1].num_batches_tracked == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_a_saved_tensor_that_is_changed_later_is_noticed():
    module = nn.Linear(6, 6)
    x = torch.randn(4, 6, requires_grad=True)
    stream = x * 1
    layer = SelectiveLayer(module, DEFAULT)
    layer.run(module, (stream,), {})
    y = layer.run(module, (stream,), {})
    stream.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.sum().backward()


def test_a_layer_that_does_something_else_the_second_time_is_refused():
    class Moody(nn.Module):
        wide = 4

        def forward(self, x):
            return torch.tanh(x.sin()[: self.wide]).sum()

    module = Moody()
    x = torch.randn(6, requires_grad=True)
    y = SelectiveLayer(module, DEFAULT).run(module, (x,), {})
    Moody.wide = 3
    with pytest.raises(ModelError, match="must depend on its inputs only"):
        y.backward()


def test_layers_are_chosen_by_the_type_that_they_are_or_wrap():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.ModuleDict({"layer": Block()}))

    selection = Selection(layers={"Block": frozenset({"attention"})})
    assert selection.of(Wrapper()) == selection.of(Block()) == {"attention"}
    assert selection.of(nn.Linear(1, 1)) == DEFAULT
    assert set(selection.layers_of({3: Block(), 5: nn.Linear(1, 1)})) == {3, 5}
    with pytest.raises(ModelError, match=r"names Block, but .* types Linear\. Use one"):
        selection.layers_of({0: nn.Linear(1, 1)})


def test_compiled_layers_are_refused():
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    with pytest.raises(ModelError, match="compile=false"):
        Selection().layers_of({0: layer})


def test_the_second_run_computes_in_the_types_of_the_first():
    torch.manual_seed(0)
    found = []
    for selective in (False, True):
        torch.manual_seed(0)
        block = Block()
        layer = SelectiveLayer(block, DEFAULT)
        for _ in range(2):
            x = torch.randn(2, 5, 8, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                y = layer.run(block, (x,), {}) if selective else block(x)
            y.sum().backward()
        found.append([p.grad for p in (x, *block.parameters())])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


class Caching(nn.Module):
    """Works its tables out with products in its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        holder = vars(self).setdefault("holder", Holder())
        if holder.table is None:
            with torch.no_grad():
                holder.table = self.second(torch.ones(4, 6)) + self.first(torch.ones(4, 6))
        return self.second(torch.tanh(self.first(x * holder.table))).sin()


class Holder:
    """Opaque: nobody puts it back for a second run."""

    table: torch.Tensor | None = None


def test_what_only_the_first_run_does_confuses_nobody():
    torch.manual_seed(0)
    module, plain = Caching(), Caching()
    plain.load_state_dict(module.state_dict())
    layer = SelectiveLayer(module, DEFAULT)
    for _ in range(2):
        x = torch.randn(4, 6)
        layer.run(module, (x.clone().requires_grad_(),), {}).sum().backward()
        plain(x.clone().requires_grad_()).sum().backward()
    for first, second in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
