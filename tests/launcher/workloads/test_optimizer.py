import copy
import math

import pytest
import torch
from torch import nn

from launcher.config import from_dict
from launcher.config.check import check
from launcher.config.workload import OptimizerConfig
from launcher.workloads.optimizer import Steering, build_optimizer, build_scheduler, lr_factor
from strategies.errors import PlanError
from tests.emulated_device import CUDA, emulated_device


def test_only_weights_of_two_dimensions_or_more_decay():
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decayed, rest = build_optimizer(module.parameters(), OptimizerConfig()).param_groups
    assert [p.shape for p in decayed["params"]] == [(3, 2)]
    assert [p.shape for p in rest["params"]] == [(3,), (3,), (3,)]
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)],
)
def test_the_name_chooses_the_rule_and_its_options_arrive(name, kind):
    options = OptimizerConfig(name=name, lr=0.5, betas=(0.1, 0.2), eps=1e-3, momentum=0.7)
    optimizer = build_optimizer([nn.Parameter(torch.zeros(2, 2))], options)
    assert type(optimizer) is kind
    expected = {"momentum": 0.7} if name == "sgd" else {"betas": (0.1, 0.2), "eps": 1e-3}
    assert expected.items() <= optimizer.param_groups[0].items()
    assert optimizer.param_groups[1]["lr"] == 0.5


def test_a_rank_without_parameters_and_frozen_ones_still_have_a_working_optimizer():
    for parameters in ([], [nn.Parameter(torch.ones(2), requires_grad=False)]):
        optimizer = build_optimizer(parameters, OptimizerConfig())
        scheduler = build_scheduler(optimizer, OptimizerConfig(), total_steps=10)
        optimizer.step()
        scheduler.step()
        assert [group["params"] for group in optimizer.param_groups] == [[], []]


def test_the_learning_rate_rises_linearly_and_falls_along_a_cosine():
    options = OptimizerConfig(warmup_steps=4, min_lr_ratio=0.2)
    factors = [lr_factor(step, options=options, total_steps=24) for step in range(30)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[14] == pytest.approx(0.6)
    assert factors[24:] == pytest.approx([0.2] * 6)
    constant = OptimizerConfig(warmup_steps=0, schedule="constant")
    assert [lr_factor(step, options=constant, total_steps=3) for step in (0, 99)] == [1.0, 1.0]
    assert lr_factor(999, options=options, total_steps=math.inf) == 1.0
    # A run shorter than its warm-up.
    assert lr_factor(1, options=options, total_steps=2) == 0.5


def test_a_schedule_continues_from_its_state():
    options = OptimizerConfig(warmup_steps=2)
    optimizer = build_optimizer([nn.Parameter(torch.zeros(2, 2))], options)
    scheduler = build_scheduler(optimizer, options, total_steps=9)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    other = build_optimizer([nn.Parameter(torch.zeros(2, 2))], options)
    resumed = build_scheduler(other, options, total_steps=9)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for each_optimizer, each in ((optimizer, scheduler), (other, resumed)):
        each_optimizer.step()
        each.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_biases_of_routers_move_by_the_rate_of_the_run_that_goes_on():
    bias = nn.Parameter(torch.zeros(2))
    made = [
        build_optimizer([bias], OptimizerConfig(), steering=Steering([bias], rate))
        for rate in (0.5, 0.125)
    ]
    made[1].load_state_dict(made[0].state_dict())
    bias.grad = torch.tensor([3.0, -1.0])
    made[1].step()
    assert bias.tolist() == [-0.125, 0.125]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, r"optimizer\.lr=0\.0: expected .*, more than 0\. Try optimizer\.lr=0\.001\."),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas=\[0\.9,1\.0\].*Try optimizer\.betas=\["),
        (
            {"name": "lion"},
            r"optimizer\.name=lion: expected adamw or adam or muon or sgd or c",
        ),
        ({"warmup_steps": -1}, r"optimizer\.warmup_steps=-1"),
        ({"min_lr_ratio": 1.5}, r"optimizer\.min_lr_ratio=1\.5"),
        ({"schedule": "step"}, r"optimizer\.schedule=step"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        check(from_dict({"optimizer": changes}))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_what_is_steered_moves_by_the_sign_of_its_gradient_alone(name):
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(3))
    options = OptimizerConfig(name=name, warmup_steps=4)
    optimizer = build_optimizer([weight, bias], options, steering=Steering([bias], 0.25))
    scheduler = build_scheduler(optimizer, options, total_steps=10)
    for _ in range(2):
        weight.grad = torch.full((2, 2), 0.5)
        bias.grad = torch.tensor([1e-19, -3.0, 0.0])
        optimizer.step()
        scheduler.step()
    assert bias.tolist() == [-0.5, 0.5, 0.0]
    assert not torch.equal(weight, torch.ones(2, 2))


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_weights_on_a_gpu_are_updated_by_a_fused_kernel_and_go_on_from_a_state_of_the_host(name):
    def stepped(optimizer, parameter):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        return parameter

    host = nn.Parameter(torch.linspace(-1.0, 1.0, 6).view(2, 3))
    on_host = build_optimizer([host], OptimizerConfig(name=name))
    assert all(not group["fused"] for group in on_host.param_groups)
    with emulated_device():
        weight = nn.Parameter(host.detach().to(CUDA))
        on_device = build_optimizer([weight], OptimizerConfig(name=name))
        assert all(group["fused"] for group in on_device.param_groups)
        # Lightning would refuse to clip what a scaler has scaled.
        assert not getattr(on_device, "_step_supports_amp_scaling", False)
        for _ in range(2):
            found = stepped(on_device, weight).detach().cpu()
            torch.testing.assert_close(found, stepped(on_host, host).detach())
            on_device.load_state_dict(copy.deepcopy(on_host.state_dict()))
