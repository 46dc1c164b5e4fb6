"""A step is recorded once, and stages execute their part of the recording."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from strategies.models.replay.replay_model import ReplayModel
from tests.strategies.models.replay.parity import (
    assert_same,
    run_pipeline,
    stage_ranges,
    uncut,
)
from tests.strategies.models.replay.zoo import DIM, classes, rand


class Net(LightningModule):
    """Layers in a row; what is between them is a test's own."""

    def __init__(self, block=lambda: nn.Linear(DIM, DIM)):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(DIM, 5)
        self.double()

    def between(self, x, batch, index):
        return x

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for index, block in enumerate(self.blocks):
            x = self.between(block(x), batch, index)
        return F.cross_entropy(self.head(x), batch[1])


def batches(count=2):
    torch.manual_seed(1)
    return [(rand(3, DIM), classes(3)) for _ in range(count)]


def check(make, cuts=((1,), (2,), (1, 3), (1, 2, 3, 4))):
    expected = uncut(make(), batches())
    for cut in cuts:
        module = make()
        model = ReplayModel.probe(module, batches()[0])
        model.cut(stage_ranges(cut, len(model.units)), range(len(cut) + 1))
        assert_same(run_pipeline([model], [module], len(cut) + 1, batches()), expected)


def stages(module, count=3):
    """A model of so many stages."""
    model = ReplayModel.probe(module, batches()[0])
    cuts = tuple(range(1, count))
    model.cut(stage_ranges(cuts, len(model.units)), range(count))
    return model


def call(model, stage, inputs, recording, **others):
    options = {"batch": batches()[0], "batch_idx": 0, "microbatch": 0, "mode": "train"}
    return model.forward(stage, inputs, seed=None, recording=recording, **options, **others)


def record(model, batch=None):
    batch = batches()[0] if batch is None else batch
    return model.record(batch=batch, batch_idx=0, microbatch=0, mode="train")


def received(output):
    return tuple(tensor.detach().requires_grad_() for tensor in output.tensors)


def test_python_runs_once_for_all_stages_and_once_behind_the_last_layer():
    runs = []

    class Counted(Net):
        def training_step(self, batch, batch_idx):
            runs.append(batch_idx)
            return super().training_step(batch, batch_idx)

    model = stages(Counted(), 4)
    del runs[:]
    recording, given = record(model), ()
    for stage in range(3):
        for _ in range(2):  # F, and R
            output = call(model, stage, given, recording)
        given = received(output)
    assert len(runs) == 1
    assert call(model, 3, given, recording).loss is not None
    assert len(runs) == 2


def test_a_tensor_that_is_written_again_has_the_value_that_each_layer_got():
    class Refills(Net):
        def training_step(self, batch, batch_idx):
            x, shift = batch[0], torch.zeros(DIM, dtype=torch.float64)
            for index, block in enumerate(self.blocks):
                shift.fill_(index)
                x = block(x + shift)
            return F.cross_entropy(self.head(x), batch[1])

    check(Refills)


def test_what_a_layer_writes_into_is_the_same_when_it_runs_again():
    class Writes(nn.Linear):
        def forward(self, x, mask):
            mask += 1
            return super().forward(x) * mask

    class Masked(Net):
        def training_step(self, batch, batch_idx):
            x = batch[0]
            for block in self.blocks:
                x = block(x, torch.ones(DIM, dtype=torch.float64))
            return F.cross_entropy(self.head(x), batch[1])

    def make():
        return Masked(lambda: Writes(DIM, DIM))

    check(make)
    model = stages(make())
    recording = record(model)
    outputs = [call(model, 0, (), recording).tensors[0] for _ in range(3)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("kind", ["value", "layer"])
def test_hooks_of_gradients_see_those_of_the_executed_part(kind):
    seen = []

    class Hooked(Net):
        def __init__(self):
            super().__init__()
            if kind == "layer":
                for block in self.blocks[1:]:
                    block.register_full_backward_hook(lambda *_: seen.append(1))

        def between(self, x, batch, index):
            if kind == "value":
                x.register_hook(lambda gradient: seen.append(1) or gradient * 2)
            return x

    expected = uncut(Hooked(), batches())
    times = len(seen)
    del seen[:]
    module = Hooked()
    model = stages(module, 4)
    assert_same(run_pipeline([model], [module], 4, batches()), expected)
    assert len(seen) == times


def test_a_forward_hook_runs_with_the_layers_values():
    shapes = []

    def hook(layer, args, output):
        if type(output) is torch.Tensor:
            shapes.append(float(output.detach().mean()))
        return output * 2

    def make():
        module = Net()
        module.blocks[0].register_forward_hook(hook)
        return module

    expected = uncut(make(), batches())
    values = list(shapes)
    del shapes[:]
    module = make()
    model = stages(module)
    del shapes[:]
    assert_same(run_pipeline([model], [module], 3, batches()), expected)
    assert shapes == pytest.approx(values)


def test_layers_in_an_activation_checkpoint_run_again_in_the_backward():
    runs = []

    class Counted(nn.Linear):
        def forward(self, x):
            if type(x) is torch.Tensor and not x.is_meta:
                runs.append(1)
            return super().forward(x)

    class Checkpointed(Net):
        def training_step(self, batch, batch_idx):
            x = batch[0]
            for block in self.blocks:
                run = lambda x, block=block: block(x).relu() + 1  # noqa: E731
                x = checkpoint(run, x, use_reentrant=False)
            return F.cross_entropy(self.head(x), batch[1])

    def make():
        return Checkpointed(lambda: Counted(DIM, DIM))

    check(make)
    model = stages(make(), 2)
    recording = record(model)
    del runs[:]
    output = call(model, 0, (), recording)
    assert len(runs) == 1
    torch.autograd.backward(output.tensors, [torch.ones_like(t) for t in output.tensors])
    assert len(runs) == 2


def test_a_list_to_which_a_layer_adds_is_one_list_for_the_next_one():
    class Adds(nn.Linear):
        def forward(self, x, seen):
            seen.append(x.mean())
            return super().forward(x) * torch.stack(seen).sum()

    class Listed(Net):
        def training_step(self, batch, batch_idx):
            x, seen = batch[0], []
            for block in self.blocks:
                x = block(x, seen)
            return F.cross_entropy(self.head(x), batch[1])

    def make():
        return Listed(lambda: Adds(DIM, DIM))

    check(make, cuts=((2,),))  # The blocks share the list, and stay together.


def test_attributes_of_layers_are_as_before():
    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(DIM, DIM)
            self.last = None

        def forward(self, x):
            assert self.last is None or type(self.last).__name__ != "Hole"
            self.last = super().forward(x)
            return self.last

    class Uses(Net):
        def between(self, x, batch, index):
            return x + self.blocks[index].last.mean()

    module = Uses(Keeps)
    model = stages(module)
    record(model)
    assert [block.last for block in module.blocks] == [None] * 4
    check(lambda: Uses(Keeps))


def test_a_recording_holds_the_batch_and_nothing_else_does():
    model = stages(Net())
    batch = batches()[0]
    left = weakref.ref(batch[0])
    recording = record(model, batch)
    del batch
    call(model, 0, (), recording)
    del recording
    gc.collect()
    assert left() is None


def test_attention_kernels_and_autocast_of_the_step_hold_in_its_stages():
    class Switches(Net):
        def between(self, x, batch, index):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x.float() @ x.float().T
            with torch.no_grad():
                z = x.mean()
            return x + y.double().mean() + z

    check(Switches)


class Sometimes(Net):
    """Another operation, another layer or another use of a value, as attributes say."""

    def __init__(self):
        super().__init__()
        self.how = ""

    def training_step(self, batch, batch_idx):
        x = first = self.blocks[0](batch[0])
        for block in self.blocks[2 if self.how == "layers" else 1 :]:
            x = block(x).relu() if self.how == "operations" else block(x)
        if self.how == "logs":
            self.log("first", first.mean())
        if self.how == "draws" and torch.rand(()) < 2:
            x = x * 2
        loss = F.cross_entropy(self.head(x), batch[1])
        return loss + first.mean() if self.how == "values" else loss


@pytest.mark.parametrize("how", ["operations", "layers", "values", "logs", "draws"])
def test_a_step_that_does_something_else_is_another_way(how):
    module = Sometimes()
    model = stages(module, 4)
    batch = batches()[0]
    assert model.first_recording(batch, 0).way == 0
    module.how = how
    found = model.first_recording(batch, 0)
    assert found.way == 1 and found.drew == (how == "draws", False)
    model.follow_way(1, batch, 0)
    if how not in ("values", "logs"):  # What they need goes past the stages between.
        given = ()
        for stage in range(4):
            output = call(model, stage, given, found.recording, dataloader_idx=1)
            given = received(output)
        assert output.loss.item() == pytest.approx(module.training_step(batch, 0).item())
    module.how = ""
    assert model.first_recording(batch, 0).way == 0


def test_a_step_that_calls_no_layer_has_no_way():
    module = Sometimes()
    model = stages(module)
    module.training_step = lambda batch, batch_idx: batch[0].sum()
    assert model.first_recording(batches()[0], 0).way is None


def test_a_forward_hook_gathers_the_values_that_the_step_uses():
    class Gathers(Net):
        def __init__(self):
            super().__init__()
            self.gathered = []
            for block in self.blocks:
                block.register_forward_hook(lambda *args: self.gathered.append(args[-1]))

        def training_step(self, batch, batch_idx):
            self.gathered.clear()
            loss = super().training_step(batch, batch_idx)
            return loss + sum(value.mean() for value in self.gathered)

    check(Gathers)


def test_draws_on_both_sides_of_a_cut_between_layers_are_those_without_it():
    class Drops(Net):
        def between(self, x, batch, index):
            narrow = F.dropout(x, 0.2)[:, :4]  # Fewest bytes: here it is cut.
            return torch.cat([F.dropout(narrow, 0.2)] * (DIM // 4), 1)

    results = []
    for count in (1, 3):
        module = Drops()
        model = stages(module, count)
        results.append(run_pipeline([model], [module], count, batches(), seed=7))
    assert_same(results[1], results[0])


def test_a_tensor_with_a_gradient_that_is_no_parameter_gets_it():
    class Tempered(Net):
        def __init__(self):
            super().__init__()
            self.temper = torch.ones(DIM, dtype=torch.float64, requires_grad=True)

        def between(self, x, batch, index):
            return x * self.temper if index == 0 else x

    expected, module = Tempered(), Tempered()
    uncut(expected, batches())
    run_pipeline([stages(module)], [module], 3, batches())
    torch.testing.assert_close(module.temper.grad, expected.temper.grad)


def test_an_error_of_the_step_is_its_own():
    class Fails(Net):
        fails = False

        def between(self, x, batch, index):
            if self.fails and index == 2:
                raise ValueError("no such block")
            return x

    module = Fails()
    model = stages(module)
    module.fails = True
    found = model.first_recording(batches()[0], 0)
    assert found.way == 0 and found.recording is None
    with pytest.raises(ValueError, match="no such block"):
        record(model)
