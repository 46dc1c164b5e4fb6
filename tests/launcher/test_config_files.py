"""Option files of a user's --config-dir: what works, and every way in which one can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import launcher
from launcher.compose import session
from launcher.compose.session import compose_whole, hydra_session, search_path
from launcher.compose.user_files import MAX_NODES, read_yaml
from strategies.errors import PlanError
from tests.launcher.command_line import run_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mine"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_partial_model_file_takes_the_other_keys_from_the_schema(folder, tmp_path, monkeypatch):
    write(folder, "model/mine.yaml", "name: mine\nhidden: 64\n")
    words = ["--config-dir", str(folder), "model=mine", "model.layers=3", "mode=simulate"]
    done = run_here(words, tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")
    model = done.calls[0].config.model
    assert (model.name, model.hidden, model.layers, model.heads) == ("mine", 64, 3, 4)


def test_an_experiment_sets_keys_of_all_groups_and_its_folder(folder, tmp_path, monkeypatch):
    write(
        folder,
        "experiment/deep.yaml",
        "# @package _global_\ndefaults:\n  - override /schedule: gpipe\n  - override /model: deep\n"
        "pp: 2\nseed: ${pp}\nhydra:\n  run:\n    dir: here/${schedule.name}\n",
    )
    write(folder, "model/deep.yaml", "name: deep\nlayers: 8\n")
    words = ["-cd", str(folder), "experiment=deep", "mode=simulate"]
    done = run_here(words, tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")
    config, run_dir = done.calls[0]
    assert (config.schedule.name, config.pp, config.seed) == ("gpipe", 2, 2)
    assert (config.model.layers, config.experiment_name) == (8, "deep")
    assert run_dir == tmp_path / "here" / "gpipe"


def test_what_a_file_says_now_counts_and_a_composed_configuration_changes_no_other(
    folder, tmp_path
):
    with hydra_session():
        words = [*search_path(folder), "model=mine"]
        for layers in (2, 3, 5):
            for hidden in (64, 128):
                write(folder, "model/mine.yaml", f"name: mine\nlayers: {layers}\n")
                config, composed = compose_whole([*words, f"model.hidden={hidden}"])
                assert (config.model.layers, config.model.hidden) == (layers, hidden)
                composed.model.layers = composed.model.ffn = 7
        write(folder, "model/mine.yaml", "defaults: [small]\nname: mine\n")
        kept = compose_whole(words)[0]
        # As the first composition of a process, which reads and merges all of it.
        session._kept.cache_clear()
        assert compose_whole(words)[0] == kept
        (folder / "model" / "mine.yaml").unlink()
        with pytest.raises(PlanError, match="mine"):
            compose_whole(words)


def test_files_that_are_not_chosen_are_not_read(folder, tmp_path, monkeypatch):
    write(folder, "model/broken.yaml", "a: [\n")
    write(folder, "notes/plan.yaml", "[")
    done = run_here(["-cd", str(folder), "mode=simulate"], tmp_path, monkeypatch)
    assert done.code == 0


def test_a_folder_with_blanks_and_quotes_in_its_name_works(tmp_path, monkeypatch):
    folder = tmp_path / "it's my, folder"
    write(folder, "model/mine.yaml", "name: mine\n")
    done = run_here(["-cd", str(folder), "model=mine", "mode=simulate"], tmp_path, monkeypatch)
    assert (done.code, done.errors) == (0, "")


BOMB = "\n".join(
    ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
    + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 8)]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hiden: 64\n", ":1: model.hiden is not a key. Did you mean model.hidden"),
        ("name: m\n\nhidden: wide\n", ":3: model.hidden=wide: expected a whole number"),
        ("name: m\nhidden: 64\nhidden: 65\n", ":3: the key hidden is there twice, first in line 2"),
        ("name: [m\n", ":2:1: "),
        ("name: m\n\thidden: 3\n", ":2:"),
        ("a: *b\n", "b"),
        ("a: &a [*a]\n", "contains itself"),
        (BOMB, f"more than {MAX_NODES} values"),
        ("a: " + "[" * 500 + "]" * 500, "nested deeper"),
        ("# " + "x" * 70_000, "bytes"),
        ("- 1\n- 2\n", "expected `key: value` lines, found a list"),
        ("3: 4\n", "is not a text"),
        ("name: m\n---\nname: n\n", "another document"),
        ("name: !!python/object/apply:os.system [ls]\n", "python/object"),
        ("_target_: os.system\n", ":1: _target_ would run code"),
        ("norm:\n  _target_: os.system\n", ":2: _target_ would run code"),
        ("name: m\napi_key: x\n", "api_key looks like the name of a credential"),
        ("name: 0123456789abcdef0123456789abcdef01234567\n", "looks like a credential"),
        ("name: ${oc.env:MY_TOKEN}\n", "reads a credential"),
        ("name: ${nope}\n", "nope"),
        ("# @package hydra\nrun: {dir: x}\n", "# @package hydra is not supported"),
        (
            "# @package _global_\nhydra: {job_logging: {root: {handlers: [a]}}}\n",
            "hydra.job_loggin",
        ),
        ("defaults: [tinny]\n", "Did you mean model=tiny"),
        ("defaults:\n  - override hydra/launcher: joblib\n", "override /hydra/launcher: joblib"),
        ("defaults:\n  - override /hydra/launcher: joblib\n", "no group hydra/launcher"),
        ("defaults:\n  - override /schedul: gpipe\n", "Did you mean /schedule?"),
        ("defaults: 3\n", "must be a list"),
        ("defaults: [[3]]\n", "write e.g."),
        ("defaults: [{override /schedule: ../../x}]\n", "does not exist"),
        ("hidden: ???\n", "expected a whole number"),
        ("hidden: ${pp\n", ":1: ${pp: ${ begins what another key holds, and nothing closes it."),
        (
            "# @package _global_\ntrainer.max_steps: 3\n",
            "`max_steps: ...` indented below `trainer:`",
        ),
        ("hidden: 12:30\n", ":1: YAML reads 12:30 as 750. Write '12:30' in quotes for a text"),
        ("hidden: 010\n", ":1: YAML reads 010 as 8."),
        ("model:\n  hidden: 64\n", ":1: a file of model/ has keys of model alone."),
        ("# @package _global_\nschedule: gpipe\n", ":2: `schedule: gpipe` chooses no option here"),
        ("name:\tm\n", ":1:6: a tab, where YAML takes blanks only"),
        ("name: !!timestamp hello\n", ":1: the tag timestamp is not read, only !!str"),
        ("tie_embeddings: !!bool maybe\n", "'maybe' does not fit its tag"),
        ("hidden: 0x" + "f" * 5000, ":1: a number of 5002 characters"),
        ("\ufeff# @package _global_\npp: 2\n", "a byte order mark stands before its first line"),
        ("# @package _global_\nuser: {a: [{1: 3}]}\n", "the key 1 is not a text"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(text, expected, folder, tmp_path, monkeypatch):
    file = write(folder, "model/bad.yaml", text)
    words = ["--config-dir", str(folder), "model=bad"]
    done = run_here(words, tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert expected in done.errors
    if "${nope}" not in text:
        assert str(file) in done.errors


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("a: [\n", "Correct the YAML there."),
        ("- 1\n", "Write each key in a line of its own, as in `lr: 3e-4`."),
        ("3: 4\n", "Write it in quotes."),
        ("a: 1\na: 2\n", "Remove one."),
        ("a: 12:30\n", "Write '12:30' in quotes for a text, or the number that is meant."),
        ("a: ${pp\n", "Write ${pp}, say, or \\${ for the characters."),
        ("a: !!timestamp b\n", "Write the value without it."),
        (BOMB, "Use fewer aliases."),
    ],
)
def test_what_is_wrong_in_a_file_has_its_fix_apart(text, fix, tmp_path):
    with pytest.raises(PlanError) as error:
        read_yaml(write(tmp_path, "a.yaml", text))
    assert error.value.fix == fix
    assert str(error.value) == f"{error.value.reason} {fix}"


def test_bytes_that_are_not_utf8_are_told(folder, tmp_path, monkeypatch):
    write(folder, "model/bad.yaml", "").write_bytes(b"name: \xff\n")
    done = run_here(["-cd", str(folder), "model=bad"], tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert "not UTF-8 at byte 6" in done.errors


def test_an_experiment_without_its_header_is_told_what_is_missing(folder, tmp_path, monkeypatch):
    write(folder, "experiment/e.yaml", "pp: 2\n")
    done = run_here(["-cd", str(folder), "experiment=e"], tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert "# @package _global_" in done.errors


def test_an_experiment_cannot_bring_in_keys(folder, tmp_path, monkeypatch):
    write(folder, "experiment/e.yaml", "# @package _global_\npp: 2\ntrainer:\n  devices: 4\n")
    done = run_here(["-cd", str(folder), "experiment=e"], tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert "e.yaml:4: trainer.devices is not a key" in done.errors


def test_an_option_in_the_wrong_place_is_found(folder, tmp_path, monkeypatch):
    fixes = {
        "mine.yaml": (folder, "Move it to {}/model/mine.yaml."),
        "models/mine.yaml": (folder, "Move it to {}/model/mine.yaml."),
        "model/mine.yml": (folder, "Move it to {}/model/mine.yaml."),
        "model/mine.yaml": (folder / "model", "Try --config-dir {}."),
    }
    for number, (name, (given, fix)) in enumerate(fixes.items()):
        file = write(folder, name, "name: mine\n")
        words = ["-cd", str(given), "model=mine"]
        done = run_here(words, tmp_path / str(number), monkeypatch)
        done.assert_refused()
        assert f"{file} is not where options of model are" in done.errors
        assert fix.format(folder) in done.errors
        file.unlink()


def test_a_file_that_would_be_ignored_is_refused(folder, tmp_path, monkeypatch):
    write(folder, "model/tiny.yaml", "name: tiny\n")
    done = run_here(["-cd", str(folder)], tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert "Rename the file, e.g. model/my_tiny.yaml" in done.errors
    (folder / "model" / "tiny.yaml").unlink()
    whole = write(folder, "config.yaml", "# mine\npp: 2\nmodel:\n  layers: 3\n")
    done = run_here(["-cd", str(folder)], tmp_path / "cwd", monkeypatch)
    done.assert_refused()
    assert f"{whole} is no option, and would not be read" in done.errors
    whole.write_text("services: {}\npp: 2\n")  # somebody else's
    assert run_here(["-cd", str(folder), "pp=2"], tmp_path / "cwd", monkeypatch).code == 0


def test_aliases_within_the_limit_are_written_out(tmp_path):
    file = write(tmp_path, "a.yaml", "a: &a [1, 2]\nb: *a\nc: {<<: {d: 1}}\n")
    assert read_yaml(file)["b"] == [1, 2]


def test_a_missing_file_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")


WORDS = [
    "1",
    "-1",
    "+1",
    "1_000",
    "07",
    "0x1f",
    "1.",
    ".5",
    "-.5",
    "1.5",
    "1.5e3",
    "1.5e-3",
    "1.5E+3",
    "3e-4",
    "3E4",
    "+3e4",
    "-3e-4",
    "9.89e14",
    "1_0e3",
    "1e",
    "1e+",
    "e3",
    "1e3x",
    "1.e3",
    ".5e3",
    ".5e-3",
    ".inf",
    "-.Inf",
    ".nan",
    "2026-11-22",
    "2026-11-22T10:00:00",
    "yes",
    "No",
    "true",
    "null",
    "~",
    "1.2.3",
    "0b11",
    "1e400",
    "3e-4.5",
    "--1",
    "+-1",
    "1__0",
]


def test_every_scalar_is_read_as_hydra_reads_it(tmp_path):
    file = tmp_path / "words.yaml"
    file.write_text("".join(f"w{i}: {word}\n" for i, word in enumerate(WORDS)))
    expected = OmegaConf.to_container(OmegaConf.load(file))
    # By their text: what is not a number is unequal to itself.
    assert [repr(v) for v in read_yaml(file).values()] == [repr(v) for v in expected.values()]


@pytest.mark.parametrize(
    "group", ["hardware", "optimizer", pytest.param("model", marks=pytest.mark.full)]
)
def test_a_copy_of_every_file_of_ours_is_accepted_as_ones_own(group, tmp_path, monkeypatch):
    for ours in sorted((Path(launcher.__file__).parents[1] / "conf" / group).glob("*.yaml")):
        own = tmp_path / "cfg" / group / f"my_{ours.name}"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(ours.read_text())
        words = ["--config-dir", str(tmp_path / "cfg"), f"{group}=my_{ours.stem}", "mode=simulate"]
        done = run_here(words, tmp_path / "run", monkeypatch)
        assert done.code == 0, done.errors
