import pytest
import torch

from strategies.models.replay.replay_model import ReplayModel
from tests.strategies.models.replay.parity import (
    assert_same,
    chosen_cuts,
    run_pipeline,
    stage_ranges,
    uncut,
)
from tests.strategies.models.replay.zoo import ZOO, build


@pytest.mark.parametrize("name", ZOO)
def test_every_cut_gives_the_gradients_and_logs_of_the_uncut_step(name):
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    expected = uncut(*build(name))
    module, batches = build(name)
    model = ReplayModel.probe(module, batches[0])
    num_units = len(model.units)
    assert num_units >= 2
    assert all(unit.cost > 0 for unit in model.units)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    attributes = dict(vars(module))
    for cuts in chosen_cuts(num_units):
        ranges = stage_ranges(cuts, num_units)
        model.cut(ranges, range(len(ranges)))
        got = run_pipeline([model], [module], len(ranges), batches)
        assert_same(got, expected)
        for buffer, value in expected.buffers.items():
            torch.testing.assert_close(got.buffers[buffer], value)
        module.zero_grad(set_to_none=True)
        vars(module).update(attributes)
        for n, b in module.named_buffers():
            b.copy_(buffers[n])


@pytest.mark.parametrize("name", ZOO)
def test_stages_on_two_owners_that_hold_their_own_parameters_only(name):
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    expected = uncut(*build(name))
    module, batches = build(name)
    modules = [build(name)[0], module]
    owners = [ReplayModel.probe(m, batches[0]) for m in modules]
    num_units = len(owners[0].units)
    num_stages = min(4, num_units)
    cuts = tuple(round(i * num_units / num_stages) for i in range(1, num_stages))
    for rank, owner in enumerate(owners):
        owner.cut(stage_ranges(cuts, num_units), range(rank, num_stages, 2))
        names = {n for s in range(rank, num_stages, 2) for n, _ in owner.stage_parameters(s)}
        assert {n for n, _ in modules[rank].named_parameters()} == names
        assert set(owner.parameter_names) == {n for n, _ in copy_names(name)}
    assert_same(run_pipeline(owners, modules, num_stages, batches, records=False), expected)


def copy_names(name):
    return build(name)[0].named_parameters()
