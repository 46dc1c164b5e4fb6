from copy import deepcopy

import pytest
import torch
from torch import nn

from launcher.config import from_dict
from launcher.config.check import check
from launcher.config.workload import OptimizerConfig
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.optimizer import (
    Muon,
    build_muon,
    build_optimizer,
    build_scheduler,
    embeddings_and_head,
)
from strategies.errors import ModelError, PlanError
from strategies.runtime.update.main_optimizer import check_elementwise
from tests.ranks.training import small_shape

OPTIONS = OptimizerConfig(name="muon", lr=0.01)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 6)
        self.image = nn.Conv1d(2, 2, 3)
        self.lm_head = nn.Linear(4, 5, bias=False)

    def get_output_embeddings(self):
        return self.lm_head


def names_of(module, optimizer):
    names = {id(p): name for name, p in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def test_matrices_inside_a_network_go_to_muon_and_all_else_to_adamw():
    module = Network()
    made = build_muon(module.parameters(), OPTIONS, apart=embeddings_and_head(module))
    assert names_of(module, made) == [
        ["inner.weight"],
        ["table.weight", "image.weight", "lm_head.weight"],
        ["inner.bias", "image.bias"],
    ]
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.1, 0.0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_built_in_model_keeps_its_tables_and_its_head_from_muon(tied):
    shape = small_shape(tie_embeddings=tied, position="learned")
    model = LanguageModel(shape, optimizer=OPTIONS)
    apart = embeddings_and_head(model)
    found = [name for name, p in model.named_parameters() if p.dim() == 2 and apart(p)]
    tables = ["net.embedding.positions", "net.embedding.tokens.weight"]
    head = [] if tied else ["net.head.projection.weight"]
    assert found == tables + head


def test_an_update_is_that_of_torch_by_both_rules():
    ours, theirs = Network(), Network()
    theirs.load_state_dict(ours.state_dict())
    made = build_optimizer(ours.parameters(), OPTIONS, apart=embeddings_and_head(ours))
    rest = [p for name, p in theirs.named_parameters() if name != "inner.weight"]
    wide, narrow = ([p for p in rest if (p.dim() > 1) == is_wide] for is_wide in (True, False))
    both = [
        torch.optim.Muon([theirs.inner.weight], lr=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}],
            lr=0.01,
            betas=(0.9, 0.95),
        ),
    ]
    for step in range(3):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.sin(mine.detach() * 7 + step)
            other.grad = mine.grad.clone()
        for optimizer in (made, *both):
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_state_goes_on_where_it_was_written_and_schedules_move_all_groups():
    module, other = Network(), Network()
    other.load_state_dict(module.state_dict())
    pair = [build_optimizer(m.parameters(), OPTIONS) for m in (module, other)]
    schedules = [build_scheduler(made, OPTIONS, total_steps=9) for made in pair]
    steps = 0

    def update(which):
        for p in (module, other)[which].parameters():
            p.grad = torch.cos(p.detach() * 3 + steps)
        pair[which].step()
        schedules[which].step()

    update(0)
    other.load_state_dict(module.state_dict())
    pair[1].load_state_dict(deepcopy(pair[0].state_dict()))
    schedules[1].load_state_dict(schedules[0].state_dict())
    steps = 1
    update(0)
    update(1)
    for mine, copied in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, copied)
    assert len({group["lr"] for group in pair[1].param_groups}) == 1


def test_a_rank_without_parameters_has_the_same_groups():
    made = build_optimizer([], OPTIONS)
    assert isinstance(made, Muon)
    made.step()
    assert [group["params"] for group in made.param_groups] == [[], [], []]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": {"name": "zero1"}}, "overlap=zero1 gives each replica a part of it"),
        ({"tp": 2}, r"tp=2 cuts matrices into 2\. Try tp=1 pp="),
    ],
)
def test_parts_of_matrices_are_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        check(from_dict({"optimizer": {"name": "muon"}} | changes))


def test_its_keys_belong_to_it():
    with pytest.raises(PlanError, match=r"Try optimizer=muon optimizer\.ns_steps=3"):
        check(from_dict({"optimizer": {"name": "adamw", "ns_steps": 3}}))
    check(from_dict({"optimizer": {"name": "muon", "momentum": 0.9, "betas": [0.8, 0.9]}}))


def test_in_a_script_parts_of_matrices_are_refused_too():
    made = build_optimizer(Network().parameters(), OPTIONS)
    with pytest.raises(ModelError, match=r"tp=2 gives the optimizer a part of each weight, and Mu"):
        check_elementwise(made, parts="tp=2", instead="Use tp=1")
