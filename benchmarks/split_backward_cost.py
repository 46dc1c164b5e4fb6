"""What splitting the backward costs: F+I+W beside F+B of the same stage, alternating.

    python -m benchmarks.split_backward_cost

Prints medians over the rounds and their ratio for a stage of transformer blocks, small (where
Python's time shows) and large (where products do), for a later stage and for the first one. Each
round runs three microbatches of both kinds. Asserts nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from strategies.models.split_backward.input_step import input_backward

MICROBATCHES = 3
HEADS = 4
BLOCKS = 4


@dataclass(frozen=True)
class Size:
    name: str
    dim: int
    tokens: int
    rounds: int


SIZES = (Size("small", 64, 16, 150), Size("large", 512, 256, 9))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, -1)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Stage:
    """Blocks whose gradients are there, as they are in a run."""

    def __init__(self, size: Size, *, first: bool) -> None:
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block(size.dim) for _ in range(BLOCKS)])
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.data = torch.randn(1, size.tokens, size.dim)
        self.gradient = torch.randn_like(self.data)
        self.first = first

    def forward(self) -> tuple[Tensor, Tensor]:
        leaf = self.data.detach().requires_grad_(not self.first)
        return leaf, self.blocks(leaf)

    def full(self) -> None:
        for _ in range(MICROBATCHES):
            _, output = self.forward()
            torch.autograd.backward([output], [self.gradient])

    def split(self, *, exact: bool = False) -> None:
        for _ in range(MICROBATCHES):
            leaf, output = self.forward()
            inputs = [] if self.first else [leaf]
            pending = input_backward([output], [self.gradient], inputs, exact=exact)
            del output
            pending.run()

    def exact(self) -> None:
        self.split(exact=True)


def parts(stage: Stage, rounds: int) -> tuple[float, float, float]:
    """Median milliseconds of F, I and W of one microbatch."""
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        times = [time.process_time()]
        leaf, output = stage.forward()
        times.append(time.process_time())
        inputs = [] if stage.first else [leaf]
        pending = input_backward([output], [stage.gradient], inputs)
        del output
        times.append(time.process_time())
        pending.run()
        times.append(time.process_time())
        found.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    f, i, w = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
    return f, i, w


def alternating(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of CPU time per microbatch."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append((time.process_time() - start) / MICROBATCHES)
    return {name: statistics.median(found[1:]) * 1e3 for name, found in times.items()}


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    for size in SIZES:
        for first in (False, True):
            stage = Stage(size, first=first)
            calls = {"full": stage.full, "split": stage.split, "exact": stage.exact}
            medians = alternating(calls, size.rounds)
            f, i, w = parts(stage, size.rounds)
            sys.stdout.write(
                f"{size.name:5} {'first' if first else 'later'} stage: "
                f"F+B {medians['full']:8.3f} ms, F+I+W {medians['split']:8.3f} ms, "
                f"ratio {medians['split'] / medians['full']:.3f} "
                f"(exact {medians['exact'] / medians['full']:.3f}); "
                f"F {f:.3f}, I {i:.3f}, W {w:.3f} ms\n"
            )


if __name__ == "__main__":
    main()
