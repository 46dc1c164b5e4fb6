"""What recomputing costs a stage, in time and in bytes held for its backward.

    python -m benchmarks.recompute_cost

Best times over the rounds, ways alternating, of one microbatch through four transformer blocks:
plain (F, B); with R (checkpointed F, R, B); torch's non-reentrant checkpoint around the stage;
selective (attention core, norms and activation again). "Twice" is plain and one more forward that
saves nothing: what R can cost at best. Asserts nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.split_backward_cost import BLOCKS, SIZES, Block, Size
from strategies.models.selective.policy import Selection
from strategies.models.stage_model import StageOutput
from strategies.runtime.step.activation_bytes import ActivationBytes
from strategies.runtime.step.recompute import Recomputation

Way = Callable[[Tensor], Tensor]


def ways(blocks: nn.Sequential) -> dict[str, Way]:
    """Each runs the forward up to the graph of the backward."""
    recomputation = Recomputation(blocks)
    layers = Selection().layers_of(dict(enumerate(blocks)))

    def stage(inputs: tuple[Tensor, ...], data: object) -> StageOutput:
        return StageOutput((blocks(*inputs),))

    def again(x: Tensor) -> Tensor:
        kept, _ = recomputation.forward(0, (x,), None, stage)
        return recomputation.again(kept, stage)[1].tensors[0]

    def twice(x: Tensor) -> Tensor:
        with torch.no_grad():
            blocks(x)
        result: Tensor = blocks(x)
        return result

    def selective(x: Tensor) -> Tensor:
        for index, block in enumerate(blocks):
            x = layers[index].run(block, (x,), {})
        return x

    return {
        "plain": blocks,
        "twice": twice,
        "R": again,
        "torch": lambda x: checkpoint(blocks, x, use_reentrant=False),
        "selective": selective,
    }


def measure(size: Size) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(size.dim) for _ in range(BLOCKS)])
    x = torch.randn(1, size.tokens, size.dim)
    best: dict[str, float] = {}
    held: dict[str, int] = {}
    found = ways(blocks)
    for _ in range(size.rounds):
        for name, way in found.items():
            leaf = x.clone().requires_grad_()
            start = time.perf_counter()
            output = way(leaf)
            between = time.perf_counter()
            if name not in held and name in best:
                measured = ActivationBytes(blocks)
                measured.begin(1, ())
                measured.graph(0, 0, (leaf,), (output,))
                held[name] = measured.stages[0].full
            after = time.perf_counter()
            output.sum().backward()  # type: ignore[no-untyped-call]
            spent = time.perf_counter() - after + between - start
            best[name] = min(best.get(name, spent), spent)
    for name, seconds in best.items():
        # torch's holders tell nobody what they keep: the stage's input.
        kept = leaf.nbytes if name == "torch" else held[name]
        ratio = seconds / best["plain"]
        sys.stdout.write(
            f"| {size.name} | {name} | {seconds * 1e3:.2f} ms | {ratio:.2f} | {kept} |\n"
        )


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.write(
        "| size | way | F and B | over plain | bytes at the backward |\n|---|---|---|---|---|\n"
    )
    for size in SIZES:
        measure(size)


if __name__ == "__main__":
    main()
