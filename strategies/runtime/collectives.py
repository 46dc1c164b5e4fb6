"""All-gather and reduce-scatter of one tensor each, under the names that this torch has.

torch 2.13 renames ``all_gather_into_tensor`` and ``reduce_scatter_tensor``, and warns at the old
names where the new ones exist.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
