"""Loss scaling for 16-bit floats over a whole pipeline.

A gradient that is not finite on one rank means that no rank may update, or stages and replicas
would part; and all must scale alike afterwards. So what the scaler has found on this rank is shared
with all processes, at the one place where torch's scaler looks at gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class SharedGradScaler(torch.amp.GradScaler):
    """A scaler that skips a step, and changes its scale, on all ranks or on none.

    Attributes:
        overflowed: Whether the step before was skipped; the same on all ranks.
    """

    overflowed: Tensor | None = None

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, *, device: torch.device) -> SharedGradScaler:
        """One with the options and the state of a user's scaler."""
        made = cls(
            device.type,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
        if scaler.is_enabled():
            made.load_state_dict(scaler.state_dict())
        return made

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not found:
            # A rank without gradients has a say in nothing, but must hear of it.
            found[found_inf.device] = found_inf
        if dist.is_initialized() and dist.get_world_size() > 1:
            anywhere = torch.stack([flag.cpu() for flag in found.values()]).amax()
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            for flag in found.values():
                flag.copy_(anywhere)
        self.overflowed = torch.stack(list(found.values())).amax()
        return found

    @property
    def exhausted(self) -> bool:
        """Whether gradients are not finite although nothing is left to scale down.

        Waits for the device, as the scaler's own step does.
        """
        return self.overflowed is not None and bool(self.overflowed) and self.get_scale() < 1.0
