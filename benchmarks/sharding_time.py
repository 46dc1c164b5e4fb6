"""Seconds that the search for tensor shardings takes, with the trace of shapes in its file.

    python -m benchmarks.sharding_time [--tp 8] [NAME ...]

Per model: its operators, CPU seconds of the trace (once per model, then kept), of reading the
file, and of the search; and what the plan comes to, over the time of one rank alone.
The U-Net is one of diffusion: residual blocks of GroupNorm, SiLU and convolutions with a time
embedding, attention where images are small, and a skip from each block down to one up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional

from launcher.config.decode import from_dict
from launcher.rank.jobs import build_model
from launcher.resolve import resolve
from strategies.costs.hardware import Hardware
from strategies.planner.shardings.operators import dump_graph, parse_graph
from strategies.planner.shardings.plan_rows import Planner
from strategies.planner.shardings.prices import Prices
from strategies.tracing.operator_trace import trace_operators
from strategies.tracing.trace import empty_weights

_MODELS = Path(__file__).parents[1] / "conf/model"
# As conf/hardware/a100_80g.yaml, for bf16.
A100 = Hardware(
    "a100_80g", None, 0.86, 85.9, 2.039e12, 3e11, 5e-6, 2.5e10, 1e-5, 8,
    ring_bandwidth=1.5e11, ring_latency_s=7e-6, lockstep_loss=0.06, peak_bf16_flops=3.12e14,
    num_sms=108, bandwidth_efficiency=0.8, attention_efficiency=0.5, kernel_overhead_s=4e-6,
)  # fmt: skip


class Subject(NamedTuple):
    module: nn.Module
    batch: Any
    rows: int


class ResidualBlock(nn.Module):
    def __init__(self, given: int, made: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, given), nn.Conv2d(given, made, 3, padding=1)
        self.time = nn.Linear(times, made)
        self.norm2, self.conv2 = nn.GroupNorm(32, made), nn.Conv2d(made, made, 3, padding=1)
        self.short = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, images: Tensor, when: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(images)))
        inner = inner + self.time(functional.silu(when))[:, :, None, None]
        inner = self.conv2(functional.silu(self.norm2(inner)))
        outer: Tensor = self.short(images) + inner
        return outer


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, channels), heads
        self.query, self.key = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.value, self.output = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, images: Tensor) -> Tensor:
        rows, channels, high, wide = images.shape
        flat = self.norm(images).flatten(2).transpose(1, 2)
        parts = (layer(flat) for layer in (self.query, self.key, self.value))
        q, k, v = (p.view(rows, high * wide, self.heads, -1).transpose(1, 2) for p in parts)
        made = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        back = self.output(made.reshape(rows, high * wide, channels))
        inner: Tensor = back.transpose(1, 2).view(rows, channels, high, wide)
        return images + inner


class UNet(nn.Module):
    def __init__(self, width: int, blocks: int, factors: tuple[int, ...] = (1, 2, 4, 4)) -> None:
        super().__init__()
        times = 4 * width
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.times = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, now = [width], width
        for level, factor in enumerate(factors):
            for _ in range(blocks):
                self.down.append(ResidualBlock(now, factor * width, times))
                now = factor * width
                self.down.append(Attention(now) if level >= 2 else nn.Identity())
                skips.append(now)
            if level + 1 < len(factors):
                self.down.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                skips.append(now)
        self.middle = ResidualBlock(now, now, times)
        for level, factor in reversed(list(enumerate(factors))):
            for _ in range(blocks + 1):
                self.up.append(ResidualBlock(now + skips.pop(), factor * width, times))
                now = factor * width
                self.up.append(Attention(now) if level >= 2 else nn.Identity())
            if level:
                self.up.append(nn.Upsample(scale_factor=2))
        self.last = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, wanted, when = batch
        times = self.times(when)
        now = self.first(images)
        skips = [now]
        for layer in self.down:
            if isinstance(layer, ResidualBlock):
                now = layer(now, times)
            else:
                now = layer(now)
                skips.append(now)
        now = self.middle(now, times)
        for layer in self.up:
            if isinstance(layer, ResidualBlock):
                now = layer(torch.cat([now, skips.pop()], dim=1), times)
            else:
                now = layer(now)
        return functional.mse_loss(self.last(now), wanted)


def built_in(name: str) -> Subject:
    """A model of ``conf/model``."""
    sizes = OmegaConf.to_container(OmegaConf.load(_MODELS / f"{name}.yaml"))
    config = from_dict({"mode": "plan", "model": sizes})
    with empty_weights():
        module = build_model(resolve(config))
        module.configure_model()
    length = config.model.sequence
    tokens = torch.zeros(2, length, dtype=torch.long)
    return Subject(module.train(), {"tokens": tokens, "targets": tokens}, 2)


def u_net(width: int, blocks: int, side: int) -> Subject:
    with empty_weights():
        module = UNet(width, blocks)
    images = torch.zeros(4, 3, side, side)
    return Subject(module, (images, images, torch.zeros(4, width)), 4)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "llama2_13b": lambda: built_in("llama2_13b"),
    "gpt3_175b": lambda: built_in("gpt3_175b"),
    "u_net": lambda: u_net(320, 6, 64),
    "small": lambda: u_net(64, 1, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*SUBJECTS, []])
    parser.add_argument("--tp", type=int, default=8)
    asked = parser.parse_args()
    _say("model        operators   trace s    read s  search s   of tp=1")
    for name in asked.names or [name for name in SUBJECTS if name != "small"]:
        subject = SUBJECTS[name]()
        started = time.process_time()
        (graph,) = trace_operators(subject.module, subject.batch, subject.rows, [asked.tp])
        traced = time.process_time() - started
        text = dump_graph(graph)
        started = time.process_time()
        graph = parse_graph(text)
        read = time.process_time() - started
        took, share = _search(graph, asked.tp)
        _say(
            f"{name:12} {len(graph.operators):9} {traced:9.2f} {read:9.2f} {took:9.2f} {share:9.1%}"
        )


def _search(graph: Any, tp: int) -> tuple[float, float]:
    started = time.process_time()
    plan = Planner(graph, Prices(A100, tp, number_format="bf16")).found()
    return time.process_time() - started, plan.seconds / plan.seconds_whole


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
