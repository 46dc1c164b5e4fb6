"""A module's state around forwards: restored, compared, named."""

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from strategies.errors import ModelError
from strategies.models import snapshot
from strategies.models.contents import MISSING, KeptObjects
from strategies.models.nested import join_parts
from strategies.models.snapshot import Snapshot, StateRef


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.seen: list[float] = []


class Module(LightningModule):
    shared: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.part = nn.Module()
        self.count = 0
        self.rows: list[Any] = []
        self.by_name: dict[str, list[int]] = defaultdict(list)
        self.last: deque[int] = deque(maxlen=2)
        self.meter = Meter()
        self.kept = {"ema": torch.zeros(2)}
        self.register_buffer("seen", torch.zeros(2))


def change(module: Module) -> None:
    module.count += 1
    module.shared.append(1)
    module.rows.append({"x": torch.ones(1)})
    module.by_name["a"].append(3)
    module.last.append(4)
    module.meter.total += 2.0
    module.meter.seen.append(1.0)
    module.kept["ema"].add_(1)
    module.seen += 1
    module.part.calls = 5
    module.new = "text"


def state(module: Module) -> str:
    return repr(
        (
            module.count, module.shared, module.rows, dict(module.by_name), list(module.last),
            vars(module.meter), module.kept, module.seen, vars(module.part).get("calls"),
            getattr(module, "new", None),
        )
    )  # fmt: skip


@pytest.fixture
def module() -> Module:
    made = Module()
    made.shared.clear()
    return made


def test_a_forward_leaves_nothing_behind(module: Module) -> None:
    watched = Snapshot(module, [module.layer])
    before, objects = state(module), (module.rows, module.meter, module.last)
    for _ in range(2):
        watched.take()
        for _ in range(3):
            change(module)
            assert watched.restore()
            assert state(module) == before
            assert not watched.restore()
    assert all(
        a is b for a, b in zip(objects, (module.rows, module.meter, module.last), strict=True)
    )


def test_what_has_changed_is_known_by_name(module: Module) -> None:
    watched = Snapshot(module, [module.layer])
    watched.take()
    assert watched.changed() == set()
    change(module)
    module.layer.calls = 1  # a layer's own business
    assert {ref.name for ref in watched.changed()} == {
        "count", "shared", "rows", "by_name", "last", "meter", "kept", "seen", "part.calls", "new",
    }  # fmt: skip
    assert watched.value(StateRef("part", "calls")) == 5
    watched.take()
    assert watched.changed() == set()


def test_a_graph_keeps_the_tensor_that_was_changed_under_it(module: Module) -> None:
    watched = Snapshot(module, [module.layer])
    watched.take()
    module.seen += 1
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * module.seen).sum()
    watched.restore()
    assert module.seen.tolist() == [0, 0]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_changes_in_inference_mode_are_seen(module: Module) -> None:
    with torch.inference_mode():
        module.kept["ema"] = torch.zeros(2)
        watched = Snapshot(module, [module.layer])
        watched.take()
        assert not watched.restore()
        module.kept["ema"].add_(1)
        assert watched.restore()
        assert module.kept["ema"].tolist() == [0, 0]


def test_marks_stay_while_nothing_changes(module: Module) -> None:
    watched = Snapshot(module, [module.layer])
    watched.take()
    marks = watched.marks()
    assert marks == watched.marks()
    module.rows.append(1)
    assert marks != watched.marks()


def rows(*sizes: int) -> list[Tensor]:
    return list(torch.arange(sum(sizes) * 2.0).view(-1, 2).split(list(sizes)))


def test_parts_are_joined_where_they_are_shorter() -> None:
    parts = rows(3, 2)
    assert join_parts(parts, [0.6, 0.4], (5, 2)).tolist() == torch.cat(parts).tolist()
    turned = [part.T for part in parts]
    assert join_parts(turned, [0.6, 0.4], (2, 5)).tolist() == torch.cat(parts).T.tolist()


def test_a_loss_on_the_way_is_a_mean_by_shares() -> None:
    joined = join_parts([torch.tensor(1.0), torch.tensor(2.0)], [0.75, 0.25], ())
    assert float(joined) == 1.25


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\[2, 2\], \[2, 2\].*\[4, 4\]"):
        join_parts(rows(2, 2), [0.5, 0.5], (4, 4))


class Slotted:
    __slots__ = ("later", "number")

    def __init__(self) -> None:
        self.number = 1


def test_nothing_is_changed_until_something_is_another_object(module: Module) -> None:
    module.slotted = Slotted()
    watched = Snapshot(module, [module.layer])
    watched.take()
    assert watched.is_unchanged()
    module.slotted.later = 2  # had no value
    assert not watched.is_unchanged()
    watched.restore()
    assert not hasattr(module.slotted, "later")
    assert watched.is_unchanged()
    module.seen += 1
    assert not watched.is_unchanged()


def test_an_exact_snapshot_knows_what_batch_norm_writes_uncounted() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    norm = module[0]
    before = Snapshot(module, exact=True).take()
    mean, kept = norm.running_mean, norm.running_mean.clone()
    module(torch.randn(4, 2) + 3)
    assert {ref.name for ref in before.changed()} == {
        "0.running_mean", "0.running_var", "0.num_batches_tracked",
    }  # fmt: skip
    before.restore()
    assert norm.running_mean is mean  # whoever else refers to it sees the same
    assert torch.equal(mean, kept)
    assert not before.changed()


def test_layers_that_are_skipped_are_neither_copied_nor_restored(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.layer = nn.BatchNorm1d(2)
    copied: list[str] = []
    make = snapshot._KeptTensor.__init__

    def note(self: Any, ref: StateRef, *args: Any, **kwargs: Any) -> None:
        copied.append(ref.name)
        make(self, ref, *args, **kwargs)

    monkeypatch.setattr(snapshot._KeptTensor, "__init__", note)
    with snapshot.restoring(module, [module.layer]):
        module.layer(torch.ones(4, 2))
        module.count += 1
    assert (module.count, int(module.layer.num_batches_tracked)) == (0, 1)
    assert sorted(copied) == ["kept", "seen"]


def test_generators_of_a_module_draw_again_what_they_drew(module: Module) -> None:
    module.draws = torch.Generator().manual_seed(1)
    with snapshot.restoring(module):
        first = torch.rand(2, generator=module.draws).tolist(), torch.rand(2).tolist()
    assert (torch.rand(2, generator=module.draws).tolist(), torch.rand(2).tolist()) == first


@pytest.mark.parametrize("place", ["attribute", "buffer", "new", "deleted"])
def test_a_value_is_put_and_found_by_its_place(module: Module, place: str) -> None:
    ref = StateRef(
        "", {"attribute": "count", "buffer": "seen", "new": "n", "deleted": "rows"}[place]
    )
    state = Snapshot(module, [module.layer]).take()
    value = {"attribute": 3, "buffer": torch.ones(2), "new": [1], "deleted": MISSING}[place]
    state.put(ref, value)
    assert state.value(ref) is value
    assert state.is_buffer(ref) == (place == "buffer")
    assert state.changed() == {ref}
    state.restore()
    assert state.changed() == set()


def test_a_step_may_end_the_training_and_a_trial_may_not(module: Module) -> None:
    trainer = SimpleNamespace(should_stop=False, other=1)
    module._trainer = trainer
    state = Snapshot(module).take()
    trainer.should_stop, trainer.other = True, 2
    assert state.changed() == {StateRef("trainer", "should_stop")}
    assert state.value(StateRef("trainer", "should_stop")) is True
    assert state.restore()
    assert (trainer.should_stop, trainer.other) == (False, 2)


class Record(dict[str, Any]):
    """Keeps its keys as attributes, too, as outputs of transformers do."""


def test_arguments_of_a_call_are_as_they_were() -> None:
    tensor = torch.zeros(1)
    cache = SimpleNamespace(keys=[tensor], seen=0)
    record = Record(a=1)
    record.a = 1
    library = argparse.ArgumentParser()  # not looked into on a module
    kept = KeptObjects(((cache, record), {"parser": library}))
    cache.keys.append(tensor)
    cache.seen, cache.new = 1, 2
    record["b"] = record.b = 2
    library.prog = "other"
    kept.restore()
    assert vars(cache) == {"keys": [tensor], "seen": 0}
    assert (dict(record), vars(record)) == ({"a": 1}, {"a": 1})
    assert library.prog != "other"


def test_a_dict_whose_keys_are_other_tensors_is_filled_again(module: Module) -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    module.state: dict[Any, int] = {weights[0]: 1}
    state = Snapshot(module, [module.layer]).take()
    del module.state[weights[0]]
    module.state[weights[1]] = 1
    assert state.changed() == {StateRef("", "state")}
    state.restore()
    assert [*module.state] == weights[:1]


def test_modules_that_hooks_make_are_followed_from_the_next_pass_on(module: Module) -> None:
    state = Snapshot(module, [module.layer]).take()
    module.later = Module()
    module.count = 1
    state.forget_modules()
    assert not state.knows_modules
    state.restore()  # as far as it knew
    assert module.count == 0
    state.take()
    module.later.count = 1
    assert state.changed() == {StateRef("later", "count")}
