"""Running the probe on a module: everything around the step that ``Probe`` itself watches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.runtime.replay.cuts import make_path
from strategies.runtime.replay.gate import call_step, gated
from strategies.runtime.replay.hole import Hole
from strategies.runtime.replay.inference import Outcome
from strategies.runtime.replay.logs import LogCapture
from strategies.runtime.replay.ownership import ParameterTable
from strategies.runtime.replay.path import Path
from strategies.runtime.replay.probe import Probe
from strategies.runtime.replay.snapshot import unchanged
from strategies.runtime.replay.source import error_line
from strategies.runtime.replay.structure import rebuild, tensors
from strategies.runtime.stage_model import STEP_NAMES, Mode


def probe_path(
    module: LightningModule,
    units: dict[str, nn.Module],
    table: ParameterTable,
    mode: Mode,
    batch: Any,
    batch_idx: int,
    cache: dict[Hashable, Outcome],
    make: Callable[..., Probe] = Probe,
) -> Path:
    """Runs one step of ``mode`` on shapes; leaves module, batch and random states as they were.

    ``make`` builds the probe; another one than ``Probe`` itself notes more.

    Raises:
        ModelError: If the step cannot be replayed; names the user's line and the remedy.
    """
    step = STEP_NAMES[mode]
    batch = rebuild(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    versions = [(tensor, tensor._version) for tensor in tensors(batch) if not tensor.is_inference()]
    probe = make(
        list(units.values()),
        tuple(units),
        parameters=table.by_identity(),
        buffers=_lasting_tensors(module),
        device=batch_device(batch, module),
        cache=cache,
        step=step,
    )
    logs = LogCapture(lambda value: _note_log(probe, value))
    with (
        unchanged(module),
        torch.inference_mode(False),
        torch.set_grad_enabled(mode == "train"),
        table.shown(),
        gated(module, probe.units, logs.log, logs.log_dict),
    ):
        try:
            with probe.costs, probe:
                result = call_step(module, mode, batch, batch_idx)
        except ModelError:
            raise
        except Exception as error:
            raise _unsupported(error, probe, step) from error
        probe.on_return(result)
        written = any(
            isinstance(tensor, Hole) or tensor._version != version for tensor, version in versions
        )
    return make_path(probe.record, tuple(units), step=step, clones_batch=written)


def batch_device(batch: Any, module: nn.Module) -> torch.device:
    """Where a step computes: the batch's device, else that of the parameters."""
    for tensor in chain(tensors(batch), module.parameters()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def _note_log(probe: Probe, value: Any) -> bool:
    if isinstance(value, nn.Module):
        value = [item for item in vars(value).values() if isinstance(item, Tensor)]
    probe.on_log(value)
    return False


def _lasting_tensors(module: nn.Module) -> dict[int, str]:
    """Tensors that outlive a step: buffers and plain tensor attributes, without parameters."""
    found = {}
    for path, child in module.named_modules():
        for table in (child._buffers, vars(child)):
            for name, value in table.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter | Hole):
                    found[id(value)] = f"{path}.{name}" if path else name
    return found


def _unsupported(error: Exception, probe: Probe, step: str) -> ModelError:
    if probe.record.deferred:
        what = probe.record.deferred[0][1]
        return ModelError(
            f"{what}, and {step} could not go on without ({type(error).__name__}: {error}). Keep "
            "it a tensor (torch.where, masks), or do it after the last layer."
        )
    return ModelError(
        f"{error_line(error.__traceback__)}: {step} cannot run on shapes alone "
        f"({type(error).__name__}: {error}). If the step works with pp=1, move what needs data "
        "into a layer with parameters, or declare the units yourself."
    )
