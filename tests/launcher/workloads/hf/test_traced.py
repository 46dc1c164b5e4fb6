"""A trace of a Hugging Face model says what the figures of a known family say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from launcher.workloads.hf.hf_model import HfLanguageModel
from strategies.tracing.operator_trace import styles_by_hand
from strategies.tracing.trace import trace_model
from tests.tiny_models import SEQUENCE, batch_of, shape_of, write_model


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_a_known_family_is_traced_as_its_formulas_have_it(family: str, tmp_path: Path):
    write_model(tmp_path, family)
    shape = shape_of(tmp_path)
    with torch.device("meta"):
        module = HfLanguageModel(shape).train()
    trace = trace_model(module, [(rows, batch_of(rows)) for rows in (2, 4)])
    assert trace.unknown == ()
    assert trace.num_parameters == shape.num_parameters
    for unit, spec in zip(trace.units, shape.unit_specs(), strict=True):
        assert (unit.name, unit.parameters) == (spec.name, spec.parameters)
        assert unit.tied_parameters == spec.tied_parameters
        assert unit.forward_flops.per_row == spec.forward_flops
        # One tensor fewer where the unit before keeps it, too; rotary constants are not shared.
        constants = 2 * SEQUENCE * 8 + 2 * SEQUENCE
        stream = 2 * SEQUENCE * shape.hidden
        assert spec.saved_elements - stream <= unit.saved_bytes.at(1) / 4
        assert unit.saved_bytes.at(1) / 4 <= spec.saved_elements + constants


def test_a_family_without_a_plan_of_the_librarys_has_none_by_hand(tmp_path: Path):
    write_model(tmp_path, "mixtral")
    with torch.device("meta"):
        module = HfLanguageModel(shape_of(tmp_path))
    assert styles_by_hand(module) is None


def test_a_family_that_is_not_known_is_traced_without_unknown_operations(tmp_path: Path):
    write_model(tmp_path, "gemma3_text")
    shape = shape_of(tmp_path)
    assert shape.sizes is None
    with torch.device("meta"):
        module = HfLanguageModel(shape).train()
    trace = trace_model(module, [(2, batch_of(2))])
    assert trace.unknown == ()
    assert len(trace.units) == shape.layers + 2
    assert sum(unit.parameters for unit in trace.units) == trace.num_parameters
    assert trace.units[-1].tied_parameters > 0
