"""FLOPs of everything that runs under a mode: two per multiply-add of products of tensors.

As ``torch.utils.flop_counter``, whose formulas are used, those a user has registered with
``register_flop_formula`` included. That counter takes an operation without a formula for nothing;
here it must be known to do no products (element by element, moving, reducing, looking up), else it
is reported, and counted as one operation per element that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from strategies.models.nested import tensors

# By the operation's name without a leading or trailing underscore, overload and "_backward".
_WORDS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d alias all amax amin aminmax any arange argmax
    argmin argsort as_strided assert_async avg_pool1d avg_pool2d avg_pool3d
    batch_norm_no_update batch_norm_stats batch_norm_with_update bernoulli
    binary_cross_entropy binary_cross_entropy_with_logits bincount bucketize cat chunk clone
    col2im complex conj_physical constant_pad_nd contiguous copy count_nonzero
    cudnn_batch_norm cummax cummin cumprod cumsum detach diag_embed diagonal dropout elu
    embedding embedding_bag embedding_dense embedding_renorm empty empty_like empty_permuted
    empty_strided eq equal expand exponential eye fill flip floor_divide full full_like
    fused_dropout
    fused_rms_norm gather gelu geometric glu grid_sampler_2d grid_sampler_3d hardtanh
    hash_tensor histc huber_loss im2col index index_add index_copy index_fill index_put
    index_put_impl index_reduce index_select isin item kthvalue leaky_relu lift lift_fresh
    linalg_vector_norm linspace local_scalar_dense log_normal log_sigmoid
    log_sigmoid_forward log_softmax log_softmax_backward_data logcumsumexp logit logspace
    logsumexp masked_fill masked_scatter masked_select masked_softmax max
    max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d mean median
    min mode mse_loss multi_margin_loss multilabel_margin_loss multinomial nan_to_num
    nanmedian nansum native_batch_norm native_batch_norm_legit
    native_batch_norm_legit_functional native_batch_norm_legit_no_training native_dropout
    native_group_norm native_layer_norm new_empty new_empty_strided new_full new_ones
    new_zeros nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nonzero nonzero_static
    norm normal normal_functional one_hot ones ones_like pad_sequence permute pixel_shuffle
    pixel_unshuffle prelu prelu_kernel prod put rand rand_like randint randint_like randn
    randn_like randperm record_stream reflection_pad1d reflection_pad2d reflection_pad3d
    relu repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    resize resize_as roll rot90 rrelu_with_noise safe_softmax scalar_tensor scatter
    scatter_add scatter_reduce searchsorted segment_reduce select set slice smooth_l1_loss
    soft_margin_loss softmax softmax_backward_data softplus softshrink sort split
    split_with_sizes squeeze stack std std_mean sum t take tensor_split tile to to_copy topk
    transpose tril tril_indices triu triu_indices unbind unfold uniform unique unique2
    unique_consecutive unique_dim unsqueeze upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d
    upsample_trilinear3d value_selecting_reduction var var_mean view weight_norm_interface
    where zero zeros zeros_like
"""
_NO_PRODUCTS = frozenset(_WORDS.split())


def _scores(query: Tensor, key: Tensor) -> int:
    """Products of one number per query, key and head; heads of keys may serve several queries."""
    batch, heads, queries = prod(query.shape[:-3]), query.shape[-3], query.shape[-2]
    return 2 * batch * heads * queries * int(key.shape[-2])


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _cpu_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    # The scores once more, then the gradients of weights, values, queries and keys.
    return _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _recurrent(inputs: Tensor, *weights: Any, **__: Any) -> int:
    """A layer's steps: every row through both of its matrices."""
    rows = inputs.numel() // int(inputs.shape[-1])
    return 2 * rows * sum(w.numel() for w in weights[:2] if isinstance(w, Tensor))


_Formula = Callable[..., Any]
_OWN: Mapping[str, _Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "mv": lambda matrix, *_, **__: 2 * matrix.numel(),
    "dot": lambda first, *_, **__: 2 * first.numel(),
    "vdot": lambda first, *_, **__: 2 * first.numel(),
    "addmv": lambda _, matrix, *__, **___: 2 * matrix.numel(),
    "addbmm": lambda _, a, b, *__, **___: 2 * a.numel() * int(b.shape[-1]),
    "addr": lambda _, a, b, *__, **___: 2 * a.numel() * b.numel(),
    "linear": lambda inputs, weight, *_, **__: 2 * inputs.numel() * int(weight.shape[0]),
    "_cdist_forward": lambda a, b, *_, **__: 2 * a.numel() * int(b.shape[-2]),
    # Rows of one matrix, each times the matrix of its group.
    "_grouped_mm": lambda a, b, *_, **__: 2 * a.numel() * int(b.shape[-1]),
    "mkldnn_rnn_layer": _recurrent,
    "_trilinear": lambda a, b, c, *_, out_val, **__: 4 * out_val.numel(),
}
_FORMULAS: dict[Any, _Formula] = {
    packet: formula
    for name, formula in _OWN.items()
    if (packet := getattr(torch.ops.aten, name, None)) is not None
}


def formula_of(packet: Any) -> _Formula | None:
    """Of an operation, all its overloads; a user's own comes first."""
    return flop_registry.get(packet) or _FORMULAS.get(packet)


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs under it.

    Attributes:
        unknown: Operations that were met without a formula.
        last: The operation that ran last, for messages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.unknown: set[str] = set()
        self.last = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        self.last = str(packet if packet is not None else func).replace(".", "::")
        result = func(*args, **kwargs)
        formula = formula_of(packet)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif (made := tensors(result)) and packet and not _without_products(func, packet):
            self.unknown.add(self.last)
            self.flops += sum(tensor.numel() for tensor in made)
        return result


def _without_products(func: Any, packet: Any) -> bool:
    if getattr(func, "is_view", False) or torch.Tag.pointwise in getattr(func, "tags", ()):
        return True
    namespace, _, name = str(packet).rpartition(".")
    if namespace.startswith(("prim", "profiler", "inductor_prims")):
        return True
    name = name.strip("_").removesuffix("_backward")
    plain = name.removeprefix("unsafe_").removesuffix("_copy").removesuffix("_scatter")
    return name in _NO_PRODUCTS or plain in _NO_PRODUCTS


class CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up cost from shapes; also notices whether random numbers were drawn.

    Attributes:
        cost: FLOPs of matrix products, convolutions and attention, plus one per element that
            any other operation writes.
        random: Set by every operation that draws random numbers; reset by whoever reads it.
        draws: How many have.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = 0.0
        self.random = False
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random = True
            self.draws += 1
        if packet in flop_registry:
            self.cost += flop_registry[packet](*args, **kwargs, out_val=result)
        elif args and not getattr(func, "is_view", False) and packet is not torch.ops.aten.empty:
            self.cost += sum(tensor.numel() for tensor in tensors(result))
        return result
