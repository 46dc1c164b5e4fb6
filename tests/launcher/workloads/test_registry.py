from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from launcher.workloads import registry
from launcher.workloads.registry import DATA, MODELS, find, load, names
from strategies.errors import DataError, ModelError


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A distribution of somebody else's, found the way installed ones are."""
    (tmp_path / "their_package.py").write_text(
        "def model(**options): return ('model', options)\nnumber = 3\n"
    )
    (tmp_path / "their_broken_package.py").write_text("raise RuntimeError('no such device')\n")

    def install(project, **groups):
        folder = tmp_path / f"{project}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[foldpipe.{group}]", *(f"{k} = {v}" for k, v in entries.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def test_a_model_of_another_distribution_is_loaded_by_its_name(installed):
    installed(
        "theirs", models={"mixer": "their_package:model"}, data={"web": "their_package:model"}
    )
    assert names(MODELS) == ("hf", "mixer", "transformer")
    assert names(DATA) == ("text", "web")
    assert find(MODELS, "mixer").value == "their_package:model"
    assert "their_package" not in sys.modules
    assert load(MODELS, "mixer")(width=3) == ("model", {"width": 3})
    del sys.modules["their_package"]


def test_a_misspelt_name_names_the_nearest_ones(installed):
    installed("theirs", models={"mixer": "their_package:model"})
    with pytest.raises(ModelError, match=r"model=mixr is unknown\. Did you mean model=mixer\?"):
        find(MODELS, "mixr", also=("tiny", "small"))
    with pytest.raises(
        ModelError, match=r"Did you mean model=tiny\?.*Known: hf, mixer, small, tiny, "
    ):
        load(MODELS, "tinny", also=("tiny", "small"))
    with pytest.raises(DataError, match=r"data=mixer is unknown\. Known: text\."):
        find(DATA, "mixer")


def test_what_cannot_be_used_is_named_with_its_place(installed):
    installed(
        "theirs",
        models={
            "absent": "their_absent_package:model",
            "broken": "their_broken_package:model",
            "number": "their_package:number",
        },
    )
    with pytest.raises(ModelError, match=r"their_absent_package:model.*ModuleNotFoundError"):
        load(MODELS, "absent")
    with pytest.raises(ModelError, match=r"their_broken_package:model.*no such device"):
        load(MODELS, "broken")
    with pytest.raises(ModelError, match="an object of type int, but must be a class or function"):
        load(MODELS, "number")


def test_two_distributions_with_one_name_are_refused_but_not_the_same_one_twice(installed):
    installed("one", models={"mixer": "their_package:model"})
    installed("one_again", models={"mixer": "their_package:model"})
    assert find(MODELS, "mixer").value == "their_package:model"
    installed("two", models={"mixer": "their_package:number"})
    with pytest.raises(
        ModelError, match=r"ambiguous.*their_package:model and their_package:number"
    ):
        find(MODELS, "mixer")


def test_the_built_in_names_cannot_be_taken_over_and_lead_to_the_real_classes(installed):
    from launcher.workloads.data.module import TextDataModule
    from launcher.workloads.language_model import LanguageModel

    installed("theirs", models={"transformer": "their_package:model"})
    assert load(MODELS, "transformer") is LanguageModel
    assert load(DATA, "text") is TextDataModule
    assert isinstance(registry.find(DATA, "text"), EntryPoint)


def test_looking_names_up_needs_no_torch():
    script = (
        "import sys; from launcher.workloads.registry import find; "
        "from launcher.workloads import transformer_shape; "
        "from launcher.workloads.data import source, tokens; "
        "find('foldpipe.models', 'transformer'); "
        "source.check_source(source.DEFAULT_SOURCE, sequence=8); "
        "print([m for m in ('torch', 'lightning', 'hydra', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
