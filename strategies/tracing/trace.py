"""``trace_model``: a module and a batch of two sizes to a ``TracedModel``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import nn

from strategies.compiler import compile_plan
from strategies.costs.trace_file import (
    Line,
    TracedAgain,
    TracedExperts,
    TracedModel,
    TracedTensor,
    TracedUnit,
)
from strategies.errors import ModelError
from strategies.models.unit_model import HasUnits
from strategies.plan import Options, Plan
from strategies.planner.stage_layers import stage_layers, stage_units
from strategies.tracing.figures import ExpertLayer, Tracer
from strategies.tracing.replayed import (
    ModelFigures,
    again_bytes,
    saved_bytes,
    trace_declared,
    trace_replayed,
)


def trace_model(
    module: nn.Module,
    microbatches: Sequence[tuple[int, Any]],
    *,
    chain: str | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> TracedModel:
    """Figures of all units, as straight lines in the rows of a microbatch.

    Args:
        module: Its parameters may be on the meta device; nothing of it is changed.
        microbatches: One or two of them, each with its rows.
        chain: Name of the container of layers, where they are not found as wished.
        autocast: The types in which steps run.

    Raises:
        ModelError: The module cannot be cut or traced; with the operation and the layer.
    """
    tracer = Tracer(autocast)
    found: list[tuple[int, ModelFigures]] = []
    for rows, batch in microbatches[:2]:
        with autocast():
            figures = _figures(module, batch, tracer, chain)
        found.append((rows, figures))
    first, second = found[0], found[-1] if len(found) > 1 else None
    if second is not None and _shape(first[1]) != _shape(second[1]):
        raise ModelError(
            f"{type(module).__name__} runs other layers for {second[0]} rows than for {first[0]}: "
            "its stages would depend on the size of a microbatch.",
            fix="Choose pp= and schedule= by hand.",
        )
    return _traced(module, first, second)


def list_stages(
    module: LightningModule, batch: Any, rows: int, plan: Plan, options: Options, *, entries: bool
) -> str:
    """What ``PipelineStrategy.describe`` says: a line per stage, in the order of ranks.

    With ``entries`` the recording's follow each.
    """
    placement = compile_plan(plan).train.placement
    figures = _figures(module, batch, Tracer(nullcontext), options.pipeline_layers)
    trace = _traced(module, (rows, figures), None)
    units = stage_units(trace, placement.num_stages, options.units_per_stage, rows=rows)
    lines = stage_layers(trace, placement.num_stages, options.units_per_stage, rows=rows)
    found = []
    for rank in range(placement.num_ranks):
        for stage in placement.stages_of(rank):
            found.append(f"rank {rank}: stage {stage}: {lines[stage]}")
            for unit in units[stage] if entries else ():
                found += [f"  {line}" for line in figures.units[unit].recorded]
    return "\n".join(found)


def _figures(module: nn.Module, batch: Any, tracer: Tracer, chain: str | None) -> ModelFigures:
    if isinstance(module, HasUnits):
        return trace_declared(module, batch, tracer)
    return trace_replayed(cast(LightningModule, module), batch, tracer, chain=chain)


def _shape(figures: ModelFigures) -> object:
    edges = tuple((producer, consumers) for producer, consumers, _ in figures.tensors)
    return tuple((unit.name, len(unit.experts)) for unit in figures.units), edges


def _traced(
    module: nn.Module, first: tuple[int, ModelFigures], second: tuple[int, ModelFigures] | None
) -> TracedModel:
    def line(value: Callable[[ModelFigures], float]) -> Line:
        other = None if second is None else (second[0], value(second[1]))
        return Line.through((first[0], value(first[1])), other)

    parameters = dict(module.named_parameters(remove_duplicate=False))
    sizes = {name: (id(p), p.numel()) for name, p in parameters.items()}
    owner: dict[int, int] = {}
    units = []
    unknown = []
    for number, unit in enumerate(first[1].units):
        own = dict(sizes[name] for name in unit.parameters)
        fresh = sum(size for key, size in own.items() if key not in owner)
        tied: dict[int, int] = {}
        for key, size in own.items():
            if owner.setdefault(key, number) != number:
                tied[owner[key]] = tied.get(owner[key], 0) + size
        units.append(
            TracedUnit(
                name=unit.name,
                parameters=fresh,
                tied=tuple(sorted(tied.items())),
                forward_flops=line(lambda f, n=number: f.units[n].forward_flops),  # type: ignore[misc]
                input_flops=line(lambda f, n=number: f.units[n].input_flops),  # type: ignore[misc]
                weight_flops=line(lambda f, n=number: f.units[n].weight_flops),  # type: ignore[misc]
                saved_bytes=line(lambda f, n=number: saved_bytes(f.units, n)),  # type: ignore[misc]
                again=TracedAgain(
                    line(lambda f, n=number: again_bytes(f.units, n)),  # type: ignore[misc]
                    line(lambda f, n=number: f.units[n].again_flops),  # type: ignore[misc]
                    line(lambda f, n=number: f.units[n].again_elements),  # type: ignore[misc]
                )
                if unit.runs_again
                else None,
                experts=_experts(number, unit.experts, line),
                cost=line(lambda f, n=number: f.units[n].cost),  # type: ignore[misc]
            )
        )
        unknown += [(operation, unit.name) for operation in sorted(unit.unknown)]
    tensors = tuple(
        TracedTensor(producer, consumers, line(lambda f, n=number: f.tensors[n][2]))  # type: ignore[misc]
        for number, (producer, consumers, _) in enumerate(first[1].tensors)
    )
    return TracedModel(
        type(module).__name__,
        sum(parameter.numel() for parameter in module.parameters()),
        tuple(units),
        tensors,
        tuple(unknown),
        isinstance(module, HasUnits),
    )


def _experts(
    number: int,
    layers: tuple[ExpertLayer, ...],
    line: Callable[[Callable[[ModelFigures], float]], Line],
) -> TracedExperts | None:
    """Of a unit whose layers have some."""
    if not layers:
        return None

    def sums(figure: Callable[[ExpertLayer], float]) -> Line:
        return line(lambda model: sum(map(figure, model.units[number].experts)))

    return TracedExperts(
        layers=len(layers),
        experts=math.gcd(*(layer.experts for layer in layers)),
        parameters=sum(layer.parameters for layer in layers),
        flops=sums(lambda layer: layer.flops),
        saved_bytes=sums(lambda layer: layer.saved_bytes),
        sent_bytes=sums(lambda layer: layer.sent_bytes),
    )


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Inside, every parameter goes to the meta device as soon as a module gets it.

    Unlike under ``torch.device("meta")``, constants that a constructor computes (rotary tables,
    lists of dropout rates) have values, so its Python code can look at them. A layer of torch first
    asks for memory, which no page backs before it is written to, and draws its weights after that:
    nothing is written. Tied parameters stay tied.
    """
    given = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter and not param.is_meta:
            if id(param) not in moved:
                meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                moved[id(param)] = (param, meta)
            param = moved[id(param)][1]
        given(module, name, param)

    owner: Any = nn.Module
    owner.register_parameter = register
    try:
        yield
    finally:
        owner.register_parameter = given
