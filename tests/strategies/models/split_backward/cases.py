"""Stages of many kinds: what they compute, and which parameters' gradients should wait for W."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 6
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A stage.

    Attributes:
        build: Gives the module.
        data: Gives the arguments of its ``forward``; floating ones are the stage's inputs.
        waits: Names of the parameters whose gradients W computes.
        first: The stage is the pipeline's first: its inputs need no gradient.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    waits: frozenset[str]
    first: bool = False


def case(data, waits: str = "", first: bool = False):
    """Registers a function that builds a module, or a module class."""

    def register(build):
        CASES[build.__name__] = Case(build, data, frozenset(waits.split()), first)
        return build

    return register


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rows():
    return (rand(4, DIM),)


def sequence():
    return (rand(2, 5, DIM),)


def image():
    return (rand(2, 4, 6, 6),)


def tokens():
    return (torch.randint(0, 9, (2, 5)),)


class Apply(nn.Module):
    """A module from parts and a function."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / 3)


# Products


@case(rows, "weight")
def linear_without_bias():
    return nn.Linear(DIM, 4, bias=False)


@case(sequence, "weight bias")
def linear_on_sequences():
    return nn.Linear(DIM, 4)


@case(lambda: (rand(5, 2, DIM).transpose(0, 1),), "weight")
def linear_on_a_transposed_input():
    return nn.Linear(DIM, 4)


@case(lambda: (rand(DIM),), "weight bias")
def linear_on_a_vector():
    return nn.Linear(DIM, 4)


@case(sequence, "0.weight 0.bias 2.weight 2.bias")
def mlp():
    return nn.Sequential(nn.Linear(DIM, 8), nn.GELU(), nn.Linear(8, DIM))


@case(rows, "0.weight 0.bias 2.weight 2.bias 4.weight 4.bias", first=True)
def mlp_of_the_first_stage():
    return nn.Sequential(
        nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, DIM)
    )


@case(rows, "w")
def parameter_on_the_right():
    return Apply(lambda s, x: x @ s.w, w=parameter(DIM, 3))


@case(rows, "w")
def parameter_on_the_left():
    return Apply(lambda s, x: s.w @ x, w=parameter(3, 4))


@case(rows, "w b")
def addmm_with_factors():
    return Apply(
        lambda s, x: torch.addmm(s.b, x, s.w, beta=0.3, alpha=1.7),
        w=parameter(DIM, 3),
        b=parameter(4, 3),
    )


@case(sequence, "w b")
def baddbmm_with_factors():
    return Apply(
        lambda s, x: torch.baddbmm(s.b, x, s.w, beta=0.3, alpha=1.7),
        w=parameter(2, DIM, 3),
        b=parameter(1, 5, 3),
    )


@case(sequence, "w")
def einsum():
    return Apply(lambda s, x: torch.einsum("bij,kj->bki", x, s.w), w=parameter(3, DIM))


@case(sequence, "w")
def batched_products_with_transposed_weights():
    return Apply(lambda s, x: torch.bmm(x, s.w.transpose(-1, -2)), w=parameter(2, 3, DIM))


@case(rows)
def matrix_times_vector():
    return Apply(lambda s, x: x @ s.v, v=parameter(DIM))


@case(lambda: (rand(3, DIM), rand(3, DIM)))
def bilinear():
    return nn.Bilinear(DIM, DIM, 2)


@case(lambda: (torch.complex(rand(3, DIM), rand(3, DIM)),))
def complex_numbers():
    return Apply(lambda s, x: torch.view_as_real(x @ torch.complex(s.a, s.b)), **_pair())


def _pair():
    return {"a": parameter(DIM, 3), "b": parameter(DIM, 3)}


@case(rows)
def sparse_operand():
    mask = torch.eye(3, 4, dtype=torch.float64).to_sparse()
    return Apply(lambda s, x: x.sum() + torch.sparse.mm(mask, s.w), w=parameter(4, 3))


# Convolutions


@case(lambda: (rand(2, 4, 9),), "weight bias")
def conv1d_with_stride():
    return nn.Conv1d(4, 6, 3, stride=2, padding=1)


@case(image, "weight bias")
def conv2d_dilated():
    return nn.Conv2d(4, 6, 3, padding=2, dilation=2)


@case(lambda: (rand(1, 2, 4, 4, 4),), "weight")
def conv3d():
    return nn.Conv3d(2, 3, 2, bias=False)


@case(image, "0.weight 0.bias 1.weight 1.bias")
def conv_depthwise_and_pointwise():
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 6, 1))


@case(image, "weight bias")
def conv_transposed():
    return nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2)


@case(lambda: (rand(4, 6, 6),), "weight bias")
def conv_without_batch():
    return nn.Conv2d(4, 6, 3, padding="same")


@case(image, "weight bias")
def conv_channels_last():
    return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)


@case(image, "0.weight 3.weight 3.bias", first=True)
def conv_net_of_the_first_stage():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
    )


# Embeddings


@case(tokens, "weight", first=True)
def embedding():
    return nn.Embedding(9, DIM)


@case(tokens, "weight", first=True)
def embedding_with_padding():
    return nn.Embedding(9, DIM, padding_idx=2, scale_grad_by_freq=True)


@case(tokens, "fc.weight fc.bias", first=True)
def embedding_sparse():
    return Apply(
        lambda s, i: s.fc(s.e(i)), e=nn.Embedding(9, DIM, sparse=True), fc=nn.Linear(DIM, 3)
    )


@case(tokens, "fc.weight fc.bias", first=True)
def embedding_bag():
    return Apply(lambda s, i: s.fc(s.e(i)), e=nn.EmbeddingBag(9, DIM), fc=nn.Linear(DIM, 3))


@case(lambda: (rand(9, DIM), torch.randint(0, 9, (4,))), "weight bias")
def embedding_of_activations():
    class Lookup(nn.Linear):
        def forward(self, x, i):
            return super().forward(F.embedding(i, x))

    return Lookup(DIM, 3)


@case(tokens, "e.weight fc.weight fc.bias", first=True)
def tied_embedding_and_head():
    def forward(s, i):
        return F.cross_entropy(s.head(s.fc(s.e(i))).flatten(0, 1), i.flatten())

    module = Apply(
        forward, e=nn.Embedding(9, DIM), fc=nn.Linear(DIM, DIM), head=nn.Linear(DIM, 9, bias=False)
    )
    module.head.weight = module.e.weight
    return module


@case(tokens, "fc.weight fc.bias", first=True)
def embedding_that_is_also_normalised():
    return Apply(
        lambda s, i: s.fc(s.e(i)) + s.e.weight.norm(),
        e=nn.Embedding(9, DIM),
        fc=nn.Linear(DIM, DIM),
    )


# Blocks


@case(sequence, "fc.weight fc.bias out.weight out.bias")
def normalised_residual():
    return Apply(
        lambda s, x: x + s.out(F.silu(s.fc(s.norm(x)))) * s.rms(x),
        norm=nn.LayerNorm(DIM),
        rms=nn.RMSNorm(DIM),
        fc=nn.Linear(DIM, 8),
        out=nn.Linear(8, DIM),
    )


@case(image, "0.weight 0.bias 3.weight 3.bias")
def batch_norm_group_norm_pool():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 1),
        nn.GroupNorm(2, 4),
    )


@case(sequence, "qkv.weight qkv.bias out.weight out.bias")
def attention():
    def forward(s, x):
        q, k, v = s.qkv(x).view(2, 5, 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.out(y.transpose(1, 2).reshape(2, 5, DIM))

    return Apply(forward, qkv=nn.Linear(DIM, 3 * DIM), out=nn.Linear(DIM, DIM))


@case(
    sequence,
    "attn.in_proj_weight attn.in_proj_bias attn.out_proj.weight attn.out_proj.bias",
)
def multihead_attention():
    return Apply(lambda s, x: s.attn(x, x, x)[0], attn=nn.MultiheadAttention(DIM, 2))


@case(
    lambda: (rand(2, 5, DIM), rand(2, 3, DIM)),
    "attn.in_proj_weight attn.out_proj.weight attn.out_proj.bias",
)
def cross_attention():
    return Apply(
        lambda s, x, y: s.attn(x, y, y, need_weights=False)[0],
        attn=nn.MultiheadAttention(DIM, 2, batch_first=True),
    )


@case(
    sequence,
    "self_attn.in_proj_weight self_attn.out_proj.weight self_attn.out_proj.bias "
    "linear1.weight linear1.bias linear2.weight linear2.bias",
)
def transformer_layer_with_dropout():
    return nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.2, batch_first=True)


@case(sequence, "0.weight_ih_l0 0.weight_hh_l0 0.bias_ih_l0 0.bias_hh_l0 1.weight 1.bias")
def lstm():
    class First(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    return nn.Sequential(First(DIM, 4), nn.Linear(4, 3))


@case(sequence, "weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0")
def gru():
    return nn.GRU(DIM, 4)


@case(sequence, "cell.weight_ih cell.weight_hh cell.bias_ih cell.bias_hh")
def lstm_cell_over_time():
    def forward(s, x):
        state = None
        for step in x.unbind(1):
            state = s.cell(step, state)
        return state

    return Apply(forward, cell=nn.LSTMCell(DIM, 4))


@case(sequence, "router.weight w1 w2")
def mixture_of_all_experts():
    def forward(s, x):
        weight = s.router(x).softmax(-1)
        flat = x.flatten(0, 1).expand(3, -1, -1)
        y = torch.bmm(torch.bmm(flat, s.w1).relu(), s.w2)
        return torch.einsum("etd,te->td", y, weight.flatten(0, 1))

    return Apply(
        forward,
        router=nn.Linear(DIM, 3, bias=False),
        w1=parameter(3, DIM, 8),
        w2=parameter(3, 8, DIM),
    )


@case(rows, "router.weight router.bias experts.0.weight experts.1.weight experts.2.weight")
def mixture_with_routing():
    def forward(s, x):
        weight, chosen = s.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(s.experts):
            mine = (chosen == index).nonzero().squeeze(-1)
            out.index_add_(0, mine, expert(x[mine]) * weight[mine, None])
        return out

    experts = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
    return Apply(forward, router=nn.Linear(DIM, 3), experts=experts)


@case(rows, "0.weight 0.bias 1.weight 1.bias 2.weight 2.bias")
def dense_connections():
    class Dense(nn.ModuleList):
        def forward(self, x):
            for layer in self:
                x = torch.cat([x, layer(x).relu()], 1)
            return x

    return Dense(nn.Linear(DIM + 3 * i, 3) for i in range(3))


# Weights that are made


@case(rows, "0.parametrizations.weight.original0 0.parametrizations.weight.original1 0.bias")
def weight_norm():
    from torch.nn.utils.parametrizations import weight_norm

    return nn.Sequential(weight_norm(nn.Linear(DIM, 4)))


@case(rows, "parametrizations.weight.original bias")
def spectral_norm():
    from torch.nn.utils.parametrizations import spectral_norm

    return spectral_norm(nn.Linear(DIM, 4)).eval()


@case(rows, "w a b bias")
def merged_adapter():
    return Apply(
        lambda s, x: F.linear(x, s.w + 2 * s.b @ s.a, s.bias),
        w=parameter(4, DIM),
        a=parameter(2, DIM),
        b=parameter(4, 2),
        bias=parameter(4),
    )


@case(rows, "a.weight b.weight")
def adapter_beside_a_frozen_layer():
    frozen = nn.Linear(DIM, 4).requires_grad_(False)
    return Apply(
        lambda s, x: s.frozen(x) + s.b(s.a(x)),
        frozen=frozen,
        a=nn.Linear(DIM, 2, bias=False),
        b=nn.Linear(2, 4, bias=False),
    )


@case(rows, "w scale")
def scaled_and_cast_weight():
    return Apply(
        lambda s, x: F.linear(x.float(), (s.w * s.scale).float()).double(),
        w=parameter(4, DIM),
        scale=parameter(4, 1),
    )


@case(rows, "code net.weight net.bias")
def hypernetwork():
    return Apply(
        lambda s, x: x @ s.net(s.code).view(DIM, 2),
        code=parameter(3),
        net=nn.Linear(3, 2 * DIM),
    )


@case(rows, "w")
def rounded_weight():
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x * 8) / 8

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Apply(lambda s, x: F.linear(x, Round.apply(s.w)), w=parameter(4, DIM))


# Sharing and freezing


@case(rows, "fc.weight fc.bias")
def layer_used_three_times():
    return Apply(lambda s, x: s.fc(s.fc(s.fc(x).tanh()).tanh()), fc=nn.Linear(DIM, DIM))


@case(rows, "w")
def weight_and_its_transpose():
    return Apply(lambda s, x: F.linear(F.linear(x, s.w).tanh(), s.w.t()), w=parameter(3, DIM))


@case(rows, "w b")
def weight_direct_and_made():
    return Apply(
        lambda s, x: F.linear(F.linear(x, s.w).tanh(), s.w * 2 + s.b),
        w=parameter(DIM, DIM),
        b=parameter(DIM, DIM),
    )


@case(rows, "last.weight last.bias")
def weight_with_a_penalty():
    return Apply(
        lambda s, x: s.last(s.fc(x)).sum() + s.fc.weight.square().sum(),
        fc=nn.Linear(DIM, DIM),
        last=nn.Linear(DIM, 2),
    )


@case(rows, "1.weight 1.bias")
def frozen_weight_with_a_bias():
    module = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    module[0].weight.requires_grad_(False)
    return module


@case(rows, "used.weight used.bias")
def unused_parameters():
    return Apply(lambda s, x: s.used(x), used=nn.Linear(DIM, 3), unused=nn.Linear(DIM, 3))


@case(rows, "a.weight a.bias")
def layer_behind_a_detach():
    return Apply(lambda s, x: s.a(x) + s.b(x).detach(), a=nn.Linear(DIM, 3), b=nn.Linear(DIM, 3))


# Graphs of unusual shape


@case(lambda: (rand(3, DIM), rand(3, DIM)), "fc.weight fc.bias")
def inputs_used_twice_and_handed_on():
    return Apply(lambda s, x, y: (x, s.fc(x * y), s.fc(y), y * 2), fc=nn.Linear(DIM, DIM))


@case(rows, "fc.weight fc.bias")
def outputs_that_are_views():
    return Apply(lambda s, x: (*s.fc(x).chunk(2, 1), x.t()), fc=nn.Linear(DIM, DIM))


@case(lambda: (rand(3, DIM), torch.randint(0, 9, (3,))), "fc.weight fc.bias")
def outputs_without_gradients():
    def forward(s, x, i):
        y = s.fc(x)
        return y, i + 1, y.detach() > 0, y.argmax(-1)

    return Apply(forward, fc=nn.Linear(DIM, DIM))


@case(rows, "fc.weight fc.bias")
def output_of_parameters_alone():
    return Apply(lambda s, x: (s.fc(x), s.extra * 2), fc=nn.Linear(DIM, 2), extra=parameter(3))


@case(rows)
def nothing_but_elementwise():
    return Apply(lambda s, x: x * s.scale + s.shift, scale=parameter(DIM), shift=parameter(DIM))


@case(rows)
def no_parameters():
    return nn.Tanh()


@case(rows, "a.weight a.bias b.weight b.bias")
def changes_in_place():
    def forward(s, x):
        y = s.a(x)
        y += 1
        y = s.b(torch.tanh_(y))
        y[:, 0] = 0
        y[:, 1:3] *= 2
        return y

    return Apply(forward, a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM))


@case(rows, "0.weight 0.bias 1.weight 1.bias 2.weight 2.bias")
def states_written_into_a_buffer():
    class States(nn.ModuleList):
        def forward(self, x):
            states = torch.zeros(4, 3, DIM, dtype=x.dtype)
            for index, layer in enumerate(self):
                x = torch.tanh(layer(x))
                states[:, index] = x
            return states

    return States(nn.Linear(DIM, DIM) for _ in range(3))


@case(rows, "fc.weight fc.bias", first=True)
def normalisation_first_in_the_first_stage():
    return Apply(lambda s, x: s.fc(s.norm(x)), norm=nn.BatchNorm1d(DIM), fc=nn.Linear(DIM, 3))


@case(sequence, "fc.weight fc.bias", first=True)
def positions_first_in_the_first_stage():
    return Apply(lambda s, x: s.fc(x + s.pos), pos=parameter(5, DIM), fc=nn.Linear(DIM, 3))


@case(sequence, "queries q.weight q.bias kv.weight kv.bias")
def learned_queries():
    def forward(s, x):
        q = s.q(s.queries).expand(2, -1, -1)
        k, v = s.kv(x).chunk(2, -1)
        return F.scaled_dot_product_attention(q, k, v)

    return Apply(forward, queries=parameter(3, DIM), q=nn.Linear(DIM, 4), kv=nn.Linear(DIM, 8))


# Regions that are computed again, or kept elsewhere

PAIR = "a.weight a.bias b.weight b.bias"


def pair(function):
    return Apply(function, a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM))


@case(rows, PAIR)
def checkpoint_around_layers():
    def forward(s, x):
        x = checkpoint(lambda x: s.a(x).tanh() * x, x, use_reentrant=False)
        return checkpoint(lambda x: s.b(x.sin()).tanh(), x, use_reentrant=False)

    return pair(forward)


@case(rows, PAIR)
def checkpoint_around_everything():
    return pair(
        lambda s, x: checkpoint(lambda x: s.b(s.a(x).tanh()).relu(), x, use_reentrant=False)
    )


@case(rows, PAIR)
def checkpoint_in_a_checkpoint():
    def inner(s, x):
        return checkpoint(lambda x: s.b(x).sigmoid() * x, x, use_reentrant=False)

    def forward(s, x):
        return checkpoint(lambda x: inner(s, s.a(x).tanh()).exp(), x, use_reentrant=False)

    return pair(forward)


@case(rows, PAIR)
def checkpoint_that_keeps_products():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

    kept = functools.partial(contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default])

    def forward(s, x):
        def block(x):
            return s.b(s.a(x).tanh()).relu()

        return checkpoint(block, x, use_reentrant=False, context_fn=kept)

    return pair(forward)


@case(rows, PAIR, first=True)
def checkpoint_in_the_first_stage():
    return pair(
        lambda s, x: checkpoint(lambda x: s.b(s.a(x).tanh()).relu(), x, use_reentrant=False)
    )


@case(rows, "b.weight b.bias")
def checkpointed_norm_below_a_layer():
    def forward(s, x):
        return s.b(checkpoint(lambda x: s.norm(x).tanh(), x, use_reentrant=False))

    return Apply(forward, norm=nn.LayerNorm(DIM), b=nn.Linear(DIM, DIM))


@case(rows)
def checkpoint_with_reentry():
    def forward(s, x):
        return s.b(checkpoint(lambda x: s.a(x).tanh(), x, use_reentrant=True))

    return pair(forward)


@case(rows, "b.weight b.bias")
def offloaded_layer():
    def forward(s, x):
        with torch.autograd.graph.save_on_cpu():
            x = s.a(x).tanh()
        return s.b(x)

    return pair(forward)


# Functions of users


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@case(rows, "a.weight a.bias b.weight b.bias")
def custom_function_between_layers():
    return Apply(
        lambda s, x: s.b(Double.apply(s.a(x))), a=nn.Linear(DIM, DIM), b=nn.Linear(DIM, DIM)
    )


@case(rows, "a.weight a.bias")
def custom_function_with_a_weight():
    return Apply(
        lambda s, x: OwnLinear.apply(s.a(x), s.w), a=nn.Linear(DIM, DIM), w=parameter(3, DIM)
    )


@case(rows, "a.weight a.bias", first=True)
def custom_function_first_in_the_first_stage():
    return Apply(
        lambda s, x: s.a(OwnLinear.apply(x, s.w)), a=nn.Linear(3, DIM), w=parameter(3, DIM)
    )
