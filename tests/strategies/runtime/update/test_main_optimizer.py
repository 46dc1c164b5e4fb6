import pytest
import torch
from torch import nn

from strategies.errors import ModelError
from strategies.runtime.update.main_optimizer import (
    ELEMENTWISE,
    MAIN_WEIGHT,
    MainOptimizer,
    check_elementwise,
)
from strategies.runtime.update.main_weights import AllMainWeights, widened_piece


def weights():
    return [nn.Parameter(torch.ones(2, 3))]


class Mine(torch.optim.Adam):
    """Changes nothing of the update."""


class Clever(torch.optim.Adam):
    def step(self, closure=None):
        return None


class Declared(Clever):
    elementwise = True


@pytest.mark.parametrize("kind", [*ELEMENTWISE, Mine, Declared])
def test_elementwise_optimizers_pass(kind):
    check_elementwise(kind(weights(), lr=0.1))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_of_whole_tensors_are_refused(kind):
    with pytest.raises(ModelError) as error:
        check_elementwise(kind(weights()))
    assert str(error.value) == (
        f"overlap=zero1 gives the optimizer a part of each weight, and {kind.__name__} is not "
        "known to treat every element by itself. Use overlap=grad_reduce; or, if it does, say so "
        f"with {kind.__name__}.elementwise = True."
    )


def test_an_update_of_its_own_makes_a_subclass_unknown():
    with pytest.raises(ModelError, match="Clever is not known"):
        check_elementwise(Clever(weights()))


def test_an_option_for_whole_weights_is_refused():
    optimizer = torch.optim.SGD([{"params": weights(), "mask": torch.ones(2, 3)}], lr=0.1)
    with pytest.raises(ModelError, match="mask of the optimizer's group 0 has 6 elements"):
        check_elementwise(optimizer)


def test_an_optimizer_that_tries_weights_is_refused_where_it_holds_copies():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    mains = AllMainWeights()
    mains.add_shared(widened_piece(parameter))
    with pytest.raises(ModelError, match="LBFGS tries several weights in a step"):
        MainOptimizer.take_over(torch.optim.LBFGS([parameter]), mains)


def test_groups_stay_the_same_objects_and_keep_their_order():
    wide, short = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.Adagrad([{"params": [short], "lr": 0.5}, {"params": [wide]}])
    groups = list(optimizer.param_groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    mains = AllMainWeights()
    mains.add_shared(widened_piece(short))
    main = MainOptimizer.take_over(optimizer, mains)
    assert all(one is two for one, two in zip(groups, optimizer.param_groups, strict=True))
    (piece,) = mains.pieces_of(short)
    assert optimizer.param_groups[0]["params"] == [piece.main]
    assert optimizer.param_groups[1]["params"][0] is wide
    assert set(optimizer.state) == {piece.main, wide}  # Adagrad's, which is there from the start.
    piece.main.grad = torch.ones(2)
    wide.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.005]
    saved = main.named_state({"a": short, "b": wide}, group_of=lambda _: None)
    assert [group["params"] for group in saved["param_groups"]] == [["a"], ["b"]]
    assert torch.equal(saved["state"]["a"][MAIN_WEIGHT], piece.main.detach())
    other, plain = (
        widened_piece(short),
        torch.optim.Adagrad([{"params": [short]}, {"params": [wide]}]),
    )
    again = AllMainWeights()
    again.add_shared(other)
    MainOptimizer.take_over(plain, again).load(saved, {"a": short, "b": wide})
    assert torch.equal(other.main, piece.main)
    assert torch.equal(plain.state[other.main]["sum"], optimizer.state[piece.main]["sum"])
    assert plain.param_groups[0]["lr"] == 0.25
