"""Small problems for the planner: a transformer-like chain on a machine with two link classes."""

from __future__ import annotations

from dataclasses import replace

from strategies.costs.hardware import ElementSizes, Hardware
from strategies.costs.load import Load
from strategies.planner.problem import Machine, Problem

MACHINE = Hardware(
    name="test",
    peak_flops=1e13,
    efficiency=0.5,
    memory_gb=1.0,
    memory_bandwidth=1e12,
    intra_bandwidth=1e11,
    intra_latency_s=5e-6,
    inter_bandwidth=1e10,
    inter_latency_s=2e-5,
    gpus_per_node=4,
)


def problem(
    layers: int = 6, *, memory: float = 1e9, hidden: int = 256, tokens: int = 512,
    vocab: int = 8192, barrier: bool = False,
) -> Problem:  # fmt: skip
    """Embedding, attention and MLP per layer, head; matrices can be shared by up to 4 ranks."""
    stream = tokens * hidden

    def loads(tp: int, size: int, selective: bool) -> tuple[Load, ...]:
        def unit(flops: float, parameters: int, saved: int, sums: int) -> Load:
            add = (stream * size,) * sums if tp > 1 else ()
            # Selective: a sixth of the products again, and half of the activations.
            kept, again = (saved // 2, flops / 6) if selective else (saved, 0.0)
            return Load(
                flops * size / tp, parameters // tp, stream * size, kept * size // tp, add, add,
                again * size / tp,
            )  # fmt: skip

        attention = unit(
            8.0 * stream * hidden + 4.0 * tokens * stream, 4 * hidden**2, 6 * stream, 1
        )
        mlp = unit(24.0 * stream * hidden, 12 * hidden**2, 14 * stream, 1)
        first = unit(0.0, vocab * hidden, tokens, 1)
        head = unit(2.0 * stream * vocab, vocab * hidden, 2 * tokens * vocab, 0)
        return (first, *((attention, mlp) * layers), head)

    machine = Machine(
        replace(MACHINE, memory_gb=memory / 1e9), ElementSizes(), waits_at_flush=barrier
    )

    def refuse(tp: int) -> str | None:
        return None if tp in (1, 2, 4) else f"tp={tp} does not divide model.heads=4. Try tp=4."

    return Problem(machine, loads, 2 * layers + 2, refuse)


def with_memory(asked: Problem, num_bytes: int) -> Problem:
    """The same where ranks have so many bytes."""
    machine = asked.machine
    hardware = replace(machine.hardware, memory_gb=num_bytes / 1e9)
    return replace(asked, machine=replace(machine, hardware=hardware))
