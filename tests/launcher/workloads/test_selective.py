import gc

import pytest
import torch

from launcher.config import from_dict
from launcher.resolve import resolve
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.selective import selective_shares
from strategies.runtime.selective.packed import Kept
from strategies.runtime.selective.region import SelectiveLayer

from .test_transformer_shape import LLAMA, SHAPES

DEFAULT = frozenset({"attention", "norm", "activation"})


def kept_by(run):
    """Elements of storages that live for a backward and are no parameters."""
    gc.collect()
    before = {id(item) for item in gc.get_objects()}
    result = run()
    gc.collect()
    found = [item for item in gc.get_objects() if id(item) not in before]
    tensors = []
    for item in found:
        if type(item) is Kept:
            tensors += item.held_tensors()
        elif type(item).__name__ == "_Result":
            tensors += [v for v in gc.get_referents(item) if type(v) is torch.Tensor]
    return result, tensors


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc looks at torch's deprecated modules
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_units_keep_what_the_runtime_keeps(shape):
    model = LanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tensors = model.pipeline_inputs(
        {name: torch.zeros(1, shape.sequence, dtype=torch.int64) for name in ("tokens", "targets")}
    )
    shares = selective_shares(shape, 1)
    loss = shape.sequence * (shape.vocab + 1)
    for index, (_, unit) in enumerate(model.pipeline_units()):
        layer, given = SelectiveLayer(unit, DEFAULT), tensors
        result, kept = kept_by(lambda layer=layer, unit=unit, given=given: layer.run(
            unit, given, {}
        ))  # fmt: skip
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            // tensor.element_size()
            for tensor in kept
            if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in parameters
        }
        wanted = shares[index].saved_elements - (loss if index == len(shares) - 1 else 0)
        assert sum(storages.values()) == wanted, index
        tensors = (result,)


def test_ranks_share_what_their_matrices_give():
    whole, shared = selective_shares(LLAMA, 1), selective_shares(LLAMA, 2)
    stream = LLAMA.sequence * LLAMA.hidden
    for one, two in zip(whole[1:-1], shared[1:-1], strict=True):
        assert two.saved_elements - stream == (one.saved_elements - stream) // 2
        assert two.again_flops == one.again_flops / 2
    cut = selective_shares(LLAMA, 2, sequence_parallel=True)
    assert cut[1].saved_elements == shared[1].saved_elements - stream // 2


def test_a_prediction_trades_memory_for_the_attention_core():
    def predicted(name):
        config = {
            "mode": "simulate", "pp": 2, "num_microbatches": 4,
            "recompute": {"name": name}, "trainer": {"accelerator": "cpu"},
        }  # fmt: skip
        run = resolve(from_dict(config))
        return run.costs.table(run.programs.train)

    plain, selective = predicted("none"), predicted("selective")
    assert plain.forward == selective.forward
    assert plain.backward_weight == selective.backward_weight
    for stage in range(2):
        assert selective.activation_bytes[stage] < plain.activation_bytes[stage]
        more = selective.backward[stage] - plain.backward[stage]
        assert more == pytest.approx(selective.backward_input[stage] - plain.backward_input[stage])
        assert 0 < more < plain.forward[stage]
