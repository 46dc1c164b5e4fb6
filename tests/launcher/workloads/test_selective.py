import pytest
import torch

from launcher.config import from_dict
from launcher.resolve import resolve
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.selective import selective_shares
from strategies.runtime.replay.structure import tensors as tensors_in
from strategies.runtime.selective.packed import Kept
from strategies.runtime.selective.region import Region, SelectiveLayer

from .test_transformer_shape import LLAMA, SHAPES

DEFAULT = frozenset({"attention", "norm", "activation"})


@pytest.fixture
def regions(monkeypatch):
    """What selective layers keep while they run: regions, and what they hand to autograd."""
    made = []

    class Watched(Region):
        def __init__(self, *args):
            super().__init__(*args)
            self.packed = []
            made.append(self)

        def pack(self, tensor):
            self.packed.append(super().pack(tensor))
            return self.packed[-1]

    monkeypatch.setattr("strategies.runtime.selective.region.Region", Watched)
    return made


def held_by(region):
    """Tensors that are there for the backward."""
    for item in region.packed:
        if isinstance(item, Kept):
            yield from item.held_tensors()
    for given in region._results.values():
        yield from tensors_in(given.result)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[] if name == "llama with dropout" else pytest.mark.full)
        for name, shape in SHAPES.items()
    ],
)
def test_units_keep_what_the_runtime_keeps(shape, regions):
    model = LanguageModel(shape).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tensors = model.pipeline_inputs(
        {name: torch.zeros(1, shape.sequence, dtype=torch.int64) for name in ("tokens", "targets")}
    )
    shares = selective_shares(shape, 1)
    loss = shape.sequence * (shape.vocab + 1)
    for index, (_, unit) in enumerate(model.pipeline_units()):
        result = SelectiveLayer(unit, DEFAULT).run(unit, tensors, {})
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            // tensor.element_size()
            for tensor in held_by(regions[-1])
            if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in parameters
        }
        wanted = shares[index].saved_elements - (loss if index == len(shares) - 1 else 0)
        assert sum(storages.values()) == wanted, index
        tensors = (result,)
    assert len(regions) == len(shares)


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
