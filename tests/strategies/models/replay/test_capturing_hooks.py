"""Hooks that are made while a step runs: transformers' are made once, others are refused."""

import copy

import pytest
import torch
from torch import nn

from strategies.models.replay.replay_model import ReplayModel
from strategies.models.snapshot import Snapshot
from tests.strategies.models.replay.parity import run_pipeline, stage_ranges, uncut
from tests.strategies.models.replay.test_refusals import Stack, batch, refusal


class Outputs(Stack):
    """A loss of all hidden states and attentions of a model of transformers."""

    def __init__(self, *, in_config):
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        asked = {"output_hidden_states": True, "output_attentions": True}
        config = BertConfig(
            vocab_size=20, intermediate_size=8, attn_implementation="eager", **sizes, **none,
            **(asked if in_config else {}),
        )  # fmt: skip
        self.net = BertModel(config)
        self.asked = {} if in_config else asked
        self.layers, self.head = None, nn.Linear(8, 5)

    def training_step(self, batch, batch_idx):
        found = self.net(batch[0], **self.asked)
        assert len(found.hidden_states) == 4
        loss = self.loss(torch.stack(found.hidden_states).mean((0, 2)), batch[1])
        return loss + sum(each.square().mean() for each in found.attentions)


@pytest.mark.parametrize("in_config", [False, True])
def test_hooks_of_transformers_are_made_once_for_all_steps(in_config):
    torch.manual_seed(0)
    module = Outputs(in_config=in_config).double()
    batches = [(torch.randint(20, (4, 6)), torch.randint(5, (4,))) for _ in range(3)]
    expected = uncut(copy.deepcopy(module), batches)
    model = ReplayModel.probe(module, batches[0])
    hooks = [len(child._forward_hooks) for child in module.modules()]
    assert sum(hooks) == 2 * 3
    state = Snapshot(module, model.layers()).take()
    model.cut(stage_ranges((3,), len(model.units)), range(2))
    found = run_pipeline([model], [module], 2, batches)
    state.restore()
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert [len(child._forward_hooks) for child in module.modules()] == hooks
    assert module.net._output_capturing_hooks_installed
    again = run_pipeline([model], [module], 2, batches)
    assert again.losses == pytest.approx(expected.losses, rel=1e-12)


class Hooked(Stack):
    """Registers a hook in its first step."""

    hooked = False
    kinds = ("register_forward_hook",)
    leaves = True

    def training_step(self, batch, batch_idx):
        handles = []
        if not self.hooked:
            for kind in self.kinds:
                handles.append(getattr(self.layers[1], kind)(lambda *_: None))
        self.hooked = True
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        for handle in () if self.leaves else handles:
            handle.remove()
        return self.loss(x, batch[1])


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_a_step_leaves_behind_is_refused(kind):
    module = Hooked()
    module.kinds = (kind,)
    found = refusal(module)
    assert "a step of Hooked registers a hook on layers.1 and leaves it there" in found
    assert not module.layers[1]._forward_hooks and not module.layers[1]._forward_pre_hooks


def test_a_hook_that_a_step_removes_is_none_of_our_business():
    module = Hooked()
    module.leaves = False
    ReplayModel.probe(module.double(), batch())
