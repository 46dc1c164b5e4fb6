"""Weight gradients of matrix products: plain, batched, with an addend, grouped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from strategies.runtime.split_backward.rule import Product, Rule, Sample, Saved, example, summed_to


def _product_rule(node: str, left: str, right: str, *, addend: bool, batched: bool) -> Rule:
    first = 1 if addend else 0

    def product(saved: Saved, incoming: Tensor, edge: int) -> Product:
        scale = saved.settings.get("_saved_alpha", 1)
        if edge == first:
            return Product(incoming, saved.tensors[right].mT, scale)
        return Product(saved.tensors[left].mT, incoming, scale)

    def gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
        found = []
        for edge in edges:
            if addend and edge == 0:
                beta = saved.settings["_saved_beta"]
                scaled = incoming if beta == 1 else incoming * beta
                found.append(summed_to(scaled, saved.shapes[0]))
            elif edge in saved.flipped:
                found.append(product(saved, incoming, edge).turned().value().mT)
            else:
                found.append(product(saved, incoming, edge).value())
        return found

    def samples(device: torch.device) -> list[Sample]:
        batch = (2,) if batched else ()
        a, b = example(device, *batch, 4, 3), example(device, *batch, 3, 5)
        if not addend:
            return [Sample(torch.bmm(a, b) if batched else torch.mm(a, b), {0: a, 1: b})]
        c = example(device, 5)
        call = torch.baddbmm if batched else torch.addmm
        return [Sample(call(c, a, b, beta=0.5, alpha=1.5), {0: c, 1: a, 2: b})]

    return Rule(
        node=node,
        factors=(first, first + 1),
        operands={first: (right,), first + 1: (left,)},
        weight=first + 1,
        bias=0 if addend else None,
        shaped=(0,) if addend else (),
        settings=("_saved_alpha", "_saved_beta") if addend else (),
        gradients=gradients,
        product=product,
        samples=samples,
    )


def _grouped_gradients(saved: Saved, incoming: Tensor, edges: Sequence[int]) -> list[Tensor]:
    data, ends = saved.tensors["self"], saved.tensors["offs"]
    if 1 in saved.flipped:
        return [F.grouped_mm(incoming.mT, data, offs=ends).mT for _ in edges]
    return [F.grouped_mm(data.mT, incoming, offs=ends) for _ in edges]


def _grouped_samples(device: torch.device) -> list[Sample]:
    rows = example(device, 16, 16, dtype=torch.bfloat16)
    weights = example(device, 2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
    return [Sample(F.grouped_mm(rows, weights, offs=ends), {1: weights})]


GROUPED = Rule(
    node="GroupedMmBackward0",
    factors=(0, 1),
    operands={1: ("self", "offs")},
    weight=1,
    # Rows in groups times one matrix per group; the other layouts have no weights in them.
    accepts=lambda node: (
        node._saved_offs is not None
        and len(node._saved_self_sym_sizes) == 2
        and len(node._saved_mat2_sym_sizes) == 3
    ),
    gradients=_grouped_gradients,
    samples=_grouped_samples,
    watches_hooks=False,
)

RULES = (
    _product_rule("AddmmBackward0", "mat1", "mat2", addend=True, batched=False),
    _product_rule("MmBackward0", "self", "mat2", addend=False, batched=False),
    _product_rule("BmmBackward0", "self", "mat2", addend=False, batched=True),
    _product_rule("BaddbmmBackward0", "batch1", "batch2", addend=True, batched=True),
    GROUPED,
)
