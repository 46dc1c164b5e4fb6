from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import nn

from strategies.errors import ModelError, PlanError
from strategies.runtime.lightning.hooks.overridden_hooks import clipped_hooks
from strategies.runtime.lightning.stream_loop import (
    refuse_statistics,
    refuse_stream,
)


class Net(nn.Module):
    automatic_optimization = True

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


def trainer_of(*callbacks: Callback, accumulation: int = 1, clip: float | None = None):
    return SimpleNamespace(
        callbacks=list(callbacks),
        precision_plugin=SimpleNamespace(scaler=None),
        gradient_clip_algorithm=None,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulation,
    )


def test_what_several_batches_add_up_to_is_fixed_with_the_program():
    refuse_stream(trainer_of(accumulation=3), Net(nn.LayerNorm(4)), "pipedream_2bw")
    changing = trainer_of(GradientAccumulationScheduler({2: 4}))
    with pytest.raises(PlanError, match="GradientAccumulationScheduler with"):
        refuse_stream(changing, Net(nn.LayerNorm(4)), "pipedream_2bw")


def test_running_statistics_are_those_of_later_forwards():
    with pytest.raises(ModelError, match=r"norm keeps running statistics.*GroupNorm.*or eval\(\)"):
        refuse_statistics(Net(nn.BatchNorm1d(4)), "pipedream")
    refuse_statistics(Net(nn.BatchNorm1d(4, track_running_stats=False)), "pipedream")
    refuse_statistics(Net(nn.BatchNorm1d(4).eval()), "pipedream")


def test_a_module_that_steps_by_itself_does_so_at_no_place_of_the_program():
    net = Net(nn.LayerNorm(4))
    net.automatic_optimization = False
    with pytest.raises(ModelError, match=r"automatic_optimization=False with schedule"):
        refuse_stream(trainer_of(), net, "pipedream_2bw")


class Noise(Callback):
    def on_before_optimizer_step(self, *_: object) -> None:
        """Might change gradients."""


def test_ranks_agree_early_where_nobody_changes_gradients_meanwhile():
    import lightning.pytorch as pl

    assert not clipped_hooks(trainer_of(Callback()), pl.LightningModule())
    assert clipped_hooks(trainer_of(Noise()), pl.LightningModule()) == ["Noise"]
