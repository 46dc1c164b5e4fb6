"""What a rank reports at the end of a training."""

from __future__ import annotations

from types import SimpleNamespace

from launcher.rank import jobs
from strategies.runtime.step.activation_bytes import MemoryUse
from tests.emulated_device import CUDA, emulated_device


def test_the_peak_on_a_gpu_is_that_of_this_training_from_its_engine_on(monkeypatch):
    with emulated_device() as device:
        device.peak_bytes = 900  # of an earlier training in this process
        engine = SimpleNamespace(memory=MemoryUse(CUDA), norm_waits_s=[])
        strategy = SimpleNamespace(engine=engine, root_device=CUDA, measured_timeline=lambda: None)
        monkeypatch.setattr(jobs, "pipeline", lambda _: strategy)
        device.peak_bytes = max(device.peak_bytes, 400)
        closing = jobs._Closing(SimpleNamespace(dp=1, config=SimpleNamespace(tp=1)))
        closing.on_train_end(None, None)
    assert closing.memory_kind == "allocator_peak"
    assert closing.peaks == [400]
