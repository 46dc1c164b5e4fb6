"""The trace of a model that only its ranks can build: from the cache, or from a child process.

The planner's own process never imports torch; tracing needs it, and the user's package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from launcher.config import LaunchConfig, dump
from launcher.installed import installed_names
from launcher.planning.trace_cache import read_cached_trace, write_cached_trace
from launcher.resolve import element_sizes, model_shape
from launcher.terminal import say
from launcher.workloads.hf.shape import HfShape
from launcher.workloads.specs import ModelShape
from launcher.workloads.traced_shape import TracedShape
from strategies import errors
from strategies.costs.traced import TracedModel, parse_trace
from strategies.errors import ModelError, PipelineError

TASK, TRACE, PROBLEM = "trace_task.json", "model_trace.json", "trace_problem.json"
_LOG = "trace.log"


def needs_trace(config: LaunchConfig, shape: ModelShape) -> bool:
    """Whether only the ranks know the sizes of a model's units."""
    own = config.model.name in installed_names("model")
    return own or (isinstance(shape, HfShape) and shape.sizes is None)


def traced_shape(config: LaunchConfig, run_dir: Path) -> TracedShape | None:
    """The model's trace; None for a model whose sizes are known without one.

    Args:
        config: What was asked.
        run_dir: Where the child leaves its log.

    Raises:
        ModelError: The model cannot be built or traced; with the operation and the layer.
    """
    shape = model_shape(config)
    if not needs_trace(config, shape):
        return None
    trace = read_cached_trace(config, shape)
    if trace is None:
        trace = _trace(config, run_dir)
        write_cached_trace(config, shape, trace)
    for operation, unit in trace.unknown:
        say(
            f"warning: no FLOP formula for {operation} in {unit}: counted as one operation per "
            "element that it writes. Give it one with torch.utils.flop_counter."
            "register_flop_formula where the model is defined."
        )
    text = config.data.name not in installed_names("data")
    return TracedShape(
        trace,
        config.model.name,
        sequence=shape.sequence if text else 1,
        activation_bytes=element_sizes(config).activation,
    )


def _trace(config: LaunchConfig, run_dir: Path) -> TracedModel:
    """Runs the child; it writes the trace, or what is wrong."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / TASK).write_text(json.dumps({"config": dump(config)}))
    log = run_dir / _LOG
    say(f"tracing model={config.model.name} (once; kept in the user's cache)")
    with log.open("w") as output:
        code = subprocess.run(
            [sys.executable, "-m", "launcher.trace_job", str(run_dir)],
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            # A GPU would be taken for a trace that runs on shapes.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        ).returncode
    (run_dir / TASK).unlink(missing_ok=True)
    problem = run_dir / PROBLEM
    if problem.is_file():
        found = json.loads(problem.read_text())
        problem.unlink()
        raise _error(found["kind"])(found["message"])
    if code or not (run_dir / TRACE).is_file():
        raise ModelError(
            f"model={config.model.name} could not be traced: the tracing process ended with code "
            f"{code}; the end of {log} says why. Try mode=train with pp= and schedule= by hand."
        )
    trace = parse_trace((run_dir / TRACE).read_text())
    (run_dir / TRACE).unlink()
    return trace


def _error(kind: str) -> type[PipelineError]:
    found = getattr(errors, kind, ModelError)
    return found if isinstance(found, type) and issubclass(found, PipelineError) else ModelError
