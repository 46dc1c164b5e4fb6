"""Have all replicas the same weights? A number or two for each, compared before they are kept.

Replicas start alike and apply the same gradients, so they stay alike bit for bit, unless somebody
changes one of them alone: a callback on rank 0, a hook with random numbers of its own. Nothing
would ever show it but a loss that nobody can explain, and a checkpoint has one replica's weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strategies.errors import name_ranks

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 3

Sums = Mapping[str, tuple[int, int]]
Word = tuple[str, int, str]  # place in the pipeline, replica, digest


def checksums(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Two sums over the bits of each, made where it is; waits for the device once.

    The second goes by rows, so that a permutation shows, too.

    >>> checksums({"a": torch.zeros(2, 2), "b": torch.ones(2)})
    {'a': (0, 0), 'b': (2130706432, 3196059648)}
    """
    sums = []
    for value in parameters.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.detach().contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        rows = local.shape[0] if local.dim() and flat.numel() else 1
        bits = flat.view(_INTEGERS[flat.element_size()]).reshape(rows, flat.numel() // rows)
        totals = bits.sum(dim=1, dtype=torch.int64)
        places = torch.arange(1, rows + 1, device=totals.device)
        sums.append(torch.stack([totals.sum(), (totals * places).sum()]).to("cpu"))
    found = torch.stack(sums).tolist() if sums else []
    return {name: (int(a), int(b)) for name, (a, b) in zip(parameters, found, strict=True)}


def digest(sums: Sums) -> str:
    """All of them in a word."""
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


def odd_ones(found: Sequence[Word]) -> dict[int, list[int]]:
    """Which ranks differ from most replicas of their place; per rank that they are held against.

    >>> odd_ones([("pp 0", 0, "a"), ("pp 0", 1, "a"), ("pp 0", 2, "b"), ("pp 1", 0, "c")])
    {0: [2], 3: []}
    """
    odd: dict[int, list[int]] = {}
    for place in dict.fromkeys(place for place, _, _ in found):
        ranks = [rank for rank, word in enumerate(found) if word[0] == place]
        counts = Counter(found[rank][2] for rank in ranks)
        # Of two there is no majority: then the first replica, whose weights are written.
        right = max(ranks, key=lambda rank: (counts[found[rank][2]], -rank))
        odd[right] = [rank for rank in ranks if found[rank][2] != found[right][2]]
    return odd


def tell_odd_ones(found: Sequence[Word], sums: Sequence[Sums]) -> str:
    """What differs, in words."""
    lines = []
    for right, ranks in odd_ones(found).items():
        for rank in ranks:
            names = [n for n, value in sums[right].items() if sums[rank].get(n) != value]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(
                f"{name_ranks([rank])} (replica {found[rank][1]}, {found[rank][0]}) has other "
                f"weights than {name_ranks([right])} (replica {found[right][1]}): "
                f"{', '.join(names[:_SHOWN])}{more}"
            )
    return (
        f"replicas differ: {'; '.join(lines)}. Something has changed one replica alone, such as a "
        "callback that acts on one rank, or random numbers that are not the same on all. Change "
        "weights on every rank alike, and go on with an earlier checkpoint."
    )
