"""What people write in a step or keep on a module comes out as without a pipeline."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torch import distributions as D  # noqa: N812
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader

from strategies.errors import ModelError
from tests.ranks.comparison import (
    BATCH,
    LAYOUTS,
    Net,
    equal_to_stock,
    examples,
    spread,
    train,
)
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.distributed

# -- distributions: their arguments are checked where the values are ------------------------------


class Distributed(Net):
    def __init__(self) -> None:
        super().__init__()
        D.Distribution.set_default_validate_args(True)  # torch.compile has switched it off for all


class Autoencoder(Distributed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mean = self.net[:4](batch[0])
        found, prior = D.Normal(mean, mean.exp()), D.Normal(0 * mean, torch.ones_like(mean))
        logits = self.head(self.net[4:](found.mean + 0.1 * found.stddev))
        divergence = D.kl_divergence(found, prior).mean()
        return cross_entropy(logits, batch[1]) + 0.1 * divergence


class ManyKinds(Distributed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h, x = self.net[:4](batch[0]), batch[0]
        s = h.exp()
        known = [
            D.Independent(D.Normal(h, s), 1).log_prob(x),
            D.TransformedDistribution(D.Normal(h, s), [D.TanhTransform()]).log_prob(0.9 * x.tanh()),
            D.MixtureSameFamily(D.Categorical(logits=h), D.Normal(h, s)).log_prob(x[:, 0]),
            D.MultivariateNormal(h, torch.eye(8, dtype=h.dtype)).log_prob(x),
            D.OneHotCategorical(logits=h).entropy(),
            D.Bernoulli(logits=h).entropy(),
            D.Dirichlet(s).mean,
            D.Geometric(probs=h.sigmoid()).log_prob(x.abs().round()),
            D.Gamma(s, s).log_prob(x.abs() + 0.1),
        ]
        return cross_entropy(self.head(self.net[4:](h)), batch[1]) - sum(k.mean() for k in known)


class Policy(Distributed):
    """Validation that the user has asked for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        early = D.Categorical(logits=self.net[:2](batch[0]), validate_args=True)
        policy = D.Categorical(logits=self(batch[0]), validate_args=True)
        entropy = policy.entropy() + early.entropy()
        return -(policy.log_prob(batch[1]) * batch[0].sum(1) + 0.1 * entropy).mean()


class Negative(Distributed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        found = D.Normal(hidden, hidden - 10)
        return cross_entropy(self.head(self.net[4:](found.mean)), batch[1])


def test_wrong_arguments_are_found_where_the_values_are(ranks: Callable[[int], Ranks]) -> None:
    """Stock Lightning, too, ends with this error of torch."""
    with pytest.raises(ValueError, match=r"parameter scale .*GreaterThan\(lower_bound=0.0\)"):
        equal_to_stock(ranks, Negative, "1f1b")


# -- activation checkpoints -----------------------------------------------------------------------


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(checkpoint_sequential(self.net, 2, x, use_reentrant=False))


# -- attributes -----------------------------------------------------------------------------------


class Frozen(OrderedDict[str, Any]):
    """As the configurations of some libraries' models are."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("frozen")

    def __delitem__(self, key: str) -> None:
        raise RuntimeError("frozen")

    pop = clear = setdefault = update  # type: ignore[assignment]


class Guarded:
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("read only")


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        for module in (self, self.net, self.net[0]):
            module.config = Frozen(width=8, sizes=[1, 2])  # type: ignore[assignment]
            module.table = MappingProxyType({"a": 1})  # type: ignore[assignment]
            module.guarded = Guarded()  # type: ignore[assignment]


# -- what the trainer tells a step ----------------------------------------------------------------


class Rates(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for number, group in enumerate(self.optimizers().param_groups):  # type: ignore[union-attr]
            self.log(f"rate {number}", group["lr"])
        self.log("last", self.lr_schedulers().get_last_lr()[1])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net.parameters()}, {"params": [self.head.weight], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Progress(Net):
    """A loss that depends on how far the training is, and on what was logged.

    A parameter of the last stage is logged before the first layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("scale", self.scale)
        it: Any = self.trainer
        done = (batch_idx + 1) / it.num_training_batches + it.current_epoch
        weight = done + self.global_step / it.estimated_stepping_batches + it.is_last_batch
        weight += len(it.train_dataloader) + float(it.callback_metrics.get("weight", 0))
        self.log("weight", weight / 100)
        return super().training_step(batch, batch_idx) * weight * self.scale


# -- optimizers over a part of the model ----------------------------------------------------------


class HeadAlone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.head.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


class HeadUpdated(Net):
    """The rest has gradients, which nobody uses, not even in the norm."""

    trainer_options = {"gradient_clip_val": 0.01}  # noqa: RUF012

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.head.weight, self.head.bias], lr=0.1)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.table = torch.nn.Embedding(3, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self(batch[0] + self.table(batch[1])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.table.parameters(), lr=0.1)


# -- evaluation that no pipeline cuts: every rank runs it as a whole -------------------------------


class Uncut(Net):
    """Means over passes (Monte Carlo dropout), generation, looks at values between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = tm.Accuracy(task="multiclass", num_classes=3)
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = torch.stack([self(batch[0]), self(batch[0] / 2)]).mean(0)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        loss = cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.seen.append(loss.item())

    def on_validation_epoch_end(self) -> None:
        self.log("seen", torch.tensor(self.seen, dtype=torch.float64).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        while self.head(x).sum().item() < 100 and x.abs().max() < 100:
            x = 2 * x + self.net(x)
        return x


class Summed(Net):
    """A prediction that is none per row."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return logits.std() + len(logits)


def predicted(module: Any, trainer: Any) -> Any:
    of_rows = torch.cat(trainer.predict(module, examples(seed=3))).sum(1)
    of_batches = torch.stack(trainer.predict(Summed().double(), examples(seed=3)))
    return torch.cat([of_rows, of_batches])


class GradientHook(Net):
    """Halves what flows back through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net[6].register_full_backward_hook(lambda module, given, _: (given[0] * 0.5,))


class GradientHookBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[5].register_full_backward_pre_hook(lambda module, given: (given[0] * 0.5,))


class ValueHook(Net):
    """Halves what flows back through a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        hidden.register_hook(lambda gradient: gradient * 0.5)
        return cross_entropy(self.head(self.net[4:](hidden)), batch[1])


class HookAtStart(Net):
    """Registered behind the look at the step, and taken away after an epoch."""

    def on_fit_start(self) -> None:
        self.handle = self.net[3].register_forward_hook(
            lambda module, given, result: result.clamp(max=0.3)
        )

    def on_train_epoch_end(self) -> None:
        self.handle.remove()


class HookOnAll(Net):
    def on_fit_start(self) -> None:
        self.handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, given, result: (
                result * 1.5 if isinstance(module, torch.nn.Tanh) else None
            )
        )

    def on_fit_end(self) -> None:
        self.handle.remove()


def edges() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that invariants are not checked
        return torch.eye(8).to_sparse()


class SparseBetween(Net):
    """A graph's edges, applied to what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = edges()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        spread_out = torch.sparse.mm(self.edges.to(hidden.dtype), hidden.T).T
        return cross_entropy(self.head(self.net[4:](spread_out)), batch[1])


class DictBatch(Net):
    def loaders(self, *, replicas: int) -> Any:
        rows = [{"x": x, "y": y} for x, y in examples(replicas=replicas).dataset]
        return DataLoader(rows, batch_size=BATCH * replicas)  # type: ignore[arg-type]


class TakesFromBatch(DictBatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch.pop("y")
        return cross_entropy(self(**batch), labels)


class PutsIntoBatch(DictBatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["x"] = batch["x"] * 2
        return cross_entropy(self(batch["x"]), batch["y"])


class Reseeds(Net):
    """A seed that is set where nothing is drawn counts for what is drawn later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noisy = batch[0] + 0.1 * torch.randn_like(batch[0])
        return cross_entropy(self(noisy), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        self.log("loss", cross_entropy(self(batch[0]), batch[1]))


@spread(
    [
        GradientHook,
        ValueHook,
        HookAtStart,
        SparseBetween,
        PutsIntoBatch,
        Reseeds,
    ],
    seldom=[GradientHookBefore, HookOnAll, TakesFromBatch],
)
def test_what_a_step_does_besides_comes_to_the_same(
    ranks: Callable[[int], Ranks], case: type[Net], layout: str
) -> None:
    equal_to_stock(ranks, case, layout, max_epochs=2)


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.net[2] = torch.jit.trace(self.net[2], torch.ones(1, 8))


class LimitedRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 8, max_norm=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        places = (batch[0] > 0).long()
        return cross_entropy(self(self.table(places).mean(1)), batch[1])


class SparseBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", edges())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Scripted, "net.2 is TorchScript"),
        (LimitedRows, "table has max_norm=1"),
        (SparseBuffer, "edges is a sparse buffer"),
    ],
)
def test_layers_that_no_pipeline_can_run_are_refused_at_once(
    ranks: Callable[[int], Ranks], case: type[Net], words: str
) -> None:
    name = f"{case.__module__}:{case.__qualname__}"
    with pytest.raises(ModelError, match=words):
        ranks(2).run(train, case=name, strategy=LAYOUTS["1f1b"], precision="32-true")


@spread([Uncut])
def test_evaluation_that_cannot_be_cut_is_that_of_one_process(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    stock, piped = equal_to_stock(ranks, case, layout, told=predicted, max_epochs=2)
    assert stock.metrics.keys() == {"accuracy", "loss", "seen"}
    if "dp2" not in layout:  # else each replica predicts its share
        assert all(torch.allclose(stock.told, fitted.told, atol=1e-10) for fitted in piped)


class Returning(Net):
    """Batches for which the step returns early, by their number or by what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = tm.Accuracy(task="multiclass", num_classes=3)
        self.outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 or bool((batch[1] > 2).any()):
            return None
        logits = self(batch[0])
        if batch_idx == 2:  # a second look, at one batch
            self.log("agree", (self(batch[0] / 2).argmax(1) == logits.argmax(1)).double().mean())
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        return cross_entropy(logits, batch[1])

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outputs.append(-1.0 if outputs is None else float(outputs))

    def on_validation_epoch_end(self) -> None:
        loss = torch.tensor(self.outputs, dtype=torch.float64).mean()
        self.log("loss", loss, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self(batch[0]).argmax(1)


class Centred(Net):
    """Rows are mixed between layers, and a number that is no mean is logged there."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net[:4](batch[0])
        self.log("spread", hidden.std())
        hidden = self.net[4:](hidden - hidden.mean(0))
        self.log("loss", cross_entropy(self.head(hidden), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        return self.head(self.net[4:](hidden - hidden.mean(0)))


def told_fresh(module: Any, trainer: Any) -> Any:
    """Of one that has just been made, as in a script that only evaluates; then it is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some batches have no prediction
        found = trainer.predict(module, examples(seed=3))
        fresh = type(module)().double()
        wanted = trainer.predict(fresh, examples(seed=3))
    wanted += [trainer.validate(fresh, examples(seed=4), verbose=False)]
    trainer.fit_loop.max_epochs += 1
    trainer.fit(fresh, examples(), examples(seed=2))
    return [*found, *wanted, *fresh.parameters()]


@spread([Returning, Centred], seldom=[Uncut])
def test_evaluation_that_differs_from_batch_to_batch_or_was_never_trained(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    layout = layout.removesuffix("-dp2")  # Rows are mixed, and returned, per replica.
    stock, piped = equal_to_stock(ranks, case, layout, told=told_fresh, max_epochs=2)
    for fitted in piped:
        for value, wanted in zip(fitted.told, stock.told, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert torch.allclose(value, wanted, rtol=0, atol=1e-10)
            else:
                assert value == pytest.approx(wanted) if wanted is None else True
                assert value is None or value == [pytest.approx(each) for each in wanted]


# -- layers that hand on objects, and values that are recorded on the way -------------------------


class Held:
    def __init__(self, x: Any) -> None:
        self.x = x


class Wrapping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, held: Held) -> Held:
        return Held(self.inner(held.x).tanh())


class Objects(Net):
    layer: type[torch.nn.Module] = Wrapping

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(self.layer() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.net(Held(x)).x)


class Recording(Wrapping):
    def forward(self, held: Any) -> Any:
        held.x = self.inner(held.x).tanh()
        held.seen = [*getattr(held, "seen", []), held.x.pow(2).mean()]
        return held


class Recorded(Objects):
    layer = Recording

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        held: Any = Held(batch[0])
        self.net(held)
        return cross_entropy(self.head(held.x), batch[1]) + sum(held.seen)


class Hooked(Objects):
    """What libraries do that record router logits or hidden states."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seen: list[Any] = []
        hooks = [
            layer.inner.register_forward_hook(lambda _, __, result: seen.append(result))
            for layer in self.net
        ]
        loss = super().training_step(batch, batch_idx)
        for hook in hooks:
            hook.remove()
        return loss + torch.stack(seen).pow(2).mean()


class Halves(torch.nn.Module):
    """A layer that computes its values when somebody asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        yield self.inner(x).tanh()
        yield self.inner(x).relu()


class Yielding(Objects):
    layer = Halves

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.net:
            first, second = layer(x)
            x = first + second
        return self.head(x)


class Distilled(Net):
    """A teacher behind the student: stages begin where no gradients are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3))
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        with torch.inference_mode():
            target = self.teacher(batch[0])
        distance = (logits.log_softmax(1) - target.log_softmax(1)).pow(2).mean()
        return cross_entropy(logits, batch[1]) + distance


class Started(Net):
    """The step uses what hooks make, which also change weights and what is trained."""

    trainer_options = {"max_epochs": 2}  # noqa: RUF012

    def on_fit_start(self) -> None:
        self.noise = torch.randn(8, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(False)
        self.batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch_idx)
        return cross_entropy(self(batch[0] + self.noise), batch[1]) * len(self.batches)


PATTERNS = [
    Autoencoder, Policy, Checkpointed, Configured, Rates, Progress, HeadAlone, Sparse, Recorded,
    Hooked, Distilled, Started,
]  # fmt: skip


@spread(PATTERNS, seldom=[ManyKinds, HeadUpdated, Objects, Yielding])
def test_a_step_comes_to_what_it_comes_to_without_a_pipeline(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout, **getattr(case, "trainer_options", {}))


# -- compiled modules -----------------------------------------------------------------------------

COMPILED: list[str] = []


def backend(graph: Any, _: Any) -> Any:
    """Notes what it compiles, and runs it as it is."""
    COMPILED.append(str(graph.graph))
    return graph.forward


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        COMPILED.clear()
        torch.compiler.reset()
        # Of torch, at its first look at a layer's input.
        warnings.filterwarnings("ignore", message=".*The .grad attribute.*")


class Stack(Compiled):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend=backend)  # type: ignore[assignment]


class StackInSetup(Compiled):
    def setup(self, stage: str) -> None:
        self.net.compile(backend=backend)


class WholeForward(Compiled):
    def __init__(self) -> None:
        super().__init__()
        self.forward = torch.compile(self.forward, backend=backend)  # type: ignore[method-assign]


class Functions(Compiled):
    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.compile(cross_entropy, backend=backend)
        self.glue = torch.compile(torch.sin, backend=backend)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.head(self.net[4:](self.glue(self.net[:4](batch[0])))), batch[1])


class Layers(Compiled):
    def __init__(self) -> None:
        super().__init__()
        for place in (0, 2, 4):
            self.net[place] = torch.compile(self.net[place], backend=backend)  # type: ignore[call-overload]
        self.net[6].compile(backend=backend)


@spread([Stack, Functions, WholeForward], seldom=[StackInSetup, Layers])
def test_compiled_modules_give_the_same_numbers(
    case: type[Net], layout: str, ranks: Callable[[int], Ranks]
) -> None:
    equal_to_stock(ranks, case, layout)


def num_compiled(*_: Any) -> int:
    return len(COMPILED)


@pytest.mark.parametrize(("case", "layers"), [(Layers, True), (Stack, False)])
def test_layers_stay_compiled_and_what_is_cut_does_not(
    case: type[Net], layers: bool, ranks: Callable[[int], Ranks]
) -> None:
    _, piped = equal_to_stock(ranks, case, "1f1b", told=num_compiled)
    assert [fitted.told > 0 for fitted in piped] == [layers, layers]
