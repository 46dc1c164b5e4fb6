"""Times of the kernels that layers are made of, beside what the card's hardware file predicts."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.compose.session import compose_checked, hydra_session
from strategies.costs.hardware import ElementSizes, Hardware
from strategies.costs.kernels import (
    Core,
    Product,
    Work,
    memory_bound,
    product_seconds,
    unit_seconds,
)
from tools.gpu_proof.proof import Setting
from tools.gpu_proof.timing import Clock

# Name: hidden, queries, keys (and values), inner width, tokens of a sequence.
MODELS = {
    "1b": (2048, 2048, 512, 8192, 2048),
    "7b": (4096, 4096, 4096, 11008, 4096),
    "13b": (5120, 5120, 5120, 13824, 4096),
    "70b": (8192, 8192, 1024, 28672, 4096),
}
_VOCAB = 32000
_SIZES = ElementSizes(weight=2, activation=2)
_POOL = 2**30  # elements, 2 GB: operands rotate through it, so that none lies in the cache
_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)  # fmt: skip


def hardware_of(device: str) -> Hardware:
    """The description of a card under ``conf/hardware``."""
    with hydra_session():
        return compose_checked(["mode=simulate", f"hardware={described(device)}"])[0].hardware


def described(device: str) -> str:
    """The name under ``conf/hardware`` of what is measured."""
    if device != "cuda":
        return "h100"  # A CPU's file has no bf16; a rehearsal compares nothing.
    name = torch.cuda.get_device_name(0).lower()
    known = {"h200": "h200", "h100": "h100", "a100": "a100_80g"}
    return next((found for word, found in known.items() if word in name), "h100")


def kernels(setting: Setting) -> dict[str, Any]:
    """Products, attention, and what is bound by memory."""
    clock = Clock(setting.device, quick=setting.quick)
    hardware = hardware_of(setting.device)
    until = time.perf_counter() + 0.8 * setting.seconds
    clock.warm(2.0)
    found: dict[str, Any] = {"hardware": described(setting.device), "clocks": clock.clocks()}
    found["large_products"] = _large_products(clock)
    setting.keep(found)
    found["attention"] = _attention(clock, hardware)
    setting.keep(found)
    found["memory_bound"] = _memory_bound(clock, hardware)
    setting.keep(found)
    rows: list[dict[str, Any]] = []
    for row in _products(clock, hardware, until):
        rows.append(row)
        if len(rows) % 50 == 0:
            setting.keep(found | {"products": rows})
    found["products"] = rows
    found["summary"] = summary(rows)
    found["constants"] = _constants(found, hardware)
    found["clocks_after"] = clock.clocks()
    return found


def shapes() -> Iterator[tuple[str, Product]]:
    """Every product of a layer, microbatches 1 to 8 and tensor parallelism 1 to 8."""
    for size in (4, 1, 2, 8):
        for tp in (1, 8, 4, 2):
            for name, (hidden, queries, keys, inner, tokens) in MODELS.items():
                rows = size * tokens
                for matrix, columns, depth in (
                    ("qkv", (queries + 2 * keys) // tp, hidden),
                    ("out", hidden, queries // tp),
                    ("gate_up", 2 * inner // tp, hidden),
                    ("down", hidden, inner // tp),
                    ("head", _VOCAB // tp, hidden),
                ):
                    yield f"{name} tp{tp} mb{size} {matrix}", Product(rows, columns, depth)


def _products(clock: Clock, hardware: Hardware, until: float) -> Iterator[dict[str, Any]]:
    """Seconds of forward, input gradient and weight gradient, measured and predicted."""
    pool = clock.random(2**14 if clock.quick else _POOL)
    place = 0

    def take(rows: int, columns: int) -> torch.Tensor:
        nonlocal place
        place = place + rows * columns if place + 2 * rows * columns < pool.numel() else 0
        return pool[place : place + rows * columns].view(rows, columns)

    wanted = list(shapes())
    for name, product in wanted[:4] if clock.quick else wanted:
        m, n, k, _ = Product(32, 48, 64) if clock.quick else product
        if time.perf_counter() > until:
            return
        if max(m * k, m * n, n * k) * 2 >= pool.numel():
            continue
        calls = (
            (lambda m=m, n=n, k=k: take(m, k) @ take(n, k).T, Product(m, n, k)),
            (lambda m=m, n=n, k=k: take(m, n) @ take(n, k), Product(m, k, n)),
            (lambda m=m, n=n, k=k: take(m, n).T @ take(m, k), Product(n, k, m)),
        )
        yield {
            "name": name,
            "shape": [m, n, k],
            "measured_s": [clock.seconds(call, 6e-3, 8) for call, _ in calls],
            "predicted_s": [product_seconds(p, hardware, "bf16") for _, p in calls],
        }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the predictions, over all products and by model."""
    found = {}
    for name in ("", *MODELS):
        errors = sorted(
            predicted / measured - 1
            for row in rows
            if row["name"].startswith(name)
            for predicted, measured in zip(row["predicted_s"], row["measured_s"], strict=True)
        )
        if errors:
            sizes = sorted(map(abs, errors))
            found[name or "all"] = {
                "count": len(errors),
                "median": statistics.median(errors),
                "median_size": statistics.median(sizes),
                "p90_size": sizes[int(0.9 * (len(sizes) - 1))],
            }
    return found


def _large_products(clock: Clock) -> dict[str, float]:
    """FLOP/s of a square product, by type; warm, on normal numbers."""
    side = 32 if clock.quick else 8192
    found = {}
    for name, kind, tf32 in (
        ("bf16", torch.bfloat16, False), ("fp16", torch.float16, False),
        ("tf32", torch.float32, True), ("fp32", torch.float32, False),
    ):  # fmt: skip
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a, b = clock.random(side, side, dtype=kind), clock.random(side, side, dtype=kind)
        found[name] = 2 * side**3 / clock.seconds(partial(torch.mm, a, b), 0.1)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def _attention(clock: Clock, hardware: Hardware) -> dict[str, Any]:
    """Seconds of forward and backward by each of torch's kernels, and which one torch takes."""
    found: dict[str, Any] = {}
    cases = (
        ("1b", 4, 32, 8, 2048, 64, torch.bfloat16),
        ("7b", 1, 32, 32, 4096, 128, torch.bfloat16),
        ("7b_tp8", 1, 4, 4, 4096, 128, torch.bfloat16),
        ("70b", 1, 64, 8, 4096, 128, torch.bfloat16),
        ("fp32", 2, 32, 32, 2048, 64, torch.float32),
        ("fp32_grouped", 2, 32, 8, 2048, 64, torch.float32),
    )
    for name, batch, heads, groups, tokens, head, kind in cases:
        if clock.quick:
            batch, tokens = 1, 64
        q, k, v = (
            clock.random(batch, count, tokens, head, dtype=kind, grad=True)
            for count in (heads, groups, groups)
        )

        def call(q: Any = q, k: Any = k, v: Any = v, grouped: bool = heads != groups) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        row: dict[str, Any] = {"flops_causal": 2 * batch * heads * tokens * tokens * head}
        core = Core(batch * heads, tokens, head)
        if kind is torch.bfloat16:
            own = unit_seconds(Work(core=core), hardware, _SIZES, "bf16")
            row["predicted_s"] = [own.forward, own.inputs]
        if clock.gpu:
            with contextlib.suppress(Exception):
                chosen = torch._fused_sdp_choice(
                    q, k, v, None, 0.0, True, scale=None, enable_gqa=heads != groups
                )
                row["chosen"] = SDPBackend(chosen).name
        for backend in (None, *_BACKENDS):
            key = "default" if backend is None else backend.name.removesuffix("_ATTENTION")
            try:
                with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                    out = call()
                    g = torch.randn_like(out)
                    row[key] = [
                        clock.seconds(call),
                        clock.seconds(
                            partial(torch.autograd.grad, out, (q, k, v), g, retain_graph=True)
                        ),
                    ]
            except RuntimeError as error:
                row[key] = str(error).splitlines()[0][:80]
        found[name] = row
    return found


def _memory_bound(clock: Clock, hardware: Hardware) -> dict[str, Any]:
    """Seconds, and the bytes per second that the cost model's counts of elements come to."""
    tokens, hidden = (64, 128) if clock.quick else (8192, 4096)
    x, up = clock.random(tokens, hidden, grad=True), clock.random(tokens, hidden)
    y, w = clock.random(tokens, hidden), clock.random(hidden, grad=True)
    sums = torch.zeros(tokens, hidden, device=clock.device)
    logits = clock.random(tokens, 4 * hidden, grad=True)
    target = torch.randint(4 * hidden, (tokens,), device=clock.device)
    norm = F.rms_norm(x, (hidden,), w)
    loss = F.cross_entropy(logits.float(), target)
    still = x.detach()
    cases = {
        "rms_norm": (lambda: F.rms_norm(x, (hidden,), w), 2),
        "rms_norm_backward": (lambda: torch.autograd.grad(norm, (x, w), y, retain_graph=True), 5),
        "add": (lambda: still + y, 3),
        "silu_mul": (lambda: F.silu(still) * up, 5),
        "add_to_fp32_sum": (lambda: sums.add_(y), 5),
        "cross_entropy": (lambda: F.cross_entropy(logits.float(), target), 24),
        "cross_entropy_backward": (
            lambda: torch.autograd.grad(loss, logits, retain_graph=True),
            20,
        ),
    }
    found = {}
    for name, (call, elements) in cases.items():
        took, moved = clock.seconds(call), 2.0 * elements * tokens * hidden
        expected = memory_bound(hardware, moved) + hardware.kernel_overhead_s
        found[name] = {"s": took, "predicted_s": expected, "bytes_per_s": moved / took}
    one = torch.ones(1, device=clock.device)
    found["launch"] = clock.host(lambda: one.add_(1))
    return found


def _constants(found: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    """What the constants of the hardware file would be, each from the kernels that it is about."""
    peak = hardware.peak("bf16")
    plain = ("add", "silu_mul", "rms_norm", "add_to_fp32_sum")
    reached = statistics.median(found["memory_bound"][name]["bytes_per_s"] for name in plain)
    constants: dict[str, Any] = {
        "efficiency": [hardware.efficiency, found["large_products"]["bf16"] / peak],
        "bandwidth_efficiency": [
            hardware.bandwidth_efficiency,
            reached / hardware.memory_bandwidth,
        ],
    }
    constants["kernel_overhead_s"] = [
        hardware.kernel_overhead_s, found["memory_bound"]["launch"]["done_s"],
    ]  # fmt: skip
    forwards, backwards = [], []
    for name in ("1b", "7b", "70b"):
        row = found["attention"][name]
        forward, backward = row["default"]
        forwards.append(row["flops_causal"] / forward / peak)
        backwards.append(backward / forward)
    constants["attention_efficiency"] = [
        hardware.attention_efficiency, math.exp(statistics.fmean(map(math.log, forwards))),
    ]  # fmt: skip
    constants["attention_backward_over_forward"] = [2.5, statistics.median(backwards)]
    # What the largest products reach: FLOPs over time, the median of the twenty largest.
    large = sorted(
        (
            2.0 * math.prod(row["shape"]) / min(row["measured_s"]) / peak
            for row in found["products"]
            if math.prod(row["shape"]) > 1e12
        ),
        reverse=True,
    )
    if large:
        constants["efficiency_of_layers"] = [hardware.efficiency, statistics.median(large)]
    return constants
