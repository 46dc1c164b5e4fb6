import math

import lightning.pytorch as pl
import pytest
import torch

from launcher.config.workload import OptimizerConfig
from launcher.workloads.data.module import TextDataModule
from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer_shape import TransformerShape, unit_specs
from strategies.models.unit_model import UnitModel

SHAPE = TransformerShape(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=256, sequence=16)
TIED = TransformerShape(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=4,
    ffn=24,
    vocab=256,
    sequence=16,
    norm="layernorm",
    activation="gelu",
    position="learned",
    tie_embeddings=True,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning 2.6.6 itself uses what torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def batch_of(size=2, sequence=16, seed=0):
    ids = torch.randint(256, (size, sequence + 1), generator=torch.Generator().manual_seed(seed))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def with_logs(model):
    logged = {}
    model.log = lambda name, value, **options: logged.__setitem__(name, (float(value), options))
    return logged


def trainer(tmp_path, **options):
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(**{**defaults, **options})


def test_the_units_have_the_names_and_the_order_of_their_specs():
    model = LanguageModel(SHAPE)
    units = model.pipeline_units()
    assert [name for name, _ in units] == [spec.name for spec in unit_specs(SHAPE)]
    assert all(model.get_submodule(name) is unit for name, unit in units)
    costs = model.unit_costs()
    assert len(costs) == len(units)
    assert min(costs) > 0


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_a_pipeline_by_hand_gives_the_steps_loss_and_gradients(shape):
    model, other = LanguageModel(shape).double(), LanguageModel(shape).double()
    logs, other_logs = with_logs(model), with_logs(other)
    batch = batch_of()
    loss = model.training_step(batch, 0)
    loss.backward()
    tensors = other.pipeline_inputs(batch)
    stages = []
    for _, unit in other.pipeline_units():
        # Detached, as if the tensors had travelled.
        received = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors)
        tensors = (unit(*received),)
        stages.append((received, tensors))
    logits = tuple(t.detach().requires_grad_() for t in tensors)
    result = other.pipeline_result(logits, batch, 0, "train")
    result.backward()
    gradients = tuple(t.grad for t in logits)
    for received, sent in reversed(stages):
        torch.autograd.backward(sent, gradients)
        gradients = tuple(t.grad for t in received)
    assert torch.equal(result, loss)
    assert logs == other_logs
    for (name, one), (_, two) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert one.grad is not None, name
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-15)


def test_each_mode_logs_its_own_loss_and_predict_gives_log_probabilities():
    model = LanguageModel(SHAPE)
    logged = with_logs(model)
    batch = batch_of()
    loss = model.training_step(batch, 0)
    assert torch.equal(model.validation_step(batch, 0), loss)
    assert torch.equal(model.test_step(batch, 0), loss)
    assert {name: value for name, (value, _) in logged.items()} == {
        "train_loss": loss.item(),
        "val_loss": loss.item(),
        "test_loss": loss.item(),
    }
    assert all(options["batch_size"] == 2 for _, options in logged.values())
    scores = model.predict_step(batch, 0)
    assert scores.shape == (2, 16)
    torch.testing.assert_close(-scores.mean(), loss)
    best = model.predict_step({"tokens": batch["tokens"]}, 0)
    assert torch.equal(best, model(batch["tokens"]).argmax(-1))


def test_the_loss_is_the_mean_over_the_targets_that_are_not_masked():
    module, batch = LanguageModel(SHAPE), batch_of(3)
    logged = with_logs(module)
    lengths = torch.tensor([[1], [3], [16]])
    batch["targets"] = batch["targets"].masked_fill(lengths <= torch.arange(16), -100)
    logits = module(batch["tokens"]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten())
    assert module.loss_weight(batch) == 20
    torch.testing.assert_close(module.training_step(batch, 0), expected)
    assert logged["train_loss"][0] == pytest.approx(expected.item())
    batch["targets"] = torch.full_like(batch["targets"], -100)
    assert module.training_step(batch, 0) == 0, "A microbatch may be padding alone."


def test_building_leaves_the_global_generator_alone_and_the_seed_decides():
    state = torch.get_rng_state()
    one, two, three = LanguageModel(SHAPE), LanguageModel(SHAPE), LanguageModel(SHAPE, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    one, two, three = (dict(model.named_parameters()) for model in (one, two, three))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["net.head.projection.weight"], three["net.head.projection.weight"])


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_units_built_one_by_one_from_meta_have_the_weights_of_the_whole_model(shape):
    whole = LanguageModel(shape, seed=3)
    with torch.device("meta"):
        parts = LanguageModel(shape, seed=3)
    assert all(parameter.is_meta for parameter in parts.parameters())
    names = [name for name, _ in parts.pipeline_units()]
    parts.initialise_unit(names[-1])  # a rank that holds the head alone
    assert parts.net.embedding.tokens.weight.is_meta
    assert torch.equal(parts.net.head.projection.weight, whole.net.head.projection.weight)
    for name in reversed(names[:-1]):
        parts.initialise_unit(name)
    expected = whole.state_dict()
    assert list(parts.state_dict()) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in parts.state_dict().items())
    tied = parts.net.head.projection.weight is parts.net.embedding.tokens.weight
    assert tied == shape.tie_embeddings


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_the_pipelines_own_cut_gets_every_weight_of_the_whole_model(shape):
    whole = LanguageModel(shape, seed=3)
    expected, held = whole.state_dict(), {}
    stages = [range(2), range(2, 5), range(5, 6)]
    for rank in range(2):
        with torch.device("meta"):
            part = LanguageModel(shape, seed=3)
        owned = [0, 2] if rank == 0 else [1]  # the first rank has both ends, as in a V placement
        UnitModel(part).cut(stages, owned)
        assert len(part.pipeline_units()) == shape.num_units
        held |= part.state_dict()
        if rank == 0:
            tied = part.net.head.projection.weight is part.net.embedding.tokens.weight
            assert tied == shape.tie_embeddings
    assert held.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in held.items())


def test_training_learns_and_the_learning_rate_follows_warmup_and_cosine(tmp_path):
    class Recorder(pl.Callback):
        def __init__(self):
            self.losses, self.rates = [], []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.losses.append(float(outputs["loss"]))

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.rates.append(optimizer.param_groups[0]["lr"])

    shape = TransformerShape(
        layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=256, sequence=32
    )
    options = OptimizerConfig(lr=1e-2, warmup_steps=4, min_lr_ratio=0.0)
    model = LanguageModel(shape, optimizer=options)
    data = TextDataModule(sequence=32, batch_size=16, vocab=256)
    recorder = Recorder()
    run = trainer(tmp_path, max_steps=30, limit_val_batches=2, callbacks=[recorder])
    run.fit(model, data)
    assert math.isclose(recorder.losses[0], math.log(256), abs_tol=0.4)
    assert sum(recorder.losses[-5:]) / 5 < 3.6
    assert recorder.rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert recorder.rates[17] == pytest.approx(0.005)
    assert recorder.rates == recorder.rates[:4] + sorted(recorder.rates[4:], reverse=True)


def test_the_perplexity_is_that_of_the_mean_loss_over_all_batches(tmp_path):
    model = LanguageModel(SHAPE)
    data = TextDataModule(sequence=16, batch_size=4)
    run = trainer(tmp_path, limit_val_batches=3)
    (metrics,) = run.validate(model, data, verbose=False)
    data.setup("validate")
    with_logs(model)
    batches = [batch for _, batch in zip(range(3), data.val_dataloader(), strict=False)]
    mean = sum(model.validation_step(batch, 0).item() for batch in batches) / 3
    assert metrics["val_loss"] == pytest.approx(mean, rel=1e-6)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)


def test_predicting_and_testing_run_under_a_trainer(tmp_path):
    model = LanguageModel(SHAPE)
    data = TextDataModule(sequence=16, batch_size=4)
    run = trainer(tmp_path, limit_predict_batches=2, limit_test_batches=2)
    predictions = run.predict(model, data)
    assert [tuple(scores.shape) for scores in predictions] == [(4, 16), (4, 16)]
    (metrics,) = run.test(model, data, verbose=False)
    assert metrics["test_loss"] == pytest.approx(-torch.stack(predictions).mean().item(), rel=1e-5)


def test_generating_leaves_the_mode_and_the_global_generator_alone():
    shape = TransformerShape(
        layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=256, sequence=8, dropout=0.5
    )
    model = LanguageModel(shape)
    state = torch.get_rng_state()
    first, second = model.generate([1, 2, 3], 10), model.generate(torch.tensor([1, 2, 3]), 10)
    assert torch.equal(first, second)
    assert first.shape == (13,)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
