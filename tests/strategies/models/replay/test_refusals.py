"""Every refusal is one ModelError with the user's line and what to change."""

import operator
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from strategies.errors import ModelError
from strategies.models.replay.probe import Probe
from strategies.models.replay.replay_model import ReplayModel
from tests.strategies.models.replay.parity import run_pipeline, stage_ranges
from tests.strategies.models.replay.zoo import DIM, MoEBlock, build, classes, rand

HERE = re.escape(__file__)


class Stack(LightningModule):
    """Four layers and a head; subclasses write the step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])
        self.head = nn.Linear(DIM, 5)

    def loss(self, x, y):
        return F.cross_entropy(self.head(x), y)


def batch():
    torch.manual_seed(1)
    return rand(4, DIM), classes(4)


def refusal(module):
    with pytest.raises(ModelError) as error:
        ReplayModel.probe(module.double(), batch())
    return str(error.value)


def run_stages(module, batches, num_stages=2, cuts=None):
    module = module.double()
    model = ReplayModel.probe(module, batches[0])
    num_units = len(model.units)
    cuts = cuts or tuple(round(i * num_units / num_stages) for i in range(1, num_stages))
    model.cut(stage_ranges(cuts, num_units), range(num_stages))
    return run_pipeline([model], [module], num_stages, batches)


def test_a_changed_path_names_both_calls_and_both_lines():
    class Drop(Stack):
        skip = False

        def training_step(self, batch, batch_idx):
            x = batch[0]
            for i, layer in enumerate(self.layers):
                if not (self.skip and i == 1):
                    x = layer(x)
            return self.loss(x, batch[1])

    module = Drop().double()
    model = ReplayModel.probe(module, batch())
    model.cut(stage_ranges((3,), 5), [0, 1])
    Drop.skip = True
    for stage, inputs in ((0, ()), (1, (rand(4, DIM),))):
        with pytest.raises(
            ModelError,
            match=rf"training_step took another path than in the probe: "
            rf"call 1 was layers.1, is now layers.2 \(now {HERE}:\d+, then "
            rf"{HERE}:\d+\)",
        ):
            model.forward(
                stage, inputs, batch=batch(), batch_idx=0, microbatch=0, mode="train", seed=None
            )


def test_a_batch_that_is_left_out_before_its_layers_is_named():
    class Leaving(Stack):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                return None
            x = batch[0]
            for layer in self.layers:
                x = layer(x)
            return self.loss(x, batch[1])

    model = ReplayModel.probe(Leaving().double(), batch())
    model.cut(stage_ranges((3,), 5), [0, 1])
    with pytest.raises(ModelError, match=r"returned None before layers\.0, .*sampler"):
        model.forward(0, (), batch=batch(), batch_idx=1, microbatch=0, mode="train", seed=None)


def test_a_changed_operation_between_layers_is_a_changed_path():
    class Branch(Stack):
        double_it = False

        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            x = x * 2 if self.double_it else x + 2
            return self.loss(self.layers[1](x), batch[1])

    module = Branch().double()
    model = ReplayModel.probe(module, batch())
    model.cut(stage_ranges((2,), 3), [0, 1])
    Branch.double_it = True
    with pytest.raises(ModelError, match="operation 0 before call 1 was add, is now mul"):
        model.forward(0, (), batch=batch(), batch_idx=0, microbatch=0, mode="train", seed=None)


def test_a_step_that_ends_early_is_a_changed_path():
    class Early(Stack):
        stop = False

        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            if self.stop:
                return x
            return self.loss(self.layers[1](x), batch[1])

    module = Early().double()
    model = ReplayModel.probe(module, batch())
    model.cut(stage_ranges((2,), 3), [0, 1])
    Early.stop = True
    with pytest.raises(ModelError, match=r"call 1 was layers\.1, is now the end of the step"):
        model.forward(0, (), batch=batch(), batch_idx=0, microbatch=0, mode="train", seed=None)


@pytest.mark.parametrize("kind", ["inplace", "data", "assign", "copy"])
def test_changing_parameters_inside_the_step(kind):
    class Momentum(Stack):
        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            with torch.no_grad():
                for new, old in zip(
                    self.layers[0].parameters(), self.layers[1].parameters(), strict=True
                ):
                    if kind == "inplace":
                        old.mul_(0.9).add_(new, alpha=0.1)
                    elif kind == "data":
                        old.data.mul_(0.9)
                    elif kind == "assign":
                        old.data = old.data * 0.9 + new.data * 0.1
                    else:
                        old.copy_(new)
            return self.loss(x, batch[1])

    message = refusal(Momentum())
    assert re.match(rf"{HERE}:\d+: ", message)
    assert "inside training_step" in message and "on_train_batch_end" in message


@pytest.mark.parametrize("kind", ["item", "branch", "numpy", "tolist", "int"])
def test_looking_at_data_before_the_last_layer(kind):
    class Looks(Stack):
        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            if kind == "item":
                self.scale = x.abs().max().item()
            elif kind == "branch":
                if (x > 0).any():
                    x = x * 2
            elif kind == "numpy":
                x.detach().numpy()
            elif kind == "tolist":
                x.tolist()
            else:
                int(x.sum())
            return self.loss(self.layers[1](x), batch[1])

    message = refusal(Looks())
    assert re.match(rf"{HERE}:\d+: ", message)
    assert "before the last layer of training_step" in message and "torch.where" in message


def test_looking_at_data_that_the_step_cannot_go_on_without():
    class Divides(Stack):
        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            x = x * (1 / x.abs().max().item())
            return self.loss(x, batch[1])

    assert re.match(rf"{HERE}:\d+: item needs data of another stage", refusal(Divides()))


def test_second_order_gradients():
    class Penalty(Stack):
        def training_step(self, batch, batch_idx):
            x = batch[0].clone().requires_grad_()
            y = self.head(self.layers[0](x))
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return grad.norm()

    message = refusal(Penalty())
    assert "grad inside training_step" in message and "pp=1" in message


def test_reentrant_checkpointing():
    class Reentrant(Stack):
        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            return self.loss(checkpoint(self.layers[1], x, use_reentrant=True), batch[1])

    assert "use_reentrant=False" in refusal(Reentrant())


def test_more_stages_than_units_says_what_holds_units_together():
    class Region(Stack):
        def training_step(self, batch, batch_idx):
            net = nn.Sequential(*self.layers)
            return self.loss(checkpoint(net, batch[0], use_reentrant=False), batch[1])

    model = ReplayModel.probe(Region().double(), batch())
    assert [unit.name for unit in model.units] == ["layers.0", "head"]
    with pytest.raises(ModelError, match=r"3 stages .* has 2 units .*checkpoint.*<= 2"):
        model.cut([range(1), range(1, 2), range(2, 2)], [0])


def test_layers_that_change_a_list_they_were_given():
    class Appends(nn.Linear):
        def forward(self, x, seen):
            seen.append(x.mean())
            return super().forward(x)

    class Net(Stack):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Appends(DIM, DIM) for _ in range(3)])

        def training_step(self, batch, batch_idx):
            x, seen = batch[0], []
            for block in self.blocks:
                x = block(self.layers[0](x), seen)
            return self.loss(x, batch[1]) + torch.stack(seen).sum()

    message = refusal(Net())
    assert "blocks.0" in message and "list, dict or object it was given" in message
    assert re.match(rf"{HERE}:\d+: ", message)


def test_values_that_leak_from_a_layer_run_on_made_up_data():
    class Leaky(MoEBlock):
        def forward(self, x, seen):
            seen.append(self.gate(x).softmax(-1).mean())
            return super().forward(x)[0]

    class Net(Stack):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Leaky() for _ in range(3)])

        def training_step(self, batch, batch_idx):
            x, seen = batch[0], []
            for block in self.blocks:
                x = block(x, seen)
            return self.loss(x, batch[1]) + torch.stack(seen).sum()

    assert "list, dict or object it was given" in refusal(Net())


def test_lengths_of_layers_are_named():
    class Packs(Stack):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(DIM, DIM, batch_first=True)

        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            rows, lengths = x[:, None].expand(-1, 3, -1), 1 + (x[:, :2] > 0).sum(1)
            packed = nn.utils.rnn.pack_padded_sequence(
                rows, lengths, batch_first=True, enforce_sorted=False
            )
            return self.loss(self.layers[1](self.rnn(packed)[1][0]), batch[1])

    assert "a packed sequence whose lengths are computed by layers" in refusal(Packs())


def test_bare_except_around_the_network():
    class Swallows(Stack):
        def training_step(self, batch, batch_idx):
            x = batch[0]
            try:
                for layer in self.layers:
                    x = layer(x)
                return self.loss(x, batch[1])
            except BaseException:
                return batch[0].sum()

    with pytest.raises(ModelError, match="Replace `except:` and `except BaseException:`"):
        run_stages(Swallows(), [batch()])


def test_vmap_over_an_ensemble_between_layers():
    class Ensemble(Stack):
        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            y = torch.func.vmap(lambda row: row * 2)(x)
            return self.loss(y, batch[1])

    message = refusal(Ensemble())
    assert "vmap" in message and "pp=1" in message


def test_manual_optimization():
    class Manual(Stack):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    assert "automatic_optimization=False" in refusal(Manual())


def test_writing_into_a_part_of_a_batch_tensor():
    class Writes(Stack):
        def training_step(self, batch, batch_idx):
            rows = batch[0][:2]
            rows.copy_(self.layers[0](rows))
            return self.loss(self.layers[1](batch[0]), batch[1])

    assert "torch.stack" in refusal(Writes())


def test_buffers_written_between_layers():
    class Center(Stack):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(DIM))

        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            with torch.no_grad():
                self.center.mul_(0.9).add_(x.mean(0))
            return self.loss(self.layers[1](x - self.center), batch[1])

    message = refusal(Center())
    assert "into center" in message and re.match(rf"{HERE}:\d+: ", message)


def test_a_step_that_returns_none_on_the_last_stage():
    class Skips(Stack):
        def training_step(self, batch, batch_idx):
            loss = self.loss(self.layers[0](batch[0]), batch[1])
            return None if loss > -1 else loss

    with pytest.raises(ModelError, match="returned None instead of a loss"):
        run_stages(Skips(), [batch()])


def test_an_attribute_that_a_hook_is_to_make_is_named_with_the_way_out():
    class Later(Stack):
        def on_train_start(self):
            self.weight = 0.5

        def training_step(self, batch, batch_idx):
            return self.loss(self.layers[0](batch[0]), batch[1]) * self.weight

    message = refusal(Later())
    assert "no attribute 'weight'" in message and "in __init__ or setup" in message


def test_a_step_that_fails_on_shapes_names_the_line():
    class Fails(Stack):
        def training_step(self, batch, batch_idx):
            x = self.layers[0](batch[0])
            raise KeyError("nothing")
            return x

    message = refusal(Fails())
    assert re.match(rf"{HERE}:\d+: training_step cannot run on shapes alone \(KeyError", message)


def test_a_module_without_parameters():
    class Empty(LightningModule):
        def training_step(self, batch, batch_idx):
            return batch[0].sum()

    assert "has no parameters" in refusal(Empty())


def test_an_unknown_chain_lists_the_containers():
    module, batches = build("nanogpt_tied")
    with pytest.raises(ModelError, match=r"pipeline_layers=net\.blocks .*model\.transformer\.h"):
        ReplayModel.probe(module, batches[0], chain="net.blocks")


def test_validation_that_runs_the_layers_in_another_order():
    class Reversed(Stack):
        def training_step(self, batch, batch_idx):
            return self.loss(self.layers[1](self.layers[0](batch[0])), batch[1])

        def validation_step(self, batch, batch_idx):
            return self.layers[0](self.layers[1](batch[0]))

    model = ReplayModel.probe(Reversed().double(), batch())
    model.cut(stage_ranges((1,), 3), [0, 1])
    with (
        torch.no_grad(),
        pytest.raises(
            ModelError,
            match=r"validation_step calls layers.0, which "
            r"is on stage 0, after layers of stage 1",
        ),
    ):
        model.forward(0, (), batch=batch(), batch_idx=0, microbatch=0, mode="validate", seed=None)


def test_shared_batch_norm_keeps_its_calls_on_one_stage():
    class Shared(Stack):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)

        def training_step(self, batch, batch_idx):
            x = self.norm(self.layers[0](batch[0]))
            x = self.norm(self.layers[1](x))
            return self.loss(x, batch[1])

    model = ReplayModel.probe(Shared().double(), batch())
    assert [unit.name for unit in model.units] == ["layers.0", "norm", "head"]


class Stepping(Stack):
    """Does ``act`` behind its layers, with an optimizer and a schedule at hand."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss = self.loss(x, batch[1])
        self.act(self, loss)
        return loss


def rates(self):
    return self.trainer.strategy._optimizers[0].param_groups[0]


STEPPING = {
    "grad": lambda self, loss: self.head.weight.grad,
    "grad_of_a_layer": lambda self, loss: [p.grad for p in self.layers[0].parameters()],
    "zero_grad": lambda self, loss: self.zero_grad(),
    "clip_grad_norm_": lambda self, loss: nn.utils.clip_grad_norm_(self.parameters(), 1.0),
    "SGD.zero_grad": lambda self, loss: self.trainer.strategy._optimizers[0].zero_grad(),
    "SGD.step": lambda self, loss: self.trainer.strategy._optimizers[0].step(),
    "StepLR.step": lambda self, loss: self.lr_schedulers().step(),
    "lr": lambda self, loss: operator.setitem(rates(self), "lr", 0.3),
    "values": lambda self, loss: rates(self).update(lr=0.3),
    "manual_backward": lambda self, loss: self.manual_backward(loss),
    "toggle_optimizer": lambda self, loss: self.toggle_optimizer(None),
    "untoggle_optimizer": lambda self, loss: self.untoggle_optimizer(None),
    "clip_gradients": lambda self, loss: self.clip_gradients(None, 1.0),
}


def with_optimizer(act):
    module = Stepping(act)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    strategy = SimpleNamespace(
        _optimizers=[optimizer], _lightning_optimizers=[], lr_scheduler_configs=[config]
    )
    module._trainer = SimpleNamespace(strategy=strategy, _loggers=[], lr_scheduler_configs=[config])
    module._jit_is_scripting = True  # so that the stand-in does for a trainer
    return module


@pytest.mark.parametrize("what", STEPPING)
def test_what_is_done_once_per_batch_is_refused_in_an_automatic_step(what):
    module = with_optimizer(STEPPING[what])
    before = dict(vars(module._trainer.strategy._optimizers[0]))
    found = refusal(module)
    assert re.match(
        rf"{HERE}:\d+: a step (reads or changes gradients|calls {what}|sets {what} of an)", found
    )
    assert "automatic_optimization = False" in found
    assert vars(module._trainer.strategy._optimizers[0]) == before


def test_a_step_may_read_rates():
    def act(self, loss):
        self.log("rate", self.trainer.strategy._optimizers[0].param_groups[0]["lr"])
        self.log("next", self.lr_schedulers().get_last_lr()[0])

    ReplayModel.probe(with_optimizer(act).double(), batch())


def guard(condition):
    def act(self, loss):
        if condition(loss):
            raise ValueError(f"a loss of {loss}")

    return act


GUARDS = {
    "isfinite": guard(lambda loss: not torch.isfinite(loss)),
    "isfinite_all": guard(lambda loss: not torch.isfinite(loss).all()),
    "isnan": guard(torch.isnan),
    "positive": guard(lambda loss: not loss > 0),
    "item": guard(lambda loss: not 0 < loss.item() < 100),
    "several": lambda self, loss: [
        guard(lambda loss: not torch.isfinite(loss))(self, loss),
        guard(lambda loss: not loss > 0)(self, loss),
        guard(lambda loss: loss > 50)(self, loss),
    ],
}


@pytest.mark.parametrize("what", GUARDS)
def test_a_guard_behind_the_last_layer_lets_a_look_at_the_step_pass(what):
    module = Stepping(GUARDS[what])
    found = run_stages(module, [batch(), batch()])
    assert found.losses[0] > 0
    with torch.no_grad():
        module.head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="a loss of"):
        module.training_step(batch(), 0)


class Skipping(Stack):
    """Leaves out a batch whose loss is not as it should be."""

    turns = False

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss = self.loss(x, batch[1])
        if self.turns:
            return loss if torch.isfinite(loss) else None
        if loss.isnan().any():
            return None
        return loss


@pytest.mark.parametrize("turns", [False, True])
def test_a_step_that_may_leave_out_its_batch_is_cut(turns):
    module = Skipping()
    module.turns = turns
    assert run_stages(module, [batch(), batch()]).losses[0] > 0


def test_a_step_that_stops_whatever_the_answer_is_refused_with_its_error():
    def act(self, loss):
        if loss > 0:
            raise KeyError("more")
        raise KeyError("less")

    found = refusal(Stepping(act))
    assert "could not go on without" in found and "KeyError: 'more'" in found


def test_generation_is_given_up_after_some_rounds(monkeypatch):
    class Generates(Stack):
        def training_step(self, batch, batch_idx):
            x = batch[0]
            while True:
                x = self.layers[0](x)
                if x.argmax() == DIM:
                    return self.loss(x, batch[1])

    looks, defer = [], Probe._defer
    monkeypatch.setattr(Probe, "_defer", lambda *given: (looks.append(1), defer(*given))[1])
    assert "in a loop that does not end" in refusal(Generates())
    assert len(looks) < 200  # It is tried more than once.
