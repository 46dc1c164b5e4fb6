"""Traces are kept, and looked at again only while nothing has changed that they depend on."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config import LaunchConfig
from launcher.config.workload import DataConfig, ModelConfig
from launcher.planning import model_trace
from launcher.resolve import model_shape
from strategies.costs.trace_file import Line, TracedModel, TracedUnit

LINE = Line(0.0, 1.0)
TRACE = TracedModel("Net", 3, (TracedUnit("a", 3, (), LINE, LINE, LINE, LINE),), ())


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    site = tmp_path / "site"
    (site / "my_traced").mkdir(parents=True)
    (site / "my_traced" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (site / "my_traced" / "net.py").write_text("def build(config): ...\n")
    info = site / "my_traced-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-traced\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[foldpipe.models]\nmy_traced = my_traced.net:build\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return LaunchConfig(model=ModelConfig(name="my_traced"))


def test_what_is_written_is_found_again_and_nothing_is_imported(config: LaunchConfig, tmp_path):
    shape = model_shape(config)
    assert model_trace.read_cached_trace(config, shape) is None
    model_trace.write_cached_trace(config, shape, TRACE)
    assert model_trace.read_cached_trace(config, shape) == TRACE
    assert "my_traced" not in sys.modules
    # How a batch is cut is the planner's business.
    other = replace(config, data=DataConfig(microbatch_size=4, global_batch_size=64))
    assert model_trace.read_cached_trace(other, shape) == TRACE


def test_a_change_of_the_package_or_of_a_key_asks_for_a_new_trace(config: LaunchConfig, tmp_path):
    shape = model_shape(config)
    model_trace.write_cached_trace(config, shape, TRACE)
    for other in (replace(config, seed=1), replace(config, data=DataConfig(val_fraction=0.2))):
        assert model_trace.read_cached_trace(other, shape) is None
    source = tmp_path / "site" / "my_traced" / "net.py"
    source.write_text("def build(config): return 1\n")
    assert model_trace.read_cached_trace(config, shape) is None


def test_a_damaged_or_unwritable_cache_is_none(config: LaunchConfig, tmp_path, monkeypatch):
    shape = model_shape(config)
    model_trace.write_cached_trace(config, shape, TRACE)
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()
    file.write_text(file.read_text()[:40])
    assert model_trace.read_cached_trace(config, shape) is None
    (tmp_path / "no_folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_folder"))
    model_trace.write_cached_trace(config, shape, TRACE)
    assert model_trace.read_cached_trace(config, shape) is None


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now
