"""A package of somebody else brings a model, a data module and a schedule by entry points."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

from strategies import schedules
from strategies.runtime.lightning.checkpoints.stock_file import load_checkpoint
from tests.launcher.command_line import launch_here
from tests.launcher.runs import Finished
from tests.launcher.runs import launch as launch_from

PACKAGE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x * 2), batch_size=self.batch_size)


def build_model(config):
    return Net(config.seed)


def build_data(config, batch_size):
    return Data(batch_size)
"""

SCHEDULE = '''
from strategies.ir.instruction import backward, forward
from strategies.schedules import register_schedule


@register_schedule("mine_first")
def order(shape):
    """All forwards, then the backwards from the last microbatch to the first."""
    microbatches = range(shape.num_microbatches)
    return tuple(
        tuple(
            [forward(rank, m) for m in microbatches]
            + [backward(rank, m) for m in microbatches[::-1]]
        )
        for rank in range(shape.pp)
    )
'''


# Every way in which an order can be wrong, and two ways of offering one without the decorator.
MORE_SCHEDULES = """
from strategies.ir.instruction import backward, forward
from strategies.ir.program import Placement
from strategies.schedules import Schedule, register_schedule


def plain(shape):
    microbatches = range(shape.num_microbatches)
    return [
        [make(rank, m) for m in microbatches for make in (forward, backward)]
        for rank in range(shape.pp)
    ]


@register_schedule("mine_upside_down", placement=lambda shape: Placement("own", 2, ((1, 0),)))
def upside_down(shape):
    return tuple(plain(shape)[::-1])


@register_schedule("mine_stuck")
def stuck(shape):
    first, second = plain(shape)
    return tuple(first), (second[1], second[0], *second[2:])


@register_schedule("mine_twice")
def twice(shape):
    return tuple((*row, row[0]) for row in plain(shape))


@register_schedule("mine_words")
def words(shape):
    return tuple(tuple(map(str, row)) for row in plain(shape))


@register_schedule("mine_nothing")
def nothing(shape):
    return None


entry = Schedule("under another name", lambda shape: tuple(map(tuple, plain(shape))))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "my_parts.py").write_text(PACKAGE)
    (folder / "my_order.py").write_text(SCHEDULE)
    (folder / "my_orders.py").write_text(MORE_SCHEDULES)
    names = ("mine_upside_down", "mine_stuck", "mine_twice", "mine_words", "mine_nothing")
    more = "".join(f"{name} = my_orders\n" for name in names)
    more += "mine_plain = my_orders:plain\nmine_entry = my_orders:entry\n"
    more += "mine_gone = my_orders:gone\n"
    info = folder / "my_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[foldpipe.models]\nmy_net = my_parts:build_model\n"
        "[foldpipe.data]\nmy_data = my_parts:build_data\n"
        f"[foldpipe.schedules]\nmine_first = my_order\n{more}"
    )
    return folder


@pytest.fixture
def here(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Finished]]:
    """Runs a request in this process, which forgets what the package has registered."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(schedules, "SCHEDULES", dict(schedules.SCHEDULES))

    def run(*words: str) -> Finished:
        return launch_here((*words, f"hydra.run.dir={tmp_path / 'run'}"), tmp_path)

    yield run
    for name in ("my_parts", "my_order", "my_orders"):
        sys.modules.pop(name, None)


def launch(site: Path, folder: Path, *words: str) -> Finished:
    """From the package's own folder, which ranks that are forked then find, too."""
    return launch_from((*words, f"hydra.run.dir={folder}"), site)


def test_a_schedule_of_a_package_is_simulated(here) -> None:
    words = ("mode=simulate", "costs=uniform", "schedule=mine_first", "pp=2", "num_microbatches=3")
    result = here(*words).assert_done().result
    assert (result["schedule"], result["makespan"]) == ("mine_first", 12.0)


@pytest.mark.parametrize("name", ["mine_plain", "mine_entry", "mine_upside_down"])
def test_an_entry_point_may_be_a_function_an_entry_or_a_module(name: str, here) -> None:
    words = ("mode=simulate", "costs=uniform", f"schedule={name}", "pp=2", "num_microbatches=3")
    done = here(*words).assert_done()
    assert (done.result["schedule"], done.result["makespan"]) == (name, 18.0)
    text = (done.folder / "schedule.csv").read_text()
    assert text.startswith("1F0,1B0" if name == "mine_upside_down" else "0F0,0B0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "mine_stuck",
            "mine_stuck: 1B0 on rank 1 stands before 1F0, which it needs: the program deadlocks.\n"
            "rank 0 | 0F0 [0B0] 0F1 0B1  <-- waits for step 1B0\n"
            "rank 1 | [1B0] 1F0 1F1 1B1  <-- waits for step 1F0\n",
        ),
        ("mine_twice", "mine_twice: 0F0 stands a second time on rank 0. Every"),
        ("mine_words", "mine_words: rank 0 has '0F0', which is no Instruction. Make them with"),
        ("mine_nothing", "mine_nothing: its order is no list of instructions per rank. Return a"),
        ("mine_gone", "schedule=mine_gone is offered by an installed package as my_orders:gone,"),
    ],
)
def test_a_wrong_order_of_a_package_is_refused(name: str, expected: str, here) -> None:
    done = here("mode=validate", f"schedule={name}", "pp=2", "num_microbatches=2")
    assert done.code == 2
    assert done.errors.startswith(f"error: {expected}")
    assert list(done.cwd.iterdir()) == []


def test_an_own_placement_for_other_ranks_is_refused(here) -> None:
    done = here("mode=simulate", "schedule=mine_upside_down", "pp=3")
    assert done.code == 2
    assert done.errors == (
        "error: schedule=mine_upside_down places its stages on 2 ranks, but pp=3. Try pp=2.\n"
    )


OWN = ("model=my_net", "data=my_data", "trainer.limit_val_batches=0", "data.microbatch_size=2")


@pytest.fixture(scope="module")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = launch(site, folder, *OWN, "schedule=mine_first", "pp=2", "trainer.max_steps=6")
    assert done.code == 0, done.errors
    return folder


@pytest.mark.distributed
@pytest.mark.full
def test_the_weights_of_a_package_s_model_are_exported_as_a_file(
    site: Path, trained: Path, tmp_path: Path
) -> None:
    saved = json.loads((trained / "result.json").read_text())["checkpoint"]
    weights = load_checkpoint(saved)["state_dict"]
    words = (*OWN, "mode=export", f"checkpoint={saved}")
    done = launch(site, tmp_path / "run", *words)
    assert done.code == 0, done.errors
    target = tmp_path / "run" / "export.safetensors"
    assert f"for any program: {target}" in done.output
    found = load_file(target)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    again = launch(site, tmp_path / "again", *words, f"export.path={target}")
    assert again.code == 2
    assert "exists and is never overwritten" in again.errors
    wrong = launch(site, tmp_path / "wrong", *words, "export.format=huggingface")
    assert wrong.code == 2
    assert "Try export.format=safetensors" in wrong.errors


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers|logging interval).*")
def test_files_of_stock_lightning_come_out_and_go_in(
    site: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    import my_parts

    saved = json.loads((trained / "result.json").read_text())["checkpoint"]
    stock = tmp_path / "exported.ckpt"
    done = launch(site, tmp_path / "out", *OWN, "mode=export", f"checkpoint={saved}",
                  f"export.path={stock}")  # fmt: skip
    assert done.code == 0, done.errors
    assert f"for stock Lightning: {stock}" in done.output
    model, data = my_parts.Net(3), my_parts.Data(8)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=9, logger=False, enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    weights = load_checkpoint(saved)["state_dict"]
    model.load_state_dict(torch.load(stock, weights_only=True)["state_dict"])
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    steps = trainer.global_step
    resumed = launch(
        site, tmp_path / "in", *OWN, "pp=2", f"trainer.resume={tmp_path / 'stock.ckpt'}",
        f"trainer.max_steps={steps + 2}",
    )  # fmt: skip
    assert resumed.code == 0, resumed.errors
    assert json.loads((tmp_path / "in" / "result.json").read_text())["steps"] == steps + 2
    last = launch(site, tmp_path / "last", *OWN, "mode=export", "export.format=safetensors",
                  f"checkpoint={tmp_path / 'stock.ckpt'}")  # fmt: skip
    assert last.code == 0, last.errors
    found = load_file(tmp_path / "last" / "export.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.distributed
def test_model_data_and_schedule_of_a_package_train(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    assert result["steps"] == 6
    assert result["num_parameters"] == 4 * (8 * 8 + 8)
    assert result["loss_last"] < result["loss_first"]
    assert result["measured_bubble_ratio"] > 0


def test_an_unknown_name_is_refused_with_the_installed_ones(here) -> None:
    done = here("model=my_nett")
    assert done.code == 2
    assert "model=my_net" in done.errors
    assert "Traceback" not in done.errors
